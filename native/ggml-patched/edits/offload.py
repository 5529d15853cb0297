"""Parameters that lie in the host's memory (--offload-to-cpu)."""

from edits.table import EXTEND, SD, Edit, Group

OFFLOAD = Group(
    name="offload",
    why="Parameters are copied to the GPU tensor by tensor from ordinary memory, at a third of the bus's speed or less, and"
    " of a pair of experts the second waits for that: copies go through pinned memory, and where there is room they begin"
    " during the last step of the first expert.",
    guard="tests/test_offload.py",
    drop="upstream copies parameters through pinned memory by itself",
    edits=(
        Edit(EXTEND, ">", '#include "ggml_extend_backend.hpp"\n', '#include "sdsage_offload.hpp"\n'),
        Edit(EXTEND, ">", "    size_t max_graph_vram_bytes = 0;\n", "    sdsage::ParamCopy param_copy;\n"),
        Edit(EXTEND, "=", "bool offload_all_params() {", "bool offload_all_params(bool only_begin = false) {"),
        Edit(
            EXTEND,
            "=",
            "        GGML_ASSERT(runtime_params_buffer == nullptr);\n",
            "        const bool begun = runtime_params_buffer != nullptr;\n"
            "        if (only_begin && (begun || !sdsage::has_room(runtime_backend, get_params_buffer_size()))) {\n"
            "            return begun;\n"
            "        }\n",
        ),
        Edit(
            EXTEND,
            "=",
            "        runtime_params_buffer = ggml_backend_alloc_ctx_tensors(offload_ctx, runtime_backend);\n",
            "        if (!begun) {\n"
            "            runtime_params_buffer = ggml_backend_alloc_ctx_tensors(offload_ctx, runtime_backend);\n"
            "        }\n",
        ),
        Edit(EXTEND, "=", "            ggml_backend_tensor_copy(t, offload_t);\n", ""),
        Edit(
            EXTEND,
            ">",
            "        ggml_backend_buffer_set_usage(runtime_params_buffer, GGML_BACKEND_BUFFER_USAGE_WEIGHTS);\n",
            "        if (!begun) {\n"
            "            param_copy.begin(sdsage::ParamCopy::pairs_of(params_ctx, offload_ctx), runtime_backend, get_desc());\n"
            "        }\n"
            "        if (only_begin) {\n"
            "            return true;\n"
            "        }\n"
            "        param_copy.finish();\n",
        ),
        Edit(
            EXTEND,
            ">",
            "        ggml_backend_buffer_set_usage(partial_runtime_params_buffer, GGML_BACKEND_BUFFER_USAGE_WEIGHTS);\n",
            "        param_copy.begin(partial_offload_pairs, runtime_backend, get_desc());\n        param_copy.finish();\n",
        ),
        Edit(EXTEND, "=", "            ggml_backend_tensor_copy(tensor, offload_tensor);\n", ""),
        Edit(
            EXTEND,
            "=",
            "            ggml_backend_buffer_free(params_buffer);\n",
            "            param_copy.free(params_buffer, params_backend != runtime_backend);\n",
        ),
        Edit(
            EXTEND,
            "<",
            "    bool is_diffusion_model = false;\n",
            "    // Copies parameters while another network computes, if there is room for both; else it does nothing.\n"
            "    void begin_offload() {\n"
            "        if (params_backend != runtime_backend && !params_on_runtime_backend && max_graph_vram_bytes == 0) {\n"
            "            offload_all_params(true);\n"
            "        }\n"
            "    }\n\n"
            "    // Gives back what begin_offload() copied and nobody used.\n"
            "    void drop_offload() {\n"
            "        if (runtime_params_buffer == nullptr || params_on_runtime_backend) {\n"
            "            return;\n"
            "        }\n"
            "        param_copy.stop();\n"
            "        for (auto t = ggml_get_first_tensor(offload_ctx); t != nullptr; t = ggml_get_next_tensor(offload_ctx, t)) {\n"
            "            t->buffer = nullptr;\n"
            "            t->data   = nullptr;\n"
            "            t->extra  = nullptr;\n"
            "        }\n"
            "        ggml_backend_buffer_free(runtime_params_buffer);\n"
            "        runtime_params_buffer = nullptr;\n"
            "    }\n\n",
        ),
        Edit(
            SD,
            "<",
            "        auto denoise = [&](const sd::Tensor<float>& x, float sigma, int step) -> sd::Tensor<float> {\n",
            "        int computed = 0;  // calls of this expert: after the first its buffers have their full size\n",
        ),
        Edit(
            SD,
            "<",
            "            std::vector<float> scaling = denoiser->get_scalings(sigma);\n            GGML_ASSERT(scaling.size() == 3);\n",
            "            const bool is_last = computed++ > 0 && std::abs(step) >= static_cast<int>(steps);\n"
            "            if (is_last && work_diffusion_model == high_noise_diffusion_model &&\n"
            "                (preview.mode == PREVIEW_NONE || preview.mode == PREVIEW_PROJ)) {  // others decode, and need room\n"
            "                sdsage::begin_offload(diffusion_model);\n"
            "            }\n",
        ),
        Edit(
            SD,
            "<",
            "    int64_t latent_start = ggml_time_ms();\n    int W                = request.width / request.vae_scale_factor;\n",
            "    sdsage::OffloadScope offload(sd_ctx->sd->diffusion_model);\n",
        ),
    ),
)
