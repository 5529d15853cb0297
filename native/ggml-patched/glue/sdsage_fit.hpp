// Checks that files which load one by one fit each other: upstream runs into an assertion, or computes without a part.
#pragma once

#include <map>
#include <regex>
#include <string>

#include "sdsage_files.hpp"
#include "sdsage_sizes.hpp"

namespace sdsage {

// "--vae 'path'" for the file that holds a tensor.
inline std::string file_text(const sd_ctx_params_t & params, ModelLoader & loader, const std::string & tensor) {
    const auto slots   = named_slots(params);
    const auto indexes = slot_files(slots, loader.file_paths());
    const auto it      = loader.get_tensor_storage_map().find(tensor);
    for (size_t n = 0; it != loader.get_tensor_storage_map().end() && n < slots.size(); n++) {
        if (indexes[n] == static_cast<int>(it->second.file_index)) {
            return std::string(slots[n].flag) + " '" + slots[n].path + "'";
        }
    }
    return "'" + tensor + "'";
}

// Both experts of Wan take the same latents and the same text.
inline bool check_experts(const sd_ctx_params_t & params, ModelLoader & loader) {
    const auto & map             = loader.get_tensor_storage_map();
    const std::string experts[2] = { "model.diffusion_model.", "model.high_noise_diffusion_model." };
    int64_t sizes[2][3];
    for (int e = 0; e < 2; e++) {
        const int64_t width = file_ne(map, experts[e] + "patch_embedding.bias", 0);
        if (width == 0) {
            return true;
        }
        sizes[e][0] = file_ne(map, experts[e] + "patch_embedding.weight", 3) / width;
        sizes[e][1] = file_ne(map, experts[e] + "head.head.bias", 0) / 4;  // a patch is 1 x 2 x 2
        sizes[e][2] = file_ne(map, experts[e] + "text_embedding.0.weight", 0);
    }
    const char * const what[3] = { "input channels", "output channels", "text features" };
    for (int i = 0; i < 3; i++) {
        if (sizes[0][i] != sizes[1][i]) {
            reject(sd_format("%s and %s are not the two experts of one model: the first has %lld %s, the second %lld",
                             file_text(params, loader, experts[0] + "patch_embedding.bias").c_str(),
                             file_text(params, loader, experts[1] + "patch_embedding.bias").c_str(), (long long)sizes[0][i], what[i],
                             (long long)sizes[1][i]));
            return false;
        }
    }
    return true;
}

// A text encoder gives vectors of the width that the diffusion model takes; true if one of the two is not there.
inline bool check_text_width(const sd_ctx_params_t & params, ModelLoader & loader, const std::string & encoder, const std::string & taker) {
    const auto & map    = loader.get_tensor_storage_map();
    const int64_t given = file_ne(map, encoder, 0), taken = file_ne(map, taker, 0);
    if (given == 0 || taken == 0 || given == taken) {
        return true;
    }
    reject(sd_format("%s does not fit %s: its text features are %lld wide, the model takes %lld",
                     file_text(params, loader, encoder).c_str(), file_text(params, loader, taker).c_str(), (long long)given,
                     (long long)taken));
    return false;
}

// The rules of --tensor-type-rules, before a loader thread meets them. Upstream leaves out one that it can't read.
inline bool check_rules(const char * rules) {
    for (const std::string & item : split_string(SAFE_STR(rules), ',')) {
        if (item.empty()) {
            continue;
        }
        const auto parsed = parse_tensor_type_rules(item);
        if (parsed.empty()) {
            reject("--tensor-type-rules: '" + item + "' can't be used: it takes PATTERN=TYPE with a weight type such as f16 or q8_0");
            return false;
        }
        const std::string & pattern = parsed[0].first;
        try {
            std::regex compiled(pattern);
        } catch (const std::regex_error & e) {
            reject("--tensor-type-rules: '" + pattern + "' is not a regular expression (ECMAScript): " + e.what());
            return false;
        }
    }
    return true;
}

// After the headers were parsed and each file is known to be sound.
inline bool check_fit(const sd_ctx_params_t & params, ModelLoader & loader) {
    const std::string model = "model.diffusion_model.", encoders = "text_encoders.";
    const SDVersion version = loader.get_sd_version();
    if (!check_rules(params.tensor_type_rules) || !check_experts(params, loader)) {
        return false;
    }
    const std::string t5 = encoders + "t5xxl.transformer.shared.weight";
    if (sd_version_is_wan(version)) {
        return check_text_width(params, loader, t5, model + "text_embedding.0.weight");
    }
    if (sd_version_is_flux(version)) {
        return check_text_width(params, loader, t5, model + "txt_in.weight") &&
               check_text_width(params, loader, encoders + "clip_l.transformer.text_model.embeddings.token_embedding.weight",
                                model + "vector_in.in_layer.weight");
    }
    return true;
}

// The tensor of the model that a LoRA's tensor changes: its name lies between "lora." and ".lora_up", say.
inline const ggml_tensor * lora_target(const std::map<std::string, ggml_tensor *> & model, const std::string & name) {
    for (size_t dot = name.rfind('.'); dot != std::string::npos && dot > 5; dot = name.rfind('.', dot - 1)) {
        auto it = model.find(name.substr(5, dot - 5));
        if (it != model.end()) {
            return it->second;
        }
    }
    return nullptr;
}

// A LoRA loads, changes at least one tensor of the model, and has the widths of what it changes. Reads the header alone.
inline bool check_lora(const sd_lora_t & lora, const std::map<std::string, ggml_tensor *> & model, SDVersion version,
                       const char * version_name, bool immediately) {
    ModelLoader loader;
    const std::string path = SAFE_STR(lora.path);
    if (!loader.init_from_file_and_convert_name(path, lora.is_high_noise ? "lora.model.high_noise_" : "lora.", version)) {
        reject("LoRA '" + path + "' can't be read: the file is missing, damaged or of an unknown format");
        return false;
    }
    if (!check_whole(loader)) {
        return false;
    }
    const bool has_joined = model.count("cond_stage_model.1.transformer.text_model.encoder.layers.0.self_attn.in_proj.weight") > 0;
    size_t fitting        = 0;
    for (const auto & [name, t] : loader.get_tensor_storage_map()) {
        // upstream joins the three projections of CLIP-G's attention later on
        const bool joined          = has_joined && contains(name, "cond_stage_model.1.") && contains(name, "self_attn.");
        const ggml_tensor * target = starts_with(name, "lora.") ? lora_target(model, name) : nullptr;
        const bool down = ends_with(name, ".lora_down"), up = ends_with(name, ".lora_up");
        const bool scales   = ends_with(name, ".alpha") || ends_with(name, ".scale");
        const bool matrices = target != nullptr && t.n_dims == 2 && ggml_n_dims(target) == 2;
        if (matrices && ((down && t.ne[0] != target->ne[0]) || (up && t.ne[1] > target->ne[1]))) {
            reject(sd_format("LoRA '%s' does not fit this model: tensor '%s' is %s, the model's is %s", path.c_str(), name.c_str(),
                             shape_text(t.ne).c_str(), shape_text(target->ne).c_str()));
            return false;
        }
        // upstream adds to a weight in F32, and aborts where it can't make one of a quantised weight
        const bool adds = immediately || ends_with(name, ".diff") || contains(name, ".hada_");
        if (target != nullptr && !scales && adds && ggml_is_quantized(target->type)) {
            reject(sd_format("LoRA '%s': tensor '%s' would be added to a weight of type %s, only f32, f16 and bf16 can take it%s",
                             path.c_str(), name.c_str(), ggml_type_name(target->type),
                             immediately ? "; use --lora-apply-mode at_runtime or another --type" : "; use another --type"));
            return false;
        }
        fitting += (target != nullptr && !scales) || joined;
    }
    if (fitting == 0) {
        reject(
            sd_format("LoRA '%s' fits no tensor of this %s model: it was made for another one, or is no LoRA", path.c_str(), version_name));
        return false;
    }
    return true;
}

}  // namespace sdsage
