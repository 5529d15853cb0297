// What the host hands to the kernels: plain structs, 64-bit strides, no pointers to host memory.
#pragma once

#include <cstdint>

namespace sage {

constexpr int Q_TILE       = 128;     // query rows a block of threads
constexpr int K_TILE       = 64;      // keys a step, and of a tile in the workspace
constexpr int K_PAD        = 128;     // keys are padded to this: the Hopper kernel takes two tiles a step
constexpr int Q_TILE_SM90  = 192;     // query rows a block of threads of the Hopper kernel
constexpr int Q_GROUP      = 32;      // query rows a warp: 8 scales, the rows equal mod 8 share one
constexpr int STAT_ROWS    = 256;     // keys a partial sum: depends on nothing but this, so every batch sums in one order
constexpr float MASKED     = -3e38f;  // a score that is not there: finite, since (-inf) - (-inf) is NaN
constexpr float M_INIT     = -1e30f;  // the running maximum before any key; a bias at or below it (base 2) masks
constexpr float FACTOR_MAX = 8.f;     // of a step of S in base 2: above it a step is more than 2^8 in probability; |S| 8 < 2^25 stays exact
constexpr float LOG2E      = 1.44269504088896340736f;

enum Dtype : int { F32 = 0, F16 = 1, BF16 = 2 };

// One input, [batch, head, token, channel]; strides in elements.
struct Rows {
    const void * data;
    int64_t batch, head, token;
    int dtype;
    int wide;  // 16 bytes can be read at once
};

struct QuantParams {
    Rows q, k, v;
    const float * bias;  // [batch, lk] or null
    int64_t bias_stride;
    int batch, heads, kv_heads, head_dim, lq, lk;
    int q_tiles, k_tiles, stat_tiles;  // of 64 queries, 64 keys, STAT_ROWS keys
    float q_sign;                      // of the softmax scale: factors stay positive, so a maximum of integers is one of scores
    float v_max;                       // largest code of V: 448 or 2.25; 0: FP16 with a power of two
    int8_t * q8;                       // [batch, heads, q_tiles * 64, D]; tile.cuh says how these three lie
    int8_t * k8;                       // [batch, kv_heads, k_tiles * 64, D]
    void * v_codes;    // FP16: [batch, kv_heads, k_tiles, D / 64, 64, 64]; E4M3: [.., k_rows / v_row, D, v_row permuted keys]
    int v_row;         // 64 or 128 keys
    float * sq;        // [batch, heads, q_tiles * 2, 8]
    float * sk;        // [batch, kv_heads, k_tiles, 4]
    float * bias2;     // [batch, k_tiles * 64], base 2; only with a bias
    float * k_mean;    // [batch, kv_heads, D]
    float * v_scale;   // [batch, kv_heads, D]
    float * v_mean;    // the same: what E4M3 codes of V lack; zeros for FP16
    float * part_k;    // [batch, kv_heads, stat_tiles, D]
    float * part_v;    // three of the same
    int * part_count;  // [batch, kv_heads, stat_tiles]
};

struct AttnParams {
    const int8_t * q8;
    const int8_t * k8;
    const void * v_codes;
    const float * sq;
    const float * sk;
    const float * v_scale;
    const float * v_mean;
    const float * bias2;
    void * o;
    int64_t o_batch, o_head, o_token;  // elements
    int o_dtype;
    int o_wide;  // 2 channels can be written at once
    int heads, kv_heads, head_dim, lq, lk;
    int q_tiles, k_tiles;  // of a head: of Q_TILE or Q_TILE_SM90 queries, of K_TILE keys
    unsigned blocks;       // q_tiles of all heads and batches
    int causal;
    float factor;  // |softmax scale| * log2(e)
};

}  // namespace sage
