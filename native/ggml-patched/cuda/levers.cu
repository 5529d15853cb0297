// What the levers compute on CUDA (glue/sdsage_levers.hpp); compiled into the ggml-cuda target, called by its edits (group "levers").
#include <cublasLt.h>
#include <cuda_bf16.h>

#include <map>
#include <mutex>
#include <tuple>

#include "common.cuh"
#include "convert.cuh"
#include "sdsage_levers.hpp"

using sdsage::LeverMark;
using sdsage::LeverOp;
using bf16 = nv_bfloat16;

#define LT_CHECK(call)                                                             \
    do {                                                                           \
        const cublasStatus_t status_ = (call);                                     \
        if (status_ != CUBLAS_STATUS_SUCCESS) {                                    \
            GGML_ABORT("cuBLASLt: %s: %s", #call, cublasGetStatusString(status_)); \
        }                                                                          \
    } while (0)

// Below this number of rows reading and writing the weights again takes longer than BF16 products save: of one weight 5 bytes at
// 4 TB/s are 1.25 ps, a row 3 fs by BF16 and 10 fs by ggml's int8 kernels (H200): 180.
static constexpr int64_t FEWEST_TOKENS = 256;

// GPUs for data centres multiply BF16 at full rate with FP32 sums; GeForce and RTX cards at half of it or less, their int8 is four
// times as fast, and ggml's int8 kernels win there. What tells them apart is the rate of FP64, which only the former have.
static bool can_linear(int device) { return ggml_cuda_info().devices[device].cc >= GGML_CUDA_CC_AMPERE; }

static bool prefers_linear(int device, int64_t tokens) {
    int ratio = 0;
    CUDA_CHECK(cudaDeviceGetAttribute(&ratio, cudaDevAttrSingleToDoublePrecisionPerfRatio, device));
    return ratio <= 4 && tokens >= FEWEST_TOKENS;
}

static bool can_convert(ggml_type type) {
    return type == GGML_TYPE_BF16 || type == GGML_TYPE_F16 || (ggml_is_quantized(type) && ggml_get_to_fp16_cuda(type) != nullptr);
}

static int blocks_for(int64_t n, int per_block) { return static_cast<int>(std::min<int64_t>((n + per_block - 1) / per_block, 1 << 16)); }

struct alignas(8) Bf16x4 {
    __nv_bfloat162 a, b;
};

static __device__ inline Bf16x4 rounded(float4 x) { return { __floats2bfloat162_rn(x.x, x.y), __floats2bfloat162_rn(x.z, x.w) }; }

// n is a multiple of 4
static __global__ void to_bf16_kernel(const float4 * __restrict__ x, Bf16x4 * __restrict__ out, int64_t n) {
    for (int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x; i < n; i += int64_t(gridDim.x) * blockDim.x) {
        out[i] = rounded(x[i]);
    }
}

// One run of numbers after the other, 16 bytes at a time; ne1, ne2: how many runs there are in the first two dimensions beyond a run.
static __global__ void copy_kernel(const char * __restrict__ x, float4 * __restrict__ out, int64_t run, int64_t runs, int64_t ne1,
                                   int64_t ne2, int64_t nb1, int64_t nb2, int64_t nb3) {
    for (int64_t r = blockIdx.y; r < runs; r += gridDim.y) {
        const float4 * from = reinterpret_cast<const float4 *>(x + r % ne1 * nb1 + r / ne1 % ne2 * nb2 + r / ne1 / ne2 * nb3);
        for (int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x; i < run; i += int64_t(gridDim.x) * blockDim.x) {
            out[r * run + i] = from[i];
        }
    }
}

// ---- weights as BF16, each row (one output channel) times its gate. Rows have K numbers, a multiple of 8.

static __global__ void q8_0_to_bf16(const block_q8_0 * __restrict__ w, const float * __restrict__ gate, bf16 * __restrict__ out, int64_t k,
                                    int64_t n) {
    const int64_t groups = k * n / 4;  // of four numbers
    for (int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x; i < groups; i += int64_t(gridDim.x) * blockDim.x) {
        const block_q8_0 & block           = w[i / 8];
        const float scale                  = __half2float(block.d) * (gate ? gate[i * 4 / k] : 1.f);
        const char2 lo                     = *reinterpret_cast<const char2 *>(&block.qs[i % 8 * 4]),
                    hi                     = *reinterpret_cast<const char2 *>(&block.qs[i % 8 * 4 + 2]);
        reinterpret_cast<Bf16x4 *>(out)[i] = rounded(make_float4(lo.x * scale, lo.y * scale, hi.x * scale, hi.y * scale));
    }
}

template <typename T>
static __global__ void float16_to_bf16(const T * __restrict__ w, const float * __restrict__ gate, bf16 * __restrict__ out, int64_t k,
                                       int64_t n) {
    for (int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x; i < k * n / 4; i += int64_t(gridDim.x) * blockDim.x) {
        const T * x       = w + i * 4;
        const float scale = gate ? gate[i * 4 / k] : 1.f;
        reinterpret_cast<Bf16x4 *>(out)[i] =
            rounded(make_float4(float(x[0]) * scale, float(x[1]) * scale, float(x[2]) * scale, float(x[3]) * scale));
    }
}

static __global__ void gated_bias(const float * __restrict__ bias, const float * __restrict__ gate, float * out, bf16 * out16, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) {
        const float x = bias[i] * (gate ? gate[i] : 1.f);
        if (out16) {
            out16[i] = __float2bfloat16(x);
        } else {
            out[i] = x;
        }
    }
}

// ---- norm, scale and shift; one block a row

static __device__ inline float block_sum(float x) {
    __shared__ float partial[32];
    x = warp_reduce_sum(x);
    if (threadIdx.x % 32 == 0) {
        partial[threadIdx.x / 32] = x;
    }
    __syncthreads();
    x = threadIdx.x % 32 < blockDim.x / 32 ? partial[threadIdx.x % 32] : 0.f;
    __syncthreads();
    return warp_reduce_sum(x);
}

// A row stays in registers, VALUES groups of four a thread; zeros beyond its end.
template <int VALUES>
static __device__ inline void load_row(float4 (&v)[VALUES], const float * __restrict__ row, int columns) {
#pragma unroll
    for (int j = 0; j < VALUES; j++) {
        const int c = j * blockDim.x + threadIdx.x;
        v[j]        = c < columns / 4 ? reinterpret_cast<const float4 *>(row)[c] : make_float4(0.f, 0.f, 0.f, 0.f);
    }
}

template <int VALUES, typename Out>
static __global__ void norm_kernel(const float * __restrict__ x, const float * __restrict__ scale, const float * __restrict__ shift,
                                   Out * __restrict__ out, int columns, float eps, float one) {
    float4 v[VALUES];
    load_row(v, x + int64_t(blockIdx.x) * columns, columns);
    float sum = 0.f;
#pragma unroll
    for (int j = 0; j < VALUES; j++) {
        sum += v[j].x + v[j].y + v[j].z + v[j].w;
    }
    const float mean = block_sum(sum) / columns;
    float squares    = 0.f;
#pragma unroll
    for (int j = 0; j < VALUES; j++) {
        if (j * blockDim.x + threadIdx.x < columns / 4) {
            v[j].x -= mean, v[j].y -= mean, v[j].z -= mean, v[j].w -= mean;
            squares += v[j].x * v[j].x + v[j].y * v[j].y + v[j].z * v[j].z + v[j].w * v[j].w;
        }
    }
    const float factor = rsqrtf(block_sum(squares) / columns + eps);
#pragma unroll
    for (int j = 0; j < VALUES; j++) {
        const int c = j * blockDim.x + threadIdx.x;
        if (c >= columns / 4) {
            continue;
        }
        float4 s = make_float4(one, one, one, one), t = make_float4(0.f, 0.f, 0.f, 0.f);
        if (scale) {
            const float4 a = reinterpret_cast<const float4 *>(scale)[c];
            s              = make_float4(a.x + one, a.y + one, a.z + one, a.w + one);
        }
        if (shift) {
            t = reinterpret_cast<const float4 *>(shift)[c];
        }
        const float4 y =
            make_float4(v[j].x * factor * s.x + t.x, v[j].y * factor * s.y + t.y, v[j].z * factor * s.z + t.z, v[j].w * factor * s.w + t.w);
        if constexpr (sizeof(Out) == 2) {
            reinterpret_cast<Bf16x4 *>(out + int64_t(blockIdx.x) * columns)[c] = rounded(y);
        } else {
            reinterpret_cast<float4 *>(out + int64_t(blockIdx.x) * columns)[c] = y;
        }
    }
}

// ---- rotary embedding; one block a token, from [heads * head_dim] to [head_dim, tokens, heads]

template <int VALUES>
static __global__ void rope_kernel(const float * __restrict__ x, const float * __restrict__ weight, const float4 * __restrict__ pe,
                                   float * __restrict__ out, int columns, int head_dim, int64_t tokens, float eps) {
    const int64_t token = blockIdx.x, batch = blockIdx.y;
    float4 v[VALUES];
    load_row(v, x + (batch * tokens + token) * columns, columns);
    float squares = 0.f;
#pragma unroll
    for (int j = 0; j < VALUES; j++) {
        squares += v[j].x * v[j].x + v[j].y * v[j].y + v[j].z * v[j].z + v[j].w * v[j].w;
    }
    float factor = 1.f;
    if (weight) {  // the same for the whole block
        factor = rsqrtf(block_sum(squares) / columns + eps);
    }
    pe += token * (head_dim / 2);
    out += batch * tokens * columns + token * head_dim;
#pragma unroll
    for (int j = 0; j < VALUES; j++) {
        const int c = j * blockDim.x + threadIdx.x;
        if (c >= columns / 4) {
            continue;
        }
        float4 y = v[j];
        if (weight) {
            const float4 w = reinterpret_cast<const float4 *>(weight)[c];
            y              = make_float4(y.x * factor * w.x, y.y * factor * w.y, y.z * factor * w.z, y.w * factor * w.w);
        }
        const int head = c * 4 / head_dim, channel = c * 4 % head_dim;
        const float4 p = pe[channel / 2], q = pe[channel / 2 + 1];  // cos, -sin, sin, cos
        reinterpret_cast<float4 *>(out + head * tokens * head_dim)[channel / 4] =
            make_float4(y.x * p.x + y.y * p.y, y.x * p.z + y.y * p.w, y.z * q.x + y.w * q.y, y.z * q.z + y.w * q.w);
    }
}

static constexpr int ROW_THREADS = 256;

// Calls f with the number of float4 that a thread has to hold.
template <class F>
static bool by_columns(int64_t columns, F f) {
    const int64_t values = (columns / 4 + ROW_THREADS - 1) / ROW_THREADS;
    if (columns % 4 != 0 || values > 16) {
        return false;
    }
    values <= 1   ? f(std::integral_constant<int, 1>())
    : values <= 2 ? f(std::integral_constant<int, 2>())
    : values <= 4 ? f(std::integral_constant<int, 4>())
    : values <= 8 ? f(std::integral_constant<int, 8>())
                  : f(std::integral_constant<int, 16>());
    return true;
}

static void compute_norm(ggml_backend_cuda_context & ctx, ggml_tensor * node, const LeverMark & mark) {
    const ggml_tensor * x = node->src[0];
    int next              = 1;
    const auto row        = [&](int32_t flag) { return mark.flags & flag ? static_cast<const float *>(node->src[next++]->data) : nullptr; };
    const float *scale = row(sdsage::NORM_SCALE), *shift = row(sdsage::NORM_SHIFT);
    const float one = scale == nullptr || mark.flags & sdsage::NORM_ONE_PLUS_SCALE ? 1.f : 0.f;
    by_columns(x->ne[0], [&](auto values) {
        const auto launch = [&](auto * out) {
            norm_kernel<values()><<<ggml_nrows(x), ROW_THREADS, 0, ctx.stream()>>>(static_cast<const float *>(x->data), scale, shift, out,
                                                                                   x->ne[0], mark.eps, one);
        };
        node->type == GGML_TYPE_BF16 ? launch(static_cast<bf16 *>(node->data)) : launch(static_cast<float *>(node->data));
    });
    CUDA_CHECK(cudaGetLastError());
}

static void compute_rope(ggml_backend_cuda_context & ctx, ggml_tensor * node, const LeverMark & mark) {
    const ggml_tensor *x = node->src[0], *pe = node->src[1], *w = mark.flags & sdsage::ROPE_NORM ? node->src[2] : nullptr;
    const int64_t columns = w ? w->ne[0] : x->ne[0] * x->ne[1], tokens = pe->ne[3], batch = ggml_nelements(x) / (columns * tokens);
    by_columns(columns, [&](auto values) {
        rope_kernel<values()><<<dim3(tokens, batch), ROW_THREADS, 0, ctx.stream()>>>(
            static_cast<const float *>(x->data), w ? static_cast<const float *>(w->data) : nullptr, static_cast<const float4 *>(pe->data),
            static_cast<float *>(node->data), columns, mark.head_dim, tokens, mark.eps);
    });
    CUDA_CHECK(cudaGetLastError());
}

static void compute_to_bf16(ggml_backend_cuda_context & ctx, ggml_tensor * node) {
    const int64_t n = ggml_nelements(node) / 4;
    to_bf16_kernel<<<blocks_for(n, 256), 256, 0, ctx.stream()>>>(static_cast<const float4 *>(node->src[0]->data),
                                                                 static_cast<Bf16x4 *>(node->data), n);
    CUDA_CHECK(cudaGetLastError());
}

static void compute_copy(ggml_backend_cuda_context & ctx, ggml_tensor * node) {
    const ggml_tensor * x = node->src[0];
    int dims;
    const int64_t run = sdsage::run_of(x, &dims) / 4, runs = ggml_nelements(x) / 4 / run;
    const auto ne = [&](int i) { return dims + i < GGML_MAX_DIMS ? x->ne[dims + i] : int64_t(1); };
    const auto nb = [&](int i) { return dims + i < GGML_MAX_DIMS ? int64_t(x->nb[dims + i]) : int64_t(0); };
    const dim3 blocks(std::min<int64_t>((run + 1023) / 1024, 1 << 16), std::min<int64_t>(runs, 1 << 15));
    copy_kernel<<<blocks, 256, 0, ctx.stream()>>>(static_cast<const char *>(x->data), static_cast<float4 *>(node->data), run, runs, ne(0),
                                                  ne(1), nb(0), nb(1), nb(2));
    CUDA_CHECK(cudaGetLastError());
}

// ---- linear layers

struct LtPlan {
    cublasLtMatmulDesc_t operation = nullptr;
    cublasLtMatrixLayout_t weight = nullptr, x = nullptr, residual = nullptr, result = nullptr;
    cublasLtMatmulAlgo_t algorithm = {};
};

static constexpr size_t LT_WORKSPACE = 32 << 20;

static cublasLtHandle_t lt_handle(int device) {
    static std::mutex lock;
    static std::map<int, cublasLtHandle_t> handles;
    std::lock_guard<std::mutex> hold(lock);
    cublasLtHandle_t & handle = handles[device];
    if (handle == nullptr) {
        LT_CHECK(cublasLtCreate(&handle));
    }
    return handle;
}

// Kept for the process: a handful of shapes a model.
static const LtPlan & plan_for(int device, int64_t k, int64_t n, int64_t tokens, int32_t flags, bool to_bf16) {
    static std::mutex lock;
    static std::map<std::tuple<int, int64_t, int64_t, int64_t, int32_t, bool>, LtPlan> plans;
    const int32_t relevant = flags & (sdsage::LINEAR_BIAS | sdsage::LINEAR_GELU | sdsage::LINEAR_RESIDUAL);
    std::lock_guard<std::mutex> hold(lock);
    LtPlan & plan = plans[{ device, k, n, tokens, relevant, to_bf16 }];
    if (plan.operation != nullptr) {
        return plan;
    }
    const bool bias = flags & sdsage::LINEAR_BIAS, gelu = flags & sdsage::LINEAR_GELU;
    const cudaDataType_t out           = to_bf16 ? CUDA_R_16BF : CUDA_R_32F;
    const cublasOperation_t transposed = CUBLAS_OP_T;
    const cublasLtEpilogue_t epilogue  = gelu   ? (bias ? CUBLASLT_EPILOGUE_GELU_BIAS : CUBLASLT_EPILOGUE_GELU)
                                         : bias ? CUBLASLT_EPILOGUE_BIAS
                                                : CUBLASLT_EPILOGUE_DEFAULT;
    LT_CHECK(cublasLtMatmulDescCreate(&plan.operation, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    LT_CHECK(cublasLtMatmulDescSetAttribute(plan.operation, CUBLASLT_MATMUL_DESC_TRANSA, &transposed, sizeof(transposed)));
    LT_CHECK(cublasLtMatmulDescSetAttribute(plan.operation, CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue, sizeof(epilogue)));
    if (bias) {
        LT_CHECK(cublasLtMatmulDescSetAttribute(plan.operation, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, &out, sizeof(out)));
    }
    LT_CHECK(cublasLtMatrixLayoutCreate(&plan.weight, CUDA_R_16BF, k, n, k));
    LT_CHECK(cublasLtMatrixLayoutCreate(&plan.x, CUDA_R_16BF, k, tokens, k));
    LT_CHECK(cublasLtMatrixLayoutCreate(&plan.residual, out, n, tokens, n));
    LT_CHECK(cublasLtMatrixLayoutCreate(&plan.result, out, n, tokens, n));
    cublasLtMatmulPreference_t preference;
    LT_CHECK(cublasLtMatmulPreferenceCreate(&preference));
    LT_CHECK(
        cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &LT_WORKSPACE, sizeof(LT_WORKSPACE)));
    const uint32_t alignment = 16;  // rows are multiples of 8 numbers; ggml aligns to 128, less than is taken for granted here
    for (auto attribute : { CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
                            CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES }) {
        LT_CHECK(cublasLtMatmulPreferenceSetAttribute(preference, attribute, &alignment, sizeof(alignment)));
    }
    cublasLtMatmulHeuristicResult_t found = {};
    int count                             = 0;
    LT_CHECK(cublasLtMatmulAlgoGetHeuristic(lt_handle(device), plan.operation, plan.weight, plan.x, plan.residual, plan.result, preference,
                                            1, &found, &count));
    cublasLtMatmulPreferenceDestroy(preference);
    if (count == 0) {
        GGML_ABORT("cuBLASLt has no way to multiply %lld x %lld by %lld", (long long)n, (long long)k, (long long)tokens);
    }
    plan.algorithm = found.algo;
    return plan;
}

static const bf16 * weight_in_bf16(ggml_backend_cuda_context & ctx, const ggml_tensor * w, const float * gate,
                                   ggml_cuda_pool_alloc<bf16> & memory) {
    if (w->type == GGML_TYPE_BF16 && gate == nullptr) {
        return static_cast<const bf16 *>(w->data);
    }
    const int64_t k = w->ne[0], n = w->ne[1], groups = k * n / 4;
    bf16 * out          = memory.alloc(k * n);
    const int blocks    = blocks_for(groups, 256);
    cudaStream_t stream = ctx.stream();
    switch (w->type) {
        case GGML_TYPE_Q8_0:
            q8_0_to_bf16<<<blocks, 256, 0, stream>>>(static_cast<const block_q8_0 *>(w->data), gate, out, k, n);
            break;
        case GGML_TYPE_BF16:
            float16_to_bf16<<<blocks, 256, 0, stream>>>(static_cast<const bf16 *>(w->data), gate, out, k, n);
            break;
        case GGML_TYPE_F16:
            float16_to_bf16<<<blocks, 256, 0, stream>>>(static_cast<const half *>(w->data), gate, out, k, n);
            break;
        default: {
            ggml_cuda_pool_alloc<half> halves(ctx.pool(), k * n);
            ggml_get_to_fp16_cuda(w->type)(w->data, halves.get(), k * n, stream);
            float16_to_bf16<<<blocks, 256, 0, stream>>>(halves.get(), gate, out, k, n);
        }
    }
    CUDA_CHECK(cudaGetLastError());
    return out;
}

static void compute_linear(ggml_backend_cuda_context & ctx, ggml_tensor * node, const LeverMark & mark) {
    const ggml_tensor *w = node->src[0], *x = node->src[1];
    int next          = 2;
    const auto given  = [&](int32_t flag) { return mark.flags & flag ? static_cast<const float *>(node->src[next++]->data) : nullptr; };
    const float *bias = given(sdsage::LINEAR_BIAS), *gate = given(sdsage::LINEAR_GATE), *residual = given(sdsage::LINEAR_RESIDUAL);
    const int64_t k = w->ne[0], n = w->ne[1], tokens = ggml_nelements(x) / k;
    const bool to_bf16 = node->type == GGML_TYPE_BF16;
    GGML_ASSERT(!to_bf16 || residual == nullptr);
    const LtPlan & plan = plan_for(ctx.device, k, n, tokens, mark.flags, to_bf16);

    ggml_cuda_pool_alloc<bf16> weight_memory(ctx.pool());
    const bf16 * weight = weight_in_bf16(ctx, w, gate, weight_memory);
    ggml_cuda_pool_alloc<float> bias_memory(ctx.pool());
    cublasLtMatmulDesc_t operation = plan.operation;
    std::remove_pointer_t<cublasLtMatmulDesc_t> with_bias;
    if (bias != nullptr) {
        const void * used = bias;
        if (gate != nullptr || to_bf16) {
            float * made = bias_memory.alloc(n);
            gated_bias<<<(n + 255) / 256, 256, 0, ctx.stream()>>>(bias, gate, made, to_bf16 ? reinterpret_cast<bf16 *>(made) : nullptr, n);
            CUDA_CHECK(cudaGetLastError());
            used = made;
        }
        with_bias = *plan.operation;  // the plan is shared, the pointer is this node's
        operation = &with_bias;
        LT_CHECK(cublasLtMatmulDescSetAttribute(operation, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &used, sizeof(used)));
    }
    ggml_cuda_pool_alloc<char> workspace(ctx.pool(), LT_WORKSPACE);  // the pool frees in reverse order: allocated last, declared last
    const float one = 1.f, beta = residual ? 1.f : 0.f;
    LT_CHECK(cublasLtMatmul(lt_handle(ctx.device), operation, &one, weight, plan.weight, x->data, plan.x, &beta,
                            residual ? static_cast<const void *>(residual) : node->data, plan.residual, node->data, plan.result,
                            &plan.algorithm, workspace.get(), LT_WORKSPACE, ctx.stream()));
}

// conv_node.cu
bool sdsage_conv_supported(int device, const ggml_tensor * node);
bool sdsage_conv_compute(ggml_backend_cuda_context & ctx, ggml_tensor * node);

// Named by the edits of ggml-cuda.cu.
extern const sdsage::LeverBackend sdsage_lever_backend = { can_linear, prefers_linear, can_convert, sdsage_conv_supported };

bool sdsage_lever_supported(int device, const ggml_tensor * node) {
    LeverMark mark;
    return sdsage::read_lever(node, &mark) || sdsage_conv_supported(device, node);
}

bool sdsage_lever_compute(ggml_backend_cuda_context & ctx, ggml_tensor * node) {
    LeverMark mark;
    if (!sdsage::read_lever(node, &mark)) {
        return sdsage_conv_compute(ctx, node);
    }
    switch (mark.op) {
        case LeverOp::linear:
            compute_linear(ctx, node, mark);
            return true;
        case LeverOp::to_bf16:
            compute_to_bf16(ctx, node);
            return true;
        case LeverOp::copy:
            compute_copy(ctx, node);
            return true;
        case LeverOp::norm:
            compute_norm(ctx, node, mark);
            return true;
        case LeverOp::rope:
            compute_rope(ctx, node, mark);
            return true;
    }
    return false;
}
