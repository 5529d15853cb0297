"""How far one driver of `sdsage batch --ray` carries: its costs for a job are measured, and a batch is simulated.

    python benchmarks/batch_scale.py

Measured: the real driver with its real journal and 10,000 jobs, on places that answer at once with what a tiny job
said; what the journal alone writes; and, through an actor of a local Ray cluster, what the messages of a job cost the
driver. The simulation then gives these costs to one driver with up to 1,000 workers, for jobs of some seconds to
minutes. Results go to benchmarks/results/batch_scale.json.
"""

import heapq
import json
import os
import pickle
import platform
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from sdsage.batch.expand import Wanted
from sdsage.batch.journal import Journal
from sdsage.batch.lock import Lock
from sdsage.batch.places import DONE, Fixed, LocalPlace, Outcome, Task, Tell
from sdsage.batch.plan import Job, Plan
from sdsage.batch.run import Driver, Limits
from sdsage.batch.scratch import Sent
from sdsage.batch.state import Disk, settle

RESULT = Path(__file__).parent / "results" / "batch_scale.json"
JOBS = 10_000
STEPS = 30  # of a job: an event for each
BEATS = 1.0  # messages a second from a worker that is at work
CLIP = 4 << 20  # bytes of an output: a short video
TINY = {"preset": "tiny-flux", "prompt": "a cat", "width": "64", "height": "64", "steps": "1", "seed": "1"}


def sample(folder: Path) -> tuple[Task, Outcome, list[Any]]:
    """A tiny job: its task, its outcome and what it said."""
    task = Task(1, "0" * 64, "img-gen", TINY, str(folder / "sample.png"))
    said: list[Any] = []
    with closing(LocalPlace("cpu", "cpu", threads=1)) as place:
        outcome = place.run(task, lambda event, fields: said.append((event, dict(fields))))
    assert outcome.state == DONE, outcome.message
    return task, outcome, said


class Instant:
    """A place that answers at once what the sample said, as a job of `STEPS` steps."""

    def __init__(self, name: str, outcome: Outcome, step: Any) -> None:
        self.name, self._outcome, self._step = name, outcome, step

    def run(self, task: Task, tell: Tell) -> Outcome:
        for _ in range(STEPS):
            tell(*self._step)
        o = self._outcome
        files = [[task.output, *o.files[0][1:]]]
        return Outcome(DONE, files=files, summary=dict(o.summary), seconds=1.0, poster=o.poster)

    def stop(self) -> None: ...

    def close(self) -> None: ...


def drive(workers: int, outcome: Outcome, step: Any) -> dict[str, float]:
    """The real driver over `JOBS` jobs."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        jobs = [
            Job(Wanted(i, "", "img-gen", dict(TINY), dict(TINY), ""), f"{i:064}", "group", "tiny", "kind",
                str(folder / f"{i}.png"), {}, i, 1, True)
            for i in range(1, JOBS + 1)
        ]  # fmt: skip
        lock = Lock(folder)
        ends: list[float] = []
        with closing(Journal(folder)) as journal:
            state = settle(Plan("jobs", folder, jobs), {}, False, Disk(folder))
            journal.begin(state.rows.values())
            places = [Instant(f"worker {i}", outcome, step) for i in range(workers)]
            begun, cpu = time.monotonic(), time.process_time()
            driver = Driver(
                state, Fixed(places), journal, lock, lambda event: None, lambda row: ends.append(time.monotonic())
            )
            done = driver.run(Limits())
            whole, cpu = time.monotonic() - begun, time.process_time() - cpu
        lock.release()
        assert done.progress.done == JOBS
    return {
        "workers": workers,
        "jobs_a_second": round(JOBS / (ends[-1] - begun), 1),
        "cpu_ms_a_job": round(1000 * cpu / JOBS, 3),
        "end_seconds": round(begun + whole - ends[-1], 2),
    }


def journal_alone(outcome: Outcome) -> dict[str, float]:
    """Writes a second, each one through to the disk, and what a job leaves."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        lock = Lock(folder)
        jobs = [
            Job(
                Wanted(1, "", "img-gen", {}, dict(TINY), ""), "1", "", "tiny", "", str(folder / "1.png"), {}, 1, 1, True
            )
        ]
        with closing(Journal(folder)) as journal:
            row = settle(Plan("jobs", folder, jobs), {}, False, Disk(folder)).row(jobs[0])
            row.summary = json.dumps(outcome.summary, default=str)
            count, times = 3000, []
            for i in range(count):
                row.key, begun = f"{i:064}", time.monotonic()
                journal.ended(row, outcome.poster)
                times.append(time.monotonic() - begun)
            size = journal.path.stat().st_size
        lock.release()
    return {
        "writes_a_second": round(1 / statistics.median(times)),
        "mean_ms": round(1000 * statistics.mean(times), 2),
        "bytes_a_job": size // count,
    }


class Echo:
    """Sends messages, as an actor of a batch does."""

    def run(self, message: Any, count: int) -> Iterator[Any]:
        for _ in range(count):
            yield message


def over_ray(messages: dict[str, Any], chunk: bytes) -> dict[str, Any]:
    """Milliseconds of the driver's processor for one message, in 8 threads, and how fast outputs come."""
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}
    import ray

    local = {"_node_ip_address": "127.0.0.2", "include_dashboard": False}
    ray.init(num_cpus=2, log_to_driver=False, object_store_memory=1 << 30, **local)
    try:
        echoes = [ray.remote(Echo).options(num_cpus=0).remote() for _ in range(2)]

        def take(echo: Any, message: Any, count: int) -> None:
            for ref in echo.run.options(num_returns="streaming").remote(message, count):
                ray.get(ref)

        def measured(message: Any, count: int, threads: int) -> tuple[float, float]:
            takers = [threading.Thread(target=take, args=(echoes[i % 2], message, count)) for i in range(threads)]
            begun, cpu = time.monotonic(), time.process_time()
            for taker in takers:
                taker.start()
            for taker in takers:
                taker.join()
            all_of_them = count * threads
            return (time.process_time() - cpu) / all_of_them, all_of_them / (time.monotonic() - begun)

        measured(b"", 20, 2)
        found: dict[str, Any] = {}
        for name, message in messages.items():
            cpu, rate = measured(message, 250, 8)
            found[name] = {"cpu_ms": round(1000 * cpu, 3), "a_second": round(rate, 1)}
        _, jobs = measured(None, 1, 64)  # 64 calls of one message each
        cpu, rate = measured(chunk, 10, 2)
        found["call"] = {"a_second": round(jobs, 1)}
        found["output"] = {
            "mib_a_second": round(rate * len(chunk) / 2**20, 1),
            "cpu_ms_a_mib": round(1000 * cpu / (len(chunk) / 2**20), 3),
        }
        return found
    finally:
        ray.shutdown()


def simulate(workers: int, seconds: float, cost: float, beat: float) -> dict[str, Any]:
    """`JOBS` jobs of about so many seconds; the driver serves one thing after another.

    Args:
        cost: driver's seconds for a job, from its end to the begin of the next one.
        beat: driver's seconds for the message of a second's work.
    """
    free = 0.0  # when the driver is free again
    load = workers * BEATS * beat  # part of its time that goes to messages of running jobs
    slow = cost / max(1e-9, 1 - load) if load < 1 else float("inf")
    left, busy, waits = JOBS - workers, 0.0, 0.0
    ends = [seconds * (0.9 + 0.2 * i / workers) + i * slow for i in range(workers)]
    heapq.heapify(ends)
    if slow == float("inf"):
        return {"workers": workers, "job_seconds": seconds, "driver_busy": 1.0, "of_ideal": 0.0}
    last = 0.0
    while ends:
        end = heapq.heappop(ends)
        begun = max(end, free)
        free = begun + slow
        busy, waits, last = busy + slow, waits + free - end, free
        if left > 0:
            left -= 1
            heapq.heappush(ends, free + seconds * (0.9 + 0.2 * (left * 7919 % 1000) / 1000))
    ideal = JOBS / workers * seconds
    return {
        "workers": workers,
        "job_seconds": seconds,
        "driver_busy": round(busy / last * (1 - load) + load, 3),
        "mean_wait_ms": round(1000 * waits / JOBS, 1),
        "of_ideal": round(min(1.0, ideal / last), 3),
    }


def simulated(found: dict[str, Any]) -> dict[str, Any]:
    """From what was measured."""
    # What a job keeps the driver from other work: its own part and the journal's disk, then Ray's messages.
    ray = found["ray"]
    own = 1 / found["driver"][-1]["jobs_a_second"]
    fixed = own + (ray["outcome"]["cpu_ms"] + ray["second_of_events"]["cpu_ms"]) / 1000
    through = fixed + ray["output"]["cpu_ms_a_mib"] / 1000 * CLIP / 2**20
    beat = ray["second_of_events"]["cpu_ms"] / 1000
    costs = {"to_storage": fixed, "4_mib_to_the_driver": through, "second_of_work": beat}
    runs = {
        name: [simulate(w, s, cost, beat) for s in (1.0, 5.0, 30.0, 300.0) for w in (10, 100, 300, 1000)]
        for name, cost in (("to_storage", fixed), ("4_mib_to_the_driver", through))
    }
    return {"job_ms": {name: round(1000 * cost, 2) for name, cost in costs.items()}, "simulated": runs}


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        task, outcome, said = sample(Path(folder))
    step = next(entry for entry in said if entry[0] == "step")
    messages = {"task": Sent(task), "second_of_events": ("events", [step] * 3), "outcome": ("outcome", outcome)}
    sizes = {name: len(pickle.dumps(message, 5)) for name, message in messages.items()}
    found: dict[str, Any] = {"jobs": JOBS, "message_bytes": sizes, "journal": journal_alone(outcome)}
    print(json.dumps(found), flush=True)
    found["driver"] = []
    for workers in (1, 10, 100, 1000):
        found["driver"].append(drive(workers, outcome, step))
        print(json.dumps(found["driver"][-1]), flush=True)
    found["ray"] = over_ray({k: messages[k] for k in ("second_of_events", "outcome")}, b"x" * (8 << 20))
    print(json.dumps(found["ray"]), flush=True)
    found |= simulated(found)
    found["machine"] = {"cores": os.cpu_count(), "system": platform.platform(), "load": os.getloadavg()}
    RESULT.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(found["job_ms"]))
    for name, rows in found["simulated"].items():
        for row in rows:
            print(name, row)


if __name__ == "__main__":
    main()
