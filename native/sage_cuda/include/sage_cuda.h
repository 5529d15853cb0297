/* sage_cuda: quantized attention on CUDA, after SageAttention2 and 2++ (arXiv 2411.10958, 2505.21136), in C11.
 *
 * O = softmax(softmax_scale * Q K^T + bias) V, with Q and K in INT8 and P and V in FP16 or FP8.
 *
 * Describe, ask, run: one chooser answers everything before a run (sage_attn_choose); a run launches kernels on the caller's
 * stream and does nothing else: no allocation, no synchronisation, no state. It can be captured into a CUDA graph, and any
 * number of devices and streams can be used at once. Inputs are never written. Two runs on the same inputs are bit-identical.
 *
 * Nothing of CUDA is needed to include this header: a stream is a void * (cudaStream_t).
 */
#ifndef SAGE_CUDA_H
#define SAGE_CUDA_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#define SAGE_API __attribute__((visibility("default")))
#else
#define SAGE_API
#endif

#define SAGE_ABI_VERSION 2

typedef enum {
    SAGE_OK           = 0,
    SAGE_BAD_ARGUMENT = 1, /* the description contradicts itself; the text says where */
    SAGE_UNSUPPORTED  = 2, /* this case does not run on this device or in this build; the text says why */
    SAGE_CUDA_ERROR   = 3  /* a launch failed; the text holds CUDA's */
} sage_status;

typedef enum { SAGE_F32 = 0, SAGE_F16 = 1, SAGE_BF16 = 2 } sage_dtype;

/* Explicit names override the specification's choice, and are refused with a reason where they cannot run. */
typedef enum {
    SAGE_KERNEL_AUTO   = 0,
    SAGE_KERNEL_FP16   = 1, /* "fp16":   INT8 QK, FP16 PV, FP32 accumulation */
    SAGE_KERNEL_FP8    = 2, /* "fp8":    INT8 QK, FP8 PV, two-level FP32 accumulation (SageAttention2) */
    SAGE_KERNEL_FP8PP  = 3, /* "fp8++":  INT8 QK, FP8 PV, FP16 instruction accumulation, FP32 buffer (SageAttention2++) */
    SAGE_KERNEL_HOPPER = 4  /* "hopper": as fp8, by the instructions that compute capability 9.0 alone has */
} sage_kernel;

/* [batch, head, token, channel]. Strides in elements; the channel stride is 1. Any alignment of the element type works,
 * multiples of 16 bytes are faster. */
typedef struct {
    void * data;
    sage_dtype dtype;
    int64_t batch_stride;
    int64_t head_stride;
    int64_t token_stride;
} sage_tensor;

typedef struct {
    uint32_t struct_size; /* sizeof(sage_attn_desc) */
    sage_kernel kernel;
    int32_t batch;    /* 1.. */
    int32_t heads;    /* of q and o; a multiple of kv_heads */
    int32_t kv_heads; /* of k and v */
    int32_t head_dim; /* 1..128: padded to 64 or 128 inside */
    int64_t lq;       /* query tokens, 1.. */
    int64_t lk;       /* key tokens, 1.. */
    float softmax_scale;
    int32_t causal;      /* not 0: query i sees keys 0 .. i + lk - lq (bottom-right aligned); a row that sees none is zeros */
    const float * bias;  /* optional additive per-key bias [batch, lk], -inf masks a key; NULL: none */
    int64_t bias_stride; /* elements between batches; 0: one bias for all */
    sage_tensor q, k, v, o;
} sage_attn_desc;

/* The device that a choice is for. sage_device_query fills it for a real one; tests make their own. */
typedef struct {
    int32_t compute_capability; /* 90 for 9.0 */
    int32_t toolkit;            /* 13000 for CUDA 13.0: what the kernels were compiled with */
    const char * architectures; /* compiled architectures, "80 86 89 90a" */
} sage_device;

/* Everything there is to know before a run. Strings are static. */
typedef struct {
    uint32_t struct_size;        /* sizeof(sage_attn_choice), set by the caller */
    int32_t supported;           /* 0: `reason` says why not, and what to do */
    sage_kernel kernel;          /* the one that runs; never AUTO when supported */
    int32_t emulated;            /* its FP8 instructions are emulated on this device */
    const char * reason;         /* why not supported; "" otherwise */
    const char * why_not_better; /* why no better kernel of the selection table runs here, or which other is faster; "" if none */
    int32_t compute_capability;
    int32_t toolkit;
    const char * architectures;
    int32_t abi_version;
    size_t workspace; /* bytes, 256-byte aligned, for sage_attn_run */
} sage_attn_choice;

/* Where a run leaves in its workspace what it quantized: byte offsets, for tests and for looking at the codes of real inputs. They are
 * there until the next run. D is head_dim padded to 64 or 128; q_rows and k_rows are the rows of one head, padded; what lies beyond
 * head_dim, and keys beyond lk, are zeros. The 16-byte chunks of each row of 128 bytes are swizzled, chunk c of row r stands at c ^ (r %
 * 8); of rows of 64 bytes, at c ^ (r / 2 % 4). */
typedef struct {
    uint32_t struct_size; /* sizeof(sage_attn_layout), set by the caller */
    int32_t padded_dim;   /* D */
    int64_t q_rows, k_rows;
    size_t q_codes;  /* int8 [batch, heads, q_rows, D] */
    size_t k_codes;  /* int8 [batch, kv_heads, k_rows, D], of k less its mean */
    size_t v_codes;  /* fp16: FP16 [batch, kv_heads, k_rows / 64, D / 64, 64 keys, 64 channels]; fp8 and fp8++: E4M3 [batch, kv_heads,
                        k_rows / 64, D, 64 keys], hopper: the same with 128 for 64; place p of 16 holds key 0 1 8 9 2 3 10 11 4 5 12 13 6 7
                        14 15 [p] */
    size_t q_scales; /* float [batch, heads, q_rows / 32, 8]: of the rows equal mod 8; negative scales are in the codes */
    size_t k_scales; /* float [batch, kv_heads, k_rows / 64, 4]: number t of the keys 2t and 2t + 1 mod 8 */
    size_t v_scales; /* float [batch, kv_heads, D] */
    size_t k_mean;   /* float [batch, kv_heads, D] */
    size_t v_mean;   /* the same: the codes are of v less it; fp16: zeros */
} sage_attn_layout;

SAGE_API int sage_abi_version(void);
SAGE_API const char * sage_kernel_name(sage_kernel kernel); /* "auto", "fp16", "fp8", "fp8++", "hopper"; static */
SAGE_API const char * sage_last_error(void);                /* this thread's last failure; "" if none */

/* Properties of CUDA device `ordinal` and of this build. */
SAGE_API sage_status sage_device_query(int ordinal, sage_device * device);
/* Pure: no GPU work, no device needed. Data pointers of the tensors are not looked at. Returns SAGE_OK whenever `choice` is
 * filled, supported or not; SAGE_BAD_ARGUMENT if the description contradicts itself. */
SAGE_API sage_status sage_attn_choose(const sage_attn_desc * desc, const sage_device * device, sage_attn_choice * choice);
/* Launches on `stream` (a cudaStream_t) of the current device. `workspace` is device memory of at least the size that
 * sage_attn_choose gave for this device, 256-byte aligned; its contents before do not matter. */
SAGE_API sage_status sage_attn_run(const sage_attn_desc * desc, void * workspace, size_t workspace_size, void * stream);
/* For a description that sage_attn_choose supports on this device. Pure, as that is. */
SAGE_API sage_status sage_attn_workspace_layout(const sage_attn_desc * desc, const sage_device * device, sage_attn_layout * layout);

#ifdef __cplusplus
}
#endif

#endif
