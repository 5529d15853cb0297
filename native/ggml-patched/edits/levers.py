"""Levers: what the engine computes by code of ours beside attention."""

from edits.table import CUDA, EXTEND, HEADER, SD, WAN, Edit, Group

EMBEDDING = Group(
    name="embedding",
    why="The table of a rotary embedding is made again for every step: 0.15 s for 81 frames of 832x480, a sixteenth"
    " of a step.",
    guard="tests/test_levers.py::test_the_rotary_table_is_made_once",
    drop="upstream keeps the table, or ggml's own rotary embedding is used",
    edits=(
        Edit("src/rope.hpp", ">", '#include "ggml_extend.hpp"\n', '#include "sdsage_embedding.hpp"\n'),
        Edit(
            "src/rope.hpp",
            "<",
            "        std::vector<std::vector<float>> trans_ids = transpose(ids);\n        size_t pos_len ",
            "        return sdsage::known_embedding(ids, bs, axis_thetas, axes_dim, wrap_dims, static_cast<int>(layout), [&] {\n",
        ),
        Edit("src/rope.hpp", ">", "        return flatten(emb);\n", "        });\n"),
        # of a video even the positions that it is made for take 20 ms a step
        Edit(
            WAN,
            "<",
            "        SDVersion version;\n\n        WanRunner(ggml_backend_t backend,",
            "        sdsage::Changed<std::array<int64_t, 3>> pe_size;\n",
        ),
        Edit(
            WAN,
            "<",
            "            pe_vec      = Rope::gen_wan_pe(",
            "            if (pe_size.to({x->ne[0], x->ne[1], x->ne[2]})) {\n",
        ),
        Edit(WAN, ">", "                                           wan_params.axes_dim);\n", "            }\n"),
    ),
)

LEVERS = Group(
    name="levers",
    why="Linear layers, norms, rotary embedding and the VAE's convolutions on CUDA: a runner's finished graph is searched for"
    " them (native/sd_cli/src/levers.cpp), and custom nodes in the CUDA backend compute what was found.",
    guard="tests/test_levers.py",
    drop="never: it is ours",
    edits=(
        Edit(
            HEADER,
            "<",
            "} sd_ctx_params_t;",
            '    const char* engine_levers;  // "default" (or NULL), "none", or names joined by commas\n'
            "    bool fast_linear;  // the lever 'linear' in FP8; new_sd_ctx fails where it can't run\n",
        ),
        Edit(EXTEND, ">", '#include "ggml_extend_backend.hpp"\n', '#include "sdsage_levers.hpp"\n'),
        Edit(
            EXTEND,
            "<",
            "    void set_circular_axes(bool circular_x, bool circular_y) {",
            "    unsigned engine_levers = 0;\n\n",
        ),
        Edit(
            EXTEND,
            "<",
            "        prepare_build_in_tensor_after(gf);\n        return gf;",
            "        sdsage::pull_levers(compute_ctx, runtime_backend, gf, engine_levers, get_desc());\n",
        ),
        Edit(
            SD,
            ">",
            "        init_backend();\n",
            "        unsigned levers = 0;\n"
            "        if (!sdsage::read_levers(sd_ctx_params->engine_levers, sd_ctx_params->fast_linear, &levers, backend)) {\n"
            "            return false;\n"
            "        }\n",
        ),
        Edit(
            SD,
            "<",
            "            diffusion_model->set_circular_axes(sd_ctx_params->circular_x",
            "            sdsage::set_levers(diffusion_model, levers);\n"
            "            sdsage::set_levers(high_noise_diffusion_model, levers);\n"
            "            if (first_stage_model) {\n"
            "                first_stage_model->engine_levers = levers & sdsage::LEVER_VAE;\n"
            "            }\n",
        ),
        Edit(
            SD,
            ">",
            '             "diffusion_flash_attn: %s\\n"\n',
            '             "engine_levers: %s\\n"\n             "fast_linear: %s\\n"\n',
        ),
        Edit(
            SD,
            ">",
            "             BOOL_STR(sd_ctx_params->diffusion_flash_attn),\n",
            '             sd_ctx_params->engine_levers ? sd_ctx_params->engine_levers : "default",\n'
            "             BOOL_STR(sd_ctx_params->fast_linear),\n",
        ),
        Edit(CUDA, ">", '#include "ggml-cuda/common.cuh"\n', '#include "sdsage_levers.hpp"\n'),
        Edit(
            CUDA,
            "<",
            "static bool ggml_cuda_compute_forward(ggml_backend_cuda_context & ctx,",
            "extern const sdsage::LeverBackend sdsage_lever_backend;\n"
            "bool sdsage_lever_supported(int device, const ggml_tensor * node);\n"
            "bool sdsage_lever_compute(ggml_backend_cuda_context & ctx, ggml_tensor * node);\n\n",
        ),
        Edit(
            CUDA,
            "<",
            '    if (strcmp(name, "ggml_backend_split_buffer_type") == 0) {',
            "    if (strcmp(name, SDSAGE_LEVERS_PROC) == 0) {\n"
            "        return const_cast<sdsage::LeverBackend *>(&sdsage_lever_backend);\n"
            "    }\n",
        ),
    ),
)
