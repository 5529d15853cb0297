#pragma once

#include "../kernels/qk_int8.cuh"
#include "../src/launch.h"
#include "launch.cuh"

namespace sage {

template <class PV>
cudaError_t launch_attn(const AttnParams & p, unsigned blocks, cudaStream_t stream) {
    auto * kernel = p.bias2 != nullptr ? qk_int8<PV, true> : qk_int8<PV, false>;
    return launch(kernel, p, blocks, THREADS, PV::SMEM, stream);
}

}  // namespace sage
