"""What a checkpoint costs: `python benchmarks/checkpoint_cost.py [FOLDER]`. No model is needed.

Writes answers of the model as a run does, in the sizes that videos of Wan 2.2 14B have, and reads them back.
"""

import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import numpy as np

from sdsage._answers import Answer, AnswerFile

SIZES = {
    "832x480, 81 frames": (1, 16, 21, 60, 104),
    "1280x720, 81 frames": (1, 16, 21, 90, 160),
    "1024x1024 picture": (1, 16, 128, 128),
}
CALLS = 20


def main() -> None:
    with tempfile.TemporaryDirectory(dir=sys.argv[1] if len(sys.argv) > 1 else None) as folder:
        for name, shape in SIZES.items():
            path = Path(folder, "kept")
            values = np.random.default_rng(0).normal(size=shape).astype(np.float32)
            file = AnswerFile.create(path, {})
            seconds = []
            for step in range(CALLS):
                began = time.perf_counter()
                file.append([Answer(values.copy(), 1.0, step + 1)])
                seconds.append(time.perf_counter() - began)
            file.close()
            began = time.perf_counter()
            again = AnswerFile.open(path)
            read = time.perf_counter() - began
            assert again is not None
            assert len(again.answers) == CALLS
            again.close()
            print(
                f"{name}: {values.nbytes / 1e6:.1f} MB a call; written in {1000 * median(seconds):.1f} ms (median), "
                f"{1000 * max(seconds):.1f} ms (longest); {CALLS} calls read and checked in {1000 * read:.0f} ms"
            )


if __name__ == "__main__":
    main()
