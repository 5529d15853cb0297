"""--preview: the file in every mode, and the picture in the terminal."""

import base64
import io
import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import PACKAGE
from PIL import Image
from tiny_cli import frames_of, run

from sdsage.cli.inline import ROWS, drawing, protocol

SIZE = ["-W", "32", "-H", "32", "--steps", "2", "-t", "1", "-p", "a cat"]
VIDEO = ["vid-gen", "--preset", "tiny-random", *SIZE, "--video-frames", "5", "--high-noise-steps", "1"]
PICTURE = ["img-gen", "--preset", "tiny-flux", *SIZE]
Frames = np.ndarray[Any, np.dtype[np.uint8]]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


# Of a rough guess there is a pixel for each of the latent's, and a frame for four of the video's.
@pytest.mark.parametrize(
    ("mode", "command", "shape"),
    [
        ("proj", PICTURE, (1, 4, 4, 3)),
        ("tae", PICTURE, (1, 32, 32, 3)),
        ("vae", PICTURE, (1, 32, 32, 3)),
        ("proj", VIDEO, (2, 4, 4, 3)),
        ("vae", VIDEO, (5, 32, 32, 3)),
        ("tae", VIDEO, (5, 32, 32, 3)),  # without --taesd: by the VAE, which is said
    ],
)
def test_every_mode_makes_a_picture_and_leaves_the_result_alone(
    mode: str, command: list[str], shape: tuple[int, ...]
) -> None:
    args = ["--preview", mode, "--preview-path", "p.png", "--json"]
    found = [json.loads(line) for line in run(*command, "-o", "a.webp", *args).stdout.splitlines()]
    told = [line for line in found if line["event"] == "preview"]
    assert len(told) == (3 if command is VIDEO else 2)
    assert (told[-1]["frames"], told[-1]["height"], told[-1]["width"]) == shape[:3]
    picture = frames_of(told[-1]["file"])
    assert picture.shape == shape
    assert picture.max() > picture.min()
    without_taesd = any(line["event"] == "warning" and "needs --taesd" in line["text"] for line in found)
    assert without_taesd == (mode == "tae" and command is VIDEO)
    run(*command, "-o", "b.webp", "-q")
    assert np.array_equal(frames_of("a.webp"), frames_of("b.webp"))


def test_the_last_exact_preview_is_the_result() -> None:
    run(*PICTURE, "-o", "a.png", "--preview", "tae", "--preview-path", "p.png", "-q")
    assert np.abs(frames_of("a.png").astype(int) - frames_of("p.png")).max() <= 1


def test_an_autoencoder_of_another_model_is_refused() -> None:
    files = json.loads(run(*PICTURE, "--print-params").stdout)["ctx"]
    args = ["--preview", "tae", "--taesd", files["taesd_path"], "--taesd-preview-only", "-o", "a.gif"]
    assert run(*VIDEO, *args, code=2).stderr.count("error: ") >= 1


@pytest.mark.parametrize(
    ("env", "name"),
    [
        ({"TERM": "xterm-kitty", "KITTY_WINDOW_ID": "1"}, "kitty"),
        ({"TERM": "xterm-ghostty"}, "kitty"),
        ({"TERM": "xterm-256color", "TERM_PROGRAM": "ghostty"}, "kitty"),
        ({"TERM": "xterm-256color", "KONSOLE_VERSION": "230804"}, "kitty"),
        ({"TERM": "xterm-256color", "KONSOLE_VERSION": "210400"}, None),
        ({"TERM": "xterm-256color", "TERM_PROGRAM": "iTerm.app"}, "iterm"),
        ({"TERM": "xterm-256color", "LC_TERMINAL": "iTerm2"}, "iterm"),
        ({"TERM": "xterm-256color", "TERM_PROGRAM": "WezTerm"}, "iterm"),
        ({"TERM": "xterm-256color", "TERM_PROGRAM": "mintty"}, "iterm"),
        ({"TERM": "foot"}, "sixel"),
        ({"TERM": "foot-extra"}, "sixel"),
        ({"TERM": "mlterm"}, "sixel"),
        ({"TERM": "xterm-256color"}, None),
        ({"TERM": "xterm-256color", "TERM_PROGRAM": "Apple_Terminal"}, None),
        ({"TERM": "dumb"}, None),
        ({}, None),
        ({"TERM": "tmux-256color", "TMUX": "/tmp/x", "KITTY_WINDOW_ID": "1"}, None),
        ({"TERM": "screen", "STY": "1", "TERM_PROGRAM": "iTerm.app"}, None),
    ],
)
def test_terminals_are_known_by_their_variables(env: dict[str, str], name: str | None) -> None:
    assert protocol(env) == name


def test_tmux_is_tried_when_asked_for() -> None:
    env = {"TERM": "tmux-256color", "TMUX": "/tmp/x", "KITTY_WINDOW_ID": "1"}
    assert protocol(env, wrapped=True) == "kitty"
    text = drawing(np.zeros((1, 8, 8, 3), np.uint8), "kitty", 80, tmux=True)
    assert text.count("\x1bPtmux;\x1b\x1b_G") == 1
    assert "\x1b\x1b\\\x1b\\" in text


def decoded(text: str) -> Image.Image:
    """The picture in the escape sequences of kitty or iTerm2."""
    kitty = re.findall(r"\x1b_G([^;]*);([^\x1b]*)\x1b\\", text)
    if kitty:
        assert [head.split("m=")[1] for head, _ in kitty] == ["1"] * (len(kitty) - 1) + ["0"]
        assert all(len(data) <= 4096 for _, data in kitty)
        data = "".join(data for _, data in kitty)
    else:
        size, data = re.search(r"\x1b]1337;File=inline=1;size=(\d+);[^:]*:([^\x07]*)\x07", text).groups()  # type: ignore[union-attr]
        assert len(base64.b64decode(data)) == int(size)
    return Image.open(io.BytesIO(base64.b64decode(data)))


def sixels(text: str) -> Frames:
    """The picture in sixel text: H x W x 3."""
    body = re.search(r'\x1bPq"1;1;(\d+);(\d+)(.*)\x1b\\', text, re.DOTALL)
    assert body is not None
    width, height = int(body[1]), int(body[2])
    picture = np.zeros((height, width, 3), np.uint8)
    palette: dict[int, tuple[int, ...]] = {}
    top = x = colour = 0
    for number, definition, graphic, mark in re.findall(r"#(\d+)((?:;\d+){4})?|([?-~])|([$-])", body[3]):
        if definition:
            palette[int(number)] = tuple(int(c) * 255 // 100 for c in definition.split(";")[2:])
        elif number:
            colour = int(number)
        elif graphic:
            for bit in range(6):
                if (ord(graphic) - 63) >> bit & 1:
                    picture[top + bit, x] = palette[colour]
            x += 1
        else:
            x, top = 0, top + (6 if mark == "-" else 0)
    return picture


@pytest.mark.parametrize("name", ["kitty", "iterm", "sixel"])
@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("columns", [20, 80, 200])
def test_the_picture_arrives_and_the_cursor_stands_below_it(name: str, count: int, columns: int) -> None:
    shade = np.linspace(0, 240, count).astype(np.uint8)
    frames = np.broadcast_to(shade[:, None, None, None], (count, 60, 104, 3))
    text = drawing(frames, name, columns)
    rows = len(text) - len(text.lstrip("\n"))
    assert 1 <= rows <= ROWS
    assert text.startswith("\n" * rows + f"\x1b[{rows}A\x1b7")
    assert text.endswith(f"\x1b8\x1b[{rows}B\r")
    picture = sixels(text) if name == "sixel" else np.asarray(decoded(text).convert("RGB"))
    assert picture.shape[1] <= columns * 9
    shown = sorted({0, count // 2, count - 1})
    for i, index in enumerate(shown):
        middle = picture[picture.shape[0] // 2, picture.shape[1] * (2 * i + 1) // (2 * len(shown))].astype(int)
        assert np.abs(middle - int(shade[index])).max() <= 6


@pytest.mark.parametrize("name", ["kitty", "iterm", "sixel"])
@pytest.mark.parametrize("size", [(1, 1), (1, 500), (500, 1), (33, 17)])
def test_any_size_can_be_drawn(name: str, size: tuple[int, int]) -> None:
    assert drawing(np.full((1, *size, 3), 9, np.uint8), name, 80)


def in_terminal(args: list[str], **env: str) -> str:
    """What a command writes to a terminal of its own, on stderr."""
    main, side = pty.openpty()
    plain = {k: v for k, v in os.environ.items() if k not in ("TMUX", "STY", "TERM_PROGRAM", "KITTY_WINDOW_ID")}
    env = {**plain, "PYTHONPATH": PACKAGE, "COLUMNS": "100", **env}
    with subprocess.Popen(
        [sys.executable, "-P", "-m", "sdsage", *args], env=env, stdout=subprocess.DEVNULL, stderr=side
    ) as p:
        os.close(side)
        data = b""
        while True:
            try:
                more = os.read(main, 65536)
            except OSError:  # nobody has the other side any more
                break
            if not more:
                break
            data += more
        assert p.wait() == 0, data
    os.close(main)
    return data.decode("utf-8")


COMMAND = [*PICTURE, "--preview", "tae", "-o", "a.png", "--overwrite"]


def test_previews_in_a_terminal() -> None:
    text = in_terminal(COMMAND, TERM="xterm-kitty")
    pictures = re.findall(r"\x1b7.*?\x1b8", text, re.DOTALL)
    assert len(pictures) == 2
    assert decoded(pictures[-1]).size[0] > 32
    assert re.search("[12]/2", re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text))  # the bar is drawn ten times a second
    assert frames_of("preview.png").shape == (1, 32, 32, 3)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--preview-inline", "off"], ""),
        (["-q"], ""),
        (["--json"], ""),
        (["--preview-inline", "on", "-q"], "--preview-inline on has no effect: stderr is no terminal with progress"),
    ],
)
def test_terminals_stay_without_pictures(more: list[str], said: str) -> None:
    text = in_terminal([*COMMAND, *more], TERM="xterm-kitty")
    assert "\x1b_G" not in text
    assert said in text.replace("\r\n", " ")


def test_a_terminal_that_is_not_known() -> None:
    text = in_terminal([*COMMAND, "--preview-inline", "on"], TERM="xterm-256color")
    assert "\x1b_G" not in text
    assert "is not known to show pictures" in text


def test_never_where_stderr_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-kitty")
    result = run(*COMMAND, "--preview-inline", "on")
    assert "\x1b" not in result.stderr
    assert "--preview-inline on has no effect: stderr is no terminal" in result.stderr
