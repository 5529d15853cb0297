"""Batches on the tiny models: one load, resuming, failures, crashes, Ctrl-C, and what is seen of them."""

import json
import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from batch_tools import (
    DEFAULTS,
    VIDEO,
    batch,
    check_whole,
    events,
    killed_in_job,
    many,
    pixels,
    results,
    status,
    write_jobs,
)
from conftest import PACKAGE, ROOT
from test_worker_cli import LIGHT
from worker_tools import LONG, gone, sdsage_command, wait_until, workers_of

import sdsage
from sdsage.batch.journal import FOLDER
from sdsage.batch.journal import NAME as JOURNAL
from sdsage.batch.places import visible_gpu

pytestmark = pytest.mark.usefixtures("empty_folder")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))


def test_two_models_two_loads_and_the_bytes_of_single_runs() -> None:
    entries = [
        {"prompt": "a cat", "seed": 1, "output": "out/1.png"},
        {**VIDEO, "seed": 2, "output": "out/2.png"},
        {"prompt": "a dog", "seed": 3, "output": "out/3.png"},
    ]
    write_jobs("jobs.jsonl", entries)
    seen = events(batch("jobs.jsonl", "--json").stdout)
    assert [e["job"] for e in seen if e["event"] == "job" and e["state"] == "done"] == [1, 3, 2]
    assert [e["stage"] for e in seen if e["event"] == "stage"].count("load") == 2
    last = seen[-1]
    assert (last["event"], last["exit_code"]) == ("result", 0)
    assert (last["total"], last["done"], last["failed"], last["left"], last["loads"]) == (3, 3, 0, 0, 2)
    check_whole("out", 3)
    small = ["-W", "64", "-H", "64", "--steps", "1", "-t", "1", "-p", "a cat", "--device", "cpu", "-q"]
    for command, output in (
        (["img-gen", "--preset", "tiny-flux", *small, "-s", "1"], "1.png"),
        (["img-gen", "--preset", "tiny-flux", *small, "-p", "a dog", "-s", "3"], "3.png"),
        (["vid-gen", "--preset", "tiny-random", *small, "-s", "2", "--high-noise-steps", "1", "--video-frames", "1",
          "--cfg-scale", "1"], "2.png"),
    ):  # fmt: skip
        with sdsage_command(*command, "-o", output) as process:
            process.communicate(timeout=LONG)
        assert process.returncode == 0
        assert pixels(output) == pixels(f"out/{output}")


def test_a_killed_batch_goes_on_where_it_was() -> None:
    """Job 1 is left alone, 2 is made again, 3 to 5 run; nothing twice."""
    write_jobs("jobs.jsonl", many(5))
    killed_in_job(2)
    first = os.stat("out/1.png")
    assert status()["done"] == 1
    seen = events(batch("jobs.jsonl", "--json").stdout)
    assert [e["job"] for e in seen if e["event"] == "job" and e["state"] == "done"] == [2, 3, 4, 5]
    assert os.stat("out/1.png").st_mtime_ns == first.st_mtime_ns
    check_whole("out", 5)
    assert [e["event"] for e in events(batch("jobs.jsonl", "--json").stdout)] == ["start", "result"]


def test_a_kill_between_the_file_and_the_journal_loses_nothing() -> None:
    """The journal is as it was a moment before the end of job 2."""
    write_jobs("jobs.jsonl", many(2))
    batch("jobs.jsonl")
    before, checkpoint = os.stat("out/2.png"), Path("out/.2.png.sdsage-checkpoint")
    with sqlite3.connect(Path("out", FOLDER, JOURNAL)) as db:
        db.execute("UPDATE jobs SET state = 'running', files = '[]' WHERE number = 2")
    checkpoint.write_bytes(b"x")
    seen = events(batch("jobs.jsonl", "--json").stdout)
    assert [e["event"] for e in seen] == ["start", "note", "result"]
    assert seen[1]["text"] == "2.png was finished by the run before"
    assert os.stat("out/2.png").st_mtime_ns == before.st_mtime_ns
    check_whole("out", 2)


def test_frames_of_a_killed_run_are_replaced() -> None:
    """Some of them had got their names."""
    write_jobs("jobs.jsonl", [{**VIDEO, "video_frames": 5, "output": "out/f_%d.png"}])
    batch("jobs.jsonl")
    good = [pixels(f"out/f_{i}.png") for i in range(5)]
    with sqlite3.connect(Path("out", FOLDER, JOURNAL)) as db:
        db.execute("UPDATE jobs SET state = 'running', files = '[]'")
    for i in (3, 4):
        Path(f"out/f_{i}.png").unlink()
    batch("jobs.jsonl")
    assert [pixels(f"out/f_{i}.png") for i in range(5)] == good
    assert [len(row["files"]) for row in results()] == [5]


def test_what_a_killed_process_left_unfinished_goes() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        pass
    Path("out").mkdir()
    mine, its = (Path("out", f".sdsage-{pid}-{'0' * 16}.part") for pid in (os.getpid(), ended.pid))
    for path in (mine, its, Path("out", ".sdsage-other.part")):
        path.write_bytes(b"x")
    write_jobs("jobs.jsonl", many(1))
    batch("jobs.jsonl")
    assert sorted(path.name for path in Path("out").glob("*.part")) == sorted([".sdsage-other.part", mine.name])


def test_prompts_of_a_file_need_one_load_and_a_bad_line_has_its_number() -> None:
    lines = [
        {"prompt": p, "width": 64 + 16 * i, "output": "out/{prompt}.png"} for i, p in enumerate(["cat", "dog", "owl"])
    ]
    write_jobs("jobs.jsonl", lines)
    seen = events(batch("jobs.jsonl", "--json").stdout)
    assert [e["stage"] for e in seen if e["event"] == "stage"].count("load") == 1
    assert {"cat.png", "dog.png", "owl.png"} < set(os.listdir("out"))
    write_jobs("bad.jsonl", [lines[0], {**lines[1], "width": "wide"}, lines[2]])
    said = batch("bad.jsonl", "--json", code=2)
    assert "bad.jsonl, line 3 (entry 2), width: --width wide can't be used" in said.stderr
    assert [e["event"] for e in events(said.stdout)] == ["start", "error"]


def test_a_job_with_a_limit_of_memory_has_a_context_of_its_own() -> None:
    """Without a limit the second expert may lie on the GPU beside the first."""
    given = {**VIDEO, "offload_to_cpu": True}
    write_jobs("jobs.jsonl", [{**given, "vram": v, "output": f"out/{v}.png"} for v in ("auto", "24")])
    seen = events(batch("jobs.jsonl", "--json").stdout)
    assert (seen[-1]["done"], seen[-1]["loads"]) == (2, 2)


@pytest.mark.parametrize("harm", ["truncated", "changed", "missing"])
def test_outputs_that_are_not_whole_are_made_again(harm: str) -> None:
    write_jobs("jobs.jsonl", many(3))
    batch("jobs.jsonl")
    good = pixels("out/2.png")
    data = Path("out/2.png").read_bytes()
    if harm == "missing":
        Path("out/2.png").unlink()
    else:
        Path("out/2.png").write_bytes(data[:-20] if harm == "truncated" else data[:-1] + bytes([data[-1] ^ 1]))
    seen = events(batch("jobs.jsonl", "--json").stdout)
    assert [e["job"] for e in seen if e["event"] == "job" and e["state"] == "done"] == [2]
    assert "out/2.png is missing or damaged, and is made again" in [e["text"] for e in seen if e["event"] == "note"]
    assert pixels("out/2.png") == good
    check_whole("out", 3)


def test_a_changed_job_is_a_new_one_and_replaces_nothing_unasked() -> None:
    write_jobs("jobs.jsonl", many(2))
    batch("jobs.jsonl")
    before = {path: path.read_bytes() for path in Path("out").glob("*.png")}
    write_jobs("jobs.jsonl", many(2), {**DEFAULTS, "prompt": "a dog"})
    said = batch("jobs.jsonl", code=2).stderr
    assert said.count("exists, and is not of this job as it is now") == 2
    assert {path: path.read_bytes() for path in before} == before
    batch("jobs.jsonl", "--overwrite")
    assert not any(path.read_bytes() == data for path, data in before.items())
    check_whole("out", 2)
    write_jobs("jobs.jsonl", [*many(2), {"seed": 9, "output": "out/nine.png"}], {**DEFAULTS, "prompt": "a dog"})
    assert [e["job"] for e in events(batch("jobs.jsonl", "--json").stdout) if e["event"] == "job"] == [3, 3]


def test_files_of_others_are_not_replaced(empty_folder: Path) -> None:
    Path("out").mkdir()
    Path("out/2.png").write_bytes(b"mine")
    write_jobs("jobs.jsonl", many(3))
    for more in ([], ["--dry-run"]):
        said = batch("jobs.jsonl", *more, code=2).stderr
        assert "output out/2.png (jobs.jsonl, line 3 (entry 2)) exists, and is not of this job as it is now" in said
    assert names(empty_folder / "out") == ["2.png"]
    assert os.listdir("out") == ["2.png"]


def test_two_jobs_with_one_output_are_both_named(empty_folder: Path) -> None:
    write_jobs("jobs.jsonl", [{"steps": [1, 2], "output": "a.png"}, {"seed": 3, "output": "./a.png"}])
    said = batch("jobs.jsonl", code=2).stderr
    assert (
        "a.png would be written by job 1 (jobs.jsonl, line 2 (entry 1)) and by job 2 (jobs.jsonl, line 2 (entry 1))"
        in said
    )
    assert "and by job 3 (jobs.jsonl, line 3 (entry 2)): put {seed}, {index}" in said
    assert os.listdir(empty_folder) == ["jobs.jsonl"]


def test_a_drawn_seed_stays(empty_folder: Path) -> None:
    write_jobs("jobs.jsonl", [{"seed": -1, "batch_count": 2, "output": "out/{index}_{seed}.png"}])
    batch("jobs.jsonl", "--limit", "1")
    batch("jobs.jsonl")
    found = results()
    seeds = [row["seed"] for row in found]
    assert len(set(seeds)) == 2
    assert names(empty_folder / "out")[:2] == [f"{i}_{seed}.png" for i, seed in enumerate(seeds, 1)]
    metadata = sdsage.media.read_metadata(found[0]["files"][0]["file"])
    assert metadata.data["seed"] == seeds[0]


def test_a_failure_is_written_down_and_the_batch_goes_on() -> None:
    Path("in.png").write_bytes(b"no picture")
    entries = [
        {"output": "out/1.png"},
        {"init_img": "in.png", "output": "out/2.png"},
        {"seed": 3, "output": "out/3.png"},
    ]
    write_jobs("jobs.jsonl", entries)
    done = batch("jobs.jsonl", code=1)
    assert "error: job 2 (out/2.png) failed: " in done.stderr
    assert "1 of 3 jobs failed" in done.stderr
    assert [(r["job"], r["state"]) for r in results()] == [(1, "done"), (2, "failed"), (3, "done")]
    assert "in.png" in results()[1]["message"]
    assert batch("jobs.jsonl", code=1).stderr.count("job 2 (out/2.png)") == 0  # not again unasked
    from PIL import Image

    Image.new("RGB", (64, 64), "red").save("in.png")  # another file: another job
    batch("jobs.jsonl")
    check_whole("out", 3)


def test_failures_may_end_a_batch_and_are_retried_when_asked() -> None:
    Path("in.png").write_bytes(b"no picture")
    entries = [
        {"init_img": "in.png", "seed": [1, 2, 3], "output": "out/{seed}.png"},
        {"seed": 4, "output": "out/4.png"},
    ]
    write_jobs("jobs.jsonl", entries)
    batch("jobs.jsonl", "--max-failures", "2", code=1)
    assert [(r["job"], r["state"]) for r in results()] == [(1, "failed"), (2, "failed")]
    assert status()["left"] == 2
    batch("jobs.jsonl", "--retry-failed", "--only", "2,4", code=1)
    found = {r["job"]: r for r in status()["jobs"]}
    assert [(found[n]["state"], found[n]["attempts"]) for n in (1, 2, 3, 4)] == [
        ("failed", 1), ("failed", 2), ("waiting", 0), ("done", 1)]  # fmt: skip


def test_the_driver_does_not_load_the_engine() -> None:
    write_jobs("jobs.jsonl", [{**VIDEO, "vram": "auto", "output": "out/1.gif"}, *many(1, "out")])
    for more in (["--dry-run"], []):
        command = [sys.executable, "-P", "-c", LIGHT, "batch", "jobs.jsonl", *more]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines()[-1] == "loaded False False"


def test_only_takes_numbers_and_patterns() -> None:
    write_jobs("jobs.jsonl", many(12))
    seen = batch("jobs.jsonl", "--dry-run", "--only", "3,5-6,out/1?.png,9.png", "--json").stdout
    assert [job["job"] for job in events(seen)[-1]["jobs"]] == [3, 5, 6, 9, 10, 11, 12]
    assert "--only 13 names no job: there are 1 to 12" in batch("jobs.jsonl", "--only", "13", code=2).stderr


def test_the_plan(empty_folder: Path) -> None:
    write_jobs("jobs.jsonl", [*many(2), {**VIDEO, "output": "out/v.png"}])
    said = batch("jobs.jsonl", "--dry-run").stdout.splitlines()
    assert said[-1] == "3 jobs to run, 0 of 3 done already; 2 model loads; time: not known yet for 3 of them"
    assert os.listdir(empty_folder) == ["jobs.jsonl"]
    batch("jobs.jsonl", "--limit", "1")
    found = events(batch("jobs.jsonl", "--dry-run", "--json").stdout)[-1]
    assert (found["total"], found["done"], found["loads"], found["seconds_unknown"]) == (3, 1, 2, 1)
    assert found["exist"] == ["out/1.png"]
    second, video = found["jobs"]
    assert second["seconds"] > 0
    assert (video["seconds"], video["load"], video["mode"]) == (None, True, "vid-gen")
    assert video["memory_gib"] > 0


# ---- crashes


def kill_workers(pid: int) -> None:
    for worker in workers_of(pid):
        os.kill(worker, signal.SIGKILL)


def test_a_job_that_ends_its_worker_twice_is_set_aside() -> None:
    begun: list[int] = []

    def hear(event: Any) -> None:
        if event.get("job") != 2 or len(begun) > 2:
            return
        if event["event"] == "job" and event["state"] == "running":
            begun.append(0)
        elif event["event"] == "stage" and begun[-1] == 0:  # once for each attempt: more of them are on their way
            begun[-1] = 1
            kill_workers(os.getpid())

    done = sdsage.Batch([{**DEFAULTS, **entry} for entry in many(3)]).run(on_event=hear, cpu_workers=1)
    assert [row.state for row in done.rows] == ["done", "aside", "done"]
    assert done.rows[1].crashes == 2
    assert "the worker process was ended by SIGKILL" in done.rows[1].message
    assert not Path("out/2.png").exists()
    done = sdsage.Batch([{**DEFAULTS, **entry} for entry in many(3)]).run(retry_failed=True, cpu_workers=1)
    assert [row.state for row in done.rows] == ["done"] * 3
    check_whole("out", 3)


def test_a_job_goes_on_from_its_steps_after_a_crash() -> None:
    killed = []

    def hear(event: Any) -> None:
        if event["event"] == "step" and event.get("overall_step") == 30 and not killed:
            killed.append(event)
            kill_workers(os.getpid())

    job = {**DEFAULTS, "steps": 40, "output": "out/a.png"}
    seen: list[Any] = []
    done = sdsage.Batch([job]).run(on_event=hear, on_result=seen.append, cpu_workers=1)
    assert (done.rows[0].state, done.rows[0].crashes, done.rows[0].attempts) == ("done", 1, 2)
    assert seen[0]["summary"]["replayed_steps"] >= 29
    sdsage.Batch([{**job, "output": "whole/a.png"}]).run(cpu_workers=1)
    assert pixels("out/a.png") == pixels("whole/a.png")
    check_whole("out", 1)


def test_memory_that_does_not_suffice_is_tried_once_with_less(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The picture is too large for the VAE's encoder at once; in tiles it fits."""
    from PIL import Image

    Image.new("RGB", (512, 512), "red").save("in.png")
    folder = str(ROOT / "tests" / "limited")
    limited = {"DECODE_MB": "8", "DECODE_ONCE": str(tmp_path / "once"), "DECODE_STAGE": "encode_image"}
    malloc = {"MALLOC_ARENA_MAX": "1", "MALLOC_TRIM_THRESHOLD_": "0", "MALLOC_MMAP_THRESHOLD_": "1000000"}
    for name, value in ({f"SDSAGE_TEST_{k}": v for k, v in limited.items()} | malloc).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PYTHONPATH", f"{folder}{os.pathsep}{PACKAGE}")
    monkeypatch.setattr(sys, "path", [folder, *sys.path])
    job = {**VIDEO, "preset": "tiny-ti2v", "init_img": "in.png", "width": 512, "height": 512, "output": "out/a.png"}
    job.pop("high_noise_steps")
    done = sdsage.Batch([job]).run(cpu_workers=1)
    (row,) = done.rows
    assert (row.state, row.attempts, row.memory) == ("done", 2, {"vram": None, "vae_tiling": True}), row.message
    assert json.loads(row.summary)["options"]["vae_tiling"] is True


# ---- the end


@pytest.mark.parametrize("where", ["load", "step 20", "decode"])
def test_ctrl_c(where: str) -> None:
    write_jobs("jobs.jsonl", [{"output": "out/1.png"}, {**VIDEO, "steps": 60, "output": "out/2.png"}])
    with sdsage_command("batch", "jobs.jsonl", "--json") as process:
        assert process.stdout is not None
        for line in process.stdout:
            event = json.loads(line)
            here = f"step {event.get('overall_step')}" if event["event"] == "step" else event.get("stage")
            if event.get("job") == 2 and here == where:
                break
        workers = workers_of(process.pid)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=LONG)
    assert process.returncode == 130, err
    assert json.loads(out.splitlines()[-1])["exit_code"] == 130
    assert "Traceback" not in err
    assert all(map(gone, workers))
    found = status()
    assert [row["state"] for row in found["jobs"]] == ["done", "waiting"]
    assert found["running"] is None
    batch("jobs.jsonl")
    check_whole("out", 2)
    replayed = results()[1]["summary"]["replayed_steps"]
    assert replayed >= {"load": 0, "step 20": 19, "decode": 0}[where]


def test_a_second_batch_on_the_folder_says_who_is_there() -> None:
    write_jobs("jobs.jsonl", [{**VIDEO, "steps": 400, "output": "out/1.png"}])
    write_jobs("other.jsonl", [{"output": "out/2.png"}])
    with sdsage_command("batch", "jobs.jsonl") as process:
        assert wait_until(Path("out/.sdsage-batch/live.json").exists)
        said = batch("other.jsonl", code=2).stderr
        assert f"another batch works on out: process {process.pid} on {os.uname().nodename}, since " in said
        found = status()
        assert found["running"]["pid"] == process.pid
        (worker,) = found["running"]["workers"]
        assert (worker["job"], worker["output"]) == (1, "out/1.png")
        shown = batch("status", "out").stdout
        assert f"process {process.pid}" in shown
        assert "cpu: job 1, out/1.png, tiny-random" in shown
        process.kill()
        process.communicate()
    batch("other.jsonl")
    assert os.path.exists("out/2.png")


def test_status_without_a_batch() -> None:
    assert "there is no batch in nowhere" in batch("status", "nowhere", code=2).stderr


def test_several_workers_share_the_jobs() -> None:
    write_jobs("jobs.jsonl", many(6))
    seen = events(batch("jobs.jsonl", "--cpu-workers", "2", "--json").stdout)
    assert {e["worker"] for e in seen if e["event"] == "job"} == {"cpu 1", "cpu 2"}
    check_whole("out", 6)


def test_a_gpu_is_the_only_one_that_its_worker_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers count what this process may use."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert visible_gpu(1) == "1"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,GPU-7")
    assert [visible_gpu(0), visible_gpu(1)] == ["5", "GPU-7"]


@pytest.mark.gpu
def test_two_gpus_are_both_busy() -> None:
    if len([d for d in sdsage.devices() if d.name.startswith("cuda")]) < 2:
        pytest.skip("there are not two CUDA devices")
    write_jobs("jobs.jsonl", many(8))
    seen = events(batch("jobs.jsonl", "--gpus", "0,1", "--json").stdout)
    assert {e["worker"] for e in seen if e["event"] == "job"} == {"gpu 0", "gpu 1"}
    assert seen[-1]["loads"] == 2
    check_whole("out", 8)


def test_gpus_that_are_not_there(empty_folder: Path) -> None:
    count = len([d for d in sdsage.devices() if d.kind in ("gpu", "igpu")])
    write_jobs("jobs.jsonl", many(1))
    said = batch("jobs.jsonl", "--gpus", str(count), code=2).stderr
    assert f"--gpus {count} names GPU {count}: there are " in said
    assert os.listdir(empty_folder) == ["jobs.jsonl"]
