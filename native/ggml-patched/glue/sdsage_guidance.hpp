// The lever `batch`: what guidance needs of the model, with the prompt and without it, as one forward of two pictures.
// Included by stable-diffusion.cpp, where conditions and diffusion models are known.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "sdsage_levers.hpp"
#include "sdsage_models.hpp"

namespace sdsage {

// The models that take several pictures at once; all others ask for one.
inline bool takes_batches(SDVersion version) {
    return (sd_version_is_unet(version) && version != VERSION_SVD) || sd_version_is_sd3(version);
}

// The forwards of one model while it samples.
class Guidance {
  public:
    Guidance(const std::shared_ptr<DiffusionModel> & model, SDVersion version) : asked_(false) {
        with_runner(model, [&](auto & runner) { asked_ = (runner.engine_levers & LEVER_BATCH) != 0; });
        if (asked_ && !takes_batches(version)) {
            LOG_DEBUG("guidance: this model takes one picture at a time");
            asked_ = false;
        }
    }
    ~Guidance() {
        if (asked_) {
            LOG_DEBUG("guidance: %d steps with both forwards in one batch, %d forwards alone", pairs_, singles_);
        }
    }

    // The model's answer to `condition`. Asked for `cond` it computes that of `uncond` too, if both have the same shapes, and keeps it
    // until it is asked for.
    template <class Compute>
    sd::Tensor<float> forward(const SDCondition & condition, const SDCondition & cond, const SDCondition & uncond,
                              const DiffusionParams & params, Compute compute) {
        if (&condition == &uncond && !kept_.empty()) {
            return std::exchange(kept_, {});
        }
        kept_ = {};
        if (!asked_ || &condition != &cond || !fit(cond, uncond, params)) {
            singles_++;
            return compute(params);
        }
        const auto x           = twice(*params.x, 3, *params.x);
        const auto timesteps   = twice(*params.timesteps, 0, *params.timesteps);
        const auto context     = twice(cond.c_crossattn, 2, uncond.c_crossattn);
        const auto y           = twice(cond.c_vector, 1, uncond.c_vector);
        const auto c_concat    = twice(cond.c_concat, 3, uncond.c_concat);
        DiffusionParams joined = params;
        joined.x               = &x;
        joined.timesteps       = &timesteps;
        joined.context         = params.context ? &context : nullptr;
        joined.y               = params.y ? &y : nullptr;
        joined.c_concat        = params.c_concat ? &c_concat : nullptr;
        const auto answers     = compute(joined);
        if (answers.empty()) {
            return {};
        }
        pairs_++;
        kept_ = sd::ops::slice(answers, 3, 1, 2);
        return sd::ops::slice(answers, 3, 0, 1);
    }

  private:
    static bool fit(const SDCondition & cond, const SDCondition & uncond, const DiffusionParams & params) {
        const bool plain = (params.controls == nullptr || params.controls->empty()) &&
                           (params.ref_latents == nullptr || params.ref_latents->empty()) && params.skip_layers == nullptr &&
                           params.vace_context == nullptr && cond.c_t5_ids.empty() && cond.extra_c_crossattns.empty();
        return plain && params.x->dim() == 4 && params.x->shape()[3] == 1 && params.timesteps->numel() == 1 &&
               cond.c_crossattn.shape() == uncond.c_crossattn.shape() && cond.c_vector.shape() == uncond.c_vector.shape() &&
               cond.c_concat.shape() == uncond.c_concat.shape() && (params.c_concat == nullptr || params.c_concat == &cond.c_concat);
    }

    // Both along dimension `dim`, which may be left out where it is 1.
    static sd::Tensor<float> twice(sd::Tensor<float> a, size_t dim, sd::Tensor<float> b) {
        if (a.empty()) {
            return {};
        }
        for (auto * t : { &a, &b }) {
            while (static_cast<size_t>(t->dim()) <= dim) {
                t->unsqueeze_(t->dim());
            }
        }
        return sd::ops::concat(a, b, dim);
    }

    bool asked_;
    int pairs_ = 0, singles_ = 0;
    sd::Tensor<float> kept_;
};

}  // namespace sdsage
