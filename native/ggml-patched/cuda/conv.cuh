// Convolution over width, height and frames as an implicit GEMM on tensor cores: F32 in and out, products of F16, sums in F32.
// A 2-D convolution of several pictures has kd = 1 and the pictures as frames.
#pragma once

#include <cstddef>
#include <cstdint>

#include <cuda_fp16.h>
#include <cuda_runtime.h>

namespace sdsage {

// y[oc, d, h, w] = bias[oc] + sum over ic, kd, kh, kw of weight[oc, ic, kd, kh, kw] in[ic, d sd + kd, h sh + kh, w sw + kw]
//   in = pad(concat(cache, x)), enlarged `upscale` times in width and height (nearest) before the padding.
struct Conv {
    const float * x;
    const float * cache;    // the frames before x, else nullptr
    const __half * weight;  // [oc][ic][kd][kh][kw]
    const float * bias;     // [oc], else nullptr
    float * y;
    int width, height, frames, cache_frames, ic, oc;
    int kw, kh, kd, sw, sh, sd;
    int left, right, top, bottom, front, back;  // zeros around `in`
    int upscale;                                // 1 or 2
    // In elements; a picture's rows lie one behind another.
    int64_t x_channel, x_frame, cache_channel, cache_frame, y_channel, y_frame;

    int in_w() const { return width * upscale + left + right; }
    int in_h() const { return height * upscale + top + bottom; }
    int in_d() const { return frames + cache_frames + front + back; }
    int out_w() const { return (in_w() - kw) / sw + 1; }
    int out_h() const { return (in_h() - kh) / sh + 1; }
    int out_d() const { return (in_d() - kd) / sd + 1; }
};

constexpr int CONV_TILE_AUTO = -1;
constexpr int CONV_TILES     = 5;

bool conv_supported(const Conv & conv);
// Bytes of scratch for any tile; the scratch has to be aligned to CONV_ALIGN.
constexpr size_t CONV_ALIGN = 128;
size_t conv_scratch(const Conv & conv);
// `tile` is for measuring: every tile gives the same sums in the same order.
cudaError_t conv_run(const Conv & conv, void * scratch, cudaStream_t stream, int tile = CONV_TILE_AUTO);

// y[c, p] = x[c, p] gamma[c] / sqrt(mean over c of x^2 + eps), then SiLU if asked for. y may be x.
constexpr int CHANNEL_NORM_MAX = 1024;
cudaError_t channel_norm(const float * x, const float * gamma, float * y, int64_t pixels, int channels, float eps, bool silu,
                         cudaStream_t stream);

}  // namespace sdsage
