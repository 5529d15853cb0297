// Levers: parts of stable-diffusion.cpp's graphs that the CUDA backend computes by code of ours (cuda/levers.cu) instead of by
// ggml's nodes. A finished graph is searched for them; what is found becomes a GGML_OP_CUSTOM, known by the mark behind ggml's own
// parameters, as SageAttention's nodes are.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>

#include "ggml-backend.h"
#include "ggml.h"

namespace sdsage {

// Bits of a runner's setting. 0: the graph stays as it was built.
constexpr unsigned LEVER_LINEAR = 1;   // linear layers: BF16 products by cuBLASLt, with bias, GELU, gate and residual
constexpr unsigned LEVER_FUSE   = 2;   // norms with their modulation, rotary embedding
constexpr unsigned LEVER_VAE    = 4;   // convolutions and norms of the VAE
constexpr unsigned LEVER_FP8    = 8;   // linear layers in FP8: what --fast-linear adds to LEVER_LINEAR
constexpr unsigned LEVER_BATCH  = 16;  // guidance: both forwards of a step as one; only where it is named
constexpr unsigned LEVERS_ALL   = LEVER_LINEAR | LEVER_FUSE | LEVER_VAE;

// A lever that is named is used wherever it can be, also on a device that would not get it by default.
constexpr unsigned LEVERS_NAMED = 1u << 31;

// Reads "default" (or nullptr), "none", or names joined by commas, with LEVER_FP8 if `fast_linear` is set; the job is told what is
// wrong. Levers that were named and that this backend has none of are a warning.
bool read_levers(const char * text, bool fast_linear, unsigned * levers, ggml_backend_t backend);

enum class LeverOp : int32_t {
    // src: weight [K, N], x BF16 [K, ...] or what to_fp8 made of it, then what the flags say: bias [N], gate [N], residual (as the result).
    // Result F32, or BF16 without a residual, [N, ...]: gate * act(weight x + bias) + residual.
    linear,
    to_bf16,  // src: x F32, contiguous
    to_fp8,   // src: x F32 or BF16 [K, ...], contiguous. Result I8: E4M3 [K, tokens], then an F32 scale for each token
    norm,     // src: x F32 [C, ...], then scale [C], shift [C]. Result F32 or BF16: normalized(x) * scale + shift
    scratch,  // no src; nothing is computed: memory, [bytes], for the node that has it as its SCRATCH_SRC
    copy,     // src: x F32 in runs of numbers that lie together (run_of). Result: x, contiguous
    rope,     // src: x F32 [C, tokens, batch], pe [2, 2, head_dim / 2, tokens], weight [C]. Result F32 [head_dim, tokens, heads * batch]
};

// The scratch memory of a node, as a node before it: the graph's allocator reserves it with the rest of the compute buffer.
constexpr int SCRATCH_SRC = GGML_MAX_SRC - 1;

// How many numbers of a strided tensor lie together, from the first dimension on, and `dims` of them.
inline int64_t run_of(const ggml_tensor * t, int * dims) {
    int64_t run = t->ne[0];
    for (*dims = 1; *dims < GGML_MAX_DIMS && t->nb[*dims] == run * sizeof(float); ++*dims) {
        run *= t->ne[*dims];
    }
    return run;
}

constexpr int32_t LINEAR_BIAS = 1, LINEAR_GELU = 2, LINEAR_GATE = 4, LINEAR_RESIDUAL = 8, LINEAR_FP8 = 16;
constexpr int32_t NORM_SCALE = 1, NORM_SHIFT = 2, NORM_ONE_PLUS_SCALE = 4;
constexpr int32_t ROPE_NORM = 1;  // a root mean square over all channels first, times the weight

struct LeverMark {
    uint32_t magic;
    LeverOp op;
    int32_t flags;
    float eps;
    int32_t head_dim;
    const char * why;  // static; of linear layers: why not in FP8 although that was asked for, else nullptr
};
constexpr uint32_t LEVER_MAGIC     = 0x5256454c;
constexpr size_t LEVER_MARK_OFFSET = 32;  // as MARK_OFFSET of sdsage_attention.hpp
static_assert(LEVER_MARK_OFFSET + sizeof(LeverMark) <= GGML_MAX_OP_PARAMS, "the mark has to fit");

inline bool read_lever(const ggml_tensor * node, LeverMark * mark) {
    std::memcpy(mark, reinterpret_cast<const char *>(node->op_params) + LEVER_MARK_OFFSET, sizeof(*mark));
    return node->op == GGML_OP_CUSTOM && mark->magic == LEVER_MAGIC;
}

// What a ggml backend with levers offers under this name (ggml_backend_reg_get_proc_address).
#define SDSAGE_LEVERS_PROC "sdsage_levers_v2"
struct LeverBackend {
    bool (*can_linear)(int device);
    // Whether BF16 products pay on this device for `tokens` rows, beside ggml's quantized ones.
    bool (*prefers_linear)(int device, int64_t tokens);
    bool (*can_convert)(ggml_type weight);
    bool (*can_fp8)(int device, int64_t k, int64_t n, int64_t tokens);
    bool (*supports)(int device, const ggml_tensor * node);   // a node of sdsage_conv.hpp
    size_t (*scratch)(int device, const ggml_tensor * node);  // bytes that a lever's node needs beside its result
};

// Rewrites a runner's graph before it is allocated. The same graph gives the same result.
void pull_levers(ggml_context * ctx, ggml_backend_t backend, ggml_cgraph * graph, unsigned levers, const std::string & runner);

}  // namespace sdsage
