"""The memory of this machine."""

import sys
from pathlib import Path


def host_memory() -> int | None:
    """Bytes that are free, with swap; None when nobody tells."""
    if sys.platform == "win32":
        return _of_windows()
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    kib = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
    return (kib["MemAvailable"] + kib["SwapFree"]) * 1024 if "MemAvailable" in kib else None


if sys.platform == "win32":

    def _of_windows() -> int | None:
        """What processes may still ask for: of memory and the page file."""
        import ctypes

        words = (ctypes.c_uint64 * 8)(64)  # MEMORYSTATUSEX: size and load in 32 bits each, then seven of 64 bits
        known = ctypes.windll.kernel32.GlobalMemoryStatusEx(words)
        return int(words[4]) if known else None  # ullAvailPageFile
