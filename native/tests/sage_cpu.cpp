// SageAttention's arithmetic for ggml's CPU backend, as native/sage_cuda/kernels computes it: groups, scales, rounding and the
// order of the key tiles are the kernels' own; sums inside a tile may be added in another order. For tests only.
#include <algorithm>
#include <cmath>
#include <map>
#include <string>
#include <vector>

#include "attention_run.h"
#include "sdsage_test.h"

namespace {

using sdsage::read_sage_node;

constexpr int TILE      = 64;  // keys
constexpr float LOG2E   = 1.44269504f;
constexpr float E4M3MAX = 448.f;

sage_device pretended = {};
std::string pretended_architectures;
bool broken = false;

float round_f16(float x) { return ggml_fp16_to_fp32(ggml_fp32_to_fp16(x)); }

float round_e4m3(float x) {  // nearest even, saturating, subnormal step 2^-9
    const float a = std::min(std::fabs(x), E4M3MAX);
    if (!(a > 0.f)) {
        return x == x ? 0.f : x;
    }
    const float step = std::ldexp(1.f, std::max(std::ilogb(a), -6) - 3);
    return std::copysign(std::nearbyint(a / step) * step, x);
}

// One head's rows, [token][channel].
std::vector<float> rows_of(const sage_tensor & t, int64_t tokens, int64_t dim, int64_t batch, int64_t head) {
    const int64_t from = batch * t.batch_stride + head * t.head_stride;
    std::vector<float> rows(tokens * dim);
    for (int64_t i = 0; i < tokens; i++) {
        const int64_t at = from + i * t.token_stride;
        if (t.dtype == SAGE_F16) {
            ggml_fp16_to_fp32_row(static_cast<const ggml_fp16_t *>(t.data) + at, &rows[i * dim], dim);
        } else {
            std::copy_n(static_cast<const float *>(t.data) + at, dim, &rows[i * dim]);
        }
    }
    return rows;
}

struct Codes {
    std::vector<float> code;   // whole numbers -127..127
    std::vector<float> scale;  // by row
};

// INT8 with one scale per group of rows; `group_of` counts groups inside a block of 64 rows.
template <class GroupOf>
Codes quantize_rows(const std::vector<float> & x, int64_t dim, GroupOf group_of) {
    const int64_t rows = static_cast<int64_t>(x.size()) / dim;
    Codes out          = { std::vector<float>(x.size()), std::vector<float>(rows) };
    for (int64_t block = 0; block < rows; block += 64) {
        const int64_t end = std::min(block + 64, rows);
        float largest[64] = {};
        for (int64_t i = block; i < end; i++) {
            float & m = largest[group_of(i - block)];
            for (int64_t c = 0; c < dim; c++) {
                m = std::isfinite(x[i * dim + c]) ? std::max(m, std::fabs(x[i * dim + c])) : NAN;
            }
        }
        for (int64_t i = block; i < end; i++) {
            const float scale = largest[group_of(i - block)] / 127.f;
            out.scale[i]      = scale;
            for (int64_t c = 0; c < dim; c++) {
                out.code[i * dim + c] = scale > 0.f ? std::nearbyint(x[i * dim + c] / scale) : 0.f;
            }
        }
    }
    return out;
}

// Of K, and of V for E4M3; rows that are not seen become zeros.
std::vector<float> subtract_mean(std::vector<float> & k, int64_t dim, const std::vector<bool> & seen) {
    std::vector<float> mean(dim, 0.f);
    const int64_t n = std::count(seen.begin(), seen.end(), true);
    for (int64_t c = 0; c < dim && n > 0; c++) {
        double sum = 0;
        for (size_t j = 0; j < seen.size(); j++) {
            sum += seen[j] ? k[j * dim + c] : 0.f;
        }
        mean[c] = static_cast<float>(sum / n);
        for (size_t j = 0; j < seen.size(); j++) {
            k[j * dim + c] = seen[j] ? k[j * dim + c] - mean[c] : 0.f;
        }
    }
    return mean;
}

// V as the kernel's numbers, times a scale per channel.
std::vector<float> quantize_v(std::vector<float> & v, int64_t dim, const std::vector<bool> & seen, sage_kernel kernel) {
    std::vector<float> scale(dim, 1.f);
    for (int64_t c = 0; c < dim; c++) {
        float largest = 0.f;
        for (size_t j = 0; j < seen.size(); j++) {
            float & x = v[j * dim + c];
            x         = seen[j] ? x : 0.f;
            largest   = std::max(largest, std::fabs(x));
        }
        const bool f16 = kernel == SAGE_KERNEL_FP16;
        if (largest > 0.f) {
            scale[c] = f16 ? std::ldexp(1.f, std::ilogb(largest) - 14) : largest / (kernel == SAGE_KERNEL_FP8PP ? 2.25f : E4M3MAX);
        }
        for (size_t j = 0; j < seen.size(); j++) {
            float & x = v[j * dim + c];
            x         = f16 ? round_f16(x / scale[c]) : round_e4m3(x / scale[c]);
        }
    }
    return scale;
}

void one_head(const sage_attn_desc & a, int64_t batch, int64_t head) {
    const int64_t dim = a.head_dim, kv_head = head / (a.heads / a.kv_heads);
    const sage_kernel kernel = a.kernel;
    std::vector<float> q = rows_of(a.q, a.lq, dim, batch, head), k = rows_of(a.k, a.lk, dim, batch, kv_head),
                       v = rows_of(a.v, a.lk, dim, batch, kv_head);
    const float * bias   = a.bias ? a.bias + batch * a.bias_stride : nullptr;
    std::vector<bool> seen(a.lk);
    for (int64_t j = 0; j < a.lk; j++) {
        seen[j] = bias == nullptr || bias[j] > -6.9e29f;
    }
    subtract_mean(k, dim, seen);
    const std::vector<float> v_mean  = kernel == SAGE_KERNEL_FP16 ? std::vector<float>(dim, 0.f) : subtract_mean(v, dim, seen);
    const std::vector<float> v_scale = quantize_v(v, dim, seen, kernel);
    const Codes q8                   = quantize_rows(q, dim, [](int64_t i) { return i / 32 * 8 + i % 8; });
    const Codes k8                   = quantize_rows(k, dim, [](int64_t j) { return j % 8 / 2; });
    const float p_max                = kernel == SAGE_KERNEL_FP16 ? 1.f : E4M3MAX;

    float * out = static_cast<float *>(a.o.data) + batch * a.o.batch_stride + head * a.o.head_stride;
    std::vector<float> sum_pv(dim), tile_pv(dim);
    // hopper takes 128 keys a step, the last first, and its tensor core sums what it multiplies
    const bool hopper  = kernel == SAGE_KERNEL_HOPPER;
    const int64_t step = hopper ? 2 * TILE : TILE;
    float s[2 * TILE];
    for (int64_t i = 0; i < a.lq; i++) {
        float top = -INFINITY, sum = 0.f;
        const int64_t keys = a.causal ? std::min(a.lk, i + 1 + a.lk - a.lq) : a.lk;
        std::fill(sum_pv.begin(), sum_pv.end(), 0.f);
        const int64_t steps = (keys + step - 1) / step;
        for (int64_t t = 0; t < steps; t++) {
            const int64_t at = (hopper ? steps - 1 - t : t) * step, n = std::min(step, keys - at);
            float highest = top;
            for (int64_t j = 0; j < n; j++) {
                const float *x = &q8.code[i * dim], *y = &k8.code[(at + j) * dim];
                float dot = 0.f;  // whole numbers below 2^24: exact
                for (int64_t c = 0; c < dim; c++) {
                    dot += x[c] * y[c];
                }
                s[j]    = dot * q8.scale[i] * k8.scale[at + j] * (a.softmax_scale * LOG2E);
                s[j]    = !seen[at + j] ? -INFINITY : bias ? s[j] + bias[at + j] * LOG2E : s[j];
                highest = std::max(highest, s[j]);
            }
            if (highest == -INFINITY) {
                continue;
            }
            const float fade = std::exp2(top - highest);
            top              = highest;
            std::fill(tile_pv.begin(), tile_pv.end(), 0.f);
            sum *= fade;
            for (int64_t j = 0; j < n; j++) {
                const float p    = std::exp2(s[j] - top) * p_max;
                const float code = kernel == SAGE_KERNEL_FP16 ? round_f16(p) : round_e4m3(p);
                sum += hopper ? code : p;
                for (int64_t c = 0; c < dim; c++) {
                    tile_pv[c] += code * v[(at + j) * dim + c];
                    if (kernel == SAGE_KERNEL_FP8PP && j % 32 == 31) {
                        tile_pv[c] = round_f16(tile_pv[c]);  // the instruction accumulates in FP16
                    }
                }
            }
            for (int64_t c = 0; c < dim; c++) {
                sum_pv[c] = sum_pv[c] * fade + tile_pv[c];
            }
        }
        for (int64_t c = 0; c < dim; c++) {
            out[i * a.o.token_stride + c] = sum > 0.f && !broken ? sum_pv[c] / sum * v_scale[c] + v_mean[c] : 0.f;
        }
    }
}

void some_heads(const sage_attn_desc & desc, int ith, int nth) {
    for (int64_t h = ith; h < int64_t(desc.batch) * desc.heads; h += nth) {
        one_head(desc, h / desc.heads, h % desc.heads);
    }
}

void compute(ggml_tensor * node, int ith, int nth, void *) {
    sage_attn_desc desc;
    GGML_ASSERT(read_sage_node(node, &desc));
    some_heads(desc, ith, nth);
}

sage_status query(int, sage_device * device) {
    *device = pretended;
    return SAGE_OK;
}

// Quantizing is no part of its own here, and nothing is left in the workspace.
sage_status run_parts(const sage_attn_desc * desc, void *, size_t, void *, int parts) {
    sage_attn_choice choice = {};
    choice.struct_size      = sizeof(choice);
    if (sage_attn_choose(desc, &pretended, &choice) != SAGE_OK || !choice.supported) {
        return SAGE_UNSUPPORTED;
    }
    sage_attn_desc chosen = *desc;
    chosen.kernel         = choice.kernel;
    if (parts & 2) {
        some_heads(chosen, 0, 1);
    }
    return SAGE_OK;
}

void catch_nothing(std::string *) {}  // arithmetic does not fail

const sdsage::SageBackend on_cpu         = { catch_nothing, query, sage_attn_choose, sage_last_error };
const sdsage::SageLibrary library_on_cpu = { sage_attn_choose, run_parts, sage_last_error };

std::map<std::string, int> neighbours;

const ggml_tensor * producer(const ggml_tensor * t) {
    while (t->op == GGML_OP_VIEW || t->op == GGML_OP_RESHAPE || t->op == GGML_OP_PERMUTE || t->op == GGML_OP_TRANSPOSE) {
        t = t->src[0];
    }
    return t;
}

void look_at(ggml_cgraph * graph) {
    std::vector<const ggml_tensor *> ours;
    for (int i = 0; i < ggml_graph_n_nodes(graph); i++) {
        const ggml_tensor * node = ggml_graph_node(graph, i);
        sage_attn_desc desc;
        if (read_sage_node(node, &desc)) {
            ours.push_back(node);
            for (int j = 0; j < 3; j++) {
                neighbours[std::string(1, "qkv"[j]) + " " + ggml_op_name(producer(node->src[j])->op)]++;
            }
        }
    }
    for (int i = 0; i < ggml_graph_n_nodes(graph); i++) {
        const ggml_tensor * node = ggml_graph_node(graph, i);
        if (producer(node) != node) {
            continue;  // a view
        }
        for (const ggml_tensor * source : node->src) {
            if (source != nullptr && std::count(ours.begin(), ours.end(), producer(source))) {
                neighbours[std::string("o ") + ggml_op_name(node->op)]++;
            }
        }
    }
}

}  // namespace

extern "C" {

void sdsage_test_sage_cpu(int compute_capability, int toolkit, const char * architectures) {
    pretended_architectures = architectures;
    pretended               = { compute_capability, toolkit, pretended_architectures.c_str() };
    if (compute_capability > 0) {
        sdsage::set_cpu_sage(&on_cpu, compute);
        sdsage::set_cpu_sage_library(&library_on_cpu);
        sdsage::set_graph_probe(look_at);
    } else {
        sdsage::set_cpu_sage(nullptr, nullptr);
        sdsage::set_cpu_sage_library(nullptr);
        sdsage::set_graph_probe(nullptr);
    }
}

void sdsage_test_break_sage(bool is_broken) { broken = is_broken; }

const char * sdsage_test_neighbours(void) {
    static std::string text;
    text.clear();
    for (const auto & [what, count] : neighbours) {
        text += what + " " + std::to_string(count) + "\n";
    }
    neighbours.clear();
    return text.c_str();
}

}  // extern "C"
