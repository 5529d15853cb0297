// One launch, its error as the return value: cudaGetLastError would also report, and clear, what others did before.
#pragma once

#include <cuda_runtime.h>

namespace sage {

template <class Params>
cudaError_t launch(void (*kernel)(Params), const Params & p, unsigned blocks, unsigned threads, size_t smem, cudaStream_t stream) {
    cudaLaunchConfig_t config = {};
    config.gridDim            = dim3(blocks);
    config.blockDim           = dim3(threads);
    config.dynamicSmemBytes   = smem;
    config.stream             = stream;
    return cudaLaunchKernelEx(&config, kernel, p);
}

}  // namespace sage
