"""What is seen of a batch: lines, table, status, results, the contact sheet; and the same from Python."""

import contextlib
import os
import subprocess
import sys
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from batch_tools import DEFAULTS, VIDEO, batch, check_whole, events, many, results, write_jobs
from conftest import PACKAGE
from test_json_lines import check

import sdsage
from sdsage.batch import status as rows_of
from sdsage.batch.sheet import NAME as SHEET
from sdsage.errors import BadRequest

pytestmark = pytest.mark.usefixtures("empty_folder")


def test_every_line_is_documented() -> None:
    Path("in.png").write_bytes(b"no picture")
    write_jobs("jobs.jsonl", [*many(2), {"init_img": "in.png", "output": "out/3.png"}])
    for verb, args, code in (("batch", [], 1), ("batch status", ["status", "out"], 0)):
        for line in events(batch(*(args or ["jobs.jsonl"]), "--json", code=code).stdout):
            check(line, verb)
    for line in events(batch("jobs.jsonl", "--dry-run", "--only", "1-2", "--json").stdout):
        check(line, "batch --dry-run")


# ---- from Python


def test_from_python(empty_folder: Path) -> None:
    seen: list[Any] = []
    jobs = {"defaults": DEFAULTS, "jobs": [{"seed": [1, 2], "output": "out/{seed}.png"}]}
    done = sdsage.Batch(jobs).run(on_result=seen.append, cpu_workers=1)
    assert (done.progress.done, done.progress.loads) == (2, 1)
    assert (
        [found["files"][0]["file"] for found in seen] == ["out/1.png", "out/2.png"] == [r["output"] for r in results()]
    )
    assert seen == results()
    assert [row.key for row in rows_of("out")] == [row.key for row in done.rows]
    with pytest.raises(BadRequest, match="no preset is called"):
        sdsage.Batch([{**DEFAULTS, "preset": "no", "output": "a.png"}])


def test_an_error_of_a_callback_ends_the_batch_and_loses_nothing() -> None:
    def fail(found: Any) -> None:
        raise ZeroDivisionError

    jobs = [{**DEFAULTS, **entry} for entry in many(3)]
    with pytest.raises(ZeroDivisionError):
        sdsage.Batch(jobs).run(on_result=fail, cpu_workers=1)
    assert rows_of("out")[0].state == "done"
    sdsage.Batch(jobs).run(cpu_workers=1)
    check_whole("out", 3)


# ---- the contact sheet


class Page(HTMLParser):
    """Every tag that opens closes, and nothing is fetched from elsewhere."""

    VOID = frozenset({"meta", "img", "br"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.images: list[str] = []
        self.links: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        found = dict(attrs)
        assert tag not in ("script", "link", "iframe")
        if tag == "img":
            self.images.append(found["src"])
        if tag == "a":
            self.links.append(found["href"])
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_contact_sheet_is_one_whole_file() -> None:
    Path("in.png").write_bytes(b"no picture")
    evil = '<script>alert("x")</script> & \U0001f408'
    entries = [{"prompt": evil, "output": "out/a #1%.png"}, {**VIDEO, "video_frames": 5, "output": "out/c.mp4"}]
    entries.append({"init_img": "in.png", "prompt": evil, "output": "out/b.png"})
    write_jobs("jobs.jsonl", entries)
    batch("jobs.jsonl", code=1)
    page = Page()
    page.feed(Path("out", SHEET).read_text(encoding="utf-8"))
    page.close()
    assert page.open == []
    assert len(page.images) == 2
    assert all(image.startswith("data:image/jpeg;base64,/9j/") for image in page.images)
    from urllib.parse import unquote

    assert {unquote(link) for link in page.links} == {"a #1%.png", "c.mp4"}
    assert page.text.count(evil) == 4  # two jobs; cut, and whole among the settings
    assert "in.png" in page.text
    assert "out: 2 of 3 jobs done" in page.text


def test_the_log_file_and_plain_lines() -> None:
    write_jobs("jobs.jsonl", many(2))
    shown = batch("jobs.jsonl", "--log-file", "all.log")
    assert shown.stdout == "out/contact-sheet.html\n"
    lines = shown.stderr.splitlines()
    assert lines[-1] == "2 of 2 jobs are done, 0 failed, 0 left"
    assert [line.partition(" is done")[0] for line in lines if " is done, " in line] == [
        "job 1 (out/1.png)",
        "job 2 (out/2.png)",
    ]
    log = Path("all.log").read_text(encoding="utf-8")
    assert "job 1: sample ..." in log
    assert "exit     0" in log


def test_the_table_on_a_terminal() -> None:
    write_jobs("jobs.jsonl", [*many(2), {"init_img": "in.png", "output": "out/3.png"}])
    Path("in.png").write_bytes(b"no picture")
    terminal, end = os.openpty()
    command = [sys.executable, "-P", "-m", "sdsage", "batch", "jobs.jsonl"]
    env = {**os.environ, "PYTHONPATH": PACKAGE, "COLUMNS": "150", "TERM": "xterm"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=end, env=env) as process:
        os.close(end)
        shown = b""
        with contextlib.suppress(OSError):  # Linux says so at the end of a terminal
            while data := os.read(terminal, 65536):
                shown += data
        process.communicate()
    os.close(terminal)
    assert process.returncode == 1
    text = shown.decode()
    for words in ("worker", "model", "step", "tiny-flux", "out/2.png", "0 of 3 done", "job 3 (out/3.png) failed: ",
                  "2 of 3 jobs are done, 1 failed, 0 left"):  # fmt: skip
        assert words in text, words


def test_time_is_told_from_what_was_done() -> None:
    jobs = [{**DEFAULTS, **entry} for entry in many(3)]
    left: list[Any] = []
    progress: list[Any] = []

    def hear(event: Any) -> None:
        if event["event"] == "job" and event["state"] == "done":
            left.append(progress[0].seconds_left)

    begun = time.monotonic()
    sdsage.Batch(jobs).run(on_event=hear, watch=progress.append, cpu_workers=1)
    assert len(left) == 3
    assert 0 < left[0] < 10 * (time.monotonic() - begun)
    assert left[2] is None
