// Convolution and norm nodes (sdsage_conv.hpp) of the CUDA backend; compiled into the ggml-cuda target, called by its edits.
#include "common.cuh"
#include "conv.cuh"
#include "sdsage_conv.hpp"
#include "sdsage_levers.hpp"

bool sdsage_conv_supported(int device, const ggml_tensor * node);
size_t sdsage_conv_scratch(const ggml_tensor * node);
bool sdsage_conv_compute(ggml_backend_cuda_context & ctx, ggml_tensor * node);

static sdsage::Conv conv_of(const ggml_tensor * node, const sdsage::ConvMark & mark) {
    const auto data  = [](const ggml_tensor * t) { return static_cast<const float *>(t->data); };
    const auto along = [](const ggml_tensor * t, int dim) { return static_cast<int64_t>(t->nb[dim] / sizeof(float)); };

    const ggml_tensor *x = node->src[0], *weight = node->src[1];
    const int in_frame = mark.flags & sdsage::CONV_PICTURES_IN ? 3 : 2, out_frame = mark.flags & sdsage::CONV_PICTURES_OUT ? 3 : 2;
    const int in_channel = 5 - in_frame, out_channel = 5 - out_frame;

    sdsage::Conv conv = {};
    conv.x            = data(x);
    conv.weight       = static_cast<const half *>(weight->data);
    conv.y            = static_cast<float *>(node->data);
    conv.width        = static_cast<int>(x->ne[0]);
    conv.height       = static_cast<int>(x->ne[1]);
    conv.frames       = static_cast<int>(x->ne[in_frame]);
    conv.ic           = mark.ic;
    conv.oc           = static_cast<int>(node->ne[out_channel]);
    conv.kw           = static_cast<int>(weight->ne[0]);
    conv.kh           = static_cast<int>(weight->ne[1]);
    conv.kd           = in_frame == 3 ? 1 : static_cast<int>(weight->ne[2]);
    conv.sw           = mark.stride[0];
    conv.sh           = mark.stride[1];
    conv.sd           = mark.stride[2];
    conv.left         = mark.before[0];
    conv.right        = mark.after[0];
    conv.top          = mark.before[1];
    conv.bottom       = mark.after[1];
    conv.front        = mark.before[2];
    conv.back         = mark.after[2];
    conv.upscale      = mark.upscale;
    conv.x_channel    = along(x, in_channel);
    conv.x_frame      = along(x, in_frame);
    conv.y_channel    = along(node, out_channel);
    conv.y_frame      = along(node, out_frame);
    int next          = 2;
    if (mark.flags & sdsage::CONV_BIAS) {
        conv.bias = data(node->src[next++]);
    }
    if (mark.flags & sdsage::CONV_CACHE) {
        const ggml_tensor * cache = node->src[next];
        conv.cache                = data(cache);
        conv.cache_frames         = static_cast<int>(cache->ne[in_frame]);
        conv.cache_channel        = along(cache, in_channel);
        conv.cache_frame          = along(cache, in_frame);
    }
    return conv;
}

bool sdsage_conv_supported(int device, const ggml_tensor * node) {
    sdsage::ConvMark conv;
    sdsage::ChannelNormMark norm;
    if (sdsage::read_channel_norm(node, &norm)) {
        return node->ne[3] <= sdsage::CHANNEL_NORM_MAX;
    }
    const int cc = ggml_cuda_info().devices[device].cc;
    return sdsage::read_conv(node, &conv) && GGML_CUDA_CC_IS_NVIDIA(cc) && ggml_cuda_highest_compiled_arch(cc) >= GGML_CUDA_CC_AMPERE &&
           sdsage::conv_supported(conv_of(node, conv));
}

size_t sdsage_conv_scratch(const ggml_tensor * node) {
    sdsage::ConvMark mark;
    return sdsage::read_conv(node, &mark) ? sdsage::conv_scratch(conv_of(node, mark)) : 0;
}

bool sdsage_conv_compute(ggml_backend_cuda_context & ctx, ggml_tensor * node) {
    sdsage::ConvMark mark;
    sdsage::ChannelNormMark norm;
    if (sdsage::read_channel_norm(node, &norm)) {
        const ggml_tensor *x = node->src[0], *gamma = node->src[1];
        CUDA_CHECK(sdsage::channel_norm(static_cast<const float *>(x->data), static_cast<const float *>(gamma->data),
                                        static_cast<float *>(node->data), x->ne[0] * x->ne[1] * x->ne[2], static_cast<int>(x->ne[3]),
                                        norm.eps, norm.silu != 0, ctx.stream()));
        return true;
    }
    if (!sdsage::read_conv(node, &mark)) {
        return false;
    }
    CUDA_CHECK(sdsage::conv_run(conv_of(node, mark), node->src[sdsage::SCRATCH_SRC]->data, ctx.stream()));
    return true;
}
