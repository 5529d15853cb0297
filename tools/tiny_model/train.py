"""Trains the tiny model in pieces: python -m tools.tiny_model.train --state DIR pictures:1.5 vae:5

A piece is a stage and its minutes. Stages are pictures and vae (the VAE on single frames, then on clips), stills and
trunk (text encoder and one diffusion transformer for all noise, on pictures, then on clips), low and high (the two
experts, from the trunk). Stages that are finished are skipped, one that ended early is gone on with. See README.md.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from tools.tiny_model import arrays, data, flow, state, tokens
from tools.tiny_model.dit import Block, Head, Wan
from tools.tiny_model.scenes import FRAMES, SIZE
from tools.tiny_model.sizes import I2V, LATENT, TEXT, VAE, latent_shape
from tools.tiny_model.text import Layer, Umt5
from tools.tiny_model.vae import LAYOUTS, WanVae

STAGES = ("pictures", "vae", "stills", "trunk", "low", "high")
RATES = {"pictures": 5e-4, "vae": 4e-4, "stills": 1.5e-3, "trunk": 1.2e-3, "low": 7e-4, "high": 7e-4}
DECAYS = {"pictures": 0.998, "vae": 0.998, "stills": 0.999, "trunk": 0.999, "low": 0.999, "high": 0.999}
BATCHES = {"pictures": 64, "vae": 32, "stills": 1024, "trunk": 512, "low": 512, "high": 512}
KL = 5e-4
OBJECTS = 8.0  # more that a pixel of an object counts than one of the ground: few pixels are an object's
LATE = 1.2  # times the minutes that were given, at most
CROPS = 0.7  # of the VAE's steps are on crops of CROP, the rest on whole clips
CROP = (9, 64)  # frames, pixels
FOOTAGE, STILLS = 0.25, 2.0  # clips that the VAE learns from, and pictures that are encoded, for each encoded clip
PICTURES = 10  # one of so many batches of trunk, low and high has one frame
WARM, MEASURED = 30, 130  # steps between which the speed is measured

Made = TypeVar("Made")


class Steps(NamedTuple):
    """`feed` makes the inputs of a step from its number and the share of steps before it, `loss` a loss of them."""

    feed: Callable[[int, float], tuple[Tensor, ...]]
    loss: state.Loss


def vae_steps(vae: WanVae, stage: str, source: data.Footage, batch: int, seed: int, device: torch.device) -> Steps:
    """Reconstruction: absolute and squared differences, and a little pull of the latents to a normal distribution."""

    def feed(number: int, share: float) -> tuple[Tensor, ...]:
        rng = np.random.default_rng((seed, 1, STAGES.index(stage), number))
        random = torch.Generator(device).manual_seed((seed * 7 + STAGES.index(stage)) * 1_000_003 + number)
        n, part = batch, (1, SIZE, SIZE)
        if stage != "pictures":
            n, part = (batch, (*CROP, CROP[1])) if share < CROPS else (max(1, batch // 4), (FRAMES, SIZE, SIZE))
        clips, there = source.some(n, rng, random, *part)
        return clips, there, torch.randn((n, LATENT, *latent_shape(*part)), generator=random, device=device)

    def loss(clips: Tensor, there: Tensor, noise: Tensor) -> Tensor:
        weight = 1 + OBJECTS * there
        with _fast(device):
            mean, spread = vae.moments(clips)
            away = vae.decode(mean + (spread / 2).exp() * noise).float() - clips
        kl = (mean.square() + spread.exp() - 1 - spread).mean() / 2
        return ((away.abs() + away.square()) * (weight / weight.mean())).mean() + KL * kl

    return Steps(feed, loss)


class Trunk(nn.Module):
    """Text encoder and diffusion transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.text, self.dit = Umt5(TEXT, len(tokens.used())), Wan(I2V, TEXT)
        with torch.no_grad():
            self.text.token_embd.weight[tokens.unused()] = 0


def flow_steps(
    dit: nn.Module, text: nn.Module, stage: str, source: data.Pool, batch: int, seed: int, device: torch.device
) -> Steps:
    """Velocity of the straight line from clip to noise, at times spread as the sampler's are."""
    empty = data.empty_prompt(device)

    def feed(number: int, share: float) -> tuple[Tensor, ...]:
        random = torch.Generator(device).manual_seed((seed * 7 + STAGES.index(stage)) * 1_000_003 + number)
        b = data.batch(source, batch, random, empty, stage == "stills" or number % PICTURES == PICTURES - 1)
        noise = torch.randn(b.latents.shape, generator=random, device=device)
        sigma = flow.shifted(flow.times(stage, torch.rand(batch, generator=random, device=device)))
        return b.latents, b.condition, noise, sigma, b.rows, b.lengths

    def loss(clips: Tensor, condition: Tensor, noise: Tensor, sigma: Tensor, rows: Tensor, lengths: Tensor) -> Tensor:
        mix = sigma.view(-1, 1, 1, 1, 1)
        x = torch.cat((clips * (1 - mix) + noise * mix, condition), 1)
        with _fast(device):
            v = dit(x, sigma, text(rows, lengths), lengths)
        return (v.float() - (noise - clips)).square().mean()

    return Steps(feed, loss)


def _fast(device: torch.device) -> torch.autocast:
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


def run(trainer: state.Trainer, steps: Steps, minutes: float, log: Path) -> bool:
    """Trains until all steps are done (True) or the time is up. Without a number of steps, as many as fit in it."""
    begun, measured, losses = time.monotonic(), 0.0, []
    spent, first = trainer.minutes, trainer.step
    while not trainer.steps or trainer.step < trainer.steps:
        inputs = steps.feed(trainer.step, trainer.step / trainer.steps if trainer.steps else 0.0)
        losses.append(trainer.update(steps.loss, inputs))
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
    rng, found = np.random.default_rng((seed, 5)), []
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
    if isinstance(trainer.module, Trunk) and trainer.stage == "trunk":
        modules = {"trunk": trainer.module.dit, "text": trainer.module.text}
    for name, module in modules.items():
        names, weights = zip(*module.named_parameters(), strict=True)
        info = {"finished": "1", "step": str(trainer.step), "minutes": f"{trainer.minutes:.3f}"}
        arrays.save(trainer.folder, f"{name}.ema", state.named(names, weights), info)
    trainer.finish()


class Sources:
    """What the stages learn from: each is made when the first of them needs it."""

    def __init__(self, a: argparse.Namespace, device: torch.device) -> None:
        self.a, self.device = a, device

    @cached_property
    def footage(self) -> data.Footage:
        return self._timed("drawn", FOOTAGE, 2, data.footage)

    @cached_property
    def clips(self) -> data.Pool:
        return self._timed("drawn and encoded", 1, 3, lambda *to: data.pool(self.vae, *to))

    @cached_property
    def stills(self) -> data.Pool:
        return self._timed("pictures drawn and encoded", STILLS, 4, lambda *to: data.pool(self.vae, *to, frames=1))

    @cached_property
    def vae(self) -> WanVae:
        found = state.load(WanVae(VAE), self.a.state, "vae").to(self.device).eval()
        found.lay_out(self.a.layout)
        return found

    def _timed(self, what: str, share: float, stream: int, make: Callable[..., Made]) -> Made:
        begun, n = time.monotonic(), max(data.FIRST_FRAME_EVERY, int(self.a.pool * share))
        made = make(np.random.default_rng((self.a.seed, stream)), n, self.device)
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        print(f"{n} {what} in {time.monotonic() - begun:.1f} s", flush=True)
        return made


def parts(
    a: argparse.Namespace, stage: str, sources: Sources, device: torch.device
) -> tuple[nn.Module, Callable[[], Steps]]:
    """The stage's module in training, and what makes its steps."""
    batch = a.batch or BATCHES[stage]
    if stage in ("pictures", "vae"):
        vae = WanVae(VAE)
        vae = (vae if stage == "pictures" else state.load(vae, a.state, "pictures")).to(device)
        vae.lay_out(a.layout, a.compile)
        return vae, lambda: vae_steps(vae, stage, sources.footage, batch, a.seed, device)
    if stage in ("stills", "trunk"):
        both = Trunk()
        module: nn.Module = (both if stage == "stills" else state.load(both, a.state, "stills")).to(device)
        dit, text = both.dit, both.text
    else:
        module = dit = state.load(Wan(I2V, TEXT), a.state, "trunk").to(device)
        text = state.load(Umt5(TEXT, len(tokens.used())), a.state, "text").to(device).requires_grad_(False)
    if a.compile:
        quicken(dit, text)

    def steps() -> Steps:
        source = sources.stills if stage == "stills" else sources.clips
        return flow_steps(dit, text, stage, source, batch, a.seed, device)

    return module, steps


def quicken(*networks: nn.Module) -> None:
    """Compiles what they have several of, once for each kind."""
    for module in (m for network in networks for m in network.modules()):
        if isinstance(module, Block | Head | Layer):
            module.compile(dynamic=False, fullgraph=True)


def pieces(words: list[str]) -> Iterator[tuple[str, float, int]]:
    """Stages, their minutes and the number of all their steps, 0 where it isn't said.

    Raises:
        ValueError: a word is none.
    """
    for word in words:
        stage, *numbers = word.split(":")
        if stage not in STAGES or not 1 <= len(numbers) <= 2:
            raise ValueError(
                f"{word} is no piece: STAGE:MINUTES or STAGE:MINUTES:STEPS, stages are {', '.join(STAGES)}"
            )
        minutes, steps = float(numbers[0]), int(numbers[1]) if len(numbers) == 2 else 0
        if minutes <= 0 or steps < 0:
            raise ValueError(f"{word}: minutes above 0 and steps from 0 are possible")
        yield stage, minutes, steps


def train(
    a: argparse.Namespace, stage: str, minutes: float, steps: int, sources: Sources, device: torch.device
) -> bool:
    """One piece; whether its stage is finished."""
    if arrays.read(a.state, f"{stage}.ema")[1].get("finished"):
        print(f"{stage}: finished before")
        return True
    torch.manual_seed(a.seed)
    module, make = parts(a, stage, sources, device)
    trainer = state.Trainer(stage, module, a.state, RATES[stage], DECAYS[stage])
    if not trainer.resume():
        trainer.steps = steps
    made = make()
    with own_stream(device):
        done = run(trainer, made, minutes, a.state / "log.jsonl")
    if done:
        finish(trainer, a.seed, device, min(a.pool, 1024))
    else:
        trainer.save()
    said = f"{trainer.minutes:.2f} minutes, {'finished' if done else 'go on with the same command'}"
    print(f"{stage}: {trainer.step} of {trainer.steps} steps, {said}", flush=True)
    return done


@contextmanager
def own_stream(device: torch.device) -> Iterator[None]:
    """Steps can be recorded on any stream but the one that is there from the beginning."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        yield
    torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pieces", nargs="+", metavar="STAGE:MINUTES[:STEPS]", help="steps: as many as fit, if not said")
    parser.add_argument("--state", type=Path, required=True, help="folder for weights and the log")
    parser.add_argument("--batch", type=int, default=0, help="clips a step; 0: the stage's own")
    parser.add_argument("--pool", type=int, default=60000, help="clips that are encoded for trunk, low and high")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--layout", choices=LAYOUTS, default="3d", help="of the VAE: speed.py tells the fastest")
    parser.add_argument("--compile", action="store_true", help="by torch.compile: half a minute more, then faster")
    a = parser.parse_args()
    if a.compile and not hasattr(nn.Module, "compile"):
        parser.error(f"--compile needs PyTorch 2.3 or newer, this is {torch.__version__}")
    if a.batch < 0 or a.pool < data.FIRST_FRAME_EVERY:
        parser.error(f"--batch from 0 and --pool from {data.FIRST_FRAME_EVERY} are possible")
    try:
        todo = list(pieces(a.pieces))
    except ValueError as error:
        parser.error(str(error))
    a.state.mkdir(parents=True, exist_ok=True)
    device = prepared()
    sources = Sources(a, device)
    try:
        for stage, minutes, steps in todo:
            if not train(a, stage, minutes, steps, sources, device):
                break
    except FileNotFoundError as error:
        parser.error(str(error))


def prepared() -> torch.device:
    """The device, and torch set up for it."""
    torch.backends.cudnn.benchmark = True
    torch.set_float32_matmul_precision("high")
    if hasattr(torch, "_dynamo"):
        torch._dynamo.config.cache_size_limit = 64  # several shapes of each part, with and without gradients
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


if __name__ == "__main__":
    main()
