"""What a running job is: its stages, its end, its latents, its random numbers."""

from edits.table import EXTEND, MODEL, SD, Edit, Group

SEAM = Group(
    name="seam",
    why="Upstream has no cancel, no stage times, no guard against NaN latents and gives the latents to nobody: the"
    " pipeline calls our job at its stages and steps, and our entry points see what is static there.",
    guard="tests/test_context.py",
    drop="sd_cancel_generation exists and generate_video hands out latents",
    edits=(
        Edit(SD, ">", '#include "name_conversion.h"\n', '#include "sdsage_fit.hpp"\n#include "sdsage_seam.hpp"\n'),
        Edit(
            SD,
            "=",
            "auto x0_opt = sample_k_diffusion(method, denoise, x_t,",
            "const sdsage::Expert expert = !high_noise_diffusion_model                        ? sdsage::Expert::only\n"
            "                                      : work_diffusion_model == high_noise_diffusion_model ? sdsage::Expert::high_noise\n"
            "                                                                                           : sdsage::Expert::low_noise;\n"
            "        sdsage::StageScope stage(sdsage::Stage::sample, expert, static_cast<int>(steps));\n"
            "        auto x0_opt = sample_k_diffusion(method, sdsage::watch_steps(denoise), x_t,",
        ),
        Edit(
            SD,
            "<",
            "    sd::Tensor<float> init_image_tensor;\n",
            "    sdsage::StageScope stage(sdsage::Stage::encode_image);\n",
        ),
        Edit(
            SD,
            "<",
            "    sd::Tensor<float> start_image;\n",
            "    sdsage::StageScope stage(sdsage::Stage::encode_image);\n",
        ),
        Edit(
            SD,
            "<",
            "    ConditionerParams condition_params;\n    condition_params.text            = request->prompt;",
            "    sdsage::StageScope stage(sdsage::Stage::encode_text);\n",
        ),
        Edit(
            SD,
            "<",
            "    ImageGenerationEmbeds embeds;\n    ConditionerParams condition_params;",
            "    sdsage::StageScope stage(sdsage::Stage::encode_text);\n",
        ),
        Edit(
            SD,
            "<",
            '    LOG_INFO("decoding %zu latents", final_latents.size());',
            "    if (!sdsage::check_latents(final_latents)) {\n"
            "        return nullptr;\n"
            "    }\n"
            "    sdsage::StageScope stage(sdsage::Stage::decode);\n",
        ),
        Edit(
            SD,
            "<",
            "    int64_t t4            = ggml_time_ms();\n    sd::Tensor<float> vid =",
            "    if (!sdsage::check_latents(std::vector<sd::Tensor<float>>{final_latent})) {\n"
            "        return nullptr;\n"
            "    }\n"
            "    sdsage::StageScope stage(sdsage::Stage::decode);\n",
        ),
        Edit(EXTEND, ">", '#include "ggml_extend_backend.hpp"\n', '#include "sdsage_seam.hpp"\n'),
        Edit(
            EXTEND,
            ">",
            "            ggml_backend_cpu_set_n_threads(runtime_backend, n_threads);\n",
            "            ggml_backend_cpu_set_abort_callback(runtime_backend, sdsage::stop_graph, nullptr);\n",
        ),
        Edit(MODEL, ">", '#include "zip.h"\n', '#include "sdsage_seam.hpp"\n'),
        Edit(
            MODEL,
            ">",
            "                    size_t idx = tensor_idx.fetch_add(1);\n",
            "                    if (sdsage::cancelled()) {\n                        failed = true;\n                    }\n",
        ),
        Edit(
            SD,
            ">",
            'LOG_INFO("generate_video completed in %.2fs", (t1 - t0) * 1.0f / 1000);\n    return result;\n}\n',
            '\n#include "sdsage_entry.inl"\n',
        ),
    ),
)

GUARD = Group(
    name="guard",
    why="A C++ exception must not cross the C API, and every call is one job with one error: the bodies get an inner name,"
    " native/sd_cli/src/api.cpp exports upstream's names around them.",
    guard="tests/test_native.py::test_exception_becomes_error",
    drop="never: upstream's API has no error text",
    edits=(
        Edit(
            SD,
            "=",
            "sd_ctx_t* new_sd_ctx(const sd_ctx_params_t* sd_ctx_params) {",
            "sd_ctx_t* sdsage_inner_new_sd_ctx(const sd_ctx_params_t* sd_ctx_params) {",
        ),
        Edit(SD, "=", "void free_sd_ctx(sd_ctx_t* sd_ctx) {", "void sdsage_inner_free_sd_ctx(sd_ctx_t* sd_ctx) {"),
        Edit(
            SD,
            "=",
            "SD_API sd_image_t* generate_image(sd_ctx_t* sd_ctx, const",
            "sd_image_t* sdsage_inner_generate_image(sd_ctx_t* sd_ctx, const",
        ),
        Edit(
            SD,
            "=",
            "SD_API sd_image_t* generate_video(sd_ctx_t* sd_ctx, const",
            "sd_image_t* sdsage_inner_generate_video(sd_ctx_t* sd_ctx, const",
        ),
        Edit(
            "src/upscaler.cpp",
            "=",
            "upscaler_ctx_t* new_upscaler_ctx(const char*",
            "upscaler_ctx_t* sdsage_inner_new_upscaler_ctx(const char*",
        ),
        Edit(
            "src/upscaler.cpp",
            "=",
            "sd_image_t upscale(upscaler_ctx_t* upscaler_ctx, sd_image_t",
            "sd_image_t sdsage_inner_upscale(upscaler_ctx_t* upscaler_ctx, sd_image_t",
        ),
        Edit(
            SD,
            "=",
            "if (!sd_ctx->sd->init(sd_ctx_params)) {",
            "if (!sdsage::no_throw([&] { return sd_ctx->sd->init(sd_ctx_params); })) {",
        ),
        Edit(
            "src/convert.cpp",
            "=",
            "bool convert(const char* input_path,",
            "bool sdsage_inner_convert(const char* input_path,",
        ),
    ),
)

SHIFT = Group(
    name="shift",
    why="With a prediction that the caller gives, upstream leaves the model's own flow shift infinite, and every latent"
    " becomes NaN. Results differ where they were NaN.",
    guard="tests/test_context.py::test_a_given_prediction_keeps_the_model_s_flow_shift",
    drop="default_flow_shift is set whether or not the prediction is given",
    edits=(
        Edit(
            SD,
            "=",
            "if (pred_type == PREDICTION_COUNT) {",
            "if (pred_type == PREDICTION_COUNT || !sd_version_is_sd2(version)) {",
        ),
        Edit(
            SD,
            "<",
            "            switch (pred_type) {\n",
            "            if (sd_ctx_params->prediction != PREDICTION_COUNT) {\n"
            "                pred_type = sd_ctx_params->prediction;\n"
            "            }\n",
        ),
        Edit(
            SD,
            "=",
            "            flow_denoiser->set_shift(flow_shift);\n",
            "            if (std::isfinite(flow_shift)) {  // else the denoiser's own\n"
            "                flow_denoiser->set_shift(flow_shift);\n"
            "            }\n",
        ),
    ),
)

RANDOM = Group(
    name="random",
    why="Upstream's Philox is named a port of a file under the AGPL. Ours is written from the paper and gives the same"
    " numbers.",
    guard="tests/test_philox.py",
    drop="the origin of rng_philox.hpp is cleared",
    edits=(Edit(SD, "=", '#include "rng_philox.hpp"\n', '#include "sdsage_philox.hpp"\n'),),
)

DECODE = Group(
    name="decode",
    why="Latents outlive a decode that failed: what does not decode at once is tried again in tiles, and a context can be"
    " made of a VAE alone, for latents that were kept.",
    guard="tests/test_decode.py",
    drop="upstream tiles by itself when memory is short, and decodes latents without a diffusion model",
    edits=(
        Edit(SD, "<", "const char* sampling_methods_str[] = {", '#include "sdsage_decoder.hpp"\n\n'),
        Edit(
            "src/model.h",
            ">",
            "String2TensorStorage& get_tensor_storage_map() { return tensor_storage_map; }\n",
            "    void set_version(SDVersion version) { version_ = version; }\n",
        ),
        Edit(
            SD,
            "<",
            "        model_loader.convert_tensors_name();\n",
            "        if (sdsage::decodes_only()) {\n"
            "            model_loader.set_version(sdsage::version_of(sdsage::decoded_version()));\n"
            "        }\n",
        ),
        Edit(
            SD,
            "=",
            "        version = model_loader.get_sd_version();\n",
            "        version = sdsage::decodes_only() ? sdsage::version_of(sdsage::decoded_version())\n"
            "                                         : model_loader.get_sd_version();\n",
        ),
        Edit(
            SD,
            "<",
            "if (sd_version_is_sd3(version)) {\n                cond_stage_model = ",
            "if (sdsage::decodes_only()) {\n"
            "                cond_stage_model = std::make_shared<sdsage::NoConditioner>();\n"
            "                diffusion_model  = std::make_shared<sdsage::NoDiffusion>();\n"
            "            } else ",
        ),
        Edit(
            SD,
            "=",
            "        return first_stage_model->decode(n_threads, latents, vae_tiling_params, decode_video, circular_x,"
            " circular_y);\n",
            "        return sdsage::decode_or_tile(*first_stage_model, latents.shape()[0], latents.shape()[1],\n"
            "                                      vae_tiling_params, [&](const sd_tiling_params_t& tiling) {\n"
            "            return first_stage_model->decode(n_threads, latents, tiling, decode_video, circular_x, circular_y);\n"
            "        });\n",
        ),
    ),
)
