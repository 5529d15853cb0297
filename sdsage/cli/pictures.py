"""Input pictures, and the size of the result that follows from them."""

from dataclasses import dataclass, field
from typing import Any

from .engine import ask
from .option import IMG
from .settings import Settings

DEFAULT_SIDE = 512  # px


@dataclass
class Pictures:
    """Decoded input pictures (uint8, H x W x C) by the name of their field in the parameter struct.

    Attributes:
        width, height: px; as given, else those of the first input picture, else 512.
        encodes: the VAE has to encode one of them, not only to decode.
        notes: one sentence for each thing in the files that is not in the pixels, such as transparency.
    """

    width: int
    height: int
    encodes: bool
    fields: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def load_pictures(settings: Settings) -> Pictures:
    """Reads every picture that the settings name, in sd-cli's order and at sd-cli's sizes.

    Raises:
        BadRequest: naming the file that can't be read.
    """
    import numpy as np

    from sdsage.media import load_image, load_images_dir

    width, height = settings["width"] or 0, settings["height"] or 0
    fields: dict[str, Any] = {}
    notes: list[str] = []

    def take_size(picture: Any) -> None:
        nonlocal width, height
        if not (width and height):  # one side alone does not count beside a picture
            height, width = picture.shape[:2]

    for key, name in (("init_img", "init_image"), ("end_img", "end_image")):
        if settings[key]:
            fields[name] = load_image(settings[key], size=(width, height) if width and height else None, notes=notes)
            take_size(fields[name])
    if settings["ref_image"]:
        fields["ref_images"] = [load_image(path, notes=notes) for path in settings["ref_image"]]
        take_size(fields["ref_images"][0])
    encodes = bool(fields)

    size = width or DEFAULT_SIDE, height or DEFAULT_SIDE
    if settings.verb == IMG:
        fields.pop("end_image", None)
        if settings["mask"]:
            fields["mask_image"] = load_image(settings["mask"], channels=1, size=size, notes=notes)
        else:
            fields["mask_image"] = np.full((size[1], size[0], 1), 255, np.uint8)
        if settings["control_image"]:
            fields["control_image"] = _control(settings, size, notes)
        if settings["pm_id_images_dir"]:
            fields["pm_params.id_images"] = load_images_dir(settings["pm_id_images_dir"], notes=notes)
    else:
        fields.pop("ref_images", None)
        if settings["control_video"]:
            limit = settings["video_frames"]
            fields["control_frames"] = load_images_dir(settings["control_video"], size=size, limit=limit, notes=notes)
    return Pictures(*size, encodes, fields, notes)


def _control(settings: Settings, size: tuple[int, int], notes: list[str]) -> Any:
    from sdsage.media import load_image

    picture = load_image(settings["control_image"], size=size, notes=notes)
    return ask(settings, "preprocess_canny", picture) if settings["canny"] else picture
