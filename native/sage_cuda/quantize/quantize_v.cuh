// V to FP16, rows as they are, or to E4M3, transposed with the keys of each 16 in the order of P's registers.
//   FP16  [B,Hkv,k_tiles*64,D]                code = V / v_scale (a power of two)
//   E4M3  [B,Hkv,k_tiles,D,64]                position p of a group of 16 holds key PERM[p],
//         PERM = 0 1 8 9  2 3 10 11  4 5 12 13  6 7 14 15: the keys that one thread holds of S, in the order that mma wants of P
// A key that does not count is zeros. A channel with NaN or Inf has v_scale NaN: its codes no longer matter, but stay defined.
#pragma once

#include "quantize_qk.cuh"
#include "../common/ptx.cuh"

namespace sage {

template <int D>
__global__ void __launch_bounds__(QUANT_THREADS) quantize_v_f16(const __grid_constant__ QuantParams p) {
    constexpr int LANES = D / 4, SETS = 32 / LANES, N = 8 / SETS;
    const int bh = blockIdx.x / p.k_tiles, tile = blockIdx.x % p.k_tiles, b = bh / p.kv_heads, h = bh % p.kv_heads;
    const int warp = threadIdx.x / 32, set = threadIdx.x % 32 / LANES, c = threadIdx.x % LANES * 4;
    int token[N];
    float4 x[N];
#pragma unroll
    for (int i = 0; i < N; i++) {
        const int t = tile * 64 + warp + 8 * (i * SETS + set);
        token[i]    = key_counts(p, b, t) ? t : -1;
    }
    read_rows(x, p.v, b, h, token, c, p.head_dim);
    const float4 s = *reinterpret_cast<const float4 *>(p.v_scale + int64_t(bh) * D + c);
    __half * out   = static_cast<__half *>(p.v_codes) + (int64_t(bh) * p.k_tiles + tile) * 64 * D + c;
    const float4 r = make_float4(1.f / s.x, 1.f / s.y, 1.f / s.z, 1.f / s.w);
#pragma unroll
    for (int i = 0; i < N; i++) {
        const int row   = warp + 8 * (i * SETS + set);
        const uint2 two = make_uint2(ptx::cvt_f16x2(x[i].y * r.y, x[i].x * r.x), ptx::cvt_f16x2(x[i].w * r.w, x[i].z * r.z));
        *reinterpret_cast<uint2 *>(out + row * D) = token[i] < 0 ? make_uint2(0, 0) : two;
    }
}

// One thread reads the keys 2j, 2j+1, 2j+8, 2j+9 of a group of 16: four channels, four codes each, one word a channel.
template <int D>
__global__ void __launch_bounds__(QUANT_THREADS) quantize_v_f8(const __grid_constant__ QuantParams p) {
#if __CUDA_ARCH__ >= 890
    constexpr int LANES = D / 4, SETS = QUANT_THREADS / LANES;
    __shared__ uint32_t words[D * 17];  // [channel mod 4][channel / 4][16 words + 1]: no two lanes of a store in one bank
    const int bh = blockIdx.x / p.k_tiles, tile = blockIdx.x % p.k_tiles, b = bh / p.kv_heads, h = bh % p.kv_heads;
    const int set = threadIdx.x / LANES, lane = threadIdx.x % LANES, c = lane * 4;
    const float4 s   = *reinterpret_cast<const float4 *>(p.v_scale + int64_t(bh) * D + c);
    const float r[4] = { __fdiv_rn(1.f, s.x), __fdiv_rn(1.f, s.y), __fdiv_rn(1.f, s.z), __fdiv_rn(1.f, s.w) };
    int token[16 / SETS * 4];
    float4 x[16 / SETS * 4];
#pragma unroll
    for (int i = 0; i < 16 / SETS * 4; i++) {
        const int word = i / 4 * SETS + set;  // 16 words of 4 keys in a tile
        const int t    = tile * 64 + word / 4 * 16 + word % 4 * 2 + i % 2 + i % 4 / 2 * 8;
        token[i]       = key_counts(p, b, t) ? t : -1;
    }
    read_rows(x, p.v, b, h, token, c, p.head_dim);
#pragma unroll
    for (int i = 0; i < 16 / SETS * 4; i += 4) {
        const int word = i / 4 * SETS + set;
#pragma unroll
        for (int ch = 0; ch < 4; ch++) {
            float v[4];
#pragma unroll
            for (int k = 0; k < 4; k++) {
                v[k] = token[i + k] < 0 ? 0.f : reinterpret_cast<const float *>(&x[i + k])[ch] * r[ch];
            }
            words[(ch * LANES + lane) * 17 + word] = ptx::cvt_e4m3x2(v[1], v[0]) | ptx::cvt_e4m3x2(v[3], v[2]) << 16;
        }
    }
    __syncthreads();
    uint4 * out = reinterpret_cast<uint4 *>(static_cast<uint8_t *>(p.v_codes) + (int64_t(bh) * p.k_tiles + tile) * 64 * D);
    for (int i = threadIdx.x; i < D * 4; i += QUANT_THREADS) {
        const int ch          = i / 4;
        const uint32_t * from = words + (ch % 4 * LANES + ch / 4) * 17 + i % 4 * 4;
        out[i]                = make_uint4(from[0], from[1], from[2], from[3]);
    }
#endif
}

}  // namespace sage
