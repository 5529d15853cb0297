// The search for what levers take: see sdsage_levers.hpp.
#include "levers.h"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <map>
#include <set>
#include <unordered_map>
#include <vector>

#include "ggml_extend_backend.hpp"
#include "sdsage_conv.hpp"
#include "sdsage_seam.hpp"
#include "util.h"

namespace sdsage {
namespace {

constexpr struct {
    const char * name;
    unsigned bit;
} LEVERS[] = { { "linear", LEVER_LINEAR }, { "fuse", LEVER_FUSE }, { "vae", LEVER_VAE }, { "batch", LEVER_BATCH } };

// A layer with fewer inputs or outputs spends its time on reading activations. These are a model's first and last ones, and keep
// their precision.
constexpr int64_t FP8_SIDE = 128;

constexpr int64_t MANY_TOKENS = 1 << 20;

// On a linear layer that ggml computes.
struct LeftMark {
    uint32_t magic;
    const char * why;  // static
};
constexpr uint32_t LEFT_MAGIC = 0x5446454c;
static_assert(LEVER_MARK_OFFSET + sizeof(LeftMark) <= GGML_MAX_OP_PARAMS, "the mark has to fit");

// The CPU backend runs any custom node: a test library registers the arithmetic here.
const LeverBackend * cpu_backend = nullptr;
ggml_custom_op_t cpu_compute     = nullptr;

void compute_on_cpu(ggml_tensor * node, int ith, int nth, void * data) {
    GGML_ASSERT(cpu_compute != nullptr);
    cpu_compute(node, ith, nth, data);
}

const LeverBackend * backend_of(ggml_backend_dev_t dev) {
    if (ggml_backend_dev_type(dev) == GGML_BACKEND_DEVICE_TYPE_CPU) {
        return cpu_backend;
    }
    return static_cast<const LeverBackend *>(ggml_backend_reg_get_proc_address(ggml_backend_dev_backend_reg(dev), SDSAGE_LEVERS_PROC));
}

int ordinal_of(ggml_backend_dev_t dev) {
    const std::string name = ggml_backend_dev_name(dev);  // "CUDA1"
    return std::atoi(name.c_str() + std::min(name.size(), name.find_first_of("0123456789")));
}

// As kernels read it: four numbers at a time.
bool is_f32(const ggml_tensor * t) { return t->type == GGML_TYPE_F32 && ggml_is_contiguous(t) && t->view_offs % 16 == 0; }

bool is_row(const ggml_tensor * t, int64_t n) { return is_f32(t) && t->ne[0] == n && ggml_nelements(t) == n; }

// A row that a block of threads holds in registers.
bool fits_block(int64_t columns) { return columns % 4 == 0 && columns <= 16384; }

bool same_size(const ggml_tensor * a, const ggml_tensor * b) { return is_f32(a) && is_f32(b) && ggml_nelements(a) == ggml_nelements(b); }

bool is_unary(const ggml_tensor * t, ggml_unary_op op) { return t->op == GGML_OP_UNARY && ggml_get_unary_op(t) == op; }

// The other operand of a commutative node.
ggml_tensor * other(const ggml_tensor * node, const ggml_tensor * one) { return node->src[node->src[0] == one ? 1 : 0]; }

class Search {
  public:
    Search(ggml_context * ctx, ggml_cgraph * graph, const LeverBackend & backend, int device, unsigned levers)
        : ctx_(ctx),
          graph_(graph),
          backend_(backend),
          device_(device),
          named_((levers & LEVERS_NAMED) != 0),
          fp8_((levers & LEVER_FP8) != 0) {
        read();
        for (ggml_tensor * node : nodes_) {
            if (users_.count(node) == 0) {
                ends_.push_back(node);
            }
        }
    }

    void fuse() {
        for (ggml_tensor * node : nodes_) {
            if (node->op == GGML_OP_NORM) {
                fuse_norm(node);
            } else if (node->op == GGML_OP_REPEAT) {
                fuse_rope(node);
            }
        }
        rebuild();
    }

    void linear() {
        for (ggml_tensor * node : nodes_) {
            if (node->op != GGML_OP_MUL_MAT || node->src[0]->op != GGML_OP_NONE) {
                continue;
            }
            if (const char * why = why_left(node)) {
                const LeftMark mark = { LEFT_MAGIC, why };
                std::memcpy(reinterpret_cast<char *>(node->op_params) + LEVER_MARK_OFFSET, &mark, sizeof(mark));
            } else {
                layers_.insert(node);
            }
        }
        for (ggml_tensor * node : nodes_) {
            if (layers_.count(node) != 0) {
                fuse_linear(node);
            }
        }
        rebuild();
    }

    void vae() {
        std::set<const ggml_tensor *> inner;
        const Uses uses    = [&](const ggml_tensor * t) { return static_cast<int>(users_.count(t) ? users_.at(t).size() : 0); };
        const auto replace = [&](ggml_tensor * node, const auto & match, const char * what) {
            ggml_tensor probe = *node;
            write_match(&probe, match);
            if (!backend_.supports(device_, &probe)) {
                counts_[std::string(what) + " left to ggml"]++;
                return;
            }
            inner.insert(match.inner.begin(), match.inner.end());
            replace_match(graph_, node, match);
            set_call(node);
            counts_[what]++;
        };
        for (auto node = nodes_.rbegin(); node != nodes_.rend(); ++node) {
            ConvMatch conv;
            ChannelNormMatch norm;
            if (inner.count(*node) != 0) {
                continue;
            }
            if (match_conv(*node, uses, &conv)) {
                replace(*node, conv, "convolutions");
            } else if (match_channel_norm(*node, uses, &norm)) {
                replace(*node, norm, "norms");
            }
        }
        rebuild();
        for (ggml_tensor * node : nodes_) {
            if (node->op == GGML_OP_CONT && copies_in_runs(node)) {
                set(node, { node->src[0] }, { LEVER_MAGIC, LeverOp::copy, 0, 0.f, 0, nullptr });
                counts_["copies"]++;
            }
        }
        copy_parts_early();
    }

    void add_scratch() {
        for (ggml_tensor * node : nodes_) {
            const size_t bytes = node->op == GGML_OP_CUSTOM ? backend_.scratch(device_, node) : 0;
            if (bytes > 0) {
                node->src[SCRATCH_SRC] = ggml_new_tensor_1d(ctx_, GGML_TYPE_I8, static_cast<int64_t>(bytes));
                set(node->src[SCRATCH_SRC], {}, { LEVER_MAGIC, LeverOp::scratch, 0, 0.f, 0, nullptr });
            }
        }
        ggml_graph_clear(graph_);
        for (ggml_tensor * node : nodes_) {
            ggml_build_forward_expand(graph_, node);
        }
    }

    std::string summary() const {
        std::string text;
        for (const auto & [what, n] : counts_) {
            text += (text.empty() ? "" : ", ") + std::to_string(n) + " " + what;
        }
        return text;
    }

  private:
    // A chain of nodes, each the only one that reads the one before; what it computes is written where it ends.
    struct Chain {
        std::vector<ggml_tensor *> nodes;

        ggml_tensor * end() const { return nodes.back(); }
    };

    void read() {
        nodes_.clear();
        users_.clear();
        for (int i = 0; i < ggml_graph_n_nodes(graph_); i++) {
            ggml_tensor * node = ggml_graph_node(graph_, i);
            nodes_.push_back(node);
            for (ggml_tensor * source : node->src) {
                if (source != nullptr) {
                    users_[source].push_back(node);
                }
            }
        }
    }

    // The graph again, without what is no longer needed.
    void rebuild() {
        ggml_graph_clear(graph_);
        for (ggml_tensor * node : ends_) {
            ggml_build_forward_expand(graph_, node);
        }
        read();
    }

    // A copy of a part is made as soon as the whole is there, which need not be kept for it then: the last frames of a chunk, which
    // the next chunk's convolutions read. Depth first they are copied when the next chunk asks for them.
    void copy_parts_early() {
        std::unordered_map<const ggml_tensor *, std::vector<ggml_tensor *>> parts;
        for (ggml_tensor * node : nodes_) {
            LeverMark mark;
            const bool copies         = node->op == GGML_OP_CONT || (read_lever(node, &mark) && mark.op == LeverOp::copy);
            const ggml_tensor * whole = copies ? node->src[0]->view_src : nullptr;
            if (whole != nullptr && ggml_nbytes(node) < ggml_nbytes(whole)) {
                parts[whole].push_back(node);
            }
        }
        ggml_graph_clear(graph_);
        for (ggml_tensor * node : nodes_) {
            ggml_build_forward_expand(graph_, node);
            for (ggml_tensor * part : parts[node]) {
                ggml_build_forward_expand(graph_, part);
            }
        }
        read();
    }

    const std::vector<ggml_tensor *> & users(const ggml_tensor * node) const {
        static const std::vector<ggml_tensor *> none;
        const auto found = users_.find(node);
        return found == users_.end() || (node->flags & GGML_TENSOR_FLAG_OUTPUT) ? none : found->second;
    }

    ggml_tensor * only_user(const ggml_tensor * node) const {
        const auto & all = users(node);
        return all.size() == 1 ? all[0] : nullptr;
    }

    // The only user that changes more than the shape; the reshapes on the way are added to the chain.
    ggml_tensor * next(const Chain & chain, std::vector<ggml_tensor *> * passed) const {
        passed->clear();
        ggml_tensor * user = only_user(chain.end());
        while (user != nullptr && user->op == GGML_OP_RESHAPE) {
            passed->push_back(user);
            user = only_user(user);
        }
        return user;
    }

    // The node that holds the chain's result: the last one, or what it is a view of. nullptr if that is not of this chain.
    static ggml_tensor * holder(const Chain & chain) {
        ggml_tensor * root = chain.end()->view_src != nullptr ? chain.end()->view_src : chain.end();
        return std::find(chain.nodes.begin(), chain.nodes.end(), root) != chain.nodes.end() && root->view_src == nullptr ? root : nullptr;
    }

    // Makes the chain one node. What comes after the holder keeps its place as another shape of it.
    void become(const Chain & chain, const std::vector<ggml_tensor *> & sources, const LeverMark & mark) {
        ggml_tensor * root = holder(chain);
        auto after         = std::find(chain.nodes.begin(), chain.nodes.end(), root) + 1;
        for (ggml_tensor * before = root; after != chain.nodes.end(); before = *after++) {
            ggml_tensor * view = *after;
            std::memset(view->op_params, 0, sizeof(view->op_params));
            std::fill(std::begin(view->src), std::end(view->src), nullptr);
            view->op     = GGML_OP_RESHAPE;
            view->src[0] = before;
        }
        set(root, sources, mark);
    }

    // ggml's own parameters of a custom node
    static void set_call(ggml_tensor * node) {
        struct {
            ggml_custom_op_t fun;
            int n_tasks;
            void * userdata;
        } call = { compute_on_cpu, GGML_N_TASKS_MAX, nullptr };
        static_assert(sizeof(call) <= LEVER_MARK_OFFSET, "they come first");
        std::memcpy(node->op_params, &call, sizeof(call));
    }

    static void set(ggml_tensor * node, const std::vector<ggml_tensor *> & sources, const LeverMark & mark) {
        std::memset(node->op_params, 0, sizeof(node->op_params));
        set_call(node);
        std::memcpy(reinterpret_cast<char *>(node->op_params) + LEVER_MARK_OFFSET, &mark, sizeof(mark));
        std::fill(std::begin(node->src), std::end(node->src), nullptr);
        std::copy(sources.begin(), sources.end(), node->src);
        node->op = GGML_OP_CUSTOM;
    }

    static void set_type(ggml_tensor * node, ggml_type type) {
        node->type  = type;
        node->nb[0] = ggml_type_size(type);
        for (int i = 1; i < GGML_MAX_DIMS; i++) {
            node->nb[i] = node->nb[i - 1] * node->ne[i - 1];
        }
    }

    // norm(x), times w, plus b; or norm(x) + norm(x) * scale, plus shift.
    void fuse_norm(ggml_tensor * norm) {
        ggml_tensor * x = norm->src[0];
        if (!is_f32(x) || norm->view_src != nullptr || !fits_block(x->ne[0])) {
            return;
        }
        float eps;
        std::memcpy(&eps, norm->op_params, sizeof(eps));
        Chain chain                        = { { norm } };
        std::vector<ggml_tensor *> sources = { x };
        int32_t flags                      = 0;
        if (ggml_tensor * user = only_user(norm)) {
            if (user->op == GGML_OP_MUL && user->src[0] == norm && is_row(user->src[1], x->ne[0])) {
                sources.push_back(user->src[1]);
                flags |= NORM_SCALE;
                chain.nodes.push_back(user);
            }
        } else if (users(norm).size() == 2) {
            ggml_tensor *product = users(norm)[0], *sum = users(norm)[1];
            if (product->op == GGML_OP_ADD) {
                std::swap(product, sum);
            }
            if (product->op == GGML_OP_MUL && product->src[0] == norm && product->view_src == nullptr &&
                is_row(product->src[1], x->ne[0]) && sum->op == GGML_OP_ADD && sum->src[0] == norm && sum->src[1] == product &&
                sum->view_src == nullptr && only_user(product) == sum) {
                sources.push_back(product->src[1]);
                flags |= NORM_SCALE | NORM_ONE_PLUS_SCALE;
                chain.nodes.push_back(sum);
            }
        }
        if (flags == 0) {
            return;
        }
        ggml_tensor * shift = only_user(chain.end());
        if (shift != nullptr && shift->op == GGML_OP_ADD && shift->src[0] == chain.end() && is_row(shift->src[1], x->ne[0])) {
            sources.push_back(shift->src[1]);
            flags |= NORM_SHIFT;
            chain.nodes.push_back(shift);
        }
        if (holder(chain) == nullptr) {
            return;
        }
        become(chain, sources, { LEVER_MAGIC, LeverOp::norm, flags, eps, 0, nullptr });
        counts_["norms"]++;
    }

    // Rotary embedding as rope.hpp builds it for pairs of neighbours, from the repeat of the even channels on.
    void fuse_rope(ggml_tensor * even) {
        const auto half = [](const ggml_tensor * repeat) -> const ggml_tensor * {  // the view of one half
            if (repeat->op != GGML_OP_REPEAT || repeat->src[0]->op != GGML_OP_RESHAPE || repeat->src[0]->src[0]->op != GGML_OP_VIEW) {
                return nullptr;
            }
            return repeat->src[0]->src[0];
        };
        ggml_tensor * product = only_user(even);
        if (product == nullptr || product->op != GGML_OP_MUL || product->src[0] != even || product->view_src != nullptr) {
            return;
        }
        ggml_tensor * sum = only_user(product);
        if (sum == nullptr || sum->op != GGML_OP_ADD || sum->src[0] != product || sum->src[1]->op != GGML_OP_MUL ||
            only_user(sum->src[1]) != sum) {
            return;
        }
        const ggml_tensor *x0 = half(even), *x1 = half(sum->src[1]->src[0]);
        const ggml_tensor *pe0 = product->src[1], *pe1 = sum->src[1]->src[1];
        if (x0 == nullptr || x1 == nullptr || x0->src[0] != x1->src[0] || pe0->op != GGML_OP_VIEW || pe1->op != GGML_OP_VIEW ||
            pe0->src[0] != pe1->src[0]) {
            return;
        }
        const ggml_tensor *split    = x0->src[0],
                          *pe_split = pe0->src[0];  // [head_dim / 2, tokens, heads, 2] and [2, head_dim / 2, tokens, 2]
        const auto moved = [](const ggml_tensor * cont, std::array<int, 4> axes) -> ggml_tensor * {  // what a cont of this permute is of
            if (cont->op != GGML_OP_CONT || cont->src[0]->op != GGML_OP_PERMUTE) {
                return nullptr;
            }
            return std::memcmp(cont->src[0]->op_params, axes.data(), sizeof(axes)) == 0 ? cont->src[0]->src[0] : nullptr;
        };
        ggml_tensor *pairs = moved(split, { 3, 0, 1, 2 }), *pe = moved(pe_split, { 3, 0, 1, 2 });
        if (pairs == nullptr || pe == nullptr || pairs->op != GGML_OP_RESHAPE || !is_f32(pe) || pe->ne[0] != 2 || pe->ne[1] != 2 ||
            pairs->ne[0] != 2 || pe->ne[2] != pairs->ne[1] || pe->ne[3] != pairs->ne[2] || x0->view_offs != 0 ||
            x1->view_offs != split->nb[2] * split->ne[2] || pe0->view_offs != 0 || pe1->view_offs != pe_split->nb[2] * pe_split->ne[2]) {
            return;
        }
        ggml_tensor * heads = moved(pairs->src[0], { 0, 2, 1, 3 });  // [head_dim, heads, tokens, batch]
        if (heads == nullptr || !is_f32(heads) || heads->ne[0] != 2 * pairs->ne[1] || heads->ne[2] != pairs->ne[2] ||
            heads->ne[0] % 4 != 0 || !fits_block(heads->ne[0] * heads->ne[1])) {
            return;
        }
        std::vector<ggml_tensor *> sources = { heads, pe };
        LeverMark mark                     = { LEVER_MAGIC, LeverOp::rope, 0, 0.f, static_cast<int32_t>(heads->ne[0]), nullptr };
        // the root mean square over all heads, with its weight
        if (heads->op == GGML_OP_RESHAPE && heads->src[0]->op == GGML_OP_MUL && only_user(heads->src[0]) == heads &&
            heads->src[0]->src[0]->op == GGML_OP_RMS_NORM && only_user(heads->src[0]->src[0]) == heads->src[0] &&
            users(heads).size() == 1) {
            ggml_tensor *product_w = heads->src[0], *norm = product_w->src[0], *w = product_w->src[1];
            if (is_row(w, heads->ne[0] * heads->ne[1]) && norm->ne[0] == w->ne[0] && is_f32(norm->src[0])) {
                sources    = { norm->src[0], pe, w };
                mark.flags = ROPE_NORM;
                std::memcpy(&mark.eps, norm->op_params, sizeof(mark.eps));
            }
        }
        Chain chain = { { product, sum } };
        if (holder(chain) != product) {
            return;
        }
        become(chain, sources, mark);
        counts_["rotary embeddings"]++;
    }

    // ggml copies a strided tensor number by number; what lies together in runs can be copied 16 bytes at a time.
    static bool copies_in_runs(const ggml_tensor * node) {
        const ggml_tensor * x = node->src[0];
        int dims;
        if (x->type != GGML_TYPE_F32 || node->type != GGML_TYPE_F32 || x->nb[0] != sizeof(float) || x->view_offs % 16 != 0 ||
            !ggml_are_same_shape(x, node)) {
            return false;
        }
        const int64_t run = run_of(x, &dims);
        return run >= 64 && run % 4 == 0 &&
               std::all_of(x->nb + dims, x->nb + GGML_MAX_DIMS, [](size_t stride) { return stride % 16 == 0; });
    }

    // Why ggml computes this linear layer; nullptr if we do.
    const char * why_left(const ggml_tensor * node) const {
        const ggml_tensor *w = node->src[0], *x = node->src[1];
        const int64_t tokens = ggml_nrows(x);
        int32_t precision;
        std::memcpy(&precision, node->op_params, sizeof(precision));
        if (precision != GGML_PREC_DEFAULT) {
            return "the model asks for full precision";
        }
        if (w->type == GGML_TYPE_F32 || !backend_.can_convert(w->type)) {
            return w->type == GGML_TYPE_F32 ? "its weights are F32" : "the type of its weights";
        }
        if (!backend_.can_linear(device_) || (!named_ && !backend_.prefers_linear(device_, MANY_TOKENS))) {
            return "ggml's kernels are faster on this GPU";
        }
        if (named_ ? tokens < 2 : !backend_.prefers_linear(device_, tokens)) {
            return "too few tokens";
        }
        const bool takes = w->ne[2] == 1 && w->ne[3] == 1 && ggml_is_contiguous(w) && is_f32(x) && node->type == GGML_TYPE_F32 &&
                           node->view_src == nullptr && w->ne[0] % 8 == 0 && w->ne[1] % 8 == 0 && w->ne[1] >= 64;
        return takes ? nullptr : "its size";
    }

    // Why a layer that is taken is not computed in FP8 although that was asked for; nullptr if it is.
    const char * why_not_fp8(const ggml_tensor * node) const {
        const int64_t k = node->src[0]->ne[0], n = node->src[0]->ne[1];
        if (k < FP8_SIDE || n < FP8_SIDE) {
            return "fewer than 128 inputs or outputs";
        }
        if (!backend_.can_fp8(device_, k, n, ggml_nrows(node->src[1]))) {
            return "the GPU's libraries have no FP8 product of this size";
        }
        return nullptr;
    }

    // x as linear layers read it. In BF16: what made it writes BF16 if only linear layers read it, else a copy that all of them
    // share. In FP8: a copy of either.
    ggml_tensor * operand(ggml_tensor * x, bool fp8) {
        LeverMark mark;
        std::vector<ggml_tensor *> shapes = { x };
        while (shapes.back()->op == GGML_OP_RESHAPE && only_user(shapes.back()->src[0]) == shapes.back()) {
            shapes.push_back(shapes.back()->src[0]);
        }
        // a residual is read in the type of the result
        const bool ours = read_lever(shapes.back(), &mark) &&
                          (mark.op == LeverOp::norm || (mark.op == LeverOp::linear && !(mark.flags & LINEAR_RESIDUAL)));
        const auto & readers = users(x);
        if (ours && !readers.empty() &&
            std::all_of(readers.begin(), readers.end(), [&](const ggml_tensor * t) { return layers_.count(t) != 0; })) {
            for (ggml_tensor * shape : shapes) {
                set_type(shape, GGML_TYPE_BF16);
            }
        }
        if (x->type == GGML_TYPE_BF16 && !fp8) {
            return x;
        }
        ggml_tensor *& node = rounded_[{ x, fp8 }];
        if (node == nullptr) {
            node = fp8 ? ggml_new_tensor_1d(ctx_, GGML_TYPE_I8, ggml_nelements(x) + ggml_nrows(x) * static_cast<int64_t>(sizeof(float)))
                       : ggml_new_tensor(ctx_, GGML_TYPE_BF16, GGML_MAX_DIMS, x->ne);
            set(node, { x }, { LEVER_MAGIC, fp8 ? LeverOp::to_fp8 : LeverOp::to_bf16, 0, 0.f, 0, nullptr });
        }
        return node;
    }

    void fuse_linear(ggml_tensor * product) {
        const int64_t n   = product->ne[0];
        Chain chain       = { { product } };
        ggml_tensor *bias = nullptr, *gate = nullptr, *residual = nullptr;
        int32_t flags = 0;
        std::vector<ggml_tensor *> passed;
        const auto absorb = [&](ggml_tensor * node) {
            Chain longer = chain;
            longer.nodes.insert(longer.nodes.end(), passed.begin(), passed.end());
            longer.nodes.push_back(node);
            if (holder(longer) == nullptr) {
                return false;
            }
            chain = longer;
            return true;
        };
        ggml_tensor * node = next(chain, &passed);
        if (node != nullptr && node->op == GGML_OP_ADD && is_row(node->src[1], n) && node->src[1]->op == GGML_OP_NONE && absorb(node)) {
            bias = node->src[1];
            flags |= LINEAR_BIAS;
            node = next(chain, &passed);
        }
        if (node != nullptr && is_unary(node, GGML_UNARY_OP_GELU) && absorb(node)) {
            flags |= LINEAR_GELU;
            node = next(chain, &passed);
        }
        if ((flags & LINEAR_GELU) == 0) {
            if (node != nullptr && node->op == GGML_OP_MUL && is_row(node->src[1], n) && absorb(node)) {
                gate = node->src[1];
                flags |= LINEAR_GATE;
                node = next(chain, &passed);
            }
            if (node != nullptr && node->op == GGML_OP_ADD && node->view_src == nullptr) {
                ggml_tensor * last = passed.empty() ? chain.end() : passed.back();
                ggml_tensor * rest = other(node, last);
                if (rest != last && same_size(rest, node) && same_size(rest, last) && rest->ne[0] == n && absorb(node)) {
                    residual = rest;
                    flags |= LINEAR_RESIDUAL;
                }
            }
        }
        const char * why_bf16 = fp8_ ? why_not_fp8(product) : nullptr;
        const bool in_fp8     = fp8_ && why_bf16 == nullptr;
        flags |= in_fp8 ? LINEAR_FP8 : 0;
        std::vector<ggml_tensor *> sources = { product->src[0], operand(product->src[1], in_fp8) };
        for (ggml_tensor * more : { bias, gate, residual }) {
            if (more != nullptr) {
                sources.push_back(more);
            }
        }
        become(chain, sources, { LEVER_MAGIC, LeverOp::linear, flags, 0.f, 0, why_bf16 });
        counts_[in_fp8 ? "linear layers in FP8" : "linear layers"]++;
    }

    ggml_context * ctx_;
    ggml_cgraph * graph_;
    const LeverBackend & backend_;
    int device_;
    bool named_, fp8_;
    std::vector<ggml_tensor *> nodes_;
    std::vector<ggml_tensor *> ends_;  // what nothing reads, in the graph's order
    std::unordered_map<const ggml_tensor *, std::vector<ggml_tensor *>> users_;
    std::set<const ggml_tensor *> layers_;                                   // as they were found
    std::map<std::pair<const ggml_tensor *, bool>, ggml_tensor *> rounded_;  // with whether it is in FP8
    std::map<std::string, int> counts_;
};

std::string parse_levers(const char * text, unsigned * levers) {
    const std::string asked = text == nullptr || *text == 0 ? "default" : text;
    *levers                 = 0;
    if (asked == "none") {
        return "";
    }
    for (size_t from = 0; from <= asked.size();) {
        const size_t to        = std::min(asked.find(',', from), asked.size());
        const std::string name = asked.substr(from, to - from);
        from                   = to + 1;
        if (name == "default") {
            *levers |= LEVERS_ALL;
            continue;
        }
        const auto known = std::find_if(std::begin(LEVERS), std::end(LEVERS), [&](const auto & lever) { return name == lever.name; });
        if (known == std::end(LEVERS)) {
            return "engine_levers is '" + asked + "', and there is no lever '" + name +
                   "': it takes 'none', or some of 'default', 'linear', 'fuse', 'vae' and 'batch' joined by commas";
        }
        *levers |= known->bit | (known->bit == LEVER_BATCH ? 0 : LEVERS_NAMED);
    }
    return "";
}

}  // namespace

void set_cpu_levers(const LeverBackend * backend, ggml_custom_op_t compute) {
    cpu_backend = backend;
    cpu_compute = compute;
}

std::string levers_problem(const char * text, bool fast_linear, ggml_backend_dev_t dev, unsigned * levers) {
    const std::string why = parse_levers(text, levers);
    if (!why.empty() || !fast_linear) {
        return why;
    }
    if (!(*levers & LEVER_LINEAR)) {
        return std::string("fast_linear (--fast-linear) is for the lever 'linear', which engine_levers '") + text + "' leaves out";
    }
    *levers |= LEVER_FP8;
    const LeverBackend * ours = backend_of(dev);
    const int device          = ordinal_of(dev);
    constexpr int64_t SIZE    = 4096;  // of any layer
    if (ours != nullptr && ours->can_linear(device) && ours->can_fp8(device, SIZE, SIZE, SIZE)) {
        return (*levers & LEVERS_NAMED) || ours->prefers_linear(device, MANY_TOKENS)
                   ? ""
                   : "fast_linear (--fast-linear) needs the lever 'linear', which this GPU does not get by default: name it in "
                     "engine_levers, as in "
                     "'linear,fuse,vae'";
    }
    return std::string("fast_linear (--fast-linear) can't be used with ") + ggml_backend_dev_description(dev) + ": " +
           (ours == nullptr
                ? "it needs an NVIDIA GPU and sdsage's own CUDA backend"
                : "cuBLASLt multiplies no FP8 matrices with a scale for each row there (compute capability 9.0 can, from cuBLAS 12.9 on)");
}

std::string levers_on(const char * text, ggml_backend_dev_t dev) {
    const LeverBackend * ours = backend_of(dev);
    const int device          = ordinal_of(dev);
    unsigned levers;
    std::string names;
    if (!parse_levers(text, &levers).empty() || ours == nullptr) {
        return names;
    }
    for (const auto & lever : LEVERS) {
        bool used = (levers & lever.bit) != 0;
        if (lever.bit == LEVER_LINEAR) {
            used = used && ours->can_linear(device) && ((levers & LEVERS_NAMED) || ours->prefers_linear(device, MANY_TOKENS));
        } else if (lever.bit == LEVER_VAE) {
            used = used && ours->can_linear(device);  // convolutions and BF16 begin with the same GPUs
        }
        names += used ? (names.empty() ? "" : ",") + std::string(lever.name) : "";
    }
    return names;
}

bool read_levers(const char * text, bool fast_linear, unsigned * levers, ggml_backend_t backend) {
    const auto dev        = ggml_backend_get_device(backend);
    const std::string why = levers_problem(text, fast_linear, dev, levers);
    if (!why.empty()) {
        reject(why);
    } else if ((*levers & LEVERS_NAMED) && (*levers & LEVERS_ALL) && backend_of(dev) == nullptr) {
        LOG_WARN("engine levers %s: %s has none of them, the engine computes all by itself", text, ggml_backend_dev_description(dev));
    }
    return why.empty();
}

void pull_levers(ggml_context * ctx, ggml_backend_t backend, ggml_cgraph * graph, unsigned levers, const std::string & runner) {
    const auto dev            = ggml_backend_get_device(backend);
    const LeverBackend * ours = levers != 0 ? backend_of(dev) : nullptr;
    if (ours == nullptr) {
        return;
    }
    Search search(ctx, graph, *ours, ordinal_of(dev), levers);
    if (levers & LEVER_FUSE) {
        search.fuse();
    }
    if (levers & LEVER_LINEAR) {
        search.linear();
    }
    if (levers & LEVER_VAE) {
        search.vae();
    }
    search.add_scratch();
    LOG_DEBUG("%s: levers: %s", runner.c_str(), search.summary().c_str());
}

void count_levers(ggml_cgraph * graph, Part part) {
    for (int i = 0; i < ggml_graph_n_nodes(graph); i++) {
        const ggml_tensor * node = ggml_graph_node(graph, i);
        LeverMark mark;
        ConvMark conv;
        ChannelNormMark norm;
        if (read_lever(node, &mark)) {
            switch (mark.op) {
                case LeverOp::linear:
                    note_lever(part, mark.flags & LINEAR_FP8 ? "linear fp8" : "linear", mark.why ? mark.why : "");
                    break;
                case LeverOp::norm:
                case LeverOp::rope:
                    note_lever(part, "fuse", "");
                    break;
                case LeverOp::copy:
                    note_lever(part, "vae", "");
                    break;
                case LeverOp::to_bf16:
                case LeverOp::to_fp8:
                case LeverOp::scratch:  // a part of what follows
                    break;
            }
        } else if (read_conv(node, &conv) || read_channel_norm(node, &norm)) {
            note_lever(part, "vae", "");
        } else if (node->op == GGML_OP_MUL_MAT) {
            LeftMark left;
            std::memcpy(&left, reinterpret_cast<const char *>(node->op_params) + LEVER_MARK_OFFSET, sizeof(left));
            if (left.magic == LEFT_MAGIC) {
                note_lever(part, "ggml", left.why);
            }
        }
    }
}

}  // namespace sdsage
