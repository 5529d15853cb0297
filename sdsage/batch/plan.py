"""The jobs of a batch, each judged before anything is loaded: what it would write, and with which model."""

import os
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdsage.batch.expand import Wanted, expand
from sdsage.batch.identity import Files, group_of, hashed, key_of
from sdsage.batch.places import models_of
from sdsage.batch.source import Faults, given
from sdsage.cli.console import Console, speaking_to
from sdsage.cli.inputs import input_files
from sdsage.cli.keeping import latents_path
from sdsage.cli.option import Kind
from sdsage.cli.options import by_key, of_verb
from sdsage.cli.prepare import Looked, prepare, ready
from sdsage.cli.prompt import extract_loras
from sdsage.cli.repeat import locate
from sdsage.cli.settings import Settings, merge
from sdsage.cli.values import Problems
from sdsage.errors import BadRequest, SdsageError
from sdsage.media import naming

if TYPE_CHECKING:
    from sdsage import Worker

_VALUE_BYTES = 40  # of an option in a file name
_DRAWN = "{seed}"  # stands for a seed that is not known yet
_MODELS = ("model", "diffusion_model")


@dataclass
class Job:
    """A picture or video to make.

    Attributes:
        key: hash of all that it depends on.
        group: jobs of one group share a loaded model, which is called `model`.
        kind: jobs of one kind take about the same time.
        template, fields: the name of the output; `seed` is None while it is not drawn.
        models: option, name and bytes of the files that it is made with, pictures left out.
        output: where it goes, once that is settled; `paths`: all files of it.
    """

    wanted: Wanted
    key: str
    group: str
    model: str
    kind: str
    template: str
    fields: dict[str, str]
    seed: int | None
    count: int
    clip: bool
    saves_latents: bool = False
    models: list[list[Any]] = field(default_factory=list)
    output: str = ""
    overwrite: bool = False

    @property
    def number(self) -> int:
        return self.wanted.number

    def name(self, seed: int | None, date: str) -> str:
        """The output as the command line would be given it."""
        fields = {**self.fields, "seed": _DRAWN if seed is None else str(seed), "date": date}
        return naming.fill(self.template, None, fields)

    @property
    def paths(self) -> list[Path]:
        """The files that it makes; more than one where frames are numbered."""
        if self.clip or not naming.is_pattern(self.output):
            return [Path(self.output)]
        return [Path(name) for name in naming.file_names(naming.literal(self.output), self.count, 0, [{}])]


@dataclass
class Plan:
    """What a job file asks for.

    Attributes:
        folder: that of the journal.
        warnings: each once, with the first job that has it.
    """

    name: str
    folder: Path
    jobs: list[Job]
    warnings: list[str] = field(default_factory=list)
    looked: Looked = field(default_factory=dict)

    def ordered(self, jobs: Iterable[Job]) -> list[Job]:
        """With as few loads as can be: by model, in the order in which models first appear, and else as they are."""
        first: dict[str, int] = {}
        for job in self.jobs:
            first.setdefault(job.group, job.number)
        return sorted(jobs, key=lambda job: (first[job.group], job.number))


def make(jobs: Any, folder: str | os.PathLike[str] | None = None, note: Callable[[str], None] | None = None) -> Plan:
    """Reads and judges all jobs; nothing is written.

    Args:
        jobs: path of a job file, list of entries, or object with `jobs`.
        folder: None takes the one that all outputs are in.
        note: called with a sentence before something that takes seconds.

    Raises:
        BadRequest: with a line for each fault.
        MissingExtra: something that is needed is not installed.
    """
    faults = Faults()
    looked: Looked = {}
    source = given(jobs, faults)
    wanted = expand(source, faults)
    where = Path(folder) if folder is not None else _common(wanted)
    files = Files(note or (lambda sentence: None))
    warnings: dict[str, str] = {}
    found = []
    with speaking_to(Console({"quiet": True})):
        for one in wanted:
            try:
                settings = settings_of(one)
                found.append(_judged(one, settings, where, looked, files))
            except SdsageError as error:
                if not isinstance(error, BadRequest):
                    raise
                faults.add(one.where, "", str(error))
                continue
            for sentence in settings.warnings:
                warnings.setdefault(sentence, f"{one.where}: {sentence}")
    faults.stop_if_any()
    _number_equals(found)
    return Plan(source.name, where, found, list(warnings.values()), looked)


def settings_of(wanted: Wanted, **more: Any) -> Settings:
    """As the command line makes them. Raises BadRequest."""
    raw = {**wanted.raw, "quiet": True, "output": wanted.output, **more}
    settings = merge(wanted.verb, raw)
    locate(settings)
    settings.problems.stop_if_any()
    return settings


def _common(wanted: list[Wanted]) -> Path:
    """The folder that all outputs are in, so far as their names are known before they are filled in."""
    folders = []
    for one in wanted:
        folder = os.path.dirname(one.output)
        while "{" in folder or naming.is_pattern(folder):
            folder = os.path.dirname(folder)
        folders.append(os.path.abspath(folder))
    try:
        return Path(relative(os.path.commonpath(folders), ".")) if folders else Path()
    except ValueError:  # Windows
        raise BadRequest("the outputs are on several drives: name the folder of the batch with --folder") from None


def relative(path: str | os.PathLike[str], folder: str | os.PathLike[str]) -> str:
    """A path as it is seen from a folder; a whole one where it is on another drive."""
    whole = os.path.abspath(path)
    try:
        return os.path.relpath(whole, os.path.abspath(folder))
    except ValueError:
        return whole


def _judged(wanted: Wanted, settings: Settings, folder: Path, looked: Looked, files: Files) -> Job:
    options = {option.key: option for option in of_verb(wanted.verb)}
    naming.fields_of(wanted.output, options.keys() - {"output"})
    prompt, _ = extract_loras(
        settings["prompt"], settings["lora_model_dir"], Problems(), settings.located.get("lora_model_dir", {})
    )
    fields = {k: _shown(k, settings[k]) for k in options if k not in naming.FIELDS and f"{{{k}}}" in wanted.output}
    fields |= {"index": str(wanted.number), "prompt": prompt}
    seed = settings["seed"] if settings["seed"] >= 0 else None
    date = time.strftime("%Y-%m-%d")
    draft = naming.fill(wanted.output, None, {**fields, "seed": "0" if seed is None else str(seed), "date": date})
    settings.values |= {"output": naming.literal(draft), "overwrite": True}  # what is there is looked at later
    prepared = prepare(settings, looked)
    assert prepared.places is not None
    (place,) = prepared.places
    count = settings["video_frames"] if wanted.verb == "vid-gen" else 1
    job = Job(
        wanted=wanted,
        key="",
        group=group_of(settings, prepared.resolved),
        model=wanted.model or settings["preset"] or _model_name(settings),
        kind="",
        template=wanted.output,
        fields=fields,
        seed=seed,
        count=count,
        clip=place.clip,
        saves_latents=settings["save_latents"],
    )
    sizes = [settings[k] for k in ("width", "height", "steps")]
    sizes += [settings.values.get(k) for k in ("video_frames", "high_noise_steps", "extend", "hires", "cfg_scale")]
    job.kind = hashed([job.group, wanted.verb, sizes])[:16]
    name = relative(job.name(seed, "{date}"), folder)
    inputs = input_files(settings, prepared.resolved)
    job.models = models_of(inputs)
    job.key = key_of(settings, inputs, name, seed, files)
    return job


def _shown(key: str, value: Any) -> str:
    """An option as a part of a file name."""
    if by_key()[key].kind in (Kind.FILE, Kind.FOLDER) and isinstance(value, str):
        value = os.path.splitext(os.path.basename(value))[0]
    if isinstance(value, list | tuple):
        value = "-".join(map(str, value))
    return naming.safe_text("default" if value is None else str(value), _VALUE_BYTES)


def _model_name(settings: Settings) -> str:
    return next((os.path.basename(settings[key].rstrip("/")) for key in _MODELS if settings[key]), "")


def _number_equals(jobs: list[Job]) -> None:
    """Equal jobs whose seeds are drawn are jobs of their own."""
    seen: Counter[str] = Counter()
    for job in jobs:
        if job.seed is None:
            seen[job.key] += 1
            if seen[job.key] > 1:
                job.key = hashed([job.key, seen[job.key]])


def check_distinct(jobs: Iterable[Job]) -> None:
    """Raises BadRequest when two jobs would write one file; all of them are named."""
    owners: dict[str, Job] = {}
    wrong = []
    for job in jobs:
        files = [*job.paths, *([latents_path(job.output)] if job.saves_latents else [])]
        taken = [owners[p] for p in {os.path.realpath(f) for f in files} if p in owners]
        if taken:
            wrong.append(
                f"{job.output} would be written by job {taken[0].number} ({taken[0].wanted.where}) and by job "
                f"{job.number} ({job.wanted.where}): put {{seed}}, {{index}} or an option such as {{steps}} "
                f"into its name"
            )
        owners |= {os.path.realpath(f): job for f in files}
    if wrong:
        more = f"\nand {len(wrong) - 20} more" if wrong[20:] else ""
        raise BadRequest("\n".join(wrong[:20]) + more)


def peak_memory(plan: Plan, job: Job, worker: "Worker") -> float | None:
    """GiB that the model's device needs at the most, from the headers of its files; None when they don't tell."""
    from sdsage._estimate import Way

    with speaking_to(Console({"quiet": True})):
        try:
            settings = settings_of(job.wanted, output=naming.literal(job.output), overwrite=True)
            settings.worker = worker
            made = ready(prepare(settings, plan.looked))
        except BadRequest as error:  # a picture, which nobody has read before
            raise BadRequest(f"{job.wanted.where}: {error}") from None
        found = worker.run("estimate", made.ctx, made.gen, None)
        if found is None:
            return None
        way = Way(made.ctx.offload_params_to_cpu, made.gen.vae_tiling_params.enabled, made.ctx.max_vram)
        return float(found.peak(way).bytes) / 2**30
