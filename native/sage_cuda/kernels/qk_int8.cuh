// The half that all kernels share: S = Q K^T in INT8, the online softmax, and the way out.
//   O = softmax(scale Q K^T + bias) V        one block of threads per (batch, head, Q_TILE query rows), 32 rows a warp
//   Q8 [B,H,Lq,D] sq [B,H,Lq/32,8]    K8 [B,Hkv,Lk,D] sk [B,Hkv,Lk/64,4]    V codes as the PV half says    O [B,H,Lq,head_dim]
//   S  = Q8 K8^T                     i8 x i8 -> i32
//   f  = sq sk |scale| log2e         one factor a thread and key tile: its 4 rows share sq, its 16 keys share sk
//   m' = max(m, rowmax f S)   P = exp2(f S - m' + log2 PMAX)   a = exp2(m - m')
//   l  = a l + rowsum P       O = a O + P V          the PV half;  at the end O / l * v_scale, zeros where l = 0
// A thread (g = lane / 4, t = lane % 4) holds the rows g, g+8, g+16, g+24 of its warp and the keys 2t, 2t+1 of every 8.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "../common/params.cuh"
#include "../common/ptx.cuh"

namespace sage {

// Sums of products start here, so that their bits read as the float ZERO_SCORE + S: exact, |S| < 2^22, and no conversion is needed.
constexpr int ZERO_BITS    = 0x4b400000;
constexpr float ZERO_SCORE = 12582912.f;
// Folded into the exponent's constant it costs at most 0.75 f there: less than one step of S, far below what INT8 rounds away.
constexpr float FACTOR_MAX = 8.f;  // above it one step of S is more than 2^8 in probability; and |S| FACTOR_MAX stays below 2^25

constexpr int M = 2, WARP_ROWS = 16 * M, WARPS = Q_TILE / WARP_ROWS, THREADS = WARPS * 32;
constexpr int ROWS = 2 * M, KEY_BLOCKS = K_TILE / 8;  // of a thread
using Scores = int[M][KEY_BLOCKS][4];                 // rows 16 i + {g, g+8}, keys 8 j + {2t, 2t+1}; int32, then floats in place

// Where 16-byte chunk `chunk` of row `row` lies: the eight rows that one ldmatrix reads fall into different banks.
template <int ROW_BYTES>
__device__ __forceinline__ uint32_t swizzled(int row, int chunk) {
    static_assert(ROW_BYTES % 128 == 0 || ROW_BYTES == 64, "a row of 64 bytes shares its 128 with the next");
    return row * ROW_BYTES + ((ROW_BYTES == 64 ? chunk ^ (row >> 1 & 3) : chunk ^ (row & 7)) << 4);
}
// The same for a chunk further on in the row, from the place `at` of a chunk in a tile that starts at a multiple of 128: `more`
// and the chunk of `at` have no bit in common. One register and immediate numbers then serve every row group of a tile.
template <int ROW_BYTES>
__device__ __forceinline__ uint32_t further(uint32_t at, int more) {
    return ROW_BYTES == 64 ? at ^ more << 4 : (at ^ (more & 7) << 4) + (more >> 3 << 7);
}

// A tile that lies whole in global memory, by all threads. `shared` and `global` are this thread's: from to_shared() and 16 bytes
// a thread apart.
template <int ROW_BYTES>
__device__ __forceinline__ uint32_t to_shared(uint32_t tile) {
    constexpr unsigned CHUNKS = ROW_BYTES / 16;
    return tile + swizzled<ROW_BYTES>(threadIdx.x / CHUNKS, threadIdx.x % CHUNKS);
}
template <int ROW_BYTES, int NROWS>
__device__ __forceinline__ void load_tile(uint32_t shared, const char * global) {
    constexpr int BYTES = THREADS * 16, TURNS = ROW_BYTES * NROWS / BYTES;
    static_assert(ROW_BYTES * NROWS % BYTES == 0 && BYTES % (8 * ROW_BYTES) == 0, "every turn swizzles alike");
#pragma unroll
    for (int i = 0; i < TURNS; i++) {
        ptx::cp_async_16(shared + i * BYTES, global + i * BYTES);
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
            ptx::ldmatrix_x4(a[i], further<D>(q, step * 2) + i * 16 * D);
        }
#pragma unroll
        for (int j = 0; j < KEY_BLOCKS; j += 2) {
            uint32_t b[4];
            ptx::ldmatrix_x4(b, further<D>(k, step * 2) + j * 8 * D);
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

// The scores as floats, in place: f S + bias, MASKED where key > last[r].
template <bool BIAS>
__device__ __forceinline__ void mask(Scores & s, float f, const float * bias, const int (&last)[ROWS]) {
#pragma unroll
    for (int j = 0; j < KEY_BLOCKS; j++) {
        const int key   = j * 8 + threadIdx.x % 4 * 2;
        const float2 b2 = BIAS ? __ldg(reinterpret_cast<const float2 *>(bias + key)) : make_float2(0.f, 0.f);
#pragma unroll
        for (int i = 0; i < 4 * M; i++) {
            int & score      = s[i / 4][j][i % 4];
            const float b1   = i % 2 ? b2.y : b2.x;
            const bool there = key + i % 2 <= last[i / 2] && b1 != MASKED;
            score            = __float_as_int(there ? fmaf(__int_as_float(score) - ZERO_SCORE, f, b1) : MASKED);
        }
    }
}

struct Softmax {
    float m[ROWS], l[ROWS];  // l: this thread's keys only, until finish()

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
    __device__ __forceinline__ bool maximum(const Scores & s, float f, float headroom, float (&a)[ROWS]) {
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
    template <bool FLOAT>
    __device__ __forceinline__ void probability(Scores & s, int r, int j, float f, float log2_pmax) {
        int (&x)[4]   = s[r / 2][j];
        const float c = FLOAT ? m[r] - log2_pmax : fmaf(ZERO_SCORE, f, m[r] - log2_pmax);
#pragma unroll
        for (int e = r % 2 * 2; e < r % 2 * 2 + 2; e++) {
            const float p = ptx::ex2(FLOAT ? __int_as_float(x[e]) - c : fmaf(__int_as_float(x[e]), f, -c));
            l[r] += p;
            x[e] = __float_as_int(p);
        }
    }
    // of the first LAST key blocks
    template <bool FLOAT, int LAST>
    __device__ __forceinline__ void probabilities(Scores & s, float f, float log2_pmax) {
#pragma unroll
        for (int j = 0; j < LAST; j++) {
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                probability<FLOAT>(s, r, j, f, log2_pmax);
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

__device__ __forceinline__ void put(float * o, float x) { *o = x; }
__device__ __forceinline__ void put(__half * o, float x) { *o = __float2half_rn(x); }
__device__ __forceinline__ void put(__nv_bfloat16 * o, float x) { *o = __float2bfloat16_rn(x); }
__device__ __forceinline__ void put2(float * o, float x, float y) { *reinterpret_cast<float2 *>(o) = make_float2(x, y); }
__device__ __forceinline__ void put2(__half * o, float x, float y) { *reinterpret_cast<__half2 *>(o) = __floats2half2_rn(x, y); }
__device__ __forceinline__ void put2(__nv_bfloat16 * o, float x, float y) {
    *reinterpret_cast<__nv_bfloat162 *>(o) = __floats2bfloat162_rn(x, y);
}

// This thread's part of one row: channels c, c+1 of every 8. Wide: head_dim is even.
template <int D, class T>
__device__ __forceinline__ void write_row(T * row, const float (&x)[D / 4], int c, int head_dim, bool wide) {
    if (wide) {
#pragma unroll
        for (int j = 0; j < D / 8; j++) {
            if (c + j * 8 < head_dim) {
                put2(row + c + j * 8, x[j * 2], x[j * 2 + 1]);
            }
        }
    } else {
#pragma unroll
        for (int j = 0; j < D / 4; j++) {
            if (c + j / 2 * 8 + j % 2 < head_dim) {
                put(row + c + j / 2 * 8 + j % 2, x[j]);
            }
        }
    }
}

// O / l * v_scale, zeros where l = 0
template <int D>
__device__ __forceinline__ void write_rows(const AttnParams & p, const float (&o)[M][D / 8][4], const float (&l)[ROWS], int64_t kv, int b,
                                           int h, int row0) {
    const int c          = threadIdx.x % 4 * 2;
    const float * vscale = p.v_scale + kv * D + c;
    float2 scale[D / 8];
#pragma unroll
    for (int j = 0; j < D / 8; j++) {
        scale[j] = __ldg(reinterpret_cast<const float2 *>(vscale + j * 8));
    }
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        const int64_t at    = b * p.o_batch + h * p.o_head + (row0 + r * 8) * p.o_token;
        const float inverse = 1.f / l[r];
        float x[D / 4];
#pragma unroll
        for (int j = 0; j < D / 4; j++) {
            x[j] = l[r] == 0.f ? 0.f : o[r / 2][j / 2][r % 2 * 2 + j % 2] * inverse * (j % 2 ? scale[j / 2].y : scale[j / 2].x);
        }
        if (row0 + r * 8 < p.lq) {
            switch (p.o_dtype) {
                case F32:
                    write_row<D>(static_cast<float *>(p.o) + at, x, c, p.head_dim, p.o_wide);
                    break;
                case F16:
                    write_row<D>(static_cast<__half *>(p.o) + at, x, c, p.head_dim, p.o_wide);
                    break;
                default:
                    write_row<D>(static_cast<__nv_bfloat16 *>(p.o) + at, x, c, p.head_dim, p.o_wide);
            }
        }
    }
}

// m', P, a, l, and O = a O + P V. PV is the other half of a kernel: its tile in shared memory, P in its operand layout.
template <class PV, bool FLOAT>
__device__ __forceinline__ void softmax_pv(float (&o)[M][PV::D / 8][4], Scores & s, Softmax & softmax, float f, uint32_t v) {
    constexpr int PER_BLOCK = PV::D / 2;
    float a[ROWS];
    if (softmax.template maximum<FLOAT>(s, f, PV::HEADROOM, a)) {
#pragma unroll
        for (int i = 0; i < M * PER_BLOCK; i++) {
            o[i / PER_BLOCK][i % PER_BLOCK / 4][i % 4] *= a[i / PER_BLOCK * 2 + i % 4 / 2];
        }
    }
    softmax.template probabilities<FLOAT, PV::STEP>(s, f, PV::LOG2_PMAX);
    ptx::cp_async_wait<1>();
    __syncthreads();  // V[tile] is there
    PV::template add<FLOAT>(o, s, softmax, f, v);
}

template <class PV, bool BIAS>
__global__ void __launch_bounds__(THREADS, PV::BLOCKS) qk_int8(const __grid_constant__ AttnParams p) {
    constexpr int D = PV::D, Q_BYTES = Q_TILE * D, K_BYTES = K_TILE * D;
    extern __shared__ __align__(1024) char shared[];
    const uint32_t q_at = ptx::shared_address(shared), k_at = q_at + Q_BYTES, v_at = k_at + 2 * K_BYTES;

    // tiles of one head are neighbours in the grid, so that they find its K and V in L2; causal: the longest first
    const int bh = blockIdx.x / p.q_tiles, at = blockIdx.x % p.q_tiles, tile_q = p.causal ? p.q_tiles - 1 - at : at;
    const int b = bh / p.heads, h = bh % p.heads;
    const int64_t kv = int64_t(b) * p.kv_heads + h / (p.heads / p.kv_heads);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int row0 = tile_q * Q_TILE + warp * WARP_ROWS + lane / 4;

    const int diagonal = p.lk - p.lq;  // causal: the last key of row i is i + diagonal
    const int last_row = min(tile_q * Q_TILE + Q_TILE, p.lq) - 1;
    const int last_key = p.causal ? min(p.lk - 1, last_row + diagonal) : p.lk - 1;
    const int tiles    = last_key < 0 ? 0 : last_key / K_TILE + 1;
    // the first key that some row must not see
    const int masked_from = p.causal ? min(p.lk, tile_q * Q_TILE + diagonal + 1) : p.lk;

    float o[M][D / 8][4];
#pragma unroll
    for (int i = 0; i < M * D / 8 * 4; i++) {
        o[i / (D / 2)][i / 4 % (D / 8)][i % 4] = 0.f;
    }
    Softmax softmax;
    softmax.start();

    if (tiles > 0) {
        const char * k_next = reinterpret_cast<const char *>(p.k8) + kv * p.k_tiles * K_BYTES + threadIdx.x * 16;
        const char * v_next = static_cast<const char *>(p.v_codes) + kv * p.k_tiles * PV::BYTES + threadIdx.x * 16;
        const float * sk    = p.sk + kv * p.k_tiles * 4 + lane % 4;
        const float * bias  = BIAS ? p.bias2 + int64_t(b) * p.k_tiles * K_TILE : nullptr;
        const uint32_t k_to = to_shared<D>(k_at), v_to = to_shared<PV::ROW_BYTES>(v_at);
        const uint32_t q_from = q_at + warp * WARP_ROWS * D + q_lane<D>(lane), k_from = k_at + k_lane<D>(lane),
                       v_from = v_at + PV::lane(lane);
        const float fq =
            p.sq[(int64_t(bh) * p.q_tiles + tile_q) * (Q_TILE / Q_GROUP * 8) + warp * WARP_ROWS / Q_GROUP * 8 + lane / 4] * p.factor;

        load_tile<D, Q_TILE>(to_shared<D>(q_at),
                             reinterpret_cast<const char *>(p.q8) + (int64_t(bh) * p.q_tiles + tile_q) * Q_BYTES + threadIdx.x * 16);
        load_tile<D, K_TILE>(k_to, k_next);
        ptx::cp_async_commit();

#pragma unroll 1
        for (int tile = 0; tile < tiles; tile++) {
            const uint32_t odd = tile & 1;
            ptx::cp_async_wait<0>();
            __syncthreads();  // K[tile] is there; everybody is done with the tile before
            const auto copy_next = [&] {
                load_tile<PV::ROW_BYTES, PV::TILE_ROWS>(v_to, v_next);
                ptx::cp_async_commit();
                if (tile + 1 < tiles) {
                    load_tile<D, K_TILE>(k_to + (K_BYTES - odd * K_BYTES), k_next + K_BYTES);
                }
                ptx::cp_async_commit();
                k_next += K_BYTES;
                v_next += PV::BYTES;
            };
            const float sk_now = __ldg(sk + tile * 4);

            // S = Q8 K8^T
            Scores s;
            scores<D>(s, q_from, k_from + odd * K_BYTES, copy_next);

            // m', P, a, l, O = a O + P V
            const float f0 = fq * sk_now;
            const float f  = f0 > FACTOR_MAX ? FACTOR_MAX : f0;  // NaN stays NaN
            if (BIAS || tile * K_TILE + K_TILE > masked_from) {
                int last[ROWS];
#pragma unroll
                for (int r = 0; r < ROWS; r++) {
                    last[r] = (p.causal ? min(p.lk - 1, row0 + r * 8 + diagonal) : p.lk - 1) - tile * K_TILE;
                }
                mask<BIAS>(s, f, BIAS ? bias + tile * K_TILE : nullptr, last);
                softmax_pv<PV, true>(o, s, softmax, f, v_from);
            } else {
                softmax_pv<PV, false>(o, s, softmax, f, v_from);
            }
        }
    }

    softmax.finish();
    write_rows<D>(p, o, softmax.l, kv, b, h, row0);
}

}  // namespace sage
