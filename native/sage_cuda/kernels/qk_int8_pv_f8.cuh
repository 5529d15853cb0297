// P V in E4M3: each key tile into a fresh accumulator, which the CUDA cores add to O in FP32 (two levels).
//   V [B,Hkv,k_tiles,D,64] e4m3, transposed, keys permuted (quantize_v.cuh)     P e4m3, at most 448
// The tensor core keeps about 1+8+13 bits of an FP8 sum: one level alone loses whole percents on long sequences.
// F16: the fresh accumulator is FP16 (SageAttention2++): 448 * 2.25 * 64 keys = 64512 is the most it can hold.
#pragma once

#include "qk_int8.cuh"

namespace sage {

template <int D_, bool F16>
struct PvF8 {
    static constexpr int D = D_, BYTES = K_TILE * D;
    static constexpr int SMEM        = Q_TILE * D + 2 * K_TILE * D + BYTES;  // Q, two K, one V: 40 KiB, 20 KiB
    static constexpr int BLOCKS      = 2;
    static constexpr float LOG2_PMAX = 8.80735492205760410744f;  // log2(448)
    static constexpr float HEADROOM  = 0.f;
    static constexpr bool SMOOTH_V   = true;
    static_assert(K_TILE == 64, "the FP16 accumulator is full after 64 keys; a row of V is 64 bytes");

#if defined(__CUDA_ARCH__) && !defined(SAGE_MMA_E4M3)
    static constexpr bool RUNS = false;  // no E4M3
#else
    static constexpr bool RUNS = true;
#endif

    // Whether the row sums stand where they are written. Elsewhere the compiler puts them off and keeps 64 P for them; which of the two
    // spills nothing was found by trying (tests/ptxas_table.py).
    static constexpr bool SUM_EARLY = !F16;
    static constexpr int BIAS_AHEAD = KEY_BLOCKS;
    static constexpr int STEP       = KEY_BLOCKS;
    using Operand                   = uint32_t[M][K_TILE / 32][4];

    static __device__ __forceinline__ uint32_t lane(int lane) { return swizzled<K_TILE>(lane % 8, lane / 8); }

    static __device__ __forceinline__ void pack(Operand & a, const Scores & s) {
#if defined(SAGE_MMA_E4M3)
#pragma unroll
        for (int i = 0; i < M * K_TILE / 32 * 4; i++) {
            const int half = i / 8, step = i / 4 % 2, n = i % 4;  // operand n: row g + 8 (n % 2), positions 16 (n / 2) + 4t ..
            const int j = step * 4 + n / 2 * 2, e = n % 2 * 2;    // = keys 2t, 2t+1 of block j and of block j + 1
            const int (&x)[4] = s[half][j], (&y)[4] = s[half][j + 1];
            a[half][step][n] = ptx::cvt_e4m3x2(__int_as_float(x[e + 1]), __int_as_float(x[e])) |
                               ptx::cvt_e4m3x2(__int_as_float(y[e + 1]), __int_as_float(y[e])) << 16;
        }
#endif
    }

    // A fresh FP16 accumulator to O: the second level.
    static __device__ __forceinline__ void flush(float (&o)[4], const uint32_t (&d)[2]) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const float2 x = __half22float2(reinterpret_cast<const __half2 &>(d[r]));
            o[r * 2] += x.x;
            o[r * 2 + 1] += x.y;
        }
    }

    // fp8++ where FP8 is emulated, as the compiler does it: E4M3 becomes FP16, and each product of 32 keys two of 16. Written out, the
    // operand of P is converted once and nothing spills. Word n of a fragment holds keys 4t .. 4t + 3 of its 16: the lower two are
    // positions 2t, 2t + 1 of the first product, the upper two of the second, in P as in V.
    static __device__ __forceinline__ void add_emulated(float (&o)[M][D / 8][4], const Operand & a, uint32_t v) {
#if defined(SAGE_MMA_E4M3)
        uint32_t p[M][K_TILE / 32][2][4];
#pragma unroll
        for (int i = 0; i < M * K_TILE / 32 * 2 * 4; i++) {
            const int half = i / 16, step = i / 8 % 2, upper = i / 4 % 2, n = i % 4;
            p[half][step][upper][n] = ptx::cvt_f16x2_e4m3(a[half][step][n], upper);
        }
#pragma unroll
        for (int j = 0; j < D / 8; j++) {
            uint32_t b[4];
            ptx::ldmatrix_x4(b, v + j * 8 * K_TILE);
#pragma unroll
            for (int half = 0; half < M; half++) {
                uint32_t d[2] = { 0, 0 };
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const int step = i / 2, upper = i % 2;
                    ptx::mma_f16_f16(d, p[half][step][upper], ptx::cvt_f16x2_e4m3(b[step * 2], upper),
                                     ptx::cvt_f16x2_e4m3(b[step * 2 + 1], upper));
                }
                flush(o[half][j], d);
            }
        }
#endif
    }

    template <bool FLOAT>
    static __device__ __forceinline__ void add(float (&o)[M][D / 8][4], const Scores & s, Softmax &, float, uint32_t v) {
#if defined(SAGE_MMA_E4M3)
        Operand a;
        pack(a, s);
#if __CUDA_ARCH__ >= 1000 && __CUDA_ARCH__ < 1200
        if constexpr (F16 && D == 128) {
            add_emulated(o, a, v);
            return;
        }
#endif
#pragma unroll
        for (int j = 0; j < D / 8; j++) {
            uint32_t b[4];
            ptx::ldmatrix_x4(b, v + j * 8 * K_TILE);
#pragma unroll
            for (int half = 0; half < M; half++) {
                if constexpr (F16) {
#if __CUDACC_VER_MAJOR__ * 100 + __CUDACC_VER_MINOR__ >= 1208
                    uint32_t d[2] = { 0, 0 };
                    ptx::mma_e4m3_f16(d, a[half][0], b[0], b[1]);
                    ptx::mma_e4m3_f16(d, a[half][1], b[2], b[3]);
                    flush(o[half][j], d);
#endif
                } else {
                    float d[4] = { 0.f, 0.f, 0.f, 0.f };
                    ptx::mma_e4m3(d, a[half][0], b[0], b[1]);
                    ptx::mma_e4m3(d, a[half][1], b[2], b[3]);
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        o[half][j][i] += d[i];
                    }
                }
            }
        }
#endif
    }
};

}  // namespace sage
