// P V in FP16, accumulated in FP32, straight into O.
//   V [B,Hkv,k_tiles,D/64,64,64] f16     P f16, at most 2^HEADROOM
#pragma once

#include "qk_int8.cuh"

namespace sage {

template <int D_>
struct PvF16 {
    static constexpr int D = D_, BYTES = K_TILE * D * 2;
    static constexpr int SMEM        = Q_TILE * D + 2 * K_TILE * D + BYTES;  // Q, two K, one V: 48 KiB, 24 KiB
    static constexpr int BLOCKS      = 2;  // an SM: registers allow no more (3 at 64 spills, and is slower)
    static constexpr float LOG2_PMAX = 0.f;
    static constexpr bool SMOOTH_V   = false;
    static constexpr float HEADROOM  = 8.f;  // P up to 256 loses nothing in FP16, and O is rescaled a few times instead of often
    static_assert(SMEM + 1280 <= 50 * 1024, "two blocks with Aside and 1 KiB of the system's fit the 100 KiB of sm_86, sm_89 and sm_120");

    // Machine code for Hopper has qk_int8_pv_f16_sm90.cuh instead.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    static constexpr bool RUNS = false;
#else
    static constexpr bool RUNS = true;
#endif

    static constexpr bool SUM_EARLY = false;  // see PvF8
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
    static constexpr int BIAS_AHEAD = KEY_BLOCKS;  // by trying, too
#else
    static constexpr int BIAS_AHEAD = 3;
#endif
    static constexpr int STEP = 2;  // key blocks an mma takes

    static __device__ __forceinline__ uint32_t lane(int lane) { return swizzled<128>(lane % 16, lane / 16); }

    // One step's MMAs with the next step's exponentials between them: neither unit waits for the other.
    template <bool FLOAT>
    static __device__ __forceinline__ void add(float (&o)[M][D / 8][4], Scores & s, Softmax & softmax, float f, uint32_t v) {
#pragma unroll
        for (int step = 0; step < K_TILE / 16; step++) {
            uint32_t a[M][4];
#pragma unroll
            for (int n = 0; n < 4 * M; n++) {  // operand n % 4: row g + 8 (n % 2), keys 8 (n / 2) + {2t, 2t+1}
                const int (&x)[4] = s[n / 4][step * 2 + n % 4 / 2];
                a[n / 4][n % 4]   = ptx::cvt_f16x2(__int_as_float(x[n % 2 * 2 + 1]), __int_as_float(x[n % 2 * 2]));
            }
#pragma unroll
            for (int j = 0; j < D / 8; j += 2) {
                uint32_t b[4];
                ptx::ldmatrix_x4_trans(b, further(v, j % 8) + j / 8 * K_TILE * 128 + step * 16 * 128);
#pragma unroll
                for (int n = 0; n < 2; n++) {
#pragma unroll
                    for (int i = 0; i < M; i++) {
                        ptx::mma_f16(o[i][j + n], a[i], b[n * 2], b[n * 2 + 1]);
                    }
                }
                if (step + 1 < K_TILE / 16) {
                    constexpr int TURNS = D / 16, ALL = 2 * ROWS;  // pairs of keys a step
#pragma unroll
                    for (int pair = j / 2 * ALL / TURNS; pair < (j / 2 + 1) * ALL / TURNS; pair++) {
                        softmax.probability<FLOAT, SUM_EARLY>(s, pair % ROWS, step * 2 + 2 + pair / ROWS, f);
                    }
                }
            }
        }
    }
};

}  // namespace sage
