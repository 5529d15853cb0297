"""Batches whose outputs go to a storage: a local one, and on a Ray cluster in test_batch_cluster.py."""

import hashlib
import json
import os
import shutil
import sqlite3
import time
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
from batch_tools import DEFAULTS, batch, events, killed_in_job, many, status, write_jobs
from worker_tools import wait_until

import sdsage
from sdsage.batch.journal import FOLDER, NAME, Journal, Row
from sdsage.batch.storage import Copies, Storage
from sdsage.errors import BadRequest, OutputError

pytest.importorskip("fsspec")
pytestmark = pytest.mark.usefixtures("empty_folder")


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/bucket/deep"


@pytest.fixture
def bucket(tmp_path: Path) -> Path:
    return tmp_path / "bucket" / "deep"


def check_stored(bucket: Path, url: str, count: int) -> None:
    """All is in the storage, nothing else is, and the copy of the journal says the same."""
    rows = [json.loads(line) for line in (bucket / "results.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [(row["job"], row["state"]) for row in rows] == [(i, "done") for i in range(1, count + 1)]
    for row in rows:
        for file in row["files"]:
            assert file["file"].startswith(f"{url}/")
            data = (bucket / file["file"].removeprefix(f"{url}/")).read_bytes()
            assert (len(data), hashlib.sha256(data).hexdigest()) == (file["bytes"], file["sha256"])
    names = {file["file"].removeprefix(f"{url}/") for row in rows for file in row["files"]}
    there = {path.relative_to(bucket).as_posix() for path in bucket.rglob("*") if path.is_file()}
    assert there == names | {"results.jsonl", "contact-sheet.html", f"{FOLDER}/{NAME}"}
    with closing(sqlite3.connect(f"file:{bucket / FOLDER / NAME}?immutable=1", uri=True)) as db:
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        assert db.execute("SELECT count(*) FROM jobs WHERE state = 'done'").fetchone() == (count,)


def made(text: str) -> list[int]:
    return [event["job"] for event in events(text) if event["event"] == "job" and event["state"] == "done"]


def test_outputs_go_there_and_nothing_is_made_twice(url: str, bucket: Path) -> None:
    """Resumed, damaged, and from another machine that has the job file alone."""
    write_jobs("jobs.jsonl", [*many(2), {"output": "out/sub/x.png", "save_latents": True}])
    command = ["jobs.jsonl", "--storage", url, "--json"]
    assert made(batch(*command).stdout) == [1, 2, 3]
    assert (bucket / "sub" / "x.latents.safetensors").is_file()
    (bucket / "sub" / "x.latents.safetensors").unlink()
    check_stored(bucket, url, 3)
    assert not list(Path("out").rglob("*.png"))
    assert status()["jobs"][0]["files"][0]["file"] == f"{url}/1.png"
    assert made(batch(*command).stdout) == []
    good = (bucket / "1.png").read_bytes()
    (bucket / "1.png").write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    os.utime(bucket / "2.png", ns=(1, 1))  # another version of the same bytes
    assert made(batch(*command).stdout) == [1]
    assert (bucket / "1.png").read_bytes() == good
    shutil.rmtree("out")
    said = batch(*command).stdout
    assert made(said) == []
    assert f"the journal comes from {url}" in [event.get("text") for event in events(said)]
    said = batch("jobs.jsonl", code=2).stderr
    assert f"the outputs of the batch in out are in {url}, and not in out: give --storage as before" in said


def test_a_killed_batch_goes_on(url: str, bucket: Path) -> None:
    """Also when it was killed after a job and before its output was there."""
    write_jobs("jobs.jsonl", many(3))
    killed_in_job(2, "--storage", url)
    (bucket / FOLDER / "parts" / "0").mkdir(parents=True)
    (bucket / FOLDER / "parts" / "0" / "2.png").write_bytes(b"half")
    assert made(batch("jobs.jsonl", "--json", "--storage", url).stdout) == [2, 3]
    check_stored(bucket, url, 3)
    with sqlite3.connect(Path("out", FOLDER, NAME)) as db:  # as before the word that job 2 is done
        db.execute("UPDATE jobs SET state = 'running', files = '[]' WHERE number = 2")
    seen = events(batch("jobs.jsonl", "--json", "--storage", url).stdout)
    assert [e["event"] for e in seen] == ["start", "note", "result"]
    check_stored(bucket, url, 3)


def test_what_was_made_and_not_sent_is_sent(url: str, bucket: Path, monkeypatch: pytest.MonkeyPatch) -> None:

    def fail(self: Storage, path: Path, token: str, name: str) -> None:
        raise OutputError("the network is away")

    jobs = [{**DEFAULTS, **entry} for entry in many(1)]
    with monkeypatch.context() as patch:
        patch.setattr(Storage, "send", fail)
        done = sdsage.Batch(jobs, storage=url).run(cpu_workers=1)
    assert [(row.state, row.message) for row in done.rows] == [("failed", "the network is away")]
    done = sdsage.Batch(jobs, storage=url).run(cpu_workers=1, retry_failed=True)
    assert ([row.state for row in done.rows], done.progress.loads) == (["done"], 0)  # it was not made again
    check_stored(bucket, url, 1)
    assert not (Path("out") / FOLDER / "work" / done.rows[0].key).exists()


def test_files_of_others_and_places_outside(url: str, bucket: Path) -> None:
    bucket.mkdir(parents=True)
    (bucket / "1.png").write_bytes(b"mine")
    write_jobs("jobs.jsonl", many(1))
    assert "exists, and is not of this job" in batch("jobs.jsonl", "--storage", url, code=2).stderr
    assert (bucket / "1.png").read_bytes() == b"mine"
    said = batch("jobs.jsonl", "--storage", url, "--folder", "other", code=2).stderr
    assert f"output ../out/1.png is not below other, and has no place in {url}" in said
    said = batch("jobs.jsonl", "--storage", "nothing://x/y", code=2).stderr
    assert "--storage nothing://x/y: " in said


def test_another_batch_in_the_storage(url: str, bucket: Path, tmp_path: Path) -> None:
    driver, storage = bucket / FOLDER / "driver.json", Storage(url)
    storage.hold(tmp_path)
    holder = json.loads(driver.read_bytes())
    storage.hold(tmp_path)  # this process itself
    for host, seen, busy in (("other", 10, True), ("other", 10_000, False), (holder["host"], 10_000, True)):
        driver.write_text(json.dumps({**holder, "pid": os.getppid(), "host": host, "seen": time.time() - seen}))
        if busy:
            with pytest.raises(BadRequest, match=f"another batch works on {url}: process {os.getppid()} on {host}"):
                storage.hold(tmp_path)
        else:
            storage.hold(tmp_path)
    storage.release()
    assert not driver.exists()


def test_the_journal_is_copied_while_the_batch_runs(
    url: str, bucket: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sdsage.batch.storage.BEAT", 0.05)
    (tmp_path / FOLDER).mkdir()
    told: list[Any] = []
    with closing(Journal(tmp_path)) as journal, Copies(Storage(url), tmp_path, told.append, ("results.jsonl",)):
        for key in ("a", "b"):
            journal.put([Row(key, 1, "img-gen", "m", "a.png", 1, {})])
            assert wait_until(lambda key=key: key in stored_keys(bucket))
        assert (bucket / FOLDER / "driver.json").exists()
        (tmp_path / "results.jsonl").write_text("{}")
    assert (bucket / "results.jsonl").read_text() == "{}"
    assert told == []


def stored_keys(bucket: Path) -> list[str]:
    with (
        suppress(sqlite3.Error),
        closing(sqlite3.connect(f"file:{bucket / FOLDER / NAME}?immutable=1", uri=True)) as db,
    ):
        return [key for (key,) in db.execute("SELECT key FROM jobs")]
    return []
