// What stable-diffusion.cpp calls while it works: the one seam between the pipeline and libsdsage.
// The functions live in native/sd_cli/src/job.cpp; they act on the job that this process is running.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <new>
#include <string>
#include <utility>
#include <vector>

namespace sdsage {

// Order and names are public: sdsage.h (sdsage_stage_t).
enum class Stage { load, encode_text, encode_image, sample, decode, upscale, convert };
enum class Expert { only = 0, low_noise = 1, high_noise = 2 };

void stage_begin(Stage stage, Expert expert, int steps);
void stage_end();

struct StageScope {
    explicit StageScope(Stage stage, Expert expert = Expert::only, int steps = 0) { stage_begin(stage, expert, steps); }
    ~StageScope() { stage_end(); }
    StageScope(const StageScope &)             = delete;
    StageScope & operator=(const StageScope &) = delete;
};

// Ends the job with a reason; the pipeline then unwinds by its own empty results.
void fail(const std::string & why);
void reject(const std::string & why);            // the same for something that the caller gave
void sage_unavailable(const std::string & why);  // the same for SageAttention where it can't run
bool failed();
bool cancelled();

// Keeps an error line as the job's reason. False: the line is not worth showing, as it comes of a cancel.
bool note_log(int level, const char * text);

// For ggml's CPU backend, between two operations: true stops the graph. Only while decoding: there upstream takes a graph that
// did not finish for a failure, in other stages it aborts the process. Sampling stops between steps.
bool stop_graph(void *);

// One attention was computed: by which part of the model, by which kernel, and why not by SageAttention if that was wanted.
// A diffusion model is the expert whose steps are being sampled.
enum class Part { diffusion, text_encoder, image_encoder, vae, control_net };
void note_attention(Part part, const char * kernel, const char * why);
// For what is no diffusion model: the part that the running stage stands for.
Part part_of_stage();

// Called around every evaluation of the diffusion model. False stops the job (cancelled, or a value is not finite).
bool step_begin(int step, bool finite);
bool step_end(int step, bool finite);

// Runs what allocates and reads a model: an exception becomes the job's error, and the caller frees what it has.
template <class Body>
bool no_throw(Body body) {
    try {
        return body();
    } catch (const std::bad_alloc &) {
        fail("out of memory");
    } catch (const std::exception & e) {
        fail(e.what());
    }
    return false;
}

// True when somebody asked for the latents (sdsage_keep_latents).
bool wants_latents();
void give_latents(const float * data, const std::vector<int64_t> & shape);

template <class Tensor>
bool all_finite(const Tensor & x) {
    const float * p = x.data();
    const int64_t n = x.numel();
    uint32_t bad    = 0;  // an exponent of all ones is Inf or NaN; integers, so that the loop vectorises
    for (int64_t i = 0; i < n; i++) {
        uint32_t bits;
        std::memcpy(&bits, p + i, sizeof(bits));
        bad |= (bits & 0x7f800000u) == 0x7f800000u;
    }
    return bad == 0;
}

// Wraps the sampler's model call: `x` holds the latents after the step before, the result is the denoised estimate.
template <class Denoise>
auto watch_steps(Denoise denoise) {
    return [denoise](const auto & x, float sigma, int step) -> decltype(denoise(x, sigma, step)) {
        if (!step_begin(step, all_finite(x))) {
            return {};
        }
        auto denoised = denoise(x, sigma, step);
        if (denoised.empty() || !step_end(step, all_finite(denoised))) {
            return {};
        }
        return denoised;
    };
}

template <class Tensor>
bool check_latents(const std::vector<Tensor> & latents) {
    for (const Tensor & x : latents) {
        if (!all_finite(x)) {
            fail("the final latents are not finite");
            return false;
        }
    }
    if (wants_latents()) {
        for (const Tensor & x : latents) {
            give_latents(x.data(), x.shape());
        }
    }
    return true;
}

}  // namespace sdsage
