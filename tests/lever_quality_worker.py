"""lever_quality_worker.py FOLDER: benchmarks/lever_quality.py on the CPU, with levers that are wrong, as JSON.

For test_levers.py; it needs the test library (SDSAGE_LIB_DIR).
A process of its own, because a process loads one libsdsage.
"""

import json
import sys
from pathlib import Path

from conftest import ROOT
from levers_worker import FAULTS

from sdsage._ffi import lib
from sdsage.tiny.tensors import DType

sys.path.append(str(ROOT))  # at the end: the package under test stays the one that is installed

from benchmarks import lever_quality

# The run in which each fault shows.
WRONG = {
    "no bias": "default",
    "no gate": "default",
    "no shift": "exact, default",
    "scale 1 % off": "exact, default",
    "turned the other way": "exact, default",
}


def main() -> None:
    size = lever_quality.SIZES["tiny"]
    faults = {name: (run, lever_quality.as_is) for name, run in WRONG.items()}
    found, faulty = lever_quality.run_all(
        Path(sys.argv[1]),
        size,
        DType.Q8_0,
        (64, 64, 5),
        faults,
        before=lambda name: lib.sdsage_test_levers_cpu(True, FAULTS.get(name, 0)),
        n_threads=1,
    )
    result = {"problems": lever_quality.judge(found, size)}
    result["unseen"] = lever_quality.unseen(found, faulty, size, faults)
    json.dump(result | lever_quality.figures(found, faulty, size), sys.stdout)


if __name__ == "__main__":
    main()
