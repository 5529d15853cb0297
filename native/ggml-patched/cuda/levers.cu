// What the levers compute on CUDA (glue/sdsage_levers.hpp); compiled into the ggml-cuda target, called by its edits (group "levers").
#include "common.cuh"
#include "convert.cuh"
#include "linear.cuh"
#include "rows.cuh"
#include "sdsage_levers.hpp"

using sdsage::bf16;
using sdsage::Bf16x4;
using sdsage::block_sum;
using sdsage::blocks_for;
using sdsage::by_columns;
using sdsage::LeverMark;
using sdsage::LeverOp;
using sdsage::rounded;
using sdsage::ROW_THREADS;

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

// ---- norm, scale and shift; one block a row

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

static void compute_to_fp8(ggml_backend_cuda_context & ctx, ggml_tensor * node) {
    const ggml_tensor * x = node->src[0];
    const int64_t columns = x->ne[0], rows = ggml_nrows(x);
    const auto type = x->type == GGML_TYPE_BF16 ? sdsage::Numbers::bf16 : sdsage::Numbers::f32;
    char * codes    = static_cast<char *>(node->data);
    CUDA_CHECK(
        sdsage::rows_to_fp8(type, x->data, nullptr, rows, columns, codes, reinterpret_cast<float *>(codes + rows * columns), ctx.stream()));
}

static bool is_read_directly(ggml_type type) { return type == GGML_TYPE_Q8_0 || type == GGML_TYPE_BF16 || type == GGML_TYPE_F16; }

// With a weight of another type as F16.
static sdsage::Linear linear_of(const ggml_tensor * node, const LeverMark & mark) {
    const ggml_tensor *w = node->src[0], *x = node->src[1];
    int next         = 2;
    const auto given = [&](int32_t flag) -> const float * {
        const ggml_tensor * t = mark.flags & flag ? node->src[next++] : nullptr;
        // before there is memory only whether it is given counts
        return static_cast<const float *>(t != nullptr && t->data != nullptr ? t->data : static_cast<const void *>(t));
    };
    sdsage::Linear linear = {};
    linear.weight         = w->data;
    linear.type           = w->type == GGML_TYPE_Q8_0   ? sdsage::Numbers::q8_0
                            : w->type == GGML_TYPE_BF16 ? sdsage::Numbers::bf16
                                                        : sdsage::Numbers::f16;
    linear.x              = x->data;
    linear.bias           = given(sdsage::LINEAR_BIAS);
    linear.gate           = given(sdsage::LINEAR_GATE);
    linear.residual       = given(sdsage::LINEAR_RESIDUAL);
    linear.y              = node->data;
    linear.y_bf16         = node->type == GGML_TYPE_BF16;
    linear.gelu           = mark.flags & sdsage::LINEAR_GELU;
    linear.fp8            = mark.flags & sdsage::LINEAR_FP8;
    linear.k              = w->ne[0];
    linear.n              = w->ne[1];
    linear.tokens         = ggml_nelements(node) / linear.n;
    return linear;
}

// Of a weight as F16 behind the rest.
static size_t linear_scratch(int device, const ggml_tensor * node, const LeverMark & mark) {
    const sdsage::Linear linear = linear_of(node, mark);
    return sdsage::linear_scratch(device, linear) + (is_read_directly(node->src[0]->type) ? 0 : linear.k * linear.n * sizeof(half));
}

static void compute_linear(ggml_backend_cuda_context & ctx, ggml_tensor * node, const LeverMark & mark) {
    const ggml_tensor * w = node->src[0];
    sdsage::Linear linear = linear_of(node, mark);
    GGML_ASSERT(!linear.y_bf16 || linear.residual == nullptr);
    char * scratch = static_cast<char *>(node->src[sdsage::SCRATCH_SRC]->data);
    if (!is_read_directly(w->type)) {
        half * halves = reinterpret_cast<half *>(scratch + sdsage::linear_scratch(ctx.device, linear));
        linear.weight = halves;
        ggml_get_to_fp16_cuda(w->type)(w->data, halves, linear.k * linear.n, ctx.stream());
        CUDA_CHECK(cudaGetLastError());
    }
    const std::string problem = sdsage::linear_run(ctx.device, linear, scratch, ctx.stream());
    if (!problem.empty()) {
        GGML_ABORT("%s", problem.c_str());
    }
}

// conv_node.cu
bool sdsage_conv_supported(int device, const ggml_tensor * node);
size_t sdsage_conv_scratch(const ggml_tensor * node);
bool sdsage_conv_compute(ggml_backend_cuda_context & ctx, ggml_tensor * node);

static size_t scratch_of(int device, const ggml_tensor * node) {
    LeverMark mark;
    if (!sdsage::read_lever(node, &mark)) {
        return sdsage_conv_scratch(node);
    }
    return mark.op == LeverOp::linear ? linear_scratch(device, node, mark) : 0;
}

// Named by the edits of ggml-cuda.cu.
extern const sdsage::LeverBackend sdsage_lever_backend = {
    can_linear, prefers_linear, can_convert, sdsage::fp8_supported, sdsage_conv_supported, scratch_of
};
bool sdsage_lever_supported(int device, const ggml_tensor * node);
bool sdsage_lever_compute(ggml_backend_cuda_context & ctx, ggml_tensor * node);

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
        case LeverOp::scratch:
            return true;
        case LeverOp::to_fp8:
            compute_to_fp8(ctx, node);
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
