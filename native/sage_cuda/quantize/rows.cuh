// Reading the inputs: 16 bytes of one row as FP32, from any dtype, stride and alignment.
#pragma once

#include <cfloat>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <type_traits>

#include "../common/params.cuh"

namespace sage {

constexpr unsigned INF_BITS = 0x7f800000u;
constexpr unsigned NAN_BITS = 0x7fc00000u;

// Neighbouring channels that one thread reads at once, as 16 bytes where strides and alignment allow it.
template <class T>
constexpr int VEC = 16 / sizeof(T);

// Bits of |x| order like the values, with infinity and NaN above everything: one integer maximum finds both.
__device__ __forceinline__ unsigned magnitude(float x) { return __float_as_uint(x) & 0x7fffffffu; }
template <int N>
__device__ __forceinline__ unsigned magnitude(const float (&x)[N]) {
    unsigned most = 0;
#pragma unroll
    for (int i = 0; i < N; i++) {
        most = max(most, magnitude(x[i]));
    }
    return most;
}

__device__ __forceinline__ void unpack(float (&x)[4], uint4 w, const float *) {
    x[0] = __uint_as_float(w.x), x[1] = __uint_as_float(w.y), x[2] = __uint_as_float(w.z), x[3] = __uint_as_float(w.w);
}
__device__ __forceinline__ void unpack(float (&x)[8], uint4 w, const __half *) {
    const unsigned words[4] = { w.x, w.y, w.z, w.w };
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float2 two = __half22float2(reinterpret_cast<const __half2 &>(words[i]));
        x[i * 2] = two.x, x[i * 2 + 1] = two.y;
    }
}
__device__ __forceinline__ void unpack(float (&x)[8], uint4 w, const __nv_bfloat16 *) {
    const unsigned words[4] = { w.x, w.y, w.z, w.w };
#pragma unroll
    for (int i = 0; i < 4; i++) {
        x[i * 2] = __uint_as_float(words[i] << 16), x[i * 2 + 1] = __uint_as_float(words[i] & 0xffff0000u);
    }
}

// Channels c .. of N rows of one head at once, as stored, so that N loads are under way; zeros past head_dim, and for a row whose
// `token` is negative: it is not there.
template <class T, int N>
__device__ __forceinline__ void read_rows(uint4 (&w)[N], const Rows & rows, int b, int h, const int (&token)[N], int c, int head_dim) {
    using Bits      = std::conditional_t<sizeof(T) == 4, uint32_t, uint16_t>;
    const Bits * at = static_cast<const Bits *>(rows.data) + b * rows.batch + h * rows.head + c;
    const bool wide = rows.wide;
#pragma unroll
    for (int i = 0; i < N; i++) {
        w[i]             = make_uint4(0, 0, 0, 0);
        const Bits * row = at + token[i] * rows.token;
        if (token[i] >= 0 && wide) {
            if (c < head_dim) {
                w[i] = __ldg(reinterpret_cast<const uint4 *>(row));
            }
        } else if (token[i] >= 0) {
            const auto bits = [&](int j) { return c + j < head_dim ? unsigned(row[j]) : 0u; };
            const auto word = [&](int j) { return sizeof(T) == 4 ? bits(j) : bits(2 * j) | bits(2 * j + 1) << 16; };
            w[i]            = make_uint4(word(0), word(1), word(2), word(3));
        }
    }
}

// f(pointer of the rows' type), for a body that is a template of it
template <class F>
__device__ __forceinline__ void with_type_of(const Rows & rows, F && f) {
    switch (rows.dtype) {
        case F32:
            f(static_cast<const float *>(nullptr));
            break;
        case F16:
            f(static_cast<const __half *>(nullptr));
            break;
        default:
            f(static_cast<const __nv_bfloat16 *>(nullptr));
            break;
    }
}

// N neighbouring floats that the workspace holds, at a multiple of 16 bytes
template <int N>
__device__ __forceinline__ void read_floats(float (&x)[N], const float * p) {
#pragma unroll
    for (int i = 0; i < N; i += 4) {
        const float4 four = *reinterpret_cast<const float4 *>(p + i);
        x[i] = four.x, x[i + 1] = four.y, x[i + 2] = four.z, x[i + 3] = four.w;
    }
}

// The bias in base 2, between MASKED and 1e30; past the last key and at or below M_INIT: MASKED. NaN stays NaN.
__device__ __forceinline__ float bias_base2(const QuantParams & p, int b, int key) {
    if (key >= p.lk) {
        return MASKED;
    }
    const float x = p.bias == nullptr ? 0.f : p.bias[b * p.bias_stride + key] * LOG2E;
    return x <= M_INIT ? MASKED : x > 1e30f ? 1e30f : x;
}
__device__ __forceinline__ bool key_counts(const QuantParams & p, int b, int key) { return bias_base2(p, b, key) != MASKED; }

}  // namespace sage
