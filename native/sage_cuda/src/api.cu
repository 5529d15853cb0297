// The part of the C API that touches a device.
#include <cmath>
#include <cuda_runtime_api.h>

#include "error.h"
#include "launch.h"
#include "plan.h"

namespace {

using namespace sage;

sage_status cuda_failed(cudaError_t e, const char * what) {
    cudaGetLastError();  // the caller has it as a status; it must not surface again in another library's check
    return fail(SAGE_CUDA_ERROR, "%s failed: %s (%s)", what, cudaGetErrorString(e), cudaGetErrorName(e));
}

// `channels` neighbours can be read or written as one word.
bool is_wide(const sage_tensor & t, int head_dim, int channels) {
    const int64_t bytes = (t.dtype == SAGE_F32 ? 4 : 2) * channels;
    const int64_t any   = t.batch_stride | t.head_stride | t.token_stride;
    return head_dim % channels == 0 && any % channels == 0 && reinterpret_cast<uintptr_t>(t.data) % bytes == 0;
}

Rows rows(const sage_tensor & t, int head_dim) {
    return { t.data, t.batch_stride, t.head_stride, t.token_stride, int(t.dtype), is_wide(t, head_dim, t.dtype == SAGE_F32 ? 4 : 8) };
}

using Launch = cudaError_t (*)(const AttnParams &, cudaStream_t);
Launch launch_of(sage_kernel kernel, int d, bool sm90) {
    switch (kernel) {
        case SAGE_KERNEL_FP16:
            if (sm90) {
                return d == 64 ? launch_qk_int8_pv_f16_sm90_d64 : launch_qk_int8_pv_f16_sm90_d128;
            }
            return d == 64 ? launch_qk_int8_pv_f16_d64 : launch_qk_int8_pv_f16_d128;
        case SAGE_KERNEL_HOPPER:
            return d == 64 ? launch_qk_int8_pv_f8_sm90_d64 : launch_qk_int8_pv_f8_sm90_d128;
        case SAGE_KERNEL_FP8:
            return d == 64 ? launch_qk_int8_pv_f8_d64 : launch_qk_int8_pv_f8_d128;
        default:
            return d == 64 ? launch_qk_int8_pv_f8pp_d64 : launch_qk_int8_pv_f8pp_d128;
    }
}

QuantParams quant_params(const sage_attn_desc & d, const Plan & plan, sage_kernel kernel, char * w) {
    QuantParams p = {};
    p.q           = rows(d.q, d.head_dim);
    p.k           = rows(d.k, d.head_dim);
    p.v           = rows(d.v, d.head_dim);
    p.bias        = d.bias;
    p.bias_stride = d.bias_stride;
    p.batch       = d.batch;
    p.heads       = d.heads;
    p.kv_heads    = d.kv_heads;
    p.head_dim    = d.head_dim;
    p.lq          = int(d.lq);
    p.lk          = int(d.lk);
    p.q_tiles     = int(plan.q_rows / 64);
    p.k_tiles     = int(plan.k_tiles);
    p.stat_tiles  = int(plan.stat_tiles);
    p.q_sign      = d.softmax_scale < 0.f ? -1.f : 1.f;
    p.v_max       = kernel == SAGE_KERNEL_FP16 ? 0.f : kernel == SAGE_KERNEL_FP8PP ? 2.25f : 448.f;
    p.q8          = reinterpret_cast<int8_t *>(w + plan.q8);
    p.k8          = reinterpret_cast<int8_t *>(w + plan.k8);
    p.v_codes     = w + plan.v_codes;
    p.sq          = reinterpret_cast<float *>(w + plan.sq);
    p.sk          = reinterpret_cast<float *>(w + plan.sk);
    p.bias2       = reinterpret_cast<float *>(w + plan.bias2);
    p.k_mean      = reinterpret_cast<float *>(w + plan.k_mean);
    p.v_scale     = reinterpret_cast<float *>(w + plan.v_scale);
    p.v_mean      = reinterpret_cast<float *>(w + plan.v_mean);
    p.part_k      = reinterpret_cast<float *>(w + plan.part_k);
    p.part_v      = reinterpret_cast<float *>(w + plan.part_v);
    p.part_count  = reinterpret_cast<int *>(w + plan.part_count);
    p.v_row       = kernel == SAGE_KERNEL_HOPPER ? 128 : 64;
    return p;
}

AttnParams attn_params(const sage_attn_desc & d, const Plan & plan, const QuantParams & q) {
    AttnParams p = {};
    p.q8         = q.q8;
    p.k8         = q.k8;
    p.v_codes    = q.v_codes;
    p.sq         = q.sq;
    p.sk         = q.sk;
    p.v_scale    = q.v_scale;
    p.v_mean     = q.v_mean;
    p.bias2      = d.bias == nullptr ? nullptr : q.bias2;
    p.o          = d.o.data;
    p.o_batch    = d.o.batch_stride;
    p.o_head     = d.o.head_stride;
    p.o_token    = d.o.token_stride;
    p.o_dtype    = int(d.o.dtype);
    p.o_wide     = is_wide(d.o, d.head_dim, 2);
    p.heads      = d.heads;
    p.kv_heads   = d.kv_heads;
    p.head_dim   = d.head_dim;
    p.lq         = int(d.lq);
    p.lk         = int(d.lk);
    p.q_tiles    = int(plan.q_tiles);
    p.k_tiles    = int(plan.k_tiles);
    p.blocks     = unsigned(plan.q_heads * plan.q_tiles);
    p.causal     = d.causal != 0;
    p.factor     = std::fabs(d.softmax_scale) * LOG2E;
    return p;
}

}  // namespace

extern "C" sage_status sage_device_query(int ordinal, sage_device * device) {
    clear_error();
    if (device == nullptr) {
        return fail(SAGE_BAD_ARGUMENT, "a null device: give a sage_device to fill");
    }
    int major = 0, minor = 0;
    cudaError_t e = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, ordinal);
    if (e == cudaSuccess) {
        e = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, ordinal);
    }
    if (e != cudaSuccess) {
        return cuda_failed(e, "asking the device for its compute capability");
    }
    *device = { major * 10 + minor, CUDART_VERSION, SAGE_ARCHITECTURES };
    return SAGE_OK;
}

extern "C" sage_status sage_attn_run(const sage_attn_desc * desc, void * workspace, size_t workspace_size, void * stream) {
    return run_parts(desc, workspace, workspace_size, stream, QUANTIZE | ATTEND);
}

sage_status sage::run_parts(const sage_attn_desc * desc, void * workspace, size_t workspace_size, void * stream, int parts) {
    clear_error();
    int ordinal         = 0;
    const cudaError_t e = cudaGetDevice(&ordinal);
    if (e != cudaSuccess) {
        return cuda_failed(e, "asking for the current device");
    }
    sage_device device;
    sage_status status = sage_device_query(ordinal, &device);
    if (status != SAGE_OK) {
        return status;
    }
    sage_attn_choice choice = {};
    choice.struct_size      = sizeof choice;
    status                  = sage_attn_choose(desc, &device, &choice);
    if (status != SAGE_OK) {
        return status;
    }
    if (!choice.supported) {
        return fail(SAGE_UNSUPPORTED, "%s (kernel %s, head_dim %d, compute capability %d.%d)", choice.reason,
                    sage_kernel_name(desc->kernel), desc->head_dim, device.compute_capability / 10, device.compute_capability % 10);
    }
    if (!desc->q.data || !desc->k.data || !desc->v.data || !desc->o.data) {
        return fail(SAGE_BAD_ARGUMENT, "q, k, v or o has no data: a run needs all four");
    }
    for (const sage_tensor * t : { &desc->q, &desc->k, &desc->v, &desc->o }) {
        if (reinterpret_cast<uintptr_t>(t->data) % (t->dtype == SAGE_F32 ? 4 : 2) != 0) {
            return fail(SAGE_BAD_ARGUMENT, "data at %p is not aligned to its elements: q, k, v and o start at a whole element", t->data);
        }
    }
    if (reinterpret_cast<uintptr_t>(desc->bias) % sizeof(float) != 0) {
        return fail(SAGE_BAD_ARGUMENT, "bias at %p is not aligned to its elements", (const void *)desc->bias);
    }
    if (workspace == nullptr || reinterpret_cast<uintptr_t>(workspace) % 256 != 0 || workspace_size < choice.workspace) {
        return fail(SAGE_BAD_ARGUMENT, "workspace %p of %zu bytes: %zu bytes, 256-byte aligned, are needed (sage_attn_choose says so)",
                    workspace, workspace_size, choice.workspace);
    }

    const Plan plan      = make_plan(*desc, choice.kernel, has_sm90_code(device));
    const QuantParams q  = quant_params(*desc, plan, choice.kernel, static_cast<char *>(workspace));
    const AttnParams p   = attn_params(*desc, plan, q);
    cudaStream_t on      = static_cast<cudaStream_t>(stream);
    cudaError_t launched = parts & QUANTIZE ? launch_quantize(q, plan.d, on, device.compute_capability >= 90) : cudaSuccess;
    if (launched == cudaSuccess && (parts & ATTEND)) {
        launched = launch_of(choice.kernel, plan.d, plan.sm90)(p, on);
    }
    return launched == cudaSuccess ? SAGE_OK : cuda_failed(launched, "launching attention");
}
