"""The native library, loaded where it may fail: in a worker process, which also says what it sees."""

import logging
import threading
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from sdsage._doctor.files import is_for_cuda, reinstall
from sdsage._doctor.report import Level, Report
from sdsage.errors import ContextClosed, SdsageError, WorkerDied

PATIENCE = 60.0  # seconds for one answer; loading a CUDA library for the first time can take ten


def look(report: Report) -> None:
    if report.has("library-missing") or report.has("library-abi"):
        return
    with Questions() as asked:
        try:
            report.facts["build"] = asked("build_info")
            report.facts["devices"] = [asdict(device) for device in asked("devices")]
            for device in report.facts["devices"]:
                device["sage"] = asdict(asked("sage_info", "auto", device["name"]))
            report.facts["loaded"] = [p for p in asked("loaded_files") if ".so" in p.rpartition("/")[2]]
        except ImportError as error:
            _cannot_load(report, str(error))
        except (SdsageError, OSError) as error:
            _died(report, error)
        report.facts["engine_said"] = asked.words()


class Questions:
    """Asks a worker process; one that does not answer in time is ended."""

    def __init__(self) -> None:
        from sdsage._supervisor import Worker

        self._quiet = Collector()
        self._quiet.attach()
        self._worker = Worker(hang_after=PATIENCE)
        self._late = False

    def __enter__(self) -> "Questions":
        return self

    def __exit__(self, *exc: object) -> None:
        self._worker.close()
        self._quiet.detach()

    def __call__(self, function: str, *args: Any) -> Any:
        timer = threading.Timer(PATIENCE, self._give_up)
        timer.daemon = True
        timer.start()
        try:
            return self._worker.run(function, *args)
        except ContextClosed:
            if self._late:
                raise SdsageError(f"the engine gave no answer to {function!r} within {PATIENCE:g} seconds") from None
            raise
        finally:
            timer.cancel()

    def _give_up(self) -> None:
        self._late = True
        self._worker.kill()

    def words(self) -> list[str]:
        """What the engine has said meanwhile."""
        return [*dict.fromkeys([*self._quiet.lines, *self._worker.last_words])]


class Collector(logging.Handler):
    """What nobody listens to would go to stderr, between the lines of the report."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def attach(self) -> None:
        logger = logging.getLogger("sdsage")
        self._before = logger.propagate
        logger.propagate = False
        logger.addHandler(self)

    def detach(self) -> None:
        logger = logging.getLogger("sdsage")
        logger.removeHandler(self)
        logger.propagate = self._before


# Part of the loader's message -> name of the problem, and what mends it.
_Mend = Callable[[Report], str]


def _get_driver(report: Report) -> str:
    driver = report.facts["driver"]
    if driver.get("wsl"):
        return "in Windows, install NVIDIA's current driver, then 'wsl --shutdown'; install none inside WSL"
    if driver.get("kernel_module"):
        return "the driver is on the host: start the container with its GPUs, as in docker run --gpus all"
    cuda = ((report.facts["build"] or {}).get("cuda") or {}).get("toolkit", "13.0")
    return (
        f"install NVIDIA's driver for CUDA {cuda.rpartition('.')[0] or cuda} or newer; without an NVIDIA GPU build for "
        "the CPU, in a checkout: pip install --force-reinstall --no-deps ."
    )


_LOADER: tuple[tuple[str, str, _Mend], ...] = (
    ("libcuda.so", "driver-missing", _get_driver),
    ("libcublas", "cuda-libraries", lambda report: "pip install 'sdsage[cuda]' (in a checkout: pip install '.[cuda]')"),
    ("libcudart", "cuda-libraries", lambda report: "pip install 'sdsage[cuda]' (in a checkout: pip install '.[cuda]')"),
    ("GLIBC_", "system-old", reinstall),
    ("GLIBCXX_", "system-old", reinstall),
    ("libstdc++", "system-old", lambda report: "install libstdc++6 with the system's package manager"),
    ("libgomp", "system-old", lambda report: "install libgomp1 with the system's package manager"),
    ("not installed", "package-missing", lambda report: "pip install --force-reinstall sdsage"),
    ("No module named", "package-missing", reinstall),
    ("both from one build", "library-abi", reinstall),
)


def _cannot_load(report: Report, text: str) -> None:
    name, mend = next(((name, mend) for part, name, mend in _LOADER if part in text), ("library-damaged", reinstall))
    report.add(Level.ERROR, name, text, mend(report))
    driver = report.facts["driver"]
    if name == "cuda-libraries" and driver.get("library") == "":  # the loader names one missing library at a time
        text = f"NVIDIA's driver is not there either: {driver['problem']}"
        report.add(Level.ERROR, "driver-missing", text, _get_driver(report))


def _died(report: Report, error: Exception) -> None:
    """The process ended, or did not answer, with the library in it."""
    signal = getattr(error, "signal", "")
    if signal in ("SIGILL", "an illegal instruction"):  # the second one on Windows
        text = f"the library was built for another kind of CPU: {error}"
        report.add(Level.ERROR, "library-cpu", text, reinstall(report, "SDSAGE_NATIVE=OFF"))
    elif isinstance(error, WorkerDied) and not report.facts["devices"]:
        driver = "or install NVIDIA's driver again" if is_for_cuda(report) else ""
        mend = " ".join(filter(None, [reinstall(report), driver]))
        report.add(Level.ERROR, "library-crashes", f"the library can't be loaded or used: {error}", mend)
    else:
        report.add(Level.ERROR, "engine-silent", str(error), f"run 'sdsage doctor' again; then {reinstall(report)}")
