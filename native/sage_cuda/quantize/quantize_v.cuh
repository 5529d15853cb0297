// V to FP16, rows as they are, or to E4M3, transposed with the keys of each 16 in the order of P's registers.
//   FP16  [B,Hkv,k_tiles,D/64,64,64]          code = V / v_scale (a power of two)
//   E4M3  [B,Hkv,k_tiles,D,64], for hopper    code = (V - v_mean) / v_scale; position p of a group of 16 holds key PERM[p],
//         [B,Hkv,k_tiles/2,D,128]
//         PERM = 0 1 8 9  2 3 10 11  4 5 12 13  6 7 14 15: the keys that one thread holds of S, in the order that mma wants of P
// A key that does not count is zeros. A channel with NaN or Inf has v_scale NaN: its codes no longer matter, but stay defined.
#pragma once

#include "quantize_qk.cuh"
#include "../common/ptx.cuh"

namespace sage {

template <int D, class T>
__device__ __forceinline__ void v_to_f16(const QuantParams & p, int64_t bh, int tile) {
    constexpr int V = VEC<T>, LANES = D / V, SETS = 32 / LANES, N = 8 / SETS;
    const int b = int(bh / p.kv_heads), h = int(bh % p.kv_heads);
    const int warp = threadIdx.x / 32, set = threadIdx.x % 32 / LANES, c = threadIdx.x % LANES * V;
    int token[N];
    float r[V];
    uint4 w[N];
#pragma unroll
    for (int i = 0; i < N; i++) {
        const int t = tile * 64 + warp + 8 * (i * SETS + set);
        token[i]    = key_counts(p, b, t) ? t : -1;
    }
    read_rows<T>(w, p.v, b, h, token, c, p.head_dim);
    read_floats(r, p.v_scale + bh * D + c);
#pragma unroll
    for (int j = 0; j < V; j++) {
        r[j] = 1.f / r[j];
    }
    // rows of 64 channels, the two halves of D = 128 one behind the other
    char * out = static_cast<char *>(p.v_codes) + (bh * p.k_tiles + tile) * 64 * D * 2 + c / 64 * (64 * 128) + c % 8 * 2;
#pragma unroll
    for (int i = 0; i < N; i++) {
        float x[V];
        unsigned words[V / 2];
        unpack(x, w[i], static_cast<const T *>(nullptr));
#pragma unroll
        for (int j = 0; j < V / 2; j++) {
            words[j] = token[i] < 0 ? 0 : ptx::cvt_f16x2(x[j * 2 + 1] * r[j * 2 + 1], x[j * 2] * r[j * 2]);
        }
        char * to = out + swizzled<128>(warp + 8 * (i * SETS + set), c % 64 / 8);
        if constexpr (V == 4) {
            *reinterpret_cast<uint2 *>(to) = make_uint2(words[0], words[1]);
        } else {
            *reinterpret_cast<uint4 *>(to) = make_uint4(words[0], words[1], words[2], words[3]);
        }
    }
}

// One thread reads the keys 2j, 2j+1, 2j+8, 2j+9 of a group of 16: four codes a channel, one word; a tile is 16 words a channel.
template <int D, class T>
__device__ __forceinline__ void v_to_e4m3(const QuantParams & p, int64_t bh, int tile, uint32_t * words) {
#if defined(SAGE_E4M3)
    constexpr int V = VEC<T>, LANES = D / V, SETS = QUANT_THREADS / LANES < 16 ? QUANT_THREADS / LANES : 16, N = 16 / SETS * 4;
    const int b = int(bh / p.kv_heads), h = int(bh % p.kv_heads);
    const int set = threadIdx.x / LANES, lane = threadIdx.x % LANES, c = lane * V;
    const auto place = [](int ch) { return (ch % V * LANES + ch / V) * 17; };  // 16 words + 1: hardly two lanes of a store in one bank
    if (set < SETS) {
        int token[N];
        float r[V], mean[V];
        uint4 w[N];
#pragma unroll
        for (int i = 0; i < N; i++) {
            const int word = i / 4 * SETS + set;
            const int t    = tile * 64 + word / 4 * 16 + word % 4 * 2 + i % 2 + i % 4 / 2 * 8;
            token[i]       = key_counts(p, b, t) ? t : -1;
        }
        read_rows<T>(w, p.v, b, h, token, c, p.head_dim);
        read_floats(r, p.v_scale + bh * D + c);
        read_floats(mean, p.v_mean + bh * D + c);
#pragma unroll
        for (int j = 0; j < V; j++) {
            r[j] = __fdiv_rn(1.f, r[j]);
        }
#pragma unroll
        for (int i = 0; i < N; i += 4) {
            float x[4][V];
#pragma unroll
            for (int k = 0; k < 4; k++) {
                unpack(x[k], w[i + k], static_cast<const T *>(nullptr));
            }
#pragma unroll
            for (int j = 0; j < V; j++) {
                float v[4];
#pragma unroll
                for (int k = 0; k < 4; k++) {
                    v[k] = token[i + k] < 0 ? 0.f : (x[k][j] - mean[j]) * r[j];
                }
                words[place(c + j) + i / 4 * SETS + set] = ptx::cvt_e4m3x2(v[1], v[0]) | ptx::cvt_e4m3x2(v[3], v[2]) << 16;
            }
        }
    }
    __syncthreads();
    const bool wide = p.v_row == 128;  // the tile is one half of each row
    char * out      = static_cast<char *>(p.v_codes) + (bh * p.k_tiles + (wide ? tile & ~1 : tile)) * 64 * D;
    for (int i = threadIdx.x; i < D * 4; i += QUANT_THREADS) {
        const int ch          = i / 4;
        const uint32_t at     = wide ? swizzled<128>(ch, tile % 2 * 4 + i % 4) : swizzled<64>(ch, i % 4);
        const uint32_t * from = words + place(ch) + i % 4 * 4;

        *reinterpret_cast<uint4 *>(out + at) = make_uint4(from[0], from[1], from[2], from[3]);
    }
#endif
}

template <int D, bool F8>
__device__ __forceinline__ void quantize_v(const QuantParams & p, int64_t bh, int tile, uint32_t * words) {
    with_type_of(p.v, [&](auto * type) {
        using T = std::decay_t<decltype(*type)>;
        if constexpr (F8) {
            v_to_e4m3<D, T>(p, bh, tile, words);
        } else {
            v_to_f16<D, T>(p, bh, tile);
        }
    });
}

// The codes of Q, K and V, 64 rows a block of threads. K and V come first, from last to first: the statistics have just read them, and what
// was read last is still in L2.
template <int D, bool F8>
__global__ void __launch_bounds__(QUANT_THREADS, 4) quantize(const __grid_constant__ QuantParams p) {
    __shared__ uint32_t words[F8 ? D * 17 : 1];
    ptx::let_next_launch();
    ptx::wait_for_launch();
    const int kv_tiles = p.batch * p.kv_heads * p.k_tiles, n = blockIdx.x;
    if (n < 2 * kv_tiles) {
        const int tile = kv_tiles - 1 - n / 2;
        if (n % 2) {
            quantize_v<D, F8>(p, tile / p.k_tiles, tile % p.k_tiles, words);
        } else {
            quantize_qk<D>(p, true, tile / p.k_tiles, tile % p.k_tiles);
        }
    } else {
        const int tile = n - 2 * kv_tiles;
        quantize_qk<D>(p, false, tile / p.q_tiles, tile % p.q_tiles);
    }
}

}  // namespace sage
