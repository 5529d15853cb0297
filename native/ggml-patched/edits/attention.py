"""SageAttention in the engine, and faults of its FlashAttention."""

from edits.table import CUDA, EXTEND, HEADER, SD, Edit, Group

SAGE = Group(
    name="sage",
    why="SageAttention in the diffusion models: one early return in the function that all attention goes through, the"
    " public flag, the check before any file is opened, and custom nodes in the CUDA backend.",
    guard="tests/test_sage_engine.py",
    drop="never: it is ours",
    edits=(
        Edit(
            HEADER,
            "<",
            "typedef struct {\n    const char* model_path;",
            "// Kernel of SageAttention; AUTO takes the best for the device.\n"
            "enum sd_sage_kernel_t {\n"
            "    SD_SAGE_KERNEL_AUTO,\n"
            "    SD_SAGE_KERNEL_FP16,\n"
            "    SD_SAGE_KERNEL_FP8,\n"
            "    SD_SAGE_KERNEL_FP8PP,\n"
            "    SD_SAGE_KERNEL_HOPPER,\n"
            "    SD_SAGE_KERNEL_COUNT\n"
            "};\n\n",
        ),
        Edit(
            HEADER,
            "<",
            "} sd_ctx_params_t;",
            "    bool sage_attn;  // the diffusion models use SageAttention; new_sd_ctx fails where it can't run\n"
            "    enum sd_sage_kernel_t sage_kernel;\n",
        ),
        Edit(EXTEND, ">", '#include "ggml_extend_backend.hpp"\n', '#include "sdsage_attention.hpp"\n'),
        Edit(EXTEND, "=", "bool flash_attn   = false,", "int flash_attn    = 0,"),
        Edit(
            EXTEND,
            ">",
            "float kv_scale    = 1.0f) {  // avoid overflow\n",
            "    const char* why_not_sage = nullptr;\n"
            "    if (flash_attn & sdsage::ATTN_SAGE) {\n"
            "        if (auto out = sdsage::sage_attention(ctx, backend, q, k, v, n_head, mask, skip_reshape, flash_attn,"
            " &why_not_sage)) {\n"
            "            return out;\n"
            "        }\n"
            "    }\n",
        ),
        Edit(
            EXTEND,
            "=",
            "            } else {\n                kqv = ggml_view_3d(ctx, kqv, d_head, n_head, L_q, kqv->nb[1], kqv->nb[2], 0);\n"
            "            }\n",
            "            }\n",
        ),
        Edit(
            EXTEND,
            "<",
            "    if (kqv == nullptr) {\n        // if (flash_attn) {",
            "    const bool is_flash = kqv != nullptr;\n",
        ),
        Edit(
            EXTEND,
            "<",
            "    kqv = ggml_ext_cont(ctx, kqv);\n    kqv = ggml_reshape_3d(ctx, kqv, d_head * n_head, L_q, N);",
            "    sdsage::mark_attention(kqv, is_flash, why_not_sage);\n",
        ),
        Edit(
            EXTEND,
            "=",
            "bool flash_attn_enabled                       = false;",
            "int flash_attn_enabled                        = 0;",
        ),
        Edit(EXTEND, "=", "bool flash_attn_enabled    = false;", "int flash_attn_enabled     = 0;"),
        Edit(
            EXTEND,
            "=",
            "void set_flash_attention_enabled(bool enabled) {",
            "bool is_diffusion_model = false;\n\n    void set_flash_attention_enabled(int enabled) {",
        ),
        Edit(
            EXTEND,
            "<",
            "        int64_t t_cache_begin = ggml_time_ms();\n",
            "        sdsage::count_attention(gf, get_desc(), is_diffusion_model);\n",
        ),
        Edit(SD, ">", '#include "diffusion_model.hpp"\n', '#include "sdsage_models.hpp"\n'),
        Edit(
            SD,
            ">",
            "        init_backend();\n",
            "        if (sd_ctx_params->sage_attn &&\n"
            "            !sdsage::check_sage(backend, static_cast<sage_kernel>(sd_ctx_params->sage_kernel))) {\n"
            "            return false;\n"
            "        }\n",
        ),
        Edit(
            SD,
            "<",
            "            diffusion_model->set_circular_axes(sd_ctx_params->circular_x",
            "            const auto kernel = static_cast<sage_kernel>(sd_ctx_params->sage_kernel);\n"
            "            const int attention = sd_ctx_params->sage_attn ? sdsage::sage_setting(kernel) : 0;\n"
            "            sdsage::set_attention(diffusion_model, attention);\n"
            "            sdsage::set_attention(high_noise_diffusion_model, attention);\n",
        ),
        Edit(
            SD,
            "=",
            "            if (sd_ctx_params->flash_attn || sd_ctx_params->diffusion_flash_attn) {\n                LOG_INFO(",
            "            if ((sd_ctx_params->flash_attn || sd_ctx_params->diffusion_flash_attn) && !sd_ctx_params->sage_attn) {\n"
            "                LOG_INFO(",
        ),
        Edit(
            SD,
            ">",
            '             "diffusion_flash_attn: %s\\n"\n',
            '             "sage_attn: %s\\n"\n             "sage_kernel: %s\\n"\n',
        ),
        Edit(
            SD,
            ">",
            "             BOOL_STR(sd_ctx_params->diffusion_flash_attn),\n",
            "             BOOL_STR(sd_ctx_params->sage_attn),\n"
            "             sdsage::sage_kernel_text(static_cast<sage_kernel>(sd_ctx_params->sage_kernel)),\n",
        ),
        Edit(CUDA, ">", '#include "ggml-cuda/common.cuh"\n', '#include "sdsage_attention.hpp"\n'),
        Edit(
            CUDA,
            "<",
            "static bool ggml_cuda_compute_forward(ggml_backend_cuda_context & ctx,",
            "extern const sdsage::SageBackend sdsage_sage_backend;\n"
            "bool sdsage_sage_supported(int device, const ggml_tensor * node);\n"
            "bool sdsage_sage_compute(ggml_backend_cuda_context & ctx, ggml_tensor * node);\n\n",
        ),
        Edit(
            CUDA,
            ">",
            "            ggml_cuda_flash_attn_ext(ctx, dst);\n            break;\n",
            "        case GGML_OP_CUSTOM:\n            return sdsage_sage_compute(ctx, dst) || sdsage_lever_compute(ctx, dst);\n",
        ),
        Edit(
            CUDA,
            ">",
            "            return ggml_cuda_flash_attn_ext_supported(dev_ctx->device, op);\n",
            "        case GGML_OP_CUSTOM:\n"
            "            return sdsage_sage_supported(dev_ctx->device, op) || sdsage_lever_supported(dev_ctx->device, op);\n",
        ),
        Edit(
            CUDA,
            "<",
            '    if (strcmp(name, "ggml_backend_split_buffer_type") == 0) {',
            "    if (strcmp(name, SDSAGE_SAGE_PROC) == 0) {\n"
            "        return const_cast<sdsage::SageBackend *>(&sdsage_sage_backend);\n"
            "    }\n",
        ),
    ),
)

FLASH = Group(
    name="flash",
    why="Where SageAttention does not take a case, upstream's FlashAttention follows, and it is faulty there: a mask is"
    " transposed, a batch above 1 aborts, and a mask of all queries times all keys is built to pad the keys to a multiple"
    " of 256, which ggml's kernels do not need.",
    guard="tests/test_attention.py",
    drop="ggml_ext_attention_ext pads nothing, transposes no mask, and views four dimensions",
    edits=(
        Edit(  # a warning that this makes false
            SD,
            "=",
            "if ((sd_ctx_params->flash_attn || sd_ctx_params->diffusion_flash_attn) && sd_ctx_params->chroma_use_dit_mask) {",
            "if (false) {",
        ),
        Edit(
            EXTEND,
            "=",
            "        if (can_use_flash_attn && L_k % 256 != 0) {\n"
            "            kv_pad = GGML_PAD(L_k, 256) - static_cast<int>(L_k);\n        }\n",
            "",
        ),
        Edit(
            EXTEND,
            "=",
            "            mask_in = ggml_transpose(ctx, mask_in);\n",
            "            mask_in = sdsage::flash_mask(ctx, mask_in, L_q, N);\n",
        ),
        Edit(
            EXTEND,
            "<",
            "        auto out = ggml_flash_attn_ext(ctx, q_in, k_in, v_in, mask_in,",
            "        q_in = ggml_reshape_4d(ctx, q_in, d_head, L_q, n_head, N);\n"
            "        k_in = ggml_reshape_4d(ctx, k_in, d_head, L_k, n_kv_head, N);\n"
            "        v_in = ggml_reshape_4d(ctx, v_in, d_head, L_k, n_kv_head, N);\n",
        ),
        Edit(
            "src/rope.hpp",
            "<",
            "        q = apply_rope(ctx->ggml_ctx, q, pe, rope_interleaved);",
            "        const int64_t n_head = q->ne[1];\n",
        ),
        Edit(
            "src/rope.hpp",
            "=",
            "ggml_ext_attention_ext(ctx->ggml_ctx, ctx->backend, q, k, v, v->ne[1], mask, true,",
            "ggml_ext_attention_ext(ctx->ggml_ctx, ctx->backend, q, k, v, n_head, mask, true,",
        ),
    ),
)
