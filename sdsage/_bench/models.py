"""Models of random weights for `sdsage bench gen --random`: which files, which verb, which settings."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from sdsage.errors import BadRequest, OutputError

IMG, VID = "img-gen", "vid-gen"
_WAN = {"width": "832", "height": "480", "video_frames": "33", "steps": "4", "cfg_scale": "1"}
_WAN |= {"sampling_method": "euler"}


@dataclass(frozen=True)
class RandomModel:
    """A model by its name.

    Attributes:
        verb: what makes something with it.
        settings: by option key, where nothing else is given.
        preset: whose files it has; "" for one that `size` says.
        gigabytes: that its files take; 0 for the tiny ones.
    """

    verb: str
    settings: dict[str, str] = field(default_factory=dict)
    preset: str = ""
    size: str = ""
    gigabytes: float = 0.0


MODELS = {
    "tiny": RandomModel(VID, preset="tiny-random"),
    "tiny-flux": RandomModel(IMG, preset="tiny-flux"),
    "sd1.5": RandomModel(
        IMG, {"width": "512", "height": "512", "steps": "8", "cfg_scale": "1"}, size="sd1.5", gigabytes=2.2
    ),
    "wan-1.3b": RandomModel(VID, _WAN, size="1.3b", gigabytes=8),
    "wan-14b": RandomModel(VID, _WAN, size="14b", gigabytes=22),
}


def files(name: str, folder: Path, say: Callable[[str], None]) -> dict[str, str]:
    """Option key -> file; those that are missing are written.

    Raises:
        BadRequest: the disk has no room for them. OutputError: they can't be written.
    """
    from sdsage._bench import random_models, random_unet

    model = MODELS[name]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        there = sum(p.stat().st_size for p in folder.iterdir() if p.is_file()) / 1e9
        free = shutil.disk_usage(folder).free / 1e9
        if free < model.gigabytes - there:
            raise BadRequest(
                f"--random {name} needs {model.gigabytes:g} GB in {folder}, where {free:.1f} GB are free: name another "
                "folder with --random-dir"
            )
        say(f"random weights of {name} are in {folder}; what is missing is written now ({model.gigabytes:g} GB in all)")
        if model.size == "sd1.5":
            return {"model": str(random_unet.make(folder / "sd15.safetensors"))}
        made = random_models.make(folder, model.size)
    except OSError as error:
        raise OutputError(f"random weights can't be written to {folder}: {error.strerror or error}") from None
    return {field.removesuffix("_path"): path for field, path in made.items()}
