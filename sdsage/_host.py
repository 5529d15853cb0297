"""The memory of this machine."""

from pathlib import Path


def host_memory() -> int | None:
    """Bytes that are free, with swap; None when nobody tells."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    kib = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
    return (kib["MemAvailable"] + kib["SwapFree"]) * 1024 if "MemAvailable" in kib else None
