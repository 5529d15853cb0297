"""Upstream's own programs."""

from edits.table import CLI, COMMON, SERVER, Edit, Group

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
            "    bool sage_attn              = false;\n    sd_sage_kernel_t sage_kernel = SD_SAGE_KERNEL_AUTO;\n"
            '    std::string engine_levers = "default";\n'
            "    bool fast_linear            = false;\n",
        ),
        Edit(
            COMMON,
            "<",
            '        {"",\n         "--diffusion-conv-direct",',
            '        {"",\n         "--sage-attn",\n'
            '         "use SageAttention in the diffusion model (CUDA, compute capability 8.0 or newer)",\n'
            "         true, &sage_attn},\n"
            '        {"",\n         "--fast-linear",\n'
            '         "linear layers of the diffusion model in FP8 (CUDA, compute capability 9.0)",\n'
            "         true, &fast_linear},\n",
        ),
        Edit(
            COMMON,
            "<",
            '        {"",\n         "--clip_l",',
            '        {"",\n         "--engine-levers",\n'
            '         "what the engine computes by sdsage\'s code on CUDA: none, or some of default,linear,fuse,vae,batch",\n'
            "         &engine_levers},\n",
        ),
        Edit(
            COMMON,
            "<",
            "    auto on_type_arg = [&](int argc, const char** argv, int index) {",
            "    auto on_sage_kernel_arg = [&](int argc, const char** argv, int index) {\n"
            '        static const char* const names[] = {"auto", "fp16", "fp8", "fp8++", "hopper"};\n'
            "        for (int i = 0; i < SD_SAGE_KERNEL_COUNT && index + 1 < argc; i++) {\n"
            "            if (std::string(argv[index + 1]) == names[i]) {\n"
            "                sage_kernel = static_cast<sd_sage_kernel_t>(i);\n"
            "                return 1;\n"
            "            }\n"
            "        }\n"
            '        LOG_ERROR("error: --sage-kernel takes auto, fp16, fp8, fp8++ or hopper");\n'
            "        return -1;\n"
            "    };\n\n",
        ),
        Edit(
            COMMON,
            "<",
            '        {"",\n         "--type",',
            '        {"",\n         "--sage-kernel",\n'
            '         "kernel of SageAttention: auto, fp16, fp8, fp8++, hopper (default: auto)",\n'
            "         on_sage_kernel_arg},\n",
        ),
        Edit(
            COMMON,
            "=",
            "        qwen_image_zero_cond_t,\n        max_vram,\n    };",
            "        qwen_image_zero_cond_t,\n        max_vram,\n        sage_attn,\n        sage_kernel,\n        engine_levers.c_str(),\n        fast_linear,\n    };",
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

SD_SERVER = Group(
    name="sd-server",
    why="sd-server says why it can't start, as sd-cli does: `--sage-attn` on a device that has none of it, a file that does"
    " not fit.",
    guard="tests/test_other_engines.py::test_sd_server_says_why_it_does_not_start",
    drop="sd-server prints the reason by itself",
    edits=(
        Edit(SERVER, ">", '#include "runtime.h"\n', '#include "sdsage.h"\n'),
        Edit(
            SERVER, "<", '        LOG_ERROR("new_sd_ctx_t failed");', '        LOG_ERROR("%s", sdsage_last_error());\n'
        ),
    ),
)
