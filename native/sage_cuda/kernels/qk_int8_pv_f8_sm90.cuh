// P V in E4M3 on Hopper, in two levels: the products of two key tiles into a fresh accumulator, which the CUDA cores add to O in FP32
// (SageAttention2, "FP32 accumulation buffer"). The tensor core keeps about 1+8+13 bits of an FP8 sum: one level alone loses whole
// percents.
//   V [B,Hkv,k_tiles/2,D,128] e4m3, transposed, keys permuted (quantize_v.cuh)     P e4m3, at most 448, in the operand layout of wgmma
// The channels are taken 64 at a time: O, P and half a fresh accumulator fit into 160 registers. Behind each V tile in shared memory lie
// eight rows of ones: the tensor core also sums P, as it was rounded, and that is l.
#pragma once

#include "qk_int8_sm90.cuh"

namespace sage {

template <int D_>
struct PvF8Sm90 {
    static constexpr int D = D_, BK = 2 * K_TILE, ONES = 8 * BK, V_BYTES = BK * D, V_STAGE = V_BYTES + ONES;
    static constexpr float LOG2_PMAX = 8.80735492205760410744f;  // log2(448)
    static constexpr bool SMOOTH_V   = true;
    static_assert(BK == 128, "a row of V is 128 bytes");

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    float o[1][D / 8][4], m[2], l[2], a[2];
    uint32_t probabilities[BK / 8];

    // The ones of a stage, written once: copies never touch them. The tensor core reads what threads wrote: hence the fence.
    static __device__ __forceinline__ void fill(char * stage) {
        for (int i = threadIdx.x; i < ONES / 4; i += blockDim.x) {
            reinterpret_cast<uint32_t *>(stage + V_BYTES)[i] = 0x38383838u;
        }
        ptx::proxy_fence();
    }
    static __device__ __forceinline__ uint64_t descriptor(uint32_t address) { return ptx::k_major<BK>(address); }

    __device__ __forceinline__ PvF8Sm90() : m{ M_INIT, M_INIT }, l{ 0.f, 0.f } {
#pragma unroll
        for (int i = 0; i < D / 2; i++) {
            o[0][i / 4][i % 4] = 0.f;
        }
    }

    // P of the scores, and a. scores_taken(x): called when factors and biases are used up; x was computed from all of them.
    template <bool FLOAT, class F>
    __device__ __forceinline__ void softmax(int (&s)[BK / 2], const float (&f)[2], F && scores_taken) {
        float x[2], up[2];
        row_maxima_sm90<FLOAT, BK>(x, s, f);
        scores_taken(x[0]);
#pragma unroll
        for (int r = 0; r < 2; r++) {
            x[r]  = quad_max(x[r]);
            x[r]  = fmaxf(m[r], x[r]);
            a[r]  = ptx::ex2(m[r] - x[r]);
            m[r]  = x[r];
            up[r] = LOG2_PMAX - x[r];
        }
#pragma unroll
        for (int i = 0; i < BK / 2; i++) {
            const int r = i / 2 % 2, half = i / (BK / 4);
            s[i] = __float_as_int(ptx::ex2(FLOAT ? __int_as_float(s[i]) + up[r] : fmaf(float(s[i]), f[half], up[r])));
        }
#pragma unroll
        for (int i = 0; i < BK / 8; i++) {  // word i of P: row 8 (i % 2), keys of blocks 2j and 2j + 1
            const int at     = i / 2 * 8 + i % 2 * 2;
            const auto p     = [&](int k) { return __int_as_float(s[at + k]); };
            probabilities[i] = ptx::cvt_e4m3x4(p(0), p(1), p(4), p(5));
        }
    }

    // O = a O + P V of two key tiles; v_taken(): called when V has been read. TIGHT: fewer channels at a time, for where masks need
    // registers; the compiler lets two fresh accumulators live at once.
    template <bool TIGHT, class F>
    __device__ __forceinline__ void add(uint64_t v, F && v_taken) {
        constexpr int CHANNELS = TIGHT ? 32 : 64, LAST = D - CHANNELS;
#pragma unroll
        for (int first = 0; first < LAST; first += CHANNELS) {
            float fresh[CHANNELS / 2];
            multiply(fresh, ptx::further(v, first * BK));
            add_part<CHANNELS>(fresh, first);
        }
        float fresh[CHANNELS / 2 + 4];  // and the sums, of both columns that a thread has
        multiply(fresh, ptx::further(v, LAST * BK));
        v_taken();
        add_part<CHANNELS>(fresh, LAST);
        l[0] = fmaf(l[0], a[0], fresh[CHANNELS / 2]);
        l[1] = fmaf(l[1], a[1], fresh[CHANNELS / 2 + 2]);
    }

    __device__ __forceinline__ void finish() {}

  private:
    template <int N>
    __device__ __forceinline__ void multiply(float (&fresh)[N], uint64_t v) {
        ptx::pin(fresh);
        ptx::pin(probabilities);
        ptx::wgmma_fence();
#pragma unroll
        for (int i = 0; i < BK / 32; i++) {  // 32 keys
            ptx::wgmma_e4m3(fresh, probabilities + i * 4, ptx::further(v, i * 32), i > 0);
        }
        ptx::wgmma_commit();
        ptx::wgmma_wait<0>();
        ptx::pin(fresh);
    }
    template <int CHANNELS, int N>
    __device__ __forceinline__ void add_part(const float (&fresh)[N], int first) {
#pragma unroll
        for (int i = 0; i < CHANNELS / 2; i++) {
            float & x = o[0][first / 8 + i / 4][i % 4];
            x         = fmaf(x, a[i / 2 % 2], fresh[i]);
        }
    }
#endif
};

}  // namespace sage
