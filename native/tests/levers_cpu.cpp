// The levers' arithmetic for ggml's CPU backend, as native/ggml-patched/cuda/levers.cu computes it. For tests only.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "levers.h"
#include "sdsage_conv.hpp"
#include "sdsage_test.h"

namespace {

using sdsage::LeverMark;
using sdsage::LeverOp;

int fault           = 0;
int64_t scratch     = -1;  // bytes that every node needs whose result has `large` bytes or more; -1: as on CUDA
int64_t large       = 0;
size_t last_reserve = 0;
std::mutex counting;
std::map<std::string, int> counts;

float bf16(float x) { return ggml_bf16_to_fp32(ggml_fp32_to_bf16(x)); }

const float * floats(const ggml_tensor * t) { return static_cast<const float *>(t->data); }

void put(ggml_tensor * node, int64_t i, float x) {
    if (node->type == GGML_TYPE_BF16) {
        static_cast<ggml_bf16_t *>(node->data)[i] = ggml_fp32_to_bf16(x);
    } else {
        static_cast<float *>(node->data)[i] = x;
    }
}

// FP8: 4 bits of exponent, 3 of mantissa, up to 448.
uint8_t e4m3(float x) {
    const float size   = std::fabs(x);
    const int exponent = size < 0.015625f ? -6 : std::ilogb(size);                          // below 2^-6 steps are 2^-9
    int code           = static_cast<int>(std::nearbyint(std::ldexp(size, 3 - exponent)));  // 8..16, or 0..8
    code               = std::min(code + (exponent + 6) * 8, 0x7e);
    return static_cast<uint8_t>(code | (std::signbit(x) ? 0x80 : 0));
}

float from_e4m3(uint8_t code) {
    const int size = code & 0x7f, exponent = std::max(size / 8, 1);
    const float x = std::ldexp(static_cast<float>(size - (exponent - 1) * 8), exponent - 10);
    return code & 0x80 ? -x : x;
}

// Returns the scale.
template <class Value>
float row_to_fp8(int64_t columns, Value value, uint8_t * codes) {
    float largest = 1e-30f;
    for (int64_t i = 0; i < columns; i++) {
        largest = std::max(largest, std::fabs(value(i)));
    }
    for (int64_t i = 0; i < columns; i++) {
        codes[i] = e4m3(value(i) / (largest / 448));
    }
    return largest / 448;
}

float number(const ggml_tensor * t, int64_t i) {
    return t->type == GGML_TYPE_BF16 ? ggml_bf16_to_fp32(static_cast<const ggml_bf16_t *>(t->data)[i]) : floats(t)[i];
}

void to_fp8(ggml_tensor * node, int ith, int nth) {
    const ggml_tensor * x = node->src[0];
    const int64_t columns = x->ne[0], rows = ggml_nrows(x);
    auto * codes  = static_cast<uint8_t *>(node->data);
    auto * scales = reinterpret_cast<float *>(codes + rows * columns);
    for (int64_t r = ith; r < rows; r += nth) {
        const auto value = [&](int64_t i) { return number(x, r * columns + i); };
        scales[r]        = row_to_fp8(columns, value, codes + r * columns) * (fault == 5 && r % 2 == 1 ? 2.f : 1.f);
    }
}

float gelu(float x) { return 0.5f * x * (1.f + std::tanh(0.79788456080286535588f * x * (1.f + 0.044715f * x * x))); }

void linear(ggml_tensor * node, const LeverMark & mark, int ith, int nth) {
    const ggml_tensor *w = node->src[0], *x = node->src[1];
    const int64_t k = w->ne[0], n = w->ne[1], tokens = ggml_nelements(node) / n;
    int next          = 2;
    const auto row    = [&](int32_t flag) { return mark.flags & flag ? floats(node->src[next++]) : nullptr; };
    const float *bias = row(sdsage::LINEAR_BIAS), *gate = row(sdsage::LINEAR_GATE), *residual = row(sdsage::LINEAR_RESIDUAL);
    gate = fault == 8 ? nullptr : gate;
    GGML_ASSERT(residual == nullptr || node->type == GGML_TYPE_F32);  // on a GPU it is read in the type of the result
    const bool fp8 = mark.flags & sdsage::LINEAR_FP8;
    std::vector<float> all(k * tokens), weights(k);
    std::vector<uint8_t> codes(k);
    const auto * x_codes  = static_cast<const uint8_t *>(x->data);
    const auto * x_scales = reinterpret_cast<const float *>(x_codes + k * tokens);
    for (int64_t i = 0; i < k * tokens; i++) {
        all[i] = fp8 ? from_e4m3(x_codes[i]) * x_scales[i / k] : number(x, i);
    }
    const auto * traits = ggml_get_type_traits(w->type);
    for (int64_t j = ith; j < n; j += nth) {
        traits->to_float(static_cast<const char *>(w->data) + j * w->nb[1], weights.data(), k);
        const float factor = gate ? gate[j] : 1.f;
        if (fp8) {
            const float scale = row_to_fp8(k, [&](int64_t i) { return weights[i]; }, codes.data()) * factor;
            std::transform(codes.begin(), codes.end(), weights.begin(), [&](uint8_t code) { return from_e4m3(code) * scale; });
        } else {
            std::transform(weights.begin(), weights.end(), weights.begin(), [&](float value) { return bf16(value * factor); });
        }
        for (int64_t t = 0; t < tokens; t++) {
            double sum = 0;
            for (int64_t c = 0; c < k; c++) {
                sum += double(weights[c]) * all[t * k + c];
            }
            float y = static_cast<float>(sum) + (bias && fault != 1 ? bias[j] * factor : 0.f);
            y       = mark.flags & sdsage::LINEAR_GELU ? gelu(y) : y;
            put(node, t * n + j, y + (residual ? residual[t * n + j] : 0.f));
        }
    }
}

void norm(ggml_tensor * node, const LeverMark & mark, int ith, int nth) {
    const ggml_tensor * x = node->src[0];
    const int64_t c       = x->ne[0];
    int next              = 1;
    const auto row        = [&](int32_t flag) { return mark.flags & flag ? floats(node->src[next++]) : nullptr; };
    const float *scale = row(sdsage::NORM_SCALE), *shift = row(sdsage::NORM_SHIFT);
    const float one = scale == nullptr || mark.flags & sdsage::NORM_ONE_PLUS_SCALE ? 1.f : 0.f;
    for (int64_t t = ith; t < ggml_nrows(x); t += nth) {
        const float * in = floats(x) + t * c;
        double mean = 0, squares = 0;
        for (int64_t i = 0; i < c; i++) {
            mean += in[i] / double(c);
        }
        for (int64_t i = 0; i < c; i++) {
            squares += (in[i] - mean) * (in[i] - mean) / double(c);
        }
        for (int64_t i = 0; i < c; i++) {
            const double y      = (in[i] - mean) / std::sqrt(squares + mark.eps);
            const double scaled = y * ((scale ? scale[i] : 0.f) + one) * (fault == 9 ? 1.01 : 1.);
            put(node, t * c + i, static_cast<float>(scaled + (shift && fault != 2 ? shift[i] : 0.f)));
        }
    }
}

void copy(ggml_tensor * node, int ith, int nth) {
    const ggml_tensor * x = node->src[0];
    int dims;
    const int64_t run = sdsage::run_of(x, &dims), runs = ggml_nelements(x) / run;
    for (int64_t r = ith; r < runs; r += nth) {
        const char * from = static_cast<const char *>(x->data);
        int64_t rest      = r;
        for (int i = dims; i < GGML_MAX_DIMS; rest /= x->ne[i++]) {
            from += rest % x->ne[i] * static_cast<int64_t>(x->nb[i]);
        }
        std::memcpy(static_cast<float *>(node->data) + r * run, from, run * sizeof(float));
    }
}

void rope(ggml_tensor * node, const LeverMark & mark, int ith, int nth) {
    const ggml_tensor *x = node->src[0], *pe = node->src[1], *w = mark.flags & sdsage::ROPE_NORM ? node->src[2] : nullptr;
    const int64_t head_dim = mark.head_dim, c = w ? w->ne[0] : x->ne[0] * x->ne[1], tokens = pe->ne[3];
    for (int64_t row = ith; row < ggml_nelements(x) / c; row += nth) {
        const int64_t batch = row / tokens, token = row % tokens;
        const float *in = floats(x) + row * c, *p = floats(pe) + token * head_dim * 2;
        double squares = 0;
        for (int64_t i = 0; i < c; i++) {
            squares += double(in[i]) * in[i] / c;
        }
        const double factor = w ? 1 / std::sqrt(squares + mark.eps) : 1;
        const auto value    = [&](int64_t i) { return static_cast<float>(in[i] * factor * (w ? floats(w)[i] : 1.f)); };
        for (int64_t i = 0; i < c; i += 2) {
            const int64_t head = i / head_dim, channel = i % head_dim;
            const float *q = p + channel * 2, even = value(i), odd = value(i + 1);
            const int64_t at = batch * tokens * c + (head * tokens + token) * head_dim + channel;
            put(node, at, even * q[0] + odd * (fault == 3 ? -q[1] : q[1]));
            put(node, at + 1, even * q[2] + odd * q[3]);
        }
    }
}

void count(const std::string & what) {
    std::lock_guard<std::mutex> hold(counting);
    counts[what]++;
}

// One output channel after the other; inputs rounded to F16.
void convolution(ggml_tensor * node, const sdsage::ConvMark & mark, int ith, int nth) {
    const ggml_tensor *x = node->src[0], *weight = node->src[1];
    const bool bias          = mark.flags & sdsage::CONV_BIAS;
    const ggml_tensor * past = mark.flags & sdsage::CONV_CACHE ? node->src[2 + bias] : nullptr;
    const int in_frame = mark.flags & sdsage::CONV_PICTURES_IN ? 3 : 2, out_frame = mark.flags & sdsage::CONV_PICTURES_OUT ? 3 : 2;
    const int64_t kw = weight->ne[0], kh = weight->ne[1], kd = in_frame == 3 ? 1 : weight->ne[2], cached = past ? past->ne[2] : 0;
    const auto * w   = static_cast<const ggml_fp16_t *>(weight->data);
    const auto value = [&](int64_t c, int64_t d, int64_t row, int64_t column) {
        const ggml_tensor * from = d < cached ? past : x;
        d -= d < cached ? 0 : cached;
        const bool inside = d >= 0 && d < from->ne[in_frame] && row >= 0 && row < from->ne[1] * mark.upscale && column >= 0 &&
                            column < from->ne[0] * mark.upscale;
        if (!inside) {
            return 0.f;
        }
        const char * at = static_cast<const char *>(from->data) + c * from->nb[5 - in_frame] + d * from->nb[in_frame] +
                          row / mark.upscale * from->nb[1] + column / mark.upscale * from->nb[0];
        return ggml_fp16_to_fp32(ggml_fp32_to_fp16(*reinterpret_cast<const float *>(at)));
    };
    for (int64_t o = ith; o < node->ne[5 - out_frame]; o += nth) {
        for (int64_t d = 0; d < node->ne[out_frame]; d++) {
            for (int64_t row = 0; row < node->ne[1]; row++) {
                for (int64_t column = 0; column < node->ne[0]; column++) {
                    double sum = bias && fault != 4 ? floats(node->src[2])[o] : 0.f;
                    for (int64_t i = 0; i < mark.ic * kd * kh * kw; i++) {
                        const int64_t c = i / (kd * kh * kw), z = i / (kh * kw) % kd, y = i / kw % kh;
                        const float in = value(c, d * mark.stride[2] + z - mark.before[2], row * mark.stride[1] + y - mark.before[1],
                                               column * mark.stride[0] + i % kw - mark.before[0]);
                        sum += double(in) * ggml_fp16_to_fp32(w[o * mark.ic * kd * kh * kw + i]);
                    }
                    char * out = static_cast<char *>(node->data) + o * node->nb[5 - out_frame] + d * node->nb[out_frame];
                    *reinterpret_cast<float *>(out + row * node->nb[1] + column * node->nb[0]) = static_cast<float>(sum);
                }
            }
        }
    }
}

void channel_norm(ggml_tensor * node, const sdsage::ChannelNormMark & mark, int ith, int nth) {
    const int64_t pixels = node->ne[0] * node->ne[1] * node->ne[2], channels = node->ne[3];
    const float *x = floats(node->src[0]), *gamma = floats(node->src[1]);
    for (int64_t i = ith; i < pixels; i += nth) {
        double squares = 0;
        for (int64_t c = 0; c < channels; c++) {
            squares += double(x[c * pixels + i]) * x[c * pixels + i] / channels;
        }
        for (int64_t c = 0; c < channels; c++) {
            const double y = x[c * pixels + i] / std::sqrt(squares + mark.eps) * gamma[c];
            put(node, c * pixels + i, static_cast<float>(mark.silu ? y / (1 + std::exp(-y)) : y));
        }
    }
}

void compute(ggml_tensor * node, int ith, int nth, void *) {
    if (const ggml_tensor * own = node->src[sdsage::SCRATCH_SRC]) {  // nothing else may lie there
        const int64_t bytes = ggml_nelements(own), share = (bytes + nth - 1) / nth, begin = std::min(bytes, ith * share);
        std::memset(static_cast<char *>(own->data) + begin, 0xff, std::min(share, bytes - begin));
    }
    sdsage::ConvMark conv;
    sdsage::ChannelNormMark channels;
    if (sdsage::read_conv(node, &conv)) {
        if (ith == 0) {
            count(std::string("convolution") + (conv.flags & sdsage::CONV_CACHE ? " with frames before" : "") +
                  (conv.upscale == 2 ? " of an enlarged picture" : ""));
        }
        return convolution(node, conv, ith, nth);
    }
    if (sdsage::read_channel_norm(node, &channels)) {
        if (ith == 0) {
            count(channels.silu ? "norm over channels, SiLU" : "norm over channels");
        }
        return channel_norm(node, channels, ith, nth);
    }
    LeverMark mark;
    GGML_ASSERT(sdsage::read_lever(node, &mark));
    if (mark.op == LeverOp::scratch) {
        return;
    }
    if (ith == 0) {
        static const char * const names[] = { "linear", "to_bf16", "to_fp8", "norm", "scratch", "copy", "rope" };
        std::string name                  = names[static_cast<int>(mark.op)];
        if (mark.op == LeverOp::linear) {
            static const char * const parts[] = { " bias", " gelu", " gate", " residual", " of FP8" };
            for (int i = 0; i < 5; i++) {
                name += mark.flags >> i & 1 ? parts[i] : "";
            }
        }
        count(name + (node->type == GGML_TYPE_BF16 && mark.op != LeverOp::to_bf16 ? " in BF16" : ""));
    }
    switch (mark.op) {
        case LeverOp::linear:
            return linear(node, mark, ith, nth);
        case LeverOp::norm:
            return norm(node, mark, ith, nth);
        case LeverOp::rope:
            return rope(node, mark, ith, nth);
        case LeverOp::copy:
            return copy(node, ith, nth);
        case LeverOp::to_fp8:
            return to_fp8(node, ith, nth);
        case LeverOp::scratch:
            return;
        case LeverOp::to_bf16:
            for (int64_t i = ith; i < ggml_nelements(node); i += nth) {
                put(node, i, floats(node->src[0])[i]);
            }
    }
}

bool can_linear(int) { return true; }

bool prefers_linear(int, int64_t tokens) { return tokens >= 2; }

bool can_convert(ggml_type type) { return ggml_get_type_traits(type)->to_float != nullptr; }

bool can_fp8(int, int64_t k, int64_t n, int64_t) { return k % 16 == 0 && n % 16 == 0 && (fault != 6 || k != 512) && fault != 7; }

bool supports(int, const ggml_tensor *) { return true; }

// As cuda/conv.cu and cuda/linear.cu size it, but for alignment.
size_t scratch_on_cuda(const ggml_tensor * node) {
    LeverMark mark;
    sdsage::ConvMark conv;
    const ggml_tensor *x = node->src[0], *w = node->src[1];
    if (sdsage::read_conv(node, &conv)) {
        const bool pictures      = conv.flags & sdsage::CONV_PICTURES_IN;
        const int64_t channels   = (conv.ic + 31) / 32 * 32,
                      outputs    = (node->ne[conv.flags & sdsage::CONV_PICTURES_OUT ? 2 : 3] + 127) / 128 * 128;
        const ggml_tensor * past = conv.flags & sdsage::CONV_CACHE ? node->src[conv.flags & sdsage::CONV_BIAS ? 3 : 2] : nullptr;
        const auto padded        = [&](int i, int64_t n) { return n + conv.before[i] + conv.after[i]; };
        const int64_t pixels     = padded(0, x->ne[0] * conv.upscale) * padded(1, x->ne[1] * conv.upscale) *
                               padded(2, x->ne[pictures ? 3 : 2] + (past ? past->ne[2] : 0));
        return (pixels * channels + outputs * channels * w->ne[0] * w->ne[1] * (pictures ? 1 : w->ne[2])) * 2;
    }
    if (sdsage::read_lever(node, &mark) && mark.op == LeverOp::linear) {
        return ggml_nelements(x) * (mark.flags & sdsage::LINEAR_FP8 ? 1 : 2) + x->ne[1] * 8 + (32 << 20);
    }
    return 0;
}

size_t scratch_of(int, const ggml_tensor * node) {
    const size_t bytes = scratch_on_cuda(node);
    return bytes == 0 || scratch < 0 ? bytes : ggml_nbytes(node) >= static_cast<size_t>(large) ? scratch : 0;
}

const sdsage::LeverBackend on_cpu = { can_linear, prefers_linear, can_convert, can_fp8, supports, scratch_of };

}  // namespace

extern "C" {

void sdsage_test_levers_cpu(bool on, int which_fault) {
    fault = which_fault;
    sdsage::set_cpu_levers(on ? &on_cpu : nullptr, on ? compute : nullptr);
}

void sdsage_test_lever_scratch(int64_t bytes, int64_t from) {
    scratch = bytes;
    large   = from;
}

int64_t sdsage_test_lever_reserved(void) { return static_cast<int64_t>(last_reserve); }

float sdsage_test_lever_chain(bool pulled) {
    constexpr int64_t N = 64, TOKENS = 8;
    ggml_context * ctx = ggml_init({ ggml_tensor_overhead() * 32 + ggml_graph_overhead(), nullptr, true });
    ggml_tensor *first = ggml_new_tensor_2d(ctx, GGML_TYPE_F16, N, N), *second = ggml_new_tensor_2d(ctx, GGML_TYPE_F16, N, N);
    ggml_tensor *x = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, N, TOKENS), *residual = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, N, TOKENS);
    ggml_tensor * sum    = ggml_add(ctx, ggml_mul_mat(ctx, first, x), residual);
    ggml_tensor * result = ggml_mul_mat(ctx, second, sum);
    ggml_cgraph * graph  = ggml_new_graph(ctx);
    ggml_build_forward_expand(graph, result);
    ggml_backend_t backend = ggml_backend_init_by_type(GGML_BACKEND_DEVICE_TYPE_CPU, nullptr);
    sdsage::pull_levers(ctx, backend, graph, pulled ? sdsage::LEVER_LINEAR : 0, "chain");
    for (ggml_tensor * t : { first, second, x, residual }) {
        ggml_set_input(t);
    }
    ggml_gallocr_t memory = ggml_gallocr_new(ggml_backend_get_default_buffer_type(backend));
    GGML_ASSERT(ggml_gallocr_alloc_graph(memory, graph));
    last_reserve = ggml_gallocr_get_buffer_size(memory, 0);
    std::vector<float> values(N * N);
    for (ggml_tensor * t : { first, second, x, residual }) {
        for (int64_t i = 0; i < ggml_nelements(t); i++) {
            values[i] = std::sin(0.37f * static_cast<float>(i) + static_cast<float>(t->ne[1])) / (t->type == GGML_TYPE_F16 ? 8.f : 1.f);
        }
        std::vector<ggml_fp16_t> halves(values.size());
        ggml_fp32_to_fp16_row(values.data(), halves.data(), static_cast<int64_t>(values.size()));
        ggml_backend_tensor_set(t, t->type == GGML_TYPE_F16 ? static_cast<const void *>(halves.data()) : values.data(), 0, ggml_nbytes(t));
    }
    ggml_backend_graph_compute(backend, graph);
    float last = 0.f;
    ggml_backend_tensor_get(result, &last, ggml_nbytes(result) - sizeof(last), sizeof(last));
    ggml_gallocr_free(memory);
    ggml_backend_free(backend);
    ggml_free(ctx);
    return last;
}

const char * sdsage_test_levers(void) {
    static std::string text;
    text.clear();
    for (const auto & [what, count] : counts) {
        text += what + ": " + std::to_string(count) + "\n";
    }
    counts.clear();
    return text.c_str();
}

}  // extern "C"
