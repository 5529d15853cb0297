// SageAttention in stable-diffusion.cpp's graphs: whether it can run, the nodes, and what was computed how often.
#include "attention.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <utility>
#include <vector>

#include "ggml-alloc.h"
#include "ggml_extend_backend.hpp"
#include "levers.h"
#include "sdsage_seam.hpp"
#include "util.h"

namespace sdsage {
namespace {

// The CPU backend runs any custom node: a test library registers the kernels' arithmetic and a made-up device here.
const SageBackend * cpu_backend = nullptr;
ggml_custom_op_t cpu_compute    = nullptr;
GraphProbe graph_probe          = nullptr;

void compute_on_cpu(ggml_tensor * node, int ith, int nth, void * data) {
    GGML_ASSERT(cpu_compute != nullptr);
    cpu_compute(node, ith, nth, data);
}

// A device and its kernels; without a backend, `reason` says what is missing.
struct SageDevice {
    const SageBackend * backend = nullptr;
    sage_device properties      = {};
    std::string name;    // "cuda:0 (NVIDIA H200)"
    std::string reason;  // empty: the chooser decides
};

const char * reg_name(ggml_backend_dev_t dev) { return ggml_backend_reg_name(ggml_backend_dev_backend_reg(dev)); }

bool is_cuda(ggml_backend_dev_t dev) { return std::strcmp(reg_name(dev), "CUDA") == 0; }

std::string dotted(int compute_capability) {
    return std::to_string(compute_capability / 10) + "." + std::to_string(compute_capability % 10);
}

SageDevice find_sage_device(ggml_backend_dev_t dev) {
    SageDevice found;
    found.name = device_name(dev) + " (" + ggml_backend_dev_description(dev) + ")";
    if (ggml_backend_dev_type(dev) == GGML_BACKEND_DEVICE_TYPE_CPU) {
        found.backend = cpu_backend;
        if (cpu_backend == nullptr) {
            found.reason = ggml_backend_reg_by_name("CUDA") == nullptr
                               ? "this build has no CUDA: build it with SDSAGE_CUDA=1 (or -DSD_CUDA=ON)"
                               : "it needs an NVIDIA GPU, and there is none here or another device was chosen";
            return found;
        }
    } else if (!is_cuda(dev)) {
        found.reason = std::string("the kernels are for CUDA, and this is a device of ") + reg_name(dev);
        return found;
    } else {
        const auto reg = ggml_backend_dev_backend_reg(dev);
        found.backend  = static_cast<const SageBackend *>(ggml_backend_reg_get_proc_address(reg, SDSAGE_SAGE_PROC));
        if (found.backend == nullptr) {
            found.reason = "the ggml of this build was left as upstream has it (SD_USE_UPSTREAM_GGML): build it without that";
            return found;
        }
    }
    const std::string number = ggml_backend_dev_name(dev);  // "CUDA1"
    const int ordinal        = std::atoi(number.c_str() + std::min(number.size(), number.find_first_of("0123456789")));
    if (found.backend->device_query(ordinal, &found.properties) != SAGE_OK) {
        found.reason = found.backend->last_error();
    }
    return found;
}

// Kept for the process: neither devices nor kernels change, but for set_cpu_sage. Asked by any thread.
std::mutex known_lock;
std::map<ggml_backend_dev_t, SageDevice> known_devices;

SageDevice sage_device_of(ggml_backend_dev_t dev) {
    std::lock_guard<std::mutex> hold(known_lock);
    const auto found = known_devices.find(dev);
    return found != known_devices.end() ? found->second : known_devices.emplace(dev, find_sage_device(dev)).first->second;
}

sage_attn_choice choose(const SageDevice & device, const sage_attn_desc & desc) {
    sage_attn_choice choice = {};
    choice.struct_size      = sizeof(choice);
    if (device.backend->choose(&desc, &device.properties, &choice) != SAGE_OK) {
        choice.supported = 0;
        choice.reason    = "the kernels refuse this description of attention";
    }
    return choice;
}

// The chooser's answer for a usual shape: what a context will run.
sage_attn_choice usual_choice(const SageDevice & device, sage_kernel kernel) {
    sage_attn_desc desc = {};
    desc.struct_size    = sizeof(desc);
    desc.kernel         = kernel;
    desc.batch = desc.heads = desc.kv_heads = 1;
    desc.head_dim                           = 128;
    desc.lq = desc.lk  = 256;
    desc.softmax_scale = 1.f;
    return choose(device, desc);
}

std::string why_unavailable(const SageDevice & device, const sage_attn_choice & choice) {
    std::string why = "SageAttention can't run on " + device.name + ": ";
    if (!device.reason.empty()) {
        return why + device.reason;
    }
    const sage_device & p = device.properties;
    return why + choice.reason + " (compute capability " + dotted(p.compute_capability) + "; this build has kernels for " +
           p.architectures + ", compiled with CUDA " + std::to_string(p.toolkit / 1000) + "." + std::to_string(p.toolkit % 1000 / 10) + ")";
}

ggml_tensor * make_node(ggml_context * ctx, ggml_tensor * q, ggml_tensor * k, ggml_tensor * v, ggml_tensor * bias, sage_kernel kernel) {
    ggml_tensor * sources[] = { q, k, v, bias };
    ggml_tensor * node = ggml_custom_4d(ctx, GGML_TYPE_F32, v->ne[0], q->ne[2], q->ne[1], q->ne[3], sources, bias ? 4 : 3, compute_on_cpu,
                                        GGML_N_TASKS_MAX, nullptr);
    write_mark(node, { MARK_MAGIC, Method::sage, kernel, 1.f / std::sqrt(static_cast<float>(q->ne[0])), nullptr });
    return node;
}

// [C, L, N] -> view [head_dim, L, heads, N]
ggml_tensor * heads_of_rows(ggml_context * ctx, ggml_tensor * x, int64_t head_dim) {
    const size_t head = head_dim * x->nb[0];
    return ggml_view_4d(ctx, x, head_dim, x->ne[1], x->ne[0] / head_dim, x->ne[2], x->nb[1], head, x->nb[2], 0);
}

// [head_dim, L, heads * N] -> view [head_dim, L, heads, N]
ggml_tensor * split_batch(ggml_context * ctx, ggml_tensor * x, int64_t batch) {
    const int64_t heads = x->ne[2] / batch;
    return ggml_view_4d(ctx, x, x->ne[0], x->ne[1], heads, batch, x->nb[1], x->nb[2], x->nb[2] * heads, 0);
}

// A mask that adds one number per key, for all rows and heads alike: [L_k, 1, 1, 1 or N].
bool is_per_key(const ggml_tensor * mask, int64_t lk, int64_t batch) {
    return mask->type == GGML_TYPE_F32 && mask->ne[0] == lk && mask->ne[1] == 1 && mask->ne[2] == 1 && mask->nb[0] == sizeof(float) &&
           (mask->ne[3] == 1 || mask->ne[3] == batch);
}

const char * why_views_do_not_fit(std::initializer_list<const ggml_tensor *> views) {
    for (const ggml_tensor * t : views) {
        if (t->type != GGML_TYPE_F32) {
            return "q, k or v is not F32";
        }
        if (t->nb[0] != sizeof(float) || t->nb[1] % sizeof(float) || t->nb[2] % sizeof(float) || t->nb[3] % sizeof(float)) {
            return "the channels of q, k or v are not contiguous";
        }
    }
    return nullptr;
}

// ---- self-test

constexpr int64_t TEST_DIM = 128, TEST_LQ = 80, TEST_LK = 200, TEST_HEADS = 2;

std::vector<float> test_values(int64_t n, uint32_t seed) {
    std::vector<float> values(n);
    for (float & x : values) {
        seed = seed * 1664525u + 1013904223u;
        x    = static_cast<float>(seed >> 8) / 8388608.f - 1.f;  // -1 .. 1
    }
    return values;
}

// Attention in double precision, laid out as the node's result.
std::vector<double> exact_attention(const std::vector<float> & q, const std::vector<float> & k, const std::vector<float> & v) {
    std::vector<double> out(TEST_LQ * TEST_HEADS * TEST_DIM);
    std::vector<double> p(TEST_LK);
    for (int64_t h = 0; h < TEST_HEADS; h++) {
        for (int64_t i = 0; i < TEST_LQ; i++) {
            const float * row = &q[(h * TEST_LQ + i) * TEST_DIM];
            double top = -INFINITY, sum = 0;
            for (int64_t j = 0; j < TEST_LK; j++) {
                const float * key = &k[(h * TEST_LK + j) * TEST_DIM];
                double dot        = 0;
                for (int64_t c = 0; c < TEST_DIM; c++) {
                    dot += double(row[c]) * key[c];
                }
                p[j] = dot / std::sqrt(double(TEST_DIM));
                top  = std::max(top, p[j]);
            }
            for (double & x : p) {
                x = std::exp(x - top);
                sum += x;
            }
            double * o = &out[(i * TEST_HEADS + h) * TEST_DIM];
            for (int64_t j = 0; j < TEST_LK; j++) {
                for (int64_t c = 0; c < TEST_DIM; c++) {
                    o[c] += p[j] / sum * v[(h * TEST_LK + j) * TEST_DIM + c];
                }
            }
        }
    }
    return out;
}

// Relative L2 error of one small attention on this backend; negative: it did not run. What only shows when the GPU is waited for,
// such as a fault inside a kernel, ends the process in ggml's own check.
double self_test_error(ggml_backend_t backend, const SageBackend * kernels, sage_kernel kernel, std::string * reason) {
    using Context = std::unique_ptr<ggml_context, decltype(&ggml_free)>;
    using Buffer  = std::unique_ptr<ggml_backend_buffer, decltype(&ggml_backend_buffer_free)>;
    Context ctx(ggml_init({ ggml_tensor_overhead() * 16 + ggml_graph_overhead(), nullptr, true }), ggml_free);
    ggml_tensor * q    = ggml_new_tensor_4d(ctx.get(), GGML_TYPE_F32, TEST_DIM, TEST_LQ, TEST_HEADS, 1);
    ggml_tensor * k    = ggml_new_tensor_4d(ctx.get(), GGML_TYPE_F32, TEST_DIM, TEST_LK, TEST_HEADS, 1);
    ggml_tensor * v    = ggml_new_tensor_4d(ctx.get(), GGML_TYPE_F32, TEST_DIM, TEST_LK, TEST_HEADS, 1);
    ggml_tensor * node = make_node(ctx.get(), q, k, v, nullptr, kernel);
    ggml_cgraph * gf   = ggml_new_graph(ctx.get());
    ggml_build_forward_expand(gf, node);
    Buffer buffer(ggml_backend_alloc_ctx_tensors(ctx.get(), backend), ggml_backend_buffer_free);
    if (buffer == nullptr) {
        return -1;
    }
    const auto q_in = test_values(ggml_nelements(q), 1), k_in = test_values(ggml_nelements(k), 2), v_in = test_values(ggml_nelements(v), 3);
    ggml_backend_tensor_set(q, q_in.data(), 0, ggml_nbytes(q));
    ggml_backend_tensor_set(k, k_in.data(), 0, ggml_nbytes(k));
    ggml_backend_tensor_set(v, v_in.data(), 0, ggml_nbytes(v));
    std::vector<float> out(ggml_nelements(node), NAN);
    ggml_backend_tensor_set(node, out.data(), 0, ggml_nbytes(node));
    kernels->catch_failure(reason);
    const ggml_status status = ggml_backend_graph_compute(backend, gf);
    kernels->catch_failure(nullptr);
    if (status != GGML_STATUS_SUCCESS || !reason->empty()) {
        return -1;
    }
    ggml_backend_tensor_get(node, out.data(), 0, ggml_nbytes(node));
    const auto want = exact_attention(q_in, k_in, v_in);
    double error = 0, norm = 0;
    for (size_t i = 0; i < want.size(); i++) {
        error += (out[i] - want[i]) * (out[i] - want[i]);
        norm += want[i] * want[i];
    }
    return std::sqrt(error / norm);
}

// The kernels' tests allow 0.04 to 0.08; a broken card or driver is far off.
constexpr double SELF_TEST_LIMIT = 0.1;

// Empty if all is well. Each device and kernel is tested once in a process.
std::string self_test(ggml_backend_t backend, const SageDevice & device, sage_kernel kernel) {
    static std::set<std::pair<ggml_backend_dev_t, sage_kernel>> passed;
    const auto key = std::make_pair(ggml_backend_get_device(backend), kernel);
    const bool cpu = device.backend == cpu_backend;
    if (passed.count(key) && !cpu) {
        return "";
    }
    std::string reason;
    const double error = self_test_error(backend, device.backend, kernel, &reason);
    if (error >= 0 && error < SELF_TEST_LIMIT) {  // false for NaN
        passed.insert(key);
        return "";
    }
    return "SageAttention's self-test failed on " + device.name + ": kernel " + sage_kernel_text(kernel) +
           (error < 0 ? " did not run" + (reason.empty() ? "" : " (" + reason + ")")
                      : " is off by " + std::to_string(error) + " (relative, at most " + std::to_string(SELF_TEST_LIMIT) + ")") +
           "; check the card and its driver, or leave out --sage-attn";
}

}  // namespace

void set_cpu_sage(const SageBackend * backend, ggml_custom_op_t compute) {
    std::lock_guard<std::mutex> hold(known_lock);
    known_devices.clear();
    cpu_backend = backend;
    cpu_compute = compute;
}

void set_graph_probe(GraphProbe probe) { graph_probe = probe; }

const char * sage_kernel_text(sage_kernel kernel) {
    switch (kernel) {
        case SAGE_KERNEL_FP16:
            return "fp16";
        case SAGE_KERNEL_FP8:
            return "fp8";
        case SAGE_KERNEL_FP8PP:
            return "fp8++";
        case SAGE_KERNEL_HOPPER:
            return "hopper";
        default:
            return "auto";
    }
}

SageInfo sage_info(ggml_backend_dev_t dev, sage_kernel kernel) {
    const SageDevice device = sage_device_of(dev);
    SageInfo info           = { device.name, device.properties, {}, "" };
    if (device.reason.empty()) {
        info.choice = usual_choice(device, kernel);
    }
    if (!info.choice.supported) {
        info.why = why_unavailable(device, info.choice);
    }
    return info;
}

bool check_sage(ggml_backend_t backend, sage_kernel kernel) {
    const auto dev      = ggml_backend_get_device(backend);
    const SageInfo info = sage_info(dev, kernel);
    if (!info.why.empty()) {
        sage_unavailable(info.why);
        return false;
    }
    const std::string broken = self_test(backend, sage_device_of(dev), info.choice.kernel);
    if (!broken.empty()) {
        fail(broken);
        return false;
    }
    const char * note = info.choice.why_not_better;
    LOG_INFO("SageAttention in the diffusion model: kernel %s%s on %s%s%s", sage_kernel_text(info.choice.kernel),
             info.choice.emulated ? " (emulated)" : "", info.name.c_str(), *note ? "; " : "", note);
    return true;
}

ggml_tensor * sage_attention(ggml_context * ctx, ggml_backend_t backend, ggml_tensor * q, ggml_tensor * k, ggml_tensor * v, int64_t n_head,
                             ggml_tensor * mask, bool skip_reshape, int setting, const char ** why) {
    if (!skip_reshape) {
        const int64_t head_dim = q->ne[0] / n_head;
        q                      = heads_of_rows(ctx, q, head_dim);
        k                      = heads_of_rows(ctx, k, head_dim);
        v                      = heads_of_rows(ctx, v, head_dim);
    } else {
        q = split_batch(ctx, q, v->ne[3]);
        k = split_batch(ctx, k, v->ne[3]);
        v = ggml_permute(ctx, v, 0, 2, 1, 3);  // [head_dim, heads, L, N]
    }
    *why = why_views_do_not_fit({ q, k, v });
    if (*why == nullptr && mask != nullptr && !is_per_key(mask, k->ne[1], q->ne[3])) {
        *why = "its mask is not one number per key";
    }
    if (*why != nullptr) {
        return nullptr;
    }
    ggml_tensor * node      = make_node(ctx, q, k, v, mask, static_cast<sage_kernel>(setting >> ATTN_KERNEL_SHIFT));
    const SageDevice device = sage_device_of(ggml_backend_get_device(backend));
    sage_attn_desc desc;
    read_sage_node(node, &desc);
    const sage_attn_choice choice = choose(device, desc);
    if (!choice.supported) {
        *why = choice.reason;
        return nullptr;
    }
    AttentionMark mark;
    read_mark(node, &mark);
    mark.kernel = choice.kernel;
    write_mark(node, mark);
    return ggml_reshape_3d(ctx, node, node->ne[0] * node->ne[1], node->ne[2], node->ne[3]);
}

void count_attention(ggml_cgraph * graph, const std::string & runner, bool is_diffusion_model) {
    const Part part = is_diffusion_model                            ? Part::diffusion
                      : runner.find("control") != std::string::npos ? Part::control_net
                                                                    : part_of_stage();
    for (int i = 0; i < ggml_graph_n_nodes(graph); i++) {
        AttentionMark mark;
        if (read_mark(ggml_graph_node(graph, i), &mark)) {
            const char * method = mark.method == Method::sage    ? sage_kernel_text(mark.kernel)
                                  : mark.method == Method::flash ? "flash"
                                                                 : "ordinary";
            note_attention(part, method, mark.why ? mark.why : "");
        }
    }
    count_levers(graph, part);
    if (graph_probe) {
        graph_probe(graph);
    }
}

}  // namespace sdsage
