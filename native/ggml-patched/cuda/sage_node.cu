// SageAttention nodes of the CUDA backend; compiled into the ggml-cuda target, called by its edits (group "sage").
#include "common.cuh"
#include "sdsage_attention.hpp"

static thread_local std::string * caught = nullptr;

static void catch_failure(std::string * reason) { caught = reason; }

// Named by the edits of ggml-cuda.cu.
extern const sdsage::SageBackend sdsage_sage_backend = { catch_failure, sage_device_query, sage_attn_choose, sage_last_error };

bool sdsage_sage_supported(int device, const ggml_tensor * node) {
    sage_attn_desc desc;
    sage_device properties;
    sage_attn_choice choice = {};
    choice.struct_size      = sizeof(choice);
    return sdsage::read_sage_node(node, &desc) && sage_device_query(device, &properties) == SAGE_OK &&
           sage_attn_choose(&desc, &properties, &choice) == SAGE_OK && choice.supported;
}

bool sdsage_sage_compute(ggml_backend_cuda_context & ctx, ggml_tensor * node) {
    sage_attn_desc desc;
    if (!sdsage::read_sage_node(node, &desc)) {
        return false;
    }
    sage_device properties;
    sage_attn_choice choice = {};
    choice.struct_size      = sizeof(choice);
    sage_status status      = sage_device_query(ctx.device, &properties);
    if (status == SAGE_OK) {
        status = sage_attn_choose(&desc, &properties, &choice);
    }
    if (status == SAGE_OK) {
        constexpr size_t align = 256;  // that of the kernels; ggml's pool gives 128
        ggml_cuda_pool_alloc<char> memory(ctx.pool(), choice.workspace + align);
        char * workspace = reinterpret_cast<char *>((reinterpret_cast<uintptr_t>(memory.get()) + align - 1) / align * align);
        status           = sage_attn_run(&desc, workspace, choice.workspace, ctx.stream());
    }
    if (status != SAGE_OK && caught != nullptr) {
        *caught = sage_last_error();
    } else if (status != SAGE_OK) {
        GGML_ABORT("SageAttention: %s", sage_last_error());
    }
    return true;
}
