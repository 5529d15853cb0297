"""`sdsage doctor`: looks at everything that a job needs, and never fails itself.

What could end a process (loading the native library, the driver, PyAV) is asked in other processes: the engine in its
worker, the rest in `child.py`. What goes wrong in looking is one more thing that was found.
"""

from collections.abc import Callable

from sdsage._doctor.report import Level, Problem, Report

__all__ = ["Level", "Problem", "Report", "examine"]

ISSUES = "report it with the output of 'SDSAGE_DEBUG=1 sdsage doctor'"


def examine(sass: bool = False) -> Report:
    """Looks at this installation and this machine; takes a few seconds. Raises nothing.

    Args:
        sass: read the architectures out of the GPU code in the files too.
    """
    from sdsage._doctor import driver, engine, files, gpus, media, places, versions

    report = Report()
    looks: list[Callable[[Report], None]] = [
        versions.look,
        files.look,
        driver.look,
        engine.look,
        gpus.look,
        files.look_at_program,
        media.look,
        places.look,
    ]
    for look in looks:
        _safely(report, look)
    if sass:
        _safely(report, files.look_at_code)
    return report


def _safely(report: Report, look: Callable[[Report], None]) -> None:
    try:
        look(report)
    except Exception as error:
        import os
        import traceback

        if os.environ.get("SDSAGE_DEBUG") == "1":
            traceback.print_exc()
        what = f"{look.__module__.rpartition('.')[2]}: {type(error).__name__}: {error}"
        report.add(Level.WARNING, "doctor-failed", f"a part of the examination failed, in {what}", ISSUES)
