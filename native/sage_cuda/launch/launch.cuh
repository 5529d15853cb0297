// One launch, its error as the return value: cudaGetLastError would also report, and clear, what others did before.
#pragma once

#include <cuda_runtime.h>

namespace sage {

// `early`: the kernel may start while the launch before it ends, and calls ptx::wait_for_launch() before it touches global memory.
template <class Params>
cudaError_t launch(void (*kernel)(Params), const Params & p, unsigned blocks, unsigned threads, size_t smem, cudaStream_t stream,
                   bool early = false) {
    cudaLaunchConfig_t config                            = {};
    config.gridDim                                       = dim3(blocks);
    config.blockDim                                      = dim3(threads);
    config.dynamicSmemBytes                              = smem;
    config.stream                                        = stream;
    cudaLaunchAttribute attribute                        = {};
    attribute.id                                         = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    config.attrs                                         = &attribute;
    config.numAttrs                                      = early ? 1 : 0;
    return cudaLaunchKernelEx(&config, kernel, p);
}

}  // namespace sage
