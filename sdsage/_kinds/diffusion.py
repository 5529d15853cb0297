"""Diffusion models, told by the tensors that the engine tells them by."""

from .part import Part, Role, Shapes, layers, size

_WAN_SIZES = {5120: "14B", 3072: "5B", 1536: "1.3B"}
_PATCH = 4  # pixels of a patch of 2 x 2


def diffusion_model(shapes: Shapes) -> Part | None:
    """The part, or None if these are no tensors of a diffusion model that the engine knows."""
    for look in (_wan, _flux, _others, _unet):
        part = look(shapes)
        if part is not None:
            return part
    return None


def _part(kind: str, title: str, width: int = 0, text_width: int = 0, latents: int = 0, **facts: int | str) -> Part:
    known = {name: value for name, value in facts.items() if value}
    return Part(Role.DIFFUSION, kind, title, width, text_width, latents, known)


def _wan(shapes: Shapes) -> Part | None:
    if "blocks.0.cross_attn.norm_k.weight" not in shapes:
        return None
    dim = size(shapes, "patch_embedding.bias")
    patch = shapes.get("patch_embedding.weight", ())
    # GGUF has no fifth dimension: the first two are one there
    channels = patch[1] if len(patch) == 5 else patch[0] // dim if patch and dim else 0
    latents = size(shapes, "head.head.bias") // _PATCH
    picture, first_last = "img_emb.proj.1.weight" in shapes, "img_emb.emb_pos" in shapes
    if "vace_patch_embedding.weight" in shapes:
        kind, title = "wan-vace", "Wan VACE"
    elif picture:
        kind, title = ("wan-flf2v", "Wan 2.1 first-last-frame-to-video") if first_last else (
            "wan-i2v-clip", "Wan 2.1 image-to-video")  # fmt: skip
    elif channels == 36:
        kind, title = "wan-i2v", "Wan 2.2 image-to-video"
    elif channels == 48:
        kind, title = "wan-ti2v", "Wan 2.2 text- and image-to-video"
    elif channels in (0, 16):
        kind, title = "wan-t2v", "Wan 2.1 or 2.2 text-to-video"
    else:
        kind, title = "wan", f"Wan with {channels} input channels"
    name = _WAN_SIZES.get(dim, f"{dim} wide")
    return _part(
        kind,
        f"{title}, {name}",
        dim,
        size(shapes, "text_embedding.0.weight", 1),
        latents,
        input_channels=channels,
        output_channels=latents,
        blocks=layers(shapes, "blocks."),
        vace_blocks=layers(shapes, "vace_blocks."),
        ffn=size(shapes, "blocks.0.ffn.0.bias"),
    )


def _flux(shapes: Shapes) -> Part | None:
    if not any(name.startswith(("double_blocks.", "nerf_final_layer_conv.")) for name in shapes):
        return None
    inputs = size(shapes, "img_in.weight", 1)
    latents = size(shapes, "final_layer.linear.weight") // _PATCH
    facts: dict[str, int | str] = {
        "input_channels": inputs // _PATCH,
        "double_blocks": layers(shapes, "double_blocks."),
        "single_blocks": layers(shapes, "single_blocks."),
    }
    width, text = size(shapes, "img_in.weight"), size(shapes, "txt_in.weight", 1)
    if "nerf_final_layer_conv.conv.weight" in shapes or "nerf_final_layer_conv.norm.scale" in shapes:
        return _part("chroma-radiance", "Chroma Radiance", width, text, 0, **facts)
    if "double_stream_modulation_img.lin.weight" in shapes:
        klein = "single_blocks.47.linear1.weight" not in shapes
        kind, title = ("flux2-klein", "Flux.2 klein") if klein else ("flux2", "Flux.2")
        return _part(kind, title, width, text, latents, **facts)
    if "double_blocks.0.img_mlp.gate_proj.weight" in shapes:
        return _part("ovis-image", "Ovis-Image", width, text, latents, **facts)
    if "distilled_guidance_layer.in_proj.weight" in shapes:
        return _part("chroma", "Chroma", width, text, latents, **facts)
    named = {384: ("flux-fill", "Flux Fill"), 128: ("flux-control", "Flux Control"), 196: ("flex2", "Flex.2")}
    kind, title = named.get(inputs, ("flux", "Flux"))
    if kind == "flux":
        title = "Flux dev" if "guidance_in.in_layer.weight" in shapes else "Flux schnell"
    facts["pooled_text_width"] = size(shapes, "vector_in.in_layer.weight", 1)
    return _part(kind, title, width, text, latents, **facts)


def _others(shapes: Shapes) -> Part | None:
    """Transformers with a tensor of their own."""
    if any(name.startswith("joint_blocks.") for name in shapes):
        return _part(
            "sd3",
            "Stable Diffusion 3",
            size(shapes, "x_embedder.proj.weight"),
            size(shapes, "context_embedder.weight", 1),
            size(shapes, "x_embedder.proj.weight", 1),
            blocks=layers(shapes, "joint_blocks."),
        )
    if "transformer_blocks.0.img_mod.1.weight" in shapes:
        return _part(
            "qwen-image",
            "Qwen-Image",
            size(shapes, "img_in.weight"),
            size(shapes, "txt_in.weight", 1),
            size(shapes, "proj_out.weight") // _PATCH,
            blocks=layers(shapes, "transformer_blocks."),
        )
    if "llm_adapter.blocks.0.cross_attn.q_proj.weight" in shapes:
        return _part("anima", "Anima", blocks=layers(shapes, "blocks."))
    if "layers.0.adaLN_sa_ln.weight" in shapes:
        return _part("ernie-image", "ERNIE-Image", blocks=layers(shapes, "layers."))
    if "cap_embedder.0.weight" in shapes:
        final = "final_layer.linear.weight", "all_final_layer.2-1.linear.weight"
        return _part(
            "z-image",
            "Z-Image",
            size(shapes, "cap_embedder.1.weight"),
            size(shapes, "cap_embedder.0.weight"),
            max(size(shapes, name) for name in final) // _PATCH,
            blocks=layers(shapes, "layers."),
        )
    return None


def _unet(shapes: Shapes) -> Part | None:
    """UNets in the layout of Stable Diffusion and in that of diffusers."""
    first = "input_blocks.0.0.weight" if "input_blocks.0.0.weight" in shapes else "conv_in.weight"
    unet = any(name.startswith(("output_blocks.", "up_blocks.")) for name in shapes)
    if first not in shapes or not unet or not any(".attn2." in name for name in shapes):
        return None
    context = next((s[-1] for n, s in shapes.items() if n.endswith("attn2.to_k.weight") and s), 0)
    inputs = size(shapes, first, 1)
    use = {9: " inpainting", 8: " editing"}.get(inputs, "")
    latents = max(size(shapes, "out.2.weight"), size(shapes, "conv_out.weight"))
    if any("time_mixer.mix_factor" in name for name in shapes):
        kind, title = "svd", "Stable Video Diffusion"
    elif "label_emb.0.0.weight" in shapes or "add_embedding.linear_1.weight" in shapes or context == 2048:
        kind, title = "sdxl", "Stable Diffusion XL"
    elif context == 1024:
        kind, title = "sd2", "Stable Diffusion 2"
    elif context == 768:
        kind, title = "sd1", "Stable Diffusion 1"
    else:
        kind, title = "sd", "Stable Diffusion UNet"
    width = size(shapes, first)
    return _part(kind, title + use, width, context, latents, input_channels=inputs)
