"""What a figure depends on beside the kernels: versions, build, driver and day."""

import platform
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any


def facts(ask: Callable[..., Any]) -> dict[str, Any]:
    """For a report that somebody else will read.

    Args:
        ask: calls a function of `_worker.FUNCTIONS`.
    """
    from sdsage import __version__
    from sdsage._doctor.child import ChildFailed
    from sdsage._doctor.child import ask as ask_child

    try:
        driver = ask_child("driver")
    except ChildFailed as error:
        driver = {"library": "", "problem": str(error)}
    build = ask("build_info")
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "versions": {
            "sdsage": __version__,
            "python": platform.python_version(),
            "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        },
        "driver": driver,
        "toolkit": (build["cuda"] or {}).get("toolkit", ""),
        "build": build,
    }
