// Runs stable-diffusion.cpp's attention function on one shape and compares it with exact attention.
//
//   probe_attention DEVICE METHOD LAYOUT HEAD_DIM HEADS KV_HEADS LQ LK BATCH MASK KV_SCALE VALUE
//
// METHOD: ordinary, flash, auto, fp16, fp8, fp8++. LAYOUT: rows or rope. MASK: none, key, full. VALUE: factor of k and v.
// Prints the kernel that ran, why not sage, the relative L2 error, and the bytes of the compute buffer, one JSON object.
// On "cpu" SageAttention is that of sage_cpu.cpp.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "attention.h"
#include "ggml_extend.hpp"
#include "job.h"
#include "sdsage_test.h"

namespace {

struct Case {
    std::string method, layout;
    int64_t head_dim, heads, kv_heads, lq, lk, batch;
    std::string mask;
    float kv_scale, value;
};

// [batch][head][token][channel]
struct Values {
    int64_t heads, tokens, dim;
    std::vector<float> data;
    float & at(int64_t n, int64_t h, int64_t t, int64_t c) { return data[((n * heads + h) * tokens + t) * dim + c]; }
};

Values random_values(int64_t batch, int64_t heads, int64_t tokens, int64_t dim, float factor, unsigned seed) {
    std::mt19937 engine(seed);
    std::normal_distribution<float> normal;
    Values v = { heads, tokens, dim, std::vector<float>(batch * heads * tokens * dim) };
    for (float & x : v.data) {
        x = normal(engine) * factor;
    }
    return v;
}

struct Runner : public GGMLRunner {
    Case c;
    Values q, k, v;
    std::vector<float> mask;
    const char * ran = "";
    std::vector<std::vector<float>> inputs;

    Runner(ggml_backend_t backend, const Case & c) : GGMLRunner(backend), c(c) {
        q = random_values(c.batch, c.heads, c.lq, c.head_dim, 1.f, 1);
        k = random_values(c.batch, c.kv_heads, c.lk, c.head_dim, 1.f, 2);
        v = random_values(c.batch, c.kv_heads, c.lk, c.head_dim, c.value, 3);
        std::mt19937 engine(4);
        if (c.mask != "none") {
            mask.resize(c.lk * (c.mask == "full" ? c.lq : 1));
            for (float & x : mask) {
                x = engine() % 4 == 0 ? -INFINITY : (engine() % 64) / 32.f - 1.f;
            }
        }
    }

    std::string get_desc() override { return "attention"; }

    ggml_tensor * input(std::initializer_list<int64_t> ne, std::vector<float> values) {
        std::vector<int64_t> n(ne);
        inputs.push_back(std::move(values));
        ggml_tensor * t = ggml_new_tensor(compute_ctx, GGML_TYPE_F32, static_cast<int>(n.size()), n.data());
        ggml_set_input(t);
        set_backend_tensor_data(t, inputs.back().data());
        return t;
    }

    // [C, L, N], or as rope leaves it [d, L, heads * N]
    ggml_tensor * head_input(Values & x, bool rows, bool by_token) {
        std::vector<float> out;
        out.reserve(x.data.size());
        const int64_t batch = static_cast<int64_t>(x.data.size()) / (x.heads * x.tokens * x.dim);
        for (int64_t n = 0; n < batch; n++) {
            for (int64_t i = 0; i < x.heads * x.tokens; i++) {
                const int64_t h = by_token ? i % x.heads : i / x.tokens, t = by_token ? i / x.heads : i % x.tokens;
                for (int64_t ch = 0; ch < x.dim; ch++) {
                    out.push_back(x.at(n, h, t, ch));
                }
            }
        }
        if (rows) {
            return input({ x.dim * x.heads, x.tokens, batch }, std::move(out));
        }
        return by_token ? input({ x.dim, x.heads, x.tokens, batch }, std::move(out))
                        : input({ x.dim, x.tokens, x.heads * batch }, std::move(out));
    }

    ggml_cgraph * graph() {
        inputs.clear();
        ggml_cgraph * gf = new_graph_custom(1024);
        const bool rows  = c.layout == "rows";
        auto *qt = head_input(q, rows, rows), *kt = head_input(k, rows, rows), *vt = head_input(v, rows, true);
        auto * mt  = mask.empty() ? nullptr : input({ c.lk, c.mask == "full" ? c.lq : 1 }, mask);
        auto * out = ggml_ext_attention_ext(compute_ctx, runtime_backend, qt, kt, vt, c.heads, mt, !rows, flash_attn_enabled, c.kv_scale);
        ggml_build_forward_expand(gf, out);
        return gf;
    }

    sd::Tensor<float> run() {
        return take_or_empty(GGMLRunner::compute<float>([&] { return graph(); }, 1, false));
    }

    // [C, L_q, N] in double precision
    double error(const sd::Tensor<float> & out) {
        double wrong = 0, norm = 0;
        std::vector<double> p(c.lk);
        for (int64_t n = 0; n < c.batch; n++) {
            for (int64_t h = 0; h < c.heads; h++) {
                const int64_t kh = h / (c.heads / c.kv_heads);
                for (int64_t i = 0; i < c.lq; i++) {
                    double top = -INFINITY, sum = 0;
                    for (int64_t j = 0; j < c.lk; j++) {
                        double dot = 0;
                        for (int64_t ch = 0; ch < c.head_dim; ch++) {
                            dot += double(q.at(n, h, i, ch)) * k.at(n, kh, j, ch);
                        }
                        p[j] = dot / std::sqrt(double(c.head_dim)) + (mask.empty() ? 0 : mask[c.mask == "full" ? i * c.lk + j : j]);
                        top  = std::max(top, p[j]);
                    }
                    for (double & x : p) {
                        sum += x = std::exp(x - top);
                    }
                    for (int64_t ch = 0; ch < c.head_dim; ch++) {
                        double want = 0;
                        for (int64_t j = 0; j < c.lk; j++) {
                            want += p[j] / sum * v.at(n, kh, j, ch);
                        }
                        const double got = out.data()[(n * c.lq + i) * c.heads * c.head_dim + h * c.head_dim + ch];
                        wrong += (got - want) * (got - want);
                        norm += want * want;
                    }
                }
            }
        }
        return std::sqrt(wrong / norm);
    }

    size_t compute_bytes() { return compute_allocr ? ggml_gallocr_get_buffer_size(compute_allocr, 0) : 0; }
};

int setting_of(const std::string & method) {
    if (method == "ordinary") {
        return 0;
    }
    if (method == "flash") {
        return sdsage::ATTN_FLASH;
    }
    for (sage_kernel kernel : { SAGE_KERNEL_AUTO, SAGE_KERNEL_FP16, SAGE_KERNEL_FP8, SAGE_KERNEL_FP8PP, SAGE_KERNEL_HOPPER }) {
        if (method == sdsage::sage_kernel_text(kernel)) {
            return sdsage::sage_setting(kernel);
        }
    }
    std::fprintf(stderr, "probe_attention: no method %s\n", method.c_str());
    std::exit(2);
}

}  // namespace

int main(int argc, char ** argv) {
    if (argc != 13) {
        std::fprintf(stderr, "probe_attention: 12 arguments, see the source\n");
        return 2;
    }
    const auto n = [&](int i) { return std::atoll(argv[i]); };
    const Case c = { argv[2],
                     argv[3],
                     n(4),
                     n(5),
                     n(6),
                     n(7),
                     n(8),
                     n(9),
                     argv[10],
                     static_cast<float>(std::atof(argv[11])),
                     static_cast<float>(std::atof(argv[12])) };
    if (!sdsage_set_device(argv[1])) {
        std::fprintf(stderr, "probe_attention: no device %s\n", argv[1]);
        return 2;
    }
    if (std::strcmp(argv[1], "cpu") == 0) {
        const bool hopper = std::strcmp(argv[2], "hopper") == 0;
        sdsage_test_sage_cpu(hopper ? 90 : 120, 13000, hopper ? "90a" : "120a");
    }
    const int setting      = setting_of(c.method);
    ggml_backend_t backend = sd_get_default_backend();
    {
        sdsage::Job job;
        sdsage::StageScope stage(sdsage::Stage::sample);
        Runner runner(backend, c);
        runner.is_diffusion_model = true;
        runner.set_flash_attention_enabled(setting);
        const auto out = runner.run();
        if (out.empty()) {
            return 1;
        }
        std::printf("{\"error\": %.6g, \"compute_bytes\": %zu, ", runner.error(out), runner.compute_bytes());
        job.finish(true);
    }
    sdsage_attention_t a = {};
    sdsage_get_attention(0, &a);
    std::printf("\"count\": %d, \"kernel\": \"%s\", \"why\": \"%s\"}\n", sdsage_attention_count(), a.kernel, a.why);
    ggml_backend_free(backend);
    return 0;
}
