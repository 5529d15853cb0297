#pragma once

#include "../kernels/qk_int8.cuh"
#include "../src/launch.h"
#include "launch.cuh"

namespace sage {

template <class PV>
cudaError_t launch_attn(const AttnParams & p, cudaStream_t stream) {
    auto * kernel = p.bias2 != nullptr ? qk_int8<PV, true> : qk_int8<PV, false>;
    // 48 KiB and what the kernel puts aside is more than a block gets unasked
    const cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, PV::SMEM);
    return e == cudaSuccess ? launch(kernel, p, p.blocks, THREADS, PV::SMEM, stream) : e;
}

}  // namespace sage
