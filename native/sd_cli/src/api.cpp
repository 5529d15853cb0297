// The exported functions: upstream's job functions under their own names, each as one guarded job, and sdsage.h.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <new>
#include <stdexcept>
#ifdef __GLIBC__
#include <malloc.h>
#endif

#include "attention.h"
#include "attention_run.h"
#include "coverage.h"
#include "ggml.h"
#include "job.h"
#include "levers.h"
#include "sdsage_build_info.h"
#include "sdsage_layout.inc"

static_assert(GGML_MAX_NAME == 128, "every target that includes ggml.h needs stable-diffusion.cpp's GGML_MAX_NAME");

// Bodies of upstream's functions, renamed by the edits (group "guard").
sd_ctx_t * sdsage_inner_new_sd_ctx(const sd_ctx_params_t *);
void sdsage_inner_free_sd_ctx(sd_ctx_t *);
sd_image_t * sdsage_inner_generate_image(sd_ctx_t *, const sd_img_gen_params_t *);
sd_image_t * sdsage_inner_generate_video(sd_ctx_t *, const sd_vid_gen_params_t *, int *);
upscaler_ctx_t * sdsage_inner_new_upscaler_ctx(const char *, bool, bool, int, int);
sd_image_t sdsage_inner_upscale(upscaler_ctx_t *, sd_image_t, uint32_t);
bool sdsage_inner_convert(const char *, const char *, const char *, sd_type_t, const char *, bool);

namespace sdsage {
sd_image_t * decode_latents(sd_ctx_t *, const float *, const std::vector<int64_t> &, const sd_tiling_params_t &, bool, int *);
const char * version_name(const sd_ctx_t *);
bool is_version_name(const std::string &);
bool has_two_experts(const sd_ctx_t *);
bool can_encode(const sd_ctx_t *);
bool needs_encoder(const sd_ctx_t *);
int size_multiple(const sd_ctx_t *);

namespace {

bool is_ok(const void * p) { return p != nullptr; }
bool is_ok(bool b) { return b; }
bool is_ok(const sd_image_t & i) { return i.data != nullptr; }

void keep(bool) {}

// Runs `body` as one job. `none` is returned when it fails; an exception becomes the job's error. `drop` frees what the body
// made in a job that failed all the same: a failed job hands out nothing.
template <class T, class Body, class Drop>
T run(T none, Body body, Drop drop) noexcept {
    try {
        Job job;
        try {
            if (!ggml_problem().empty()) {
                throw std::runtime_error(ggml_problem());
            }
            T result = body();
            if (job.finish(is_ok(result))) {
                return result;
            }
            if (is_ok(result)) {
                drop(result);
            }
            return none;
        } catch (const std::bad_alloc &) {
            job.finish_exception("out of memory");
        } catch (const std::exception & e) {
            job.finish_exception(e.what());
        } catch (...) {
            job.finish_exception("an unknown C++ exception");
        }
    } catch (...) {
        last_outcome().status = SDSAGE_EXCEPTION;
    }
    return none;
}

// Before any file is opened: whether this build has code for the device. Without it ggml aborts in the middle of a job.
bool device_runs() {
    const std::string why = device_problem(chosen_device());
    if (!why.empty()) {
        fail(why);
    }
    return why.empty();
}

bool can_run(const sd_ctx_params_t * params) {
    if (!device_runs()) {
        return false;
    }
    unsigned levers = 0;
    const std::string levers_why =
        params == nullptr ? "" : levers_problem(params->engine_levers, params->fast_linear, chosen_device(), &levers);
    if (!levers_why.empty()) {
        reject(levers_why);
        return false;
    }
    if (params != nullptr && params->sage_attn) {
        const std::string why = chosen_sage(static_cast<sage_kernel>(params->sage_kernel)).why;
        if (!why.empty()) {
            sage_unavailable(why);
        }
        return why.empty();
    }
    return true;
}

// One entry of what was counted, as C has it: module, what computed it, why, calls.
template <class C>
bool get(const std::vector<Count> & all, int index, C * entry) {
    if (index < 0 || index >= static_cast<int>(all.size()) || entry == nullptr) {
        return false;
    }
    const Count & a = all[static_cast<size_t>(index)];
    *entry          = { a.module, a.by.c_str(), a.why.c_str(), a.calls };
    return true;
}

struct AbortHook {
    sdsage_abort_cb_t cb = nullptr;
    void * data          = nullptr;
} abort_hook;

void on_ggml_abort(const char * message) {
    std::fprintf(stderr, "%s\n", message);
    std::fflush(stderr);
    if (abort_hook.cb) {
        abort_hook.cb(message, abort_hook.data);
    }
}

// From the moment the library is loaded.
const bool abort_hooked = (ggml_set_abort_callback(on_ggml_abort), true);

}  // namespace
}  // namespace sdsage

using namespace sdsage;

extern "C" {

SD_API sd_ctx_t * new_sd_ctx(const sd_ctx_params_t * params) {
    return run((sd_ctx_t *)nullptr,
               [&]() -> sd_ctx_t * {
                   StageScope stage(Stage::load);
                   return can_run(params) ? sdsage_inner_new_sd_ctx(params) : nullptr;
               },
               sdsage_inner_free_sd_ctx);
}

SD_API void free_sd_ctx(sd_ctx_t * ctx) {
    if (ctx == nullptr) {
        return;
    }
    run(
        false,
        [&] {
            sdsage_inner_free_sd_ctx(ctx);
            return true;
        },
        keep);
#ifdef __GLIBC__
    malloc_trim(0);  // loader threads leave a model's worth of free memory in glibc's arenas
#endif
}

SD_API sd_image_t * generate_image(sd_ctx_t * ctx, const sd_img_gen_params_t * params) {
    return run((sd_image_t *)nullptr, [&] { return sdsage_inner_generate_image(ctx, params); },
               [&](sd_image_t * made) { sdsage_free_images(made, params->batch_count); });
}

SD_API sd_image_t * generate_video(sd_ctx_t * ctx, const sd_vid_gen_params_t * params, int * count) {
    return run((sd_image_t *)nullptr, [&] { return sdsage_inner_generate_video(ctx, params, count); },
               [&](sd_image_t * made) { sdsage_free_images(made, *count); });
}

SD_API upscaler_ctx_t * new_upscaler_ctx(const char * path, bool offload, bool direct, int n_threads, int tile_size) {
    return run((upscaler_ctx_t *)nullptr,
               [&]() -> upscaler_ctx_t * {
                   StageScope stage(Stage::load);
                   return device_runs() ? sdsage_inner_new_upscaler_ctx(path, offload, direct, n_threads, tile_size) : nullptr;
               },
               free_upscaler_ctx);
}

SD_API sd_image_t upscale(upscaler_ctx_t * ctx, sd_image_t image, uint32_t factor) {
    return run(
        sd_image_t{},
        [&] {
            StageScope stage(Stage::upscale);
            return sdsage_inner_upscale(ctx, image, factor);
        },
        [](const sd_image_t & made) { std::free(made.data); });
}

SD_API bool convert(const char * input, const char * vae, const char * output, enum sd_type_t type, const char * rules, bool names) {
    return run(
        false,
        [&] {
            StageScope stage(Stage::convert);
            return sdsage_inner_convert(input, vae, output, type, rules, names);
        },
        keep);
}

int sdsage_abi_version(void) { return SDSAGE_ABI_VERSION; }
const char * sdsage_layout(void) { return SDSAGE_LAYOUT; }
const char * sdsage_build_info(void) { return SDSAGE_BUILD_INFO; }
void sdsage_free(void * p) { std::free(p); }

void sdsage_free_images(sd_image_t * images, int count) {
    for (int i = 0; images != nullptr && i < count; i++) {
        std::free(images[i].data);
    }
    std::free(images);
}

enum sdsage_status_t sdsage_last_status(void) { return last_outcome().status; }
const char * sdsage_last_error(void) { return last_outcome().error.c_str(); }
int sdsage_last_step(void) { return last_outcome().step; }
enum sdsage_expert_t sdsage_last_expert(void) { return last_outcome().expert; }

void sdsage_set_event_callback(sdsage_event_cb_t cb, void * data) { set_event_callback(cb, data); }

void sdsage_set_abort_callback(sdsage_abort_cb_t cb, void * data) { abort_hook = { cb, data }; }

void sdsage_cancel(void) { request_cancel(); }

const char * sdsage_version_name(const sd_ctx_t * ctx) { return version_name(ctx); }
bool sdsage_has_two_experts(const sd_ctx_t * ctx) { return has_two_experts(ctx); }
bool sdsage_can_encode(const sd_ctx_t * ctx) { return can_encode(ctx); }
bool sdsage_needs_encoder(const sd_ctx_t * ctx) { return needs_encoder(ctx); }
int sdsage_size_multiple(const sd_ctx_t * ctx) { return size_multiple(ctx); }

int sdsage_attention_count(void) { return static_cast<int>(last_outcome().attention.size()); }

bool sdsage_get_attention(int index, sdsage_attention_t * attention) { return get(last_outcome().attention, index, attention); }

int sdsage_lever_count(void) { return static_cast<int>(last_outcome().levers.size()); }

bool sdsage_get_lever(int index, sdsage_lever_t * lever) { return get(last_outcome().levers, index, lever); }

const char * sdsage_device_levers(const char * engine_levers) {
    static thread_local std::string names;
    names = levers_on(engine_levers, chosen_device());
    return names.c_str();
}

const char * sdsage_fast_linear_problem(const char * engine_levers) {
    static thread_local std::string problem;
    unsigned levers = 0;
    problem         = levers_problem(engine_levers, true, chosen_device(), &levers);
    return problem.c_str();
}

bool sdsage_run_attention(const sdsage_attention_problem_t * problem, sdsage_attention_method_t * methods, int count, int repeats) {
    return run(false, [&] { return run_attention(*problem, methods, count, repeats); }, keep);
}

void sdsage_copy_ahead(bool allowed) { next_request().copies_ahead = allowed; }

void sdsage_keep_latents(bool keep) { next_request().keep = keep; }

void sdsage_set_answer_callback(sdsage_answer_cb_t cb, void * data) { set_answer_callback(cb, data); }
void sdsage_set_latents_callback(sdsage_latents_cb_t cb, void * data) { set_latents_callback(cb, data); }

void sdsage_replay(const sdsage_answer_t * answers, int count) {
    next_request().recorded       = answers;
    next_request().recorded_count = answers == nullptr ? 0 : count;
}

bool sdsage_decode_only(const char * version) {
    next_request().decodes_only = version != nullptr;
    next_request().version      = version == nullptr ? "" : version;
    return version == nullptr || is_version_name(version);
}

int sdsage_last_tile(void) { return last_outcome().tile; }

sdsage_latents_t * sdsage_take_latents(int * count) {
    auto & kept = last_outcome().latents;
    *count      = static_cast<int>(kept.size());
    auto * out  = static_cast<sdsage_latents_t *>(std::calloc(kept.size() + 1, sizeof(sdsage_latents_t)));
    for (size_t i = 0; out != nullptr && i < kept.size(); i++) {
        const size_t bytes = kept[i].data.size() * sizeof(float);
        out[i].data        = static_cast<float *>(std::malloc(bytes));
        out[i].n_dims      = static_cast<int>(kept[i].shape.size());
        std::memcpy(out[i].data, kept[i].data.data(), bytes);
        std::memcpy(out[i].ne, kept[i].shape.data(), kept[i].shape.size() * sizeof(int64_t));
    }
    kept.clear();
    return out;
}

void sdsage_free_latents(sdsage_latents_t * latents, int count) {
    for (int i = 0; latents != nullptr && i < count; i++) {
        std::free(latents[i].data);
    }
    std::free(latents);
}

sd_image_t * sdsage_decode(sd_ctx_t * ctx, const sdsage_latents_t * latents, const sd_tiling_params_t * tiling, bool video, int * count) {
    return run((sd_image_t *)nullptr,
               [&] {
                   const std::vector<int64_t> shape(latents->ne, latents->ne + latents->n_dims);
                   return decode_latents(ctx, latents->data, shape, *tiling, video, count);
               },
               [&](sd_image_t * made) { sdsage_free_images(made, *count); });
}

}  // extern "C"
