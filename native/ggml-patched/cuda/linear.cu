#include "linear.cuh"

#include <cublasLt.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <map>
#include <mutex>
#include <tuple>

#include "rows.cuh"

namespace sdsage {
namespace {

constexpr float E4M3_MAX       = 448.f;
constexpr size_t LT_WORKSPACE  = 32 << 20;
constexpr size_t SCRATCH_ALIGN = 128;  // as ggml aligns
constexpr size_t LT_ALIGN      = 256;  // of a workspace: cuBLASLt refuses others on compute capability 9.0

struct Q8_0 {
    __half scale;
    int8_t codes[32];
};

// Four numbers of a row that has a multiple of four.
__device__ inline float4 load4(const float * x, int64_t group) { return reinterpret_cast<const float4 *>(x)[group]; }
__device__ inline float4 load4(const bf16 * x, int64_t group) { return widened(reinterpret_cast<const Bf16x4 *>(x)[group]); }
__device__ inline float4 load4(const __half * x, int64_t group) {
    const float2 a = __half22float2(reinterpret_cast<const __half2 *>(x)[group * 2]),
                 b = __half22float2(reinterpret_cast<const __half2 *>(x)[group * 2 + 1]);
    return make_float4(a.x, a.y, b.x, b.y);
}
__device__ inline float4 load4(const Q8_0 * x, int64_t group) {
    const Q8_0 & block = x[group / 8];
    const float scale  = __half2float(block.scale);
    const char2 *codes = reinterpret_cast<const char2 *>(&block.codes[group % 8 * 4]), lo = codes[0], hi = codes[1];
    return make_float4(lo.x * scale, lo.y * scale, hi.x * scale, hi.y * scale);
}

// ---- BF16: each row (one output channel) times its gate

template <class T>
__global__ void weight_to_bf16(const T * __restrict__ w, const float * __restrict__ gate, Bf16x4 * __restrict__ out, int64_t k, int64_t n) {
    for (int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x; i < k * n / 4; i += int64_t(gridDim.x) * blockDim.x) {
        const float4 x     = load4(w, i);
        const float factor = gate ? gate[i * 4 / k] : 1.f;
        out[i]             = rounded(make_float4(x.x * factor, x.y * factor, x.z * factor, x.w * factor));
    }
}

__global__ void gated_bias(const float * __restrict__ bias, const float * __restrict__ gate, void * out, bool to_bf16, int64_t n) {
    const int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x;
    if (i < n) {
        const float x = bias[i] * (gate ? gate[i] : 1.f);
        if (to_bf16) {
            static_cast<bf16 *>(out)[i] = __float2bfloat16(x);
        } else {
            static_cast<float *>(out)[i] = x;
        }
    }
}

// ---- FP8

__device__ inline uint32_t e4m3(float4 x, float factor) {
    const auto two = [&](float a, float b) {
        return static_cast<uint32_t>(__nv_cvt_float2_to_fp8x2(make_float2(a * factor, b * factor), __NV_SATFINITE, __NV_E4M3));
    };
    return two(x.x, x.y) | two(x.z, x.w) << 16;
}

// One block a row, which stays in registers between its maximum and its codes.
template <int VALUES, class T>
__global__ void __launch_bounds__(ROW_THREADS) rows_to_fp8_kernel(const T * __restrict__ x, const float * __restrict__ factors,
                                                                  uint32_t * __restrict__ codes, float * __restrict__ scales, int columns) {
    const int64_t groups = columns / 4, begin = blockIdx.x * groups;
    float4 v[VALUES];
    float largest = 0.f;
#pragma unroll
    for (int j = 0; j < VALUES; j++) {
        const int c = j * ROW_THREADS + threadIdx.x;
        v[j]        = c < groups ? load4(x, begin + c) : make_float4(0.f, 0.f, 0.f, 0.f);
        largest     = fmaxf(largest, fmaxf(fmaxf(fabsf(v[j].x), fabsf(v[j].y)), fmaxf(fabsf(v[j].z), fabsf(v[j].w))));
    }
    const float scale = fmaxf(block_max(largest), 1e-30f) / E4M3_MAX;  // its reciprocal is finite
    if (threadIdx.x == 0) {
        scales[blockIdx.x] = scale * (factors ? factors[blockIdx.x] : 1.f);
    }
#pragma unroll
    for (int j = 0; j < VALUES; j++) {
        const int c = j * ROW_THREADS + threadIdx.x;
        if (c < groups) {
            codes[begin + c] = e4m3(v[j], 1.f / scale);
        }
    }
}

// What follows a product whose epilogue cuBLASLt does not have: y = act(product + bias) + residual. y may be the product.
template <class Y>
__global__ void finish_kernel(const Bf16x4 * product, const float4 * __restrict__ bias, const float4 * __restrict__ residual, Y * y,
                              bool gelu, int64_t groups, int64_t row) {
    const auto act = [&](float x) { return gelu ? 0.5f * x * (1.f + tanhf(0.79788456f * x * (1.f + 0.044715f * x * x))) : x; };
    for (int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x; i < groups; i += int64_t(gridDim.x) * blockDim.x) {
        float4 v       = widened(product[i]);
        const float4 b = bias ? bias[i % row] : make_float4(0.f, 0.f, 0.f, 0.f),
                     r = residual ? residual[i] : make_float4(0.f, 0.f, 0.f, 0.f);
        v              = make_float4(act(v.x + b.x) + r.x, act(v.y + b.y) + r.y, act(v.z + b.z) + r.z, act(v.w + b.w) + r.w);
        if constexpr (sizeof(Y) == sizeof(float4)) {
            y[i] = v;
        } else {
            y[i] = rounded(v);
        }
    }
}

// ---- cuBLASLt

struct Plan {
    cublasLtMatmulDesc_t operation = nullptr;
    cublasLtMatrixLayout_t weight = nullptr, x = nullptr, result = nullptr;
    cublasLtMatmulAlgo_t algorithm = {};
    std::string problem;  // why there is none
};

#define LT_TRY(call)                                                                        \
    do {                                                                                    \
        const cublasStatus_t status_ = (call);                                              \
        if (status_ != CUBLAS_STATUS_SUCCESS) {                                             \
            return std::string("cuBLASLt: " #call ": ") + cublasLtGetStatusString(status_); \
        }                                                                                   \
    } while (0)

#define CUDA_TRY(call)                                                            \
    do {                                                                          \
        const cudaError_t error_ = (call);                                        \
        if (error_ != cudaSuccess) {                                              \
            return std::string("CUDA: " #call ": ") + cudaGetErrorString(error_); \
        }                                                                         \
    } while (0)

std::mutex lock;  // of handles and plans

// Call with the lock held.
static std::string lt_handle(int device, cublasLtHandle_t * handle) {
    static std::map<int, cublasLtHandle_t> handles;
    cublasLtHandle_t & known = handles[device];
    if (known == nullptr) {
        LT_TRY(cublasLtCreate(&known));
    }
    *handle = known;
    return "";
}

template <class T>
cublasStatus_t set(cublasLtMatmulDesc_t operation, cublasLtMatmulDescAttributes_t attribute, const T & value) {
    return cublasLtMatmulDescSetAttribute(operation, attribute, &value, sizeof(value));
}

static std::string make_plan(cublasLtHandle_t handle, const Linear & linear, Plan * plan) {
    const cudaDataType_t in = linear.fp8 ? CUDA_R_8F_E4M3 : CUDA_R_16BF, out = linear.y_bf16 ? CUDA_R_16BF : CUDA_R_32F;
    const bool bias                   = linear.bias != nullptr;
    const cublasLtEpilogue_t epilogue = linear.gelu ? (bias ? CUBLASLT_EPILOGUE_GELU_BIAS : CUBLASLT_EPILOGUE_GELU)
                                        : bias      ? CUBLASLT_EPILOGUE_BIAS
                                                    : CUBLASLT_EPILOGUE_DEFAULT;
    LT_TRY(cublasLtMatmulDescCreate(&plan->operation, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    LT_TRY(set(plan->operation, CUBLASLT_MATMUL_DESC_TRANSA, CUBLAS_OP_T));
    LT_TRY(set(plan->operation, CUBLASLT_MATMUL_DESC_EPILOGUE, epilogue));
    if (bias) {  // beside FP8 it is BF16, whatever the result is
        LT_TRY(set(plan->operation, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, linear.fp8 ? CUDA_R_16BF : out));
    }
    if (linear.fp8) {
#if CUBLAS_VER_MAJOR * 100 + CUBLAS_VER_MINOR >= 1209
        const void * some = reinterpret_cast<const void *>(SCRATCH_ALIGN);  // the heuristic wants to see that there are scales
        LT_TRY(set(plan->operation, CUBLASLT_MATMUL_DESC_A_SCALE_MODE, CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F));
        LT_TRY(set(plan->operation, CUBLASLT_MATMUL_DESC_B_SCALE_MODE, CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F));
        LT_TRY(set(plan->operation, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, some));
        LT_TRY(set(plan->operation, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, some));
#else
        return "cuBLAS before 12.9 has no scales for rows and columns";
#endif
    }
    LT_TRY(cublasLtMatrixLayoutCreate(&plan->weight, in, linear.k, linear.n, linear.k));
    LT_TRY(cublasLtMatrixLayoutCreate(&plan->x, in, linear.k, linear.tokens, linear.k));
    LT_TRY(cublasLtMatrixLayoutCreate(&plan->result, out, linear.n, linear.tokens, linear.n));
    cublasLtMatmulPreference_t preference;
    LT_TRY(cublasLtMatmulPreferenceCreate(&preference));
    LT_TRY(cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &LT_WORKSPACE, sizeof(LT_WORKSPACE)));
    const uint32_t alignment = 16;  // ggml aligns to 128, less than is taken for granted here
    for (auto attribute : { CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
                            CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES }) {
        LT_TRY(cublasLtMatmulPreferenceSetAttribute(preference, attribute, &alignment, sizeof(alignment)));
    }
    cublasLtMatmulHeuristicResult_t found = {};
    int count                             = 0;
    const cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(handle, plan->operation, plan->weight, plan->x, plan->result, plan->result,
                                                                 preference, 1, &found, &count);
    cublasLtMatmulPreferenceDestroy(preference);
    if (status != CUBLAS_STATUS_SUCCESS || count == 0) {
        return "cuBLASLt has no way to multiply " + std::to_string(linear.n) + " x " + std::to_string(linear.k) + " by " +
               std::to_string(linear.tokens) + (linear.fp8 ? " in FP8" : "");
    }
    plan->algorithm = found.algo;
    return "";
}

// A handle belongs to the device that was current when it was made, and whoever asks may not have set one yet.
struct OnDevice {
    int before = 0;
    explicit OnDevice(int device) {
        cudaGetDevice(&before);
        cudaSetDevice(device);
    }
    ~OnDevice() { cudaSetDevice(before); }
    OnDevice(const OnDevice &)             = delete;
    OnDevice & operator=(const OnDevice &) = delete;
};

// Kept for the process: a handful of shapes a model.
static const Plan & plan_for(int device, const Linear & linear, cublasLtHandle_t * handle) {
    static std::map<std::tuple<int, int64_t, int64_t, int64_t, int>, Plan> plans;
    const int kind = (linear.bias != nullptr) | linear.gelu << 1 | linear.y_bf16 << 2 | linear.fp8 << 3;
    std::lock_guard<std::mutex> hold(lock);
    const OnDevice current(device);
    const std::string problem = lt_handle(device, handle);
    const auto [at, made]     = plans.try_emplace({ device, linear.k, linear.n, linear.tokens, kind });
    if (made) {
        at->second.problem = problem.empty() ? make_plan(*handle, linear, &at->second) : problem;
    }
    return at->second;
}

// The bare product in BF16, for what cuBLASLt does not fuse with FP8.
static Linear bare(const Linear & linear) {
    Linear product   = linear;
    product.bias     = nullptr;
    product.residual = nullptr;
    product.gelu     = false;
    product.y_bf16   = true;
    return product;
}

// Pieces of scratch, one behind the other.
struct Pieces {
    size_t weight, scales, bias, product, workspace, end;
};

static Pieces pieces_of(const Linear & linear, bool fused) {
    const auto padded = [](size_t bytes) { return (bytes + SCRATCH_ALIGN - 1) / SCRATCH_ALIGN * SCRATCH_ALIGN; };
    const size_t k = linear.k, n = linear.n, tokens = linear.tokens;
    const bool as_it_is = !linear.fp8 && linear.type == Numbers::bf16 && linear.gate == nullptr;
    Pieces at;
    at.weight    = 0;
    at.scales    = at.weight + (as_it_is ? 0 : padded(k * n * (linear.fp8 ? 1 : 2)));
    at.bias      = at.scales + (linear.fp8 ? padded(n * sizeof(float)) : 0);
    at.product   = at.bias + (linear.bias ? padded(n * sizeof(float)) : 0);
    at.workspace = at.product + (fused || linear.y_bf16 ? 0 : padded(n * tokens * sizeof(bf16)));
    at.end       = at.workspace + LT_WORKSPACE + LT_ALIGN - SCRATCH_ALIGN;
    return at;
}

template <class F>
void with_weight(const Linear & linear, F f) {
    switch (linear.type) {
        case Numbers::q8_0:
            return f(static_cast<const Q8_0 *>(linear.weight));
        case Numbers::bf16:
            return f(static_cast<const bf16 *>(linear.weight));
        case Numbers::f16:
            return f(static_cast<const __half *>(linear.weight));
        case Numbers::f32:
            return f(static_cast<const float *>(linear.weight));
    }
}

}  // namespace

bool fp8_supported(int device, int64_t k, int64_t n, int64_t tokens) {
    if (k % 16 != 0 || n % 16 != 0 || k > MAX_COLUMNS) {
        return false;
    }
    Linear linear = {};
    linear.k      = k;
    linear.n      = n;
    linear.tokens = tokens;
    linear.fp8    = true;
    cublasLtHandle_t handle;
    return plan_for(device, bare(linear), &handle).problem.empty();
}

size_t linear_scratch(int device, const Linear & linear) {
    cublasLtHandle_t handle;
    return pieces_of(linear, plan_for(device, linear, &handle).problem.empty()).end;
}

cudaError_t rows_to_fp8(Numbers type, const void * x, const float * factors, int64_t rows, int64_t columns, void * codes, float * scales,
                        cudaStream_t stream) {
    Linear of     = {};
    of.weight     = x;
    of.type       = type;
    bool possible = columns % 16 == 0;
    with_weight(of, [&](const auto * from) {
        possible = possible && by_columns(columns, [&](auto values) {
                       rows_to_fp8_kernel<values()><<<rows, ROW_THREADS, 0, stream>>>(from, factors, static_cast<uint32_t *>(codes), scales,
                                                                                      static_cast<int>(columns));
                   });
    });
    return possible ? cudaGetLastError() : cudaErrorInvalidValue;
}

std::string linear_run(int device, const Linear & linear, void * scratch, cudaStream_t stream) {
    cublasLtHandle_t handle;
    const Plan * plan = &plan_for(device, linear, &handle);
    const bool fused  = plan->problem.empty();
    if (!fused && linear.fp8) {
        plan = &plan_for(device, bare(linear), &handle);
    }
    if (!plan->problem.empty()) {
        return plan->problem;
    }
    const Pieces at  = pieces_of(linear, fused);
    const auto piece = [&](size_t begin) { return static_cast<void *>(static_cast<char *>(scratch) + begin); };
    const int64_t k = linear.k, n = linear.n, groups = n * linear.tokens / 4;
    const void *weight = linear.weight, *bias = linear.bias;
    if (linear.fp8) {
        CUDA_TRY(rows_to_fp8(linear.type, weight, linear.gate, n, k, piece(at.weight), static_cast<float *>(piece(at.scales)), stream));
        weight = piece(at.weight);
    } else if (at.scales > at.weight) {
        with_weight(linear, [&](const auto * from) {
            weight_to_bf16<<<blocks_for(k * n / 4, 256), 256, 0, stream>>>(from, linear.gate, static_cast<Bf16x4 *>(piece(at.weight)), k,
                                                                           n);
        });
        CUDA_TRY(cudaGetLastError());
        weight = piece(at.weight);
    }
    const bool bias_bf16 = fused && (linear.fp8 || linear.y_bf16);
    if (bias != nullptr && (linear.gate != nullptr || bias_bf16)) {
        gated_bias<<<blocks_for(n, 256), 256, 0, stream>>>(linear.bias, linear.gate, piece(at.bias), bias_bf16, n);
        CUDA_TRY(cudaGetLastError());
        bias = piece(at.bias);
    }
    std::remove_pointer_t<cublasLtMatmulDesc_t> operation = *plan->operation;  // the plan is shared, the pointers are this layer's
    if (bias != nullptr && fused) {
        LT_TRY(set(&operation, CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias));
    }
    if (linear.fp8) {
        const void *of_weight = piece(at.scales), *of_x = static_cast<const char *>(linear.x) + k * linear.tokens;
        LT_TRY(set(&operation, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, of_weight));
        LT_TRY(set(&operation, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, of_x));
    }
    void * product   = fused || linear.y_bf16 ? linear.y : piece(at.product);
    void * workspace = reinterpret_cast<void *>((reinterpret_cast<uintptr_t>(piece(at.workspace)) + LT_ALIGN - 1) / LT_ALIGN * LT_ALIGN);
    const bool adds  = fused && linear.residual != nullptr;
    const float one = 1.f, beta = adds ? 1.f : 0.f;
    const void * addend = adds ? static_cast<const void *>(linear.residual) : product;
    LT_TRY(cublasLtMatmul(handle, &operation, &one, weight, plan->weight, linear.x, plan->x, &beta, addend, plan->result, product,
                          plan->result, &plan->algorithm, workspace, LT_WORKSPACE, stream));
    if (!fused) {
        const auto finish = [&](auto * y) {
            finish_kernel<<<blocks_for(groups, 256), 256, 0, stream>>>(
                static_cast<const Bf16x4 *>(product), static_cast<const float4 *>(bias), reinterpret_cast<const float4 *>(linear.residual),
                y, linear.gelu, groups, n / 4);
        };
        linear.y_bf16 ? finish(static_cast<Bf16x4 *>(linear.y)) : finish(static_cast<float4 *>(linear.y));
        CUDA_TRY(cudaGetLastError());
    }
    return "";
}

}  // namespace sdsage
