"""Model files that are damaged, or not what they are taken for."""

from edits.table import SD, Edit, Group

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
