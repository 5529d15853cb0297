"""What a run keeps next to its output, so that nothing is lost: its checkpoint, and the latents that are left of it."""

import glob
import hashlib
import os
import re
import shlex
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdsage.errors import BadRequest, Cancelled, DecodeError, GenerationError, ResumeError, WorkerDied

from .engine import ask
from .job import Job
from .loaded import Models
from .option import DECODE, Kind, Option
from .options import by_key, of_verb
from .places import DEFAULT_OUTPUT
from .report import Reporter, say
from .seeds import Part, parts
from .settings import Settings, hidden_key, merge

if TYPE_CHECKING:
    from sdsage import Checkpoint, Result
    from sdsage.checkpoint import Kept
    from sdsage.media import Output

# Options of the command that was ended, and not of its work.
_OF_ONE_COMMAND = {"resume", "output", "overwrite", "json", "quiet", "verbose", "color", "log_file"}
# In the message and the last words where memory did not suffice.
_FOR_MEMORY = re.compile(r"alloc|mem_buffer|out of memory|insufficient memory|memory runs out, and did|memory was low")
_LONGEST = 200  # bytes of a file's name that leave room for what is put around it
# Settings of an input that is not an option's own, by the parameter that it becomes.
_NAMES = {
    "gen.width": "--width",
    "gen.height": "--height",
    "gen.seed": "--seed",
    "gen.prompt": "--prompt",
    "gen.init_image": "--init-img",
    "gen.end_image": "--end-img",
    "gen.mask_image": "--mask",
    "gen.control_image": "--control-image",
    "gen.loras": "a LoRA of --prompt",
    "gen.ref_images": "--ref-image",
    "gen.control_frames": "--control-video",
    "gen.pm_params.id_images": "--pm-id-images-dir",
    "gen.cache": "--cache-mode or --cache-option",
    "gen.sample_params.guidance.slg.layers": "--skip-layers",
    "gen.sample_params.custom_sigmas": "--sigmas",
    "ctx.embeddings": "--embd-dir",
}


def for_memory(error: Exception) -> bool:
    """Whether the engine failed, or its process was ended, because memory did not suffice."""
    return bool(_FOR_MEMORY.search("\n".join((str(error), *getattr(error, "last_words", ())))))


def checkpoint_path(output: str, part: int | None = None) -> Path:
    """A hidden file in the folder of the output, named for it; `part` when a run makes several results in turn."""
    folder, name = os.path.split(output)
    while "{" in folder:  # not known before the name is filled in
        folder = os.path.dirname(folder)
    return Path(folder, f".{_short(name)}{'' if part is None else f'.{part}'}.sdsage-checkpoint")


def latents_path(output: str) -> Path:
    """Where --save-latents writes."""
    return Path(os.path.dirname(output), f"{_short(os.path.splitext(os.path.basename(output))[0])}.latents.safetensors")


def _short(name: str) -> str:
    """A name that a file system takes with more around it."""
    data = os.fsencode(name)
    if len(data) <= _LONGEST:
        return name
    return os.fsdecode(data[: _LONGEST - 17]) + "-" + hashlib.sha256(data).hexdigest()[:16]


def output_of(settings: Settings) -> str:
    """The output's name as given."""
    return str(settings["output"] or DEFAULT_OUTPUT[settings.verb])


def resumed(verb: str, raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """With --resume, what the run was started with; options that are given now stand beside and win.

    Raises:
        ResumeError: there is nothing to resume.
    """
    if not raw.get("resume"):
        return raw
    from sdsage import Checkpoint

    settings = merge(verb, raw)
    settings.problems.stop_if_any()
    output = output_of(settings)
    path = checkpoint_path(output)
    if not path.exists():
        pattern = f"{glob.escape(path.name.removesuffix('.sdsage-checkpoint'))}.*.sdsage-checkpoint"
        path = next(iter(sorted(path.parent.glob(pattern))), path)
    if not path.exists():
        _nothing_kept(settings, output, path)
        return raw
    kept = Checkpoint(path).read()
    if kept.info.get("verb") != verb:
        raise ResumeError(f"{output} was made by sdsage {kept.info.get('verb')}: resume it with that")
    stored = kept.info.get("raw", {})
    given = {k: v for k, v in raw.items() if v not in (None, False, [])}
    for option in of_verb(verb):
        keys = {option.key, hidden_key("no", option.name)}
        if option.kind is Kind.SWITCH and keys & given.keys():
            stored = {k: v for k, v in stored.items() if k not in keys}
    if not (given.get("seeds") or stored.get("seeds")) and ("seed" not in given or settings["seed"] < 0):
        given["seed"] = str(kept.info["first_seed"])
    return {**raw, **stored, **given}


def _nothing_kept(settings: Settings, output: str, path: Path) -> None:
    """The run was ended before its first step, or is done."""
    latents = latents_path(output)
    if latents.is_file():
        command = shlex.join(["sdsage", DECODE, str(latents), "--vae", "FILE", "-o", output])
        raise ResumeError(f"the latents of {output} are finished, and can be decoded: {command}")
    if not any(settings[key] for key in ("model", "diffusion_model")):
        raise ResumeError(
            f"there is nothing to resume: {path} does not exist, and no model was given to begin anew. A run keeps "
            "that file next to its output from its first step on until it is done"
        )
    say("warning", f"there is nothing to resume ({path} does not exist): the run begins anew")


def remembered(raw: Mapping[str, Any]) -> dict[str, Any]:
    """What was given, for a checkpoint: files by their whole path, for whoever resumes from another folder."""
    found = {}
    for key, value in raw.items():
        if value in (None, False, []) or key in _OF_ONE_COMMAND:
            continue
        option = by_key().get(key)
        if option is not None and option.kind in (Kind.FILE, Kind.FOLDER) and key != "preview_path":
            value = [os.path.abspath(v) for v in value] if isinstance(value, list) else os.path.abspath(value)
        found[key] = value
    return found


@dataclass
class Keeping:
    """The kept work of one part of a run.

    Attributes:
        output: name of what the part makes.
        checkpoint: None with --checkpoint-every 0.
        kept: what is there of an earlier run.
        saved: the files that --save-latents made.
    """

    job: Job
    part: Part
    place: "Output"
    output: str
    checkpoint: "Checkpoint | None"
    kept: "Kept | None" = None
    saved: tuple[Path, ...] = ()

    def __post_init__(self) -> None:
        folder = self.checkpoint.path.parent if self.checkpoint is not None else Path()
        self._began = time.monotonic()
        self._missing = [level for level in (folder, *folder.parents) if not level.exists()]

    @property
    def decode_only(self) -> str | None:
        """The version of the model when only decoding is left to do."""
        return self.kept.model if self.kept is not None and self.kept.finished else None

    @contextmanager
    def watching(self, reporter: Reporter) -> Iterator[None]:
        """Around the run, from loading to the written file."""
        try:
            yield
        except DecodeError as error:
            raise GenerationError(self._decoding_failed(error)) from None
        except (Cancelled, KeyboardInterrupt):
            from sdsage.checkpoint import WORTH_KEEPING

            # the worker process does so too, but may have been ended before
            if self.kept is None and time.monotonic() - self._began < WORTH_KEEPING:
                self._discard()
            self._say_how_to_go_on(reporter)
            raise
        except BaseException:
            self._say_how_to_go_on(reporter)
            raise
        if self.checkpoint is not None:
            self.checkpoint.remove()

    def _discard(self) -> None:
        if self.checkpoint is not None:
            self.checkpoint.remove()
        for folder in self._missing:
            with suppress(OSError):  # not made, or somebody uses it
                folder.rmdir()

    def save(self, latents: tuple[Any, ...], model: str) -> None:
        """--save-latents."""
        from sdsage import save_latents

        path = latents_path(self.output)
        path.parent.mkdir(parents=True, exist_ok=True)
        save_latents(path, latents, model, about(self.job, self.part))
        self.saved = (path,)

    def decode_in_tiles(self, death: WorkerDied, reporter: Reporter, models: Models) -> "Result":
        """A second try in another process, when the first was ended by a decode that memory did not suffice for.

        Raises:
            WorkerDied: it was something else, or there is nothing to decode.
            DecodeError: memory does not suffice for tiles either.
        """
        from sdsage import load_latents

        job, checkpoint = self.job, self.checkpoint
        if death.stage != "decode" or checkpoint is None or not for_memory(death):
            raise death
        if not checkpoint.path.is_file() or not checkpoint.read().finished:
            raise death
        latents = load_latents(checkpoint.path)
        tiling = job.gen.vae_tiling_params
        if tiling.enabled:
            raise DecodeError(str(death), latents.tensors, latents.model)
        reporter.message("warning", f"{death}\ndecoding is tried again in tiles, in a new process")
        tiling.enabled = True
        try:
            with models.again(job, reporter, latents.model) as context:
                result = context.decode_all(latents.tensors, tiling, seeds=checkpoint.read().seeds)
        except WorkerDied as again:
            raise DecodeError(str(again), latents.tensors, latents.model) from None
        if job.settings["save_latents"]:
            self.save(latents.tensors, latents.model)
        note = "the VAE decoded in tiles, because decoding at once failed for want of memory"
        return replace(result, adjusted=(note, *result.adjusted))

    def _say_how_to_go_on(self, reporter: Reporter) -> None:
        if self.checkpoint is None or not self.checkpoint.path.is_file():
            return
        command = ["sdsage", self.job.settings.verb, "-o", output_of(self.job.settings), "--resume"]
        if self.job.settings["overwrite"]:
            command.append("--overwrite")
        reporter.message("info", f"the work so far is kept; this goes on with it: {shlex.join(command)}")

    def _decoding_failed(self, error: DecodeError) -> str:
        """Keeps the latents where they are seen, and says how to decode them."""
        from sdsage import save_latents

        path = latents_path(self.output)
        if path.exists() and not self.job.settings["overwrite"]:
            path = path.with_name(f"{path.name.removesuffix('.latents.safetensors')}-{os.getpid()}.latents.safetensors")
        path.parent.mkdir(parents=True, exist_ok=True)
        save_latents(path, error.latents, error.model, about(self.job, self.part))
        if self.checkpoint is not None:
            self.checkpoint.remove()
        return (
            f"sampling is done, and the VAE could not decode: {str(error).split('; ')[0]}\n"
            f"the latents are kept in {path}; with more free memory, or another --device, this decodes them:\n"
            f"{shlex.join(decode_command(self.job.settings, str(path), self.output))}"
        )


def about(job: Job, part: Part) -> dict[str, Any]:
    """What stands beside kept latents, for `sdsage decode`."""
    from sdsage import Timings

    from .record import Run, metadata

    info: dict[str, Any] = {"verb": job.settings.verb, "fps": job.settings["fps"], "metadata": []}
    if not job.settings["disable_image_metadata"]:
        seeds = job.seeds[part.first : part.first + part.count]
        size = job.gen.width, job.gen.height
        timings = Timings(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, ())
        records = metadata(Run(job, size, size, 0, seeds, timings, (), ()))
        for record in records if isinstance(records, list) else [records]:
            info["metadata"].append({"parameters": record.parameters, "data": record.data})
    return info


def decode_command(settings: Settings, latents: str, output: str) -> list[str]:
    """The command that decodes latents with the settings of a run."""
    command = ["sdsage", DECODE, latents]
    left_out = {"fps", "model"} if settings["vae"] or settings["taesd"] else {"fps"}
    for option in of_verb(DECODE):
        value = settings.values.get(option.key)
        decides = (option.record and option.key not in left_out) or option.key in ("device", "threads", "allow_pickle")
        if decides and value not in (None, False, (), "", option.default):
            command += [option.name, *_written(option, value)]
    return [*command, "-o", output]


def _written(option: Option, value: Any) -> list[str]:
    if option.kind is Kind.SWITCH:
        return []
    if option.kind in (Kind.INT_PAIR, Kind.FLOAT_PAIR):
        return ["x".join(map(str, value))]
    return [str(value)]


def keep(job: Job, places: "list[Output]") -> list[Keeping]:
    """What the parts of a run will keep; with --resume, what is there of them, and parts that are done are left out.

    Looks at files, before any model is loaded.

    Raises:
        ResumeError: what is there is of other settings.
        BadRequest: --save-latents would replace a file.
    """
    settings = job.settings
    for name in ("resume", "save_latents"):
        if settings[name] and settings.values.get("extend"):
            raise BadRequest(
                f"{by_key()[name].name} is not for --extend, whose parts are kept as a video when a later one fails: "
                "leave one of them out, and go on from that video's last frame with --init-img"
            )
    todo = parts(settings, job.seeds)
    found = []
    for number, (part, place) in enumerate(zip(todo, places, strict=True)):
        several = len(todo) > 1
        output = place.paths(part.count)[0].as_posix() if several else output_of(settings)
        done = all(path.exists() for path in place.paths(part.count))
        if several and settings["resume"] and done and not settings["overwrite"]:
            continue
        path = checkpoint_path(output_of(settings), number if several else None)
        found.append(_keep_part(job, part, place, output, path))
    if not found:
        raise ResumeError(f"there is nothing to resume: all {len(todo)} results are there")
    return found


def _keep_part(job: Job, part: Part, place: "Output", output: str, path: Path) -> Keeping:
    settings = job.settings
    if settings["save_latents"] and latents_path(output).exists() and not settings["overwrite"]:
        raise BadRequest(
            f"--save-latents would replace {latents_path(output)}: choose another --output, or replace it (--overwrite)"
        )
    if settings.values.get("extend"):  # several jobs, each of which begins with a picture of the one before
        return Keeping(job, part, place, output, None)
    there = path.exists()
    if settings["checkpoint_every"] == 0 and not (there and settings["resume"]):
        return Keeping(job, part, place, output, None)
    from sdsage import Checkpoint, _identity

    info = {"verb": settings.verb, "raw": remembered(settings.raw), "first_seed": job.seeds[0]}
    checkpoint = Checkpoint(path, max(1, settings["checkpoint_every"]), settings["resume"] and there, info)
    if not there:
        return Keeping(job, part, place, output, checkpoint)
    now = ask(settings, "identity", job.ctx, job.gen, job.seeds[part.first])
    kept = checkpoint.read()
    found = kept.differences(now)
    if not settings["resume"]:
        if not found:
            say("warning", f"{path} holds work of the same run, which begins anew now: --resume would go on with it")
        return Keeping(job, part, place, output, checkpoint)
    if found:
        said = [f"{_option(d.name)} was {_identity.text(d.before)} and is {_identity.text(d.now)} now" for d in found]
        raise ResumeError(
            "--resume needs the settings of the run that was ended:\n" + "\n".join(dict.fromkeys(said)), tuple(found)
        )
    return Keeping(job, part, place, output, checkpoint, kept)


def _option(name: str) -> str:
    """The option behind a field of the parameters."""
    for option in by_key().values():
        root, _, path = option.target.partition(".")
        if option.target and name == f"{'ctx' if root == 'ctx' else 'gen'}.{path}":
            return option.name
    return next((option for field, option in _NAMES.items() if name.startswith(field)), name)
