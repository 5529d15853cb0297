"""For other processes of a test (this folder in PYTHONPATH): the address space is full when decoding begins, but for
SDSAGE_TEST_DECODE_MB; SDSAGE_TEST_DECODE_STAGE names another stage. With SDSAGE_TEST_DECODE_ONCE, the name of a file
that is not there, only the first time. Whatever process runs the engine then fails to get memory as it would on a full
machine."""

import os
import resource
import sys
from importlib.machinery import PathFinder
from typing import Any


def fill_memory() -> None:
    if once := os.environ.get("SDSAGE_TEST_DECODE_ONCE"):
        try:
            open(once, "x").close()
        except FileExistsError:
            return
    with open("/proc/self/statm", encoding="ascii") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    room = int(os.environ["SDSAGE_TEST_DECODE_MB"]) * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (used + room, resource.RLIM_INFINITY))


class Watched:
    """Finds sdsage._job, and looks at the beginning of each stage."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> Any:
        if name != "sdsage._job" or "SDSAGE_TEST_DECODE_MB" not in os.environ:
            return None
        spec = PathFinder.find_spec(name, path)
        assert spec is not None
        assert spec.loader is not None
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            call = module.Hooks.call

            def watched(hooks: Any, callback: Any, *args: Any) -> None:
                stage = os.environ.get("SDSAGE_TEST_DECODE_STAGE", "decode")
                if args and getattr(args[0], "stage", "") == stage and args[0].step == 0:
                    fill_memory()
                call(hooks, callback, *args)

            module.Hooks.call = watched

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, Watched)  # type: ignore[arg-type]
