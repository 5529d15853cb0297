"""--preview: a file that is replaced while sampling goes on."""

import os
from typing import TYPE_CHECKING, Any

from sdsage.errors import SdsageError

from .option import VID
from .settings import Settings

if TYPE_CHECKING:
    from sdsage import Preview
    from sdsage.media import Output

    from .report import Reporter


class PreviewFile:
    """Writes each preview over the last one.

    The rough preview (proj) has one frame for four of the video, so it plays at a quarter of the speed.
    """

    def __init__(self, settings: Settings, reporter: "Reporter") -> None:
        """Raises OutputError when the file can't be written."""
        from sdsage.media import plan_output

        self.reporter = reporter
        self._settings = settings
        path = settings["preview_path"]
        frames = settings["video_frames"] if settings.verb == VID else 1
        stem, suffix = os.path.splitext(path)
        clip = f"{stem}.webp" if suffix.lower() == ".png" else path
        self.still: Output = plan_output(path, video=frames > 1 and suffix.lower() != ".png", count=1, overwrite=True)
        self.clip: Output | None = None
        if frames > 1:
            self.clip = plan_output(clip, video=True, count=frames, overwrite=True)

    def _fps(self) -> int:
        """Known since the model is loaded; a picture has none."""
        fps = self._settings["fps"] or 1
        return max(1, fps // 4) if self._settings["preview"] == "proj" else int(fps)

    def __call__(self, step: int, frames: Any, noisy: bool) -> None:
        """A preview of N x H x W x 3 arrived."""
        output = self.clip if self.clip is not None and len(frames) > 1 else self.still
        try:
            path = output.write(frames, fps=self._fps())[0]
        except SdsageError as error:  # a full disk must not end the run
            self.reporter.message("warning", f"preview of step {step} was not written: {error}")
            return
        self.reporter.preview(step, path, frames)


def engine_preview(settings: Settings) -> "Preview":
    """What the engine is asked to hand out."""
    from sdsage import Preview
    from sdsage.enums import PreviewMode

    noisy = settings["preview_noisy"]
    return Preview(
        PreviewMode.parse(settings["preview"]), settings["preview_interval"], denoised=not noisy, noisy=noisy
    )
