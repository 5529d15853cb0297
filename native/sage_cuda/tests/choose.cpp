// The chooser's table with made-up devices: no GPU needed.
#include <cstdio>
#include <cstring>

#include "sage_cuda.h"

static int failures = 0;
#define EXPECT(x)                                                \
    do {                                                         \
        if (!(x)) {                                              \
            std::printf("line %d: %s is false\n", __LINE__, #x); \
            failures++;                                          \
        }                                                        \
    } while (0)

static sage_attn_desc desc(sage_kernel kernel = SAGE_KERNEL_AUTO) {
    sage_attn_desc d = {};
    d.struct_size    = sizeof d;
    d.kernel         = kernel;
    d.batch          = 2;
    d.heads          = 6;
    d.kv_heads       = 3;
    d.head_dim       = 80;
    d.lq             = 1000;
    d.lk             = 77;
    d.softmax_scale  = 0.1f;
    return d;
}

static sage_attn_choice choose(const sage_attn_desc & d, const sage_device & device, sage_status expected = SAGE_OK) {
    sage_attn_choice c = {};
    c.struct_size      = sizeof c;
    EXPECT(sage_attn_choose(&d, &device, &c) == expected);
    EXPECT((*sage_last_error() != 0) == (expected != SAGE_OK));
    return c;
}

struct Row {
    sage_device device;
    sage_kernel asked, runs;
    int supported, emulated;
    const char * says;  // part of why_not_better, or of reason; "" : both are empty
};

static const char * ALL = "80 86 89 90a 100a 103a 110a 120a";

int main() {
    const Row table[] = {
        { { 75, 13000, ALL }, SAGE_KERNEL_AUTO, SAGE_KERNEL_AUTO, 0, 0, "below 8.0" },
        { { 80, 13000, ALL }, SAGE_KERNEL_AUTO, SAGE_KERNEL_FP16, 1, 0, "8.9 or newer" },
        { { 86, 12000, ALL }, SAGE_KERNEL_AUTO, SAGE_KERNEL_FP16, 1, 0, "8.9 or newer" },
        { { 87, 13000, ALL }, SAGE_KERNEL_FP16, SAGE_KERNEL_FP16, 1, 0, "" },
        { { 86, 13000, ALL }, SAGE_KERNEL_FP8, SAGE_KERNEL_FP8, 0, 0, "8.9 or newer" },
        { { 80, 11080, ALL }, SAGE_KERNEL_AUTO, SAGE_KERNEL_AUTO, 0, 0, "12.0" },
        { { 89, 13000, ALL }, SAGE_KERNEL_AUTO, SAGE_KERNEL_FP8PP, 1, 0, "" },
        { { 89, 12080, ALL }, SAGE_KERNEL_AUTO, SAGE_KERNEL_FP8PP, 1, 0, "" },
        { { 89, 12070, ALL }, SAGE_KERNEL_AUTO, SAGE_KERNEL_FP8, 1, 0, "12.8" },
        { { 89, 12040, ALL }, SAGE_KERNEL_AUTO, SAGE_KERNEL_FP8, 1, 0, "12.8" },
        { { 89, 12030, ALL }, SAGE_KERNEL_AUTO, SAGE_KERNEL_FP16, 1, 0, "12.4" },
        { { 89, 12030, ALL }, SAGE_KERNEL_FP8, SAGE_KERNEL_FP8, 0, 0, "12.4" },
        { { 89, 12070, ALL }, SAGE_KERNEL_FP8PP, SAGE_KERNEL_FP8PP, 0, 0, "12.8" },
        { { 89, 13000, "80 86" }, SAGE_KERNEL_AUTO, SAGE_KERNEL_FP16, 1, 0, "not compiled" },
        { { 89, 13000, "80 86" }, SAGE_KERNEL_FP8PP, SAGE_KERNEL_FP8PP, 0, 0, "not compiled" },
        { { 90, 13000, ALL }, SAGE_KERNEL_AUTO, SAGE_KERNEL_HOPPER, 1, 0, "" },
        { { 90, 12000, ALL }, SAGE_KERNEL_AUTO, SAGE_KERNEL_HOPPER, 1, 0, "" },
        { { 90, 13000, "90" }, SAGE_KERNEL_AUTO, SAGE_KERNEL_FP8, 1, 1, "code for 90a" },
        { { 90, 12030, "90" }, SAGE_KERNEL_AUTO, SAGE_KERNEL_FP16, 1, 0, "12.4" },
        { { 90, 13000, "90 90a" }, SAGE_KERNEL_HOPPER, SAGE_KERNEL_HOPPER, 0, 0, "90a" },
        { { 89, 13000, ALL }, SAGE_KERNEL_HOPPER, SAGE_KERNEL_HOPPER, 0, 0, "9.0 alone" },
        { { 100, 13000, ALL }, SAGE_KERNEL_HOPPER, SAGE_KERNEL_HOPPER, 0, 0, "9.0 alone" },
        { { 90, 13000, ALL }, SAGE_KERNEL_FP16, SAGE_KERNEL_FP16, 1, 0, "" },
        { { 90, 13000, ALL }, SAGE_KERNEL_FP8PP, SAGE_KERNEL_FP8PP, 1, 1, "fp16 is faster" },
        { { 90, 13000, "80 89" }, SAGE_KERNEL_AUTO, SAGE_KERNEL_AUTO, 0, 0, "not compiled" },
        { { 90, 13000, "compute_80" }, SAGE_KERNEL_AUTO, SAGE_KERNEL_FP16, 1, 0, "not compiled" },
        { { 100, 13000, ALL }, SAGE_KERNEL_AUTO, SAGE_KERNEL_FP8PP, 1, 1, "fp16 is faster" },
        { { 103, 13000, ALL }, SAGE_KERNEL_AUTO, SAGE_KERNEL_FP8PP, 1, 1, "fp16 is faster" },
        { { 103, 13000, "100a" }, SAGE_KERNEL_AUTO, SAGE_KERNEL_AUTO, 0, 0, "not compiled" },
        { { 103, 13000, "100f" }, SAGE_KERNEL_AUTO, SAGE_KERNEL_FP8PP, 1, 1, "fp16 is faster" },
        { { 110, 13000, ALL }, SAGE_KERNEL_AUTO, SAGE_KERNEL_FP8PP, 1, 1, "fp16 is faster" },
        { { 120, 13000, ALL }, SAGE_KERNEL_AUTO, SAGE_KERNEL_FP8PP, 1, 0, "" },
        { { 121, 13000, ALL }, SAGE_KERNEL_AUTO, SAGE_KERNEL_AUTO, 0, 0, "not compiled" },
        { { 121, 13000, "120" }, SAGE_KERNEL_AUTO, SAGE_KERNEL_FP8PP, 1, 0, "" },
    };
    for (const Row & r : table) {
        const sage_attn_choice c = choose(desc(r.asked), r.device);
        const bool said =
            *r.says ? std::strstr(r.supported ? c.why_not_better : c.reason, r.says) != nullptr : !*c.why_not_better && !*c.reason;
        const bool ok = c.kernel == r.runs && c.supported == r.supported && c.emulated == r.emulated && said &&
                        *c.reason == (r.supported ? 0 : *c.reason) && (c.workspace > 0) == (r.supported != 0) && c.workspace % 256 == 0 &&
                        c.compute_capability == r.device.compute_capability && c.abi_version == sage_abi_version();
        if (!ok) {
            std::printf("cc %d, CUDA %d, %s, asked %s: kernel %s, supported %d, emulated %d, \"%s\" \"%s\"\n", r.device.compute_capability,
                        r.device.toolkit, r.device.architectures, sage_kernel_name(r.asked), sage_kernel_name(c.kernel), c.supported,
                        c.emulated, c.reason, c.why_not_better);
            failures++;
        }
    }
    const sage_device ada = { 89, 13000, ALL };
    sage_attn_desc d      = desc();
    d.head_dim            = 160;
    EXPECT(!choose(d, ada).supported);
    d    = desc();
    d.lk = int64_t(1) << 31;
    EXPECT(!choose(d, ada).supported);
    d       = desc();
    d.batch = 1 << 30;
    EXPECT(!choose(d, ada).supported);
    d    = desc();
    d.lq = 0;
    choose(d, ada, SAGE_BAD_ARGUMENT);
    d          = desc();
    d.kv_heads = 4;
    choose(d, ada, SAGE_BAD_ARGUMENT);
    d         = desc();
    d.q.dtype = sage_dtype(7);
    choose(d, ada, SAGE_BAD_ARGUMENT);
    d               = desc();
    d.softmax_scale = 1.f / 0.f;
    choose(d, ada, SAGE_BAD_ARGUMENT);
    d        = desc();
    d.kernel = sage_kernel(9);
    choose(d, ada, SAGE_BAD_ARGUMENT);
    d             = desc();
    d.struct_size = 8;
    choose(d, ada, SAGE_BAD_ARGUMENT);
    std::printf(failures ? "choose: %d failures\n" : "choose: all passed\n", failures);
    return failures != 0;
}
