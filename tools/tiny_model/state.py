"""What training keeps between its pieces: weights, their running average, and the optimizer's moments in bfloat16."""

from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from tools.tiny_model import arrays

BETAS = (0.9, 0.99)
EAGER = 2  # calls with the same shapes before one is recorded: in these torch chooses and compiles kernels

Loss = Callable[..., Tensor]


class Trainer:
    """A module in training. `average` holds the running average of its weights.

    Files are `STAGE.weights`, `STAGE.ema`, `STAGE.m` and `STAGE.v`, each in parts of at most 14 MiB.
    """

    def __init__(self, stage: str, module: nn.Module, folder: Path, rate: float, decay: float) -> None:
        self.stage, self.module, self.folder, self.rate, self.decay = stage, module, folder, rate, decay
        self.names = [name for name, _ in module.named_parameters()]
        self.weights = list(module.parameters())
        self.on_gpu = self.weights[0].is_cuda
        # what changes from step to step is read from the GPU's memory there, so that a recorded step sees it
        self.rate_now, self.rest = (torch.tensor(0.0, device=self.weights[0].device) for _ in range(2))
        options = {"fused": True, "capturable": True} if self.on_gpu else {}
        lr = self.rate_now if self.on_gpu else rate
        self.adam = torch.optim.AdamW(self.weights, lr=lr, betas=BETAS, weight_decay=0.01, **options)
        self.recorded: dict[object, tuple[torch.cuda.CUDAGraph, tuple[Tensor, ...], Tensor]] = {}
        self.calls: Counter[object] = Counter()
        self.average = [w.detach().clone() for w in self.weights]
        self.step, self.steps, self.minutes = 0, 0, 0.0

    def resume(self) -> bool:
        """Goes on from the files, if there are any."""
        kept, info = arrays.read(self.folder, f"{self.stage}.weights")
        if not kept:
            return False
        self.step, self.steps, self.minutes = int(info["step"]), int(info["steps"]), float(info["minutes"])
        _fill(self.names, self.weights, kept)
        _fill(self.names, self.average, arrays.load(self.folder, f"{self.stage}.ema"))
        m, v = (arrays.load(self.folder, f"{self.stage}.{part}") for part in "mv")
        for name, weight in zip(self.names, self.weights, strict=True):
            moments = {"exp_avg": m[name], "exp_avg_sq": v[name]}
            state = {k: torch.from_numpy(arrays.from_bf16(a).copy()).to(weight.device) for k, a in moments.items()}
            state["step"] = torch.tensor(float(self.step), device=weight.device)
            self.adam.state[weight] = state
        return True

    def save(self) -> None:
        info = {"step": str(self.step), "steps": str(self.steps), "minutes": f"{self.minutes:.3f}"}
        arrays.save(self.folder, f"{self.stage}.ema", named(self.names, self.average), info)
        for part, key in (("m", "exp_avg"), ("v", "exp_avg_sq")):  # weights that frames alone don't use have none
            values = named(self.names, [self.adam.state[w].get(key, torch.zeros_like(w)) for w in self.weights])
            arrays.save(self.folder, f"{self.stage}.{part}", {k: arrays.to_bf16(a) for k, a in values.items()})
        arrays.save(self.folder, f"{self.stage}.weights", named(self.names, self.weights), info)

    def finish(self) -> None:
        """Drops what only more training would need."""
        for part in ("weights", "m", "v"):
            for path in self.folder.glob(f"{self.stage}.{part}.*.safetensors"):
                path.unlink()

    def update(self, loss_of: Loss, inputs: tuple[Tensor, ...]) -> Tensor:
        """One step of the loss of these inputs: a short rise of the rate, then half a cosine down to a twentieth.

        A step is over a thousand kernels, for which a GPU would wait: it is recorded for every set of shapes (a CUDA
        graph) and asked for as one. `loss_of` must not use the processor's random numbers or wait for the GPU.
        """
        share = min(1.0, self.step / max(self.steps, 1)) if self.steps else 0.0
        rate = self.rate * min(1.0, (self.step + 1) / 200) * (0.05 + 0.475 * (1 + np.cos(np.pi * share)))
        self.rate_now.fill_(rate)
        self.rest.fill_(1 - min(self.decay, (self.step + 1) / (self.step + 10)))
        self.step += 1
        if not self.on_gpu:
            for group in self.adam.param_groups:
                group["lr"] = rate
            return self._work(loss_of, inputs)
        shapes = tuple(x.shape for x in inputs)
        self.calls[shapes] += 1
        if self.calls[shapes] <= EAGER:
            return self._work(loss_of, inputs)
        if shapes not in self.recorded:
            kept, graph = tuple(x.clone() for x in inputs), torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
                loss = self._work(loss_of, kept)
            self.recorded[shapes] = graph, kept, loss
        graph, kept, loss = self.recorded[shapes]
        for own, x in zip(kept, inputs, strict=True):
            own.copy_(x)
        graph.replay()
        return loss.clone()

    def _work(self, loss_of: Loss, inputs: tuple[Tensor, ...]) -> Tensor:
        self.adam.zero_grad(set_to_none=True)
        loss = loss_of(*inputs)
        loss.backward()
        nn.utils.clip_grad_norm_(self.weights, 1.0)
        self.adam.step()
        with torch.no_grad():
            change = torch._foreach_sub(self.weights, self.average)
            torch._foreach_mul_(change, self.rest)
            torch._foreach_add_(self.average, change)
        return loss.detach()

    def use_average(self) -> None:
        with torch.no_grad():
            for weight, average in zip(self.weights, self.average, strict=True):
                weight.copy_(average)


def named(names: Iterable[str], tensors: Iterable[Tensor]) -> dict[str, np.ndarray]:
    return {n: t.detach().float().cpu().numpy() for n, t in zip(names, tensors, strict=True)}


@torch.no_grad()
def _fill(names: list[str], tensors: list[Tensor], values: dict[str, np.ndarray]) -> None:
    for name, tensor in zip(names, tensors, strict=True):
        tensor.copy_(torch.from_numpy(values[name].copy()))


def load(module: nn.Module, folder: Path, name: str) -> nn.Module:
    """Fills a module from finished weights.

    Raises:
        FileNotFoundError: there are none.
    """
    values, info = arrays.read(folder, f"{name}.ema")
    if not info.get("finished"):
        raise FileNotFoundError(f"{folder} holds no finished {name}.ema: train the stage before this one first")
    parameters = dict(module.named_parameters())
    _fill(list(parameters), list(parameters.values()), values)
    return module
