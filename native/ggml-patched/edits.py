"""The edits that sdsage makes to the pinned stable-diffusion.cpp, as a table.

An edit is (file, where, anchor, text): `text` is put before ("<"), after (">") or in place of ("=") the anchor, which
must occur exactly once in the pinned file (line ends normalised). A group is one topic, with its reason, its guard (the
test that fails without it) and its drop check (how to see that upstream does it by itself).
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Edit:
    file: str
    where: str
    anchor: str
    text: str


@dataclass(frozen=True)
class Group:
    name: str
    why: str
    guard: str
    drop: str
    edits: tuple[Edit, ...]


SD = "src/stable-diffusion.cpp"
HEADER = "include/stable-diffusion.h"
EXTEND = "src/ggml_extend.hpp"
CUDA = "ggml/src/ggml-cuda/ggml-cuda.cu"
COMMON = "examples/common/common.cpp"
MODEL = "src/model.cpp"
WAN = "src/wan.hpp"
CLIP = "src/clip.hpp"
UTIL = "src/util.cpp"
EXTEND = "src/ggml_extend.hpp"
CLI = "examples/cli/main.cpp"

SIZES = Group(
    name="sizes",
    why="The widths and depths of Wan, T5, CLIP and the Wan VAE are constants upstream; read from the file, tiny models"
    " of the same layout load, for the embedded presets and for tests.",
    guard="tests/test_engine.py::test_tiny_video, tests/test_stock_sizes.py",
    drop="WanRunner takes dim from patch_embedding.bias by itself",
    edits=(
        Edit(WAN, ">", '#include "vae.hpp"\n', '#include "sdsage_sizes.hpp"\n'),
        Edit(
            WAN,
            "=",
            "WanVAE(bool decode_only = true, bool wan2_2 = false)",
            "WanVAE(bool decode_only = true, bool wan2_2 = false, int64_t file_dim = 0, int64_t file_dec_dim = 0)",
        ),
        Edit(
            WAN,
            "<",
            "            if (!decode_only) {\n"
            '                blocks["encoder"] = std::shared_ptr<GGMLBlock>(new Encoder3d(dim,',
            "            dim     = file_dim > 0 ? file_dim : dim;\n"
            "            dec_dim = file_dec_dim > 0 ? file_dec_dim : dec_dim;\n",
        ),
        Edit(
            WAN,
            "=",
            "ae(decode_only, version == VERSION_WAN2_2_TI2V), VAE(",
            "ae(decode_only, version == VERSION_WAN2_2_TI2V, sdsage::wan_vae_dim(tensor_storage_map, prefix),\n"
            "                               sdsage::wan_vae_dec_dim(tensor_storage_map, prefix)), VAE(",
        ),
        Edit(
            WAN,
            "=",
            'GGML_ABORT("invalid num_layers(%d) of wan", wan_params.num_layers);',
            "desc = sdsage::wan_desc(wan_params, version == VERSION_WAN2_2_I2V, version == VERSION_WAN2_2_TI2V);",
        ),
        Edit(
            WAN,
            "<",
            '            LOG_INFO("%s", desc.c_str());\n\n            wan = Wan(wan_params);',
            "            sdsage::wan_sizes(wan_params, tensor_storage_map, prefix);\n",
        ),
        Edit(MODEL, ">", '#include "name_conversion.h"\n', '#include "sdsage_sizes.hpp"\n'),
        Edit(
            MODEL,
            "=",
            "if (patch_embedding_channels == 184320 && !has_img_emb) {",
            "const int64_t wan_in = sdsage::wan_in_channels(tensor_storage_map, patch_embedding_channels);\n"
            "        if (wan_in == 36 && !has_img_emb) {",
        ),
        Edit(
            MODEL,
            "=",
            "if (patch_embedding_channels == 147456 && !has_img_emb) {",
            "if (wan_in == 48 && !has_img_emb) {",
        ),
        Edit("src/t5.hpp", "<", "struct T5Params {", '#include "sdsage_sizes.hpp"\n\n'),
        Edit(
            "src/t5.hpp",
            "<",
            "        model = T5(params);\n",
            "        sdsage::t5_sizes(params, tensor_storage_map, prefix);\n",
        ),
        Edit(CLIP, "<", "class CLIPTextModel : public GGMLBlock {", '#include "sdsage_sizes.hpp"\n\n'),
        Edit(
            CLIP,
            "=",
            "bool proj_in        = false)\n        : version(version), with_final_ln(with_final_ln) {",
            "bool proj_in        = false,\n"
            "                  const sdsage::ClipSizes& sizes = {})\n"
            "        : version(version), with_final_ln(with_final_ln) {",
        ),
        Edit(
            CLIP,
            "<",
            '        blocks["embeddings"]       = std::shared_ptr<GGMLBlock>(new CLIPEmbeddings(',
            "        sizes.apply(*this);\n",
        ),
        Edit(
            CLIP,
            "=",
            "CLIPTextModel(version, with_final_ln, force_clip_f32, proj_in);",
            "CLIPTextModel(version, with_final_ln, force_clip_f32, proj_in, sdsage::ClipSizes(tensor_storage_map, prefix));",
        ),
        Edit(
            "src/flux.hpp",
            "<",
            '                if (ends_with(tensor_name, "single_blocks.0.norm.key_norm.scale")) {',
            '                if (ends_with(tensor_name, "vector_in.in_layer.weight")) {\n'
            "                    flux_params.vec_in_dim = pair.second.ne[0];\n"
            "                }\n",
        ),
    ),
)

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

FILES = Group(
    name="files",
    why="Upstream warns about a named file that does not load and goes on without it, or lists hundreds of missing"
    " tensors: a named file loads, fits the others and changes something, or the call fails with one sentence.",
    guard="tests/test_bad_input.py, tests/test_bad_models.py",
    drop="init() returns false where it now warns",
    edits=(
        Edit(
            "src/model.h",
            ">",
            "String2TensorStorage& get_tensor_storage_map() { return tensor_storage_map; }\n",
            "    const std::vector<std::string>& file_paths() const { return file_paths_; }\n",
        ),
        Edit(
            SD,
            "<",
            "        version = model_loader.get_sd_version();\n        if (version == VERSION_COUNT) {",
            "        if (!sdsage::check_parsed(*sd_ctx_params, model_loader) ||\n"
            "            !sdsage::check_fit(*sd_ctx_params, model_loader)) {\n"
            "            return false;\n"
            "        }\n",
        ),
        Edit(
            SD,
            "<",
            "        bool success = model_loader.load_tensors(tensors, ignore_tensors,",
            "        if (!sdsage::check_slots(*sd_ctx_params, model_loader, tensors, model_version_to_str[version])) {\n"
            "            ggml_free(ctx);\n"
            "            return false;\n"
            "        }\n",
        ),
        Edit("src/control.hpp", ">", '#include "model.h"\n', '#include "sdsage_files.hpp"\n'),
        Edit(
            "src/control.hpp",
            ">",
            "        LOG_INFO(\"loading control net from '%s'\", file_path.c_str());\n",
            "        std::map<std::string, ggml_tensor*> wanted;\n"
            "        control_net.get_param_tensors(wanted);\n"
            '        if (!sdsage::check_network<ModelLoader>({"--control-net", file_path.c_str(), "ControlNet"}, wanted)) {\n'
            "            return false;\n"
            "        }\n",
        ),
        Edit(
            SD,
            ">",
            '            LOG_WARN("load lora tensors from %s failed", lora_path.c_str());\n',
            '            sdsage::fail("LoRA \'" + lora_path + "\' did not load");\n',
        ),
        Edit(
            SD,
            "<",
            "            lora_f2m[lora_id] = loras[i].multiplier;\n",
            "            if (!sdsage::check_lora(loras[i], tensors, version, model_version_to_str[version],\n"
            "                                    apply_lora_immediately)) {\n"
            "                return;  // before anything changes\n"
            "            }\n",
        ),
        Edit(
            SD,
            "=",
            "if (is_diffusion_model_name(tensor_name)) {",
            'if (is_diffusion_model_name(tensor_name) || starts_with(tensor_name, "lora.model.high_noise_")) {',
        ),
        Edit("src/model_io/gguf_io.cpp", ">", '#include "gguf_reader_ext.h"\n', '#include "sdsage_seam.hpp"\n'),
        Edit(
            "src/model_io/gguf_io.cpp",
            ">",
            "        for (const auto& gguf_tensor_info : gguf_reader.tensors()) {\n",
            "            const auto type = static_cast<uint32_t>(gguf_tensor_info.type);\n"
            "            if (type >= GGML_TYPE_COUNT || ggml_blck_size(gguf_tensor_info.type) == 0 ||\n"
            "                ggml_type_size(gguf_tensor_info.type) == 0) {\n"
            '                sdsage::reject("\'" + file_path + "\': tensor \'" + gguf_tensor_info.name + "\' has type " +\n'
            '                               std::to_string(type) + ", which this engine does not know");\n'
            '                set_error(error, "unknown tensor type");\n'
            "                tensor_storages.clear();\n"
            "                return false;\n"
            "            }\n",
        ),
        Edit(
            SD,
            ">",
            "    sd_ctx->sd->apply_loras(sd_img_gen_params->loras, sd_img_gen_params->lora_count);\n",
            "    if (sdsage::failed()) {\n        return nullptr;\n    }\n",
        ),
        Edit(
            SD,
            ">",
            "    sd_ctx->sd->apply_loras(sd_vid_gen_params->loras, sd_vid_gen_params->lora_count);\n",
            "    if (sdsage::failed()) {\n        return nullptr;\n    }\n",
        ),
        Edit("src/convert.cpp", ">", '#include "model.h"\n', '#include "sdsage_fit.hpp"\n'),
        Edit(
            "src/convert.cpp",
            "<",
            "    ggml_type type             = (ggml_type)output_type;\n",
            "    if (!sdsage::check_whole(model_loader) || !sdsage::check_rules(tensor_type_rules)) {\n"
            "        return false;\n"
            "    }\n",
        ),
        Edit(
            "src/upscaler.cpp",
            ">",
            "        LOG_ERROR(\"init model loader from file failed: '%s'\", esrgan_path.c_str());\n",
            "        return false;\n",
        ),
    ),
)

LOG = Group(
    name="log",
    why="The log line is built in one static buffer, and loader threads log at once; a job keeps the errors as its"
    " message; the library itself must not print to stdout.",
    guard="tests/test_native.py::test_log_lines_are_whole, tests/test_cli_run.py::test_stdout_holds_results_only,"
    " tests/test_bad_models.py::test_unused_lora_tensors_print_nothing",
    drop="log_printf has no static buffer",
    edits=(
        Edit(UTIL, "<", "#define LOG_BUFFER_SIZE 4096\n", '#include "sdsage_seam.hpp"\n\n'),
        Edit(UTIL, "=", "static char log_buffer[LOG_BUFFER_SIZE + 1];", "char log_buffer[LOG_BUFFER_SIZE + 1];"),
        Edit(UTIL, "=", "    if (sd_log_cb) {\n", "    if (sdsage::note_log(level, log_buffer) && sd_log_cb) {\n"),
        Edit("src/lora.hpp", "=", "                    print_ggml_tensor(kv.second, true);\n", ""),
        Edit(
            MODEL,
            "=",
            "        if (total_tensors_processed < total_tensors_to_process) {\n",
            "        if (total_tensors_processed < total_tensors_to_process && sd_get_progress_callback() == nullptr) {\n",
        ),
    ),
)

DEVICE = Group(
    name="device",
    why="Upstream always takes the first GPU: the caller's choice comes first (sdsage_set_device).",
    guard="tests/test_context.py::test_the_engine_asks_for_the_chosen_device",
    drop="sd_ctx_params_t has a device field",
    edits=(
        Edit(UTIL, "<", "ggml_backend_t sd_get_default_backend() {", "ggml_backend_t sdsage_requested_backend();\n\n"),
        Edit(
            UTIL,
            ">",
            "ggml_backend_t sd_get_default_backend() {\n    ggml_backend_load_all_once();\n",
            "    if (ggml_backend_t requested = sdsage_requested_backend()) {\n        return requested;\n    }\n",
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

SD_CLI = Group(
    name="sd-cli",
    why="`--print-params` shows the structs that a command turns into, with the same writer as the Python side.",
    guard="tests/test_cli_params.py",
    drop="never: it is ours",
    edits=(
        Edit(CLI, ">", '#include "image_metadata.h"\n', '#include "sdsage.h"\n'),
        Edit(CLI, ">", "    bool convert_name     = false;\n", "    bool print_params     = false;\n"),
        Edit(
            CLI,
            "<",
            '            LOG_INFO("new_sd_ctx_t failed");',
            '            LOG_ERROR("%s", sdsage_last_error());\n',
        ),
        Edit(
            CLI, "<", '            LOG_ERROR("generate failed");', '            LOG_ERROR("%s", sdsage_last_error());\n'
        ),
        Edit(
            COMMON,
            ">",
            '        << "  diffusion_flash_attn: " << (diffusion_flash_attn ? "true" : "false") << ",\\n"\n',
            '        << "  sage_attn: " << (sage_attn ? "true" : "false") << ",\\n"\n',
        ),
        Edit(
            "examples/common/common.h",
            ">",
            "    bool diffusion_flash_attn   = false;\n",
            "    bool sage_attn              = false;\n    sd_sage_kernel_t sage_kernel = SD_SAGE_KERNEL_AUTO;\n",
        ),
        Edit(
            COMMON,
            "<",
            '        {"",\n         "--diffusion-conv-direct",',
            '        {"",\n         "--sage-attn",\n'
            '         "use SageAttention in the diffusion model (CUDA, compute capability 8.0 or newer)",\n'
            "         true, &sage_attn},\n",
        ),
        Edit(
            COMMON,
            "<",
            "    auto on_type_arg = [&](int argc, const char** argv, int index) {",
            "    auto on_sage_kernel_arg = [&](int argc, const char** argv, int index) {\n"
            '        static const char* const names[] = {"auto", "fp16", "fp8", "fp8++"};\n'
            "        for (int i = 0; i < SD_SAGE_KERNEL_COUNT && index + 1 < argc; i++) {\n"
            "            if (std::string(argv[index + 1]) == names[i]) {\n"
            "                sage_kernel = static_cast<sd_sage_kernel_t>(i);\n"
            "                return 1;\n"
            "            }\n"
            "        }\n"
            '        LOG_ERROR("error: --sage-kernel takes auto, fp16, fp8 or fp8++");\n'
            "        return -1;\n"
            "    };\n\n",
        ),
        Edit(
            COMMON,
            "<",
            '        {"",\n         "--type",',
            '        {"",\n         "--sage-kernel",\n'
            '         "kernel of SageAttention: auto, fp16, fp8, fp8++ (default: auto)",\n'
            "         on_sage_kernel_arg},\n",
        ),
        Edit(
            COMMON,
            "=",
            "        qwen_image_zero_cond_t,\n        max_vram,\n    };",
            "        qwen_image_zero_cond_t,\n        max_vram,\n        sage_attn,\n        sage_kernel,\n    };",
        ),
        Edit(
            CLI,
            "<",
            '            {"",\n             "--color",',
            '            {"",\n             "--print-params",\n'
            '             "print the parameters that this command passes to the engine as JSON, and stop",\n'
            "             true, &print_params},\n",
        ),
        Edit(
            CLI,
            ">",
            "    sd_ctx_params_t sd_ctx_params = ctx_params.to_sd_ctx_params_t(vae_decode_only, true, cli_params.taesd_preview);\n",
            "    if (cli_params.print_params) {\n"
            "        const auto img = gen_params.to_sd_img_gen_params_t();\n"
            "        const auto vid = gen_params.to_sd_vid_gen_params_t();\n"
            "        char* json     = sdsage_params_json(&sd_ctx_params, cli_params.mode == IMG_GEN ? &img : nullptr,\n"
            "                                            cli_params.mode == VID_GEN ? &vid : nullptr);\n"
            "        std::cout << json << std::endl;\n"
            "        sdsage_free(json);\n"
            "        return 0;\n"
            "    }\n",
        ),
    ),
)

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
            "        case GGML_OP_CUSTOM:\n            return sdsage_sage_compute(ctx, dst);\n",
        ),
        Edit(
            CUDA,
            ">",
            "            return ggml_cuda_flash_attn_ext_supported(dev_ctx->device, op);\n",
            "        case GGML_OP_CUSTOM:\n            return sdsage_sage_supported(dev_ctx->device, op);\n",
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

GROUPS = (SIZES, SEAM, GUARD, FILES, LOG, DEVICE, SHIFT, RANDOM, SD_CLI, SAGE, FLASH, DECODE)
