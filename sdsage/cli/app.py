"""The typer application: a few verbs, one module each, and what turns their errors into exit codes."""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup

from sdsage import _library
from sdsage.errors import Cancelled, SdsageError


class Verb(NamedTuple):
    """A verb lives in the module of its name, which is imported when it runs."""

    help: str
    example: str


VERBS = {
    "vid-gen": Verb(
        "Make a video from text, or from pictures and text.",
        'sdsage vid-gen --preset tiny -p "a red circle moves to the right" -o circle.mp4',
    ),
    "img-gen": Verb(
        "Make pictures from text, or from pictures and text.",
        'sdsage img-gen --preset tiny-flux -p "a lovely cat" -o cat.png',
    ),
    "batch": Verb(
        "Run a list of jobs with one load of each model, and go on where it was stopped; "
        "'sdsage batch status FOLDER' tells how far one is.",
        "sdsage batch jobs.yaml --gpus 0,1",
    ),
    "convert": Verb(
        "Convert a model to another number format.",
        "sdsage convert -m wan.safetensors --type q8_0 -o wan-q8_0.gguf",
    ),
    "upscale": Verb(
        "Enlarge a picture, or a video frame by frame, with an ESRGAN model.",
        "sdsage upscale -i cat.png --upscale-model RealESRGAN_x4plus.safetensors -o cat-4x.png",
    ),
    "info": Verb(
        "Tell what model files are, and with which settings pictures and videos were made.",
        "sdsage info wan2.2-low.gguf style.safetensors cat.png",
    ),
    "decode": Verb(
        "Make the video or the pictures of latents that were kept: after a decode that failed, or with --save-latents.",
        "sdsage decode cat.latents.safetensors --vae wan_2.1_vae.safetensors -o cat.mp4",
    ),
    "devices": Verb("List the devices that models can run on.", "sdsage devices --json"),
    "doctor": Verb(
        "Look at this installation and this machine: what is wrong, and the command that mends it.",
        "sdsage doctor --sass",
    ),
    "verify": Verb(
        "Check and time every attention kernel that a device can run, against exact results; needs no model.",
        "sdsage verify --json > verify.json",
    ),
}
# The commands of the group bench.
BENCHES = {
    "bench attn": Verb(
        "Time the attention of common models: SageAttention against the engine's FlashAttention, side by side.",
        "sdsage bench attn --shape wan-14b --shape flux --plot attention.svg",
    ),
    "bench gen": Verb(
        "Time a whole generation with SageAttention on and off, and tell how far the two results are apart.",
        "sdsage bench gen --random wan-1.3b -W 832 -H 480 --video-frames 33 --steps 4",
    ),
}
# Modules with an application of their own instead of options from the table.
GROUPS = {
    "models": "List, show and fetch the models of the presets.",
    "bench": "Measure speed: of attention alone, or of a whole generation.",
    "config": "Show the settings that a command would run with.",
    "completion": "Print a script that completes commands in a shell.",
}
CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 120}
_HELP = "Generate images and videos; 'sdsage VERB --help' lists the options of a verb."
SWITCH_NOTE = "Each switch has a --no- form, such as --no-vae-tiling, to win over a preset and a config file."


class Group(TyperGroup):
    """The verbs. What is wrong with a command line is a line of --json too."""

    def make_context(self, info_name: Any, args: list[str], parent: Any = None, **extra: Any) -> Any:
        self._args = list(args)
        with self._told():
            return super().make_context(info_name, args, parent, **extra)

    def invoke(self, ctx: Any) -> Any:
        with self._told():
            return super().invoke(ctx)

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if hasattr(error, "format_message"):  # one of typer's, which will be shown
                self._tell(error)
            raise

    def _tell(self, error: Any) -> None:
        from .console import new_console
        from .habits import advice

        more = advice(error.message, getattr(error, "option_name", None), self._args)
        if more:
            error.message, error.possibilities = f"{error.message.rstrip('.')}: {more}", None
        if "--json" in self._args:
            new_console({"json": True}).failure(error.format_message(), error.exit_code, error, show=False)


class PanelCommand(TyperCommand):
    """A verb whose help has one section for each panel of the table.

    Plain text, because rich's panels cut long option names off in a narrow terminal.
    """

    def format_options(self, ctx: Any, formatter: Any) -> None:
        panels: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                panels.setdefault(getattr(parameter, "rich_help_panel", None) or "Run", []).append(record)
        for title, rows in panels.items():
            with formatter.section(title):
                formatter.write_dl(rows)


def build_app(only: str | None = None) -> typer.Typer:
    """The application; nothing heavier than typer is imported before a verb runs.

    Args:
        only: the verb that will be used; the others get no options, which take time to set up.
            None: all verbs are complete.
    """
    app = typer.Typer(
        name="sdsage",
        cls=Group,
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings=CONTEXT,
    )
    app.callback(help=f"{_HELP}\n\nExample: {VERBS['vid-gen'].example}")(_root)
    for name, verb in VERBS.items():
        note = f"\n\n{SWITCH_NOTE}" if name.endswith("-gen") else ""
        help = f"{verb.help}\n\nExample: {verb.example}{note}"
        function = _function(name) if only in (None, name) else _no_options
        app.command(name, cls=PanelCommand, help=help, context_settings=CONTEXT)(function)
    for name, help in GROUPS.items():
        if only in (None, name):
            import_module(f".{name}", __package__).add_to(app, _guarded)
        else:
            app.command(name, help=help)(_no_options)
    return app


def _function(verb: str) -> Callable[..., None]:
    from .signature import command

    def run(raw: Mapping[str, Any]) -> None:
        import_module(f".{verb.replace('-', '_')}", __package__).run(raw)

    return command(verb, _guarded(run, verb))


def _no_options() -> None:
    """Stands for a verb that will not be used."""


def _show_version(asked: bool) -> None:
    if asked:
        from sdsage import __version__

        print(f"sdsage {__version__}")
        raise typer.Exit


_VERSION = typer.Option(False, "--version", is_eager=True, callback=_show_version, help="Show the version and exit.")


def _root(version: bool = _VERSION) -> None:
    """What `sdsage` does before a verb: nothing."""


def _guarded(run: Callable[[Mapping[str, Any]], None], verb: str = "") -> Callable[[Mapping[str, Any]], None]:
    """`run` with errors as messages: exit 2 for misuse, 130 when interrupted, 1 for what failed."""

    def guarded(raw: Mapping[str, Any]) -> None:
        from .console import new_console
        from .option import DOCTOR
        from .options import RUNS

        out = new_console(raw)
        if verb in RUNS:
            out.start(verb)
        try:
            if verb != DOCTOR:
                _library.check()
            run(raw)
            out.log("exit", "0")
        except BrokenPipeError:
            raise
        except (KeyboardInterrupt, Exception) as error:
            raise _failure(error, *explained(error)) from None
        finally:
            out.close()

    return guarded


def explained(error: BaseException) -> tuple[str, int]:
    """An error in words, and the exit code that it leads to."""
    if isinstance(error, KeyboardInterrupt | Cancelled):
        return "interrupted", 130
    if isinstance(error, SdsageError):
        return str(error), error.exit_code
    if isinstance(error, OSError | ImportError):  # ImportError: the native library is missing or does not fit
        return str(error), 1
    if isinstance(error, MemoryError):
        return "out of memory: choose a smaller size, fewer frames or --vae-tiling", 1
    return f"{type(error).__name__}: {error} (a fault of sdsage; SDSAGE_DEBUG=1 shows where)", 1


def _failure(error: BaseException, text: str, code: int) -> typer.Exit:
    import traceback

    from .console import console

    if os.environ.get("SDSAGE_DEBUG") == "1":
        traceback.print_exc()
    if code == 1:
        console().log("trace", traceback.format_exc())
    console().failure(text, code, error)
    return typer.Exit(code)
