// One pass over K and V, in blocks of their own: the means of K and V and the range of V, each per (batch, KV head, channel), over the keys
// that count.
//   part_k [B,Hkv,tiles,D] f32 = sum of K / 2^e   part_v [3,B,Hkv,tiles,D] = sum of V / 2^e, largest, smallest   part_count [B,Hkv,tiles]
// then, in a fixed order (no atomics: two runs agree bit for bit):
//   k_mean = sum 2^e / count     v_mean likewise, for E4M3 (SageAttention2, smoothing of V: rows of P sum to 1, so the mean is added to O)
//   v_scale = amax of V - v_mean / v_max, or the power of two that brings amax of V into FP16, which needs no smoothing
// Division by 2^e >= 2 lk before the sum: finite K or V of any size cannot overflow it, so the sum tells whether all were finite.
#pragma once

#include "../common/ptx.cuh"
#include "rows.cuh"

namespace sage {

constexpr int STAT_THREADS     = 256;
constexpr float SMOOTH_V_BELOW = 0x1p126f;  // V of such a size less its mean could overflow: left as it is

__device__ __forceinline__ int stat_exponent(int lk) { return 33 - __clz(lk); }  // 2^e in (2 lk, 4 lk]
__device__ __forceinline__ float power_of_two(int e) { return __int_as_float((e + 127) << 23); }

// What is kept of one channel, number by number: the sum, and of V the largest and the smallest.
template <bool RANGE>
struct Stat {
    static constexpr int COUNT = RANGE ? 3 : 1;
    float x[COUNT];
    __device__ __forceinline__ Stat() {
        x[0] = 0.f;
        if constexpr (RANGE) {
            x[1] = -FLT_MAX;
            x[2] = FLT_MAX;
        }
    }
    __device__ __forceinline__ void take(float y, float part) {
        x[0] += y * part;
        if constexpr (RANGE) {
            x[1] = fmaxf(x[1], y);
            x[2] = fminf(x[2], y);
        }
    }
    static __device__ __forceinline__ float join(int which, float a, float b) {
        return which == 0 ? a + b : which == 1 ? fmaxf(a, b) : fminf(a, b);
    }
};

// STAT_ROWS keys of one head by one block of threads; answers how many of this thread's keys count.
template <int D, class T, class S>
__device__ __forceinline__ int over_keys(const QuantParams & p, const Rows & rows, int64_t bh, int tile, float * shared, float * out) {
    constexpr int V = VEC<T>, LANES = D / V, AT_ONCE = 32 / V, SETS = STAT_THREADS / LANES;  // a set of lanes reads one row
    static_assert(STAT_ROWS % (SETS * AT_ONCE) == 0 && SETS * D <= STAT_THREADS * 8, "whole turns; shared memory of the widest vector");
    const int b = int(bh / p.kv_heads), h = int(bh % p.kv_heads);
    const int set = threadIdx.x / LANES, lane = threadIdx.x % LANES, c = lane * V;
    const float part = power_of_two(-stat_exponent(p.lk));
    S total[V];
    int count = 0;
    for (int first = 0; first < STAT_ROWS; first += SETS * AT_ONCE) {
        int token[AT_ONCE];
        uint4 w[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            const int key = tile * STAT_ROWS + first + i * SETS + set;
            token[i]      = key_counts(p, b, key) ? key : -1;
            count += token[i] >= 0;
        }
        read_rows<T>(w, rows, b, h, token, c, p.head_dim);
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            float x[V];
            unpack(x, w[i], static_cast<const T *>(nullptr));
            if (token[i] >= 0) {
#pragma unroll
                for (int j = 0; j < V; j++) {
                    total[j].take(x[j], part);
                }
            }
        }
    }
    const int64_t one = int64_t(p.batch) * p.kv_heads * p.stat_tiles * D;
#pragma unroll
    for (int n = 0; n < S::COUNT; n++) {
#pragma unroll
        for (int j = 0; j < V; j += 4) {
            *reinterpret_cast<float4 *>(shared + set * D + c + j) =
                make_float4(total[j].x[n], total[j + 1].x[n], total[j + 2].x[n], total[j + 3].x[n]);
        }
        __syncthreads();
        if (threadIdx.x < D) {
            float all = shared[threadIdx.x];
            for (int s = 1; s < SETS; s++) {
                all = S::join(n, all, shared[s * D + threadIdx.x]);
            }
            out[n * one + (bh * p.stat_tiles + tile) * D + threadIdx.x] = all;
        }
        __syncthreads();
    }
    return lane == 0 ? count : 0;
}

template <int D>
__global__ void __launch_bounds__(STAT_THREADS, 3) kv_stats(const __grid_constant__ QuantParams p) {
    __shared__ __align__(16) float shared[STAT_THREADS * 8];
    ptx::let_next_launch();
    const bool is_v  = blockIdx.x % 2;
    const int64_t bh = blockIdx.x / 2 / p.stat_tiles;
    const int tile   = blockIdx.x / 2 % p.stat_tiles;
    int count        = 0;
    with_type_of(is_v ? p.v : p.k, [&](auto * type) {
        using T = std::decay_t<decltype(*type)>;
        if (is_v) {
            over_keys<D, T, Stat<true>>(p, p.v, bh, tile, shared, p.part_v);
        } else {
            count = over_keys<D, T, Stat<false>>(p, p.k, bh, tile, shared, p.part_k);
        }
    });
    if (!is_v) {
        count = __reduce_add_sync(0xffffffffu, count);
        __shared__ int counts[STAT_THREADS / 32];
        if (threadIdx.x % 32 == 0) {
            counts[threadIdx.x / 32] = count;
        }
        __syncthreads();
        if (threadIdx.x == 0) {
            int all = 0;
            for (int n : counts) {
                all += n;
            }
            p.part_count[bh * p.stat_tiles + tile] = all;
        }
    }
}

// FP16: 2^(exponent of amax - 14), so the largest code is in [2^14, 2^15). Powers of two are exact: FP16's rounding is unchanged.
__device__ __forceinline__ float v_scale_of(float amax, float v_max) {
    if (amax < 1e-35f) {
        return 1.f;  // an empty channel; its codes are zeros
    }
    return v_max == 0.f ? power_of_two(max(-100, int(__float_as_uint(amax) >> 23) - 127 - 14)) : __fdiv_rn(amax, v_max);
}

// sum / 2^e back to a mean; rounding must not carry it past FLT_MAX.
__device__ __forceinline__ float mean_of(float sum, int count, int lk) {
    const float mean = sum * (power_of_two(stat_exponent(lk)) / float(max(count, 1)));
    return magnitude(sum) < INF_BITS && magnitude(mean) >= INF_BITS ? copysignf(FLT_MAX, sum) : mean;
}

template <int D>
__global__ void __launch_bounds__(D * 8) kv_stats_finish(const __grid_constant__ QuantParams p) {
    __shared__ float sums[8][D];
    __shared__ float ranges[8][D][3];
    __shared__ int counts[8];
    ptx::let_next_launch();
    ptx::wait_for_launch();
    const int64_t bh = blockIdx.x, one = int64_t(p.batch) * p.kv_heads * p.stat_tiles * D;
    const int ch = threadIdx.x % D, part = threadIdx.x / D;
    float sum = 0.f;
    Stat<true> v;
    int count       = 0;
    const auto join = [&](float more, const float * stat, int64_t step, int n) {
        sum += more;
        for (int i = 0; i < 3; i++) {
            v.x[i] = v.join(i, v.x[i], stat[i * step]);
        }
        count += n;
    };
    for (int t = part; t < p.stat_tiles; t += 8) {
        const int64_t at = bh * p.stat_tiles + t;
        join(p.part_k[at * D + ch], p.part_v + at * D + ch, one, p.part_count[at]);
    }
    sums[part][ch] = sum;
    for (int i = 0; i < 3; i++) {
        ranges[part][ch][i] = v.x[i];
    }
    if (ch == 0) {
        counts[part] = count;
    }
    __syncthreads();
    if (part == 0) {
        for (int i = 1; i < 8; i++) {
            join(sums[i][ch], ranges[i][ch], 1, counts[i]);
        }
        const bool finite = magnitude(v.x[0]) < INF_BITS;
        float amax = count == 0 ? 0.f : fmaxf(fabsf(v.x[1]), fabsf(v.x[2])), mean = 0.f;
        if (finite && p.v_max > 0.f && count > 0 && amax < SMOOTH_V_BELOW) {
            mean = mean_of(v.x[0], count, p.lk);
            amax = fmaxf(fabsf(v.x[1] - mean), fabsf(v.x[2] - mean));
        }
        p.k_mean[bh * D + ch]  = mean_of(sum, count, p.lk);
        p.v_mean[bh * D + ch]  = mean;
        p.v_scale[bh * D + ch] = finite ? v_scale_of(amax, p.v_max) : __uint_as_float(NAN_BITS);
    }
}

}  // namespace sage
