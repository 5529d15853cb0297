// The convolution and the norm of native/ggml-patched/cuda/conv.cu beside a slow reference, then their speed.
//   conv_check          all of it        conv_check small    small shapes only, for compute-sanitizer
//   conv_check tiles    every tile on every shape of a decode
// Built by itself: nvcc -std=c++17 -O3 -arch=sm_90 -I native/ggml-patched/cuda native/tests/conv_check.cu native/ggml-patched/cuda/conv.cu
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "conv.cuh"
#include "cuda_test.cuh"

using sdsage::Conv;

constexpr double LIMIT_CONV = 1e-4;  // of the largest output; sums of up to 10368 products in F32, which tensor cores cut off
constexpr double LIMIT_NORM = 1e-5;

template <class T>
struct Buffer {
    T * data = nullptr;
    size_t n;
    explicit Buffer(size_t n_) : n(n_) { CUDA(cudaMalloc(&data, std::max<size_t>(n, 1) * sizeof(T))); }
    ~Buffer() { cudaFree(data); }
    Buffer(const Buffer &)             = delete;
    Buffer & operator=(const Buffer &) = delete;
    void poison() { CUDA(cudaMemset(data, 0xff, n * sizeof(T))); }  // NaN in F16 and F32
};

template <class T>
__global__ void fill(T * to, size_t n, uint64_t seed, float scale) {
    for (size_t i = blockIdx.x * static_cast<size_t>(blockDim.x) + threadIdx.x; i < n; i += static_cast<size_t>(gridDim.x) * blockDim.x) {
        to[i] = static_cast<T>(scale * noise(i, seed));
    }
}

template <class T>
void fill_all(Buffer<T> & to, uint64_t seed, float scale) {
    fill<<<1024, 256>>>(to.data, to.n, seed, scale);
    CUDA(cudaGetLastError());
}

// out[j] of output number j * step
__global__ void conv_reference(Conv c, double * out, size_t n, size_t step, int ow, int oh, int od) {
    const size_t j = blockIdx.x * static_cast<size_t>(blockDim.x) + threadIdx.x;
    if (j >= n) {
        return;
    }
    size_t i    = j * step;
    const int w = i % ow, h = i / ow % oh, d = i / ow / oh % od, oc = i / ow / oh / od;
    double sum = c.bias ? c.bias[oc] : 0.;
    for (int ic = 0; ic < c.ic; ic++) {
        for (int kd = 0; kd < c.kd; kd++) {
            for (int kh = 0; kh < c.kh; kh++) {
                for (int kw = 0; kw < c.kw; kw++) {
                    const int f = d * c.sd + kd - c.front, y = h * c.sh + kh - c.top, x = w * c.sw + kw - c.left;
                    if (f < 0 || f >= c.cache_frames + c.frames || y < 0 || y >= c.height * c.upscale || x < 0 ||
                        x >= c.width * c.upscale) {
                        continue;
                    }
                    const float * from = f < c.cache_frames ? c.cache + ic * c.cache_channel + f * c.cache_frame
                                                            : c.x + ic * c.x_channel + (f - c.cache_frames) * c.x_frame;
                    const float value  = from[static_cast<int64_t>(y / c.upscale) * c.width + x / c.upscale];
                    sum += static_cast<double>(__half2float(__float2half_rn(value))) *
                           __half2float(c.weight[(((static_cast<int64_t>(oc) * c.ic + ic) * c.kd + kd) * c.kh + kh) * c.kw + kw]);
                }
            }
        }
    }
    out[j] = sum;
}

// The same outputs, picked from where the convolution wrote them.
__global__ void pick(Conv c, double * out, size_t n, size_t step, int ow, int oh, int od) {
    const size_t j = blockIdx.x * static_cast<size_t>(blockDim.x) + threadIdx.x;
    if (j < n) {
        const size_t i = j * step;
        const size_t w = i % ow, h = i / ow % oh, d = i / ow / oh % od, oc = i / ow / oh / od;
        out[j] = c.y[oc * c.y_channel + d * c.y_frame + h * ow + w];
    }
}

struct Shape {
    const char * name;
    int width, height, frames, cache, ic, oc, kw, kh, kd, stride, stride_d;
    int left, right, top, bottom, front;
    int upscale;
    bool bias, frames_last;  // frames_last: [W, H, C, N], a batch of pictures
    double count;            // how often a decode of 33 frames runs it; 0: not timed
};

Shape causal(const char * name, int w, int h, int frames, int cache, int ic, int oc, int k, int kd, double count = 0) {
    const int pad = k / 2;
    return { name, w, h, frames, cache, ic, oc, k, k, kd, 1, 1, pad, pad, pad, pad, kd - 1 - cache, 1, true, false, count };
}

Shape pictures(const char * name, int w, int h, int n, int ic, int oc, int k, int upscale, double count = 0) {
    const int pad = k / 2;
    return { name, w, h, n, 0, ic, oc, k, k, 1, 1, 1, pad, pad, pad, pad, 0, upscale, true, true, count };
}

double median(std::vector<float> times) {
    std::sort(times.begin(), times.end());
    return times[times.size() / 2];
}

template <class F>
double milliseconds(F run) {
    cudaEvent_t begin, end;
    CUDA(cudaEventCreate(&begin));
    CUDA(cudaEventCreate(&end));
    std::vector<float> times;
    for (int i = 0; i < 9; i++) {
        CUDA(cudaEventRecord(begin));
        run();
        CUDA(cudaEventRecord(end));
        CUDA(cudaEventSynchronize(end));
        float ms;
        CUDA(cudaEventElapsedTime(&ms, begin, end));
        times.push_back(ms);
    }
    CUDA(cudaEventDestroy(begin));
    CUDA(cudaEventDestroy(end));
    return median(times);
}

// True when `tile` is right on `shape`; *ms is its time when the shape is timed.
bool check_conv(const Shape & s, int tile, double * ms) {
    const int64_t plane = static_cast<int64_t>(s.width) * s.height;
    Buffer<float> x(plane * s.frames * s.ic), cache(plane * s.cache * s.ic), bias(s.oc);
    Buffer<__half> weight(static_cast<size_t>(s.oc) * s.ic * s.kd * s.kh * s.kw);
    fill_all(x, 1, 2.f);
    fill_all(cache, 2, 2.f);
    fill_all(weight, 3, 0.1f);
    fill_all(bias, 4, 1.f);
    Conv c         = {};
    c.x            = x.data;
    c.cache        = s.cache > 0 ? cache.data : nullptr;
    c.weight       = weight.data;
    c.bias         = s.bias ? bias.data : nullptr;
    c.width        = s.width;
    c.height       = s.height;
    c.frames       = s.frames;
    c.cache_frames = s.cache;
    c.ic           = s.ic;
    c.oc           = s.oc;
    c.kw           = s.kw;
    c.kh           = s.kh;
    c.kd           = s.kd;
    c.sw = c.sh     = s.stride;
    c.sd            = s.stride_d;
    c.left          = s.left;
    c.right         = s.right;
    c.top           = s.top;
    c.bottom        = s.bottom;
    c.front         = s.front;
    c.upscale       = s.upscale;
    c.x_channel     = s.frames_last ? plane : plane * s.frames;
    c.x_frame       = s.frames_last ? plane * s.ic : plane;
    c.cache_channel = plane * s.cache;
    c.cache_frame   = plane;
    const int ow = c.out_w(), oh = c.out_h(), od = c.out_d();
    const int64_t out_plane = static_cast<int64_t>(ow) * oh;
    c.y_channel             = s.frames_last ? out_plane : out_plane * od;
    c.y_frame               = s.frames_last ? out_plane * s.oc : out_plane;
    Buffer<float> y(out_plane * od * s.oc), again(y.n);
    Buffer<char> scratch(sdsage::conv_scratch(c));

    const auto run = [&](Buffer<float> & to) {
        to.poison();
        scratch.poison();
        c.y = to.data;
        CUDA(sdsage::conv_run(c, scratch.data, nullptr, tile));
        CUDA(cudaDeviceSynchronize());
    };
    run(y);
    run(again);
    std::vector<uint32_t> bits(y.n), bits_again(y.n);
    CUDA(cudaMemcpy(bits.data(), y.data, y.n * 4, cudaMemcpyDeviceToHost));
    CUDA(cudaMemcpy(bits_again.data(), again.data, y.n * 4, cudaMemcpyDeviceToHost));
    const bool same  = bits == bits_again;
    size_t unwritten = 0;
    for (const uint32_t b : bits) {
        unwritten += (b & 0x7f800000) == 0x7f800000;
    }

    const size_t step = y.n <= 200000 ? 1 : y.n / 20011;
    const size_t n    = (y.n + step - 1) / step;
    Buffer<double> wanted(n), got(n);
    const unsigned blocks = static_cast<unsigned>((n + 127) / 128);
    conv_reference<<<blocks, 128>>>(c, wanted.data, n, step, ow, oh, od);
    CUDA(cudaGetLastError());
    pick<<<blocks, 128>>>(c, got.data, n, step, ow, oh, od);
    CUDA(cudaGetLastError());
    std::vector<double> a(n), b(n);
    CUDA(cudaMemcpy(a.data(), wanted.data, n * 8, cudaMemcpyDeviceToHost));
    CUDA(cudaMemcpy(b.data(), got.data, n * 8, cudaMemcpyDeviceToHost));
    double largest = 0, error = 0;
    for (size_t i = 0; i < n; i++) {
        largest = std::max(largest, std::fabs(a[i]));
        error   = std::isfinite(b[i]) ? std::max(error, std::fabs(a[i] - b[i])) : INFINITY;
    }
    const bool right = error <= LIMIT_CONV * largest && same && unwritten == 0;
    std::printf("%-4s %-28s tile %2d  error %.1e%s", right ? "ok" : "BAD", s.name, tile, error / largest, same ? "" : "  a repeat differs");
    if (unwritten > 0) {
        std::printf("  %zu of %zu not finite", unwritten, y.n);
    }
    if (s.count > 0) {
        *ms                = milliseconds([&] { CUDA(sdsage::conv_run(c, scratch.data, nullptr, tile)); });
        const double flops = 2. * out_plane * od * s.oc * s.ic * s.kd * s.kh * s.kw;
        std::printf("  %8.3f ms %6.1f TFLOP/s", *ms, flops / *ms * 1e-9);
    }
    std::printf("\n");
    return right;
}

__global__ void norm_reference(const float * x, const float * gamma, double * out, int64_t pixels, int channels, double eps, bool silu,
                               size_t n, size_t step) {
    const size_t j = blockIdx.x * static_cast<size_t>(blockDim.x) + threadIdx.x;
    if (j >= n) {
        return;
    }
    const int64_t pixel = j * step % pixels, channel = j * step / pixels;
    double sum = 0;
    for (int c = 0; c < channels; c++) {
        sum += static_cast<double>(x[c * pixels + pixel]) * x[c * pixels + pixel];
    }
    const double normed = x[channel * pixels + pixel] / sqrt(sum / channels + eps) * gamma[channel];
    out[j]              = silu ? normed / (1 + exp(-normed)) : normed;
}

bool check_norm(int64_t pixels, int channels, bool silu, bool timed) {
    Buffer<float> x(pixels * channels), gamma(channels), y(x.n);
    fill_all(x, 5, 3.f);
    fill_all(gamma, 6, 2.f);
    y.poison();
    CUDA(sdsage::channel_norm(x.data, gamma.data, y.data, pixels, channels, 1e-12f, silu, nullptr));
    std::vector<float> got(y.n);
    CUDA(cudaMemcpy(got.data(), y.data, y.n * 4, cudaMemcpyDeviceToHost));
    const size_t step = y.n <= 200000 ? 1 : y.n / 100003;
    const size_t n    = (y.n + step - 1) / step;
    Buffer<double> wanted(n);
    norm_reference<<<static_cast<unsigned>((n + 127) / 128), 128>>>(x.data, gamma.data, wanted.data, pixels, channels, 1e-12, silu, n,
                                                                    step);
    CUDA(cudaGetLastError());
    std::vector<double> a(n);
    CUDA(cudaMemcpy(a.data(), wanted.data, n * 8, cudaMemcpyDeviceToHost));
    double largest = 0, error = 0;
    for (size_t i = 0; i < n; i++) {
        largest = std::max(largest, std::fabs(a[i]));
        error   = std::isfinite(got[i * step]) ? std::max(error, std::fabs(a[i] - got[i * step])) : INFINITY;
    }
    const bool finite = std::all_of(got.begin(), got.end(), [](float v) { return std::isfinite(v); });
    const bool right  = error <= LIMIT_NORM * largest && finite;
    std::printf("%-4s norm %ld x %d%s  error %.1e", right ? "ok" : "BAD", static_cast<long>(pixels), channels, silu ? " silu" : "",
                error / largest);
    if (timed) {
        const double ms =
            milliseconds([&] { CUDA(sdsage::channel_norm(x.data, gamma.data, y.data, pixels, channels, 1e-12f, silu, nullptr)); });
        std::printf("  %8.3f ms %6.0f GB/s", ms, 8. * x.n / ms * 1e-6);
    }
    std::printf("\n");
    return right;
}

int main(int argc, char ** argv) {
    const std::string what = argc > 1 ? argv[1] : "";
    cudaDeviceProp device;
    CUDA(cudaGetDeviceProperties(&device, 0));
    std::printf("%s, %d SMs\n", device.name, device.multiProcessorCount);

    const std::vector<Shape> small = {
        causal("3x3x3 cache 2", 20, 12, 2, 2, 64, 96, 3, 3),
        causal("3x3x3 no cache", 17, 13, 3, 0, 32, 128, 3, 3),
        causal("3x3x3 cache 1", 131, 3, 1, 1, 96, 96, 3, 3),
        causal("3x3x3 odd", 7, 5, 4, 2, 19, 37, 3, 3),
        causal("3x3x3 one column", 1, 9, 2, 2, 33, 97, 3, 3),
        causal("3x3x3 oc 3", 45, 11, 2, 2, 96, 3, 3, 3),
        causal("3x3x3 ic 16", 26, 15, 1, 0, 16, 384, 3, 3),
        causal("1x1x1", 33, 9, 2, 0, 192, 384, 1, 1),
        causal("1x1x1 16 to 16", 26, 15, 9, 0, 16, 16, 1, 1),
        causal("3x1x1 time", 26, 15, 1, 2, 64, 200, 1, 3),
        { "3x1x1 stride 2 in time", 19, 7, 4, 1, 48, 48, 1, 1, 3, 1, 2, 0, 0, 0, 0, 0, 1, true, false, 0 },
        { "3x3 stride 2, one side", 25, 14, 3, 0, 96, 96, 3, 3, 1, 2, 1, 0, 1, 0, 1, 0, 1, true, true, 0 },
        { "3x3x3 stride 2", 21, 16, 5, 0, 40, 64, 3, 3, 3, 2, 2, 1, 0, 0, 1, 2, 1, false, false, 0 },
        pictures("3x3 pictures", 22, 17, 3, 64, 96, 3, 1),
        pictures("3x3 enlarged", 11, 9, 2, 64, 96, 3, 2),
        { "5x5 no bias", 14, 12, 2, 0, 32, 32, 5, 5, 1, 1, 1, 2, 2, 2, 2, 0, 1, false, true, 0 },
    };
    // Wan 2.1's decode of 33 frames, 832 x 480: 9 chunks of 1 frame, then 4; the count is that of the later chunks times 8.25.
    const double chunks             = 8.25;
    const std::vector<Shape> decode = {
        causal("16-384 60x104", 104, 60, 1, 2, 16, 384, 3, 3, 9),
        causal("384-384 60x104", 104, 60, 1, 2, 384, 384, 3, 3, 10 * 9),
        causal("time 384-768 60x104", 104, 60, 1, 2, 384, 768, 1, 3, 8),
        causal("192-384 120x208", 208, 120, 2, 2, 192, 384, 3, 3, chunks),
        causal("192-384 120x208 1x1x1", 208, 120, 2, 0, 192, 384, 1, 1, chunks),
        causal("384-384 120x208", 208, 120, 2, 2, 384, 384, 3, 3, 5 * chunks),
        causal("time 384-768 120x208", 208, 120, 2, 2, 384, 768, 1, 3, 8),
        causal("192-192 240x416", 416, 240, 4, 2, 192, 192, 3, 3, 6 * chunks),
        causal("96-96 480x832", 832, 480, 4, 2, 96, 96, 3, 3, 6 * chunks),
        causal("96-3 480x832", 832, 480, 4, 2, 96, 3, 3, 3, chunks),
        pictures("up 384-192 120x208", 104, 60, 2, 384, 192, 3, 2, chunks),
        pictures("up 384-192 240x416", 208, 120, 4, 384, 192, 3, 2, chunks),
        pictures("up 192-96 480x832", 416, 240, 4, 192, 96, 3, 2, chunks),
    };
    bool right = true;
    double ms  = 0;
    for (const Shape & s : small) {
        for (int tile = sdsage::CONV_TILE_AUTO; tile < sdsage::CONV_TILES; tile++) {
            right &= check_conv(s, tile, &ms);
        }
    }
    for (const int channels : { 1, 16, 37, 96, 192, 384, 640, 1024 }) {
        right &= check_norm(1001, channels, channels % 2 == 0, false);
    }
    right &= sdsage::channel_norm(nullptr, nullptr, nullptr, 1, sdsage::CHANNEL_NORM_MAX + 1, 0, false, nullptr) == cudaErrorInvalidValue;
    if (what != "small") {
        const bool tiles = what == "tiles";
        double total     = 0;
        for (const Shape & s : decode) {
            right &= check_conv(s, sdsage::CONV_TILE_AUTO, &ms);
            total += ms * s.count;
            for (int tile = 0; tiles && tile < sdsage::CONV_TILES; tile++) {
                if ((tile == 0) == (s.oc <= 16)) {
                    right &= check_conv(s, tile, &ms);
                }
            }
        }
        std::printf("convolutions of a decode of 33 frames: %.0f ms\n", total);
        right &= check_norm(6240, 384, true, true);
        right &= check_norm(2 * 24960, 384, true, true);
        right &= check_norm(4 * 99840, 192, true, true);
        right &= check_norm(4 * 399360, 96, true, true);
    }
    std::printf(right ? "all right\n" : "FAILED\n");
    return right ? 0 : 1;
}
