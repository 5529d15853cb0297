#pragma once

#include <algorithm>

#include "../src/launch.h"
#include "launch.cuh"

namespace sage {

// One block an SM, which takes one tile after the other.
template <class Pv>
cudaError_t launch_sm90(const AttnParams & p, cudaStream_t stream) {
    using Tile    = TileSm90<Pv>;
    auto * kernel = p.bias2 != nullptr ? qk_int8_sm90<Tile, true> : qk_int8_sm90<Tile, false>;
    int device = 0, processors = 0;
    cudaError_t e = cudaGetDevice(&device);
    if (e == cudaSuccess) {
        e = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
    }
    if (e == cudaSuccess) {
        e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Tile::SMEM);
    }
    return e == cudaSuccess ? launch(kernel, p, std::min(p.blocks, unsigned(processors)), Tile::THREADS, Tile::SMEM, stream, true) : e;
}

}  // namespace sage
