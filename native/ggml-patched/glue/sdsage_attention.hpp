// Attention of stable-diffusion.cpp's graphs: SageAttention nodes, and a mark on every attention that says what computes it.
//
// A SageAttention node is a GGML_OP_CUSTOM of ggml, known by the mark behind ggml's own parameters; the CUDA backend runs it
// (cuda/sage_node.cu). q, k and v reach it as strided F32 views [head_dim, tokens, heads, batch].
#pragma once

#include <cstdint>
#include <cstring>
#include <string>

#include "ggml-backend.h"
#include "ggml.h"
#include "sage_cuda.h"

namespace sdsage {

// A runner's setting, in place of upstream's bool: true is ATTN_FLASH. Sage takes precedence, FlashAttention is next.
constexpr int ATTN_FLASH        = 1;
constexpr int ATTN_SAGE         = 2;
constexpr int ATTN_KERNEL_SHIFT = 2;  // the sage_kernel that was asked for

inline int sage_setting(sage_kernel kernel) { return ATTN_FLASH | ATTN_SAGE | static_cast<int>(kernel) << ATTN_KERNEL_SHIFT; }

enum class Method : int32_t { ordinary, flash, sage };

// In op_params of the node that an attention ends with. Addresses and values are the same whenever a graph is built again.
struct AttentionMark {
    uint32_t magic;
    Method method;
    sage_kernel kernel;  // of a SageAttention node: never AUTO
    float softmax_scale;
    const char * why;  // static; why SageAttention was asked for and is not used here, else nullptr
};

constexpr uint32_t MARK_MAGIC = 0x45474153;
constexpr size_t MARK_OFFSET  = 32;  // ggml_custom_op_params takes 24 bytes, the parameters of other ops at most 20
static_assert(MARK_OFFSET + sizeof(AttentionMark) <= GGML_MAX_OP_PARAMS, "the mark has to fit");

inline void write_mark(ggml_tensor * node, const AttentionMark & mark) {
    std::memcpy(reinterpret_cast<char *>(node->op_params) + MARK_OFFSET, &mark, sizeof(mark));
}

inline bool read_mark(const ggml_tensor * node, AttentionMark * mark) {
    std::memcpy(mark, reinterpret_cast<const char *>(node->op_params) + MARK_OFFSET, sizeof(*mark));
    return mark->magic == MARK_MAGIC;
}

// What the kernels are told about a node; false for any other node.
inline bool read_sage_node(const ggml_tensor * node, sage_attn_desc * desc) {
    AttentionMark mark;
    if (node->op != GGML_OP_CUSTOM || !read_mark(node, &mark) || mark.method != Method::sage) {
        return false;
    }
    const ggml_tensor *q = node->src[0], *k = node->src[1], *v = node->src[2], *bias = node->src[3];
    const auto strided = [](const ggml_tensor * t, int head, int token) -> sage_tensor {
        const auto stride = [&](int dim) { return static_cast<int64_t>(t->nb[dim] / sizeof(float)); };
        return { t->data, SAGE_F32, stride(3), stride(head), stride(token) };
    };
    *desc               = {};
    desc->struct_size   = sizeof(*desc);
    desc->kernel        = mark.kernel;
    desc->batch         = static_cast<int32_t>(q->ne[3]);
    desc->heads         = static_cast<int32_t>(q->ne[2]);
    desc->kv_heads      = static_cast<int32_t>(k->ne[2]);
    desc->head_dim      = static_cast<int32_t>(q->ne[0]);
    desc->lq            = q->ne[1];
    desc->lk            = k->ne[1];
    desc->softmax_scale = mark.softmax_scale;
    desc->bias          = bias ? static_cast<const float *>(bias->data) : nullptr;
    desc->bias_stride   = bias && bias->ne[3] > 1 ? static_cast<int64_t>(bias->nb[3] / sizeof(float)) : 0;
    desc->q             = strided(q, 2, 1);
    desc->k             = strided(k, 2, 1);
    desc->v             = strided(v, 2, 1);
    desc->o             = strided(node, 1, 2);
    return true;
}

// What a ggml backend with SageAttention offers under the name SAGE_PROC (ggml_backend_reg_get_proc_address).
#define SDSAGE_SAGE_PROC "sdsage_sage_v1"
struct SageBackend {
    // From now on a node of this thread that does not run leaves its reason here instead of ending the process; nullptr: no more.
    void (*catch_failure)(std::string * reason);
    sage_status (*device_query)(int ordinal, sage_device * device);
    sage_status (*choose)(const sage_attn_desc * desc, const sage_device * device, sage_attn_choice * choice);
    const char * (*last_error)();
};

const char * sage_kernel_text(sage_kernel kernel);  // "auto", "fp16", "fp8", "fp8++", "hopper"

// Builds the node and returns its result [head_dim * heads, tokens, batch], or nullptr with a reason when the kernels do not
// take this case. Shapes are those of ggml_ext_attention_ext. kv_scale has no part here: every group of K and channel of V
// has a scale of its own, so that no value of theirs can overflow.
ggml_tensor * sage_attention(ggml_context * ctx, ggml_backend_t backend, ggml_tensor * q, ggml_tensor * k, ggml_tensor * v, int64_t n_head,
                             ggml_tensor * mask, bool skip_reshape, int setting, const char ** why);

// Marks what upstream's own code built.
inline void mark_attention(ggml_tensor * node, bool flash, const char * why) {
    write_mark(node, { MARK_MAGIC, flash ? Method::flash : Method::ordinary, SAGE_KERNEL_AUTO, 0.f, why });
}

// A mask as ggml's FlashAttention reads it: [L_k, L_q, 1 or heads, 1 or N]. Given: [L_k, L_q or 1, 1, heads or N].
inline ggml_tensor * flash_mask(ggml_context * ctx, ggml_tensor * mask, int64_t lq, int64_t batch) {
    if (batch > 1 && mask->ne[2] == batch) {
        mask = ggml_reshape_4d(ctx, ggml_cont(ctx, mask), mask->ne[0], mask->ne[1], 1, batch);
    }
    return mask->ne[1] == lq ? mask : ggml_repeat_4d(ctx, mask, mask->ne[0], lq, mask->ne[2], mask->ne[3]);
}

// Refuses the job, with the reason, when `kernel` can't run on this backend's device or gives wrong results there.
bool check_sage(ggml_backend_t backend, sage_kernel kernel);

// Called for every graph that was computed, with the runner's own name.
void count_attention(ggml_cgraph * graph, const std::string & runner, bool is_diffusion_model);

}  // namespace sdsage
