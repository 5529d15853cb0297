"""`sdsage devices`: what --device can name."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from .console import console

_GIB = 2**30


def run(raw: Mapping[str, Any]) -> None:
    import sdsage

    devices = sdsage.devices()
    if raw.get("json"):
        console().result({"devices": [asdict(device) for device in devices]})
        return
    rows = [("DEVICE", "KIND", "FREE", "TOTAL", "DESCRIPTION")]
    for d in devices:
        free, total = (f"{n / _GIB:.1f} GiB" if n else "-" for n in (d.memory_free, d.memory_total))
        rows.append((d.name, d.kind, free, total, d.description))
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)) + "  " + row[4])
