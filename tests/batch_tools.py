"""What the tests of batches share: small jobs, the command in a process of its own, and a look at what is there."""

import hashlib
import json
import subprocess
from pathlib import Path
from typing import Any

from worker_tools import LONG, sdsage_command

# The smallest job that goes through every stage: 64x64, one frame, one step.
DEFAULTS: dict[str, Any] = {"mode": "img-gen", "preset": "tiny-flux", "prompt": "a cat", "threads": 1}
DEFAULTS |= {"width": 64, "height": 64, "steps": 1}
VIDEO = {
    **DEFAULTS,
    "mode": "vid-gen",
    "preset": "tiny-random",
    "high_noise_steps": 1,
    "video_frames": 1,
    "cfg_scale": 1,
}


def write_jobs(path: str | Path, entries: list[dict[str, Any]], defaults: dict[str, Any] = DEFAULTS) -> str:
    """A job file of JSON lines."""
    lines = [{"defaults": defaults}, *entries]
    Path(path).write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return str(path)


def many(count: int, folder: str = "out") -> list[dict[str, Any]]:
    return [{"seed": seed, "output": f"{folder}/{{seed}}.png"} for seed in range(1, count + 1)]


def batch(*args: str, code: int = 0) -> Any:
    """`sdsage batch`; stdout and stderr of what has ended."""
    with sdsage_command("batch", *args) as process:
        out, err = process.communicate(timeout=10 * LONG)
    assert process.returncode == code, (process.returncode, out[-2000:], err[-2000:])
    assert "Traceback" not in err, err
    return subprocess.CompletedProcess(args, process.returncode, out, err)


def killed_in_job(number: int, *args: str) -> None:
    """`sdsage batch jobs.jsonl`, killed once a worker is at that job."""
    with sdsage_command("batch", "jobs.jsonl", "--json", *args) as process:
        assert process.stdout is not None
        for line in process.stdout:
            event = json.loads(line)
            if event["event"] == "stage" and event["job"] == number:
                break
        process.kill()
        process.wait()
        process.communicate()


def events(text: str) -> list[dict[str, Any]]:
    """The lines of --json."""
    return [json.loads(line) for line in text.splitlines()]


def results(folder: str | Path = "out") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(folder) / "results.jsonl").read_text(encoding="utf-8").splitlines()]


def status(folder: str | Path = "out") -> dict[str, Any]:
    found: dict[str, Any] = json.loads(batch("status", str(folder), "--json").stdout)
    return found


def check_whole(folder: str | Path, count: int) -> None:
    """Each output once, none damaged, and the journal says the same."""
    rows = results(folder)
    assert [row["job"] for row in rows] == list(range(1, count + 1))
    assert {row["state"] for row in rows} == {"done"}
    files = [entry for row in rows for entry in row["files"]]
    assert len({entry["file"] for entry in files}) == count
    for entry in files:
        data = Path(entry["file"]).read_bytes()
        assert (len(data), hashlib.sha256(data).hexdigest()) == (entry["bytes"], entry["sha256"])
    known = {Path(entry["file"]).name for entry in files} | {".sdsage-batch", "results.jsonl", "contact-sheet.html"}
    assert {path.name for path in Path(folder).iterdir()} == known


def pixels(path: str | Path) -> bytes:
    from PIL import Image

    with Image.open(path) as image:
        return image.convert("RGB").tobytes()
