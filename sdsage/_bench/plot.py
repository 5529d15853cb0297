"""The pictures of --plot, by matplotlib (the extra plot)."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdsage.errors import BadRequest, MissingExtra, OutputError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

SUFFIXES = (".png", ".svg")
_STAGES = ("load", "encode_text", "first_step", "mean_later_steps", "decode")


def check(path: str) -> None:
    """Before anything is measured: whether a picture can be written there.

    Raises:
        BadRequest: another extension, or no folder. MissingExtra: matplotlib is not installed.
    """
    if Path(path).suffix.lower() not in SUFFIXES:
        raise BadRequest(f"--plot {path} can't be used: it takes a name that ends in {' or '.join(SUFFIXES)}")
    if not Path(path).absolute().parent.is_dir():
        raise BadRequest(f"--plot {path} can't be written: its folder does not exist")
    _matplotlib()


def _matplotlib() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        raise MissingExtra(f"--plot needs matplotlib ({error}): run pip install 'sdsage[plot]'") from error
    matplotlib.use("agg")  # draws without a display
    from matplotlib import pyplot

    return pyplot


def attention(path: str, found: "Mapping[str, Any]") -> None:
    """How many times as fast as FlashAttention each kernel is, by shape."""
    kernels = list(dict.fromkeys(row["kernel"] for entry in found["shapes"] for row in entry["kernels"]))
    groups = {
        kernel: [
            next((r["times_flash"] for r in entry["kernels"] if r["kernel"] == kernel), None)
            for entry in found["shapes"]
        ]
        for kernel in kernels
    }
    title = f"Attention on {found['device']['description']}"
    _bars(path, [entry["shape"] for entry in found["shapes"]], groups, title, "times as fast as FlashAttention")


def generation(path: str, found: "Mapping[str, Any]") -> None:
    """Seconds by stage, with SageAttention on and off."""
    groups = {name: [run["seconds"][stage] for stage in _STAGES] for name, run in found["runs"].items()}
    title = f"{found['model']} on {found['device']['description']}"
    _bars(path, [stage.replace("_", " ") for stage in _STAGES], groups, title, "seconds")


def _bars(
    path: str, labels: "Sequence[str]", groups: "Mapping[str, Sequence[float | None]]", title: str, unit: str
) -> None:
    pyplot = _matplotlib()
    figure, axes = pyplot.subplots(figsize=(max(6.0, 0.5 * len(labels) * len(groups) + 2), 4.5))
    width = 0.8 / len(groups)
    for i, (name, values) in enumerate(groups.items()):
        axes.bar([at + i * width for at in range(len(labels))], [v or 0 for v in values], width, label=name)
    axes.set_xticks([at + width * (len(groups) - 1) / 2 for at in range(len(labels))], labels, rotation=20, ha="right")
    axes.set_ylabel(unit)
    axes.set_title(title, fontsize=10)
    axes.legend()
    figure.tight_layout()
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise OutputError(f"--plot {path} can't be written: {error.strerror or error}") from None
    finally:
        pyplot.close(figure)
