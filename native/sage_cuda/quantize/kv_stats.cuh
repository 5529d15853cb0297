// One pass over K and V, in blocks of their own: the mean of K and the largest |V|, each per (batch, KV head, channel), over the keys that
// count.
//   part_sum [B,Hkv,tiles,D] f32 = sum of K / 2^e   part_max [B,Hkv,tiles,D] = bits of max |V|   part_count [B,Hkv,tiles]
// then, in a fixed order (no atomics: two runs agree bit for bit):
//   k_mean = sum 2^e / count     v_scale = amax / v_max, or the power of two that brings amax into FP16
// Division by 2^e >= 2 lk before the sum: finite K of any size cannot overflow it.
#pragma once

#include "rows.cuh"

namespace sage {

constexpr int STAT_THREADS = 256;

__device__ __forceinline__ int stat_exponent(int lk) { return 33 - __clz(lk); }  // 2^e in (2 lk, 4 lk]
__device__ __forceinline__ float power_of_two(int e) { return __int_as_float((e + 127) << 23); }

struct SumOfK {
    float part;  // 1 / 2^e
    __device__ __forceinline__ float take(float sum, float x) const { return sum + x * part; }
    __device__ __forceinline__ float join(float a, float b) const { return a + b; }
};
struct MaxOfV {  // bits of |V| as floats: moved about, never computed with
    __device__ __forceinline__ float take(float most, float x) const { return __uint_as_float(max(__float_as_uint(most), magnitude(x))); }
    __device__ __forceinline__ float join(float a, float b) const { return take(a, b); }
};

// STAT_ROWS keys of one head by one block of threads; answers how many of this thread's keys count.
template <int D, class T, class F>
__device__ __forceinline__ int over_keys(const QuantParams & p, const Rows & rows, int64_t bh, int tile, float * shared, float * out,
                                         const F & f) {
    constexpr int V = VEC<T>, LANES = D / V, AT_ONCE = 32 / V, SETS = STAT_THREADS / LANES;  // a set of lanes reads one row
    static_assert(STAT_ROWS % (SETS * AT_ONCE) == 0 && SETS * D <= STAT_THREADS * 8, "whole turns; shared memory of the widest vector");
    const int b = int(bh / p.kv_heads), h = int(bh % p.kv_heads);
    const int set = threadIdx.x / LANES, lane = threadIdx.x % LANES, c = lane * V;
    float total[V] = {};
    int count      = 0;
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
#pragma unroll
            for (int j = 0; j < V; j++) {
                total[j] = f.take(total[j], x[j]);
            }
        }
    }
#pragma unroll
    for (int j = 0; j < V; j += 4) {
        *reinterpret_cast<float4 *>(shared + set * D + c + j) = make_float4(total[j], total[j + 1], total[j + 2], total[j + 3]);
    }
    __syncthreads();
    if (threadIdx.x < D) {
        float all = shared[threadIdx.x];
        for (int s = 1; s < SETS; s++) {
            all = f.join(all, shared[s * D + threadIdx.x]);
        }
        out[(bh * p.stat_tiles + tile) * D + threadIdx.x] = all;
    }
    return lane == 0 ? count : 0;
}

template <int D>
__global__ void __launch_bounds__(STAT_THREADS, 4) kv_stats(const __grid_constant__ QuantParams p) {
    __shared__ __align__(16) float shared[STAT_THREADS * 8];
    const bool is_v  = blockIdx.x % 2;
    const int64_t bh = blockIdx.x / 2 / p.stat_tiles;
    const int tile   = blockIdx.x / 2 % p.stat_tiles;
    int count        = 0;
    with_type_of(is_v ? p.v : p.k, [&](auto * type) {
        using T = std::decay_t<decltype(*type)>;
        if (is_v) {
            over_keys<D, T>(p, p.v, bh, tile, shared, reinterpret_cast<float *>(p.part_max), MaxOfV{});
        } else {
            count = over_keys<D, T>(p, p.k, bh, tile, shared, p.part_sum, SumOfK{ power_of_two(-stat_exponent(p.lk)) });
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
__device__ __forceinline__ float v_scale_of(unsigned amax, float v_max) {
    if (amax >= INF_BITS) {
        return __uint_as_float(NAN_BITS);
    }
    const float a = __uint_as_float(amax);
    if (a < 1e-35f) {
        return 1.f;  // an empty channel; its codes are zeros
    }
    return v_max == 0.f ? power_of_two(int(amax >> 23) - 127 - 14 < -100 ? -100 : int(amax >> 23) - 127 - 14) : __fdiv_rn(a, v_max);
}

template <int D>
__global__ void __launch_bounds__(D * 8) kv_stats_finish(const __grid_constant__ QuantParams p) {
    __shared__ float sums[8][D];
    __shared__ unsigned maxima[8][D];
    __shared__ int counts[8];
    const int64_t bh = blockIdx.x;
    const int ch = threadIdx.x % D, part = threadIdx.x / D;
    float sum     = 0.f;
    unsigned amax = 0;
    int count     = 0;
    for (int t = part; t < p.stat_tiles; t += 8) {
        const int64_t at = bh * p.stat_tiles + t;
        sum += p.part_sum[at * D + ch];
        amax = max(amax, p.part_max[at * D + ch]);
        count += p.part_count[at];
    }
    sums[part][ch]   = sum;
    maxima[part][ch] = amax;
    if (ch == 0) {
        counts[part] = count;
    }
    __syncthreads();
    if (part == 0) {
        for (int i = 1; i < 8; i++) {
            sum += sums[i][ch];
            amax = max(amax, maxima[i][ch]);
            count += counts[i];
        }
        float mean = sum * (power_of_two(stat_exponent(p.lk)) / float(max(count, 1)));
        if (magnitude(sum) < INF_BITS && magnitude(mean) >= INF_BITS) {
            mean = copysignf(FLT_MAX, sum);  // rounding past FLT_MAX
        }
        p.k_mean[bh * D + ch]  = mean;
        p.v_scale[bh * D + ch] = v_scale_of(amax, p.v_max);
    }
}

}  // namespace sage
