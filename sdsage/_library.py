"""Where the native library is, and a first look at it: what `import sdsage` can check without loading anything."""

import os
import sys
from pathlib import Path

ABI_VERSION = 3
_WINDOWS = sys.platform == "win32"
PACKAGE_LIBRARY_DIR = Path(__file__).parent / "_lib"


def library_dir() -> Path:
    """Folder of libsdsage, sd-cli and cdef.h: SDSAGE_LIB_DIR, else inside the package."""
    return Path(os.environ.get("SDSAGE_LIB_DIR") or PACKAGE_LIBRARY_DIR)


def library_path() -> Path:
    """The shared library."""
    return library_dir() / ("sdsage.dll" if _WINDOWS else "libsdsage.so")


def cdef_path() -> Path:
    """The C declarations, written when the library was built."""
    return library_dir() / "cdef.h"


def sd_cli_path() -> Path:
    """The native sd-cli executable that was built with this library."""
    return library_dir() / ("sd-cli.exe" if _WINDOWS else "sd-cli")


def tells_itself() -> bool:
    """Whether this process is the command `sdsage`, or a process of `sdsage doctor`: these start without the library
    and say what is wrong with it, where a program gets an ImportError from `import sdsage`."""
    program = Path(sys.argv[0]).name if sys.argv else ""
    if program == "-m":  # Python still looks for the module
        words = sys.orig_argv
        module = words[words.index("-m") + 1] if "-m" in words[:-1] else ""
        return module in ("sdsage", "sdsage.__main__", "sdsage._doctor.child")
    return program in ("sdsage", "sdsage.exe")


def check() -> None:
    """The library is there, and its declarations are of the ABI version that this package is written for.

    Raises:
        ImportError: naming the file that is missing, or both versions.
    """
    for path in (cdef_path(), library_path()):
        if not path.is_file():
            raise ImportError(
                f"sdsage's native library is not built: {path} is missing. In a checkout run `pip install .`, "
                f"or set SDSAGE_LIB_DIR to a folder with {library_path().name} and cdef.h ('sdsage doctor' looks at "
                "everything)"
            )
    with cdef_path().open(encoding="utf-8") as file:
        first = file.readline().strip()
    if first != f"/* ABI {ABI_VERSION} */":
        found = first.removeprefix("/* ABI ").removesuffix(" */") if first.startswith("/* ABI ") else "none"
        raise ImportError(
            f"{cdef_path()} has ABI version {found}, this package needs {ABI_VERSION}: install both from one build"
        )
