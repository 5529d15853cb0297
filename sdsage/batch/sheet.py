"""The contact sheet: one HTML file with a small picture of every result, its settings, and what failed."""

import base64
import io
import json
import os
from collections.abc import Callable, Iterable, Iterator
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import quote

from sdsage.batch.journal import DONE, FAILED, Row
from sdsage.latents import write_whole

SIDE = 256  # px of a poster
NAME = "contact-sheet.html"
_VIDEOS = (".mp4", ".webm")
_STYLE = """
:root{color-scheme:light dark}
body{font:14px/1.45 system-ui,sans-serif;margin:clamp(.8rem,3vw,2rem);color:#1c1e21;background:#f6f7f8}
h1{font-size:1.3rem;margin:0 0 .3rem}h2{font-size:1.05rem;margin:2rem 0 .6rem}p{margin:.2rem 0;color:#55595f}
main{display:grid;grid-template-columns:repeat(auto-fill,minmax(15rem,1fr));gap:1rem}
article{background:#fff;border:1px solid #dcdfe3;border-radius:6px;padding:.7rem;overflow-wrap:anywhere}
article img{width:100%;height:11rem;object-fit:contain;background:#eceef0;border-radius:4px;display:block}
.none{padding:.5rem;text-align:center;background:#eceef0;border-radius:4px}
.picture{position:relative;display:block}
.clip::after{content:"\\25b6\\fe0e";position:absolute;right:.5rem;bottom:.5rem;padding:0 .5rem;border-radius:4px;
background:#000a;color:#fff}
.name,.prompt{display:-webkit-box;-webkit-box-orient:vertical;-webkit-line-clamp:3;overflow:hidden}
article.failed{border-color:#c8372d}.why{color:#a3261d}a{color:#0b57a4}
summary{cursor:pointer;color:#55595f}table{border-collapse:collapse;font-size:12px}
td{padding:.1rem .6rem .1rem 0;vertical-align:top}td:first-child{overflow-wrap:normal}
@media (prefers-color-scheme:dark){body{background:#16181b;color:#e6e8ea}
article{background:#202327;border-color:#3a3f45}
article img,.none{background:#2b2f34}p,summary{color:#a9afb6}a{color:#7db7f0}.why{color:#f0928a}}
"""


def poster(path: Path) -> bytes | None:
    """A small JPEG of a picture, or of the first frame of a video; None when it can't be made, which is no failure."""
    from PIL import Image

    try:
        image = _first_frame(path) if path.suffix.lower() in _VIDEOS else Image.open(path)
        with image:
            image.seek(0)
            small = image.convert("RGB")
        small.thumbnail((SIDE, SIDE))
        out = io.BytesIO()
        small.save(out, "JPEG", quality=75)
    except (OSError, ValueError, ImportError, StopIteration):
        return None
    return out.getvalue()


def _first_frame(path: Path) -> Any:
    import av

    with av.open(str(path)) as container:
        frame: Any = next(container.decode(video=0))
        return frame.to_image()


def write(folder: Path, rows: Iterable[Row], posters: Callable[[str], bytes | None]) -> Path:
    """Writes the sheet, which needs no other file. `posters`: by the key of a job."""
    found = sorted(rows, key=lambda row: row.number or 0)
    path = folder / NAME
    write_whole(path, ["\n".join(_html(folder, found, posters)).encode("utf-8", "backslashreplace")])
    return path


def _html(folder: Path, rows: list[Row], posters: Callable[[str], bytes | None]) -> Iterator[str]:
    done = [row for row in rows if row.state == DONE]
    failed = [row for row in rows if row.message and row.state != DONE]
    title = f"{escape(folder.resolve().name or 'batch')}: {len(done)} of {len(rows)} jobs done"
    yield f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{title}</title>'
    yield '<meta name="viewport" content="width=device-width">'
    yield f"<style>{_STYLE}</style>\n</head>\n<body>\n<h1>{title}</h1>"
    seconds = sum(row.seconds for row in done)
    yield f"<p>{len(failed)} failed, {len(rows) - len(done) - len(failed)} left; {seconds:.0f} s of work</p>"
    for name, part in (("Failed", failed), ("Done", done)):
        if part:
            yield f"<h2>{name}</h2>\n<main>"
            for row in part:
                yield from _article(row, posters(row.key) if row.state == DONE else None)
            yield "</main>"
    yield "</body>\n</html>\n"


def _article(row: Row, poster: bytes | None) -> Iterator[str]:
    yield f'<article class="{DONE if row.state == DONE else FAILED}">'
    name = escape(row.output)
    if poster:
        data = base64.b64encode(poster).decode("ascii")
        kind = "picture clip" if json.loads(row.summary).get("frames", 1) > 1 else "picture"
        image = f'<img alt="{name}" src="data:image/jpeg;base64,{data}">'
        yield f'<a class="{kind}" href="{link(row.files[0][0])}">{image}</a>'
    else:
        yield f'<div class="none">{"no picture" if row.state == DONE else escape(row.state)}</div>'
    shown = f'<a href="{link(row.files[0][0])}">{name}</a>' if row.files else name
    yield f'<p class="name">{row.number}. {shown}</p>'
    if row.state != DONE:
        yield f'<p class="why">{escape(row.message)}</p>'
    prompt = row.options.get("prompt")
    if prompt:
        yield f'<p class="prompt">{escape(str(prompt))}</p>'
    facts = {"output": row.output, "model": row.model, "mode": row.verb, "seed": row.seed}
    facts |= {"seconds": f"{row.seconds:.1f}", **row.options}
    cells = "".join(
        f"<tr><td>{escape(str(k))}</td><td>{escape(v if isinstance(v, str) else json.dumps(v))}</td></tr>"
        for k, v in facts.items()
    )
    yield f"<details><summary>settings</summary><table>{cells}</table></details>\n</article>"


def link(name: str) -> str:
    """A file beside the sheet as an address."""
    return escape(quote(os.fsencode(name)), quote=True)
