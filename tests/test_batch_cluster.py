"""Batches on a Ray cluster: several nodes of it on this machine, on loopback, with the tiny models on the CPU."""

import json
import os
import shutil
import signal
import sqlite3
import subprocess
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from batch_tools import DEFAULTS, batch, check_whole, events, many, pixels, results, status, write_jobs
from test_batch_storage import check_stored
from worker_tools import LONG, gone, sdsage_command, wait_until, workers_of

import sdsage
from sdsage.batch import cluster as on_cluster
from sdsage.batch.delivery import Parcel
from sdsage.batch.journal import FOLDER
from sdsage.batch.journal import NAME as JOURNAL
from sdsage.batch.places import Outcome, check_same, whole
from sdsage.errors import BadRequest, OutputError
from sdsage.tiny import cache_dir, ensure

pytest.importorskip("ray")

# A lost node is noticed in seconds; by default in half a minute.
QUICK = {"health_check_initial_delay_ms": 500, "health_check_period_ms": 500, "health_check_timeout_ms": 2000,
         "health_check_failure_threshold": 2}  # fmt: skip


class Nodes:
    """A cluster of a head without cores, and nodes that each have a core and a cache folder of their own."""

    def __init__(self, folder: str) -> None:
        from ray.cluster_utils import Cluster

        self._folder = folder
        head = {"num_cpus": 0, "temp_dir": self._folder, "include_dashboard": False, "_system_config": QUICK}
        self._cluster = Cluster(initialize_head=True, head_node_args=self._local(head))
        self.address = str(self._cluster.address)
        self.nodes: list[Any] = []
        ensure(["flux.gguf", "clip-l.safetensors", "taesd.safetensors"])
        self.add()

    def _local(self, more: dict[str, Any]) -> dict[str, Any]:
        return {"node_ip_address": "127.0.0.2", "object_store_memory": 80 << 20, **more}

    def add(self) -> None:
        cache = Path(self._folder, f"cache-{len(self.nodes)}")
        cache.mkdir()
        (cache / "tiny").symlink_to(cache_dir() / "tiny")
        more = {"num_cpus": 1, "env_vars": {"SDSAGE_CACHE_DIR": str(cache)}}
        self.nodes.append(self._cluster.add_node(**self._local(more)))

    def actors(self, node: Any) -> list[int]:
        raylet = self._raylet(node)
        return [pid for pid in children(raylet) if workers_of(pid)]

    def _raylet(self, node: Any) -> int:
        return int(node.all_processes["raylet"][0].process.pid)

    def stop(self, node: Any) -> None:
        """Its worker stands still."""
        for actor in self.actors(node):
            for worker in workers_of(actor):
                os.kill(worker, signal.SIGSTOP)

    def lose(self, node: Any) -> None:
        """All that ran on it is gone at once."""
        pids = [self._raylet(node), *children(self._raylet(node))]
        for pid in [worker for parent in pids for worker in workers_of(parent)] + pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        self._cluster.shutdown()


def children(pid: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError, ValueError):
            if int((entry / "stat").read_text().rpartition(")")[2].split()[1]) == pid:
                found.append(int(entry.name))
    return found


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    patch = pytest.MonkeyPatch()
    patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    patch.setenv("RAY_AUTH_MODE", "disabled")  # it would write a token into the home folder
    folder = tempfile.mkdtemp(prefix="ray-")  # short: names of sockets have a limit
    patch.setenv("RAY_TMPDIR", folder)  # else the cluster's address goes to /tmp/ray, which need not be there
    os.mkdir(os.path.join(folder, "ray"))
    made = Nodes(folder)
    yield made
    made.close()
    shutil.rmtree(folder, ignore_errors=True)
    patch.undo()


def heard(process: "subprocess.Popen[str]") -> Iterator[dict[str, Any]]:
    """The lines of --json; a process that hangs is killed."""
    assert process.stdout is not None
    timer = threading.Timer(3 * LONG, process.kill)
    timer.start()
    try:
        for line in process.stdout:
            yield json.loads(line)
    finally:
        timer.cancel()


def check_journal(count: int) -> None:
    with sqlite3.connect(Path("out", FOLDER, JOURNAL)) as db:
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        assert db.execute("SELECT count(*) FROM jobs WHERE state = 'done'").fetchone() == (count,)
        ended = Counter(key for (key,) in db.execute("SELECT key FROM attempts WHERE state = 'done'"))
    assert len(ended) == count
    assert set(ended.values()) == {1}


@pytest.mark.usefixtures("empty_folder")
def test_a_node_joins_and_another_is_lost(nodes: Nodes) -> None:
    """Nothing is lost, nothing is done twice, and pictures have come along."""
    from PIL import Image

    Image.new("RGB", (64, 64), "red").save("in.png")
    jobs = write_jobs("jobs.jsonl", [*many(12), {"init_img": "in.png", "seed": 13, "output": "out/13.png"}])
    done, lost, workers = Counter[int](), [], Counter[str]()
    first, killed = nodes.nodes[0], False
    with sdsage_command("batch", jobs, "--json", "--ray", nodes.address) as process:
        for event in heard(process):
            if event["event"] == "stage" and event["stage"] == "sample" and len(nodes.nodes) == 1:
                nodes.stop(first)  # in the middle of a job, until the other node is there
                nodes.add()
            if event["event"] == "job" and event["state"] == "running":
                workers[event["worker"]] += 1
            if len(workers) == 2 and not killed:
                nodes.lose(first)
                killed = True
            if event["event"] == "job" and event["state"] == "waiting":
                lost.append(event)
            if event["event"] == "job" and event["state"] == "done":
                done[event["job"]] += 1
        _, err = process.communicate(timeout=LONG)
    assert process.returncode == 0, err
    assert done == {number: 1 for number in range(1, 14)}
    assert [event["text"] for event in lost] == [f"the node of {next(iter(workers))} is lost"]
    assert len(workers) == 2
    rows = {row["job"]: row for row in results()}
    assert (rows[lost[0]["job"]]["attempts"], rows[lost[0]["job"]]["crashes"]) == (2, 0)
    check_whole("out", 13)
    check_journal(13)
    assert event["event"] == "result"
    sdsage.Batch([{**DEFAULTS, "init_img": "in.png", "seed": 13, "output": "here/13.png"}]).run(cpu_workers=1)
    assert pixels("here/13.png") == pixels("out/13.png")


@pytest.mark.usefixtures("empty_folder")
def test_an_actor_and_the_driver_are_killed(nodes: Nodes) -> None:
    """The job goes on from its checkpoint on its node, both times."""
    node = nodes.nodes[-1]
    jobs = write_jobs("jobs.jsonl", [*many(1), {"steps": 40, "output": "out/2.png"}])
    attempt, killed = 0, False
    with sdsage_command("batch", jobs, "--json", "--ray", nodes.address) as process:
        for event in heard(process):
            attempt = event.get("attempt", attempt)
            step = event.get("overall_step", 0)
            if step >= 10 and not killed:
                (actor,) = nodes.actors(node)
                os.kill(actor, signal.SIGKILL)
                killed = True
            if step >= 20 and attempt == 2:
                break
        (actor,) = nodes.actors(node)
        workers = workers_of(actor)
        process.kill()
        process.communicate()
    assert wait_until(lambda: gone(actor) and all(map(gone, workers)))
    assert {row["job"]: (row["state"], row["crashes"]) for row in status()["jobs"]} == {
        1: ("done", 0), 2: ("running", 1)}  # fmt: skip
    seen = events(batch(jobs, "--json", "--ray", nodes.address).stdout)
    assert [event["job"] for event in seen if event["event"] == "job" and event["state"] == "done"] == [2]
    assert results()[1]["summary"]["replayed_steps"] >= 19
    check_whole("out", 2)
    check_journal(2)


@pytest.mark.usefixtures("empty_folder")
def test_ctrl_c_and_what_fails(nodes: Nodes) -> None:
    Path("in.png").write_bytes(b"no picture")
    more = [{"steps": 600, "output": "out/2.png"}]
    jobs = write_jobs("jobs.jsonl", [{"init_img": "in.png", "output": "out/1.png"}, *more])
    with sdsage_command("batch", jobs, "--json", "--ray", nodes.address) as process:
        for event in heard(process):
            if event["event"] == "step" and event.get("overall_step", 0) >= 10:
                break
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=LONG)
    assert process.returncode == 130, err
    found = status()["jobs"]
    assert [row["state"] for row in found] == ["failed", "waiting"]
    assert "in.png" in found[0]["message"]


@pytest.mark.usefixtures("empty_folder")
def test_outputs_go_to_the_storage(nodes: Nodes, tmp_path: Path) -> None:
    bucket = tmp_path / "bucket"
    jobs = write_jobs("jobs.jsonl", many(2))
    for made in ([1, 2], []):
        seen = events(batch(jobs, "--json", "--ray", nodes.address, "--storage", f"file://{bucket}").stdout)
        assert [event["job"] for event in seen if event["event"] == "job" and event["state"] == "done"] == made
    check_stored(bucket, f"file://{bucket}", 2)
    assert not list(Path("out").glob("*.png"))


def test_addresses_that_are_none(empty_folder: Path) -> None:
    write_jobs("jobs.jsonl", many(1))
    for address in ("127.0.0.1:9", "nothing"):
        said = batch("jobs.jsonl", "--ray", address, code=2).stderr
        assert f"--ray {address}: no cluster answers" in said
        assert "ray start --head" in said
    said = batch("jobs.jsonl", "--ray", "ray://127.0.0.1:10001", code=2).stderr
    assert "run the batch on a node of it, with --ray auto" in said
    said = batch("jobs.jsonl", "--ray", "auto", "--gpus", "0", code=2).stderr
    assert "leave --gpus out" in said
    assert os.listdir(empty_folder) == ["jobs.jsonl"]


def test_a_node_says_what_is_wrong_with_it() -> None:
    actor = on_cluster.Actor("here", "cuda:7", 1, "batch")
    assert actor.problem("0.0") == (
        f"it has sdsage {sdsage.__version__}, and the batch is run by 0.0: install the same on all nodes"
    )
    assert actor.problem(sdsage.__version__).startswith("its engine has no cuda:7: it has cpu")
    actor.stop()


def test_model_files_must_be_the_same() -> None:
    planned = [["diffusion_model", "a.gguf", 10], ["lora_model_dir", "x.safetensors", 5]]
    check_same(planned, [list(entry) for entry in planned])
    word = ["embd_dir", "cat.safetensors", 7]
    for here, said in (
        ([["diffusion_model", "a.gguf", 11], planned[1]], r"--diffusion-model a\.gguf of 10 .* a\.gguf of 11 bytes: "),
        (planned[:1], r"--lora-model-dir x\.safetensors of 5 bytes, and .* has no such file: "),
        ([*planned, word], r"no other file, and .* has --embd-dir cat\.safetensors of 7 bytes: "),
    ):
        with pytest.raises(BadRequest, match=said):
            check_same(planned, here)


def deliver(folder: Path, record: list[Any], chunks: list[bytes], overwrite: bool = False) -> Outcome:
    outcome = Outcome("done", files=[["a.png", *record]])
    with Parcel(str(folder), overwrite) as parcel:
        for chunk in chunks:
            parcel.take("a.png", chunk)
        parcel.take("a.latents.safetensors", b"latents")
        parcel.finish(outcome)
    return outcome


def test_files_get_their_names_when_they_are_whole(tmp_path: Path) -> None:
    made, out = tmp_path / "made.png", tmp_path / "out"
    made.write_bytes(b"abcd")
    record = whole(made)[1:]
    for data in (b"abcx", b"abc"):
        with pytest.raises(OutputError, match=r"a\.png did not arrive whole"):
            deliver(out, record, [data])
        assert os.listdir(out) == []
    outcome = deliver(out, record, [b"ab", b"cd"])
    assert outcome.files == [[str(out / "a.png"), *record]]
    assert outcome.summary["latents"] == [str(out / "a.latents.safetensors")]
    assert (out / "a.png").read_bytes() == b"abcd"
    with pytest.raises(OutputError, match="exists: choose another name"):
        deliver(out, record, [b"abcd"])
    deliver(out, record, [b"abcd"], overwrite=True)
    assert sorted(os.listdir(out)) == ["a.latents.safetensors", "a.png"]
