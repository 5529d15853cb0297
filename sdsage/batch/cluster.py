"""Places on the nodes of a Ray cluster: an actor for each GPU, or for a share of the cores, keeps a worker process."""

import hashlib
import logging
import os
import queue
import secrets
import socket
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from sdsage import __version__
from sdsage.batch.delivery import Parcel
from sdsage.batch.places import CRASHED, DONE, FAILED, LOST, STOPPED, LocalPlace, Outcome, Place, Task, Tell
from sdsage.batch.scratch import Scratch, Sent, folder_of, parted
from sdsage.batch.storage import Shipment, Storage
from sdsage.cli.app import explained
from sdsage.cli.keeping import remembered
from sdsage.cli.option import Kind, Panel
from sdsage.cli.options import by_key
from sdsage.errors import BadRequest, MissingExtra, SdsageError

WAIT = 120.0  # seconds for a first worker, or another one when all are lost
_BEAT = 1.0  # seconds between two messages of a job
_CHUNK = 8 << 20  # bytes of a file in one message


class Actor:
    """Runs on a node, in a process of Ray's.

    Args:
        device: "cpu" or "cuda:0": Ray lets the process see its own GPU alone.
        threads: of a job that does not say how many.
        batch: tells batches apart on one node.
    """

    def __init__(self, name: str, device: str, threads: int | None, batch: str, storage: Storage | None = None) -> None:
        self._device, self._storage = device, storage
        self._place = LocalPlace(name, device, threads=threads)
        self._scratch = Scratch(self._place, folder_of(batch))

    def problem(self, version: str) -> str:
        """What is wrong with this node; empty when it can work."""
        if version != __version__:
            return f"it has sdsage {__version__}, and the batch is run by {version}: install the same on all nodes"
        devices = self._place.devices()
        if self._device not in devices:
            return f"its engine has no {self._device}: it has {', '.join(devices)}; see 'sdsage doctor' there"
        return ""

    def run(self, sent: Sent) -> Iterator[tuple[str, Any]]:
        """Messages: "events", a list of them; "file", a name and a part of it; and at last "outcome".

        Of a file that is in the storage the part is empty.
        """
        said: queue.SimpleQueue[Any] = queue.SimpleQueue()

        def work() -> None:
            try:
                outcome = self._scratch.run(sent, lambda event, fields: said.put((event, dict(fields))))
            except Exception as error:
                outcome = Outcome(FAILED, explained(error)[0])
            said.put(outcome)

        threading.Thread(target=work, daemon=True).start()
        outcome = yield from _gathered(said)
        if outcome.state == DONE:
            for name, path in self._scratch.written(sent.task):
                if self._storage is not None:
                    try:
                        self._storage.send(path, sent.token, name)
                    except SdsageError as error:
                        yield "outcome", Outcome(FAILED, explained(error)[0])
                        return
                    yield "file", (name, b"")
                    continue
                with open(path, "rb", buffering=0) as file:
                    while chunk := file.read(_CHUNK):
                        yield "file", (name, chunk)
        yield "outcome", outcome

    def remove(self, task: Task) -> None:
        self._scratch.remove(task)

    def stop(self) -> None:
        self._place.stop()


def _gathered(said: "queue.SimpleQueue[Any]") -> Generator[tuple[str, Any], None, Outcome]:
    """Events, many in one message, until the outcome comes, which is returned."""
    events: list[Any] = []
    due = 0.0
    while True:
        try:
            what = said.get(timeout=max(0.0, due - time.monotonic()) if events else None)
        except queue.Empty:
            what = None
        if isinstance(what, Outcome) or (what is None and events):
            if events:
                yield "events", events
            events, due = [], time.monotonic() + _BEAT
        if isinstance(what, Outcome):
            return what
        if what is not None:
            events.append(what)


class RayPlace:
    """An actor of a node, as the driver sees it."""

    def __init__(self, ray: Any, name: str, make: Callable[[], Any], storage: Storage | None, top: Path) -> None:
        self._ray, self.name, self._make = ray, name, make
        self._storage, self._top = storage, top
        self._lock = threading.Lock()
        self._stopped = False
        self.gone = False
        self.start()

    def start(self) -> None:
        """`ready` has the actor's word on its node, when it comes."""
        self._actor = self._make()
        self.ready = self._actor.problem.remote(__version__)

    def run(self, task: Task, tell: Tell) -> Outcome:
        try:
            sent = self._packed(task)
            with self._lock:
                if self._stopped:
                    return Outcome(STOPPED)
                messages = self._actor.run.options(num_returns="streaming").remote(sent)
            outcome = self._received(task, sent.token, messages, tell)
            if outcome.state == DONE:
                self._actor.remove.remote(sent.task)
            return outcome
        except self._ray.exceptions.RayError as error:
            return self._died(error)
        except (SdsageError, OSError) as error:
            return Outcome(FAILED, explained(error)[0])

    def _packed(self, task: Task) -> Sent:
        """Raises OSError for a picture that can't be read."""
        raw = remembered(task.raw)
        pictures, folders = {}, set()
        for key, value in raw.items():
            option = by_key().get(key)
            if option is None or option.panel != Panel.PICTURES or option.kind not in (Kind.FILE, Kind.FOLDER):
                continue
            paths = value if isinstance(value, list) else [value]
            if option.kind is Kind.FOLDER:
                folders.add(key)
                paths = [entry.path for entry in os.scandir(value) if entry.is_file()]
            pictures[key] = [(os.path.basename(path), Path(path).read_bytes()) for path in paths]
        _, below = parted(task.output)
        return Sent(replace(task, raw=raw, output=below), pictures, frozenset(folders), secrets.token_hex(8))

    def _parcel(self, folder: str, overwrite: bool, token: str) -> "Parcel | Shipment":
        if self._storage is None:
            return Parcel(folder, overwrite)
        return Shipment(self._storage, os.path.relpath(folder or ".", self._top), overwrite, token)

    def _received(self, task: Task, token: str, messages: Any, tell: Tell) -> Outcome:
        folder, _ = parted(task.output)
        overwrite = bool(task.raw.get("overwrite"))
        with self._parcel(folder, overwrite, token) as parcel:
            for message in messages:
                kind, what = self._ray.get(message)
                if kind == "events":
                    for event, fields in what:
                        tell(event, fields)
                elif kind == "file":
                    parcel.take(*what)
                else:
                    outcome: Outcome = what
            if outcome.state == DONE:
                parcel.finish(outcome)
        return outcome

    def _died(self, error: Exception) -> Outcome:
        """Whether the actor alone is gone, or its node: a new one starts there, or can't."""
        with self._lock:
            if self._stopped:
                return Outcome(STOPPED)
        self.close()
        with suppress(self._ray.exceptions.RayError):
            self.start()
            problem = self._ray.get(self.ready, timeout=WAIT)
            if not problem:
                return Outcome(CRASHED, f"the actor of {self.name} died: {first_line(error)}")
        self.gone = True
        return Outcome(LOST, f"the node of {self.name} is lost")

    def stop(self) -> None:
        with self._lock:
            self._stopped = True
            self._actor.stop.remote()

    def close(self) -> None:
        with suppress(self._ray.exceptions.RayError, ValueError):
            self._ray.kill(self._actor)


class Cluster:
    """The places of a cluster, those of nodes that join later too.

    Args:
        address: of a running cluster, "auto" for the one that this machine is a node of.
        cpu_workers: so many on the cores of each node, and none on GPUs; None: one for each GPU, and where no node has
            a GPU, one for each node.
        folder: of the batch.

    Raises:
        BadRequest: there is no such cluster.
        MissingExtra: sdsage[ray] is not installed.
    """

    def __init__(
        self,
        address: str,
        cpu_workers: int | None,
        folder: Path,
        tell: Callable[[Mapping[str, Any]], None],
        storage: Storage | None = None,
    ) -> None:
        self._ray = _connected(address)
        self._cpu_workers, self._tell = cpu_workers, tell
        self._storage, self._top = storage, folder
        self._batch = hashlib.sha256(f"{socket.gethostname()} {folder.resolve()}".encode()).hexdigest()[:16]
        self._nodes: set[str] = set()  # ids of those that are known
        self._names: set[str] = set()
        self._starting: dict[Any, RayPlace] = {}
        self._places: list[RayPlace] = []
        self._problems: list[str] = []
        self._alone = time.monotonic()  # since when there is no place

    def fresh(self) -> Sequence[Place]:
        self._look()
        ready, _ = (
            self._ray.wait(list(self._starting), num_returns=len(self._starting), timeout=0)
            if self._starting
            else ([], [])
        )
        found: list[RayPlace] = []
        for ref in ready:
            place = self._starting.pop(ref)
            try:
                problem = self._ray.get(ref)
            except self._ray.exceptions.RayError as error:
                problem = first_line(error)
            if problem:
                self._problems.append(f"{place.name} can't be used: {problem}")
                self._tell({"event": "warning", "text": self._problems[-1]})
                place.close()
            else:
                found.append(place)
        self._places = [place for place in self._places if not place.gone] + found
        if self._places:
            self._alone = time.monotonic()
        elif time.monotonic() - self._alone > WAIT or (self._problems and not self._starting):
            raise SdsageError(self._nobody())
        return found

    def _look(self) -> None:
        """Starts actors on nodes that are new."""
        nodes = [node for node in self._ray.nodes() if node["Alive"] and node["NodeID"] not in self._nodes]
        if (
            self._cpu_workers is None
            and nodes
            and not self._nodes
            and not any(n["Resources"].get("GPU") for n in nodes)
        ):
            self._cpu_workers = 1
        for node in nodes:
            self._nodes.add(node["NodeID"])
            for place in self._started(node):
                self._starting[place.ready] = place

    def _started(self, node: Mapping[str, Any]) -> Iterator[RayPlace]:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        resources = node["Resources"]
        cores = resources.get("CPU", 0.0)
        on_gpu = self._cpu_workers is None
        count = int(resources.get("GPU", 0)) if on_gpu else (self._cpu_workers or 0) * bool(cores)
        if not count:
            return
        name = node["NodeManagerHostname"]
        name = f"{name}/{node['NodeID'][:6]}" if name in self._names else name
        self._names.add(name)
        share = {"num_gpus": 1, "num_cpus": 0} if on_gpu else {"num_cpus": _share(cores, count)}
        threads = None if on_gpu else max(1, int(cores // count))
        for i in range(count):
            slot = f"{name} gpu {i}" if on_gpu else f"{name} cpu {i + 1}"
            args = (slot, "cuda:0" if on_gpu else "cpu", threads, self._batch, self._storage)
            options = {**share, "max_restarts": 0, "max_concurrency": 2, "scheduling_strategy": there}

            def make(options: Any = options, args: Any = args) -> Any:
                return self._ray.remote(Actor).options(**options).remote(*args)

            yield RayPlace(self._ray, slot, make, self._storage, self._top)

    def _nobody(self) -> str:
        if self._problems:
            return "no node of the cluster can work: " + "; ".join(self._problems)
        if self._starting:
            waiting = ", ".join(place.name for place in self._starting.values())
            return f"no worker of the cluster got ready in {WAIT:.0f} s ({waiting}): others may use its GPUs and cores"
        return (
            f"the cluster has had no worker for {WAIT:.0f} s: 'ray status' shows its nodes; give the command again then"
        )

    def close(self) -> None:
        for place in (*self._places, *self._starting.values()):
            place.close()
        self._ray.shutdown()


def _share(cores: float, count: int) -> float:
    """Cores of one of `count` actors; Ray takes parts of one core only."""
    return cores / count if count > cores else float(cores // count)


def first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _connected(address: str) -> Any:
    """The module ray, connected."""
    try:
        import ray
        from ray._private import worker
    except ImportError:
        raise MissingExtra("--ray needs Ray, which is not installed: pip install 'sdsage[ray]'") from None
    if address.startswith("ray://"):
        raise BadRequest(
            f"--ray {address} is the address for clients outside of the cluster: run the batch on a node of it, with "
            "--ray auto or the HOST:PORT that 'ray start' shows"
        )
    host, _, port = address.rpartition(":")
    try:
        if address != "auto":  # Ray itself would wait for minutes
            socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
    except (OSError, ValueError) as error:
        raise _no_cluster(address, error) from None
    worker._worker_logs_enabled = False  # it would print what happens to nodes on stdout; we say it ourselves
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except Exception as error:
        raise _no_cluster(address, error) from None
    return ray


def _no_cluster(address: str, error: Exception) -> BadRequest:
    return BadRequest(
        f"--ray {address}: no cluster answers ({first_line(error)}). Start one with 'ray start --head', and run the "
        "batch on one of its nodes, with --ray auto or HOST:PORT"
    )
