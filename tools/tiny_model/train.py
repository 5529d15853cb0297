"""Trains the tiny model in pieces: python -m tools.tiny_model.train --stage vae --minutes 8 --state DIR

Stages are pictures and vae (the VAE on single frames, then on clips), trunk (text encoder and one diffusion transformer
for all noise), low and high (the two experts, from the trunk). A piece that ends early is gone on with by the same
command. See README.md.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from tools.tiny_model import arrays, data, flow, state, tokens
from tools.tiny_model.dit import Wan
from tools.tiny_model.scenes import FRAMES
from tools.tiny_model.sizes import I2V, TEXT, VAE
from tools.tiny_model.text import Umt5
from tools.tiny_model.vae import LAYOUTS, WanVae

STAGES = ("pictures", "vae", "trunk", "low", "high")
RATES = {"pictures": 5e-4, "vae": 4e-4, "trunk": 1.5e-3, "low": 7e-4, "high": 7e-4}
DECAYS = {"pictures": 0.998, "vae": 0.998, "trunk": 0.999, "low": 0.999, "high": 0.999}
BATCHES = {"pictures": 64, "vae": 32, "trunk": 512, "low": 512, "high": 512}
KL = 2e-4
OBJECTS = 8.0  # more that a pixel of an object counts than one of the ground: few pixels are an object's
LATE = 1.2  # times the minutes that were given, at most
CROPS = 0.7  # of the VAE's steps are on crops of CROP, the rest on whole clips
CROP = (9, 64)  # frames, pixels
WARM, MEASURED = 30, 130  # steps between which the speed is measured

Step = Callable[[int, float], Tensor]  # number and share of all steps to a loss


def vae_steps(vae: WanVae, stage: str, batch: int, seed: int, device: torch.device) -> Step:
    """Reconstruction: absolute and squared differences, and a little pull of the latents to a normal distribution."""

    def step(number: int, share: float) -> Tensor:
        rng = np.random.default_rng((seed, 1, STAGES.index(stage), number))
        crops = stage == "vae" and share < CROPS
        whole = stage == "vae" and not crops
        clips, _ = data.draw(rng, max(1, batch // 4) if whole else batch, device, 1 if stage == "pictures" else FRAMES)
        if crops:
            clips = data.crop(clips, rng, *CROP)
        weight = 1 + OBJECTS * data.objects(clips)
        noise = torch.Generator(device).manual_seed((seed * 7 + STAGES.index(stage)) * 1_000_003 + number)
        with _fast(device):
            mean, spread = vae.moments(clips)
            z = mean + (spread / 2).exp() * torch.randn(mean.shape, generator=noise, device=device)
            away = vae.decode(z).float() - clips
        kl = (mean.square() + spread.exp() - 1 - spread).mean() / 2
        return ((away.abs() + away.square()) * (weight / weight.mean())).mean() + KL * kl

    return step


class Trunk(nn.Module):
    """Text encoder and diffusion transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.text, self.dit = Umt5(TEXT, len(tokens.used())), Wan(I2V, TEXT)


def flow_steps(
    dit: nn.Module, text: nn.Module, stage: str, source: data.Pool, batch: int, seed: int, device: torch.device
) -> Step:
    """Velocity of the straight line from clip to noise, at times spread as the sampler's are."""
    empty, (first, last) = data.empty_prompt(device), flow.part_of(stage)

    def step(number: int, share: float) -> Tensor:
        random = torch.Generator(device).manual_seed((seed * 7 + STAGES.index(stage)) * 1_000_003 + number)
        b = data.batch(source, batch, random, empty)
        noise = torch.randn(b.latents.shape, generator=random, device=device)
        sigma = flow.shifted(first + (last - first) * torch.rand(batch, generator=random, device=device))
        mix = sigma.view(-1, 1, 1, 1, 1)
        x = b.latents * (1 - mix) + noise * mix
        with _fast(device):
            v = dit(torch.cat((x, b.condition), 1), sigma, text(b.rows, b.lengths), b.lengths)
        return (v.float() - (noise - b.latents)).square().mean()

    return step


def _fast(device: torch.device) -> torch.autocast:
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


def run(trainer: state.Trainer, step: Step, minutes: float, log: Path) -> bool:
    """Trains until all steps are done (True) or the time is up. Without a number of steps, as many as fit in it."""
    begun, measured, losses = time.monotonic(), 0.0, []
    spent, first = trainer.minutes, trainer.step
    while not trainer.steps or trainer.step < trainer.steps:
        loss = step(trainer.step, trainer.step / trainer.steps if trainer.steps else 0.0)
        trainer.update(loss)
        losses.append(loss.detach())
        done = trainer.step - first
        if done == WARM:
            losses[-1].item()  # waits for the device
            measured = time.monotonic()
        if done == MEASURED and not trainer.steps:
            losses[-1].item()
            rate = (MEASURED - WARM) / (time.monotonic() - measured)
            trainer.steps = trainer.step + int(rate * (minutes * 60 - (time.monotonic() - begun)) * 0.97)
        if len(losses) == 50 or trainer.step == trainer.steps:
            mean = torch.stack(losses).mean().item()
            losses.clear()
            trainer.minutes = spent + (time.monotonic() - begun) / 60
            speed = done / (time.monotonic() - begun)
            entry = {"stage": trainer.stage, "step": trainer.step, "of": trainer.steps, "loss": round(mean, 5)}
            entry |= {"minutes": round(trainer.minutes, 2), "steps_per_s": round(speed, 2)}
            with log.open("a", encoding="utf-8") as file:
                print(json.dumps(entry), file=file)
            if trainer.step % 500 == 0 or done <= 150:
                print(json.dumps(entry), flush=True)
            if not np.isfinite(mean):
                raise SystemExit(f"{trainer.stage}: the loss is {mean} at step {trainer.step}: nothing was written")
            # a piece that is nearly through goes on for a while: its rate has to come to its end
            enough = minutes * 60 * (LATE if trainer.steps and trainer.step > 0.8 * trainer.steps else 1)
            if time.monotonic() - begun > enough:
                return trainer.step == trainer.steps
    return True


@torch.no_grad()
def normalise(vae: WanVae, seed: int, device: torch.device, clips: int) -> None:
    """Gives the latents the mean and deviation that the engine expects, as measured on so many clips."""
    rng, found = np.random.default_rng((seed, 2)), []
    with _fast(device):
        for _ in range(0, clips, 64):
            found.append(vae.moments(data.draw(rng, min(64, clips), device)[0])[0].float())
    z = torch.cat(found).transpose(0, 1).flatten(1)
    vae.normalise(z.mean(1), z.std(1))


def finish(trainer: state.Trainer, seed: int, device: torch.device, clips: int) -> None:
    """Writes the weights that later stages and `export` use. `clips`: to measure the VAE's latents on."""
    trainer.use_average()
    modules: dict[str, nn.Module] = {trainer.stage: trainer.module}
    if isinstance(trainer.module, WanVae) and trainer.stage == "vae":
        normalise(trainer.module, seed, device, clips)
    if isinstance(trainer.module, Trunk):
        modules = {"trunk": trainer.module.dit, "text": trainer.module.text}
    for name, module in modules.items():
        names, weights = zip(*module.named_parameters(), strict=True)
        info = {"finished": "1", "step": str(trainer.step), "minutes": f"{trainer.minutes:.3f}"}
        arrays.save(trainer.folder, f"{name}.ema", state.named(names, weights), info)
    trainer.finish()


def parts(a: argparse.Namespace, device: torch.device) -> tuple[state.Trainer, Callable[[], Step]]:
    """The stage's module in training, and what makes its steps."""
    vae = WanVae(VAE)
    vae.lay_out(a.layout)
    if a.stage in ("pictures", "vae"):
        vae = (vae if a.stage == "pictures" else state.load(vae, a.state, "pictures")).to(device)
        return _trainer(a, vae), lambda: vae_steps(vae, a.stage, a.batch, a.seed, device)
    encoder = state.load(vae, a.state, "vae").to(device).eval()
    rng = np.random.default_rng((a.seed, 3, STAGES.index(a.stage)))

    def source() -> data.Pool:
        begun = time.monotonic()
        made = data.pool(encoder, rng, a.pool, device)
        print(f"{a.pool} clips drawn and encoded in {time.monotonic() - begun:.0f} s", flush=True)
        return made

    if a.stage == "trunk":
        both = Trunk().to(device)
        dit, text, module = both.dit, both.text, both
    else:
        dit = state.load(Wan(I2V, TEXT), a.state, "trunk").to(device)
        text = state.load(Umt5(TEXT, len(tokens.used())), a.state, "text").to(device).requires_grad_(False)
        module = dit
    quick = torch.compile(dit) if a.compile else dit
    return _trainer(a, module), lambda: flow_steps(quick, text, a.stage, source(), a.batch, a.seed, device)


def _trainer(a: argparse.Namespace, module: nn.Module) -> state.Trainer:
    return state.Trainer(a.stage, module, a.state, RATES[a.stage], DECAYS[a.stage])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stage", choices=STAGES, required=True)
    parser.add_argument("--minutes", type=float, required=True, help="of this piece; saving comes on top")
    parser.add_argument("--state", type=Path, required=True, help="folder for weights and the log")
    parser.add_argument("--steps", type=int, default=0, help="of the whole stage; 0: as many as fit in --minutes")
    parser.add_argument("--batch", type=int, default=0, help="clips a step; 0: the stage's own")
    parser.add_argument("--pool", type=int, default=60000, help="clips that are encoded for trunk, low and high")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--layout", choices=LAYOUTS, default="3d", help="of the VAE: speed.py tells the fastest")
    parser.add_argument(
        "--compile",
        action="store_true",
        help="the transformers by torch.compile: a minute more at the start, then faster",
    )
    a = parser.parse_args()
    a.batch = a.batch or BATCHES[a.stage]
    if a.minutes <= 0 or a.steps < 0 or a.batch < 1 or a.pool < data.FIRST_FRAME_EVERY:
        parser.error(
            f"--minutes above 0, --steps from 0, --batch from 1 and --pool from {data.FIRST_FRAME_EVERY} are possible"
        )
    if arrays.read(a.state, f"{a.stage}.ema")[1].get("finished"):
        parser.error(f"stage {a.stage} in {a.state} is finished: delete its files to begin anew")
    a.state.mkdir(parents=True, exist_ok=True)
    begun = time.monotonic()
    torch.manual_seed(a.seed)
    torch.backends.cudnn.benchmark = True
    torch.set_float32_matmul_precision("high")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        trainer, steps = parts(a, device)
    except FileNotFoundError as error:
        parser.error(str(error))
    if not trainer.resume():
        trainer.steps = a.steps
    step = steps()
    left = a.minutes - (time.monotonic() - begun) / 60
    done = run(trainer, step, max(left, 0.0), a.state / "log.jsonl")
    if done:
        finish(trainer, a.seed, device, min(a.pool, 1024))
    else:
        trainer.save()
    print(
        f"{a.stage}: {trainer.step} of {trainer.steps} steps, {'finished' if done else 'go on with the same command'}"
    )


if __name__ == "__main__":
    main()
