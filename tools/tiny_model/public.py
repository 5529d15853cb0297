"""The same weights in public implementations of the architectures: diffusers' Wan and transformers' umt5.

    python -m tools.tiny_model.public [--package | --state DIR] [--type f32]

Compares them with the networks here, on whole clips, and with the engine, as `golden` does. Weights are as in
`golden`, and the networks' also new ones in the sizes that are trained, with a first frame's input channels.
"""

import argparse
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import torch
import transformers
from torch import Tensor, nn

from tools.tiny_model import golden, grammar, scenes, tokens
from tools.tiny_model.dit import Wan
from tools.tiny_model.golden import Difference, Values, compare
from tools.tiny_model.sizes import HEAD, I2V, LATENT, PROMPT_TOKENS, TEXT, TIME_DIM, VAE, latent_shape
from tools.tiny_model.text import BUCKETS, FAR, Umt5
from tools.tiny_model.vae import MEAN, STD, WanVae

LIMIT = 1e-4  # of a network here against the public one: both are float32
RENAMED = {
    "dit": (
        ("time_embedding.0.", "condition_embedder.time_embedder.linear_1."),
        ("time_embedding.2.", "condition_embedder.time_embedder.linear_2."),
        ("text_embedding.0.", "condition_embedder.text_embedder.linear_1."),
        ("text_embedding.2.", "condition_embedder.text_embedder.linear_2."),
        ("time_projection.1.", "condition_embedder.time_proj."),
        ("head.head.", "proj_out."),
        ("head.modulation", "scale_shift_table"),
        ("modulation", "scale_shift_table"),
        ("self_attn.", "attn1."),
        ("cross_attn.", "attn2."),
        *((f".{k}.", f".to_{k}.") for k in "qkv"),
        (".o.", ".to_out.0."),
        ("norm3.", "norm2."),
        ("ffn.0.", "ffn.net.0.proj."),
        ("ffn.2.", "ffn.net.2."),
    ),
    "vae": (
        ("middle.0.", "mid_block.resnets.0."),
        ("middle.1.", "mid_block.attentions.0."),
        ("middle.2.", "mid_block.resnets.1."),
        ("head.0.", "norm_out."),
        ("head.2.", "conv_out."),
        ("residual.0.", "norm1."),
        ("residual.2.", "conv1."),
        ("residual.3.", "norm2."),
        ("residual.6.", "conv2."),
        ("shortcut.", "conv_shortcut."),
        ("downsamples.", "down_blocks."),
        # the decoder's layers are numbered through: three residual ones and what doubles the picture, level by level
        *((f"upsamples.{4 * k + j}.", f"up_blocks.{k}.resnets.{j}.") for k in range(4) for j in range(3)),
        *((f"upsamples.{4 * k + 3}.", f"up_blocks.{k}.upsamplers.0.") for k in range(3)),
    ),
    "text": (
        ("token_embd.", "shared."),
        ("output_norm.", "encoder.final_layer_norm."),
        ("blk.", "encoder.block."),
        *((f"attn_{k}.", f"layer.0.SelfAttention.{k}.") for k in "qkvo"),
        ("attn_rel_b.", "layer.0.SelfAttention.relative_attention_bias."),
        ("attn_norm.", "layer.0.layer_norm."),
        ("ffn_norm.", "layer.1.layer_norm."),
        ("ffn_gate.", "layer.1.DenseReluDense.wi_0."),
        ("ffn_up.", "layer.1.DenseReluDense.wi_1."),
        ("ffn_down.", "layer.1.DenseReluDense.wo."),
    ),
}
ENDS = {"encoder.conv1": "encoder.conv_in", "decoder.conv1": "decoder.conv_in"}
ENDS |= {"conv1": "quant_conv", "conv2": "post_quant_conv"}


def renamed(part: str, name: str) -> str:
    """The public name of a weight of the networks here."""
    module, _, kind = name.rpartition(".")
    if part == "vae" and module in ENDS:
        return f"{ENDS[module]}.{kind}"
    for ours, theirs in RENAMED[part]:
        name = name.replace(ours, theirs)
    return name


def filled(part: str, module: nn.Module, weights: Values) -> nn.Module:
    """A public module with these weights, all of them, as `golden` rounds them."""
    values = {renamed(part, k): torch.from_numpy(np.array(v, np.float32)) for k, v in weights.items()}
    values = {k: v.half().float() if v.dim() > 3 else v for k, v in values.items()}
    if part == "text":  # has its table twice
        values["encoder.embed_tokens.weight"] = values["shared.weight"]
    there = module.state_dict()
    module.load_state_dict({k: v.reshape(there[k].shape) if k in there else v for k, v in values.items()})
    return module.eval()


class Public:
    """The public networks with given weights, called as those here are."""

    def __init__(self, weights: Mapping[str, Values]) -> None:
        self.weights = weights
        text, vae = golden.text_size(weights["text"]), golden.vae_size(weights["vae"])
        self.umt5 = filled(
            "text",
            transformers.UMT5EncoderModel(
                transformers.UMT5Config(
                    vocab_size=len(weights["text"]["token_embd.weight"]),
                    d_model=text.dim,
                    d_kv=text.dim // text.heads,
                    d_ff=text.ffn,
                    num_layers=text.layers,
                    num_heads=text.heads,
                    relative_attention_num_buckets=BUCKETS,
                    relative_attention_max_distance=FAR,
                    feed_forward_proj="gated-gelu",
                )
            ),
            weights["text"],
        )
        self.vae: Any = filled(
            "vae", diffusers.AutoencoderKLWan(base_dim=vae.encoder, decoder_base_dim=vae.decoder), weights["vae"]
        )
        self.mean, self.std = (torch.tensor(x).view(1, -1, 1, 1, 1) for x in (MEAN, STD))
        frames: list[Tensor] = []  # as the last layer gives them: what comes out of the module is cut to -1 to 1
        self.vae.decoder.register_forward_hook(lambda module, inputs, output: frames.append(output))
        self.frames = frames

    def text(self, rows: Tensor, lengths: Tensor) -> Tensor:
        """b x PROMPT_TOKENS x width, zeros behind the prompts, as Wan's pipelines hand it over."""
        padded = nn.functional.pad(rows, (0, PROMPT_TOKENS - rows.shape[1]))
        inside = torch.arange(PROMPT_TOKENS)[None] < lengths[:, None]
        return self.umt5(input_ids=padded, attention_mask=inside.long()).last_hidden_state * inside[..., None]

    def dit(self, expert: str, x: Tensor, sigma: Tensor, text: Tensor) -> Tensor:
        size = golden.dit_size(self.weights[expert])
        wan = diffusers.WanTransformer3DModel(
            num_attention_heads=size.dim // HEAD,
            attention_head_dim=HEAD,
            in_channels=size.inputs,
            out_channels=LATENT,
            text_dim=text.shape[-1],
            freq_dim=TIME_DIM,
            ffn_dim=size.ffn,
            num_layers=size.blocks,
        )
        return filled("dit", wan, self.weights[expert])(x, sigma * 1000, text, return_dict=False)[0]

    def diffusion_latents(self, clip: Tensor) -> Tensor:
        return (self.vae.encode(clip).latent_dist.mode() - self.mean) / self.std

    def decode_diffusion(self, z: Tensor) -> Tensor:
        self.frames.clear()
        self.vae.decode(z * self.std + self.mean)
        return torch.cat(self.frames, 2)


@torch.no_grad()
def networks(weights: Mapping[str, Values]) -> Iterator[Difference]:
    """The networks here against the public ones, on prompts and a clip of the generator's."""
    size, public = golden.text_size(weights["text"]), Public(weights)
    rows, lengths = (torch.from_numpy(a) for a in tokens.rows(golden.prompts()))
    hidden, wide = (
        golden.filled(Umt5(size, len(tokens.used())), weights["text"])(rows, lengths),
        public.text(rows, lengths),
    )
    yield compare("text", hidden.numpy(), wide[:, : hidden.shape[1]].numpy())
    random = torch.Generator().manual_seed(3)
    n = len(rows)
    for expert in golden.SIGMAS:
        shape = golden.dit_size(weights[expert])
        x = torch.randn((n, shape.inputs, *latent_shape(scenes.FRAMES, scenes.SIZE, scenes.SIZE)), generator=random)
        sigma = torch.linspace(0.05, 1, n)
        v = golden.filled(Wan(shape, size), weights[expert])(x, sigma, hidden, lengths)
        yield compare(f"dit.{expert}", v.numpy(), public.dit(expert, x, sigma, wide).numpy())
    vae = golden.filled(WanVae(golden.vae_size(weights["vae"])), weights["vae"])
    rng = np.random.default_rng(5)
    clip = torch.from_numpy(scenes.clips(grammar.sample(rng, 1), rng)).permute(0, 4, 1, 2, 3) / 127.5 - 1
    z = public.diffusion_latents(clip)
    yield compare("encoder", vae.diffusion_latents(clip).numpy(), z.numpy())
    yield compare("decoder", vae.decode_diffusion(z).numpy(), public.decode_diffusion(z).numpy())


@torch.no_grad()
def answers(weights: Mapping[str, Values], inputs: Values) -> Values:
    """What the public networks make of a golden file's inputs, under its names."""
    public = Public(weights)
    rows, lengths = (torch.from_numpy(a) for a in tokens.rows(golden.prompts()))
    hidden = public.text(rows, lengths)
    found = dict(inputs) | {"text": hidden.sum(1).numpy()}
    for expert, sigma, k in golden.cases():
        x = torch.from_numpy(inputs[f"dit.{expert}.{k}.x"])
        more = golden.dit_size(weights[expert]).inputs - LATENT
        x = torch.cat((x, torch.zeros(1, more, *x.shape[2:])), 1)
        found[f"dit.{expert}.{k}.v"] = public.dit(expert, x, torch.tensor([sigma]), hidden[k : k + 1]).numpy()
    found["encoder"] = public.diffusion_latents(torch.from_numpy(golden.first_clip())).numpy()
    found["decoder"] = public.decode_diffusion(torch.from_numpy(inputs["decoder.z"]))[0].numpy()
    return found


def fresh() -> dict[str, Values]:
    """Random weights in the sizes that are trained: those in the beginning of training, moved so that none is 0."""
    torch.manual_seed(0)
    modules: dict[str, nn.Module] = {"text": Umt5(TEXT, len(tokens.used())), "vae": WanVae(VAE)}
    modules |= {expert: Wan(I2V, TEXT) for expert in golden.SIGMAS}
    for module in modules.values():
        for weight in module.parameters():
            weight.data += 0.03 * torch.randn(weight.shape)
    return {part: {k: v.detach().numpy() for k, v in m.named_parameters()} for part, m in modules.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    golden.add_source(parser)
    parser.add_argument("--type", choices=tuple(golden.TRAINED), default="f32", help="of the engine's linear layers")
    a = parser.parse_args()
    print(f"torch {torch.__version__}, diffusers {diffusers.__version__}, transformers {transformers.__version__}")
    weights, trained = golden.chosen(a, parser)
    print(f"trained: {', '.join(trained) or 'nothing'}")
    wrong = []
    for title, some in (("new weights", fresh()), ("these weights", weights)):
        found = list(networks(some))
        golden.show(f"networks here, {title}", found)
        wrong += [f"{d.module}: {d.largest:.1e}, at most {LIMIT:.0e}" for d in found if not d.largest <= LIMIT]
    with tempfile.TemporaryDirectory() as scratch:
        expected = golden.make(weights, Path(scratch))
        theirs = answers(weights, expected)
        found = golden.check(theirs, weights, a.type, Path(scratch))
    golden.show(f"engine, {a.type}", found)
    wrong += golden.too_far(found, golden.limits(a.type, trained))
    if wrong:
        parser.exit(1, "\n".join(wrong) + "\n")


if __name__ == "__main__":
    main()
