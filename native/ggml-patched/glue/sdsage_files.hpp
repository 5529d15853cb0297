// Checks on the model files that the user named: upstream warns and goes on, or lists hundreds of missing tensors.
#pragma once

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "model.h"
#include "sdsage_seam.hpp"
#include "stable-diffusion.h"
#include "util.h"

namespace sdsage {

struct Slot {
    const char * flag;  // option of the command line
    const char * path;
    const char * what;
};

inline std::vector<Slot> named_slots(const sd_ctx_params_t & p) {
    const Slot all[] = {
        { "--model", p.model_path, "model" },
        { "--diffusion-model", p.diffusion_model_path, "diffusion model" },
        { "--high-noise-diffusion-model", p.high_noise_diffusion_model_path, "high-noise diffusion model" },
        { "--clip_l", p.clip_l_path, "CLIP-L text encoder" },
        { "--clip_g", p.clip_g_path, "CLIP-G text encoder" },
        { "--clip_vision", p.clip_vision_path, "CLIP vision encoder" },
        { "--t5xxl", p.t5xxl_path, "T5 text encoder" },
        { "--llm", p.llm_path, "LLM text encoder" },
        { "--llm_vision", p.llm_vision_path, "LLM vision encoder" },
        { "--vae", p.vae_path, "VAE" },
        { "--taesd", p.taesd_path, "tiny autoencoder" },
    };
    std::vector<Slot> named;
    for (const Slot & s : all) {
        if (s.path != nullptr && s.path[0] != '\0') {
            named.push_back(s);
        }
    }
    return named;
}

// For each slot the index of its file in the loader (a folder in diffusers layout counts as its first file); -1 if it did
// not load. The loader takes files in the order of the slots, so one file in two slots has two indexes.
inline std::vector<int> slot_files(const std::vector<Slot> & slots, const std::vector<std::string> & files) {
    std::vector<int> found;
    std::vector<bool> taken(files.size(), false);
    for (const Slot & s : slots) {
        const std::string folder = std::string(s.path) + "/";
        found.push_back(-1);
        for (size_t i = 0; i < files.size(); i++) {
            if (!taken[i] && (files[i] == s.path || files[i].compare(0, folder.size(), folder) == 0)) {
                taken[i]     = true;
                found.back() = static_cast<int>(i);
                break;
            }
        }
    }
    return found;
}

inline std::string shape_text(const int64_t * ne) {
    std::string s = "[";
    for (int i = 0; i < 4; i++) {
        s += (i ? ", " : "") + std::to_string(ne[i]);
    }
    return s + "]";
}

// Every tensor lies inside its file, and there is one at all.
template <class Loader>
bool check_whole(Loader & loader) {
    const auto & files = loader.file_paths();
    std::vector<uint64_t> sizes;
    for (const std::string & f : files) {
        std::error_code ec;
        const auto n = std::filesystem::file_size(file_name(f), ec);
        sizes.push_back(ec ? 0 : static_cast<uint64_t>(n));
    }
    const auto & map = loader.get_tensor_storage_map();
    for (const auto & [name, t] : map) {
        if (t.index_in_zip < 0 && t.offset + static_cast<uint64_t>(t.nbytes_to_read()) > sizes[t.file_index]) {
            reject(sd_format("'%s' is truncated: tensor '%s' ends at byte %llu, the file has %llu; fetch the file again",
                             files[t.file_index].c_str(), name.c_str(), (unsigned long long)(t.offset + t.nbytes_to_read()),
                             (unsigned long long)sizes[t.file_index]));
            return false;
        }
    }
    if (map.empty()) {
        reject(sd_format("'%s' holds no tensors: it is damaged or not a model", files.empty() ? "" : files.front().c_str()));
        return false;
    }
    return true;
}

// Every named embedding is one: a few rows, as wide as the tokens of a CLIP text encoder that is there.
template <class Loader>
bool check_embeddings(const sd_ctx_params_t & params, Loader & model) {
    constexpr int64_t prompt_tokens = 77;
    std::set<int64_t> widths;
    for (const auto & [name, t] : model.get_tensor_storage_map()) {
        if (ends_with(name, "token_embedding.weight")) {
            widths.insert(t.ne[0]);
        }
    }
    for (uint32_t i = 0; i < params.embedding_count; i++) {
        const std::string named =
            sd_format("embedding '%s' ('%s')", SAFE_STR(params.embeddings[i].name), SAFE_STR(params.embeddings[i].path));
        Loader file;
        if (!file.init_from_file_and_convert_name(SAFE_STR(params.embeddings[i].path))) {
            reject(named + " can't be read: the file is missing, damaged or of an unknown format");
            return false;
        }
        if (!check_whole(file)) {
            return false;
        }
        bool fits = false;
        for (const auto & [name, t] : file.get_tensor_storage_map()) {
            if (t.n_dims > 2 || t.ne[1] > prompt_tokens) {
                reject(named + " holds a tensor '" + name + "' of " + shape_text(t.ne) + ": it is another kind of file");
                return false;
            }
            fits |= widths.count(t.ne[0]) > 0;
        }
        if (!fits) {
            reject(named + (widths.empty() ? " has no use: this model has no CLIP text encoder" : " was made for another text encoder"));
            return false;
        }
    }
    return true;
}

// A network that is loaded from a file of its own: the file is whole, and holds all of it in its sizes.
template <class Loader>
bool check_network(const Slot & slot, const std::map<std::string, ggml_tensor *> & wanted) {
    Loader file;
    if (!file.init_from_file_and_convert_name(slot.path)) {
        reject(sd_format("%s '%s' can't be read as a %s: the file is missing, damaged or of an unknown format", slot.flag, slot.path,
                         slot.what));
        return false;
    }
    if (!check_whole(file)) {
        return false;
    }
    const auto & map = file.get_tensor_storage_map();
    for (const auto & [name, tensor] : wanted) {
        const auto it = map.find(name);
        if (it == map.end()) {
            reject(sd_format("%s '%s' does not hold tensor '%s' of a %s: it is another kind of file", slot.flag, slot.path, name.c_str(),
                             slot.what));
            return false;
        }
        if (!std::equal(tensor->ne, tensor->ne + 4, it->second.ne)) {
            reject(sd_format("%s '%s' does not fit this model: tensor '%s' is %s, the model needs %s", slot.flag, slot.path, name.c_str(),
                             shape_text(it->second.ne).c_str(), shape_text(tensor->ne).c_str()));
            return false;
        }
    }
    return true;
}

// PhotoMaker's file holds LoRA weights and an encoder of faces.
template <class Loader>
bool check_photo_maker(const sd_ctx_params_t & params) {
    const std::string path = SAFE_STR(params.photo_maker_path);
    if (path.empty()) {
        return true;
    }
    Loader file;
    if (!file.init_from_file_and_convert_name(path, "pmid.")) {
        reject("--photo-maker '" + path + "' can't be read: the file is missing, damaged or of an unknown format");
        return false;
    }
    if (!check_whole(file)) {
        return false;
    }
    for (const auto & [name, t] : file.get_tensor_storage_map()) {
        if (contains(name, "id_encoder.")) {
            return true;
        }
    }
    reject("--photo-maker '" + path + "' holds no encoder of faces: it is another kind of file");
    return false;
}

// After the headers were parsed: every named file is there, whole, and together they are a model we know.
template <class Loader>
bool check_parsed(const sd_ctx_params_t & params, Loader & loader) {
    const auto & files = loader.file_paths();
    const auto slots   = named_slots(params);
    const auto indexes = slot_files(slots, files);
    for (size_t n = 0; n < slots.size(); n++) {
        const Slot & s = slots[n];
        if (indexes[n] < 0) {
            reject(
                sd_format("%s '%s' can't be read as a %s: the file is missing, damaged or of an unknown format", s.flag, s.path, s.what));
            return false;
        }
    }
    if (!check_whole(loader)) {
        return false;
    }
    if (decodes_only()) {
        return true;
    }
    bool has_wan = false, has_text = false;
    for (const auto & [name, t] : loader.get_tensor_storage_map()) {
        has_wan |= starts_with(name, "model.diffusion_model.patch_embedding.");
        has_text |= starts_with(name, "text_encoders.") || starts_with(name, "cond_stage_model.");
    }
    if (loader.get_sd_version() == VERSION_COUNT) {
        const bool whole   = params.model_path != nullptr && params.model_path[0] != '\0';
        const char * given = whole ? params.model_path : SAFE_STR(params.diffusion_model_path);
        reject(sd_format("'%s' is not a diffusion model that this engine knows%s", given,
                         whole ? "; a file that holds only the diffusion model belongs to --diffusion-model" : ""));
        return false;
    }
    if (!has_text) {
        reject(sd_format(
            "no text encoder was given; %s",
            has_wan ? "Wan needs umt5 in --t5xxl" : "give the one that this model needs in --clip_l, --clip_g, --t5xxl or --llm"));
        return false;
    }
    return check_photo_maker<Loader>(params) && check_embeddings(params, loader);
}

// Before the weights are read: each file holds what its slot needs, in the sizes that the model has.
// `wanted` maps the tensor names of the built networks to their tensors.
template <class Loader>
bool check_slots(const sd_ctx_params_t & params, Loader & loader, const std::map<std::string, ggml_tensor *> & wanted,
                 const char * version_name) {
    const auto & map   = loader.get_tensor_storage_map();
    const auto slots   = named_slots(params);
    const auto indexes = slot_files(slots, loader.file_paths());
    for (size_t n = 0; n < slots.size(); n++) {
        const Slot & s = slots[n];
        // upstream decodes with the tiny autoencoder, and leaves the VAE unread
        const bool idle_vae = std::strcmp(s.flag, "--vae") == 0 && SAFE_STR(params.taesd_path)[0] != '\0' && !params.tae_preview_only;
        if (idle_vae) {
            LOG_WARN("--vae '%s' has no effect beside --taesd, which decodes; --taesd-preview-only keeps the VAE for the result", s.path);
        }
        // a vision encoder may stay unread: not every model and job looks at pictures
        const char * vision = std::strcmp(s.flag, "--clip_vision") == 0  ? "vision_model."
                              : std::strcmp(s.flag, "--llm_vision") == 0 ? "patch_embed"
                                                                         : nullptr;
        size_t used         = 0;
        for (const auto & [name, t] : map) {
            if (static_cast<int>(t.file_index) != indexes[n]) {
                continue;
            }
            used += (vision != nullptr && contains(name, vision)) || (idle_vae && contains(name, "decoder."));
            auto it = wanted.find(name);
            if (it == wanted.end()) {
                continue;
            }
            used++;
            if (!std::equal(t.ne, t.ne + 4, it->second->ne)) {
                reject(sd_format("%s '%s' does not fit %s: tensor '%s' is %s, the model needs %s", s.flag, s.path, version_name,
                                 name.c_str(), shape_text(t.ne).c_str(), shape_text(it->second->ne).c_str()));
                return false;
            }
        }
        if (used == 0) {
            reject(sd_format("%s '%s' holds nothing that a %s for %s needs: it is another kind of file", s.flag, s.path, s.what,
                             version_name));
            return false;
        }
    }
    size_t missing = 0;
    std::string first;
    for (const auto & [name, tensor] : wanted) {
        // what upstream itself does not insist on
        if (name.find("alphas_cumprod") != std::string::npos ||
            name.find("cond_stage_model.transformer.text_model.encoder.layers.23") != std::string::npos) {
            continue;
        }
        if (map.find(name) == map.end() && missing++ == 0) {
            first = name;
        }
    }
    if (missing > 0) {
        const bool vae = starts_with(first, "first_stage_model.") || starts_with(first, "tae.");
        reject(sd_format("%zu tensors that %s needs are in none of the files, the first is '%s'%s", missing, version_name, first.c_str(),
                         vae ? "; give the VAE in --vae" : ""));
        return false;
    }
    return true;
}

}  // namespace sdsage
