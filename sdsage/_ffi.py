"""The only module that knows cffi: loads libsdsage, checks that this package was built with it, and offers it.

ABI mode: the declarations (cdef.h) are written at build time from the very headers that the library was compiled with.
`import sdsage` has found the files (`_library.check`). `ffi` knows the declarations; the library is loaded with the
first use of `lib`, and its ABI version and the size and last offset of every struct are compared with what cffi makes
of the declarations. A program that leaves the engine to a worker process never loads it.
"""

import contextlib
import os
import sys
import threading
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sdsage._library import ABI_VERSION, cdef_path, library_path


def _declarations() -> Any:
    """What cdef.h declares. The build has read it once already where it could, which takes 100 ms."""
    cdef = cdef_path().read_bytes()
    compiled = cdef_path().with_name("cdef.cffi")
    with contextlib.suppress(FileNotFoundError, ImportError):  # ImportError: of a newer cffi than ours
        code = compiled.read_text(encoding="utf-8")
        if code.startswith(f"# crc32 {zlib.crc32(cdef):08x}\n"):
            found: dict[str, Any] = {}
            exec(compile(code, str(compiled), "exec"), found)
            return found["ffi"]
    import cffi

    builder = cffi.FFI()
    builder.cdef(cdef.decode())
    return builder


def _load(builder: Any) -> Any:
    try:
        library = builder.dlopen(str(library_path()), _loading())
    except OSError as error:
        why = str(error).partition(".  Additionally")[0].removeprefix(f"cannot load library '{library_path()}': ")
        raise ImportError(f"{library_path()} can't be loaded: {why}{_advice(why)}") from error
    _check_layout(builder, library)
    return library


def _loading() -> int:
    """The flags of dlopen. On Windows also the folders of the CUDA libraries, which no file there can name itself: the
    extra `cuda`'s, and a toolkit's."""
    if sys.platform != "win32":
        return os.RTLD_NOW | os.RTLD_LOCAL  # another ggml in the process keeps its symbols, we keep ours
    folders = [*Path(__file__).parents[1].glob("nvidia/cu*/bin/x86_64")]
    if toolkit := os.environ.get("CUDA_PATH"):
        folders += [Path(toolkit, "bin", "x64"), Path(toolkit, "bin")]
    for folder in folders:
        if folder.is_dir():
            os.add_dll_directory(str(folder))
    return 0


def _advice(problem: str) -> str:
    """What to do about a library that a CUDA build lacks."""
    if "0x7e" in problem:  # all that Windows says
        return (
            "; a DLL that it needs is not there: a build for CUDA needs NVIDIA's driver, and the CUDA libraries of "
            "pip install 'sdsage[cuda]'"
        )
    if "libcuda.so" in problem:
        return "; a build for CUDA needs NVIDIA's driver: without one install the build for the CPU"
    if "libcublas" in problem or "libcudart" in problem:
        return "; the CUDA libraries come with pip install 'sdsage[cuda]'"
    return ""


def _check_layout(builder: Any, library: Any) -> None:
    found = library.sdsage_abi_version()
    if found != ABI_VERSION:
        raise ImportError(
            f"libsdsage has ABI version {found}, this package needs {ABI_VERSION}: install both from one build"
        )
    for line in builder.string(library.sdsage_layout()).decode().splitlines():
        name, size, offset = line.split()
        struct = builder.typeof(name)
        mine = (builder.sizeof(struct), struct.fields[-1][1].offset)
        if mine != (int(size), int(offset)):
            raise ImportError(
                f"struct {name} is {size} bytes with its last field at {offset} in libsdsage, "
                f"but {mine[0]} and {mine[1]} in cdef.h: install both from one build"
            )


class _Library:
    """The functions and constants of libsdsage, which is loaded when the first of them is asked for."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._loaded: Any = None
        self._then: list[Callable[[], None]] = []

    def __getattr__(self, name: str) -> Any:
        with self._lock:
            if self._loaded is None:
                self._loaded = _load(ffi)
                for function in self._then:
                    function()
        value = getattr(self._loaded, name)
        self.__dict__[name] = value  # the next time it is found there
        return value

    def __dir__(self) -> list[str]:
        self.sdsage_abi_version()
        return dir(self._loaded)


def is_loaded() -> bool:
    """Whether this process has loaded the native library."""
    return lib._loaded is not None


def when_loaded(function: Callable[[], None]) -> None:
    """Calls `function` once, as soon as the library is there."""
    with lib._lock:
        if lib._loaded is None:
            lib._then.append(function)
            return
    function()


ffi = _declarations()
lib: Any = _Library()


def text(pointer: Any) -> str:
    """A C string as str; "" for NULL."""
    return "" if pointer == ffi.NULL else ffi.string(pointer).decode("utf-8", "replace")


def take_text(pointer: Any) -> str:
    """A C string that the caller owns."""
    try:
        return text(pointer)
    finally:
        lib.sdsage_free(pointer)


def encode(value: str | os.PathLike[str] | None) -> Any:
    """A char* that lives as long as the returned object; NULL for None. The engine reads UTF-8."""
    if value is None:
        return ffi.NULL
    return ffi.new("char[]", value.encode("utf-8", "surrogateescape") if isinstance(value, str) else os.fsencode(value))


def image_to_c(image: NDArray[np.uint8] | None, keep: list[Any]) -> Any:
    """sd_image_t over the pixels of an H x W x C array; `keep` holds what must outlive the call."""
    if image is None:
        return ffi.new("sd_image_t *")[0]
    pixels = np.ascontiguousarray(image)
    buffer = ffi.from_buffer("uint8_t[]", pixels)
    struct = ffi.new("sd_image_t *", (pixels.shape[1], pixels.shape[0], pixels.shape[2], buffer))
    keep.extend((pixels, buffer, struct))
    return struct[0]


def image_from_c(image: Any) -> NDArray[np.uint8]:
    """A copy of the pixels of an sd_image_t: H x W x C."""
    shape = (image.height, image.width, image.channel)
    data = ffi.buffer(image.data, shape[0] * shape[1] * shape[2])
    return np.frombuffer(data, np.uint8).reshape(shape).copy()


def images_from_c(images: Any, count: int) -> NDArray[np.uint8]:
    """Copies of `count` images of one size: N x H x W x C."""
    return np.stack([image_from_c(images[i]) for i in range(count)])


def latents_from_c(latents: Any) -> NDArray[np.float32]:
    """A copy of sdsage_latents_t with NumPy's order of dimensions: 1 x C x T x H x W, or 1 x C x H x W."""
    shape = [latents.ne[i] for i in reversed(range(latents.n_dims))]
    data = ffi.buffer(latents.data, 4 * int(np.prod(shape)))
    return np.frombuffer(data, np.float32).reshape(shape).copy()


def latents_to_c(latents: NDArray[np.float32], keep: list[Any]) -> Any:
    """sdsage_latents_t * over an array of the order that `latents_from_c` gives."""
    values = np.ascontiguousarray(latents, np.float32)
    struct = ffi.new("sdsage_latents_t *")
    buffer = ffi.from_buffer("float[]", values)
    struct.data, struct.n_dims = buffer, values.ndim
    for i, n in enumerate(reversed(values.shape)):
        struct.ne[i] = n
    keep.extend((values, buffer, struct))
    return struct


def answers_to_c(answers: Sequence[Any], keep: list[Any]) -> Any:
    """sdsage_answer_t[] over answers with `values`, `sigma` and `step`; `keep` holds what must outlive the job."""
    array = ffi.new("sdsage_answer_t[]", max(1, len(answers)))
    for entry, answer in zip(array, answers, strict=False):
        entry.latents = latents_to_c(answer.values, keep)[0]
        entry.sigma, entry.step = answer.sigma, answer.step
    keep.append(array)
    return array


def preprocess_canny(image: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Edges of an H x W x 3 picture, with the thresholds that sd-cli uses for --canny."""
    keep: list[Any] = []
    edges = np.array(image, np.uint8, order="C")  # the engine writes into it
    if not lib.preprocess_canny(image_to_c(edges, keep), 0.08, 0.08, 0.8, 1.0, False):
        raise RuntimeError("the engine's canny preprocessor failed")
    return edges


def params_json(ctx: Any, img: Any = None, vid: Any = None) -> str:
    """The C structs of parameter objects (`to_c` is called here) as the engine's side writes them."""
    keep: list[Any] = []
    pointers = [ffi.NULL if p is None else p.to_c(keep) for p in (ctx, img, vid)]
    return take_text(lib.sdsage_params_json(*pointers))
