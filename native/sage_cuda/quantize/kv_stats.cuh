// One pass over K and V: the mean of K and the largest |V|, each per (batch, KV head, channel), over the keys that count.
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

template <int D>
__global__ void __launch_bounds__(STAT_THREADS) kv_stats(const __grid_constant__ QuantParams p) {
    constexpr int LANES = D / 4, AT_ONCE = 4, SETS = STAT_THREADS / LANES;  // a set of lanes reads one row
    __shared__ float4 sums[SETS][LANES];
    __shared__ uint4 maxima[SETS][LANES];
    __shared__ int counts[SETS];
    const int bh = blockIdx.x / p.stat_tiles, tile = blockIdx.x % p.stat_tiles;
    const int b = bh / p.kv_heads, h = bh % p.kv_heads;
    const int set = threadIdx.x / LANES, lane = threadIdx.x % LANES, c = lane * 4;
    const float part = power_of_two(-stat_exponent(p.lk));

    float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
    uint4 most = make_uint4(0, 0, 0, 0);
    int count  = 0;
    for (int first = 0; first < STAT_ROWS; first += SETS * AT_ONCE) {
        int token[AT_ONCE];
        float4 k[AT_ONCE], v[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            const int key = tile * STAT_ROWS + first + i * SETS + set;
            token[i]      = key_counts(p, b, key) ? key : -1;
            count += token[i] >= 0;
        }
        read_rows(k, p.k, b, h, token, c, p.head_dim);
        read_rows(v, p.v, b, h, token, c, p.head_dim);
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            sum.x += k[i].x * part;
            sum.y += k[i].y * part;
            sum.z += k[i].z * part;
            sum.w += k[i].w * part;
            most.x = max(most.x, magnitude(v[i].x));
            most.y = max(most.y, magnitude(v[i].y));
            most.z = max(most.z, magnitude(v[i].z));
            most.w = max(most.w, magnitude(v[i].w));
        }
    }
    sums[set][lane]   = sum;
    maxima[set][lane] = most;
    if (lane == 0) {
        counts[set] = count;
    }
    __syncthreads();
    if (threadIdx.x < D) {
        const int ch  = threadIdx.x;
        float total   = 0.f;
        unsigned amax = 0;
        for (int s = 0; s < SETS; s++) {
            total += reinterpret_cast<const float *>(sums[s])[ch];
            amax = max(amax, reinterpret_cast<const unsigned *>(maxima[s])[ch]);
        }
        p.part_sum[int64_t(blockIdx.x) * D + ch] = total;
        p.part_max[int64_t(blockIdx.x) * D + ch] = amax;
        if (ch == 0) {
            int n = 0;
            for (int s = 0; s < SETS; s++) {
                n += counts[s];
            }
            p.part_count[blockIdx.x] = n;
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
