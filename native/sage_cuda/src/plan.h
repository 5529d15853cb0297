// What a run needs, computed in one place for the chooser (how much workspace) and the run (where each part lies).
#pragma once

#include "sage_cuda.h"
#include "../common/params.cuh"

namespace sage {

struct Plan {
    bool sm90;                             // by a kernel for Hopper: hopper, and fp16 where it has one
    int d;                                 // head_dim padded: 64 or 128
    int64_t q_rows, k_rows;                // padded to Q_TILE or Q_TILE_SM90, and to K_PAD
    int64_t q_tiles, k_tiles, stat_tiles;  // Q_TILE or Q_TILE_SM90, K_TILE, STAT_ROWS
    int64_t q_heads, kv_heads;             // times batch
    // byte offsets into the workspace
    size_t q8, k8, v_codes, sq, sk, bias2, k_mean, v_scale, v_mean, part_k, part_v, part_count, bytes;
};

// Validated descriptions only: sizes are known to fit. `kernel` is the one that runs.
inline Plan make_plan(const sage_attn_desc & d, sage_kernel kernel, bool sm90_code) {
    Plan p           = {};
    p.sm90           = kernel == SAGE_KERNEL_HOPPER || (sm90_code && kernel == SAGE_KERNEL_FP16);
    const int q_tile = p.sm90 ? Q_TILE_SM90 : Q_TILE;
    p.d              = d.head_dim <= 64 ? 64 : 128;
    p.q_tiles        = (d.lq + q_tile - 1) / q_tile;
    p.k_tiles        = (d.lk + K_PAD - 1) / K_PAD * (K_PAD / K_TILE);
    p.stat_tiles     = (d.lk + STAT_ROWS - 1) / STAT_ROWS;
    p.q_rows         = p.q_tiles * q_tile;
    p.k_rows         = p.k_tiles * K_TILE;
    p.q_heads        = int64_t(d.batch) * d.heads;
    p.kv_heads       = int64_t(d.batch) * d.kv_heads;
    size_t at        = 0;
    auto part        = [&](int64_t bytes) {
        const size_t here = at;
        at += (size_t(bytes) + 255) / 256 * 256;
        return here;
    };
    p.q8         = part(p.q_heads * p.q_rows * p.d);
    p.k8         = part(p.kv_heads * p.k_rows * p.d);
    p.v_codes    = part(p.kv_heads * p.k_rows * p.d * (kernel == SAGE_KERNEL_FP16 ? 2 : 1));
    p.sq         = part(p.q_heads * p.q_rows / Q_GROUP * 8 * 4);
    p.sk         = part(p.kv_heads * p.k_tiles * 4 * 4);
    p.bias2      = part(d.bias == nullptr ? 0 : d.batch * p.k_rows * 4);
    p.k_mean     = part(p.kv_heads * p.d * 4);
    p.v_scale    = part(p.kv_heads * p.d * 4);
    p.v_mean     = part(p.kv_heads * p.d * 4);
    p.part_k     = part(p.kv_heads * p.stat_tiles * p.d * 4);
    p.part_v     = part(p.kv_heads * p.stat_tiles * p.d * 4 * 3);
    p.part_count = part(p.kv_heads * p.stat_tiles * 4);
    p.bytes      = at;
    return p;
}

// Whether machine code of 9.0a is there and runs on the device: 9.0's alone has no wgmma, and with both it is not ours to say which runs.
bool has_sm90_code(const sage_device & device);

}  // namespace sage
