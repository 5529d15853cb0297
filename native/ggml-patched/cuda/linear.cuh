// Linear layers by cuBLASLt on a weight that is rewritten in scratch, as BF16 or as FP8 (E4M3), with sums in FP32.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include <cuda_runtime.h>

namespace sdsage {

enum class Numbers { q8_0, bf16, f16, f32 };  // q8_0: ggml's blocks of 32

// y[t, n] = gate[n] act(sum over k of weight[n, k] x[t, k] + bias[n]) + residual[t, n]     act: GELU, only without a gate
struct Linear {
    const void * weight;                  // [n][k]
    Numbers type;                         // of the weight, not f32
    const void * x;                       // [tokens][k] BF16; with fp8 what rows_to_fp8 made of it: E4M3, then a scale for every token
    const float *bias, *gate, *residual;  // or nullptr
    void * y;                             // F32, or BF16 without a residual
    bool y_bf16, gelu, fp8;
    int64_t k, n, tokens;  // k and n: multiples of 8, of 16 with fp8
};

// Whether this device multiplies FP8 with a scale for every row and column at these sizes: what cuBLASLt's heuristic knows.
bool fp8_supported(int device, int64_t k, int64_t n, int64_t tokens);

size_t linear_scratch(int device, const Linear & linear);  // bytes, to be aligned to 128
// What went wrong, empty if nothing did.
std::string linear_run(int device, const Linear & linear, void * scratch, cudaStream_t stream);

// codes[r, c] = E4M3(x[r, c] / scale[r]), scale[r] = max over c of |x[r, c]| / 448. columns: a multiple of 16, at most MAX_COLUMNS.
// Every scale is then multiplied by its row's factor, if there are factors.
cudaError_t rows_to_fp8(Numbers type, const void * x, const float * factors, int64_t rows, int64_t columns, void * codes, float * scales,
                        cudaStream_t stream);

}  // namespace sdsage
