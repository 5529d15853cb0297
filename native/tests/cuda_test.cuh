// What programs that check CUDA code share.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>

#include <cuda_runtime.h>

#define CUDA(call)                                                                                 \
    do {                                                                                           \
        const cudaError_t error_ = (call);                                                         \
        if (error_ != cudaSuccess) {                                                               \
            std::printf("%s:%d: %s: %s\n", __FILE__, __LINE__, #call, cudaGetErrorString(error_)); \
            std::exit(1);                                                                          \
        }                                                                                          \
    } while (0)

// Even in (-1, 1), a function of the index and the seed.
__host__ __device__ inline float noise(uint64_t i, uint64_t seed) {
    uint64_t z = (i + 1) * 0x9e3779b97f4a7c15ull + seed * 0xd1b54a32d192ed03ull;
    z          = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z          = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return static_cast<int32_t>((z ^ (z >> 31)) >> 32) * (1.f / 2147483648.f);
}
