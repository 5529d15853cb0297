"""--cache-option: named settings of the step cache, whose meaning depends on --cache-mode."""

import math

from .values import Problems

_STEP_MODES = ("easycache", "ucache")
BLOCK_MODES = ("dbcache", "taylorseer", "cache-dit")

# setting: (field of the parameter struct, type), by kind of mode
_SHARED = {
    "start": ("start_percent", float),
    "end": ("end_percent", float),
    "decay": ("error_decay_rate", float),
    "relative": ("use_relative_threshold", bool),
    "reset": ("reset_error_on_compute", bool),
    "Fn": ("Fn_compute_blocks", int),
    "fn": ("Fn_compute_blocks", int),
    "Bn": ("Bn_compute_blocks", int),
    "bn": ("Bn_compute_blocks", int),
    "w": ("spectrum_w", float),
    "m": ("spectrum_m", int),
    "lam": ("spectrum_lam", float),
    "window": ("spectrum_window_size", int),
    "flex": ("spectrum_flex_window", float),
    "stop": ("spectrum_stop_percent", float),
}


def _field(name: str, mode: str) -> tuple[str, type] | None:
    if name == "threshold":
        return ("reuse_threshold" if mode in _STEP_MODES else "residual_diff_threshold", float)
    if name == "warmup":
        return ("spectrum_warmup_steps" if mode == "spectrum" else "max_warmup_steps", int)
    return _SHARED.get(name)


def cache_fields(mode: str, text: str, problems: Problems) -> dict[str, float | int | bool]:
    """Fields of sd_cache_params_t that `text`, such as "threshold=0.25,start=0.1", sets in `mode`."""
    fields: dict[str, float | int | bool] = {}
    for item in filter(None, text.split(",")):
        name, equals, value = item.partition("=")
        field = _field(name.strip(), mode)
        if field is None or not equals:
            known = ", ".join(("threshold", "warmup", *(k for k in _SHARED if k not in ("fn", "bn"))))
            problems.add(f"--cache-option {item!r} can't be used: it takes KEY=VALUE with a key of {known}")
            continue
        try:
            fields[field[0]] = _number(value, field[1])
        except ValueError:
            kind = "a whole number" if field[1] is int else "a number"
            problems.add(f"--cache-option {item!r} can't be used: {name} takes {kind}")
    _check_ranges(mode, fields, problems)
    return fields


def _number(text: str, kind: type) -> float | int | bool:
    if kind is int:
        return int(text)
    value = float(text)
    if not math.isfinite(value):
        raise ValueError
    return value != 0 if kind is bool else value


def _check_ranges(mode: str, fields: dict[str, float | int | bool], problems: Problems) -> None:
    for name in ("reuse_threshold", "residual_diff_threshold"):
        if fields.get(name, 0) < 0:
            problems.add(f"--cache-option threshold={fields[name]:g} can't be used: it is 0 or more")
    start, end = fields.get("start_percent", 0.15), fields.get("end_percent", 0.95)
    if mode in _STEP_MODES and not 0 <= start < end <= 1:
        problems.add(f"--cache-option start={start:g},end={end:g} can't be used: 0 <= start < end <= 1")
