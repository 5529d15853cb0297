// Reading the inputs: four channels of one row as FP32, from any dtype, stride and alignment.
#pragma once

#include <cfloat>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "../common/params.cuh"

namespace sage {

constexpr unsigned INF_BITS = 0x7f800000u;
constexpr unsigned NAN_BITS = 0x7fc00000u;

// Bits of |x| order like the values, with infinity and NaN above everything: one integer maximum finds both.
__device__ __forceinline__ unsigned magnitude(float x) { return __float_as_uint(x) & 0x7fffffffu; }
__device__ __forceinline__ unsigned magnitude(float4 x) {
    return max(max(magnitude(x.x), magnitude(x.y)), max(magnitude(x.z), magnitude(x.w)));
}

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

__device__ __forceinline__ float4 read_wide(const float * p) { return __ldg(reinterpret_cast<const float4 *>(p)); }
__device__ __forceinline__ float4 read_wide(const __half * p) {
    const uint2 w  = __ldg(reinterpret_cast<const uint2 *>(p));
    const float2 a = __half22float2(reinterpret_cast<const __half2 &>(w.x)), b = __half22float2(reinterpret_cast<const __half2 &>(w.y));
    return make_float4(a.x, a.y, b.x, b.y);
}
__device__ __forceinline__ float4 read_wide(const __nv_bfloat16 * p) {
    const uint2 w = __ldg(reinterpret_cast<const uint2 *>(p));
    return make_float4(__uint_as_float(w.x << 16), __uint_as_float(w.x & 0xffff0000u), __uint_as_float(w.y << 16),
                       __uint_as_float(w.y & 0xffff0000u));
}

// Channels c .. c+3 of a row that starts at p; zeros past head_dim.
template <class T>
__device__ __forceinline__ float4 read4(const T * p, int c, int head_dim, bool wide) {
    if (wide) {
        return c < head_dim ? read_wide(p + c) : make_float4(0.f, 0.f, 0.f, 0.f);
    }
    float4 x;
    x.x = c + 0 < head_dim ? to_float(p[c + 0]) : 0.f;
    x.y = c + 1 < head_dim ? to_float(p[c + 1]) : 0.f;
    x.z = c + 2 < head_dim ? to_float(p[c + 2]) : 0.f;
    x.w = c + 3 < head_dim ? to_float(p[c + 3]) : 0.f;
    return x;
}

// N rows at once, so that N loads are under way; a row whose `token` is negative is not there and reads as zeros.
template <int N, class T>
__device__ __forceinline__ void read_rows(float4 (&x)[N], const Rows & rows, int64_t head_at, const int (&token)[N], int c, int head_dim) {
    const T * base  = static_cast<const T *>(rows.data) + head_at;
    const bool wide = rows.wide;
#pragma unroll
    for (int i = 0; i < N; i++) {
        x[i] = token[i] < 0 ? make_float4(0.f, 0.f, 0.f, 0.f) : read4(base + token[i] * rows.token, c, head_dim, wide);
    }
}
template <int N>
__device__ __forceinline__ void read_rows(float4 (&x)[N], const Rows & rows, int b, int h, const int (&token)[N], int c, int head_dim) {
    const int64_t head_at = b * rows.batch + h * rows.head;
    switch (rows.dtype) {
        case F32:
            read_rows<N, float>(x, rows, head_at, token, c, head_dim);
            break;
        case F16:
            read_rows<N, __half>(x, rows, head_at, token, c, head_dim);
            break;
        default:
            read_rows<N, __nv_bfloat16>(x, rows, head_at, token, c, head_dim);
            break;
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
