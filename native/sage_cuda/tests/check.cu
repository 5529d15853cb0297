// Against a float64 reference on sampled rows, on a GPU: sage_check [part|all|time|quick] [kernel].
// SAGE_VERBOSE prints what passed too.
#include "problem.cuh"

static int failures = 0;
static void verdict(const char * name, const char * kernel, bool ok, const std::string & text) {
    if (!ok) {
        failures++;
    }
    if (!ok || getenv("SAGE_VERBOSE")) {
        std::printf("%-5s %-34s %-6s %s\n", ok ? "ok" : "FAIL", name, kernel, text.c_str());
    }
}

// finite, within the limit, identical twice, nothing written beside the output, inputs unchanged
static Errors check(const Case & c, sage_kernel kernel, double limit) {
    Problem p(c, kernel);
    const auto sums   = [&] { return p.own[0].sum() + 3 * p.own[1].sum() + 5 * p.own[2].sum(); };
    const auto before = sums();
    p.run();
    const auto first = p.out().sum();
    auto * n         = counter();
    count_bad<<<2048, 256>>>(p.d.o, { c.b, c.h, c.lq, c.d }, n);
    const auto bad = read(n);
    const Errors e = compare(p);
    blank<<<2048, 256>>>(p.d.o, { c.b, c.h, c.lq, c.d });
    const auto blanked = p.out().sum();
    CUDA(cudaMemset(p.out().data, 0xff, p.out().bytes));
    const bool inside = p.out().sum() == blanked;
    p.run(0x55);
    const bool same = p.out().sum() == first, unchanged = sums() == before;
    char text[200];
    std::snprintf(text, sizeof text, "rel %.5f worst row %.5f 1-cos %.2e, not finite %llu%s%s%s", e.rel(), e.worst, e.one_minus_cos(), bad,
                  same ? "" : ", DIFFERS between runs", unchanged ? "" : ", INPUTS CHANGED", inside ? "" : ", WRITES BESIDE THE OUTPUT");
    verdict(c.name, sage_kernel_name(kernel), e.rel() <= limit && bad == 0 && same && unchanged && inside, text);
    return e;
}

static std::vector<sage_kernel> kernels = { SAGE_KERNEL_FP16, SAGE_KERNEL_FP8, SAGE_KERNEL_FP8PP, SAGE_KERNEL_HOPPER };

static void ragged() {
    const int64_t lks[] = { 1, 9, 12, 63, 64, 65, 77, 127, 128, 129, 503, 4161, 4225 }, lqs[] = { 1, 7, 16, 31, 65, 127, 128, 129, 200 };
    const int ds[] = { 128, 64, 1, 33, 40, 72, 80, 96, 127 };
    for (sage_kernel kernel : kernels) {
        double worst = 0;
        for (size_t i = 0; i < sizeof lks / 8 * 3; i++) {
            char name[64];
            Case c   = { name, 1 + int(i % 3 == 0), 3, 3, lqs[i % 9], lks[i % 13], ds[i * 5 % 9] };
            c.layout = Layout(i % 3);
            c.q = sage_dtype(i % 3), c.k = sage_dtype(i / 2 % 3), c.v = sage_dtype(i / 3 % 3), c.o = sage_dtype(i / 4 % 3);
            c.bias   = i % 4 == 3 ? HOLES : NONE;
            c.causal = i % 5 == 4;
            std::snprintf(name, sizeof name, "ragged %d,3,%lld,%lld,%d", c.b, (long long)c.lq, (long long)c.lk, c.d);
            const double limit = (kernel == SAGE_KERNEL_FP16 ? 0.014 : c.d == 1 ? 0.08 : 0.045) + (c.o == SAGE_BF16 ? 0.003 : 0);
            worst              = std::max(worst, check(c, kernel, limit).rel());
        }
        std::printf("ragged %s: worst rel. L2 %.5f\n", sage_kernel_name(kernel), worst);
    }
}

static void features() {
    struct Row {
        Case c;
        double f16, f8, f8pp;
    };
    const double any = 1e30;
    const Row rows[] = {
        { { "headline", 2, 24, 24, 4096, 4096, 128 }, 0.012, 0.040, 0.040 },
        { { "headline 64", 2, 24, 24, 4096, 4096, 64 }, 0.012, 0.040, 0.040 },
        { { "offsets", 1, 4, 4, 4096, 4096, 128, OFFSETS }, 0.0005, 0.004, 0.008 },
        { { "zeros", 1, 2, 2, 100, 77, 64, ZEROS }, 0, 0, 0 },
        { { "zero k and v", 1, 2, 2, 100, 77, 64, ZERO_KV }, 0, 0, 0 },
        { { "huge v", 1, 2, 2, 300, 500, 128, HUGE_V }, 0.014, 0.045, 0.045 },
        { { "huge k", 1, 2, 2, 300, 500, 128, HUGE_K }, 0.7, 0.7, 0.7 },
        { { "enormous", 1, 2, 2, 300, 500, 128, ENORMOUS }, any, any, any },
        { { "tiny", 1, 2, 2, 300, 500, 128, TINY }, 0.014, 0.045, 0.045 },
        { { "gqa 6/2", 2, 6, 2, 333, 555, 128 }, 0.014, 0.045, 0.045 },
        { { "gqa 8/1, 64", 1, 8, 1, 129, 1000, 64 }, 0.014, 0.045, 0.045 },
        { { "causal", 1, 3, 3, 1000, 1000, 128, NORMAL, NONE, 1 }, 0.014, 0.045, 0.045 },
        { { "causal, fewer queries", 1, 3, 3, 200, 1000, 64, NORMAL, NONE, 1 }, 0.014, 0.045, 0.045 },
        { { "causal, more queries", 1, 3, 3, 1000, 200, 128, NORMAL, NONE, 1 }, 0.014, 0.045, 0.045 },
        { { "causal, bias", 2, 3, 3, 700, 700, 128, NORMAL, HOLES, 1 }, 0.014, 0.045, 0.045 },
        { { "bias", 2, 3, 3, 256, 1000, 128, NORMAL, RANDOM }, 0.014, 0.045, 0.045 },
        { { "bias holes", 2, 3, 3, 256, 1000, 64, NORMAL, HOLES }, 0.014, 0.045, 0.045 },
        { { "bias all out", 1, 3, 3, 100, 200, 128, NORMAL, ALL_OUT }, 0, 0, 0 },
        { { "bias first tile out", 1, 3, 3, 100, 200, 128, NORMAL, FIRST_OUT }, 0.014, 0.045, 0.045 },
        { { "bias all -FLT_MAX", 1, 3, 3, 100, 200, 128, NORMAL, ALL_FLT_MAX }, 0, 0, 0 },
        { { "f16 in, f16 out, [b,l,h,d]", 2, 5, 5, 500, 600, 128, NORMAL, NONE, 0, SAGE_F16, SAGE_F16, SAGE_F16, SAGE_F16, BLHD },
          0.014,
          0.045,
          0.045 },
        { { "bf16 in and out, odd strides", 2, 5, 5, 500, 600, 96, NORMAL, NONE, 0, SAGE_BF16, SAGE_BF16, SAGE_BF16, SAGE_BF16, ODD },
          0.016,
          0.047,
          0.047 },
        { { "negative scale", 1, 2, 2, 300, 500, 128, NORMAL, NONE, 0, SAGE_F32, SAGE_F32, SAGE_F32, SAGE_F32, BHLD, -1.f },
          0.014,
          0.045,
          0.045 },
        { { "long keys", 1, 1, 1, 256, 131072, 128 }, 0.013, 0.041, 0.041 },
        { { "70000 heads", 10, 7000, 7000, 9, 12, 64 }, 0.014, 0.045, 0.045 },
    };
    for (const Row & r : rows) {
        std::string line;
        for (sage_kernel kernel : kernels) {
            const Errors e = check(r.c, kernel, kernel == SAGE_KERNEL_FP16 ? r.f16 : kernel == SAGE_KERNEL_FP8 ? r.f8 : r.f8pp);
            char text[100];
            std::snprintf(text, sizeof text, "  %.5f (row %.4f, %.1e)", e.rel(), e.worst, e.one_minus_cos());
            line += text;
        }
        std::printf("%-30s%s\n", r.c.name, line.c_str());
    }
}

static void poke(const sage_tensor & t, int64_t b, int64_t h, int64_t l, int c, float x) {
    CUDA(cudaMemcpy(static_cast<float *>(t.data) + b * t.batch_stride + h * t.head_stride + l * t.token_stride + c, &x, 4,
                    cudaMemcpyHostToDevice));
}

// a NaN or Inf reaches every row that depends on it; other batches stay finite
static void not_finite() {
    for (sage_kernel kernel : kernels) {
        for (float x : { NAN, INFINITY, -INFINITY }) {
            for (int where = 0; where < 3; where++) {
                Problem p({ "not finite", 2, 4, 2, 150, 190, 100 }, kernel);
                poke(where == 0 ? p.d.q : where == 1 ? p.d.k : p.d.v, 0, 1, 140, 77, x);
                p.run();
                bool ok = true;
                for (int64_t h = 0; h < 4; h++) {
                    for (int64_t l : { 0, 3, 70, 140, 149 }) {
                        const std::vector<float> bad = p.row(0, h, l), fine = p.row(1, h, l);
                        const bool hit = where == 0 ? h == 1 && l == 140 : h / 2 == 1;
                        for (int c = 0; c < 100; c++) {
                            ok &= std::isfinite(fine[c]);
                            ok &= !hit || (where == 2 && c != 77) || std::isnan(bad[c]);
                            ok &= where == 0 ? l == 140 || h == 1 || std::isfinite(bad[c]) : h / 2 == 1 || std::isfinite(bad[c]);
                        }
                    }
                }
                verdict("not finite", sage_kernel_name(kernel), ok, where == 0 ? "q" : where == 1 ? "k" : "v");
            }
        }
    }
}

static void same_bits() {
    for (sage_kernel kernel : kernels) {
        // each batch as its own run
        Problem all({ "batches", 3, 4, 2, 150, 500, 128, NORMAL, HOLES }, kernel);
        all.run();
        bool ok = true;
        Buffer o(4 * 150 * 128 * 4);
        for (int b = 0; b < 3; b++) {
            sage_attn_desc d = all.d;
            d.batch          = 1;
            d.q.data         = static_cast<float *>(d.q.data) + b * d.q.batch_stride;
            d.k.data         = static_cast<float *>(d.k.data) + b * d.k.batch_stride;
            d.v.data         = static_cast<float *>(d.v.data) + b * d.v.batch_stride;
            d.bias += b * d.bias_stride;
            d.o.data = o.data;
            Buffer w(all.workspace());
            ok &= sage_attn_run(&d, w.data, w.bytes, nullptr) == SAGE_OK;
            std::vector<float> x(4 * 150 * 128), y(x.size());
            CUDA(cudaMemcpy(x.data(), o.data, x.size() * 4, cudaMemcpyDeviceToHost));
            CUDA(cudaMemcpy(y.data(), static_cast<float *>(all.d.o.data) + b * all.d.o.batch_stride, x.size() * 4, cudaMemcpyDeviceToHost));
            ok &= std::memcmp(x.data(), y.data(), x.size() * 4) == 0;
        }
        verdict("each batch alone", sage_kernel_name(kernel), ok, "");
        // layouts
        ok = true;
        Problem first({ "layout", 2, 3, 3, 140, 300, 96, NORMAL, NONE, 0, SAGE_F16, SAGE_BF16, SAGE_F32, SAGE_F32, BHLD }, kernel);
        first.run();
        for (Layout l : { BLHD, ODD }) {
            Case c   = first.c;
            c.layout = l;
            Problem p(c, kernel);
            p.run();
            for (int64_t h = 0; h < 3; h++) {
                for (int64_t row = 0; row < 140; row += 9) {
                    ok &= first.row(1, h, row) == p.row(1, h, row);
                }
            }
        }
        verdict("layouts", sage_kernel_name(kernel), ok, "");
        // two streams at once, and a graph replayed
        Problem p1({ "stream 1", 1, 8, 8, 1000, 1000, 128 }, kernel), p2({ "stream 2", 1, 8, 8, 900, 1100, 64 }, kernel);
        p1.run(), p2.run();
        const auto s1 = p1.out().sum(), s2 = p2.out().sum();
        Buffer w1(p1.workspace()), w2(p2.workspace());
        cudaStream_t a, b;
        CUDA(cudaStreamCreateWithFlags(&a, cudaStreamNonBlocking));
        CUDA(cudaStreamCreateWithFlags(&b, cudaStreamNonBlocking));
        ok = true;
        for (int i = 0; i < 20; i++) {
            ok &= sage_attn_run(&p1.d, w1.data, w1.bytes, a) == SAGE_OK && sage_attn_run(&p2.d, w2.data, w2.bytes, b) == SAGE_OK;
        }
        CUDA(cudaDeviceSynchronize());
        verdict("two streams", sage_kernel_name(kernel), ok && p1.out().sum() == s1 && p2.out().sum() == s2, sage_last_error());
        cudaGraph_t graph;
        cudaGraphExec_t exec;
        CUDA(cudaMemset(p1.out().data, 0xff, p1.out().bytes));
        CUDA(cudaStreamBeginCapture(a, cudaStreamCaptureModeGlobal));
        ok = sage_attn_run(&p1.d, w1.data, w1.bytes, a) == SAGE_OK;
        CUDA(cudaStreamEndCapture(a, &graph));
        CUDA(cudaGraphInstantiate(&exec, graph, 0));
        CUDA(cudaGraphLaunch(exec, a));
        CUDA(cudaGraphLaunch(exec, a));
        CUDA(cudaDeviceSynchronize());
        verdict("graph", sage_kernel_name(kernel), ok && p1.out().sum() == s1, sage_last_error());
    }
}

// q, k, v and o of 2 heads inside rows of 40960 elements: offsets beyond 2^32 elements
static void far_apart() {
    for (sage_kernel kernel : kernels) {
        const int64_t rows = 110000, width = 40960;
        Case c = { "offsets beyond 2^32", 1, 2, 2, rows, rows, 128 };
        c.q = c.k = c.v = c.o = SAGE_F16;
        Case small            = c;
        small.lq = small.lk = 1;
        Problem p(small, kernel);
        p.own.clear();
        p.own.emplace_back(size_t(rows * width) * 2);
        p.c.lq = p.c.lk = p.d.lq = p.d.lk = rows;
        sage_tensor * ts[]                = { &p.d.q, &p.d.k, &p.d.v, &p.d.o };
        for (int i = 0; i < 4; i++) {
            *ts[i] = { p.own[0].data + 2 * (width / 4 * i), SAGE_F16, 0, 128, width };
            if (i < 3) {
                fill<<<2048, 256>>>(*ts[i], { 1, 2, rows, 128 }, NORMAL, i, nullptr, 0);
            }
        }
        p.run();
        const Errors e = compare(p);
        char text[80];
        std::snprintf(text, sizeof text, "rel %.5f", e.rel());
        std::printf("offsets beyond 2^32 %s %s\n", sage_kernel_name(kernel), text);
        verdict(c.name, sage_kernel_name(kernel), e.rel() < 0.042, text);
    }
}

static void errors() {
    Problem p({ "errors", 1, 1, 1, 8, 8, 64 }, SAGE_KERNEL_FP16);
    Buffer w(p.workspace());
    sage_attn_desc d = p.d;
    verdict("workspace too small", "", sage_attn_run(&d, w.data, w.bytes - 256, nullptr) == SAGE_BAD_ARGUMENT && *sage_last_error(),
            sage_last_error());
    verdict("workspace misaligned", "", sage_attn_run(&d, w.data + 16, w.bytes, nullptr) == SAGE_BAD_ARGUMENT, sage_last_error());
    d.q.data = nullptr;
    verdict("no q", "", sage_attn_run(&d, w.data, w.bytes, nullptr) == SAGE_BAD_ARGUMENT, sage_last_error());
    d = p.d, d.head_dim = 160;
    verdict("head_dim 160", "", sage_attn_run(&d, w.data, w.bytes, nullptr) == SAGE_UNSUPPORTED, sage_last_error());
    d = p.d, d.kv_heads = 2;
    verdict("kv_heads 2 of 1", "", sage_attn_run(&d, w.data, w.bytes, nullptr) == SAGE_BAD_ARGUMENT, sage_last_error());
    verdict("fine", "", sage_attn_run(&p.d, w.data, w.bytes, nullptr) == SAGE_OK && !*sage_last_error(), sage_last_error());
    CUDA(cudaDeviceSynchronize());
}

static float median_ms(const std::function<void()> & f, double budget_ms) {
    cudaEvent_t a, b;
    CUDA(cudaEventCreate(&a));
    CUDA(cudaEventCreate(&b));
    std::vector<float> t;
    f();
    double total = 0;
    while (t.size() < 5 || (total < budget_ms && t.size() < 100)) {
        CUDA(cudaEventRecord(a));
        f();
        CUDA(cudaEventRecord(b));
        CUDA(cudaEventSynchronize(b));
        float ms;
        CUDA(cudaEventElapsedTime(&ms, a, b));
        t.push_back(ms);
        total += ms;
    }
    std::sort(t.begin(), t.end());
    return t[t.size() / 2];
}

static void timing(bool quick) {
    const Case cases[] = {
        { "2,24,4096,4096,128", 2, 24, 24, 4096, 4096, 128 },
        { "1,40,32760,32760,128", 1, 40, 40, 32760, 32760, 128 },
        { "2,24,4096,4096,128 causal", 2, 24, 24, 4096, 4096, 128, NORMAL, NONE, 1 },
        { "1,40,14040,14040,128", 1, 40, 40, 14040, 14040, 128 },
        { "1,40,32760,512,128", 1, 40, 40, 32760, 512, 128 },
        { "1,24,4608,4608,128", 1, 24, 24, 4608, 4608, 128 },
        { "2,24,4096,4096,64", 2, 24, 24, 4096, 4096, 64 },
        { "2,10,4096,4096,64", 2, 10, 10, 4096, 4096, 64 },
        { "2,24,4096,4096,128 bias", 2, 24, 24, 4096, 4096, 128, NORMAL, RANDOM },
    };
    std::printf("ms, F32 in and out: whole call / quantizers / kernel (TFLOP/s of the kernel)\n");
    for (int i = 0; i < (quick ? 2 : 9); i++) {
        const Case & c = cases[i];
        std::printf("%-28s", c.name);
        for (sage_kernel kernel : kernels) {
            Problem p(c, kernel);
            Buffer w(p.workspace());
            const auto part = [&](int parts) {
                return median_ms(
                    [&] {
                        if (sage::run_parts(&p.d, w.data, w.bytes, nullptr, parts) != SAGE_OK) {
                            std::printf("%s\n", sage_last_error());
                        }
                    },
                    250);
            };
            const float whole = part(3), quant = part(1), attn = part(2);
            const double flop = 4.0 * c.b * c.h * c.lq * double(c.lk) * c.d * (c.causal ? 0.5 : 1);
            std::printf("  %s %.3f / %.3f / %.3f (%.0f)", sage_kernel_name(kernel), whole, quant, attn, flop / attn * 1e-9);
        }
        std::printf("\n");
    }
}

int main(int argc, char ** argv) {
    const std::string what = argc > 1 ? argv[1] : "all";
    if (argc > 2) {
        kernels.clear();
        for (int k = 1; k <= 4; k++) {
            if (std::string(argv[2]) == sage_kernel_name(sage_kernel(k))) {
                kernels.push_back(sage_kernel(k));
            }
        }
    }
    sage_device dev;
    if (sage_device_query(0, &dev) != SAGE_OK) {
        std::printf("%s\n", sage_last_error());
        return 1;
    }
    if (what == "time" || what == "quick") {
        timing(what == "quick");
        return 0;
    }
    const struct {
        const char * name;
        void (*run)();
    } parts[] = { { "errors", errors },         { "features", features },   { "ragged", ragged },
                  { "not_finite", not_finite }, { "same_bits", same_bits }, { "far_apart", far_apart } };
    for (const auto & p : parts) {
        if (what == "all" || what == p.name) {
            p.run();
        }
    }
    std::printf(failures ? "check: %d FAILURES\n" : "check: all passed\n", failures);
    return failures != 0;
}
