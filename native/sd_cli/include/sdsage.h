/* sdsage: what libsdsage offers beside stable-diffusion.cpp's own C API (stable-diffusion.h), in C11.
 *
 * One native job (new_sd_ctx, generate_*, upscale, convert, sdsage_decode, sdsage_run_attention) runs at a time per process; a second
 * caller waits. No C++ exception leaves any function. Strings and arrays that a function returns are freed with sdsage_free, unless it says
 * "static".
 */
#ifndef SDSAGE_H
#define SDSAGE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "stable-diffusion.h"

#ifdef __cplusplus
extern "C" {
#endif

#define SDSAGE_ABI_VERSION 3

/* Why the last job of this thread ended. */
enum sdsage_status_t {
    SDSAGE_OK,
    SDSAGE_FAILED,          /* the engine gave up; the text holds its last errors */
    SDSAGE_CANCELLED,       /* sdsage_cancel was called */
    SDSAGE_NON_FINITE,      /* latents became NaN or Inf: sdsage_last_step, sdsage_last_expert */
    SDSAGE_EXCEPTION,       /* a C++ exception, out of memory among them */
    SDSAGE_BAD_REQUEST,     /* an argument is not usable */
    SDSAGE_SAGE_UNAVAILABLE /* sage_attn was set and SageAttention can't run on this device or in this build */
};

enum sdsage_stage_t {
    SDSAGE_STAGE_LOAD,
    SDSAGE_STAGE_ENCODE_TEXT,
    SDSAGE_STAGE_ENCODE_IMAGE,
    SDSAGE_STAGE_SAMPLE,
    SDSAGE_STAGE_DECODE,
    SDSAGE_STAGE_UPSCALE,
    SDSAGE_STAGE_CONVERT
};

enum sdsage_expert_t { SDSAGE_EXPERT_ONLY, SDSAGE_EXPERT_LOW_NOISE, SDSAGE_EXPERT_HIGH_NOISE };

enum sdsage_event_kind_t {
    SDSAGE_EVENT_BEGIN,   /* a stage begins */
    SDSAGE_EVENT_STEP,    /* a sampling step is complete; seconds: its time */
    SDSAGE_EVENT_END,     /* a stage is over; seconds: its time */
    SDSAGE_EVENT_REPLAYED /* a sampling step is complete, with recorded answers (sdsage_replay): it has no time of its own */
};

typedef struct {
    enum sdsage_event_kind_t kind;
    enum sdsage_stage_t stage;
    enum sdsage_expert_t expert;
    int step; /* 1..steps in this sampling stage, 0 outside it */
    int steps;
    double seconds;
} sdsage_event_t;

/* Called on the thread that runs the job. Must not throw. */
typedef void (*sdsage_event_cb_t)(const sdsage_event_t * event, void * data);
/* Called with ggml's message before the process aborts. */
typedef void (*sdsage_abort_cb_t)(const char * message, void * data);

SD_API int sdsage_abi_version(void);
/* One line per struct of both headers: "name size offset-of-last-field". Static. */
SD_API const char * sdsage_layout(void);
/* JSON: versions, pins, compiler, CUDA toolkit. Static. */
SD_API const char * sdsage_build_info(void);
SD_API void sdsage_free(void * p);
/* Frees an array of images and their pixels. */
SD_API void sdsage_free_images(sd_image_t * images, int count);

SD_API enum sdsage_status_t sdsage_last_status(void);
SD_API const char * sdsage_last_error(void); /* static, this thread, until its next job */
SD_API int sdsage_last_step(void);
SD_API enum sdsage_expert_t sdsage_last_expert(void);

SD_API void sdsage_set_event_callback(sdsage_event_cb_t cb, void * data);
SD_API void sdsage_set_abort_callback(sdsage_abort_cb_t cb, void * data);

/* Asks the running job to stop: at its next sampling step, and inside a decode that runs on the CPU. A decode on another device
 * is finished first. A job that starts later is not touched. Callable from any thread. */
SD_API void sdsage_cancel(void);

/* Devices that ggml offers. Fields are static strings; kind is "cpu", "gpu", "igpu" or "accel". */
typedef struct {
    const char * name; /* what sdsage_set_device takes: "cpu", "cuda:0" */
    const char * kind;
    const char * description;
    size_t memory_free; /* bytes */
    size_t memory_total;
} sdsage_device_t;

SD_API int sdsage_device_count(void);
SD_API bool sdsage_get_device(int index, sdsage_device_t * device);
/* Device of the contexts and upscalers that this thread makes from now on; NULL: upstream's choice. False: no such device. */
SD_API bool sdsage_set_device(const char * name);

/* SageAttention on the device that a context of this thread would get. Strings are static until the next call on this thread. */
typedef struct {
    bool supported;
    bool emulated;               /* the kernel's FP8 instructions are emulated on this GPU */
    const char * device;         /* "cuda:0 (NVIDIA H200)" */
    const char * kernel;         /* the one that would run: "fp16", "fp8", "fp8++", "hopper" */
    const char * reason;         /* why it can't run; "" when supported */
    const char * why_not_better; /* why no better kernel, or which other is faster; "" if none */
    const char * architectures;  /* that this build has kernels for: "80 86 89 90a"; "" without CUDA */
    int compute_capability;      /* 90 for 9.0; 0 without a CUDA device */
    int toolkit;                 /* 13000 for CUDA 13.0; 0 without CUDA */
} sdsage_sage_t;

SD_API void sdsage_get_sage(enum sd_sage_kernel_t kernel, sdsage_sage_t * sage);

/* What computed attention in this thread's last job: one entry per part of the model, kernel and reason. Strings are static
 * until its next job. module: "diffusion", with two experts "low-noise" and "high-noise"; "text encoder", "picture encoder",
 * "VAE", "ControlNet". */
typedef struct {
    const char * module;
    const char * kernel; /* "fp16", "fp8", "fp8++", "hopper" of SageAttention; "flash"; "ordinary" */
    const char * why;    /* why SageAttention was not used although it was asked for; "" */
    int64_t calls;
} sdsage_attention_t;

SD_API int sdsage_attention_count(void);
SD_API bool sdsage_get_attention(int index, sdsage_attention_t * attention);

/* The same for what sdsage computed in place of the engine, the levers: one entry per part of the model, lever and reason. */
typedef struct {
    const char * module;
    const char * lever; /* "linear", "linear fp8", "fuse", "vae"; "ggml" for linear layers that the engine computes */
    const char * why;   /* why the engine, or why not FP8 although it was asked for; "" */
    int64_t calls;
} sdsage_lever_t;

SD_API int sdsage_lever_count(void);
SD_API bool sdsage_get_lever(int index, sdsage_lever_t * lever);

/* Which of these levers work on the device that a context of this thread would get: "linear,fuse,vae". Static until the next call
 * on this thread. */
SD_API const char * sdsage_device_levers(const char * engine_levers);

/* Why fast_linear can't be had, with these engine_levers, on the device that a context of this thread would get; "" if it can.
 * Static until the next call on this thread. */
SD_API const char * sdsage_fast_linear_problem(const char * engine_levers);

/* One attention alone, for checking and timing: softmax(q k^T / sqrt(head_dim) + bias) v. Arrays are contiguous, the last index
 * fastest; q, k and v are float, or with `half` FP16. */
typedef struct {
    int64_t batch;
    int64_t heads;    /* of q; a multiple of kv_heads */
    int64_t kv_heads; /* of k and v */
    int64_t lq;       /* query tokens */
    int64_t lk;       /* key tokens */
    int64_t head_dim;
    bool causal; /* query i sees keys 0 .. i + lk - lq */
    bool half;
    const void * q;     /* [batch, heads, lq, head_dim] */
    const void * k;     /* [batch, kv_heads, lk, head_dim] */
    const void * v;     /* [batch, lk, kv_heads, head_dim] */
    const float * bias; /* [lk], added to the scores of each key; -inf masks it. NULL: none */
} sdsage_attention_problem_t;

/* A way to compute it. The first four fields are the caller's, the others are set; texts are static until the next call on this
 * thread. */
typedef struct {
    const char * method;       /* "plain" (mul_mat, soft_max, mul_mat), "flash" (ggml's FlashAttention), or SageAttention's "auto",
                                  "fp16", "fp8", "fp8++", "hopper" */
    float * out;               /* [batch, lq, heads, head_dim], of the last repeat; NULL: not wanted */
    double * seconds;          /* [repeats], of the computation alone; NULL: not wanted */
    double * quantize_seconds; /* [repeats], of SageAttention's quantizers by themselves, 0 for the others; NULL: not wanted */
    const char * kernel;       /* what ran: "plain", "flash", "fp16", "fp8", "fp8++", "hopper"; "" where none did */
    const char * why;          /* why it does not run for this shape on this device; "" when it did */
    bool emulated;             /* the kernel's FP8 instructions are emulated on this GPU */
} sdsage_attention_method_t;

/* Runs every method `repeats` times, by turns, after two rounds to get warm, on the device that a context of this thread would get.
 * The graphs are those that the models build, casts included; SageAttention with a causal mask or FP16 inputs, which no model has,
 * is run by its kernels' library. Output that a kernel does not write is NaN. False, and sdsage_last_error: the arguments can't be
 * used, SageAttention can't run on this device, or a computation failed. */
SD_API bool sdsage_run_attention(const sdsage_attention_problem_t * problem, sdsage_attention_method_t * methods, int count, int repeats);

/* The structs as one JSON object; img or vid may be NULL. */
SD_API char * sdsage_params_json(const sd_ctx_params_t * ctx, const sd_img_gen_params_t * img, const sd_vid_gen_params_t * vid);

/* What a context is. Static strings. */
SD_API const char * sdsage_version_name(const sd_ctx_t * ctx);
SD_API bool sdsage_has_two_experts(const sd_ctx_t * ctx);
SD_API bool sdsage_can_encode(const sd_ctx_t * ctx);    /* the VAE's encoder is loaded (vae_decode_only was false) */
SD_API bool sdsage_needs_encoder(const sd_ctx_t * ctx); /* image-to-video models need it for every job */
SD_API int sdsage_size_multiple(const sd_ctx_t * ctx);

/* Latents in ggml's order, width fastest: [W, H, T, C, 1] for video, [W, H, C, 1] for an image. */
typedef struct {
    float * data;
    int64_t ne[5];
    int n_dims;
} sdsage_latents_t;

/* What the diffusion model answered to the sampler: the denoised estimate. The sampler calls it once or more in each step; the
 * second call of a step has its number negative. */
typedef struct {
    sdsage_latents_t latents;
    float sigma;
    int step;
} sdsage_answer_t;

/* Both are called on the thread that runs the job, while it runs; the data is valid during the call. Must not throw. */
typedef void (*sdsage_answer_cb_t)(const sdsage_answer_t * answer, void * data);
typedef void (*sdsage_latents_cb_t)(const sdsage_latents_t * latents, int index, void * data);

/* Each answer of the model, in order, over all sampling stages of a job: both experts, a second pass, every picture of a batch. */
SD_API void sdsage_set_answer_callback(sdsage_answer_cb_t cb, void * data);
/* The final latents before decoding; index counts the pictures of a batch from 0. */
SD_API void sdsage_set_latents_callback(sdsage_latents_cb_t cb, void * data);
/* The first calls of the model in this thread's next job get these answers, which an earlier run of the same job had, instead of
 * computing them: the sampler reaches the state it was in, and the job goes on from there. The array and its data are not copied
 * and must live until the job is over. Histories of step caches (sd_cache_params_t) begin anew. An answer with another size, step
 * or sigma than the job has at its call ends the job (SDSAGE_BAD_REQUEST). */
SD_API void sdsage_replay(const sdsage_answer_t * answers, int count);
/* This thread's next context only decodes latents of a model of this version (as sdsage_version_name names it): it needs the VAE
 * alone, and generate_* must not be called with it. NULL: a whole model. False: there is no such version. */
SD_API bool sdsage_decode_only(const char * version);
/* The VAE could not decode at once in this thread's last job, for want of memory say, and decoded in tiles instead: their width in
 * latent pixels, the last that was tried. 0: that was not so. */
SD_API int sdsage_last_tile(void);

/* Whether this thread's next job may copy the parameters of a second expert to the GPU while the first one computes, where memory is
 * free there (it may, unless it is said here): false keeps what it uses to one expert. For parameters in the host's memory. */
SD_API void sdsage_copy_ahead(bool allowed);

/* Keep the latents of this thread's next job, as they are before decoding. */
SD_API void sdsage_keep_latents(bool keep);
/* Latents of this thread's last job; count 0 if none were kept. Freed with sdsage_free_latents. */
SD_API sdsage_latents_t * sdsage_take_latents(int * count);
SD_API void sdsage_free_latents(sdsage_latents_t * latents, int count);
/* Decodes one set of latents; NULL and sdsage_last_error if they do not belong to this model. */
SD_API sd_image_t * sdsage_decode(sd_ctx_t * ctx, const sdsage_latents_t * latents, const sd_tiling_params_t * tiling, bool video,
                                  int * count);

#ifdef __cplusplus
}
#endif

#endif
