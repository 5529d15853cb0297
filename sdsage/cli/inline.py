"""Pictures in the terminal: which protocol it speaks, and the bytes that draw one."""

import base64
import io
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from PIL import Image

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from .report import Reporter
    from .settings import Settings

ROWS = 12  # lines of text that a picture takes
_CELL = (9, 18)  # px of a character, where the terminal does not tell
_KITTY_CHUNK = 4096  # characters of base64 in one escape sequence, which is the protocol's limit
_KITTY_PROGRAMS = ("ghostty",)
_ITERM_PROGRAMS = ("iTerm.app", "WezTerm", "mintty")
_SIXEL_TERMS = ("foot", "mlterm", "yaft", "contour")


def protocol(env: Mapping[str, str], *, wrapped: bool = False) -> str | None:
    """ "kitty", "iterm" or "sixel", by the variables that terminals set; None where none is known.

    Inside tmux and screen the variables are those of the terminal in which they were started, and pictures pass only
    where that was allowed: None, unless `wrapped` says that it shall be tried.
    """
    term, program = env.get("TERM", ""), env.get("TERM_PROGRAM", "")
    inside = term.split("-")[0] in ("screen", "tmux") or env.get("TMUX") or env.get("STY")
    if inside and not (wrapped and env.get("TMUX")):
        return None
    if env.get("KITTY_WINDOW_ID") or "kitty" in term or "ghostty" in term or program in _KITTY_PROGRAMS:
        return "kitty"
    if program in _ITERM_PROGRAMS or env.get("LC_TERMINAL") == "iTerm2" or env.get("WEZTERM_PANE"):
        return "iterm"
    if env.get("KONSOLE_VERSION", "").isdigit() and int(env["KONSOLE_VERSION"]) >= 220400:
        return "kitty"
    if term.split("-")[0] in _SIXEL_TERMS or "sixel" in term:
        return "sixel"
    return None


def drawing(frames: "NDArray[np.uint8]", name: str, columns: int, *, tmux: bool = False) -> str:
    """What is written to a terminal of so many columns: room for the picture, the picture, and the cursor below it.

    Of frames N x H x W x 3 the first, the middle and the last one are shown, side by side.
    """
    import numpy as np

    shown = frames if len(frames) == 1 else frames[sorted({0, len(frames) // 2, len(frames) - 1})]
    picture = Image.fromarray(np.concatenate(list(shown), axis=1))
    aspect = picture.width / picture.height * _CELL[1] / _CELL[0]  # columns for one row
    rows = max(1, min(ROWS, int((columns - 1) / aspect)))
    height = rows * _CELL[1]
    size = max(1, round(picture.width * height / picture.height)), height
    picture = picture.resize(size, Image.Resampling.BILINEAR)
    parts = {"kitty": _kitty, "iterm": _iterm, "sixel": _sixel}[name](picture, rows)
    body = "".join(_through_tmux(part) if tmux else part for part in parts)
    # the room is made first, so that nothing scrolls while the picture is drawn
    return "\n" * rows + f"\x1b[{rows}A\x1b7{body}\x1b8\x1b[{rows}B\r"


def _through_tmux(part: str) -> str:
    return "\x1bPtmux;" + part.replace("\x1b", "\x1b\x1b") + "\x1b\\"


def _png(picture: Image.Image) -> str:
    data = io.BytesIO()
    picture.save(data, "PNG", compress_level=1)
    return base64.b64encode(data.getvalue()).decode("ascii")


def _kitty(picture: Image.Image, rows: int) -> Iterator[str]:
    """a=T: show at once; f=100: PNG; C=1: the cursor stays; q=2: no answer, which would come as if it was typed."""
    data = _png(picture)
    for at in range(0, len(data), _KITTY_CHUNK):
        more = int(at + _KITTY_CHUNK < len(data))
        head = f"a=T,f=100,r={rows},C=1,q=2,m={more}" if at == 0 else f"m={more}"
        yield f"\x1b_G{head};{data[at : at + _KITTY_CHUNK]}\x1b\\"


def _iterm(picture: Image.Image, rows: int) -> Iterator[str]:
    data = _png(picture)
    size = len(base64.b64decode(data))
    yield f"\x1b]1337;File=inline=1;size={size};height={rows};preserveAspectRatio=1;doNotMoveCursor=1:{data}\x07"


def _sixel(picture: Image.Image, rows: int) -> Iterator[str]:
    """Six lines of pixels make a band; in it each colour draws its own pixels: a character for each column."""
    import numpy as np

    picture = picture.resize((max(1, picture.width * rows * 16 // picture.height), rows * 16))  # cells may be lower
    colours = picture.quantize(64, method=Image.Quantize.MEDIANCUT)
    pixels = np.asarray(colours)
    palette = np.reshape(colours.getpalette() or [], (-1, 3))
    text = [f'\x1bPq"1;1;{picture.width};{picture.height}']
    for index in np.unique(pixels):
        r, g, b = (int(c) * 100 // 255 for c in palette[index])
        text.append(f"#{index};2;{r};{g};{b}")
    for top in range(0, pixels.shape[0], 6):
        band = pixels[top : top + 6]
        bits = 1 << np.arange(len(band))[:, None]
        for index in np.unique(band):
            line = (63 + ((band == index) * bits).sum(axis=0)).astype(np.uint8)
            text.append(f"#{index}{line.tobytes().decode('ascii')}$")
        text.append("-")
    yield "".join(text) + "\x1b\\"


def can_draw(settings: "Settings", bars: Any, reporter: "Reporter") -> "Callable[[NDArray[np.uint8]], None] | None":
    """What draws previews above the bars of rich; None where they can't be drawn or were not asked for.

    Args:
        bars: a `rich.progress.Progress`; None when stderr is no terminal or has no progress.
    """
    wanted = settings.values.get("preview_inline")
    if settings.values.get("preview", "none") == "none" or wanted == "off":
        return None
    name = protocol(os.environ, wrapped=wanted == "on") if bars is not None else None
    if name is None:
        if wanted == "on":
            why = "stderr is no terminal with progress"
            if bars is not None:
                why = "this terminal is not known to show pictures (by TERM and TERM_PROGRAM)"
            reporter.message("warning", f"--preview-inline on has no effect: {why}")
        return None

    def draw(frames: "NDArray[np.uint8]") -> None:
        columns = shutil.get_terminal_size().columns
        text = drawing(frames, name, columns, tmux=bool(os.environ.get("TMUX")))
        bars.console.print(_Raw(text), end="")

    return draw


class _Raw:
    """Text that rich hands on as it is, without counting its width."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        from rich.segment import ControlType, Segment

        yield Segment(self._text, None, [(ControlType.CARRIAGE_RETURN,)])
