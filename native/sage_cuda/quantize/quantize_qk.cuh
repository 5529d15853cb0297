// Q and K to INT8, 64 rows a block of threads, groups as one MMA thread holds them ("per thread"):
//   Q  rows of a 32-row warp block equal mod 8 share a scale (4 rows)            sq [B,H,q_tiles*2,8]
//   K' = K - k_mean, keys of a 64-key block with key mod 8 in {2t, 2t+1} share (16 keys)   sk [B,Hkv,k_tiles,4]
//   scale = amax / 127, code = round(x / scale); an empty group has scale 1 and zeros, one with NaN or Inf has scale NaN
// Warp w reads the rows equal to w mod 8, so a Q group lies in one warp and a K group in two.
#pragma once

#include "../common/tile.cuh"
#include "rows.cuh"

namespace sage {

constexpr int QUANT_THREADS = 256;

struct GroupScale {
    float scale, inverse;
};
__device__ __forceinline__ GroupScale group_scale(unsigned amax) {
    if (amax >= INF_BITS) {
        return { __uint_as_float(NAN_BITS), 0.f };
    }
    const float a = __uint_as_float(amax);
    return a < 1e-35f ? GroupScale{ 1.f, 0.f } : GroupScale{ __fdiv_rn(a, 127.f), __fdiv_rn(127.f, a) };
}

__device__ __forceinline__ uint32_t codes_s8(const float * x, float inverse) {
    const int a = __float2int_rn(x[0] * inverse), b = __float2int_rn(x[1] * inverse);
    const int c = __float2int_rn(x[2] * inverse), d = __float2int_rn(x[3] * inverse);
    return (a & 255) | (b & 255) << 8 | (c & 255) << 16 | d << 24;
}

// Finite K minus a finite mean stays finite; anything minus a mean that is not stays not finite.
__device__ __forceinline__ float minus_mean(float x, float mean) {
    const float limit = magnitude(mean) < INF_BITS ? FLT_MAX : __uint_as_float(INF_BITS);
    return fmaxf(fminf(x - mean, limit), -limit);
}

// `bh`: of heads, or of KV heads
template <int D, class T>
__device__ __forceinline__ void quantize_rows(const QuantParams & p, const Rows & rows, bool is_k, int bh, int tile) {
    constexpr int V = VEC<T>, LANES = D / V, SETS = 32 / LANES, N = 8 / SETS;  // rows a warp reads at once, and how often
    __shared__ unsigned amax_of_warp[8];
    const int tiles = is_k ? p.k_tiles : p.q_tiles, heads = is_k ? p.kv_heads : p.heads, b = bh / heads, h = bh % heads;
    const int warp = threadIdx.x / 32, set = threadIdx.x % 32 / LANES, c = threadIdx.x % LANES * V;

    int token[N];
    float x[N][V];
#pragma unroll
    for (int i = 0; i < N; i++) {
        const int t = tile * 64 + warp + 8 * (i * SETS + set);
        token[i]    = is_k ? (key_counts(p, b, t) ? t : -1) : (t < p.lq ? t : -1);
    }
    uint4 w[N];
    read_rows<T>(w, rows, b, h, token, c, p.head_dim);
#pragma unroll
    for (int i = 0; i < N; i++) {
        unpack(x[i], w[i], static_cast<const T *>(nullptr));
    }
    if (is_k) {
        float mean[V];
        read_floats(mean, p.k_mean + int64_t(bh) * D + c);
#pragma unroll
        for (int i = 0; i < N * V; i++) {
            if (token[i / V] >= 0) {
                x[i / V][i % V] = minus_mean(x[i / V][i % V], mean[i % V]);
            }
        }
    }

    unsigned amax[2] = { 0, 0 };  // of rows 0..31 and 32..63
#pragma unroll
    for (int i = 0; i < N; i++) {
        amax[i >= N / 2] = max(amax[i >= N / 2], magnitude(x[i]));
    }
    amax[0] = __reduce_max_sync(0xffffffffu, amax[0]);
    amax[1] = __reduce_max_sync(0xffffffffu, amax[1]);
    if (is_k) {
        if (threadIdx.x % 32 == 0) {
            amax_of_warp[warp] = max(amax[0], amax[1]);
        }
        __syncthreads();
        amax[0] = amax[1] = max(amax_of_warp[warp], amax_of_warp[warp ^ 1]);
    }
    GroupScale g[2] = { group_scale(amax[0]), group_scale(amax[1]) };
    if (threadIdx.x % 32 == 0) {
        if (!is_k) {
            float * sq = p.sq + (int64_t(bh) * tiles + tile) * 16 + warp;
            sq[0]      = g[0].scale;
            sq[8]      = g[1].scale;
        } else if (warp % 2 == 0) {
            p.sk[(int64_t(bh) * tiles + tile) * 4 + warp / 2] = g[0].scale;
        }
    }
    if (!is_k) {
        g[0].inverse *= p.q_sign;
        g[1].inverse *= p.q_sign;
    }
    int8_t * out = (is_k ? p.k8 : p.q8) + (int64_t(bh) * tiles + tile) * 64 * D + c % 16;
#pragma unroll
    for (int i = 0; i < N; i++) {
        const float inverse = g[i >= N / 2].inverse;
        int8_t * to         = out + swizzled<D>(warp + 8 * (i * SETS + set), c / 16);
        if constexpr (V == 4) {
            *reinterpret_cast<uint32_t *>(to) = codes_s8(x[i], inverse);
        } else {
            *reinterpret_cast<uint2 *>(to) = make_uint2(codes_s8(x[i], inverse), codes_s8(x[i] + 4, inverse));
        }
    }
}

template <int D>
__device__ __forceinline__ void quantize_qk(const QuantParams & p, bool is_k, int bh, int tile) {
    const Rows & rows = is_k ? p.k : p.q;
    with_type_of(rows, [&](auto * type) { quantize_rows<D, std::decay_t<decltype(*type)>>(p, rows, is_k, bh, tile); });
    if (is_k && p.bias != nullptr && bh % p.kv_heads == 0 && threadIdx.x < 64) {
        const int b                                                 = bh / p.kv_heads;
        p.bias2[(int64_t(b) * p.k_tiles + tile) * 64 + threadIdx.x] = bias_base2(p, b, tile * 64 + threadIdx.x);
    }
}

}  // namespace sage
