"""How long sampling will still take, from the steps that were measured."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .option import IMG, VID

if TYPE_CHECKING:
    from sdsage import Progress

    from .job import Job


@dataclass
class Pass:
    """Steps that one model makes in a row.

    Attributes:
        kind: "high-noise", "low-noise" or "sample"; "hires" for the second pass of a picture.
        steps: planned, until the pass begins and says how many there are.
        cost: of a step, in any unit, until one is measured.
    """

    kind: str
    steps: int
    cost: float = 1.0

    @property
    def stage(self) -> str:
        """What the engine calls it."""
        return "sample" if self.kind == "hires" else self.kind


class Estimate:
    """Seconds that are left of sampling, over both experts and all pictures.

    A step counts what its kind takes on average. The first one of each pass is left out, because it also plans memory
    and brings weights to the device, and so are steps that came from a checkpoint.

    Args:
        plan: passes in their order; what comes beyond it is counted from its begin on.
        divided: total of two experts between which the engine divides the steps (--moe-boundary); 0: it does not.
    """

    def __init__(self, plan: list[Pass] | None = None, divided: int = 0) -> None:
        self._plan = list(plan or [])
        self._divided = divided
        self._at = -1
        self._step = 0  # of the running pass
        self._seen = 0.0  # seconds of the pass up to it
        self._replayed = self._computed = 0
        self._measured: dict[str, tuple[float, int]] = {}  # kind -> seconds, steps

    @property
    def steps(self) -> int:
        """All that are planned."""
        return sum(p.steps for p in self._plan)

    @property
    def step(self) -> int:
        """Steps that are done."""
        return sum(p.steps for p in self._plan[: max(self._at, 0)]) + self._step

    def hear(self, progress: "Progress") -> None:
        """An event of the stage "sample"."""
        if progress.step == 0:
            self._begin(progress.expert or "sample", progress.steps)
            return
        if self._at < 0:
            self._begin(progress.expert or "sample", progress.steps)
        seconds, self._seen, self._step = progress.seconds - self._seen, progress.seconds, progress.step
        replayed = progress.replayed
        if replayed > self._replayed:
            self._replayed = replayed
            return
        self._computed += 1
        if self._computed > 1:
            kind = self._plan[self._at].kind
            total, count = self._measured.get(kind, (0.0, 0))
            self._measured[kind] = (total + seconds, count + 1)

    def _begin(self, stage: str, steps: int) -> None:
        later = range(self._at + 1, len(self._plan))
        at = next((i for i in later if self._plan[i].stage == stage), None)
        if at is None:  # not planned: it comes now
            at = self._at + 1
            self._plan.insert(at, Pass(stage, steps))
        del self._plan[self._at + 1 : at]  # passes that did not happen
        self._at += 1
        self._step, self._seen, self._replayed, self._computed = 0, 0.0, 0, 0
        kind = self._plan[self._at].kind
        for p in self._plan[self._at :]:
            if p.kind == kind:
                p.steps = steps
            elif self._divided and kind == "high-noise":
                p.steps = max(self._divided - steps, 0)

    def left(self) -> float | None:
        """Seconds; None until a step was measured."""
        if self._at < 0:
            return None
        here = self._plan[self._at]
        passes = [(here, here.steps - self._step), *((p, p.steps) for p in self._plan[self._at + 1 :])]
        waiting = [(p, steps) for p, steps in passes if steps > 0]
        if waiting and not self._measured:
            return None
        return sum((steps * self._seconds(p) for p, steps in waiting), 0.0)

    def _seconds(self, p: Pass) -> float:
        """Of a step of this pass: measured, or told from the others by its cost."""
        if p.kind in self._measured:
            total, count = self._measured[p.kind]
            return total / count
        known = {q.kind: q for q in self._plan if q.kind in self._measured}
        rates = [self._measured[kind][0] / self._measured[kind][1] / q.cost for kind, q in known.items()]
        return p.cost * sum(rates) / len(rates)


def estimate(job: "Job") -> Estimate:
    """That of a generation which begins."""
    from .seeds import parts

    s = job.settings
    steps = len(s["sigmas"]) - 1 if s["sigmas"] else s["steps"]
    cost = _calls(s["cfg_scale"])
    plan, divided = [], 0
    for part in (part for part in parts(s, job.seeds) for _ in range(1 + (s.values.get("extend") or 0))):
        if s.verb == VID and s["high_noise_diffusion_model"]:
            high = max(s["high_noise_steps"], 0)
            divided = 0 if high else steps
            plan += [Pass("high-noise", high, _calls(s["high_noise_cfg_scale"])), Pass("low-noise", steps, cost)]
            continue
        plan += [Pass("sample", steps, cost) for _ in range(part.count)]
        if s.verb == IMG and s["hires"]:
            more = cost * _hires_scale(job) ** 2
            plan += [Pass("hires", s["hires_steps"] or steps, more) for _ in range(part.count)]
    return Estimate(plan, divided)


def _hires_scale(job: "Job") -> float:
    s = job.settings
    width, height = s["hires_width"] or s["hires_height"], s["hires_height"] or s["hires_width"]
    if not width:
        return float(s["hires_scale"])
    return float((width * height / (job.gen.width * job.gen.height)) ** 0.5)


def _calls(cfg_scale: float) -> float:
    """Calls of the model for one step."""
    return 1.0 if cfg_scale == 1 else 2.0


def duration(seconds: float) -> str:
    """ "12 s", "3 min 20 s", "2 h 5 min"."""
    whole = round(seconds)
    if whole < 100:
        return f"{whole} s"
    minutes = whole // 60
    return f"{minutes} min {whole % 60} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
