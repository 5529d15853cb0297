"""attention_worker.py [broken]: prints what `sdsage verify` finds of kernels that are computed on the CPU.

For test_verify.py, with the test library (SDSAGE_LIB_DIR); in this process, as the worker has no such kernels.
"""

import json
import sys
from typing import Any

from sdsage._attention.verify import examine
from sdsage._ffi import lib
from sdsage._worker import FUNCTIONS


def main() -> None:
    lib.sdsage_test_sage_cpu(120, 13000, b"120a")
    lib.sdsage_test_break_sage("broken" in sys.argv)

    def ask(function: str, *args: Any) -> Any:
        return FUNCTIONS[function](*args)

    print(json.dumps(examine(ask, "cpu", quick=True).as_json()))


if __name__ == "__main__":
    main()
