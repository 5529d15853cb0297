// Included by stable-diffusion.cpp, where the diffusion models are known.
#pragma once

#include <memory>

namespace sdsage {

// Calls `set` with a diffusion model's runner.
template <class Set>
void with_runner(const std::shared_ptr<DiffusionModel> & model, Set set) {
    if (auto m = std::dynamic_pointer_cast<UNetModel>(model)) {
        set(m->unet);
    } else if (auto m = std::dynamic_pointer_cast<MMDiTModel>(model)) {
        set(m->mmdit);
    } else if (auto m = std::dynamic_pointer_cast<FluxModel>(model)) {
        set(m->flux);
    } else if (auto m = std::dynamic_pointer_cast<AnimaModel>(model)) {
        set(m->anima);
    } else if (auto m = std::dynamic_pointer_cast<WanModel>(model)) {
        set(m->wan);
    } else if (auto m = std::dynamic_pointer_cast<QwenImageModel>(model)) {
        set(m->qwen_image);
    } else if (auto m = std::dynamic_pointer_cast<ZImageModel>(model)) {
        set(m->z_image);
    } else if (auto m = std::dynamic_pointer_cast<ErnieImageModel>(model)) {
        set(m->ernie_image);
    } else if (model && !decodes_only()) {
        throw std::logic_error("a diffusion model without settings of ours: " + model->get_desc());
    }
}

// Tells the runner what it is, and gives it the setting if there is one: the models' own setter takes a bool.
inline void set_attention(const std::shared_ptr<DiffusionModel> & model, int setting) {
    with_runner(model, [&](auto & runner) {
        runner.is_diffusion_model = true;
        if (setting != 0) {
            runner.set_flash_attention_enabled(setting);
        }
    });
}

inline void set_levers(const std::shared_ptr<DiffusionModel> & model, unsigned levers) {
    with_runner(model, [&](auto & runner) { runner.engine_levers = levers & ~LEVER_VAE; });
}

// The parameters of the expert that samples next are copied while the one before computes its last step.
inline void begin_offload(const std::shared_ptr<DiffusionModel> & model) {
    if (copies_ahead()) {
        with_runner(model, [](auto & runner) { runner.begin_offload(); });
    }
}

// A job that ends before that expert samples gives them back.
struct OffloadScope {
    explicit OffloadScope(std::shared_ptr<DiffusionModel> model) : model(std::move(model)) {}
    ~OffloadScope() {
        with_runner(model, [](auto & runner) { runner.drop_offload(); });
    }
    OffloadScope(const OffloadScope &)             = delete;
    OffloadScope & operator=(const OffloadScope &) = delete;
    std::shared_ptr<DiffusionModel> model;
};

}  // namespace sdsage
