// A context that only decodes: what stands in place of its text encoder and its diffusion model.
// Included by stable-diffusion.cpp, where both bases are known.
#pragma once

#include <map>
#include <stdexcept>
#include <string>

namespace sdsage {

[[noreturn]] inline void only_decodes() { throw std::logic_error("this context only decodes"); }

struct NoConditioner : Conditioner {
    SDCondition get_learned_condition(int, const ConditionerParams &) override { only_decodes(); }
    void alloc_params_buffer() override {}
    void free_params_buffer() override {}
    void get_param_tensors(std::map<std::string, ggml_tensor *> &) override {}
    size_t get_params_buffer_size() override { return 0; }
    void set_flash_attention_enabled(bool) override {}
};

struct NoDiffusion : DiffusionModel {
    std::string get_desc() override { return "none"; }
    sd::Tensor<float> compute(int, const DiffusionParams &) override { only_decodes(); }
    void alloc_params_buffer() override {}
    void free_params_buffer() override {}
    void free_compute_buffer() override {}
    void get_param_tensors(std::map<std::string, ggml_tensor *> &) override {}
    size_t get_params_buffer_size() override { return 0; }
    int64_t get_adm_in_channels() override { return 0; }
    void set_flash_attention_enabled(bool) override {}
    void set_max_graph_vram_bytes(size_t) override {}
    void set_circular_axes(bool, bool) override {}
};

// VERSION_COUNT: no version is called so.
inline SDVersion version_of(const std::string & name) {
    int n = 0;
    while (n < VERSION_COUNT && name != model_version_to_str[n]) {
        n++;
    }
    return static_cast<SDVersion>(n);
}

}  // namespace sdsage
