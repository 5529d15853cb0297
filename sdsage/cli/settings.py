"""The settings of one run: --from < preset < config file < command line, each value checked, each problem gathered."""

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdsage.errors import BadRequest

from .cache import BLOCK_MODES
from .option import GENERATE, Kind, Option
from .options import REMOVED, RENAMED, by_key, of_verb
from .prompt import lora_names
from .report import say
from .values import Problems, parse

if TYPE_CHECKING:
    from sdsage import Worker
    from sdsage.presets import PresetLora

    from .repeat import Recorded


@dataclass
class Settings:
    """Values of all options of a verb.

    Attributes:
        values: by option key; the default where nothing was given.
        given: keys that the user gave, on the command line or in the config file (a preset does not count).
        warnings: sentences to show before the run.
        recorded: what --from brought in.
        sources: where values came from, by option key; defaults are not in it.
        located: files that --from found, by the option of the folder where they would be looked up, then by name.
        problems: what is wrong; the caller adds its own and then calls `problems.stop_if_any()`.
        preset_loras: those that the preset brings.
        worker: the process that runs the engine, inside `engine.engine`.
        raw: what typer gave, by parameter name.
    """

    verb: str
    values: dict[str, Any]
    given: set[str]
    warnings: list[str] = field(default_factory=list)
    problems: Problems = field(default_factory=Problems)
    recorded: "Recorded | None" = None
    sources: dict[str, str] = field(default_factory=dict)
    located: dict[str, dict[str, str]] = field(default_factory=dict)
    preset_loras: "tuple[PresetLora, ...]" = ()
    worker: "Worker | None" = None
    raw: Mapping[str, Any] = field(default_factory=dict)

    def __getitem__(self, key: str) -> Any:
        return self.values[key]

    def source(self, key: str) -> str:
        """Where a value came from, in words."""
        return self.sources.get(key, "default")

    def is_set(self, name: str) -> bool:
        """Whether the option called `name` does something: it is given, and not off, empty or zero."""
        value = self.values.get(by_key()[name.removeprefix("--").replace("-", "_")].key)
        return value not in (None, "", False, 0, (), (0, 0), "none", "disabled")


def merge(verb: str, raw: Mapping[str, Any]) -> Settings:
    """Settings from what typer gives (None: not given), from the config file and from the preset.

    Raises:
        BadRequest: the preset or the config file can't be used at all. Single bad values become `problems`.
    """
    defaults = {o.key: False if o.kind is Kind.SWITCH else o.default for o in of_verb(verb)}
    settings = Settings(verb, defaults, set(), raw=raw)
    given = _command_line(verb, raw, settings)
    config = _read_config(given["config"], verb, settings.problems) if given.get("config") else {}
    quiet = bool(given.get("quiet", config.get("quiet")))
    preset_name = given.get("preset", config.get("preset"))
    preset = _read_preset(preset_name, settings, {*config, *given}, quiet)
    settings.recorded = _read_recorded(
        given.get("from_file", config.get("from_file")), verb, {*preset, *config, *given}
    )
    recorded = settings.recorded.options if settings.recorded else {}
    made_from, config_file = settings.recorded.path if settings.recorded else "", given.get("config")
    for values, where, source in (
        (recorded, f" (in {made_from})", f"--from {made_from}"),
        (preset, " (in the preset)", f"--preset {preset_name}"),
        (config, f" (in {config_file})", f"--config {config_file}"),
        (given, "", "option"),
    ):
        for key, value in values.items():
            try:
                settings.values[key] = parse(by_key()[key], value, where)
                settings.sources[key] = source
            except BadRequest as error:
                settings.problems.add(str(error))
    settings.given = {*config, *given}
    _add_loras(settings)
    if verb in GENERATE:
        settings.warnings += without_effect(settings)
    return settings


def _command_line(verb: str, raw: Mapping[str, Any], settings: Settings) -> dict[str, Any]:
    given = {o.key: raw[o.key] for o in of_verb(verb) if raw.get(o.key) not in (None, False, [])}
    for old, name in RENAMED.items():
        value = raw.get(hidden_key("old", old))
        if value is not None:
            key = _key(name)
            if key in given:
                settings.problems.add(f"{old} and {name} are the same option: give {name} only")
            given[key] = value
            settings.warnings.append(f"{old} is now called {name}: use the new name")
    for old, removed in REMOVED.items():
        if raw.get(hidden_key("old", old)):
            settings.problems.add(f"{old} is not an option of this version: {removed.advice}")
    for option in of_verb(verb):
        if option.kind is Kind.SWITCH and raw.get(hidden_key("no", option.name)):
            no = option.name.replace("--", "--no-")
            if option.key in given:
                settings.problems.add(f"{option.name} and {no} contradict each other: give one of them")
            given[option.key] = False
    return given


def _key(name: str) -> str:
    return name.removeprefix("--").replace("-", "_")


def hidden_key(kind: str, name: str) -> str:
    """Name of the function parameter behind a spelling that the help does not show."""
    return f"{kind}_{_key(name)}"


def _read_config(path: str, verb: str, problems: Problems) -> dict[str, Any]:
    """Keys of a TOML file: long option names, with dashes or underscores."""
    try:
        table = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BadRequest(f"--config {path} does not exist: it takes a TOML file; check the path") from None
    except IsADirectoryError:
        raise BadRequest(f"--config {path} is a folder: it takes a TOML file; name one inside") from None
    except OSError as error:
        raise BadRequest(f"--config {path} can't be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadRequest(f"--config {path} is not a TOML file: {error}") from None
    return _checked_keys(table, f"--config {path}", verb, problems)


def _read_preset(name: Any, settings: Settings, given: set[str], quiet: bool) -> dict[str, Any]:
    verb = settings.verb
    if name is None:
        return {}
    if verb not in GENERATE or not isinstance(name, str):
        raise BadRequest(f"--preset {name} can't be used: it takes the name of a preset")
    from sdsage import presets

    mode = presets.mode(name)
    if mode != verb:
        raise BadRequest(f"--preset {name} is for {mode}, not for {verb}: run 'sdsage {mode}'")
    note = None if quiet else lambda path: say("note", f"writing the tiny model {path}")
    preset = presets.load(name, note, without=given)
    settings.preset_loras = preset.loras
    return _checked_keys(preset.options, f"--preset {name}", verb, settings.problems)


def _add_loras(settings: Settings) -> None:
    """The LoRAs of the preset go into the prompt as tags, so that they are recorded there, unless it names them."""
    named = lora_names(settings["prompt"]) if settings.preset_loras else set()
    for lora in settings.preset_loras:
        if lora.word not in named:
            settings.values["prompt"] += lora.tag
        settings.located.setdefault("lora_model_dir", {})[lora.word] = str(lora.path)


def _read_recorded(path: Any, verb: str, overridden: set[str]) -> "Recorded | None":
    if path is None:
        return None
    from .repeat import read_recorded

    return read_recorded(str(path), verb, overridden)


def _checked_keys(table: Mapping[str, Any], source: str, verb: str, problems: Problems) -> dict[str, Any]:
    options = {o.key: o for o in of_verb(verb)}
    aliases = {_key(alias): o.key for o in of_verb(verb) for alias in o.aliases}
    found: dict[str, Any] = {}
    for written, value in table.items():
        key = written.replace("-", "_")
        key = aliases.get(key, key)
        if key in options and key not in ("config", "mode"):
            found[key] = value
        else:
            problems.add(unknown_key(written, verb, source))
    return found


def unknown_key(written: str, verb: str, source: str) -> str:
    """What is said of a key that is no option."""
    near = get_close_matches(written.replace("-", "_"), [o.key for o in of_verb(verb)], n=1)
    hint = f"; did you mean {near[0]}?" if near else "; keys are the long options with underscores"
    return f"{source} has {written}, which is not an option of {verb}{hint}"


def without_effect(settings: Settings) -> list[str]:
    """One sentence for each option that was given and can't do anything beside the others."""
    found = []
    for option in of_verb(settings.verb):
        if option.key in settings.given and settings[option.key] not in (False, None):
            reason = _why_idle(option, settings)
            if reason:
                found.append(f"{option.name} has no effect {reason}")
    return found + list(_other_preview(settings))


def _other_preview(s: Settings) -> Iterator[str]:
    """The engine decodes previews with what there is."""
    if s["preview"] == "tae" and not s.is_set("--taesd"):
        yield "--preview tae needs --taesd: without it the VAE makes the preview, as with --preview vae"
    if s["preview"] == "vae" and s.is_set("--taesd"):
        yield "--preview vae is made by --taesd, as with --preview tae: the engine has no other decoder for it"


def is_idle(option: Option, settings: Settings) -> bool:
    """Whether the option can't have an effect, so that it is not recorded."""
    needs = option.needs and not any(map(settings.is_set, option.needs))
    return bool(needs) or option.only not in (None, settings.verb)


def _why_idle(option: Option, settings: Settings) -> str:
    if option.only not in (None, settings.verb):
        size = ", except that it gives the size" if option.key in ("ref_image", "end_img") else ""
        return f"in {settings.verb}{size}: it is for {option.only}"
    if option.needs and not any(map(settings.is_set, option.needs)):
        return f"without {' or '.join(option.needs)}"
    beaten = [name for name in option.beaten_by if settings.is_set(name)]
    if beaten:
        return f"beside {beaten[0]}, which decides instead"
    if settings["device"] == "cpu" and option.key in _CPU_SWITCHES:
        return "with --device cpu: everything runs there"
    return _SPECIAL.get(option.key, lambda _: "")(settings)


def _one_side(s: Settings) -> str:
    """Width or height alone beside a picture: sd-cli then takes both from the picture."""
    picture = any(map(s.is_set, ("--init-img", "--end-img", "--ref-image")))
    return "" if not picture or (s["width"] and s["height"]) else "alone: both sides come from the input picture"


def _boundary(s: Settings) -> str:
    steps = s["high_noise_steps"]
    return f"with {steps} high-noise steps: give --high-noise-steps 0 to use it" if steps > 0 else ""


def _begin_index(s: Settings) -> str:
    numbered = any(word in (s["output"] or "") for word in ("%", "{index}"))
    several = s["batch_count"] > 1 or len(s["seeds"]) > 1
    return "" if numbered or several else "on a single file: name one with %d, or ask for several results"


def _container(s: Settings) -> str:
    name = (s["output"] or ".mp4").lower()
    return "" if name.endswith((".mp4", ".webm")) else "on this output: it is for .mp4 and .webm"


def _scm(s: Settings) -> str:
    return "" if s["cache_mode"] in BLOCK_MODES else f"with --cache-mode {s['cache_mode']}"


_CPU_SWITCHES = ("vram", "offload_to_cpu", "clip_on_cpu", "vae_on_cpu", "control_net_cpu")
_SPECIAL = {
    "width": _one_side,
    "height": _one_side,
    "moe_boundary": _boundary,
    "output_begin_idx": _begin_index,
    "codec": _container,
    "crf": _container,
    "scm_mask": _scm,
    "scm_policy": _scm,
}
