// One attention alone: by the graph that the engine's models build, so that what is timed is what they run. Their graphs have no
// word for three things: SageAttention with a causal mask, its FP16 inputs, and the time of its quantizers. Those go to the kernels'
// own library, on the same tensors.
#include "attention_run.h"

#include <chrono>
#include <climits>
#include <cstring>
#include <deque>
#include <memory>
#include <vector>

#include "ggml-alloc.h"
#include "ggml_extend.hpp"
#include "sdsage_seam.hpp"

#ifdef SDSAGE_SAGE_CUDA
namespace sage {
sage_status run_parts(const sage_attn_desc * desc, void * workspace, size_t workspace_size, void * stream, int parts);
}
#endif

namespace sdsage {
namespace {

using Context = std::unique_ptr<ggml_context, decltype(&ggml_free)>;
using Buffer  = std::unique_ptr<ggml_backend_buffer, decltype(&ggml_backend_buffer_free)>;
using Backend = std::unique_ptr<ggml_backend, decltype(&ggml_backend_free)>;
using Alloc   = std::unique_ptr<ggml_gallocr, decltype(&ggml_gallocr_free)>;

constexpr int QUANTIZE = 1, ATTEND = 2;
constexpr int WARM_UPS     = 2;
constexpr size_t TENSORS   = 64;   // of one graph, and more than it has
constexpr size_t ALIGNMENT = 256;  // of the kernels' workspace

const SageLibrary * cpu_library = nullptr;

const SageLibrary * sage_library(ggml_backend_t backend) {
    if (ggml_backend_dev_type(ggml_backend_get_device(backend)) == GGML_BACKEND_DEVICE_TYPE_CPU) {
        return cpu_library;
    }
#ifdef SDSAGE_SAGE_CUDA
    static const SageLibrary on_gpu = { sage_attn_choose, sage::run_parts, sage_last_error };
    return &on_gpu;
#else
    return nullptr;
#endif
}

thread_local std::deque<std::string> reasons;  // handed out; a deque does not move them

double since(std::chrono::steady_clock::time_point begin) {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

Buffer allocate(ggml_backend_t backend, size_t size) {
    return Buffer(ggml_backend_buft_alloc_buffer(ggml_backend_get_default_buffer_type(backend), size), ggml_backend_buffer_free);
}

std::string why_no_memory(ggml_backend_t backend) {
    size_t free = 0, total = 0;
    ggml_backend_dev_memory(ggml_backend_get_device(backend), &free, &total);
    return "it needs more memory than there is (" + std::to_string(free >> 20) + " MiB are free)";
}

// What all methods read. q and k are [dim, tokens, heads * batch] as rotary embedding leaves them, v [dim, heads, tokens, batch] as a
// linear layer does; a mask is [lk, lq] or [lk, 1].
struct Inputs {
    const sdsage_attention_problem_t & p;
    Context ctx    = { nullptr, ggml_free };
    Buffer buffer  = { nullptr, ggml_backend_buffer_free };
    ggml_tensor *q = nullptr, *k = nullptr, *v = nullptr, *bias = nullptr, *mask = nullptr;

    explicit Inputs(const sdsage_attention_problem_t & problem) : p(problem) {}

    bool upload(ggml_backend_t backend) {
        ctx.reset(ggml_init({ ggml_tensor_overhead() * TENSORS, nullptr, true }));
        const ggml_type type = p.half ? GGML_TYPE_F16 : GGML_TYPE_F32;
        q                    = ggml_new_tensor_3d(ctx.get(), type, p.head_dim, p.lq, p.heads * p.batch);
        k                    = ggml_new_tensor_3d(ctx.get(), type, p.head_dim, p.lk, p.kv_heads * p.batch);
        v                    = ggml_new_tensor_4d(ctx.get(), type, p.head_dim, p.kv_heads, p.lk, p.batch);
        if (p.bias != nullptr) {
            bias = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_F32, p.lk, 1);
        }
        mask = p.causal ? ggml_new_tensor_2d(ctx.get(), GGML_TYPE_F32, p.lk, p.lq) : bias;
        buffer.reset(ggml_backend_alloc_ctx_tensors(ctx.get(), backend));
        if (buffer == nullptr) {
            return false;
        }
        ggml_backend_tensor_set(q, p.q, 0, ggml_nbytes(q));
        ggml_backend_tensor_set(k, p.k, 0, ggml_nbytes(k));
        ggml_backend_tensor_set(v, p.v, 0, ggml_nbytes(v));
        if (bias != nullptr) {
            ggml_backend_tensor_set(bias, p.bias, 0, ggml_nbytes(bias));
        }
        if (p.causal) {
            std::vector<float> row(p.lk);
            for (int64_t i = 0; i < p.lq; i++) {
                for (int64_t j = 0; j < p.lk; j++) {
                    row[j] = j > i + p.lk - p.lq ? -INFINITY : p.bias ? p.bias[j] : 0.f;
                }
                ggml_backend_tensor_set(mask, row.data(), i * mask->nb[1], mask->nb[1]);
            }
        }
        return true;
    }
};

// One way to compute it, ready to run; the result is [dim, heads, lq, batch].
class Runner {
  public:
    virtual ~Runner() = default;
    // An empty text, or why it does not run here.
    virtual std::string prepare(ggml_backend_t backend, Inputs & in) = 0;
    virtual bool run(std::string * why)                              = 0;
    virtual bool quantize(std::string * /*why*/) { return false; }

    const char * kernel  = "";
    ggml_tensor * result = nullptr;

  protected:
    ggml_backend_t backend_ = nullptr;
};

// By the engine's own function for attention.
class Graph : public Runner {
  public:
    explicit Graph(int setting) : setting_(setting) {}

    std::string prepare(ggml_backend_t backend, Inputs & in) override {
        backend_ = backend;
        ctx_.reset(ggml_init({ ggml_tensor_overhead() * TENSORS + ggml_graph_overhead(), nullptr, true }));
        const bool sage    = (setting_ & ATTN_SAGE) != 0;
        ggml_tensor * q    = in.p.half ? ggml_cast(ctx_.get(), in.q, GGML_TYPE_F32) : in.q;
        ggml_tensor * mask = in.mask;
        ggml_tensor * out  = ggml_ext_attention_ext(ctx_.get(), backend, q, in.k, in.v, in.p.heads, mask, true, setting_, 1.f);
        graph_             = ggml_new_graph(ctx_.get());
        ggml_build_forward_expand(graph_, out);
        const AttentionMark mark = find_mark();
        const Method wanted      = sage ? Method::sage : setting_ ? Method::flash : Method::ordinary;
        if (mark.method != wanted) {
            return mark.why ? mark.why : "ggml's FlashAttention does not take this case on this device";
        }
        kernel = sage ? sage_kernel_text(mark.kernel) : setting_ ? "flash" : "plain";
        for (int i = 0; i < ggml_graph_n_nodes(graph_); i++) {
            const ggml_tensor * node = ggml_graph_node(graph_, i);
            if (!ggml_backend_supports_op(backend, node)) {
                return std::string("this device has no ") + ggml_op_desc(node) + " for this case";
            }
        }
        // The result has a buffer of its own, which is filled with NaN before it counts.
        result   = out->view_src ? out->view_src : out;
        output_  = allocate(backend, ggml_backend_buft_get_alloc_size(ggml_backend_get_default_buffer_type(backend), result));
        compute_ = Alloc(ggml_gallocr_new(ggml_backend_get_default_buffer_type(backend)), ggml_gallocr_free);
        if (output_ == nullptr ||
            ggml_backend_tensor_alloc(output_.get(), result, ggml_backend_buffer_get_base(output_.get())) != GGML_STATUS_SUCCESS ||
            !ggml_gallocr_alloc_graph(compute_.get(), graph_)) {
            return why_no_memory(backend);
        }
        const auto reg = ggml_backend_dev_backend_reg(ggml_backend_get_device(backend));
        nodes_         = static_cast<const SageBackend *>(ggml_backend_reg_get_proc_address(reg, SDSAGE_SAGE_PROC));
        return "";
    }

    bool run(std::string * why) override {
        if (nodes_ != nullptr) {
            nodes_->catch_failure(why);
        }
        const ggml_status status = ggml_backend_graph_compute(backend_, graph_);
        if (nodes_ != nullptr) {
            nodes_->catch_failure(nullptr);
        }
        if (status != GGML_STATUS_SUCCESS && why->empty()) {
            *why = std::string("ggml could not compute the graph (") + ggml_status_to_string(status) + ")";
        }
        return why->empty();
    }

  private:
    AttentionMark find_mark() const {
        AttentionMark mark = {};
        for (int i = 0; i < ggml_graph_n_nodes(graph_); i++) {
            if (read_mark(ggml_graph_node(graph_, i), &mark)) {
                break;
            }
        }
        return mark;
    }

    int setting_;
    Context ctx_               = { nullptr, ggml_free };
    ggml_cgraph * graph_       = nullptr;
    Buffer output_             = { nullptr, ggml_backend_buffer_free };
    Alloc compute_             = { nullptr, ggml_gallocr_free };
    const SageBackend * nodes_ = nullptr;
};

// By the kernels' library.
class Direct : public Runner {
  public:
    explicit Direct(sage_kernel kernel) : wanted_(kernel) {}

    std::string prepare(ggml_backend_t backend, Inputs & in) override {
        backend_ = backend;
        library_ = sage_library(backend);
        if (library_ == nullptr) {
            return "this build has no library of SageAttention's kernels";
        }
        const SageInfo info = sage_info(ggml_backend_get_device(backend), wanted_);
        ctx_.reset(ggml_init({ ggml_tensor_overhead() * TENSORS, nullptr, true }));
        result  = ggml_new_tensor_4d(ctx_.get(), GGML_TYPE_F32, in.p.head_dim, in.p.heads, in.p.lq, in.p.batch);
        output_ = Buffer(ggml_backend_alloc_ctx_tensors(ctx_.get(), backend), ggml_backend_buffer_free);
        if (output_ == nullptr) {
            return why_no_memory(backend);
        }
        describe(in);
        sage_attn_choice choice = {};
        choice.struct_size      = sizeof(choice);
        if (library_->choose(&desc_, &info.device, &choice) != SAGE_OK) {
            return library_->last_error();
        }
        if (!choice.supported) {
            return choice.reason;
        }
        kernel = sage_kernel_text(choice.kernel);
        // of a tensor as well: only these have an address on every backend
        const size_t bytes = choice.workspace + ALIGNMENT;
        work_ctx_.reset(ggml_init({ ggml_tensor_overhead() * TENSORS, nullptr, true }));
        ggml_tensor * work = ggml_new_tensor_1d(work_ctx_.get(), GGML_TYPE_I8, static_cast<int64_t>(bytes));
        work_              = Buffer(ggml_backend_alloc_ctx_tensors(work_ctx_.get(), backend), ggml_backend_buffer_free);
        if (work_ == nullptr) {
            return why_no_memory(backend);
        }
        workspace_ = reinterpret_cast<void *>((reinterpret_cast<uintptr_t>(work->data) + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT);
        size_      = choice.workspace;
        return "";
    }

    bool run(std::string * why) override { return launch(QUANTIZE | ATTEND, why); }
    bool quantize(std::string * why) override { return launch(QUANTIZE, why); }

  private:
    void describe(const Inputs & in) {
        const auto & p        = in.p;
        const sage_dtype type = p.half ? SAGE_F16 : SAGE_F32;
        const int64_t d       = p.head_dim;
        desc_                 = {};
        desc_.struct_size     = sizeof(desc_);
        desc_.kernel          = wanted_;
        desc_.batch           = static_cast<int32_t>(p.batch);
        desc_.heads           = static_cast<int32_t>(p.heads);
        desc_.kv_heads        = static_cast<int32_t>(p.kv_heads);
        desc_.head_dim        = static_cast<int32_t>(d);
        desc_.lq              = p.lq;
        desc_.lk              = p.lk;
        desc_.softmax_scale   = 1.f / std::sqrt(static_cast<float>(d));
        desc_.causal          = p.causal;
        desc_.bias            = in.bias ? static_cast<const float *>(in.bias->data) : nullptr;
        desc_.q               = { in.q->data, type, p.heads * p.lq * d, p.lq * d, d };
        desc_.k               = { in.k->data, type, p.kv_heads * p.lk * d, p.lk * d, d };
        desc_.v               = { in.v->data, type, p.lk * p.kv_heads * d, d, p.kv_heads * d };
        desc_.o               = { result->data, SAGE_F32, p.lq * p.heads * d, d, p.heads * d };
    }

    // The device is current in this thread, since its memory was allocated and written here. The stream is CUDA's default one, which
    // the reading of a tensor waits for.
    bool launch(int parts, std::string * why) {
        if (library_->run_parts(&desc_, workspace_, size_, nullptr, parts) != SAGE_OK) {
            *why = library_->last_error();
            return false;
        }
        float first = 0;
        ggml_backend_tensor_get(result, &first, 0, sizeof(first));
        return true;
    }

    sage_kernel wanted_;
    const SageLibrary * library_ = nullptr;
    sage_attn_desc desc_         = {};
    Context ctx_ = { nullptr, ggml_free }, work_ctx_ = { nullptr, ggml_free };
    Buffer output_ = { nullptr, ggml_backend_buffer_free }, work_ = { nullptr, ggml_backend_buffer_free };
    void * workspace_ = nullptr;
    size_t size_      = 0;
};

struct Prepared {
    sdsage_attention_method_t & method;
    std::unique_ptr<Runner> runner;
    std::unique_ptr<Direct> parts;  // for the time of the quantizers
};

bool parse_kernel(const char * name, sage_kernel * kernel) {
    for (sage_kernel known : { SAGE_KERNEL_AUTO, SAGE_KERNEL_FP16, SAGE_KERNEL_FP8, SAGE_KERNEL_FP8PP, SAGE_KERNEL_HOPPER }) {
        if (std::strcmp(name, sage_kernel_text(known)) == 0) {
            *kernel = known;
            return true;
        }
    }
    return false;
}

std::string whats_wrong(const sdsage_attention_problem_t & p, const sdsage_attention_method_t * methods, int count, int repeats) {
    const struct {
        const char * name;
        int64_t value;
    } sizes[] = { { "batch", p.batch }, { "heads", p.heads },       { "kv_heads", p.kv_heads }, { "lq", p.lq },
                  { "lk", p.lk },       { "head_dim", p.head_dim }, { "methods", count },       { "repeats", repeats } };
    for (const auto & size : sizes) {
        if (size.value < 1 || size.value > INT_MAX) {
            return std::string(size.name) + " is " + std::to_string(size.value) + ": it takes a number from 1 to 2147483647";
        }
    }
    if (p.heads % p.kv_heads != 0) {
        return "heads " + std::to_string(p.heads) + " is not a multiple of kv_heads " + std::to_string(p.kv_heads);
    }
    const double elements = double(p.batch) * p.heads * std::max(p.lq, p.lk) * p.head_dim;
    if (elements > 1e12 || (p.causal && double(p.lq) * p.lk > 1e12)) {
        return "an attention of " + std::to_string(elements) + " elements is too large: it takes at most 1e12";
    }
    if (p.q == nullptr || p.k == nullptr || p.v == nullptr || methods == nullptr) {
        return "q, k, v or the methods are NULL: all are needed";
    }
    return "";
}

// Fills `all` with those methods that run here; the others have their reason. False: the job has failed.
bool prepare(std::vector<Prepared> & all, ggml_backend_t backend, Inputs & in, sdsage_attention_method_t * methods, int count) {
    for (int i = 0; i < count; i++) {
        auto & method       = methods[i];
        const char * name   = method.method ? method.method : "";
        sage_kernel kernel  = SAGE_KERNEL_AUTO;
        method.emulated     = false;
        const bool is_sage  = parse_kernel(name, &kernel);
        const bool is_flash = std::strcmp(name, "flash") == 0;
        if (!is_sage && !is_flash && std::strcmp(name, "plain") != 0) {
            reject(std::string("attention has no method '") + name + "': it takes plain, flash, auto, fp16, fp8, fp8++ or hopper");
            return false;
        }
        std::unique_ptr<Runner> runner;
        if (is_sage) {
            const SageInfo info = sage_info(ggml_backend_get_device(backend), kernel);
            if (!info.why.empty()) {
                sage_unavailable(info.why);
                return false;
            }
            method.emulated = info.choice.emulated != 0;
        }
        if (is_sage && (in.p.causal || in.p.half)) {
            runner = std::make_unique<Direct>(kernel);
        } else {
            runner = std::make_unique<Graph>(is_sage ? sage_setting(kernel) : is_flash ? ATTN_FLASH : 0);
        }
        std::string why = runner->prepare(backend, in);
        std::unique_ptr<Direct> parts;
        if (why.empty() && is_sage && method.quantize_seconds != nullptr) {
            parts = std::make_unique<Direct>(kernel);
            why   = parts->prepare(backend, in);
        }
        method.kernel = why.empty() ? runner->kernel : "";
        reasons.push_back(why);
        method.why = reasons.back().c_str();
        if (why.empty()) {
            all.push_back({ method, std::move(runner), std::move(parts) });
        }
    }
    return true;
}

// One round of all methods, so that what slows the machine down slows all of them down. `at` below 0: to get warm.
bool one_round(std::vector<Prepared> & all, int at, bool is_last) {
    for (Prepared & one : all) {
        std::string why;
        if (is_last) {  // what is not written stays NaN
            ggml_backend_tensor_memset(one.runner->result, 0xff, 0, ggml_nbytes(one.runner->result));
        }
        auto begin         = std::chrono::steady_clock::now();
        bool ran           = one.runner->run(&why);
        const double whole = since(begin);
        double quantizers  = 0;
        if (ran && one.parts != nullptr && one.method.quantize_seconds != nullptr) {
            begin      = std::chrono::steady_clock::now();
            ran        = one.parts->quantize(&why);
            quantizers = since(begin);
        }
        if (!ran) {
            fail(std::string("attention by ") + one.method.method + " failed: " + why);
            return false;
        }
        if (at >= 0 && one.method.seconds != nullptr) {
            one.method.seconds[at] = whole;
        }
        if (at >= 0 && one.method.quantize_seconds != nullptr) {
            one.method.quantize_seconds[at] = quantizers;
        }
    }
    return true;
}

}  // namespace

void set_cpu_sage_library(const SageLibrary * library) { cpu_library = library; }

bool run_attention(const sdsage_attention_problem_t & problem, sdsage_attention_method_t * methods, int count, int repeats) {
    const std::string wrong = whats_wrong(problem, methods, count, repeats);
    if (!wrong.empty()) {
        reject(wrong);
        return false;
    }
    reasons.clear();
    Backend backend(sd_get_default_backend(), ggml_backend_free);
    if (backend == nullptr) {
        fail("the device could not be initialised");
        return false;
    }
    if (ggml_backend_dev_type(ggml_backend_get_device(backend.get())) == GGML_BACKEND_DEVICE_TYPE_CPU) {
        ggml_backend_cpu_set_n_threads(backend.get(), sd_get_num_physical_cores());
    }
    Inputs in(problem);
    if (!in.upload(backend.get())) {
        fail("q, k and v: " + why_no_memory(backend.get()));
        return false;
    }
    std::vector<Prepared> all;
    if (!prepare(all, backend.get(), in, methods, count)) {
        return false;
    }
    for (int at = -WARM_UPS; at < repeats; at++) {
        if (!one_round(all, at, at == repeats - 1)) {
            return false;
        }
    }
    for (Prepared & one : all) {
        if (one.method.out != nullptr) {
            ggml_backend_tensor_get(one.runner->result, one.method.out, 0, ggml_nbytes(one.runner->result));
        }
    }
    return true;
}

}  // namespace sdsage
