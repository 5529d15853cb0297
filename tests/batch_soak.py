"""Endurance of batches: processes are killed at random moments, and at the end each output is there once, undamaged.

    python tests/batch_soak.py [--jobs 1000] [--kills 100] [--seed 1]

The smallest jobs: 64x64, one frame, one step. First the driver (`sdsage batch`) and its worker are killed (SIGKILL) at
random moments, and the command is given again, until everything is done. Then the same jobs run undisturbed in another
folder, for what a job costs beyond generation, and for memory. Results go to benchmarks/results/soak.json; past a limit
the exit code is 1.
"""

import argparse
import json
import os
import platform
import random
import signal
import sqlite3
import statistics
import tempfile
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

from batch_tools import check_whole, many, results, write_jobs
from worker_tools import sdsage_command, workers_of

from sdsage.batch.journal import FOLDER, NAME

RESULT = Path(__file__).parent.parent / "benchmarks" / "results" / "soak.json"
EVENTS = 8  # lines of --json that a job gives, about
MOST_BEYOND = 50  # ms of a job beyond generation
MOST_GROWTH = 50  # MiB of a process from the 10th job to the last
RETRY = "--retry-failed"  # a job whose worker was killed twice was set aside


class Killer:
    """Kills the driver or its worker, some lines after the last time, or some time after a start."""

    def __init__(self, kills: int, jobs: int, seed: int) -> None:
        self._random = random.Random(seed)
        self.left = kills
        self._apart = 2 * EVENTS * jobs // (kills + 1)  # lines; half of it on average
        self.driver = self.worker = 0
        self._next()

    def _next(self) -> None:
        self._lines = self._random.randint(1, max(1, self._apart))
        self._early = self._random.random() < 0.2

    def started(self, pid: int) -> bool:
        """Perhaps before the batch has said anything."""
        if self.left and self._early:
            time.sleep(self._random.uniform(0, 1.5))
            return self._kill(pid, driver=True)
        return False

    def line(self, pid: int) -> bool:
        """Another line was read; True when the driver is gone."""
        self._lines -= 1
        if not self.left or self._lines > 0:
            return False
        time.sleep(self._random.uniform(0, 0.05))
        return self._kill(pid, driver=self._random.random() < 0.5)

    def _kill(self, pid: int, driver: bool) -> bool:
        workers = [] if driver else workers_of(pid)
        for worker in workers:
            os.kill(worker, signal.SIGKILL)
        if not workers:
            os.kill(pid, signal.SIGKILL)
        self.left -= 1
        self.worker += bool(workers)
        self.driver += not workers
        self._next()
        return not workers


def endure(jobs: int, kills: int, seed: int) -> dict[str, Any]:
    """In the current folder. Asserts that nothing is lost, made twice or damaged."""
    path = write_jobs("jobs.jsonl", many(jobs))
    killer, made, runs, code = Killer(kills, jobs, seed), Counter[int](), 0, -1
    while code != 0:
        runs += 1
        assert runs <= 2 * kills + 3, "the batch does not come to an end"
        with sdsage_command("batch", path, "--json", RETRY) as process:
            killed = killer.started(process.pid)
            assert process.stdout is not None
            for line in process.stdout:
                if not line.endswith("\n"):  # it was killed while it wrote
                    break
                event = json.loads(line)
                if event["event"] == "job" and event["state"] == "done":
                    made[event["job"]] += 1
                killed = killed or killer.line(process.pid)
            _, err = process.communicate()
        code = process.returncode
        assert code in (0, 1) or (killed and code == -signal.SIGKILL), (code, err)
    assert set(made.values()) <= {1}, made.most_common(3)
    check_whole("out", jobs)
    with sqlite3.connect(Path("out", FOLDER, NAME)) as db:
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        (done,) = db.execute("SELECT count(*) FROM jobs WHERE state = 'done'").fetchone()
    assert done == jobs
    return {"jobs": jobs, "kills_of_the_driver": killer.driver, "kills_of_a_worker": killer.worker, "runs": runs,
            "adopted": jobs - len(made), "seed": seed}  # fmt: skip


def rss(pid: int) -> int:
    """Bytes of memory that a process holds."""
    return int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


def measure(jobs: int) -> dict[str, Any]:
    """What a job costs beyond generation, and memory at the 10th and the last job."""
    path = write_jobs("calm.jsonl", many(jobs, "calm"))
    ends: list[float] = []
    memory: dict[int, dict[str, float]] = {}
    with sdsage_command("batch", path, "--json") as process:
        assert process.stdout is not None
        for line in process.stdout:
            event = json.loads(line)
            if event["event"] != "job":
                continue
            if event["state"] == "done":
                ends.append(event["elapsed"])
            elif event["job"] in (10, jobs):  # it begins: the one before is over
                pids = {"driver": process.pid, "worker": workers_of(process.pid)[0]}
                memory[event["job"]] = {name: round(rss(pid) / 2**20, 1) for name, pid in pids.items()}
        process.communicate()
    assert process.returncode == 0
    made = [row["seconds"] for row in results("calm")]
    whole = [after - before for before, after in pairwise(ends)]
    beyond = [1000 * (a - b) for a, b in zip(whole, made[1:], strict=True)]
    return {
        "beyond_generation_ms": {
            "median": round(statistics.median(beyond), 1),
            "mean": round(statistics.mean(beyond), 1),
            "95th percentile": round(statistics.quantiles(beyond, n=20)[-1], 1),
        },
        "generation_ms": round(1000 * statistics.median(made), 1),
        "rss_mib": {f"job {number}": values for number, values in memory.items()},
    }


def past_limits(calm: dict[str, Any]) -> list[str]:
    """A sentence for each figure that is too large."""
    cost = calm["beyond_generation_ms"]["mean"]
    wrong = [f"a job costs {cost} ms beyond generation, more than {MOST_BEYOND}"] if cost >= MOST_BEYOND else []
    first, last = list(calm["rss_mib"].values())
    grown = {name: round(last[name] - first[name], 1) for name in first}
    return wrong + [
        f"the {name} grew by {by} MiB, more than {MOST_GROWTH}" for name, by in grown.items() if by > MOST_GROWTH
    ]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        begun = time.monotonic()
        found = {"killed": endure(asked.jobs, asked.kills, asked.seed)}
        found["killed"]["seconds"] = round(time.monotonic() - begun)
        print(json.dumps(found), flush=True)
        found["calm"] = measure(asked.jobs)
        os.chdir("/")
    found["machine"] = {"cores": os.cpu_count(), "system": platform.platform(), "load": os.getloadavg()}
    RESULT.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(found, indent=2))
    if wrong := past_limits(found["calm"]):
        raise SystemExit("\n".join(wrong))


if __name__ == "__main__":
    main()
