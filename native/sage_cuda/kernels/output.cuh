// The way out, shared by all kernels: O in the accumulators of an MMA, to any type and strides.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "../common/params.cuh"

namespace sage {

__device__ __forceinline__ void put(float * o, float x) { *o = x; }
__device__ __forceinline__ void put(__half * o, float x) { *o = __float2half_rn(x); }
__device__ __forceinline__ void put(__nv_bfloat16 * o, float x) { *o = __float2bfloat16_rn(x); }
__device__ __forceinline__ void put2(float * o, float x, float y) { *reinterpret_cast<float2 *>(o) = make_float2(x, y); }
__device__ __forceinline__ void put2(__half * o, float x, float y) { *reinterpret_cast<__half2 *>(o) = __floats2half2_rn(x, y); }
__device__ __forceinline__ void put2(__nv_bfloat16 * o, float x, float y) {
    *reinterpret_cast<__nv_bfloat162 *>(o) = __floats2bfloat162_rn(x, y);
}

// This thread's part of one row: channels c, c+1 of every 8. Wide: head_dim is even.
template <int D, class T>
__device__ __forceinline__ void write_row(T * row, const float (&x)[D / 4], int c, int head_dim, bool wide) {
    if (wide) {
#pragma unroll
        for (int j = 0; j < D / 8; j++) {
            if (c + j * 8 < head_dim) {
                put2(row + c + j * 8, x[j * 2], x[j * 2 + 1]);
            }
        }
    } else {
#pragma unroll
        for (int j = 0; j < D / 4; j++) {
            if (c + j / 2 * 8 + j % 2 < head_dim) {
                put(row + c + j / 2 * 8 + j % 2, x[j]);
            }
        }
    }
}

// O / l * v_scale, with MEAN + v_mean; zeros where l = 0. o[i][j]: rows row0 + 16 i + {0, 8}, channels 8 j + {2t, 2t+1}, t = lane % 4.
template <int D, bool MEAN, int M>
__device__ __forceinline__ void write_rows(const AttnParams & p, const float (&o)[M][D / 8][4], const float (&l)[2 * M], int64_t kv, int b,
                                           int h, int row0) {
    const int c          = threadIdx.x % 4 * 2;
    const float * vscale = p.v_scale + kv * D + c;
    float2 scale[D / 8];
#pragma unroll
    for (int j = 0; j < D / 8; j++) {
        scale[j] = __ldg(reinterpret_cast<const float2 *>(vscale + j * 8));
    }
#pragma unroll
    for (int r = 0; r < 2 * M; r++) {
        const int64_t at    = b * p.o_batch + h * p.o_head + (row0 + r * 8) * p.o_token;
        const float inverse = 1.f / l[r];
        float x[D / 4];
#pragma unroll
        for (int j = 0; j < D / 4; j++) {
            x[j] = o[r / 2][j / 2][r % 2 * 2 + j % 2] * inverse * (j % 2 ? scale[j / 2].y : scale[j / 2].x);
            if constexpr (MEAN) {
                x[j] += __ldg(p.v_mean + kv * D + c + j / 2 * 8 + j % 2);
            }
            x[j] = l[r] == 0.f ? 0.f : x[j];
        }
        if (row0 + r * 8 < p.lq) {
            switch (p.o_dtype) {
                case F32:
                    write_row<D>(static_cast<float *>(p.o) + at, x, c, p.head_dim, p.o_wide);
                    break;
                case F16:
                    write_row<D>(static_cast<__half *>(p.o) + at, x, c, p.head_dim, p.o_wide);
                    break;
                default:
                    write_row<D>(static_cast<__nv_bfloat16 *>(p.o) + at, x, c, p.head_dim, p.o_wide);
            }
        }
    }
}

}  // namespace sage
