"""What the VAE alone makes of clips: python -m tools.tiny_model.reconstruct --state FOLDER --out FOLDER

Encodes and decodes clips of the held-out captions: the most that the whole model can reach. With --engine the engine
decodes the same latents from the exported file as well, and encodes the first frames. Leaves vae.json and vae.png.
"""

import argparse
import json
import tempfile
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from tools.tiny_model import evaluate, grammar, reader, scenes, state
from tools.tiny_model.evaluate import Frames, psnr
from tools.tiny_model.sizes import VAE
from tools.tiny_model.vae import WanVae

PICTURES = 8  # first frames that the engine encodes


@torch.no_grad()
def by_torch(vae: WanVae, clips: NDArray[np.uint8], device: torch.device) -> tuple[list[NDArray], list[Frames]]:
    """Latents and frames of each clip."""
    latents, frames = [], []
    for clip in clips:
        x = torch.from_numpy(clip).to(device).permute(3, 0, 1, 2)[None] / 127.5 - 1
        z = vae.diffusion_latents(x)
        y = vae.decode_diffusion(z)[0].clamp(-1, 1)
        latents.append(z.cpu().numpy())
        frames.append(((y + 1) * 127.5).round().byte().permute(1, 2, 3, 0).cpu().numpy())
    return latents, frames


def object_psnr(clip: Frames, other: Frames) -> float:
    """Of the objects' pixels alone, in dB."""
    ground = np.median(clip.reshape(-1, 3), 0)
    there = np.abs(clip - ground).max(-1) > scenes.OBJECT
    return psnr(clip[there], other[there])


def quality(clips: NDArray[np.uint8], others: list[Frames], scores: list[reader.Score]) -> dict[str, float]:
    """PSNR and what the reader reads."""
    pairs = list(zip(clips, others, strict=True))
    whole = [psnr(a, b) for a, b in pairs]
    found: dict[str, float] = {"psnr_mean": float(np.mean(whole)), "psnr_least": min(whole)}
    found["psnr_objects"] = float(np.mean([object_psnr(a, b) for a, b in pairs]))
    for name, t in (("first", 0), ("last", -1)):
        found[f"psnr_{name}_frame"] = float(np.mean([psnr(a[t], b[t]) for a, b in pairs]))
    return found | reader.shares(scores)


def by_engine(
    folder: Path, clips: NDArray[np.uint8], latents: list[NDArray]
) -> tuple[list[Frames], list[NDArray[np.float32]]]:
    """Frames that the engine decodes, and the latents that it makes of the first pictures."""
    import sdsage
    from tools.tiny_model import golden

    weights, _ = golden.weights(folder)
    with tempfile.TemporaryDirectory() as scratch:
        modules, _ = golden.write(weights, golden.DType.F32, Path(scratch))
        params = sdsage.SdCtxParams(n_threads=2)
        params.vae_path = str(modules.vae)
        with sdsage.Context(params, decode_only="Wan 2.x") as model:
            frames = [model.decode(z) for z in latents]
        return frames, [modules.condition(clip[0], 5)[:, :, :1] for clip in clips[:PICTURES]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--state", type=Path, required=True, help="folder of train.py with a finished VAE")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--count", type=int, default=64, help="of clips")
    parser.add_argument("--engine", action="store_true", help="the engine decodes too")
    a = parser.parse_args()
    if not 1 <= a.count <= grammar.HELD_OUT_COUNT:
        parser.error(f"--count is {a.count}: 1 to {grammar.HELD_OUT_COUNT} are possible")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        vae = state.load(WanVae(VAE), a.state, "vae").to(device).eval()
    except FileNotFoundError as error:
        parser.error(str(error))
    every, captions = grammar.held_out_captions()
    drawn, captions = every.take(np.arange(a.count)), captions[: a.count]
    clips = scenes.clips(drawn, np.random.default_rng(grammar.HELD_OUT_SEED))
    latents, frames = by_torch(vae, clips, device)
    scores = evaluate.read(frames, drawn)
    result: dict[str, object] = {"clips": a.count, "torch": quality(clips, frames, scores)}
    if a.engine:
        others, pictures = by_engine(a.state, clips, latents)
        result["engine"] = quality(clips, others, evaluate.read(others, drawn))
        both = [psnr(x, y) for x, y in zip(frames, others, strict=True)]
        result["engine_against_torch"] = {"psnr_mean": float(np.mean(both)), "psnr_least": min(both)}
        theirs = np.stack([z[:, :, :1] for z in latents[:PICTURES]])
        away = np.square(np.stack(pictures) - theirs).mean() / np.square(theirs).mean()
        result["encoder_against_torch"] = {"rms": float(np.sqrt(away))}
    a.out.mkdir(parents=True, exist_ok=True)
    (a.out / "vae.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    evaluate.sheet(frames, captions, scores).save(a.out / "vae.png")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
