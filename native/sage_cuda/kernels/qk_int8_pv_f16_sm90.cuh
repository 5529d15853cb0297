// P V in FP16 on Hopper: accumulated in O itself, in FP32.
//   V [B,Hkv,k_tiles,D/64,64,64] f16, rows of 64 channels, one a key
// O and l are rescaled only where a row of the warp grew by more than HEADROOM since it was last rescaled.
#pragma once

#include "qk_int8_sm90.cuh"

namespace sage {

template <int D_>
struct PvF16Sm90 {
    static constexpr int D = D_, BK = 2 * K_TILE, V_TILE = K_TILE * D * 2, V_BYTES = 2 * V_TILE, V_STAGE = V_BYTES;
    static constexpr float HEADROOM = 8.f;  // as PvF16's
    static constexpr bool SMOOTH_V  = false;

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    float o[1][D / 8][4], m[2], l[2];
    uint32_t probabilities[BK / 4];

    static __device__ __forceinline__ void fill(char *) {}
    static __device__ __forceinline__ uint64_t descriptor(uint32_t address) { return ptx::mn_major(address, K_TILE * 128); }

    __device__ __forceinline__ PvF16Sm90() : m{ M_INIT, M_INIT }, l{ 0.f, 0.f } {
#pragma unroll
        for (int i = 0; i < D / 2; i++) {
            flat()[i] = 0.f;
        }
    }
    __device__ __forceinline__ auto flat() -> float (&)[D / 2] { return reinterpret_cast<float (&)[D / 2]>(o); }

    // P of the scores, in the operand layout of wgmma. scores_taken(x): called when factors and biases are
    // used up; x was computed from all of them.
    template <bool FLOAT, class F>
    __device__ __forceinline__ void softmax(int (&s)[BK / 2], const float (&f)[2], F && scores_taken) {
        float x[2];
        row_maxima_sm90<FLOAT, BK>(x, s, f);
        const bool rescale = __any_sync(0xffffffffu, x[0] > m[0] + HEADROOM || x[1] > m[1] + HEADROOM);
        scores_taken(x[0]);
        if (rescale) {
            float a[2];
#pragma unroll
            for (int r = 0; r < 2; r++) {
                x[r] = quad_max(x[r]);
                a[r] = m[r];
                m[r] = fmaxf(m[r], x[r]);
                a[r] = ptx::ex2(a[r] - m[r]);
                l[r] *= a[r];
            }
#pragma unroll
            for (int i = 0; i < D / 2; i++) {
                flat()[i] *= a[i / 2 % 2];
            }
        }
#pragma unroll
        for (int i = 0; i < BK / 2; i += 2) {
            const int r = i / 2 % 2, half = i / (BK / 4);
            const float p0 = ptx::ex2(FLOAT ? __int_as_float(s[i]) - m[r] : fmaf(float(s[i]), f[half], -m[r]));
            const float p1 = ptx::ex2(FLOAT ? __int_as_float(s[i + 1]) - m[r] : fmaf(float(s[i + 1]), f[half], -m[r]));
            l[r] += p0;
            l[r] += p1;
            probabilities[i / 2] = ptx::cvt_f16x2(p1, p0);
        }
    }

    // O += P V of two key tiles; v_taken(): called when V has been read. TIGHT is for PvF8Sm90.
    template <bool TIGHT, class F>
    __device__ __forceinline__ void add(uint64_t v, F && v_taken) {
        ptx::pin(flat());
        ptx::pin(probabilities);
        ptx::wgmma_fence();
#pragma unroll
        for (int i = 0; i < BK / 16; i++) {  // 16 keys
            ptx::wgmma_f16(flat(), probabilities[i * 4], probabilities[i * 4 + 1], probabilities[i * 4 + 2], probabilities[i * 4 + 3],
                           ptx::further(v, i / 4 * V_TILE + i % 4 * 16 * 128));
        }
        ptx::wgmma_commit();
        ptx::wgmma_wait<0>();
        ptx::pin(flat());
        v_taken();
    }

    __device__ __forceinline__ void finish() {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            l[r] += __shfl_xor_sync(0xffffffffu, l[r], 1);
            l[r] += __shfl_xor_sync(0xffffffffu, l[r], 2);
        }
    }
#endif
};

}  // namespace sage
