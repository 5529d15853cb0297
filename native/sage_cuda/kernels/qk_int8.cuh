// The half that all kernels by mma.sync share: S = Q K^T in INT8 and the online softmax.
//   O = softmax(scale Q K^T + bias) V        one block of threads per (batch, head, Q_TILE query rows), 32 rows a warp
//   Q8 [B,H,Lq,D] sq [B,H,Lq/32,8]    K8 [B,Hkv,Lk,D] sk [B,Hkv,Lk/64,4]    V codes as the PV half says    O [B,H,Lq,head_dim]
//   S  = Q8 K8^T                     i8 x i8 -> i32
//   f  = sq sk |scale| log2e         one factor a thread and key tile: its 4 rows share sq, its 16 keys share sk
//   m' = max(m, rowmax f S)   P = exp2(f S - m' + log2 PMAX)   a = exp2(m - m')
//   l  = a l + rowsum P       O = a O + P V          the PV half;  at the end O / l * v_scale + v_mean, zeros where l = 0
// A thread (g = lane / 4, t = lane % 4) holds the rows g, g+8, g+16, g+24 of its warp and the keys 2t, 2t+1 of every 8.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "../common/params.cuh"
#include "../common/ptx.cuh"
#include "../common/tile.cuh"
#include "output.cuh"

namespace sage {

// Sums of products start here, so that their bits read as the float ZERO_SCORE + S: exact, |S| < 2^22, and no conversion is needed.
constexpr int ZERO_BITS    = 0x4b400000;
constexpr float ZERO_SCORE = 12582912.f;
// Folded into the exponent's constant it costs at most 0.75 f there: less than one step of S, far below what INT8 rounds away.

constexpr int M = 2, WARP_ROWS = 16 * M, WARPS = Q_TILE / WARP_ROWS, THREADS = WARPS * 32;
constexpr int ROWS = 2 * M, KEY_BLOCKS = K_TILE / 8;  // of a thread
using Scores = int[M][KEY_BLOCKS][4];                 // rows 16 i + {g, g+8}, keys 8 j + {2t, 2t+1}; int32, then floats in place

// A tile of the workspace, by all threads.
template <int BYTES>
__device__ __forceinline__ void load_tile(uint32_t shared, const char * global, int thread) {
    static_assert(BYTES % (THREADS * 16) == 0, "whole turns");
#pragma unroll
    for (int i = 0; i < BYTES; i += THREADS * 16) {
        ptx::cp_async_16(shared + thread * 16 + i, global + thread * 16 + i);
    }
}

// S = Q8 K8^T: 32 rows, 64 keys a warp. s[i][j]: rows 16 i + {g, g+8}, keys 8 j + {2t, 2t+1}.
// q and k: where this lane reads chunk 0 or 1, by q_lane() and k_lane().
template <int D>
__device__ __forceinline__ uint32_t q_lane(int lane) {
    return swizzled<D>(lane % 16, lane / 16);
}
template <int D>
__device__ __forceinline__ uint32_t k_lane(int lane) {
    return swizzled<D>(lane % 8 + lane / 16 * 8, lane / 8 % 2);
}
// meanwhile(): what to issue once the first MMAs are under way.
template <int D, class F>
__device__ __forceinline__ void scores(Scores & s, uint32_t q, uint32_t k, F && meanwhile) {
    const int zero[4] = { ZERO_BITS, ZERO_BITS, ZERO_BITS, ZERO_BITS };
#pragma unroll
    for (int step = 0; step < D / 32; step++) {
        uint32_t a[M][4];
#pragma unroll
        for (int i = 0; i < M; i++) {
            ptx::ldmatrix_x4(a[i], further(q, step * 2) + i * 16 * D);
        }
#pragma unroll
        for (int j = 0; j < KEY_BLOCKS; j += 2) {
            uint32_t b[4];
            ptx::ldmatrix_x4(b, further(k, step * 2) + j * 8 * D);
#pragma unroll
            for (int n = 0; n < 2; n++) {
#pragma unroll
                for (int i = 0; i < M; i++) {
                    if (step == 0) {
                        ptx::mma_s8(s[i][j + n], a[i], b[n * 2], b[n * 2 + 1], zero);
                    } else {
                        ptx::mma_s8(s[i][j + n], a[i], b[n * 2], b[n * 2 + 1]);
                    }
                }
            }
        }
        if (step == 0) {
            meanwhile();
        }
    }
}

constexpr int NEVER = 0x7f812345;  // bits of no score: a NaN that arithmetic does not make
// 0, and the compiler cannot know: what is computed from it is not kept in a register over the main loop (O and S leave few).
__device__ __forceinline__ unsigned nothing(unsigned below_2_31) { return below_2_31 >> 31; }

// The scores as floats, in place: f S + bias, MASKED past last[r], which counts from this thread's first key of the tile. So does bias.
template <bool BIAS, int AHEAD>
__device__ __forceinline__ void mask(Scores & s, float f, const float * bias, const int (&last)[ROWS]) {
#pragma unroll
    for (int j = 0; j < KEY_BLOCKS; j++) {
        // The loads wait, the first AHEAD for the scores, the others for the loads before: else they would hold registers too early.
        const unsigned wait = j < AHEAD ? nothing(s[M - 1][j][3]) : s[M - 1][j - AHEAD][3] == NEVER;
        const float2 b2     = BIAS ? __ldg(reinterpret_cast<const float2 *>(bias + j * 8 + wait)) : make_float2(0.f, 0.f);
#pragma unroll
        for (int i = 0; i < 4 * M; i++) {
            int & score      = s[i / 4][j][i % 4];
            const float b1   = i % 2 ? b2.y : b2.x;
            const bool there = j * 8 + i % 2 <= last[i / 2] && b1 != MASKED;
            score            = __float_as_int(there ? fmaf(__int_as_float(score) - ZERO_SCORE, f, b1) : MASKED);
        }
    }
}

struct Softmax {
    float m[ROWS], l[ROWS];  // m: the running maximum - log2 PMAX; l: this thread's keys only, until finish()

    __device__ __forceinline__ void start() {
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            m[r] = M_INIT;
            l[r] = 0.f;
        }
    }

    // m' and a, and a l; true where a row of this warp has a new maximum, more than `headroom` above m: else a is not set, it would
    // be 1, and P may reach 2^headroom. No shuffle on the way that most tiles take: one thread with a new maximum is enough to see.
    // FLOAT: s holds finished scores from mask(). Else integers: f >= 0, so their maximum is the scores'.
    template <bool FLOAT>
    __device__ __forceinline__ bool maximum(const Scores & s, float f, float log2_pmax, float headroom, float (&a)[ROWS]) {
        float x[ROWS];
        bool grew = false;
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            const auto at = [&](int j) { return s[r / 2][j / 2][r % 2 * 2 + j % 2]; };
            if (FLOAT) {
                x[r] = __int_as_float(at(0));
#pragma unroll
                for (int j = 1; j < KEY_BLOCKS * 2; j++) {
                    x[r] = fmaxf(x[r], __int_as_float(at(j)));
                }
            } else {
                int y = max(at(0), at(1));
#pragma unroll
                for (int j = 2; j < KEY_BLOCKS * 2; j += 2) {
                    y = __vimax3_s32(y, at(j), at(j + 1));
                }
                x[r] = __fmul_ru(__int_as_float(y) - ZERO_SCORE, f);
            }
            x[r] -= log2_pmax;
            grew |= x[r] > m[r] + headroom;
        }
        if (!__any_sync(0xffffffffu, grew)) {
            return false;
        }
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            x[r] = fmaxf(x[r], __shfl_xor_sync(0xffffffffu, x[r], 1));
            x[r] = fmaxf(x[r], __shfl_xor_sync(0xffffffffu, x[r], 2));
            a[r] = m[r];
            m[r] = fmaxf(m[r], x[r]);
            a[r] = ptx::ex2(a[r] - m[r]);
            l[r] *= a[r];
        }
        return true;
    }

    // P of two neighbouring keys of row r, in place of S, and into the sum before any rounding
    template <bool FLOAT, bool SUM_EARLY>
    __device__ __forceinline__ void probability(Scores & s, int r, int j, float f) {
        int (&x)[4]   = s[r / 2][j];
        const float c = FLOAT ? m[r] : fmaf(ZERO_SCORE, f, m[r]);
#pragma unroll
        for (int e = r % 2 * 2; e < r % 2 * 2 + 2; e++) {
            const float p = ptx::ex2(FLOAT ? __int_as_float(x[e]) - c : fmaf(__int_as_float(x[e]), f, -c));
            if (SUM_EARLY) {
                ptx::add_here(l[r], p);
            } else {
                l[r] += p;
            }
            x[e] = __float_as_int(p);
        }
    }
    // of the first LAST key blocks
    template <bool FLOAT, bool SUM_EARLY, int LAST>
    __device__ __forceinline__ void probabilities(Scores & s, float f) {
#pragma unroll
        for (int j = 0; j < LAST; j++) {
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                probability<FLOAT, SUM_EARLY>(s, r, j, f);
            }
        }
    }

    __device__ __forceinline__ void finish() {
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            l[r] += __shfl_xor_sync(0xffffffffu, l[r], 1);
            l[r] += __shfl_xor_sync(0xffffffffu, l[r], 2);
        }
    }
};

// What the main loop needs once a tile, or in few tiles, lies in shared memory: O and S leave few registers.
struct Aside {
    unsigned tile, end, masked, first;  // see below
    int diagonal;                       // causal: the last key of the block's first row
    const float * bias;
    float factor[THREADS / 4];  // f / sk, [warp][lane / 4]
};

// Read where it stands, each time.
template <class T>
__device__ __forceinline__ T in_shared(const T & x) {
    return *const_cast<const volatile T *>(&x);
}

// m', P, a, l, and O = a O + P V. PV is the other half of a kernel: its tile in shared memory, P in its operand layout.
template <class PV, bool FLOAT>
__device__ __forceinline__ void softmax_pv(float (&o)[M][PV::D / 8][4], Scores & s, Softmax & softmax, float f, uint32_t v, Aside & aside,
                                           unsigned tile) {
    constexpr int PER_BLOCK = PV::D / 2;
    float a[ROWS];
    if (softmax.template maximum<FLOAT>(s, f, PV::LOG2_PMAX, PV::HEADROOM, a)) {
#pragma unroll
        for (int i = 0; i < M * PER_BLOCK; i++) {
            o[i / PER_BLOCK][i % PER_BLOCK / 4][i % 4] *= a[i / PER_BLOCK * 2 + i % 4 / 2];
        }
    }
    softmax.template probabilities<FLOAT, PV::SUM_EARLY, PV::STEP>(s, f);
    ptx::cp_async_wait<1>();
    __syncthreads();  // V[tile] is there; everybody has read `tile`
    if (threadIdx.x == 0) {
        aside.tile = tile + 1;
    }
    PV::template add<FLOAT>(o, s, softmax, f, v);
}

// Which rows of which head a block of threads has. Computed again where it is needed again.
struct Place {
    int b, h, tile_q;
    int64_t bh, kv;

    __device__ __forceinline__ Place(const AttnParams & p, unsigned block) {
        // tiles of one head are neighbours in the grid, so that they find its K and V in L2; causal: the longest first
        const unsigned head = block / p.q_tiles, at = block % p.q_tiles;
        tile_q = p.causal ? p.q_tiles - 1 - at : at;
        bh     = head;
        b      = head / p.heads;
        h      = head % p.heads;
        kv     = int64_t(b) * p.kv_heads + h / (p.heads / p.kv_heads);
    }
    __device__ __forceinline__ int row0() const { return tile_q * Q_TILE + threadIdx.x / 32 * WARP_ROWS + threadIdx.x % 32 / 4; }
};

template <class PV, bool BIAS>
__global__ void __launch_bounds__(THREADS, PV::BLOCKS) qk_int8(const __grid_constant__ AttnParams p) {
    if constexpr (!PV::RUNS) {  // on this architecture; nobody launches it
        return;
    }
    constexpr int D = PV::D, Q_BYTES = Q_TILE * D, K_BYTES = K_TILE * D;
    extern __shared__ __align__(128) char shared[];
    __shared__ Aside aside;
    const uint32_t q_at = ptx::shared_address(shared), k_at = q_at + Q_BYTES, v_at = k_at + 2 * K_BYTES;

    float o[M][D / 8][4];
#pragma unroll
    for (int i = 0; i < M * D / 8 * 4; i++) {
        o[i / (D / 2)][i / 4 % (D / 8)][i % 4] = 0.f;
    }
    Softmax softmax;
    softmax.start();
    unsigned tile;
    {
        const Place at(p, blockIdx.x);
        // Tiles are numbered through all heads: from this one number come the addresses of K, V and the scales.
        const unsigned first = unsigned(at.kv) * p.k_tiles;
        const int last_row = min(at.tile_q * Q_TILE + Q_TILE, p.lq) - 1, diagonal = p.lk - p.lq;
        const int last_key = p.causal ? min(p.lk - 1, last_row + diagonal) : p.lk - 1;  // causal: that of row i is i + diagonal
        const unsigned end = first + (last_key < 0 ? 0 : last_key / K_TILE + 1);
        if (threadIdx.x == 0) {
            aside.tile  = first;
            aside.end   = end;
            aside.first = first;
            // the tile with the first key that some row must not see
            aside.masked   = first + max(p.causal ? min(p.lk, at.tile_q * Q_TILE + diagonal + 1) : p.lk, 0) / K_TILE;
            aside.diagonal = at.tile_q * Q_TILE + diagonal;
            aside.bias     = BIAS ? p.bias2 + int64_t(at.b) * p.k_tiles * K_TILE : nullptr;
        }
        if (threadIdx.x < THREADS / 4) {
            const int64_t groups      = (at.bh * p.q_tiles + at.tile_q) * (Q_TILE / Q_GROUP * 8);
            aside.factor[threadIdx.x] = p.sq[groups + threadIdx.x] * p.factor;
        }
        const auto k_tile = [&](unsigned tile) { return reinterpret_cast<const char *>(p.k8) + uint64_t(tile) * K_BYTES; };

        if (first < end) {
            load_tile<Q_BYTES>(q_at, reinterpret_cast<const char *>(p.q8) + (at.bh * p.q_tiles + at.tile_q) * Q_BYTES, threadIdx.x);
            load_tile<K_BYTES>(k_at, k_tile(first), threadIdx.x);
        }
        ptx::cp_async_commit();

#pragma unroll 1
        while (true) {
            ptx::cp_async_wait<0>();
            __syncthreads();  // K[tile] is there; everybody is done with the tile before
            tile = in_shared(aside.tile);
            if (tile == in_shared(aside.end)) {
                break;
            }
            // which of the two K is this tile's: `first` is even, keys are padded to two tiles
            const uint32_t odd = tile & 1;
            const int thread = threadIdx.x + nothing(tile), lane = thread % 32;
            const auto copy_next = [&] {
                load_tile<PV::BYTES>(v_at, static_cast<const char *>(p.v_codes) + uint64_t(tile) * PV::BYTES, thread);
                ptx::cp_async_commit();
                if (tile + 1 < in_shared(aside.end)) {
                    load_tile<K_BYTES>(k_at + K_BYTES - odd * K_BYTES, k_tile(tile + 1), thread);
                }
                ptx::cp_async_commit();
            };
            const float sk_now = __ldg(p.sk + uint64_t(tile) * 4 + lane % 4);

            // S = Q8 K8^T
            Scores s;
            scores<D>(s, q_at + thread / 32 * WARP_ROWS * D + q_lane<D>(lane), k_at + odd * K_BYTES + k_lane<D>(lane), copy_next);

            // m', P, a, l, O = a O + P V
            const float f0 = in_shared(aside.factor[thread / 4]) * sk_now;
            const float f  = f0 > FACTOR_MAX ? FACTOR_MAX : f0;  // NaN stays NaN
            if (BIAS || tile >= in_shared(aside.masked)) {
                const int key = int(tile - in_shared(aside.first)) * K_TILE + lane % 4 * 2;
                const int row = thread / 32 * WARP_ROWS + lane / 4 + in_shared(aside.diagonal);
                int last[ROWS];
#pragma unroll
                for (int r = 0; r < ROWS; r++) {
                    last[r] = (p.causal ? min(p.lk - 1, row + r * 8) : p.lk - 1) - key;
                }
                mask<BIAS, PV::BIAS_AHEAD>(s, f, BIAS ? in_shared(aside.bias) + key : nullptr, last);
                softmax_pv<PV, true>(o, s, softmax, f, v_at + PV::lane(lane), aside, tile);
            } else {
                softmax_pv<PV, false>(o, s, softmax, f, v_at + PV::lane(lane), aside, tile);
            }
        }
    }

    softmax.finish();
    const Place at(p, blockIdx.x + nothing(tile));
    write_rows<D, PV::SMOOTH_V>(p, o, softmax.l, at.kv, at.b, at.h, at.row0());
}

}  // namespace sage
