"""What an entry of a job file may hold: pydantic models that follow from the table of options."""

from collections.abc import Mapping
from difflib import get_close_matches
from functools import cache, partial
from typing import Annotated, Any, Literal, TypeVar

from sdsage.batch.source import lines_of
from sdsage.cli.option import GENERATE, Kind, Option
from sdsage.cli.options import of_verb
from sdsage.cli.values import parse
from sdsage.errors import MissingExtra

try:
    from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError, create_model
except ImportError:
    raise MissingExtra("batches need pydantic, which is not installed: pip install 'sdsage[batch]'") from None

# Options that belong to the command that runs the jobs, and what to do instead.
OF_THE_BATCH = {
    "config": "give its settings as defaults of the job file",
    "device": "the command chooses it (--gpus, --cpu-workers)",
    "resume": "a batch always goes on where it was",
    "output_begin_idx": "{index} in the output is the number of the job",
    **dict.fromkeys(("json", "quiet", "verbose", "color", "log_file", "print_params"), "give it to the command"),
    **dict.fromkeys(
        ("preview", "preview_path", "preview_interval", "preview_noisy", "preview_inline"),
        "previews are for single runs",
    ),
}
_LISTS = (Kind.INTS, Kind.FLOATS, Kind.INT_PAIR, Kind.FLOAT_PAIR)
M = TypeVar("M", bound=BaseModel)


class Document(BaseModel):
    """A job file that is one object."""

    model_config = ConfigDict(extra="forbid", strict=True)
    defaults: dict[str, Any] = {}
    models: dict[str, dict[str, Any]] = {}
    jobs: list[dict[str, Any]]


class FromFile(BaseModel):
    """`{file: prompts.txt}` in place of a value: one value a line."""

    model_config = ConfigDict(extra="forbid", strict=True)
    file: str


def errors_of(model: type[M], values: Any) -> tuple[M | None, list[tuple[tuple[Any, ...], str]]]:
    """The parsed object, or None with the place and the text of each error."""
    try:
        return model.model_validate(values), []
    except ValidationError as found:
        return None, [(tuple(e["loc"]), _text(e, model)) for e in found.errors(include_url=False)]


def _text(error: Any, model: type[BaseModel]) -> str:
    cause = error.get("ctx", {}).get("error")
    if cause is not None:  # of a validator of ours
        return str(cause)
    if error["type"] == "extra_forbidden":
        name = str(error["loc"][-1])
        near = get_close_matches(name, model.model_fields, n=1)
        return "there is no such field" + (f"; did you mean {near[0]}?" if near else "")
    if error["type"] == "missing":
        return "it is missing, and must be given"
    return f"{error['msg'][:1].lower()}{error['msg'][1:]}, not {str(error['input'])[:60]!r}"


def values_of(option: Option, written: Any) -> list[Any]:
    """The values that a field stands for, each of which was judged: one, or those of a grid. Raises ValueError."""
    found: list[Any] = _listed(option, written)
    for value in found:
        parse(option, value)
    return found


def _listed(option: Option, written: Any) -> list[Any]:
    if isinstance(written, Mapping):
        lines, wrong = errors_of(FromFile, written)
        if lines is None:
            raise ValueError(f"an object stands for the lines of a file, such as {{file: prompts.txt}}: {wrong[0][1]}")
        return [_switched(option, line) for line in lines_of(lines.file)]
    if not isinstance(written, list | tuple):
        return [_switched(option, written)]
    if (option.many or option.kind in _LISTS) and not all(isinstance(item, list | tuple) for item in written):
        return [list(written)]
    if not written:
        raise ValueError(f"{option.name} has an empty list, which gives no job: leave it out, or give it values")
    return [_switched(option, item) for item in written]


def _switched(option: Option, value: Any) -> Any:
    """CSV has no word but text."""
    if option.kind is Kind.SWITCH and isinstance(value, str):
        return {"true": True, "false": False}.get(value.strip().casefold(), value)
    return value


@cache
def entry_model(verb: str) -> type[BaseModel]:
    """An entry of one mode; each option becomes the list of its values."""
    fields: dict[str, Any] = {"mode": (Literal["vid-gen", "img-gen"], ...)}
    for option in of_verb(verb):
        if option.key == "output":
            fields["output"] = (Annotated[str, BeforeValidator(partial(_output, option))], ...)
        elif option.key not in OF_THE_BATCH and option.key != "mode":
            fields[option.key] = (Annotated[list[Any] | None, BeforeValidator(partial(values_of, option))], None)
    return create_model(f"{verb} job", __config__=ConfigDict(extra="forbid"), **fields)


def _output(option: Option, written: Any) -> str:
    name: str = parse(option, written)
    if not name.strip():
        raise ValueError("the output has no name")
    return name


@cache
def _spellings() -> dict[str, str]:
    """Every way to write a key -> the key."""
    found: dict[str, str] = {}
    for verb in sorted(GENERATE):
        for option in of_verb(verb):
            found |= {alias.removeprefix("--").replace("-", "_"): option.key for alias in option.aliases}
            found[option.key] = option.key
    return found


def key_of(written: str) -> str:
    """The key of an option, from one of its long names with dashes or underscores."""
    plain = written.replace("-", "_")
    return _spellings().get(plain, plain)


def fits(key: str, verb: str) -> bool:
    """Whether a default is for jobs of a mode, or it is unknown to both, which is an error."""
    takers = [v for v in GENERATE if any(o.key == key and o.only in (None, v) for o in of_verb(v))]
    return not takers or verb in takers
