// The fp16 kernel on Hopper: the mathematics of qk_int8.cuh and qk_int8_pv_f16.cuh, groups and codes the same, by wgmma.
//   O = softmax(scale Q K^T + bias) V        one block of threads an SM, BQ query rows of one (batch, head) after the other
//   S  = Q8 K8^T                     i8 x i8 -> i32, both from shared memory
//   f  = sq sk |scale| log2e         two factors a thread and step: BK keys are two K tiles
//   m' = max(m, rowmax f S)   P = exp2(f S - m')   a = exp2(m - m'), rarely: see HEADROOM
//   l  = a l + rowsum P       O = a O + P V        P f16 in registers, V f16 [key][channel] from shared memory
// One producer thread copies K and V into a ring of stages, the next Q behind the last. GROUPS warpgroups of 64 rows multiply and
// do the softmax; a token goes round between them, so that one holds the tensor cores while the others are in their softmax.
// Keys go from last to first: the tail and the causal diagonal come first.
#pragma once

#include "../common/ptx_sm90.cuh"
#include "../common/tile.cuh"
#include "output.cuh"

namespace sage {

template <int D_>
struct TileSm90 {
    static constexpr int D = D_, GROUPS = 3, BQ = 64 * GROUPS, BK = 2 * K_TILE, STAGES = 3, THREADS = 128 * (GROUPS + 1);
    static constexpr int Q_BYTES = BQ * D, K_BYTES = BK * D, V_BYTES = BK * D * 2, V_TILE_BYTES = K_TILE * D * 2;
    static constexpr int SCALES = 8 * 4, BIAS = BK * 4, MORE_BYTES = BIAS + 128;  // of a stage of K: scales at BIAS
    static constexpr int Q_AT = 0, K_AT = Q_AT + 2 * Q_BYTES, V_AT = K_AT + STAGES * K_BYTES, MORE_AT = V_AT + STAGES * V_BYTES;
    static constexpr int BARRIERS_AT = MORE_AT + STAGES * MORE_BYTES, SMEM = BARRIERS_AT + 8 * (4 * STAGES + 4) + 1024;
    static constexpr int PRODUCER_REGISTERS = 32, MATH_REGISTERS = 160;
    static constexpr float HEADROOM = 8.f;  // as PvF16's
    static_assert(BQ == Q_TILE_SM90 && BK == K_PAD, "what the workspace is padded to");
    static_assert(SMEM <= 227 * 1024, "shared memory of a block");
    static_assert(PRODUCER_REGISTERS + GROUPS * MATH_REGISTERS <= 512, "registers of an SM, for threads of 128");
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// One tile of the grid: what producer and consumers must agree on.
struct WorkSm90 {
    int b, h, q0, steps, last_key;
    int64_t bh, kv;

    // Causal tiles differ in length: every other round is dealt backwards, so that no block of threads gets all of the long ones.
    static __device__ __forceinline__ unsigned number(const AttnParams & p, unsigned round) {
        return round * gridDim.x + (p.causal && round % 2 ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
    }
    template <class Tile>
    __device__ __forceinline__ void set(const AttnParams & p, unsigned n, Tile) {
        const unsigned head = n / p.q_tiles;
        bh                  = head;
        b                   = head / p.heads;
        h                   = head % p.heads;
        kv                  = int64_t(b) * p.kv_heads + h / (p.heads / p.kv_heads);
        q0                  = int(n % p.q_tiles) * Tile::BQ;
        last_key            = p.causal ? min(p.lk - 1, min(q0 + Tile::BQ, p.lq) - 1 + p.lk - p.lq) : p.lk - 1;
        steps               = max(last_key, 0) / Tile::BK + 1;  // at least one, if only to mask all of it
    }
};

// The scores as floats, in place: f S + bias, MASKED past last[r], which counts from this thread's first key of the step. So does bias.
template <bool BIAS, int BK>
__device__ __forceinline__ void mask_sm90(int (&s)[BK / 2], const float (&f)[2], uint32_t bias, const int (&last)[2]) {
#pragma unroll
    for (int j = 0; j < BK / 8; j++) {
        const float2 b2 = BIAS ? ptx::shared_f32x2(bias + j * 32) : make_float2(0.f, 0.f);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int & score      = s[j * 4 + i];
            const float b1   = i % 2 ? b2.y : b2.x;
            const bool there = j * 8 + i % 2 <= last[i / 2] && b1 != MASKED;
            score            = __float_as_int(there ? fmaf(float(score), f[j * 8 / K_TILE], b1) : MASKED);
        }
    }
}

// m', P and l; where a row of this warp grew by more than `headroom`, a, and with it l and O. P is FP16 in the operand layout of
// wgmma. scores_taken(): called when every thread of the warp has used its factors and biases.
template <bool FLOAT, int BK, int N, class F>
__device__ __forceinline__ void softmax_sm90(int (&s)[BK / 2], uint32_t (&probabilities)[BK / 4], float (&o)[N], float (&m)[2],
                                             float (&l)[2], const float (&f)[2], float headroom, F && scores_taken) {
    float x[2];
    bool grew = false;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const auto at = [&](int i) { return s[i / 2 * 4 + r * 2 + i % 2]; };
        if (FLOAT) {
            x[r] = __int_as_float(at(0));
#pragma unroll
            for (int i = 1; i < BK / 4; i++) {
                x[r] = fmaxf(x[r], __int_as_float(at(i)));
            }
        } else {  // f >= 0, so the maximum of integers is the scores'
            int y[2];
#pragma unroll
            for (int half = 0; half < 2; half++) {
                y[half] = max(at(half * BK / 8), at(half * BK / 8 + 1));
#pragma unroll
                for (int i = 2; i < BK / 8; i += 2) {
                    y[half] = __vimax3_s32(y[half], at(half * BK / 8 + i), at(half * BK / 8 + i + 1));
                }
            }
            x[r] = fmaxf(float(y[0]) * f[0], float(y[1]) * f[1]);
        }
        grew |= x[r] > m[r] + headroom;
    }
    const bool rescale = __any_sync(0xffffffffu, grew);
    scores_taken();
    if (rescale) {
        float a[2];
#pragma unroll
        for (int r = 0; r < 2; r++) {
            x[r] = fmaxf(x[r], __shfl_xor_sync(0xffffffffu, x[r], 1));
            x[r] = fmaxf(x[r], __shfl_xor_sync(0xffffffffu, x[r], 2));
            a[r] = m[r];
            m[r] = fmaxf(m[r], x[r]);
            a[r] = ptx::ex2(a[r] - m[r]);
            l[r] *= a[r];
        }
#pragma unroll
        for (int i = 0; i < N; i++) {
            o[i] *= a[i / 2 % 2];
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

#endif

template <class Tile, bool BIAS>
__global__ void __launch_bounds__(Tile::THREADS, 1) qk_int8_pv_f16_sm90(const __grid_constant__ AttnParams p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    constexpr int D = Tile::D, STAGES = Tile::STAGES, BK = Tile::BK;
    extern __shared__ char shared[];
    const uint32_t base = (ptx::shared_address(shared) + 1023) & ~1023u, barriers = base + Tile::BARRIERS_AT;
    const auto full_k  = [&](int i) { return barriers + 8 * i; };
    const auto full_v  = [&](int i) { return barriers + 8 * (STAGES + i); };
    const auto empty_k = [&](int i) { return barriers + 8 * (2 * STAGES + i); };
    const auto empty_v = [&](int i) { return barriers + 8 * (3 * STAGES + i); };
    const auto full_q  = [&](int i) { return barriers + 8 * (4 * STAGES + i); };
    const auto empty_q = [&](int i) { return barriers + 8 * (4 * STAGES + 2 + i); };
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            ptx::mbarrier_init(full_k(i), 1);
            ptx::mbarrier_init(full_v(i), 1);
            ptx::mbarrier_init(empty_k(i), Tile::GROUPS * 4);
            ptx::mbarrier_init(empty_v(i), Tile::GROUPS * 4);
        }
        for (int i = 0; i < 2; i++) {
            ptx::mbarrier_init(full_q(i), 1);
            ptx::mbarrier_init(empty_q(i), Tile::GROUPS * 4);
        }
        ptx::mbarrier_init_fence();
    }
    __syncthreads();

    const int group = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
    WorkSm90 work;
    if (group == 0) {
        ptx::registers_down<Tile::PRODUCER_REGISTERS>();
        if (threadIdx.x == 0) {
            const auto load_q = [&](unsigned round) {
                const unsigned n = WorkSm90::number(p, round);
                if (n < p.blocks) {
                    const uint32_t odd = round % 2;
                    if (round >= 2) {
                        ptx::mbarrier_wait(empty_q(odd), (round / 2 - 1) % 2);
                    }
                    ptx::mbarrier_expect(full_q(odd), Tile::Q_BYTES);
                    ptx::bulk_copy(base + Tile::Q_AT + odd * Tile::Q_BYTES, p.q8 + int64_t(n) * Tile::Q_BYTES, Tile::Q_BYTES, full_q(odd));
                }
            };
            load_q(0);
            int stage      = 0;
            uint32_t phase = 0;
            for (unsigned round = 0; WorkSm90::number(p, round) < p.blocks; round++) {
                work.set(p, WorkSm90::number(p, round), Tile());
                const char * k   = reinterpret_cast<const char *>(p.k8) + work.kv * p.k_tiles * (K_TILE * D);
                const char * v   = static_cast<const char *>(p.v_codes) + work.kv * p.k_tiles * Tile::V_TILE_BYTES;
                const float * sk = p.sk + work.kv * p.k_tiles * 4;
                // late enough never to hold up the ring
                const int next_q = max(work.steps - 2 * STAGES, 0);
                for (int step = work.steps - 1; step >= 0; step--) {
                    if (step == next_q) {
                        load_q(round + 1);
                    }
                    const uint32_t more = base + Tile::MORE_AT + stage * Tile::MORE_BYTES;
                    ptx::mbarrier_wait(empty_k(stage), phase ^ 1);
                    ptx::mbarrier_expect(full_k(stage), Tile::K_BYTES + Tile::SCALES + (BIAS ? Tile::BIAS : 0));
                    ptx::bulk_copy(base + Tile::K_AT + stage * Tile::K_BYTES, k + int64_t(step) * Tile::K_BYTES, Tile::K_BYTES,
                                   full_k(stage));
                    ptx::bulk_copy(more + Tile::BIAS, sk + int64_t(step) * 8, Tile::SCALES, full_k(stage));
                    if (BIAS) {
                        ptx::bulk_copy(more, p.bias2 + (int64_t(work.b) * p.k_tiles * K_TILE + int64_t(step) * BK), Tile::BIAS,
                                       full_k(stage));
                    }
                    ptx::mbarrier_wait(empty_v(stage), phase ^ 1);
                    ptx::mbarrier_expect(full_v(stage), Tile::V_BYTES);
                    ptx::bulk_copy(base + Tile::V_AT + stage * Tile::V_BYTES, v + int64_t(step) * Tile::V_BYTES, Tile::V_BYTES,
                                   full_v(stage));
                    if (++stage == STAGES) {
                        stage = 0;
                        phase ^= 1;
                    }
                }
            }
        }
    } else {
        ptx::registers_up<Tile::MATH_REGISTERS>();
        const int g = group - 1, lane = threadIdx.x % 32, row = g * 64 + threadIdx.x / 32 % 4 * 16;  // the warp's first row of the tile
        const uint64_t q_of_group = ptx::k_major<D>(base + Tile::Q_AT + g * 64 * D), k_base = ptx::k_major<D>(base + Tile::K_AT);
        const uint64_t v_base = ptx::mn_major(base + Tile::V_AT, K_TILE * 128);
        const auto release    = [&](uint32_t barrier) {  // each warp by itself: a wait of its own covers its own rows
            __syncwarp();
            if (lane == 0) {
                ptx::mbarrier_arrive(barrier);
            }
        };
        int stage      = 0;  // of K and V: V of a step is used before K of the next
        uint32_t phase = 0;
        if (g == Tile::GROUPS - 1) {
            ptx::token_pass(1);
        }
        for (unsigned round = 0; WorkSm90::number(p, round) < p.blocks; round++) {
            work.set(p, WorkSm90::number(p, round), Tile());
            const int row0 = work.q0 + row + lane / 4, diagonal = p.lk - p.lq;
            // the first key that some row of this warp must not see
            const int masked_from = p.causal ? min(p.lk, work.q0 + row + diagonal + 1) : p.lk;
            const float fq   = p.sq[(work.bh * p.q_tiles * (Tile::BQ / Q_GROUP) + (work.q0 + row) / Q_GROUP) * 8 + lane / 4] * p.factor;
            const uint64_t q = ptx::further(q_of_group, round % 2 * Tile::Q_BYTES);
            float o[1][D / 8][4], m[2] = { M_INIT, M_INIT }, l[2] = { 0.f, 0.f }, f[2];
            float (&o_flat)[D / 2] = reinterpret_cast<float (&)[D / 2]>(o);
            int s[BK / 2];
            uint32_t probabilities[BK / 4];
#pragma unroll
            for (int i = 0; i < D / 2; i++) {
                o_flat[i] = 0.f;
            }

            // S = Q8 K8^T, under way
            const auto issue_qk = [&] {
                ptx::mbarrier_wait(full_k(stage), phase);
                const uint64_t k = ptx::further(k_base, stage * Tile::K_BYTES);
                ptx::pin(s);
                ptx::wgmma_fence();
#pragma unroll
                for (int i = 0; i < D / 32; i++) {
                    ptx::wgmma_s8(s, ptx::further(q, i * 32), ptx::further(k, i * 32), i > 0);
                }
                ptx::wgmma_commit();
            };
            // m', P, a, l of this step
            const auto softmax = [&](int step) {
                const uint32_t more = base + Tile::MORE_AT + stage * Tile::MORE_BYTES;
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const float f0 = fq * ptx::shared_f32(more + Tile::BIAS + half * 16 + lane % 4 * 4);
                    f[half]        = f0 > FACTOR_MAX ? FACTOR_MAX : f0;  // NaN stays NaN
                }
                ptx::wgmma_wait<0>();
                ptx::pin(s);
                const auto k_taken = [&] { release(empty_k(stage)); };
                if (BIAS || step * BK + BK > masked_from) {
                    int last[2];
#pragma unroll
                    for (int r = 0; r < 2; r++) {
                        last[r] = (p.causal ? min(p.lk - 1, row0 + r * 8 + diagonal) : p.lk - 1) - step * BK - lane % 4 * 2;
                    }
                    mask_sm90<BIAS, BK>(s, f, more + lane % 4 * 8, last);
                    softmax_sm90<true, BK>(s, probabilities, o_flat, m, l, f, Tile::HEADROOM, k_taken);
                } else {
                    softmax_sm90<false, BK>(s, probabilities, o_flat, m, l, f, Tile::HEADROOM, k_taken);
                }
            };
            // O = O + P V
            const auto pv = [&] {
                ptx::mbarrier_wait(full_v(stage), phase);
                const uint64_t v = ptx::further(v_base, stage * Tile::V_BYTES);
                ptx::pin(o_flat);
                ptx::pin(probabilities);
                ptx::wgmma_fence();
#pragma unroll
                for (int i = 0; i < BK / 16; i++) {  // 16 keys; two tiles of the workspace
                    ptx::wgmma_f16(o_flat, probabilities[i * 4], probabilities[i * 4 + 1], probabilities[i * 4 + 2],
                                   probabilities[i * 4 + 3], ptx::further(v, i / 4 * Tile::V_TILE_BYTES + i % 4 * 16 * 128));
                }
                ptx::wgmma_commit();
                ptx::wgmma_wait<0>();
                ptx::pin(o_flat);
                release(empty_v(stage));
                if (++stage == STAGES) {
                    stage = 0;
                    phase ^= 1;
                }
            };

            ptx::mbarrier_wait(full_q(round % 2), round / 2 % 2);
            issue_qk();
            softmax(work.steps - 1);
            for (int step = work.steps - 2; step >= 0; step--) {
                ptx::token_wait(1 + g);
                pv();
                issue_qk();
                ptx::token_pass(1 + (g + 1) % Tile::GROUPS);
                softmax(step);
            }
            release(empty_q(round % 2));
            pv();
#pragma unroll
            for (int r = 0; r < 2; r++) {
                l[r] += __shfl_xor_sync(0xffffffffu, l[r], 1);
                l[r] += __shfl_xor_sync(0xffffffffu, l[r], 2);
            }
            write_rows<D, false>(p, o, l, work.kv, work.b, work.h, row0);
        }
    }
#endif
}

}  // namespace sage
