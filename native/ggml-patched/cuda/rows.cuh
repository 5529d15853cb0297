// A row of numbers that a block of threads holds in registers; BF16 in groups of four.
#pragma once

#include <type_traits>

#include <cuda_bf16.h>

namespace sdsage {

using bf16 = nv_bfloat16;

struct alignas(8) Bf16x4 {
    __nv_bfloat162 a, b;
};

__device__ inline Bf16x4 rounded(float4 x) { return { __floats2bfloat162_rn(x.x, x.y), __floats2bfloat162_rn(x.z, x.w) }; }

__device__ inline float4 widened(Bf16x4 x) {
    const float2 a = __bfloat1622float2(x.a), b = __bfloat1622float2(x.b);
    return make_float4(a.x, a.y, b.x, b.y);
}

constexpr int ROW_THREADS = 256;
constexpr int MAX_COLUMNS = 16384;

// Of all threads of a block; every thread gets it.
template <class Both>
__device__ inline float block_reduce(float x, float nothing, Both both) {
    __shared__ float partial[32];
    const auto warp = [&] {
#pragma unroll
        for (int offset = 16; offset > 0; offset /= 2) {
            x = both(x, __shfl_xor_sync(0xffffffff, x, offset));
        }
    };
    warp();
    if (threadIdx.x % 32 == 0) {
        partial[threadIdx.x / 32] = x;
    }
    __syncthreads();
    x = threadIdx.x % 32 < blockDim.x / 32 ? partial[threadIdx.x % 32] : nothing;
    __syncthreads();
    warp();
    return x;
}

__device__ inline float block_sum(float x) {
    return block_reduce(x, 0.f, [](float a, float b) { return a + b; });
}

__device__ inline float block_max(float x) {
    return block_reduce(x, 0.f, [](float a, float b) { return fmaxf(a, b); });
}

// Calls f with the number of groups of four that a thread has to hold.
template <class F>
bool by_columns(int64_t columns, F f) {
    const int64_t values = (columns / 4 + ROW_THREADS - 1) / ROW_THREADS;
    if (columns % 4 != 0 || columns > MAX_COLUMNS) {
        return false;
    }
    values <= 1   ? f(std::integral_constant<int, 1>())
    : values <= 2 ? f(std::integral_constant<int, 2>())
    : values <= 4 ? f(std::integral_constant<int, 4>())
    : values <= 8 ? f(std::integral_constant<int, 8>())
                  : f(std::integral_constant<int, 16>());
    return true;
}

inline int blocks_for(int64_t n, int per_block) {
    const int64_t blocks = (n + per_block - 1) / per_block;
    return static_cast<int>(blocks < 1 << 16 ? blocks : 1 << 16);
}

}  // namespace sdsage
