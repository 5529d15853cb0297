"""Sizes that upstream takes for constants, read from the model file."""

from edits.table import CLIP, MODEL, WAN, Edit, Group

SIZES = Group(
    name="sizes",
    why="The widths and depths of Wan, T5, CLIP, UNets and the Wan VAE are constants upstream; read from the file, tiny models"
    " of the same layout load, for the embedded presets and for tests.",
    guard="tests/test_engine.py::test_tiny_video, tests/test_guidance.py, tests/test_stock_sizes.py",
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
        Edit("src/unet.hpp", "<", "class UnetModelBlock : public GGMLBlock {", '#include "sdsage_sizes.hpp"\n\n'),
        Edit(
            "src/unet.hpp",
            "<",
            "        // dims is always 2\n",
            "        sdsage::unet_sizes(model_channels, time_embed_dim, tensor_storage_map);\n",
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
