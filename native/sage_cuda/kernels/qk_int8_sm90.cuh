// The kernels on Hopper: the mathematics of qk_int8.cuh, groups and codes the same, by wgmma. What is done with P is in Pv (PvF16Sm90,
// PvF8Sm90).
//   O = softmax(scale Q K^T + bias) V        one block of threads an SM, BQ query rows of one (batch, head) after the other
//   S  = Q8 K8^T                     i8 x i8 -> i32, both from shared memory
//   f  = sq sk |scale| log2e         two factors a thread and step: BK keys are two K tiles
//   m' = max(m, rowmax f S)   P = exp2(f S - m')   a = exp2(m - m')
//   l  = a l + rowsum P       O = a O + P V        P in registers, V from shared memory
// One producer thread copies K and V into a ring of stages, the next Q behind the last. GROUPS warpgroups of 64 rows multiply and
// do the softmax; a token goes round between them, so that one holds the tensor cores while the others are in their softmax.
// Keys go from last to first: the tail and the causal diagonal come first.
#pragma once

#include <type_traits>

#include "../common/ptx_sm90.cuh"
#include "../common/tile.cuh"
#include "output.cuh"

namespace sage {

template <class Pv_>
struct TileSm90 {
    using Pv               = Pv_;
    static constexpr int D = Pv::D, GROUPS = 3, BQ = 64 * GROUPS, BK = 2 * K_TILE, STAGES = 3, THREADS = 128 * (GROUPS + 1);
    static constexpr int Q_BYTES = BQ * D, K_BYTES = BK * D;
    static constexpr int SCALES = 8 * 4, BIAS = BK * 4, MORE_BYTES = BIAS + 128;  // of a stage of K: scales at BIAS
    // beside each Q: its scales, V's scale and mean, and where the tile lies
    static constexpr int Q_SCALES = BQ / Q_GROUP * 8 * 4, V_SCALE = Q_SCALES, V_MEAN = V_SCALE + D * 4, PLACE = V_MEAN + D * 4;
    static constexpr int ASIDE_BYTES = PLACE + 64;
    static constexpr int Q_AT = 0, K_AT = Q_AT + 2 * Q_BYTES, V_AT = K_AT + STAGES * K_BYTES, MORE_AT = V_AT + STAGES * Pv::V_STAGE;
    static constexpr int ASIDE_AT = MORE_AT + STAGES * MORE_BYTES, BARRIERS_AT = ASIDE_AT + 2 * ASIDE_BYTES;
    static constexpr int SMEM               = BARRIERS_AT + 8 * (4 * STAGES + 4) + 1024;
    static constexpr int PRODUCER_REGISTERS = 32, MATH_REGISTERS = 160;
    static_assert(BQ == Q_TILE_SM90 && BK == K_PAD, "what the workspace is padded to");

    // the first of the two rows that a thread has, and the next is 8 further
    static __device__ __forceinline__ unsigned row_of(unsigned thread) {
        return thread / 128 * 64 - 64 + thread % 128 / 32 * 16 + thread % 32 / 4;
    }
    static_assert(V_AT % 1024 == 0 && Pv::V_STAGE % 1024 == 0, "where swizzled tiles may start");
    static_assert(SMEM <= 227 * 1024, "shared memory of a block");
    static_assert(PRODUCER_REGISTERS + GROUPS * MATH_REGISTERS <= 512, "registers of an SM, for threads of 128");
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// One tile of the grid. The producer works it out, the others read it: their registers and their time are dear.
struct PlaceSm90 {
    int b, h, q0, steps;
    int whole;  // steps below this one are whole: every row sees all of their keys

    // Causal tiles differ in length: every other round is dealt backwards, so that no block of threads gets all of the long ones.
    static __device__ __forceinline__ unsigned number(const AttnParams & p, unsigned round) {
        return round * gridDim.x + (p.causal && round % 2 ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
    }
    template <class Tile>
    static __device__ __forceinline__ PlaceSm90 of(const AttnParams & p, unsigned n) {
        const unsigned head = n / p.q_tiles;
        const int q0        = int(n - head * p.q_tiles) * Tile::BQ;
        const int last_key  = p.causal ? min(p.lk - 1, min(q0 + Tile::BQ, p.lq) - 1 + p.lk - p.lq) : p.lk - 1;
        // at least one step, if only to mask all of it
        return { int(head / p.heads), int(head % p.heads), q0, max(last_key, 0) / Tile::BK + 1,
                 (p.causal ? max(min(p.lk, q0 + 1 + p.lk - p.lq), 0) : p.lk) / Tile::BK };
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

// The largest score of each of the two rows, of this thread's keys.
template <bool FLOAT, int BK>
__device__ __forceinline__ void row_maxima_sm90(float (&x)[2], const int (&s)[BK / 2], const float (&f)[2]) {
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
    }
}

// A row's maximum over the four threads that hold it.
__device__ __forceinline__ float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

// O / l * v_scale, with MEAN + v_mean, of the rows `row` and `row` + 8 of a tile; zeros where l = 0. A few channels at a time: their scales
// are read before anything is written, and the registers suffice. `scale`, `mean`, `place`: in shared memory.
template <int D, bool MEAN, bool WIDE, class T>
__device__ __forceinline__ void write_rows_sm90(const AttnParams & p, const float (&o)[D / 8][4], const float (&l)[2], uint32_t scale,
                                                uint32_t mean, T * out, int c, int rows) {
    constexpr int AT_ONCE = 4;
    const int64_t below   = 8 * p.o_token;
#pragma unroll
    for (int first = 0; first < D / 8; first += AT_ONCE) {
        float2 s[AT_ONCE], m[AT_ONCE];
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++) {
            s[j] = ptx::shared_f32x2(scale + (first + j) * 32);
            m[j] = MEAN ? ptx::shared_f32x2(mean + (first + j) * 32) : make_float2(0.f, 0.f);
        }
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++) {
            const int ch = (first + j) * 8;
#pragma unroll
            for (int r = 0; r < 2; r++) {
                T * at        = out + r * below + ch;
                const float x = l[r] == 0.f ? 0.f : o[first + j][r * 2] * s[j].x + m[j].x;
                const float y = l[r] == 0.f ? 0.f : o[first + j][r * 2 + 1] * s[j].y + m[j].y;
                if (WIDE) {
                    if (r * 8 < rows && ch + c < p.head_dim) {
                        put2(at, x, y);
                    }
                } else {
                    if (r * 8 < rows && ch + c < p.head_dim) {
                        put(at, x);
                    }
                    if (r * 8 < rows && ch + c + 1 < p.head_dim) {
                        put(at + 1, y);
                    }
                }
            }
        }
    }
}
template <class Tile, bool MEAN, int D = Tile::D>
__device__ __forceinline__ void write_rows_sm90(const AttnParams & p, float (&o)[D / 8][4], const float (&l)[2], uint32_t scale,
                                                uint32_t mean, uint32_t place) {
    const unsigned thread = ptx::thread();
    const int row = Tile::row_of(thread), c = thread % 4 * 2;
    const int4 at     = ptx::shared_int4(place);  // of PlaceSm90
    const int64_t out = at.x * p.o_batch + at.y * p.o_head + (at.z + row) * p.o_token + c;
    const int rows    = p.lq - at.z - row;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const float inverse = 1.f / l[r];
#pragma unroll
        for (int j = 0; j < D / 4; j++) {
            o[j / 2][r * 2 + j % 2] *= inverse;
        }
    }
    const auto write = [&](auto * to) {
        if (p.o_wide) {
            write_rows_sm90<D, MEAN, true>(p, o, l, scale + c * 4, mean + c * 4, to + out, c, rows);
        } else {
            write_rows_sm90<D, MEAN, false>(p, o, l, scale + c * 4, mean + c * 4, to + out, c, rows);
        }
    };
    switch (p.o_dtype) {
        case F32:
            return write(static_cast<float *>(p.o));
        case F16:
            return write(static_cast<__half *>(p.o));
        default:
            return write(static_cast<__nv_bfloat16 *>(p.o));
    }
}

#endif

template <class Tile, bool BIAS>
__global__ void __launch_bounds__(Tile::THREADS, 1) qk_int8_sm90(const __grid_constant__ AttnParams p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    using Pv        = typename Tile::Pv;
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
    for (int i = 0; i < STAGES; i++) {
        Pv::fill(shared + (base - ptx::shared_address(shared)) + Tile::V_AT + i * Pv::V_STAGE);
    }
    __syncthreads();

    const int group = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
    if (group == 0) {
        ptx::registers_down<Tile::PRODUCER_REGISTERS>();
        if (threadIdx.x == 0) {
            ptx::wait_for_launch();  // nobody else reads what the quantizers wrote, and nobody writes before that
            const auto kv_head = [&](const PlaceSm90 & at) { return int64_t(at.b) * p.kv_heads + at.h / (p.heads / p.kv_heads); };
            const auto load_q  = [&](unsigned round) {
                const unsigned n = PlaceSm90::number(p, round);
                if (n < p.blocks) {
                    const uint32_t odd = round % 2, aside = base + Tile::ASIDE_AT + odd * Tile::ASIDE_BYTES;
                    const PlaceSm90 at = PlaceSm90::of<Tile>(p, n);
                    if (round >= 2) {
                        ptx::mbarrier_wait(empty_q(odd), (round / 2 - 1) % 2);
                    }
                    ptx::store_shared(aside + Tile::PLACE, make_int4(at.b, at.h, at.q0, at.steps));
                    ptx::store_shared(aside + Tile::PLACE + 16, at.whole);
                    ptx::mbarrier_expect(full_q(odd), Tile::Q_BYTES + Tile::Q_SCALES + (Pv::SMOOTH_V ? 2 : 1) * D * 4);
                    ptx::bulk_copy(base + Tile::Q_AT + odd * Tile::Q_BYTES, p.q8 + int64_t(n) * Tile::Q_BYTES, Tile::Q_BYTES, full_q(odd));
                    ptx::bulk_copy(aside, p.sq + int64_t(n) * (Tile::Q_SCALES / 4), Tile::Q_SCALES, full_q(odd));
                    ptx::bulk_copy(aside + Tile::V_SCALE, p.v_scale + kv_head(at) * D, D * 4, full_q(odd));
                    if (Pv::SMOOTH_V) {
                        ptx::bulk_copy(aside + Tile::V_MEAN, p.v_mean + kv_head(at) * D, D * 4, full_q(odd));
                    }
                }
            };
            load_q(0);
            int stage      = 0;
            uint32_t phase = 0;
            for (unsigned round = 0; PlaceSm90::number(p, round) < p.blocks; round++) {
                const PlaceSm90 at = PlaceSm90::of<Tile>(p, PlaceSm90::number(p, round));
                const int64_t kv   = kv_head(at);
                const char * k     = reinterpret_cast<const char *>(p.k8) + kv * p.k_tiles * (K_TILE * D);
                const char * v     = static_cast<const char *>(p.v_codes) + kv * (p.k_tiles / 2) * Pv::V_BYTES;
                const float * sk   = p.sk + kv * p.k_tiles * 4;
                // late enough never to hold up the ring
                const int next_q = max(at.steps - 2 * STAGES, 0);
                for (int step = at.steps - 1; step >= 0; step--) {
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
                        ptx::bulk_copy(more, p.bias2 + (int64_t(at.b) * p.k_tiles * K_TILE + int64_t(step) * BK), Tile::BIAS,
                                       full_k(stage));
                    }
                    ptx::mbarrier_wait(empty_v(stage), phase ^ 1);
                    ptx::mbarrier_expect(full_v(stage), Pv::V_BYTES);
                    ptx::bulk_copy(base + Tile::V_AT + stage * Pv::V_STAGE, v + int64_t(step) * Pv::V_BYTES, Pv::V_BYTES, full_v(stage));
                    if (++stage == STAGES) {
                        stage = 0;
                        phase ^= 1;
                    }
                }
            }
        }
    } else {
        ptx::registers_up<Tile::MATH_REGISTERS>();
        const int g = group - 1, lane = threadIdx.x % 32;
        const uint64_t q_of_group = ptx::k_major<D>(base + Tile::Q_AT + g * 64 * D), k_base = ptx::k_major<D>(base + Tile::K_AT);
        const uint64_t v_base = Pv::descriptor(base + Tile::V_AT);
        const auto release    = [&](uint32_t barrier) {  // each warp by itself: a wait of its own covers its own rows
            __syncwarp();
            if (lane == 0) {
                ptx::mbarrier_arrive(barrier);
            }
        };
        // The same for what was read by loads, once they have arrived: an arrive does not wait for them, and the next copy may overtake one
        // (the Hopper study saw it, once in 10,000 blocks). `seen` was computed from all of them; the test holds for every float.
        const auto release_after = [&](uint32_t barrier, float seen) {
            __syncwarp();
            if (lane == 0 && __float_as_uint(seen) != 0x7f812345u) {
                ptx::mbarrier_arrive(barrier);
            }
        };
        int stage         = 0;  // of K and V: V of a step is used before K of the next
        uint32_t phase    = 0;
        const auto add_pv = [&](Pv & pv, auto which) {
            ptx::mbarrier_wait(full_v(stage), phase);
            pv.template add<decltype(which)::value>(ptx::further(v_base, stage * Pv::V_STAGE), [&] { release(empty_v(stage)); });
            if (++stage == STAGES) {
                stage = 0;
                phase ^= 1;
            }
        };
        if (g == Tile::GROUPS - 1) {
            ptx::token_pass(1);
        }
        for (unsigned round = 0; PlaceSm90::number(p, round) < p.blocks; round++) {
            const uint32_t aside = base + Tile::ASIDE_AT + round % 2 * Tile::ASIDE_BYTES;
            ptx::mbarrier_wait(full_q(round % 2), round / 2 % 2);
            const unsigned row_here = Tile::row_of(threadIdx.x);
            const float fq          = ptx::shared_f32(aside + (row_here / Q_GROUP * 8 + row_here % 8) * 4) * p.factor;
            const uint64_t q        = ptx::further(q_of_group, round % 2 * Tile::Q_BYTES);
            Pv pv;
            float f[2];
            int s[BK / 2];

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
            // m', P, a of this step
            const auto softmax = [&](int step, auto which) {
                constexpr bool MASKED_STEP = decltype(which)::value;
                const uint32_t more        = base + Tile::MORE_AT + stage * Tile::MORE_BYTES;
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    f[half] = ptx::min_nan(fq * ptx::shared_f32(more + Tile::BIAS + half * 16 + lane % 4 * 4), FACTOR_MAX);
                }
                ptx::wgmma_wait<0>();
                ptx::pin(s);
                if constexpr (MASKED_STEP) {
                    const unsigned thread = threadIdx.x;
                    const int first_key   = step * BK + thread % 4 * 2;  // of this thread
                    // the last key of all, and of this thread's first row where there is causality
                    const int end     = p.lk - 1,
                              row_end = p.causal ? ptx::shared_int(aside + Tile::PLACE + 8) + Tile::row_of(thread) + p.lk - p.lq : end;
                    const int last[2] = { min(end, row_end) - first_key, min(end, row_end + 8) - first_key };
                    mask_sm90<BIAS, BK>(s, f, more + thread % 4 * 8, last);
                }
                pv.template softmax<MASKED_STEP>(s, f, [&](float seen) { release_after(empty_k(stage), seen); });
            };
            // O = a O + P V of the step before, then S of this one
            const auto turn = [&](auto which) {
                ptx::token_wait(1 + g);
                add_pv(pv, which);
                issue_qk();
                ptx::token_pass(1 + (g + 1) % Tile::GROUPS);
            };
            using Masked = std::true_type;
            using Whole  = std::false_type;

            issue_qk();
            int step         = ptx::shared_int(aside + Tile::PLACE + 12) - 1;
            const auto whole = [&] { return !BIAS && step < ptx::shared_int(aside + Tile::PLACE + 16); };
            if (whole()) {
                softmax(step, Whole());
            } else {
                softmax(step, Masked());
            }
#pragma unroll 1
            for (step--; step >= 0 && !whole(); step--) {
                turn(Masked());
                softmax(step, Masked());
            }
            if constexpr (!BIAS) {
                for (; step >= 0; step--) {
                    turn(Whole());
                    softmax(step, Whole());
                }
            }
            add_pv(pv, Masked());
            pv.finish();
            write_rows_sm90<Tile, Pv::SMOOTH_V>(p, pv.o[0], pv.l, aside + Tile::V_SCALE, aside + Tile::V_MEAN, aside + Tile::PLACE);
            release(empty_q(round % 2));
        }
    }
#endif
}

}  // namespace sage
