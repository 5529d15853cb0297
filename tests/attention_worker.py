"""attention_worker.py verify [broken] | gen: what `sdsage verify` and `bench` find of kernels that the CPU computes.

For test_verify.py and test_bench.py, with the test library (SDSAGE_LIB_DIR); in this process, as the worker has no such
kernels.
"""

import json
import sys
from typing import Any

from conftest import ctx_params, small_video

from sdsage import presets
from sdsage._attention.verify import examine
from sdsage._bench import attn, gen
from sdsage._ffi import lib
from sdsage._worker import FUNCTIONS


def ask(function: str, *args: Any) -> Any:
    return FUNCTIONS[function](*args)


def files() -> dict[str, str]:
    from pathlib import Path

    return {
        k: str(v) for k, v in presets.load("tiny-random").options.items() if isinstance(v, str) and Path(v).is_file()
    }


def generation() -> dict[str, Any]:
    found = gen.measure(ctx_params(files()), small_video(), "cpu", True, lambda text: None, isolated=False)
    times = attn.measure(ask, "cpu", ["tiny"], [], 2, 0, lambda entry: None)
    return {"gen": found, "attn": times}


def main() -> None:
    of_gen = "gen" in sys.argv
    # compute capability 9.0 has every kernel
    lib.sdsage_test_sage_cpu(*((120, 13000, b"120a") if of_gen else (90, 13000, b"90a")))
    lib.sdsage_test_break_sage("broken" in sys.argv)
    print(json.dumps(generation() if of_gen else examine(ask, "cpu", quick=True).as_json()))


if __name__ == "__main__":
    main()
