// What stable-diffusion.cpp calls while it works: the one seam between the pipeline and libsdsage.
// The functions live in native/sd_cli/src/job.cpp; they act on the job that this process is running.
#pragma once

#include <algorithm>
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
// The same for what a lever computed (sdsage_levers.hpp): why it was not done in the way that was asked for.
void note_lever(Part part, const char * lever, const char * why);
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

// The answer that this call of the model had in an earlier run (sdsage_replay); null: compute it. A recorded answer that does not
// belong here fails the job.
const float * recorded_answer(const std::vector<int64_t> & shape, float sigma, int step);
// What the model just answered; not called for recorded answers.
void give_answer(const float * data, const std::vector<int64_t> & shape, float sigma, int step);
// The final latents of picture `index`, before decoding.
void give_latents(const float * data, const std::vector<int64_t> & shape, int index);

// Decoding failed and nobody asked it to stop. True: try again in tiles, this time of `tile` latent pixels.
bool retry_in_tiles(const std::string & why, int tile);

// Whether this job may copy a second expert while the first one computes.
bool copies_ahead();

// True while a context is made that only decodes: there is no diffusion model and no text encoder.
bool decodes_only();
// Name of the version of the latents that this context decodes; decodes_only() says whether it counts.
const std::string & decoded_version();

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
// All that a sampler knows follows from its start, its random numbers and these answers: with recorded ones it comes to the state
// that it was in, bit for bit, whatever sampler it is.
template <class Denoise>
auto watch_steps(Denoise denoise) {
    return [denoise](const auto & x, float sigma, int step) -> decltype(denoise(x, sigma, step)) {
        if (!step_begin(step, all_finite(x))) {
            return {};
        }
        decltype(denoise(x, sigma, step)) denoised;
        const float * recorded = recorded_answer(x.shape(), sigma, step);
        if (recorded != nullptr) {
            denoised.resize(x.shape());
            std::copy(recorded, recorded + x.numel(), denoised.data());
        } else if (!failed()) {
            denoised = denoise(x, sigma, step);
        }
        if (denoised.empty() || !step_end(step, all_finite(denoised))) {
            return {};
        }
        if (recorded == nullptr) {
            give_answer(denoised.data(), denoised.shape(), sigma, step);
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
    for (size_t i = 0; i < latents.size(); i++) {
        give_latents(latents[i].data(), latents[i].shape(), static_cast<int>(i));
    }
    return true;
}

// Decodes by `decode(tiling)`, which gives an empty tensor or throws when it fails. What does not go at once, for want of memory,
// is tried again in tiles: 32 latent pixels wide, then 16. Tiles that the caller chose are not changed.
template <class Runner, class Tiling, class Decode>
auto decode_or_tile(Runner & runner, int64_t width, int64_t height, Tiling tiling, Decode decode) -> decltype(decode(tiling)) {
    decltype(decode(tiling)) decoded;
    const auto attempt = [&] {
        std::string why = "the VAE could not compute";
        try {
            decoded = decode(tiling);
        } catch (const std::bad_alloc &) {
            why = "out of memory";
        }
        return why;
    };
    std::string why = attempt();
    if (tiling.enabled) {
        return decoded;
    }
    for (const int tile : { 32, 16 }) {
        if (!decoded.empty() || (width <= tile && height <= tile) || !retry_in_tiles(why, tile)) {
            continue;
        }
        runner.free_compute_buffer();
        tiling.enabled     = true;
        tiling.tile_size_x = tiling.tile_size_y = tile;
        tiling.rel_size_x = tiling.rel_size_y = 0.f;
        why                                   = attempt();
    }
    return decoded;
}

}  // namespace sdsage
