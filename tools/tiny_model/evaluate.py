"""Renders the held-out captions and reads the clips: python -m tools.tiny_model.evaluate --package --out FOLDER

With --package the engine renders with the preset tiny, with --models with what `export` wrote; with --state torch does,
from the weights themselves. Steps and guidance are the preset's. Leaves scores.json, sheet.png and, for comparisons,
clips.npz under --out.
"""

import argparse
import json
import os
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from tools.tiny_model import arrays, grammar, reader
from tools.tiny_model.scenes import FRAMES, SIZE
from tools.tiny_model.sizes import BOUNDARY, GUIDANCE, SHIFT, STEPS

if TYPE_CHECKING:
    import sdsage  # torch renders on machines without the engine

SHEET_ROWS, SHEET_FRAMES, TEXT_HEIGHT = 24, (0, 4, 8, 12, 16), 14
Frames = NDArray[np.uint8]


def model_files(folder: Path, kind: str) -> dict[str, str]:
    """Options and the files of `export` that go there."""
    return {
        "diffusion_model": str(folder / f"wan-t2v-low-{kind}.gguf"),
        "high_noise_diffusion_model": str(folder / f"wan-t2v-high-{kind}.gguf"),
        "t5xxl": str(folder / f"umt5-{kind}.gguf"),
        "vae": str(folder / "wan21-vae.safetensors"),
    }


def package_files(preset: str = "tiny") -> dict[str, str]:
    """The same of a preset."""
    from sdsage import presets

    options = presets.load(preset).options
    return {option: str(options[option]) for option in presets.files(preset)}


def missing(a: argparse.Namespace) -> str:
    """What is not there of what the arguments name, and what to do; empty if all is."""
    if a.against and not (a.against / "clips.npz").is_file():
        return f"--against {a.against} has no clips.npz: it is the --out of an earlier run"
    if a.models:
        absent = [Path(f).name for f in model_files(a.models, a.type).values() if not Path(f).is_file()]
        made = f"python -m tools.tiny_model.export STATE {a.models} --type {a.type} makes them from trained weights"
        return f"--models {a.models} lacks {', '.join(absent)}: {made}" if absent else ""
    if a.package:
        return ""
    if not find_spec("torch"):
        return "--state needs PyTorch: pip install torch, or let the engine render with --models"
    done = [name for name in ("vae", "text", "low", "high", "trunk") if finished(a.state, name)]
    absent = [name for name in ("vae", "text") if name not in done]
    if "trunk" not in done:  # stands for each expert that is not there
        absent += [name for name in ("low", "high") if name not in done]
    return f"--state {a.state} has no finished {', '.join(absent)}: train.py makes them" if absent else ""


def finished(state: Path, name: str) -> bool:
    return bool(arrays.read(state, f"{name}.ema")[1].get("finished"))


def context(files: dict[str, str], *, device: str | None = None, threads: int = 1, **params: Any) -> "sdsage.Context":
    """The model on a device."""
    import sdsage

    fields = sdsage.SdCtxParams(n_threads=threads, **params)
    for option, file in files.items():
        setattr(fields, f"{option}_path", file)
    return sdsage.Context(fields, device=device)


def job(caption: str, seed: int, steps: int, guidance: float, frames: int = FRAMES) -> "sdsage.SdVidGenParams":
    """As the preset has it."""
    import sdsage

    wanted = sdsage.SdVidGenParams(prompt=caption, width=SIZE, height=SIZE, video_frames=frames, seed=seed)
    for sample in (wanted.sample_params, wanted.high_noise_sample_params):
        sample.sample_method = sdsage.SampleMethod.EULER
        sample.scheduler = sdsage.Scheduler.DISCRETE
        sample.guidance.txt_cfg = guidance
        sample.flow_shift = SHIFT
    wanted.sample_params.sample_steps = steps
    wanted.high_noise_sample_params.sample_steps = -1  # as many of them as are above the boundary
    wanted.moe_boundary = BOUNDARY
    return wanted


Rendered = tuple[Frames, dict[str, int]]  # a clip, and how often each kernel was called for attention


def with_engine(a: argparse.Namespace, captions: list[str]) -> list[Rendered]:
    """Clips by sdsage, in several processes; clip i has seed i."""
    numbered = list(enumerate(captions))
    shares = [numbered[k :: a.processes] for k in range(a.processes)]
    files = model_files(a.models, a.type) if a.models else package_files()
    with ProcessPoolExecutor(a.processes, get_context("spawn")) as pool:
        found = list(pool.map(partial(_rendered, vars(a), files), shares))
    return [found[i % a.processes][i // a.processes] for i in range(len(captions))]


def _rendered(a: dict[str, Any], files: dict[str, str], some: list[tuple[int, str]]) -> list[Rendered]:
    if a["sage_cpu"]:
        from sdsage._ffi import lib

        lib.sdsage_test_sage_cpu(89, 13000, b"89")  # the kernels' arithmetic, as on an Ada card
    found = []
    sage = a["sage"] or a["sage_cpu"]
    fields = {"diffusion_flash_attn": a["flash"], "sage_attn": sage, "engine_levers": a["engine_levers"]}
    with context(files, device=a["device"], threads=a["threads"], **fields) as model:
        for seed, caption in some:
            result = model.generate_video(job(caption, seed, a["steps"], a["guidance"]))
            calls: Counter[str] = Counter()
            for entry in result.attention:
                calls[entry.kernel] += entry.calls
            found.append((result.frames, dict(calls)))
    return found


def with_torch(folder: Path, batch: int = 50) -> Callable[[list[str], int, float], list[Frames]]:
    """What makes clips of captions, steps and guidance with the modules that were trained, on a GPU if there is one."""
    import torch

    from tools.tiny_model import data, flow, state, tokens
    from tools.tiny_model.dit import Wan
    from tools.tiny_model.sizes import I2V, LATENT, TEXT, VAE, latent_shape
    from tools.tiny_model.text import Umt5
    from tools.tiny_model.vae import WanVae

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    experts = [name if finished(folder, name) else "trunk" for name in ("low", "high")]
    low, high = (state.load(Wan(I2V, TEXT), folder, name).to(device).eval() for name in experts)
    text = state.load(Umt5(TEXT, len(tokens.used())), folder, "text").to(device).eval()
    vae = state.load(WanVae(VAE), folder, "vae").to(device).eval()
    print(f"experts: {', '.join(experts)}")

    @torch.no_grad()
    def render(captions: list[str], steps: int, guidance: float) -> list[Frames]:
        found: list[Frames] = []
        for begin in range(0, len(captions), batch):
            some = captions[begin : begin + batch]
            rows, lengths = (torch.from_numpy(x).to(device) for x in tokens.rows(some))
            empty = data.empty_prompt(device)
            none = tuple(x.expand(len(some), *x.shape[1:]) for x in (text(*empty), empty[1]))
            random = torch.Generator().manual_seed(begin)
            noise = torch.randn((len(some), LATENT, *latent_shape(FRAMES, SIZE, SIZE)), generator=random).to(device)
            z = flow.sample(low, high, noise, (text(rows, lengths), lengths), none, steps, guidance)
            for part in z.split(10):
                clips = ((vae.decode_diffusion(part).clamp(-1, 1) + 1) * 127.5).round().byte()
                found += list(clips.permute(0, 2, 3, 4, 1).cpu().numpy())
        return found

    return render


def read(clips: list[Frames], scenes: grammar.Scenes) -> list[reader.Score]:
    """Scores of clips 0, 1, ... of scenes, by as many processes as there are processors."""
    if len(clips) < 16:
        return [reader.score(clip, scenes, i) for i, clip in enumerate(clips)]
    with ProcessPoolExecutor(os.cpu_count(), get_context("spawn")) as pool:
        return list(pool.map(partial(_score, scenes), range(len(clips)), clips, chunksize=4))


def _score(scenes: grammar.Scenes, i: int, clip: Frames) -> reader.Score:
    return reader.score(clip, scenes, i)


def setting(word: str) -> tuple[int, float]:
    """Steps and guidance, as in 16:2.5."""
    steps, guidance = word.split(":")
    if int(steps) < 1:
        raise ValueError(word)
    return int(steps), float(guidance)


def sheet(clips: list[Frames], captions: list[str], scores: list[reader.Score]) -> Image.Image:
    """Some frames of the first clips, their captions above them; a mark tells what was read otherwise."""
    size, rows = clips[0].shape[1], min(SHEET_ROWS, len(clips))
    picture = Image.new("RGB", (2 * len(SHEET_FRAMES) * size + 8, -(-rows // 2) * (size + TEXT_HEIGHT)), "white")
    draw = ImageDraw.Draw(picture)
    for i in range(rows):
        x, y = i % 2 * (len(SHEET_FRAMES) * size + 8), i // 2 * (size + TEXT_HEIGHT)
        wrong = [w for w in ("colour", "shape", "direction") if not getattr(scores[i], w)]
        draw.text((x + 2, y), captions[i] + (f"  [{', '.join(wrong)}]" if wrong else ""), fill="black")
        for k, frame in enumerate(SHEET_FRAMES):
            picture.paste(Image.fromarray(clips[i][frame]), (x + k * size, y + TEXT_HEIGHT))
    return picture


def psnr(a: Frames, b: Frames) -> float:
    """In dB; infinite for equal clips."""
    error = np.square(a.astype(np.float64) - b).mean()
    return float(10 * np.log10(255.0**2 / error)) if error else float("inf")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--package", action="store_true", help="the engine renders with the preset tiny")
    source.add_argument("--models", type=Path, help="folder of export.py: the engine renders")
    source.add_argument("--state", type=Path, help="folder of train.py: torch renders")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--type", choices=("f32", "f16", "q8_0"), default="q8_0", help="which of the model files")
    parser.add_argument("--count", type=int, default=grammar.HELD_OUT_COUNT, help="of the held-out captions")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--guidance", type=float, default=GUIDANCE)
    parser.add_argument(
        "--also", type=setting, nargs="*", default=[], metavar="STEPS:GUIDANCE", help="scores with these too, by torch"
    )
    parser.add_argument("--processes", type=int, default=1, help="of the engine")
    parser.add_argument("--threads", type=int, default=1, help="of each process")
    parser.add_argument("--device", help="the engine's; default: the first GPU, else the CPU")
    parser.add_argument("--flash", action="store_true", help="flash attention")
    parser.add_argument("--sage", action="store_true", help="SageAttention")
    parser.add_argument(
        "--sage-cpu", action="store_true", help="its arithmetic on a CPU: SDSAGE_LIB_DIR names a build's test-lib"
    )
    parser.add_argument("--engine-levers", default="default", help="as that of the verbs")
    parser.add_argument("--against", type=Path, help="--out of another run: PSNR between its clips and these")
    a = parser.parse_args()
    if not 1 <= a.count <= grammar.HELD_OUT_COUNT or min(a.steps, a.processes) < 1:
        parser.error(f"--count is 1 to {grammar.HELD_OUT_COUNT}, --steps and --processes 1 or more")
    if a.also and not a.state:
        parser.error("--also needs --state: the engine renders one setting a run")
    if said := missing(a):
        parser.error(said)
    scenes, captions = grammar.held_out_captions()
    captions = captions[: a.count]
    begun = time.monotonic()
    render = with_torch(a.state) if a.state else None
    if render:
        rendered: list[Rendered] = [(clip, {}) for clip in render(captions, a.steps, a.guidance)]
    else:
        rendered = with_engine(a, captions)
    seconds = time.monotonic() - begun
    clips = [clip for clip, _ in rendered]
    scores = read(clips, scenes)
    result: dict[str, object] = {"clips": len(clips), "steps": a.steps, "guidance": a.guidance, **reader.shares(scores)}
    result["seconds_per_clip"] = round(seconds / len(clips), 3)
    result["attention_calls"] = dict(sum((Counter(calls) for _, calls in rendered), Counter()))
    if render:
        result["also"] = [
            {"steps": steps, "guidance": guidance, **reader.shares(read(render(captions, steps, guidance), scenes))}
            for steps, guidance in a.also
        ]
    result["wrong"] = {captions[i]: vars(s) for i, s in enumerate(scores) if not s.all}
    if a.against:
        other = np.load(a.against / "clips.npz")["clips"]
        values = [psnr(x, y) for x, y in zip(clips, other, strict=False)]
        result["psnr_mean"], result["psnr_least"] = float(np.mean(values)), min(values)
    a.out.mkdir(parents=True, exist_ok=True)
    (a.out / "scores.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    sheet(clips, captions, scores).save(a.out / "sheet.png")
    np.savez_compressed(a.out / "clips.npz", clips=np.stack(clips))
    print(json.dumps({k: v for k, v in result.items() if k != "wrong"}))


if __name__ == "__main__":
    main()
