// The linear layers of native/ggml-patched/cuda/linear.cu beside a slow reference, then their speed.
//   linear_check        all of it        linear_check small    small shapes only, for compute-sanitizer
// Built by itself: nvcc -std=c++17 -O3 -arch=sm_90 -I native/ggml-patched/cuda native/tests/linear_check.cu
//   native/ggml-patched/cuda/linear.cu -lcublasLt
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include "cuda_test.cuh"
#include "linear.cuh"

using sdsage::Linear;
using sdsage::Numbers;

// Of the root mean square of a result: a BF16 product is 2^-9 off at most, 0.1 % on average; the sums of FP8 products are FP32.
constexpr double LIMIT = 0.004;

template <class T>
struct Buffer {
    T * data = nullptr;
    size_t n;
    explicit Buffer(size_t n_) : n(n_) {
        CUDA(cudaMalloc(&data, std::max<size_t>(n, 1) * sizeof(T)));
        CUDA(cudaMemset(data, 0xff, n * sizeof(T)));
    }
    explicit Buffer(const std::vector<T> & from) : Buffer(from.size()) {
        CUDA(cudaMemcpy(data, from.data(), n * sizeof(T), cudaMemcpyHostToDevice));
    }
    ~Buffer() { cudaFree(data); }
    Buffer(const Buffer &)             = delete;
    Buffer & operator=(const Buffer &) = delete;
    std::vector<T> read() const {
        std::vector<T> to(n);
        CUDA(cudaMemcpy(to.data(), data, n * sizeof(T), cudaMemcpyDeviceToHost));
        return to;
    }
};

// Even in (-1, 1), a function of the index and the seed; each row of another size.
std::vector<float> numbers(int64_t rows, int64_t columns, uint64_t seed) {
    std::vector<float> made(rows * columns);
    for (int64_t i = 0; i < rows * columns; i++) {
        made[i] = noise(i, seed) * std::exp2(static_cast<float>(i / columns % 7) - 3.f);
    }
    return made;
}

template <class T>
std::vector<T> as(const std::vector<float> & x) {
    return std::vector<T>(x.begin(), x.end());
}

#pragma pack(push, 1)
struct Q8_0 {
    uint16_t scale;
    int8_t codes[32];
};
#pragma pack(pop)

// Bytes of `values` as `type`; the values become what the bytes stand for.
std::vector<char> stored(Numbers type, std::vector<float> * values) {
    std::vector<char> bytes;
    const auto keep = [&](const auto & list) {
        bytes.resize(list.size() * sizeof(list[0]));
        std::memcpy(bytes.data(), list.data(), bytes.size());
    };
    if (type == Numbers::f32) {
        keep(*values);
    } else if (type == Numbers::bf16) {
        keep(as<nv_bfloat16>(*values));
        std::transform(values->begin(), values->end(), values->begin(), [](float x) { return __bfloat162float(__float2bfloat16(x)); });
    } else if (type == Numbers::f16) {
        keep(as<__half>(*values));
        std::transform(values->begin(), values->end(), values->begin(), [](float x) { return __half2float(__float2half(x)); });
    } else {
        std::vector<Q8_0> blocks(values->size() / 32);
        for (size_t b = 0; b < blocks.size(); b++) {
            float * from  = values->data() + b * 32;
            float largest = 0;
            for (int i = 0; i < 32; i++) {
                largest = std::max(largest, std::fabs(from[i]));
            }
            const __half scale = __float2half(largest / 127);
            std::memcpy(&blocks[b].scale, &scale, 2);
            for (int i = 0; i < 32; i++) {
                const float code   = std::nearbyint(from[i] / __half2float(scale));
                blocks[b].codes[i] = static_cast<int8_t>(std::max(-127.f, std::min(127.f, code)));
                from[i]            = blocks[b].codes[i] * __half2float(scale);
            }
        }
        keep(blocks);
    }
    return bytes;
}

float from_e4m3(uint8_t code) { return __half2float(__half(__nv_cvt_fp8_to_halfraw(code, __NV_E4M3))); }

// The quantizer against what it has to do.
bool check_quantizer(Numbers type, const char * name, int64_t rows, int64_t columns) {
    std::vector<float> x = numbers(rows, columns, 7);
    std::fill(x.begin(), x.begin() + columns, 0.f);  // a row of zeros
    const Buffer<char> in(stored(type, &x));
    Buffer<char> out(rows * columns + rows * 4);
    auto * scales = reinterpret_cast<float *>(out.data + rows * columns);
    CUDA(sdsage::rows_to_fp8(type, in.data, nullptr, rows, columns, out.data, scales, nullptr));
    CUDA(cudaDeviceSynchronize());
    const std::vector<char> got = out.read();
    double worst                = 0;
    bool right                  = true;
    for (int64_t r = 0; r < rows; r++) {
        float scale, largest = 0;
        std::memcpy(&scale, got.data() + rows * columns + r * 4, 4);
        for (int64_t c = 0; c < columns; c++) {
            const float v = x[r * columns + c], y = from_e4m3(static_cast<uint8_t>(got[r * columns + c])) * scale;
            largest = std::max(largest, std::fabs(v));
            // half a step: 2^-4 of the number, or half of 2^-9
            worst = std::max(worst, std::fabs(v - y) / (std::max(std::fabs(v) * 0x1p-4, scale * 0x1p-10) + 1e-37));
        }
        right = right && (largest == 0 || std::fabs(scale * 448 / largest - 1) < 1e-5) && std::isfinite(scale);
    }
    right = right && worst < 1.001;
    std::printf("%-4s %s to FP8, %ld x %ld: %.3f of half a step\n", right ? "ok" : "BAD", name, long(rows), long(columns), worst);
    return right;
}

__global__ void reference(const float * w, const float * x, double * out, int64_t k, int64_t n, int64_t tokens) {
    const int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x;
    if (i < n * tokens) {
        double sum = 0;
        for (int64_t c = 0; c < k; c++) {
            sum += double(w[i % n * k + c]) * x[i / n * k + c];
        }
        out[i] = sum;
    }
}

// What a weight or an activation is multiplied as.
std::vector<float> as_multiplied(Numbers type, const char * bytes, const std::vector<float> & values, const float * factors, int64_t rows,
                                 int64_t columns, bool fp8) {
    std::vector<float> made(values.size());
    if (!fp8) {
        for (size_t i = 0; i < made.size(); i++) {
            made[i] = __bfloat162float(__float2bfloat16(values[i] * (factors ? factors[i / columns] : 1.f)));
        }
        return made;
    }
    Buffer<char> codes(rows * columns);
    Buffer<float> scales(rows);
    const Buffer<float> of(factors ? std::vector<float>(factors, factors + rows) : std::vector<float>(1));
    CUDA(sdsage::rows_to_fp8(type, bytes, factors ? of.data : nullptr, rows, columns, codes.data, scales.data, nullptr));
    const std::vector<char> code   = codes.read();
    const std::vector<float> scale = scales.read();
    for (size_t i = 0; i < made.size(); i++) {
        made[i] = from_e4m3(static_cast<uint8_t>(code[i])) * scale[i / columns];
    }
    return made;
}

struct Case {
    const char * name;
    bool bias, gelu, gate, residual, y_bf16;
};

constexpr Case CASES[] = {
    { "bare", false, false, false, false, false },
    { "bias", true, false, false, false, false },
    { "bias, to BF16", true, false, false, false, true },
    { "bias, GELU, to BF16", true, true, false, false, true },
    { "bias, GELU", true, true, false, false, false },
    { "bias, residual", true, false, false, true, false },
    { "bias, gate, residual", true, false, true, true, false },
    { "gate", false, false, true, false, false },
};

// With those of bias, gate and residual that the case has.
Linear layer(const Case & c, Numbers type, const void * weight, const void * x, bool fp8, const float * bias, const float * gate,
             const float * residual, void * y, int64_t k, int64_t n, int64_t tokens) {
    Linear linear   = {};
    linear.weight   = weight;
    linear.type     = type;
    linear.x        = x;
    linear.bias     = c.bias ? bias : nullptr;
    linear.gate     = c.gate ? gate : nullptr;
    linear.residual = c.residual ? residual : nullptr;
    linear.y        = y;
    linear.y_bf16   = c.y_bf16;
    linear.gelu     = c.gelu;
    linear.fp8      = fp8;
    linear.k        = k;
    linear.n        = n;
    linear.tokens   = tokens;
    return linear;
}

bool check_linear(Numbers type, const char * name, const Case & c, bool fp8, int64_t k, int64_t n, int64_t tokens) {
    std::vector<float> w = numbers(n, k, 1), x = numbers(tokens, k, 2), bias = numbers(1, n, 3), gate = numbers(1, n, 4),
                       residual = numbers(tokens, n, 5);
    const Buffer<char> w_bytes(stored(type, &w)), x_bytes(stored(Numbers::bf16, &x));
    Buffer<char> x_fp8(tokens * k + tokens * 4);
    CUDA(sdsage::rows_to_fp8(Numbers::bf16, x_bytes.data, nullptr, tokens, k, x_fp8.data,
                             reinterpret_cast<float *>(x_fp8.data + tokens * k), nullptr));
    const Buffer<float> bias_(bias), gate_(gate), residual_(residual);
    Buffer<char> y(n * tokens * (c.y_bf16 ? 2 : 4));
    const Linear linear =
        layer(c, type, w_bytes.data, fp8 ? x_fp8.data : x_bytes.data, fp8, bias_.data, gate_.data, residual_.data, y.data, k, n, tokens);
    const size_t bytes     = sdsage::linear_scratch(0, linear);
    constexpr size_t ALIGN = 128;  // ggml's, where cudaMalloc aligns to more
    Buffer<char> scratch(ALIGN + bytes);
    const std::string problem = sdsage::linear_run(0, linear, scratch.data + ALIGN, nullptr);
    CUDA(cudaDeviceSynchronize());
    if (!problem.empty()) {
        std::printf("BAD  %s\n", problem.c_str());
        return false;
    }
    const float * factors = c.gate ? gate.data() : nullptr;
    const Buffer<float> w_used(as_multiplied(type, w_bytes.data, w, factors, n, k, fp8)),
        x_used(as_multiplied(Numbers::bf16, x_bytes.data, x, nullptr, tokens, k, fp8));
    Buffer<double> wanted_(n * tokens);
    reference<<<static_cast<unsigned>((n * tokens + 127) / 128), 128>>>(w_used.data, x_used.data, wanted_.data, k, n, tokens);
    CUDA(cudaGetLastError());
    std::vector<double> wanted  = wanted_.read();
    const std::vector<char> got = y.read();
    double error = 0, size = 0;
    for (int64_t i = 0; i < n * tokens; i++) {
        double v = wanted[i] + (c.bias ? bias[i % n] * (c.gate ? gate[i % n] : 1.f) : 0.f);
        v        = c.gelu ? 0.5 * v * (1 + std::tanh(0.7978845608028654 * (v + 0.044715 * v * v * v))) : v;
        v += c.residual ? residual[i] : 0.f;
        float found;
        if (c.y_bf16) {
            found = __bfloat162float(reinterpret_cast<const nv_bfloat16 *>(got.data())[i]);
        } else {
            found = reinterpret_cast<const float *>(got.data())[i];
        }
        error += (found - v) * (found - v);
        size += v * v;
    }
    const double away = std::sqrt(error / size);
    const bool right  = away < LIMIT;
    std::printf("%-4s %s, %s%s, %ld x %ld by %ld: %.5f, scratch %.2f MiB\n", right ? "ok" : "BAD", name, c.name, fp8 ? ", FP8" : "",
                long(n), long(k), long(tokens), away, bytes / 1048576.);
    return right;
}

template <class F>
double milliseconds(F run) {
    cudaEvent_t begin, end;
    CUDA(cudaEventCreate(&begin));
    CUDA(cudaEventCreate(&end));
    std::vector<float> times(9);
    for (float & ms : times) {
        CUDA(cudaEventRecord(begin));
        run();
        CUDA(cudaEventRecord(end));
        CUDA(cudaEventSynchronize(end));
        CUDA(cudaEventElapsedTime(&ms, begin, end));
    }
    std::sort(times.begin(), times.end());
    return times[times.size() / 2];
}

// Layers of Wan 14B, Q8_0, 81 frames of 832x480.
void time_layer(const char * name, const Case & c, int64_t k, int64_t n) {
    const int64_t tokens = 32760;
    std::vector<float> w = numbers(n, k, 1), row = numbers(1, std::max(k, n), 2);
    const Buffer<char> w_bytes(stored(Numbers::q8_0, &w));
    const Buffer<float> bias(row);
    Buffer<float> x32(tokens * k), residual(c.residual ? tokens * n : 1);
    Buffer<nv_bfloat16> x16(tokens * k);
    for (int64_t t = 0; t < tokens; t++) {
        CUDA(cudaMemcpyAsync(x32.data + t * k, bias.data, k * 4, cudaMemcpyDeviceToDevice));
    }
    CUDA(cudaMemset(x16.data, 0x3f, tokens * k * 2));
    CUDA(cudaMemset(residual.data, 0, residual.n * 4));
    Buffer<char> x8(tokens * k + tokens * 4), y(n * tokens * (c.y_bf16 ? 2 : 4));
    const auto quantize = [&](Numbers type, const void * x) {
        CUDA(sdsage::rows_to_fp8(type, x, nullptr, tokens, k, x8.data, reinterpret_cast<float *>(x8.data + tokens * k), nullptr));
    };
    const double from_f32 = milliseconds([&] { quantize(Numbers::f32, x32.data); }),
                 from_16  = milliseconds([&] { quantize(Numbers::bf16, x16.data); });
    double ms[2]          = {};
    for (const bool fp8 : { false, true }) {
        const void * x      = fp8 ? static_cast<const void *>(x8.data) : x16.data;
        const Linear linear = layer(c, Numbers::q8_0, w_bytes.data, x, fp8, bias.data, bias.data, residual.data, y.data, k, n, tokens);
        Buffer<char> scratch(sdsage::linear_scratch(0, linear));
        ms[fp8] = milliseconds([&] {
            const std::string problem = sdsage::linear_run(0, linear, scratch.data, nullptr);
            if (!problem.empty()) {
                std::printf("BAD  %s\n", problem.c_str());
                std::exit(1);
            }
        });
    }
    const double flops = 2e-9 * tokens * k * n;
    std::printf("%-12s %5ld x %5ld, %s: BF16 %.3f ms (%.0f TFLOP/s), FP8 %.3f ms (%.0f); to FP8 from F32 %.3f ms, from BF16 %.3f ms\n",
                name, long(n), long(k), c.name, ms[0], flops / ms[0], ms[1], flops / ms[1], from_f32, from_16);
}

int main(int argc, char ** argv) {
    const bool small = argc > 1 && std::string(argv[1]) == "small";
    cudaDeviceProp device;
    CUDA(cudaGetDeviceProperties(&device, 0));
    const bool fp8 = sdsage::fp8_supported(0, 4096, 4096, 4096);
    std::printf("%s; FP8 with a scale for each row: %s\n", device.name, fp8 ? "yes" : "no");
    const struct {
        Numbers type;
        const char * name;
    } types[]  = { { Numbers::q8_0, "Q8_0" }, { Numbers::bf16, "BF16" }, { Numbers::f16, "F16" }, { Numbers::f32, "F32" } };
    bool right = true;
    for (const auto & type : types) {
        for (const int64_t columns : { 64, 1536, 5120, 13824 }) {
            right &= check_quantizer(type.type, type.name, 9, columns);
        }
        for (const Case & c : CASES) {
            for (const bool in_fp8 : { false, true }) {
                if (type.type != Numbers::f32 && (!in_fp8 || fp8)) {
                    right &= check_linear(type.type, type.name, c, in_fp8, 1536, 384, 301);
                }
            }
        }
    }
    right &= !sdsage::fp8_supported(0, 4096, 4104, 4096);
    if (fp8 && !small) {
        time_layer("q", CASES[1], 5120, 5120);
        time_layer("out", CASES[6], 5120, 5120);
        time_layer("feed-forward", CASES[3], 5120, 13824);
        time_layer("", CASES[6], 13824, 5120);
    }
    std::printf(right ? "all right\n" : "FAILED\n");
    return right ? 0 : 1;
}
