"""The contact sheet of a batch in headless Chromium, light and dark, wide and narrow: `make test-browser`.

SDSAGE_SCREENSHOTS names the folder that the photographs go to.
"""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import browser
import numpy as np
import pytest
from batch_tools import DEFAULTS, VIDEO, batch, results, write_jobs
from PIL import Image

from sdsage.batch.sheet import NAME

SHOTS = os.environ.get("SDSAGE_SCREENSHOTS", "")
pytestmark = [
    pytest.mark.skipif(not SHOTS, reason="make test-browser opens the contact sheet in a browser"),
    pytest.mark.skipif(not browser.find(), reason="no Chromium is installed here: apt-get install chromium"),
]

EVIL = '<script>document.title = "x"</script><img src="http://127.0.0.1:9/x.png"> & "quoted"'
LONG = "a lovely cat on a wooden chair by the window, late afternoon light, " * 6
JOBS: list[dict[str, Any]] = [
    {"prompt": "a lovely cat", "output": "out/cat.png"},
    {"prompt": LONG, "seed": 2, "width": 512, "output": "out/panorama with spaces #1.jpg"},
    {"prompt": EVIL, "seed": 3, "height": 256, "output": "out/deeper/tall_" + 60 * "long" + ".png"},
    {**VIDEO, "video_frames": 5, "output": "out/clip.mp4"},
    {**VIDEO, "video_frames": 5, "prompt": "a dog", "output": "out/clip.webm"},
    {**VIDEO, "video_frames": 5, "output": "out/clip.webp"},
    {**VIDEO, "video_frames": 5, "output": "out/frame_%02d.png"},
    {"init_img": "broken.png", "prompt": EVIL, "output": "out/failed.png"},
]
WINDOWS = {"wide": (1400, 900, False), "narrow": (390, 844, False), "dark": (1400, 900, True)}
# A card each, as a reader sees it.
CARDS = """[...document.querySelectorAll("article")].map(card => {
    const image = card.querySelector("img"), box = card.getBoundingClientRect();
    const links = [...card.querySelectorAll("a")].map(a => a.href);
    return {text: card.innerText, all: card.textContent, failed: card.classList.contains("failed"),
            links, width: box.width,
            clip: image && getComputedStyle(image.parentElement, "::after").content,
            image: image && [image.complete, image.naturalWidth, image.naturalHeight, image.clientHeight],
            inside: [...card.querySelectorAll("*")].every(e => e.getBoundingClientRect().right <= box.right + 1)};
})"""
# Of every text: how far its colour is from what lies behind it, as WCAG counts it.
CONTRAST = """(() => {
    const light = c => { const [r, g, b] = c.match(/[\\d.]+/g).slice(0, 3).map(v => v / 255)
        .map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
        return 0.2126 * r + 0.7152 * g + 0.0722 * b };
    const behind = e => { for (; e; e = e.parentElement) { const c = getComputedStyle(e).backgroundColor;
        if (!/, 0\\)$/.test(c)) return c } return "rgb(255,255,255)" };
    return Math.min(...[...document.querySelectorAll("h1,h2,p,a,summary,td,.none")].map(e => {
        const [a, b] = [light(getComputedStyle(e).color), light(behind(e))].sort((x, y) => y - x);
        return (a + 0.05) / (b + 0.05) }));
})()"""


@pytest.fixture(scope="module")
def sheet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Of a real batch, one job of which fails."""
    before, folder = os.getcwd(), tmp_path_factory.mktemp("batch")
    os.chdir(folder)
    try:
        Path("broken.png").write_bytes(b"no picture")
        write_jobs("jobs.jsonl", JOBS, {**DEFAULTS, "cfg_scale": 1})
        batch("jobs.jsonl", code=1)
        assert [row["state"] for row in sorted(results(), key=lambda r: r["job"])] == 7 * ["done"] + ["failed"]
        # Away from its folder: it needs none of its files.
        alone = folder / "alone"
        alone.mkdir()
        yield Path(shutil.copy(Path("out", NAME), alone))
    finally:
        os.chdir(before)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[browser.Browser]:
    program = browser.find()
    assert program
    found = browser.Browser(program, tmp_path_factory.mktemp("browser") / "profile")
    yield found
    found.close()


@pytest.mark.parametrize("window", WINDOWS)
def test_the_contact_sheet(window: str, sheet: Path, page: browser.Browser) -> None:
    folder = Path(SHOTS)
    folder.mkdir(parents=True, exist_ok=True)
    page.open(sheet, *WINDOWS[window])
    cards = page.ask(CARDS)
    page.photograph(folder / f"{window}.png")
    assert page.ask("document.title") == "out: 7 of 8 jobs done"
    assert len(cards) == len(JOBS)

    done, failed = ([card for card in cards if card["failed"] is state] for state in (False, True))
    for card in done:
        complete, width, height, shown = card["image"]
        assert complete
        assert 0 < min(width, height) <= max(width, height) <= 256
        assert shown > 50
    sizes = {round(width / height, 2) for card in done for _, width, height, _ in [card["image"]]}
    assert sizes == {1.0, 8.0, 0.25}
    assert {card["clip"] for card in done if "vid-gen" in card["all"]} == {'"\u25b6\ufe0e"'}
    assert {card["clip"] for card in done if "img-gen" in card["all"]} == {"none"}

    (card,) = failed
    assert card["image"] is None
    assert "broken.png is not an image that can be read" in card["text"]
    assert EVIL in card["all"]
    assert cards[0] == card  # failures come first

    assert page.ask("document.documentElement.scrollWidth <= innerWidth")
    assert all(card["inside"] and card["width"] >= 200 for card in cards)
    columns = page.ask('getComputedStyle(document.querySelectorAll("main")[1]).gridTemplateColumns.split(" ").length')
    assert columns == 1 if window == "narrow" else columns >= 4
    page.ask('document.querySelectorAll("details").forEach(d => d.open = true)')
    assert all(card["inside"] and "seed" in card["text"] for card in page.ask(CARDS))
    assert page.ask("document.documentElement.scrollWidth <= innerWidth")
    assert page.ask(CONTRAST) >= 4.5
    page.photograph(folder / f"{window}-settings.png")

    assert page.console == []
    assert [r for r in page.requests if not r.startswith("data:image/jpeg;base64,")] == [sheet.resolve().as_uri()]
    assert page.ask('performance.getEntriesByType("resource").filter(e => !e.name.startsWith("data:")).length') == 0


def test_links_lead_to_the_results(sheet: Path, page: browser.Browser) -> None:
    """In the folder of the batch, where the sheet was written."""
    page.open(sheet.parents[1] / "out" / NAME, *WINDOWS["wide"])
    links = {link for card in page.ask(CARDS) for link in card["links"]}
    files = {Path(unquote(urlsplit(link).path)) for link in links}
    assert len(files) == 7
    assert all(path.is_file() for path in files)


def test_faults_would_be_noticed(sheet: Path, page: browser.Browser, tmp_path: Path) -> None:
    """A poster that does not decode, and a picture from elsewhere."""
    text = sheet.read_text(encoding="utf-8")
    start, elsewhere = text.index("base64,") + 7, "http://127.0.0.1:9/x.png"
    faulty = f'{text[:start]}AAAA{text[start + 4 :]}<img src="{elsewhere}">'
    (tmp_path / NAME).write_text(faulty, encoding="utf-8")
    page.open(tmp_path / NAME, *WINDOWS["wide"])
    assert [card["image"][1] for card in page.ask(CARDS) if card["image"]].count(0) == 1
    assert elsewhere in page.requests
    assert elsewhere in "".join(page.console)


def test_photographs_show_the_pictures(sheet: Path, page: browser.Browser, tmp_path: Path) -> None:
    """They are not empty paper: where a poster is, the photograph has its colours."""
    page.open(sheet, *WINDOWS["wide"])
    page.photograph(tmp_path / "shot.png")
    box = page.ask('(b => [b.left, b.top, b.right, b.bottom])(document.querySelector("img").getBoundingClientRect())')
    with Image.open(tmp_path / "shot.png") as shot:
        part = np.asarray(shot.convert("RGB").crop(tuple(map(round, box))), int)
    assert part.std(axis=(0, 1)).max() > 10
