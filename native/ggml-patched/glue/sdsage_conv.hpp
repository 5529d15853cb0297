// The VAE's convolutions and norms in stable-diffusion.cpp's graphs, as one GGML_OP_CUSTOM each (cuda/conv_node.cu runs them).
//
// A chain of ggml's nodes is found from the node it ends with, and that node becomes the custom node in place: its users keep
// their pointer. Look at the nodes of a graph from the last to the first: the longest chain is then met first.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <initializer_list>
#include <vector>

#include "ggml.h"

namespace sdsage {

constexpr size_t CONV_MARK_OFFSET = 32;  // as MARK_OFFSET of sdsage_attention.hpp
constexpr uint32_t CONV_MAGIC = 0x564e4f43, CHANNEL_NORM_MAGIC = 0x4d524e43;

// A node's src: x, weight F16, then bias F32 and cache as the flags say. Dimensions in the order width, height, frames.
struct ConvMark {
    uint32_t magic;
    int32_t ic;
    uint8_t stride[3], before[3], after[3];  // before, after: zeros around concat(cache, x)
    uint8_t upscale;                         // 2: x is enlarged first, each pixel to 2 x 2
    uint8_t flags;
};
constexpr uint8_t CONV_BIAS         = 1;
constexpr uint8_t CONV_CACHE        = 2;  // frames before x
constexpr uint8_t CONV_PICTURES_IN  = 4;  // x is [W, H, C, N], else [W, H, frames, C]
constexpr uint8_t CONV_PICTURES_OUT = 8;  // so is the result

// src: x [W, H, frames, C], gamma [C]. Result: x / sqrt(mean over C of x^2 + eps) * gamma, then SiLU if asked for.
struct ChannelNormMark {
    uint32_t magic;
    float eps;
    int32_t silu;
};
static_assert(CONV_MARK_OFFSET + std::max(sizeof(ConvMark), sizeof(ChannelNormMark)) <= GGML_MAX_OP_PARAMS, "the marks have to fit");

template <class Mark>
bool read_conv_mark(const ggml_tensor * node, uint32_t magic, Mark * mark) {
    std::memcpy(mark, reinterpret_cast<const char *>(node->op_params) + CONV_MARK_OFFSET, sizeof(*mark));
    return node->op == GGML_OP_CUSTOM && mark->magic == magic;
}
inline bool read_conv(const ggml_tensor * node, ConvMark * mark) { return read_conv_mark(node, CONV_MAGIC, mark); }
inline bool read_channel_norm(const ggml_tensor * node, ChannelNormMark * mark) { return read_conv_mark(node, CHANNEL_NORM_MAGIC, mark); }

// How many nodes of the graph have a tensor as a source.
using Uses = std::function<int(const ggml_tensor *)>;

template <class Mark>
struct Match {
    Mark mark;
    std::vector<ggml_tensor *> src;
    std::vector<ggml_tensor *> inner;  // nodes that nothing needs any more
};
using ConvMatch        = Match<ConvMark>;
using ChannelNormMatch = Match<ChannelNormMark>;

// Makes `node` the custom node. For asking a backend beforehand, `node` may be a copy of the chain's end.
template <class Mark>
void write_match(ggml_tensor * node, const Match<Mark> & match) {
    node->op        = GGML_OP_CUSTOM;
    node->view_src  = nullptr;
    node->view_offs = 0;
    std::memset(node->op_params, 0, sizeof(node->op_params));
    std::memcpy(reinterpret_cast<char *>(node->op_params) + CONV_MARK_OFFSET, &match.mark, sizeof(match.mark));
    std::fill(std::begin(node->src), std::end(node->src), nullptr);
    std::copy(match.src.begin(), match.src.end(), node->src);
}

// The same for a graph's node: what views it, as an in-place node, by way of the tensor it was computed in, now views the node.
template <class Mark>
void replace_match(ggml_cgraph * graph, ggml_tensor * node, const Match<Mark> & match) {
    const ggml_tensor * root = node->view_src;
    write_match(node, match);
    for (int i = ggml_graph_n_nodes(graph) - 1; root != nullptr && i >= 0 && ggml_graph_node(graph, i) != node; i--) {
        ggml_tensor * user = ggml_graph_node(graph, i);
        if (user->view_src == root) {
            user->view_src = node;
        }
    }
}

namespace conv_detail {

// Walks from a chain's end towards its inputs, over nodes that nothing else reads.
class Walk {
  public:
    explicit Walk(const Uses * uses) : uses_(uses) {}
    std::vector<ggml_tensor *> inner;

    bool takes(ggml_tensor * t) const { return t != nullptr && !(t->flags & GGML_TENSOR_FLAG_OUTPUT) && (*uses_)(t) == 1; }
    // The first source of `t`, when `t` is an `op` of this chain alone, else nullptr.
    ggml_tensor * through(ggml_tensor * t, ggml_op op) {
        if (!takes(t) || t->op != op) {
            return nullptr;
        }
        inner.push_back(t);
        return t->src[0];
    }

  private:
    const Uses * uses_;
};

inline int32_t param(const ggml_tensor * t, int i) { return t->op_params[i]; }

inline bool permutes(const ggml_tensor * t, std::initializer_list<int32_t> axes) {
    return t != nullptr && t->op == GGML_OP_PERMUTE && std::equal(axes.begin(), axes.end(), t->op_params);
}

// F32 with the rows of a plane one behind another; planes may lie anywhere.
inline bool is_planar(const ggml_tensor * t) {
    return t->type == GGML_TYPE_F32 && t->nb[0] == sizeof(float) && t->nb[1] == sizeof(float) * t->ne[0];
}

// A vector [n] that is added or multiplied along `dim`, as it was before it was reshaped for that; else nullptr.
inline ggml_tensor * vector_along(ggml_tensor * t, int dim, int64_t n, Walk * walk) {
    if (t->type != GGML_TYPE_F32 || t->ne[dim] != n || ggml_nelements(t) != n || !ggml_is_contiguous(t)) {
        return nullptr;
    }
    if (t->op == GGML_OP_RESHAPE && walk->takes(t)) {
        return walk->through(t, GGML_OP_RESHAPE);
    }
    return t;
}

// Takes a copy, an enlargement, padding or a concat of frames before the convolution into the match, as far as nothing else reads them.
inline ggml_tensor * match_copy(ggml_tensor * x, Walk * walk) {
    if (x->op == GGML_OP_CONT && walk->takes(x) && ggml_are_same_shape(x, x->src[0]) && is_planar(x->src[0])) {
        return walk->through(x, GGML_OP_CONT);
    }
    return x;
}

inline ggml_tensor * match_pad(ggml_tensor * x, ConvMark * mark, Walk * walk) {
    constexpr int CIRCULAR = 8;  // after zeros before and after each of 4 dimensions
    const int dims         = mark->flags & CONV_PICTURES_IN ? 2 : 3;
    if (x->op != GGML_OP_PAD || !walk->takes(x) || !is_planar(x->src[0]) || param(x, CIRCULAR) != 0) {
        return x;
    }
    for (int i = 0; i < 2 * GGML_MAX_DIMS; i++) {
        if (param(x, i) < 0 || param(x, i) > (i / 2 < dims ? 100 : 0)) {
            return x;
        }
    }
    for (int i = 0; i < dims; i++) {
        mark->before[i] = static_cast<uint8_t>(mark->before[i] + param(x, 2 * i));
        mark->after[i]  = static_cast<uint8_t>(mark->after[i] + param(x, 2 * i + 1));
    }
    return walk->through(x, GGML_OP_PAD);
}

inline ggml_tensor * match_upscale(ggml_tensor * x, ConvMark * mark, Walk * walk) {
    if (x->op != GGML_OP_UPSCALE || !walk->takes(x)) {
        return x;
    }
    const ggml_tensor * from = x->src[0];
    if (param(x, 0) != GGML_SCALE_MODE_NEAREST || !is_planar(from) || x->ne[0] != 2 * from->ne[0] || x->ne[1] != 2 * from->ne[1] ||
        x->ne[2] != from->ne[2] || x->ne[3] != from->ne[3]) {
        return x;
    }
    mark->upscale = 2;
    return walk->through(x, GGML_OP_UPSCALE);
}

// The chain of ggml_ext_conv_2d or ggml_ext_conv_3d that ends with `t`, without what was done to its input before.
inline bool match_product(ggml_tensor * t, Walk * walk, ConvMatch * match, ggml_tensor ** x) {
    ggml_tensor *last = t, *bias = nullptr;
    if (t->op == GGML_OP_ADD) {
        last = t->src[0];
        bias = t->src[1];
        if (!walk->takes(last)) {
            return false;
        }
        walk->inner.push_back(last);
    }
    const bool frames = last->op == GGML_OP_RESHAPE;  // a 3-D one ends with a reshape, a 2-D one with the copy before it
    ggml_tensor * at  = frames ? walk->through(last->src[0], GGML_OP_CONT) : last->op == GGML_OP_CONT ? last->src[0] : nullptr;
    if (!permutes(at, { 0, 1, 3, 2 }) || (at = walk->through(at, GGML_OP_PERMUTE)) == nullptr ||
        (at = walk->through(at, GGML_OP_RESHAPE)) == nullptr || at->op != GGML_OP_MUL_MAT) {
        return false;
    }
    ggml_tensor * weight = at->src[1];
    if ((at = walk->through(at, GGML_OP_MUL_MAT)) == nullptr || (at = walk->through(at, GGML_OP_RESHAPE)) == nullptr ||
        at->op != (frames ? GGML_OP_IM2COL_3D : GGML_OP_IM2COL) || weight->op != GGML_OP_RESHAPE || weight->src[0] != at->src[0] ||
        !walk->takes(at)) {
        return false;
    }
    walk->inner.push_back(at);
    if (walk->takes(weight)) {
        walk->inner.push_back(weight);
    }
    weight = at->src[0];
    *x     = at->src[1];

    const int dims = frames ? 3 : 2;  // op_params: strides, padding, dilation, then channels or whether it is 2-D
    ConvMark mark  = {};
    mark.magic     = CONV_MAGIC;
    mark.upscale   = 1;
    mark.flags     = static_cast<uint8_t>((bias ? CONV_BIAS : 0) | (frames ? 0 : CONV_PICTURES_IN | CONV_PICTURES_OUT));
    mark.stride[2] = 1;
    for (int i = 0; i < dims; i++) {
        const int32_t stride = param(at, i), padding = param(at, dims + i), dilation = param(at, 2 * dims + i);
        if (stride < 1 || stride > 100 || padding < 0 || padding > 100 || dilation != 1) {
            return false;
        }
        mark.stride[i] = static_cast<uint8_t>(stride);
        mark.before[i] = mark.after[i] = static_cast<uint8_t>(padding);
    }
    mark.ic          = frames ? param(at, 3 * dims) : static_cast<int32_t>(weight->ne[2]);
    const int64_t oc = frames ? weight->ne[3] / mark.ic : weight->ne[3];
    const int along  = frames ? 3 : 2;
    if ((frames ? weight->ne[3] % mark.ic != 0 : param(at, 3 * dims) != 1) || (*x)->ne[along] != mark.ic ||  // one batch of frames
        weight->type != GGML_TYPE_F16 || !ggml_is_contiguous(weight) || t->ne[along] != oc || !is_planar(*x)) {
        return false;
    }
    if (bias != nullptr && (bias = vector_along(bias, along, oc, walk)) == nullptr) {
        return false;
    }
    match->mark = mark;
    match->src  = { nullptr, weight };
    if (bias != nullptr) {
        match->src.push_back(bias);
    }
    return t->type == GGML_TYPE_F32 && ggml_is_contiguous(t) && t->view_offs == 0;
}

}  // namespace conv_detail

// Whether a convolution ends with `end`, and what goes into it. Pictures [W, H, C, N] that are copied to [W, H, N, C] afterwards
// are written there at once.
inline bool match_conv(ggml_tensor * end, const Uses & uses, ConvMatch * match) {
    using namespace conv_detail;
    ggml_tensor * x = nullptr;
    Walk walk(&uses);
    bool found = false;
    if (end->op == GGML_OP_CONT && permutes(end->src[0], { 0, 1, 3, 2 }) && ggml_are_same_shape(end, end->src[0])) {
        ggml_tensor * result = walk.through(end->src[0], GGML_OP_PERMUTE);
        found =
            result != nullptr && walk.takes(result) && match_product(result, &walk, match, &x) && (match->mark.flags & CONV_PICTURES_IN);
        if (found) {
            walk.inner.push_back(result);
            match->mark.flags &= static_cast<uint8_t>(~CONV_PICTURES_OUT);
        }
    }
    if (!found) {
        walk = Walk(&uses);
        if (!match_product(end, &walk, match, &x)) {
            return false;
        }
    }
    x = match_pad(x, &match->mark, &walk);
    if (!(match->mark.flags & CONV_PICTURES_IN) && x->op == GGML_OP_CONCAT && param(x, 0) == 2 && walk.takes(x) && is_planar(x->src[0]) &&
        is_planar(x->src[1])) {
        match->mark.flags |= CONV_CACHE;
        match->src.push_back(x->src[0]);
        walk.inner.push_back(x);
        x = x->src[1];
    } else {
        x = match_upscale(x, &match->mark, &walk);
    }
    match->src[0] = match_copy(x, &walk);
    match->inner  = walk.inner;
    return true;
}

// Whether a norm over channels ends with `end`: permute, copy, RMS norm, times gamma, permute back, copy, and SiLU if it follows.
inline bool match_channel_norm(ggml_tensor * end, const Uses & uses, ChannelNormMatch * match) {
    using namespace conv_detail;
    Walk walk(&uses);
    const bool silu  = end->op == GGML_OP_UNARY && ggml_get_unary_op(end) == GGML_UNARY_OP_SILU;
    ggml_tensor * at = silu ? walk.through(end->src[0], GGML_OP_CONT) : end->op == GGML_OP_CONT ? end->src[0] : nullptr;
    if (!permutes(at, { 3, 0, 1, 2 }) || (at = walk.through(at, GGML_OP_PERMUTE)) == nullptr || at->op != GGML_OP_MUL) {
        return false;
    }
    ggml_tensor * gamma = at->src[1];
    if ((at = walk.through(at, GGML_OP_MUL)) == nullptr || at->op != GGML_OP_RMS_NORM) {
        return false;
    }
    float eps;
    std::memcpy(&eps, at->op_params, sizeof(eps));
    if ((at = walk.through(at, GGML_OP_RMS_NORM)) == nullptr || (at = walk.through(at, GGML_OP_CONT)) == nullptr ||
        !permutes(at, { 1, 2, 3, 0 }) || (at = walk.through(at, GGML_OP_PERMUTE)) == nullptr) {
        return false;
    }
    if (at->type != GGML_TYPE_F32 || !ggml_is_contiguous(at) || !ggml_are_same_shape(at, end) || !ggml_is_contiguous(end) ||
        end->view_offs != 0 || (gamma = vector_along(gamma, 0, at->ne[3], &walk)) == nullptr) {
        return false;
    }
    match->mark  = { CHANNEL_NORM_MAGIC, eps, silu };
    match->src   = { at, gamma };
    match->inner = walk.inner;
    return true;
}

}  // namespace sdsage
