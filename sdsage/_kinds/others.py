"""Everything but diffusion models and LoRAs: text and vision encoders, VAEs, upscalers, ControlNets, embeddings."""

from math import isqrt

from .part import Part, Role, Shapes, layers, size

_CLIP = {768: ("clip-l", "CLIP-L"), 1280: ("clip-g", "OpenCLIP bigG (CLIP-G)"), 1024: ("clip-h", "OpenCLIP H")}
_PROMPT_TOKENS = 77
_SD_VAE = {4: "of Stable Diffusion 1, 2 and XL", 16: "of Flux, SD3 and Z-Image", 32: "of Flux.2"}


def text_encoder(shapes: Shapes, architecture: str) -> Part | None:
    """T5, CLIP or a language model; `architecture` as GGUF names it."""
    return _t5(shapes) or _clip(shapes) or _language_model(shapes, architecture)


def _t5(shapes: Shapes) -> Part | None:
    gguf = "enc.blk.0.attn_q.weight" in shapes
    if not gguf and "encoder.block.0.layer.0.SelfAttention.q.weight" not in shapes:
        return None
    names = ("token_embd.weight",) if gguf else ("shared.weight", "encoder.embed_tokens.weight")
    table = next((shapes[name] for name in names if name in shapes), ())
    bias = "enc.blk.{}.attn_rel_b.weight" if gguf else (
        "encoder.block.{}.layer.0.SelfAttention.relative_attention_bias.weight")  # fmt: skip
    blocks = layers(shapes, "enc.blk." if gguf else "encoder.block.")
    own = bias.format(blocks - 1) in shapes  # umt5 has a table of distances in every block, T5 in the first alone
    kind, title = ("umt5", "umt5") if own and blocks > 1 else ("t5", "T5 v1.1")
    width = table[-1] if table else 0
    name = "-xxl" if width == 4096 else f", {width} wide"
    facts: dict[str, int | str] = {"blocks": blocks, "vocabulary": table[0] if table else 0}
    return Part(Role.TEXT, kind, title + name, width, facts=facts)


def _clip(shapes: Shapes) -> Part | None:
    for name in ("text_model.embeddings.token_embedding.weight", "token_embedding.weight"):
        if name in shapes:
            width = size(shapes, name, -1)
            kind, title = _CLIP.get(width, ("clip", f"CLIP text encoder, {width} wide"))
            blocks = layers(shapes, "text_model.encoder.layers.") or layers(shapes, "transformer.resblocks.")
            return Part(Role.TEXT, kind, title, width, facts={"blocks": blocks})
    return None


def _language_model(shapes: Shapes, architecture: str) -> Part | None:
    if "blk.0.attn_q.weight" in shapes or "blk.0.attn_qkv.weight" in shapes:
        table, first = "token_embd.weight", "blk."
    else:
        for start in ("model.", "model.language_model.", "language_model.model.", ""):
            if f"{start}layers.0.self_attn.q_proj.weight" in shapes and f"{start}embed_tokens.weight" in shapes:
                table, first = f"{start}embed_tokens.weight", f"{start}layers."
                break
        else:
            return None
    width = size(shapes, table, -1)
    title = "language model" + (f" ({architecture})" if architecture else "") + f", {width} wide"
    vision = any(name.startswith(("visual.", "model.visual.")) for name in shapes)
    facts: dict[str, int | str] = {"blocks": layers(shapes, first), "vocabulary": size(shapes, table)}
    if vision:
        facts["vision"] = "yes"
    return Part(Role.TEXT, "llm", title, width, facts=facts)


def vision_encoder(shapes: Shapes) -> Part | None:
    """CLIP's, or that of a language model."""
    for name in ("vision_model.embeddings.patch_embedding.weight", "visual.conv1.weight"):
        if name in shapes:
            width = size(shapes, name)
            return Part(Role.VISION, "clip-vision", f"CLIP vision encoder, {width} wide", width)
    for name in ("v.patch_embd.weight", "patch_embed.proj.weight", "visual.patch_embed.proj.weight"):
        if name in shapes:
            width = size(shapes, name)
            return Part(Role.VISION, "llm-vision", f"vision encoder of a language model, {width} wide", width)
    return None


def vae(shapes: Shapes) -> Part | None:
    """Of Wan, or of Stable Diffusion and its relatives."""
    if "conv2.weight" in shapes and "decoder.conv1.weight" in shapes:
        latents = size(shapes, "conv2.bias") or isqrt(size(shapes, "conv2.weight"))
        title = {16: "Wan 2.1 VAE", 48: "Wan 2.2 VAE"}.get(latents, "Wan VAE")
        out = size(shapes, "decoder.head.2.bias")
        facts: dict[str, int | str] = {"pixels_of_a_patch": isqrt(out // 3)} if out > 3 else {}
        return Part(Role.VAE, "wan-vae", f"{title}, {latents} channels", latents=latents, facts=facts)
    shape = shapes.get("decoder.conv_in.weight", ())
    if len(shape) == 5:
        title = f"video VAE in the layout of diffusers, {shape[1]} channels"
        return Part(Role.VAE, "diffusers-video-vae", title, latents=shape[1])
    if len(shape) == 4:
        use = _SD_VAE.get(shape[1])
        title = f"VAE {use}, {shape[1]} channels" if use else f"VAE, {shape[1]} channels"
        return Part(Role.VAE, "kl-vae", title, latents=shape[1])
    return None


def tiny_autoencoder(shapes: Shapes) -> Part | None:
    """TAESD for pictures, TAEHV for videos."""
    for first in ("decoder.layers.0.weight", "decoder.1.weight", "1.weight"):
        shape = shapes.get(first, ())
        if len(shape) == 4 and shape[2:] == (3, 3) and any(n.endswith("conv.0.weight") for n in shapes):
            doubled = any(n.endswith("conv.0.weight") and s[1:2] == (2 * s[0],) for n, s in shapes.items())
            kind, title = ("taehv", "for videos") if doubled else ("taesd", "for pictures")
            return Part(Role.TAE, kind, f"tiny autoencoder {title}, {shape[1]} channels", latents=shape[1])
    return None


def others(shapes: Shapes) -> Part | None:
    """Upscalers, ControlNets, PhotoMaker, embeddings."""
    if any(n.startswith(("input_hint_block.", "controlnet_cond_embedding.", "zero_convs.")) for n in shapes):
        context = next((s[-1] for n, s in shapes.items() if n.endswith("attn2.to_k.weight")), 0)
        model = {768: "SD 1", 1024: "SD 2", 2048: "SDXL"}.get(context)
        return Part(Role.CONTROL, "control-net", f"ControlNet for {model}" if model else "ControlNet")
    if any(n.startswith("id_encoder.") for n in shapes):
        return Part(Role.PHOTO_MAKER, "photo-maker", "PhotoMaker model")
    if "conv_first.weight" in shapes and any(".rdb1." in n for n in shapes):
        return _esrgan(shapes, layers(shapes, "body."), 2 ** sum(f"conv_up{i}.weight" in shapes for i in (1, 2)))
    if any(n.startswith("model.1.sub.0.RDB1.") for n in shapes):
        blocks = layers(shapes, "model.1.sub.") - 1
        return _esrgan(shapes, blocks, 2 ** sum(f"model.{i}.weight" in shapes for i in (3, 6)))
    if 0 < len(shapes) <= 4 and all(
        len(s) in (1, 2) and (len(s) == 1 or s[0] <= _PROMPT_TOKENS) for s in shapes.values()
    ):
        width = max(s[-1] for s in shapes.values())
        rows = max(s[0] if len(s) == 2 else 1 for s in shapes.values())
        title = f"embedding of {rows} token{'s' if rows > 1 else ''}, {width} wide"
        return Part(Role.EMBEDDING, "embedding", title, width)
    return None


def _esrgan(shapes: Shapes, blocks: int, factor: int) -> Part:
    return Part(Role.UPSCALER, "esrgan", f"ESRGAN upscaler, {factor} times", facts={"blocks": blocks})
