// How code tiles lie in the workspace: as a block of threads wants them in shared memory, so that a copy is a copy.
//   A row is D bytes of INT8, 64 FP16 channels, or 64 E4M3 keys: 128 or 64 bytes. Its 16-byte chunks are swizzled so that the eight
//   rows that one ldmatrix (or one core matrix of wgmma) reads fall into different banks. This is wgmma's 128- and 64-byte swizzle.
//   Q8, K8  [rows][D]                 V FP16  [key tile][D / 64][K_TILE keys][64 channels]        V E4M3  [key tile][D][K_TILE keys]
#pragma once

#include <cstdint>

namespace sage {

// Where 16-byte chunk `chunk` of row `row` lies.
template <int ROW_BYTES>
__device__ __forceinline__ uint32_t swizzled(int row, int chunk) {
    static_assert(ROW_BYTES == 128 || ROW_BYTES == 64, "a row of 64 bytes shares its 128 with the next");
    return row * ROW_BYTES + ((ROW_BYTES == 64 ? chunk ^ (row >> 1 & 3) : chunk ^ (row & 7)) << 4);
}
// The same for a chunk further on in the row, from the place `at` of a chunk in a tile that starts at a multiple of 128: `more`
// and the chunk of `at` have no bit in common. One register and immediate numbers then serve every row group of a tile.
__device__ __forceinline__ uint32_t further(uint32_t at, int more) { return at ^ more << 4; }

}  // namespace sage
