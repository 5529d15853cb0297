// A problem on the GPU and its float64 reference. Inputs are a hash of their place, exact in FP32, so the reference needs no copy
// of them. All memory is NaN before use.
#pragma once

#include <cfloat>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <algorithm>
#include <functional>
#include <string>
#include <thread>
#include <vector>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "sage_cuda.h"
#include "../src/launch.h"

#define CUDA(x)                                                                            \
    do {                                                                                   \
        const cudaError_t e_ = (x);                                                        \
        if (e_ != cudaSuccess) {                                                           \
            std::printf("%s:%d %s: %s\n", __FILE__, __LINE__, #x, cudaGetErrorString(e_)); \
            std::exit(1);                                                                  \
        }                                                                                  \
    } while (0)

enum Kind { NORMAL, OFFSETS, ZEROS, ZERO_KV, HUGE_V, HUGE_K, ENORMOUS, TINY };
enum Layout { BHLD, BLHD, ODD };
enum Bias { NONE, RANDOM, HOLES, ALL_OUT, FIRST_OUT, ALL_FLT_MAX };

struct Case {
    const char * name;
    int b, h, hkv;
    int64_t lq, lk;
    int d;
    Kind kind    = NORMAL;
    Bias bias    = NONE;
    int causal   = 0;
    sage_dtype q = SAGE_F32, k = SAGE_F32, v = SAGE_F32, o = SAGE_F32;
    Layout layout    = BHLD;
    float scale_sign = 1.f;
};

// roughly normal, the same bits on host and device
__host__ __device__ inline float place(int tensor, int64_t b, int64_t h, int64_t l, int c) {
    uint64_t x = 0x9e3779b97f4a7c15ull * (uint64_t(tensor) + 1 + 4 * (uint64_t(b) + 977 * (h + 1009 * uint64_t(l * 131 + c))));
    x ^= x >> 30;
    x *= 0xbf58476d1ce4e5b9ull;
    x ^= x >> 27;
    x *= 0x94d049bb133111ebull;
    x ^= x >> 31;
    const int sum = int(x & 0xffff) + int(x >> 16 & 0xffff) + int(x >> 32 & 0xffff) + int(x >> 48);
    return float(sum - 131070) * 2.6429e-5f;  // sqrt(3) / 65536
}
__host__ __device__ inline float value(Kind kind, int tensor, int64_t b, int64_t h, int64_t l, int c) {
    const float x = place(tensor, b, h, l, c);
    switch (kind) {
        case OFFSETS:
            return tensor == 0 ? x : x + float(int(place(7, 0, h, 0, c) * 1000.f) % 21);
        case ZEROS:
            return 0.f;
        case ZERO_KV:
            return tensor == 0 ? x : 0.f;
        case HUGE_V:
            return tensor == 2 ? x * (c % 3 == 0 ? 1e30f : c % 3 == 1 ? 6e4f : 1.f) : x;
        case HUGE_K:
            return tensor == 1 && c == 5 ? x * 300.f : x;
        case ENORMOUS:
            return x * (tensor == 2 ? 1e37f : 1e30f);
        case TINY:
            return x * 1e-25f;
        default:
            return x;
    }
}
__host__ __device__ inline float round_to(float x, sage_dtype t) {
    return t == SAGE_F32 ? x : t == SAGE_F16 ? __half2float(__float2half_rn(x)) : __bfloat162float(__float2bfloat16_rn(x));
}
static float bias_of(Bias kind, int64_t b, int64_t key) {
    const float x = place(5, b, 0, key, 0);
    switch (kind) {
        case RANDOM:
            return x;
        case HOLES:
            return x > 0.5f ? -INFINITY : x;
        case ALL_OUT:
            return -INFINITY;
        case FIRST_OUT:
            return key < 70 ? -INFINITY : 0.f;
        case ALL_FLT_MAX:
            return -FLT_MAX;
        default:
            return 0.f;
    }
}

struct Shape {
    int64_t b, h, l;
    int d;
};
__host__ __device__ inline float load(const void * p, int64_t i, sage_dtype t) {
    return t == SAGE_F32   ? static_cast<const float *>(p)[i]
           : t == SAGE_F16 ? __half2float(static_cast<const __half *>(p)[i])
                           : __bfloat162float(static_cast<const __nv_bfloat16 *>(p)[i]);
}
__host__ __device__ inline void store(void * p, int64_t i, sage_dtype t, float x) {
    t == SAGE_F32   ? void(static_cast<float *>(p)[i] = x)
    : t == SAGE_F16 ? void(static_cast<__half *>(p)[i] = __float2half_rn(x))
                    : void(static_cast<__nv_bfloat16 *>(p)[i] = __float2bfloat16_rn(x));
}
__global__ void fill(sage_tensor t, Shape s, Kind kind, int tensor, const float * bias, int64_t bias_stride) {
    const int64_t n = s.b * s.h * s.l * s.d;
    for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < n; i += int64_t(gridDim.x) * blockDim.x) {
        const int c     = i % s.d;
        const int64_t l = i / s.d % s.l, h = i / s.d / s.l % s.h, b = i / s.d / s.l / s.h;
        const bool out = bias && bias[b * bias_stride + l] == -INFINITY;  // contents of a masked key never matter
        store(t.data, b * t.batch_stride + h * t.head_stride + l * t.token_stride + c, t.dtype,
              out ? __int_as_float(0x7fc00000) : value(kind, tensor, b, h, l, c));
    }
}
// counts NaN or Inf among the tensor's elements
__global__ void count_bad(sage_tensor t, Shape s, unsigned long long * bad) {
    const int64_t n = s.b * s.h * s.l * s.d;
    for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < n; i += int64_t(gridDim.x) * blockDim.x) {
        const int c     = i % s.d;
        const int64_t l = i / s.d % s.l, h = i / s.d / s.l % s.h, b = i / s.d / s.l / s.h;
        const float x = load(t.data, b * t.batch_stride + h * t.head_stride + l * t.token_stride + c, t.dtype);
        if (!(fabsf(x) <= FLT_MAX)) {
            atomicAdd(bad, 1ull);
        }
    }
}
__global__ void blank(sage_tensor t, Shape s) {
    const int64_t n = s.b * s.h * s.l * s.d;
    for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < n; i += int64_t(gridDim.x) * blockDim.x) {
        const int c     = i % s.d;
        const int64_t l = i / s.d % s.l, h = i / s.d / s.l % s.h, b = i / s.d / s.l / s.h;
        const int64_t at = b * t.batch_stride + h * t.head_stride + l * t.token_stride + c;
        t.dtype == SAGE_F32 ? void(static_cast<uint32_t *>(t.data)[at] = 0xffffffffu) : void(static_cast<uint16_t *>(t.data)[at] = 0xffff);
    }
}
__global__ void sum_words(const uint32_t * p, int64_t n, unsigned long long * sum) {
    unsigned long long s = 0;
    for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < n; i += int64_t(gridDim.x) * blockDim.x) {
        s += (unsigned long long)p[i] * (2 * i + 1);
    }
    atomicAdd(sum, s);
}
static unsigned long long * counter() {
    static unsigned long long * p = nullptr;
    if (!p) {
        CUDA(cudaMalloc(&p, 8));
    }
    CUDA(cudaMemset(p, 0, 8));
    return p;
}
static unsigned long long read(unsigned long long * p) {
    unsigned long long x;
    CUDA(cudaMemcpy(&x, p, 8, cudaMemcpyDeviceToHost));
    return x;
}

struct Buffer {
    char * data  = nullptr;
    size_t bytes = 0;
    explicit Buffer(size_t n, int poison = 0xff) : bytes((n + 255) / 256 * 256) {
        CUDA(cudaMalloc(&data, bytes));
        CUDA(cudaMemset(data, poison, bytes));
    }
    Buffer(Buffer && o) : data(o.data), bytes(o.bytes) { o.data = nullptr; }
    Buffer(const Buffer &) = delete;
    ~Buffer() { cudaFree(data); }
    unsigned long long sum() const {
        auto * c = counter();
        sum_words<<<1024, 256>>>(reinterpret_cast<const uint32_t *>(data), bytes / 4, c);
        return read(c);
    }
};

struct Problem {
    Case c;
    sage_attn_desc d = {};
    std::vector<Buffer> own;
    std::vector<float> bias;

    sage_tensor tensor(sage_dtype t, int64_t h, int64_t l) {
        sage_tensor x     = { nullptr, t, 0, 0, 0 };
        const int pad     = c.layout == ODD ? 3 : 0;
        const int64_t row = c.d + pad;
        if (c.layout == BLHD) {
            x.head_stride = row, x.token_stride = row * h, x.batch_stride = row * h * l;
        } else {
            x.token_stride = row, x.head_stride = row * l + pad, x.batch_stride = x.head_stride * h;
        }
        const int bytes = t == SAGE_F32 ? 4 : 2;
        own.emplace_back((x.batch_stride * c.b + pad + 16) * bytes);
        x.data = own.back().data + (pad ? bytes : 0);
        return x;
    }
    Problem(const Case & c_, sage_kernel kernel) : c(c_) {
        own.reserve(8);
        d.struct_size = sizeof d;
        d.kernel      = kernel;
        d.batch = c.b, d.heads = c.h, d.kv_heads = c.hkv, d.head_dim = c.d, d.lq = c.lq, d.lk = c.lk;
        d.softmax_scale = c.scale_sign / std::sqrt(float(c.d));
        if (c.kind == TINY) {
            d.softmax_scale = 1.f;
        }
        d.causal = c.causal;
        d.q = tensor(c.q, c.h, c.lq), d.k = tensor(c.k, c.hkv, c.lk), d.v = tensor(c.v, c.hkv, c.lk), d.o = tensor(c.o, c.h, c.lq);
        if (c.bias != NONE) {
            for (int64_t b = 0; b < c.b; b++) {
                for (int64_t key = 0; key < c.lk; key++) {
                    bias.push_back(bias_of(c.bias, b, key));
                }
            }
            own.emplace_back(bias.size() * 4);
            CUDA(cudaMemcpy(own.back().data, bias.data(), bias.size() * 4, cudaMemcpyHostToDevice));
            d.bias        = reinterpret_cast<float *>(own.back().data);
            d.bias_stride = c.lk;
        }
        fill<<<2048, 256>>>(d.q, { c.b, c.h, c.lq, c.d }, c.kind, 0, nullptr, 0);
        fill<<<2048, 256>>>(d.k, { c.b, c.hkv, c.lk, c.d }, c.kind, 1, d.bias, d.bias_stride);
        fill<<<2048, 256>>>(d.v, { c.b, c.hkv, c.lk, c.d }, c.kind, 2, d.bias, d.bias_stride);
        CUDA(cudaDeviceSynchronize());
    }
    size_t workspace() const {
        sage_device dev;
        sage_device_query(0, &dev);
        sage_attn_choice ch = {};
        ch.struct_size      = sizeof ch;
        if (sage_attn_choose(&d, &dev, &ch) != SAGE_OK || !ch.supported) {
            std::printf("%s: not supported: %s%s\n", c.name, sage_last_error(), ch.reason);
            std::exit(1);
        }
        return ch.workspace;
    }
    void run(int poison = 0xff, cudaStream_t stream = nullptr) {
        Buffer w(workspace(), poison);
        if (sage_attn_run(&d, w.data, w.bytes, stream) != SAGE_OK) {
            std::printf("%s: %s\n", c.name, sage_last_error());
            std::exit(1);
        }
        CUDA(cudaDeviceSynchronize());
    }
    Buffer & out() { return own[3]; }
    std::vector<float> row(int64_t b, int64_t h, int64_t l) const {
        const int bytes = c.o == SAGE_F32 ? 4 : 2;
        std::vector<float> raw(c.d), x(c.d);
        CUDA(cudaMemcpy(raw.data(),
                        static_cast<char *>(d.o.data) + (b * d.o.batch_stride + h * d.o.head_stride + l * d.o.token_stride) * bytes,
                        c.d * bytes, cudaMemcpyDeviceToHost));
        for (int i = 0; i < c.d; i++) {
            x[i] = load(raw.data(), i, c.o);
        }
        return x;
    }
};

static void parallel(int64_t n, const std::function<void(int64_t)> & f) {
    const int threads = std::max(1u, std::min(16u, std::thread::hardware_concurrency()));
    std::vector<std::thread> pool;
    for (int t = 0; t < threads; t++) {
        pool.emplace_back([=, &f] {
            for (int64_t i = t; i < n; i += threads) {
                f(i);
            }
        });
    }
    for (auto & t : pool) {
        t.join();
    }
}

struct Errors {
    double diff = 0, norm = 0, dot = 0, norm_out = 0, worst = 0;
    double rel() const { return norm > 0 ? std::sqrt(diff / norm) : std::sqrt(diff); }
    double one_minus_cos() const { return norm > 0 && norm_out > 0 ? 1 - dot / std::sqrt(norm * norm_out) : (norm == norm_out ? 0 : 1); }
};

static Errors compare(const Problem & p) {
    const Case & c = p.c;
    Errors e;
    const int64_t nh = int64_t(c.b) * c.h, heads[3] = { 0, nh / 2 + (nh > 2), nh - 1 };
    for (int i = 0; i < 3; i++) {
        if (i && heads[i] == heads[i - 1]) {
            continue;
        }
        const int64_t b = heads[i] / c.h, h = heads[i] % c.h, hk = h / (c.h / c.hkv);
        std::vector<float> k(c.lk * c.d), v(c.lk * c.d);
        parallel(c.lk, [&](int64_t l) {
            for (int ch = 0; ch < c.d; ch++) {
                k[l * c.d + ch] = round_to(value(c.kind, 1, b, hk, l, ch), c.k);
                v[l * c.d + ch] = round_to(value(c.kind, 2, b, hk, l, ch), c.v);
            }
        });
        std::vector<int64_t> rows;
        const int64_t want = c.lk > 20000 ? 12 : 40;
        for (int64_t r = 0; r < std::min(c.lq, want); r++) {
            rows.push_back(c.lq <= want ? r : r * (c.lq - 1) / (want - 1));
        }
        std::vector<std::vector<double>> ref(rows.size(), std::vector<double>(c.d));
        parallel(rows.size(), [&](int64_t n) {
            const int64_t last = c.causal ? std::min(c.lk - 1, rows[n] + c.lk - c.lq) : c.lk - 1;
            std::vector<double> s(c.lk, -INFINITY);
            std::vector<float> q(c.d);
            for (int ch = 0; ch < c.d; ch++) {
                q[ch] = round_to(value(c.kind, 0, b, h, rows[n], ch), c.q);
            }
            double most = -INFINITY, sum = 0;
            for (int64_t l = 0; l <= last; l++) {
                const double bias = c.bias == NONE ? 0 : p.bias[b * c.lk + l];
                if (bias < -1e30) {
                    continue;
                }
                double x = 0;
                for (int ch = 0; ch < c.d; ch++) {
                    x += double(q[ch]) * k[l * c.d + ch];
                }
                s[l] = x * p.d.softmax_scale + bias;
                most = std::max(most, s[l]);
            }
            for (int64_t l = 0; l <= last; l++) {
                if (s[l] == -INFINITY) {
                    continue;
                }
                const double w = std::exp(s[l] - most);
                sum += w;
                for (int ch = 0; ch < c.d; ch++) {
                    ref[n][ch] += w * v[l * c.d + ch];
                }
            }
            for (int ch = 0; ch < c.d; ch++) {
                ref[n][ch] = sum > 0 ? ref[n][ch] / sum : 0;
            }
        });
        for (size_t n = 0; n < rows.size(); n++) {
            const std::vector<float> got = p.row(b, h, rows[n]);
            double rd = 0, rn = 0;
            for (int ch = 0; ch < c.d; ch++) {
                // huge channels apart would hide the others: each is weighed by its own size
                const double unit = c.kind == HUGE_V     ? (ch % 3 == 0   ? 1e-30
                                                            : ch % 3 == 1 ? 1 / 6e4
                                                                          : 1)
                                    : c.kind == TINY     ? 1e25
                                    : c.kind == ENORMOUS ? 1e-37
                                                         : 1;
                const double x = got[ch] * unit, y = ref[n][ch] * unit;
                rd += (x - y) * (x - y), rn += y * y;
                e.dot += x * y, e.norm_out += x * x;
            }
            e.diff += rd, e.norm += rn;
            e.worst = std::max(e.worst, rn > 0 ? std::sqrt(rd / rn) : std::sqrt(rd));
        }
    }
    return e;
}
