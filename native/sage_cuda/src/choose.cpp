// The chooser: pure, no CUDA, one answer for everything. The table is kernels.md's "Which kernel runs".
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <initializer_list>

#include "error.h"
#include "plan.h"

namespace {

using sage::fail;

constexpr int64_t TOKENS_MAX = int64_t(1) << 30;  // token numbers are 32-bit inside
constexpr int64_t BLOCKS_MAX = 2147483647;        // of a grid, along x

// Calls f(number, letter, is PTX) for each architecture of the list: "80": machine code for 8.0 and later 8.x; "90a": for 9.0 alone;
// "100f": for 10.0 and later 10.x; "compute_80": PTX for 8.0 and anything later.
template <class F>
void each_architecture(const char * architectures, F && f) {
    for (const char * s = architectures; *s;) {
        s += std::strspn(s, " ;,");
        const bool ptx = std::strncmp(s, "compute_", 8) == 0;
        s += ptx ? 8 : 0;
        char * end;
        const int arch = int(std::strtol(s, &end, 10));
        if (end != s) {
            f(arch, *end, ptx);
        }
        s = end + std::strcspn(end, " ;,");
    }
}

// The __CUDA_ARCH__ / 10 of the code that runs on a device, 0 if none.
int code_level(const char * architectures, int cc) {
    int best = 0;
    each_architecture(architectures, [&](int arch, char letter, bool ptx) {
        const bool runs = letter == 'a' ? cc == arch : ptx && letter != 'f' ? cc >= arch : cc / 10 == arch / 10 && cc >= arch;
        if (runs && arch > best) {
            best = arch;
        }
    });
    return best;
}

bool fp8_is_native(int cc) { return cc == 89 || cc / 10 == 12; }

bool is_dtype(sage_dtype d) { return d == SAGE_F32 || d == SAGE_F16 || d == SAGE_BF16; }

sage_status check(const sage_attn_desc * d) {
    if (d->batch < 1 || d->heads < 1 || d->kv_heads < 1 || d->head_dim < 1 || d->lq < 1 || d->lk < 1) {
        return fail(SAGE_BAD_ARGUMENT, "batch %d, heads %d, kv_heads %d, head_dim %d, lq %lld, lk %lld: each must be at least 1", d->batch,
                    d->heads, d->kv_heads, d->head_dim, (long long)d->lq, (long long)d->lk);
    }
    if (d->heads % d->kv_heads != 0) {
        return fail(SAGE_BAD_ARGUMENT, "heads %d is not a multiple of kv_heads %d: each KV head serves the same number of query heads",
                    d->heads, d->kv_heads);
    }
    const sage_tensor * tensors[] = { &d->q, &d->k, &d->v, &d->o };
    for (int i = 0; i < 4; i++) {
        if (!is_dtype(tensors[i]->dtype)) {
            return fail(SAGE_BAD_ARGUMENT, "dtype %d of %c is not known: use SAGE_F32, SAGE_F16 or SAGE_BF16", int(tensors[i]->dtype),
                        "qkvo"[i]);
        }
    }
    if (!std::isfinite(d->softmax_scale)) {
        return fail(SAGE_BAD_ARGUMENT, "softmax_scale is not a finite number: 1/sqrt(head_dim) is usual");
    }
    if (d->kernel < SAGE_KERNEL_AUTO || d->kernel > SAGE_KERNEL_HOPPER) {
        return fail(SAGE_BAD_ARGUMENT, "kernel %d is not known: use SAGE_KERNEL_AUTO, _FP16, _FP8, _FP8PP or _HOPPER", int(d->kernel));
    }
    return SAGE_OK;
}

const char * why_shape_does_not_run(const sage_attn_desc & d) {
    if (d.head_dim > 128) {
        return "head_dim above 128 is not supported by SageAttention (1..128): use ordinary attention here";
    }
    if (d.lq > TOKENS_MAX || d.lk > TOKENS_MAX) {
        return "more than 2^30 tokens are not supported by SageAttention: use ordinary attention here";
    }
    const int64_t q_tiles = (d.lq + 63) / 64 + 1, k_tiles = (d.lk + 63) / 64;
    const double blocks = double(d.batch) * d.heads * q_tiles + double(d.batch) * d.kv_heads * 2 * k_tiles;
    if (blocks > BLOCKS_MAX) {
        return "batch * heads * tokens / 64 is above 2^31 - 1, the blocks of one launch: split the batch into several calls";
    }
    return "";
}

const char * why_kernel_does_not_run(sage_kernel kernel, const sage_device & dev, int level) {
    const int cc = dev.compute_capability;
    if (cc < 80) {
        return "this GPU's compute capability is below 8.0, the least that SageAttention needs: use ordinary attention here";
    }
    if (dev.toolkit < 12000) {
        return "the kernels were compiled with a CUDA toolkit older than 12.0: build them with 12.0 or newer";
    }
    if (level < 80) {
        return "the kernels were not compiled for this GPU's architecture: add it to CMAKE_CUDA_ARCHITECTURES and build again";
    }
    if (kernel == SAGE_KERNEL_FP16) {
        return "";
    }
    if (kernel == SAGE_KERNEL_HOPPER) {
        return cc != 90 ? "hopper runs on compute capability 9.0 alone (H100, H200, GH200), and this GPU's is another one"
               : !sage::has_sm90_code(dev) ? "hopper needs code for 90a, and none for 90 beside it: add it to CMAKE_CUDA_ARCHITECTURES"
                                           : "";
    }
    if (cc < 89) {
        return "FP8 needs compute capability 8.9 or newer, and this GPU's is older: the kernel fp16 runs here";
    }
    if (level < 89) {
        return "FP8 code was not compiled for this GPU: add its own architecture (89 or newer) to CMAKE_CUDA_ARCHITECTURES";
    }
    if (kernel == SAGE_KERNEL_FP8) {
        return dev.toolkit >= 12040 ? "" : "fp8 needs kernels compiled with CUDA 12.4 or newer: build them with a newer toolkit";
    }
    return dev.toolkit >= 12080 ? "" : "fp8++ needs kernels compiled with CUDA 12.8 or newer: build them with a newer toolkit";
}

// hopper, then fp8++, then fp8, then fp16; compute capability 9.0 has no fp8++ in the table.
sage_kernel best_kernel(const sage_device & dev, int level, const char ** why_not_better) {
    *why_not_better = "";
    for (sage_kernel kernel : { SAGE_KERNEL_HOPPER, SAGE_KERNEL_FP8PP, SAGE_KERNEL_FP8 }) {
        if (dev.compute_capability == 90 ? kernel == SAGE_KERNEL_FP8PP : kernel == SAGE_KERNEL_HOPPER) {
            continue;
        }
        const char * why = why_kernel_does_not_run(kernel, dev, level);
        if (*why == 0) {
            return kernel;
        }
        *why_not_better = why;
    }
    return SAGE_KERNEL_FP16;
}

}  // namespace

bool sage::has_sm90_code(const sage_device & device) {
    bool own = false, plain = false;
    each_architecture(device.architectures, [&](int arch, char letter, bool ptx) {
        own |= arch == 90 && letter == 'a' && !ptx;
        plain |= arch == 90 && letter != 'a' && !ptx;
    });
    return device.compute_capability == 90 && own && !plain;
}

extern "C" int sage_abi_version(void) { return SAGE_ABI_VERSION; }

extern "C" const char * sage_kernel_name(sage_kernel kernel) {
    switch (kernel) {
        case SAGE_KERNEL_AUTO:
            return "auto";
        case SAGE_KERNEL_FP16:
            return "fp16";
        case SAGE_KERNEL_FP8:
            return "fp8";
        case SAGE_KERNEL_FP8PP:
            return "fp8++";
        case SAGE_KERNEL_HOPPER:
            return "hopper";
    }
    return "unknown";
}

extern "C" sage_status sage_attn_choose(const sage_attn_desc * desc, const sage_device * device, sage_attn_choice * choice) {
    sage::clear_error();
    if (desc == nullptr || device == nullptr || choice == nullptr || device->architectures == nullptr) {
        return fail(SAGE_BAD_ARGUMENT, "a null description, device, architecture list or choice: all are needed");
    }
    if (desc->struct_size != sizeof(sage_attn_desc) || choice->struct_size != sizeof(sage_attn_choice)) {
        return fail(SAGE_BAD_ARGUMENT,
                    "struct_size is %u of the description and %u of the choice, this library's are %zu and %zu: "
                    "header and library differ",
                    desc->struct_size, choice->struct_size, sizeof(sage_attn_desc), sizeof(sage_attn_choice));
    }
    if (check(desc) != SAGE_OK) {
        return SAGE_BAD_ARGUMENT;
    }
    const int level = code_level(device->architectures, device->compute_capability);

    *choice                    = {};
    choice->struct_size        = sizeof(sage_attn_choice);
    choice->compute_capability = device->compute_capability;
    choice->toolkit            = device->toolkit;
    choice->architectures      = device->architectures;
    choice->abi_version        = SAGE_ABI_VERSION;
    choice->why_not_better     = "";
    choice->kernel             = desc->kernel == SAGE_KERNEL_AUTO ? best_kernel(*device, level, &choice->why_not_better) : desc->kernel;
    choice->reason             = why_shape_does_not_run(*desc);
    if (*choice->reason == 0) {
        choice->reason = why_kernel_does_not_run(choice->kernel, *device, level);
    }
    if (*choice->reason != 0) {
        choice->kernel         = desc->kernel;
        choice->why_not_better = "";
        return SAGE_OK;
    }
    choice->supported  = 1;
    const bool mma_fp8 = choice->kernel == SAGE_KERNEL_FP8 || choice->kernel == SAGE_KERNEL_FP8PP;
    choice->emulated   = mma_fp8 && !fp8_is_native(device->compute_capability);
    if (choice->emulated) {
        choice->why_not_better = device->compute_capability != 90
                                     ? "this GPU emulates the FP8 instruction that this kernel uses: the kernel fp16 is faster here"
                                     : "this GPU emulates the FP8 instruction that this kernel uses: the kernel fp16 is faster here, and "
                                       "hopper much faster, which code for 90a alone has (CMAKE_CUDA_ARCHITECTURES)";
    }
    choice->workspace = sage::make_plan(*desc, choice->kernel, sage::has_sm90_code(*device)).bytes;
    return SAGE_OK;
}

extern "C" sage_status sage_attn_workspace_layout(const sage_attn_desc * desc, const sage_device * device, sage_attn_layout * layout) {
    sage_attn_choice choice  = {};
    choice.struct_size       = sizeof choice;
    const sage_status status = sage_attn_choose(desc, device, &choice);
    if (status != SAGE_OK) {
        return status;
    }
    if (layout == nullptr || layout->struct_size != sizeof(sage_attn_layout)) {
        return fail(SAGE_BAD_ARGUMENT, "a layout that is null or of another struct_size than this library's %zu", sizeof(sage_attn_layout));
    }
    if (!choice.supported) {
        return fail(SAGE_UNSUPPORTED, "%s", choice.reason);
    }
    const sage::Plan plan = sage::make_plan(*desc, choice.kernel, sage::has_sm90_code(*device));
    *layout               = { sizeof(sage_attn_layout),
                              plan.d,
                              plan.q_rows,
                              plan.k_rows,
                              plan.q8,
                              plan.k8,
                              plan.v_codes,
                              plan.sq,
                              plan.sk,
                              plan.v_scale,
                              plan.k_mean,
                              plan.v_mean };
    return SAGE_OK;
}
