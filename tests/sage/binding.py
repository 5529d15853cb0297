"""sage_cuda and the CUDA runtime through cffi, and NumPy arrays on the device with poison around them.

The library is the one that SAGE_CUDA_LIB names; nothing is built or searched for. Memory that no kernel may depend on
is filled with 0xFF bytes, which is NaN in FP32, FP16 and BF16.
"""

import ctypes.util
import functools
import os
import re
import site
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from cffi import FFI
from numpy.typing import NDArray

Array = NDArray[Any]
ROOT = Path(__file__).parents[2]
HEADER = ROOT / "native" / "sage_cuda" / "include" / "sage_cuda.h"
POISON = 0xFF
GUARD = 256  # poisoned bytes on either side of every device buffer

KERNELS = {"auto": 0, "fp16": 1, "fp8": 2, "fp8++": 3, "hopper": 4}
DTYPES = {"f32": 0, "f16": 1, "bf16": 2}
STORAGE: dict[str, Any] = {"f32": np.float32, "f16": np.float16, "bf16": np.uint16}

CUDART = """
int cudaGetDeviceCount(int *); int cudaSetDevice(int); int cudaDeviceSynchronize(void);
int cudaGetLastError(void); const char * cudaGetErrorString(int);
int cudaDriverGetVersion(int *); int cudaRuntimeGetVersion(int *);
int cudaMalloc(void **, size_t); int cudaFree(void *); int cudaMemGetInfo(size_t *, size_t *);
int cudaMemcpy(void *, const void *, size_t, int); int cudaMemset(void *, int, size_t);
int cudaMemcpy2D(void *, size_t, const void *, size_t, size_t, size_t, int);
int cudaMemsetAsync(void *, int, size_t, void *); int cudaMemcpyAsync(void *, const void *, size_t, int, void *);
int cudaStreamCreateWithFlags(void **, unsigned int); int cudaStreamSynchronize(void *); int cudaStreamDestroy(void *);
int cudaStreamQuery(void *); int cudaStreamBeginCapture(void *, int); int cudaStreamEndCapture(void *, void **);
int cudaGraphInstantiateWithFlags(void **, void *, unsigned long long); int cudaGraphLaunch(void *, void *);
int cudaGraphGetNodes(void *, void **, size_t *); int cudaGraphExecDestroy(void *); int cudaGraphDestroy(void *);
int cudaEventCreate(void **); int cudaEventRecord(void *, void *); int cudaEventSynchronize(void *);
int cudaEventElapsedTime(float *, void *, void *); int cudaEventDestroy(void *);
"""


def cdef(header: str) -> str:
    """The declarations of a header: what ffi.cdef takes. As native/sd_cli/generate.py does for the other header."""
    text = re.sub(r"/\*.*?\*/", "", header, flags=re.S)
    text = re.sub(r"#ifdef __cplusplus.*?#endif[^\n]*", "", text, flags=re.S)
    text = re.sub(r"^\s*#.*$", "", text, flags=re.M)
    return re.sub(r"\bSAGE_API\s+", "", text)


class StatusError(Exception):
    """A status other than SAGE_OK, with the library's text."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"status {status}: {text}")
        self.status, self.text = status, text


# --- the library -----------------------------------------------------------------------------------------------------

ffi = FFI()
ffi.cdef(cdef(HEADER.read_text(encoding="utf-8")))
ABI_VERSION = int(re.findall(r"#define SAGE_ABI_VERSION (\d+)", HEADER.read_text(encoding="utf-8"))[0])


def library_path() -> str | None:
    return os.environ.get("SAGE_CUDA_LIB") or None


NO_LIBRARY = "SAGE_CUDA_LIB names no libsage_cuda.so"


@functools.cache
def sage() -> Any:
    path = library_path()
    if path is None:
        raise RuntimeError(NO_LIBRARY)
    lib = ffi.dlopen(str(Path(path).resolve()))
    if lib.sage_abi_version() != ABI_VERSION:
        raise RuntimeError(f"{path} is ABI {lib.sage_abi_version()}, the header {ABI_VERSION}")
    return lib


def text(pointer: Any) -> str:
    """A string the library promises; NULL is not one."""
    assert pointer != ffi.NULL
    answer = ffi.string(pointer)
    assert isinstance(answer, bytes)
    return answer.decode()


def check(status: int) -> None:
    if status != sage().SAGE_OK:
        raise StatusError(status, text(sage().sage_last_error()))


@dataclass(frozen=True)
class Choice:
    supported: bool
    kernel: str
    emulated: bool
    reason: str
    why_not_better: str
    compute_capability: int
    toolkit: int
    architectures: str
    abi_version: int
    workspace: int


NAMES = {number: name for name, number in KERNELS.items()}


def device(compute_capability: int, toolkit: int, architectures: str) -> Any:
    """A sage_device of our own; keep it alive as long as answers about it."""
    made = ffi.new("sage_device *")
    keep = ffi.new("char[]", architectures.encode())
    made.compute_capability, made.toolkit, made.architectures = compute_capability, toolkit, keep
    _alive.append(keep)
    return made


_alive: list[Any] = []


@functools.cache
def real_device(ordinal: int = 0) -> Any:
    made = ffi.new("sage_device *")
    check(sage().sage_device_query(ordinal, made))
    return made


def choose(desc: Any, on: Any = None) -> Choice:
    answer = ffi.new("sage_attn_choice *")
    answer.struct_size = ffi.sizeof("sage_attn_choice")
    check(sage().sage_attn_choose(desc, real_device() if on is None else on, answer))
    return Choice(
        bool(answer.supported),
        NAMES[answer.kernel],
        bool(answer.emulated),
        text(answer.reason),
        text(answer.why_not_better),
        answer.compute_capability,
        answer.toolkit,
        text(answer.architectures),
        answer.abi_version,
        answer.workspace,
    )


def describe(
    kernel: str = "auto",
    shape: tuple[int, int, int, int, int, int] = (1, 2, 2, 64, 64, 64),
    scale: float | None = None,
    causal: bool = False,
    dtypes: Sequence[str] = ("f32",) * 4,
) -> Any:
    """A sage_attn_desc for (B, heads, kv_heads, Lq, Lk, D) with dense strides and no data."""
    batch, heads, kv_heads, lq, lk, dim = shape
    desc = ffi.new("sage_attn_desc *")
    desc.struct_size = ffi.sizeof("sage_attn_desc")
    desc.kernel = KERNELS[kernel]
    desc.batch, desc.heads, desc.kv_heads, desc.head_dim = batch, heads, kv_heads, dim
    desc.lq, desc.lk = lq, lk
    desc.softmax_scale = max(dim, 1) ** -0.5 if scale is None else scale
    desc.causal = int(causal)
    for name, dtype, n, length in zip(
        "qkvo", dtypes, (heads, kv_heads, kv_heads, heads), (lq, lk, lk, lq), strict=True
    ):
        tensor = getattr(desc, name)
        tensor.dtype = DTYPES[dtype]
        tensor.batch_stride, tensor.head_stride, tensor.token_stride = n * length * dim, length * dim, dim
    return desc


# --- CUDA ------------------------------------------------------------------------------------------------------------

cuda_ffi = FFI()
cuda_ffi.cdef(CUDART)


def _cudart_names() -> Iterator[str]:
    given = os.environ.get("SAGE_CUDART")
    if given:
        yield given
    found = ctypes.util.find_library("cudart")
    if found:
        yield found
    for home in (os.environ.get("CUDA_HOME"), "/usr/local/cuda"):
        for folder in ("lib64", "lib") if home else ():
            yield from map(str, sorted(Path(f"{home}/{folder}").glob("libcudart.so*")))
    for place in [*site.getsitepackages(), *sys.path]:  # the runtime that comes with torch
        yield from map(str, sorted(Path(place).glob("nvidia/*/lib/libcudart.so*")))


@functools.cache
def _cudart() -> Any:
    for name in _cudart_names():
        try:
            return cuda_ffi.dlopen(name)
        except OSError:
            continue
    return None


@functools.cache
def why_no_gpu() -> str:
    """'' where the GPU tests can run."""
    if library_path() is None:
        return NO_LIBRARY
    rt = _cudart()
    if rt is None:
        return "no libcudart"
    count = cuda_ffi.new("int *")
    status = rt.cudaGetDeviceCount(count)
    if status or not count[0]:
        return f"no CUDA device: {cuda_ffi.string(rt.cudaGetErrorString(status)).decode()}"
    return ""


def cu(name: str, *args: Any) -> None:
    """Call a runtime function, raise on its error."""
    rt = _cudart()
    status = getattr(rt, name)(*args)
    if status:
        raise RuntimeError(f"{name}: {cuda_ffi.string(rt.cudaGetErrorString(status)).decode()}")


def synchronize() -> None:
    """Waits for the device; errors of earlier launches come up here."""
    cu("cudaDeviceSynchronize")
    cu("cudaGetLastError")


def device_count() -> int:
    count = cuda_ffi.new("int *")
    cu("cudaGetDeviceCount", count)
    return int(count[0])


def free_memory() -> int:
    free, total = cuda_ffi.new("size_t *"), cuda_ffi.new("size_t *")
    cu("cudaMemGetInfo", free, total)
    return int(free[0])


class Memory:
    """Device memory between two poisoned guards."""

    def __init__(self, size: int, poison: bool = True) -> None:
        out = cuda_ffi.new("void **")
        cu("cudaMalloc", out, size + 2 * GUARD)
        self._base, self.size = out[0], size
        self.address = int(cuda_ffi.cast("uintptr_t", out[0])) + GUARD
        if poison:
            cu("cudaMemset", self._base, POISON, size + 2 * GUARD)

    def pointer(self, offset: int = 0) -> Any:
        return cuda_ffi.cast("void *", self.address + offset)

    def write(self, data: Array) -> None:
        assert data.nbytes <= self.size
        cu("cudaMemcpy", self.pointer(), cuda_ffi.from_buffer(data.reshape(-1).view(np.uint8)), data.nbytes, 1)

    def _read(self, offset: int, size: int) -> NDArray[np.uint8]:
        out = np.empty(size, np.uint8)
        if size:
            cu("cudaMemcpy", cuda_ffi.from_buffer(out), self.pointer(offset), size, 2)
        return out

    def read(self) -> NDArray[np.uint8]:
        return self._read(0, self.size)

    def write_rows(self, offset: int, pitch: int, rows: Array) -> None:
        """Rows of `rows` (2-D) to offset, offset + pitch, ... bytes."""
        rows = np.ascontiguousarray(rows)
        source = cuda_ffi.from_buffer(rows.reshape(-1).view(np.uint8))
        cu("cudaMemcpy2D", self.pointer(offset), pitch, source, rows[0].nbytes, rows[0].nbytes, len(rows), 1)

    def read_rows(self, offset: int, pitch: int, count: int, size: int) -> NDArray[np.uint8]:
        out = np.empty((count, size), np.uint8)
        cu("cudaMemcpy2D", cuda_ffi.from_buffer(out), size, self.pointer(offset), pitch, size, count, 2)
        return out

    def guards_whole(self) -> bool:
        return bool((self._read(-GUARD, GUARD) == POISON).all() and (self._read(self.size, GUARD) == POISON).all())

    def free(self) -> None:
        if self._base is not None:
            cu("cudaFree", self._base)
            self._base = None


class Stream:
    def __init__(self) -> None:
        out = cuda_ffi.new("void **")
        cu("cudaStreamCreateWithFlags", out, 1)  # not blocking: nothing on the default stream orders it
        self.handle = out[0]

    def synchronize(self) -> None:
        cu("cudaStreamSynchronize", self.handle)

    def free(self) -> None:
        cu("cudaStreamDestroy", self.handle)


def busy(stream: Stream) -> bool:
    """Whether work on the stream is unfinished (cudaErrorNotReady)."""
    status = int(_cudart().cudaStreamQuery(stream.handle))
    if status not in (0, 600):
        cu("cudaStreamQuery", stream.handle)
    _cudart().cudaGetLastError()  # older runtimes leave "not ready" behind
    return status == 600


class Graph:
    """What was launched on a stream inside `capture`."""

    exec: Any
    nodes: int

    def __init__(self, graph: Any) -> None:
        count = cuda_ffi.new("size_t *")
        cu("cudaGraphGetNodes", graph, cuda_ffi.NULL, count)
        self.nodes = int(count[0])
        out = cuda_ffi.new("void **")
        cu("cudaGraphInstantiateWithFlags", out, graph, 0)
        self.exec, self._graph = out[0], graph

    def launch(self, stream: Stream) -> None:
        cu("cudaGraphLaunch", self.exec, stream.handle)

    def free(self) -> None:
        cu("cudaGraphExecDestroy", self.exec)
        cu("cudaGraphDestroy", self._graph)


@contextmanager
def capture(stream: Stream) -> Iterator[list[Graph]]:
    """Strict capture: a synchronising or allocating call inside fails."""
    made: list[Graph] = []
    cu("cudaStreamBeginCapture", stream.handle, 0)
    try:
        yield made
    finally:
        out = cuda_ffi.new("void **")
        cu("cudaStreamEndCapture", stream.handle, out)
    made.append(Graph(out[0]))


# --- arrays on the device --------------------------------------------------------------------------------------------


def to_bf16(x: Array) -> NDArray[np.uint16]:
    """Bits of the nearest BF16, ties to even."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = ((bits.astype(np.uint64) + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.asarray(np.where(np.isnan(x), np.uint16(0x7FC0), rounded))


def from_bf16(bits: Array) -> NDArray[np.float32]:
    return (np.asarray(bits, np.uint32) << np.uint32(16)).view(np.float32)


def store(x: Array, dtype: str) -> Array:
    """float32 values in a storage type."""
    with np.errstate(over="ignore"):
        return to_bf16(x) if dtype == "bf16" else np.asarray(x, STORAGE[dtype])


def load(x: Array, dtype: str) -> NDArray[np.float32]:
    return from_bf16(x) if dtype == "bf16" else np.asarray(x, np.float32)


def rounded(x: Array, dtype: str) -> NDArray[np.float32]:
    """float32 values that the type holds exactly."""
    return load(store(x, dtype), dtype)


@dataclass(frozen=True)
class Layout:
    """Where the elements of a [B, head, token, D] tensor lie: the order of the three outer axes from the outside in,
    the elements left free after each row of an axis, and those before the first."""

    order: str = "bht"
    gaps: tuple[int, int, int] = (0, 0, 0)  # behind a channel row, an inner block, an outer block
    lead: int = 0

    def strides(self, shape: Sequence[int]) -> tuple[tuple[int, int, int], int]:
        """Element strides of batch, head, token, and elements in all."""
        sizes = dict(zip("bht", shape, strict=False))
        step, found = shape[3] + self.gaps[0], {}
        for axis, gap in zip(reversed(self.order), (*self.gaps[1:], 0), strict=True):
            found[axis] = step
            step = step * sizes[axis] + gap
        return (found["b"], found["h"], found["t"]), self.lead + step


DENSE = Layout()


def host_image(x: Array, dtype: str, layout: Layout) -> tuple[Array, Array]:
    """A poisoned buffer that holds `x`, and the view of it that is x."""
    (b, h, t), size = layout.strides(x.shape)
    kind = np.dtype(STORAGE[dtype])
    flat = np.full(size * kind.itemsize, POISON, np.uint8).view(kind)
    view = np.lib.stride_tricks.as_strided(
        flat[layout.lead :], x.shape, [s * kind.itemsize for s in (b, h, t, 1)], writeable=True
    )
    view[...] = store(x, dtype)
    return flat, view


@dataclass
class Tensor:
    """A tensor on the device: its memory, its description, and what was uploaded."""

    shape: tuple[int, ...]
    dtype: str
    layout: Layout
    memory: Memory
    image: Array

    @classmethod
    def put(cls, x: Array, dtype: str = "f32", layout: Layout = DENSE) -> "Tensor":
        image, _ = host_image(x, dtype, layout)
        memory = Memory(image.nbytes)
        memory.write(image)
        return cls(x.shape, dtype, layout, memory, image)

    @classmethod
    def blank(cls, shape: tuple[int, ...], dtype: str = "f32", layout: Layout = DENSE) -> "Tensor":
        """Poison alone, for an output."""
        _, size = layout.strides(shape)
        image = np.full(size * np.dtype(STORAGE[dtype]).itemsize, POISON, np.uint8).view(STORAGE[dtype])
        return cls(shape, dtype, layout, Memory(image.nbytes), image)

    def fill(self, desc: Any) -> None:
        (b, h, t), _ = self.layout.strides(self.shape)
        kind = np.dtype(STORAGE[self.dtype])
        desc.data = ffi.cast("void *", self.memory.address + self.layout.lead * kind.itemsize)
        desc.dtype = DTYPES[self.dtype]
        desc.batch_stride, desc.head_stride, desc.token_stride = b, h, t

    def _now(self) -> tuple[NDArray[np.uint8], Array]:
        """All bytes, and the view of the elements' bits in them."""
        flat = self.memory.read()
        words = flat.view(np.uint32 if self.dtype == "f32" else np.uint16)[self.layout.lead :]
        strides = [s * words.itemsize for s in (*self.layout.strides(self.shape)[0], 1)]
        return flat, np.lib.stride_tricks.as_strided(words, self.shape, strides, writeable=True)

    def bits(self) -> Array:
        """The elements as stored, contiguous."""
        return np.ascontiguousarray(self._now()[1])

    def values(self) -> NDArray[np.float32]:
        return load(self.bits().view(STORAGE[self.dtype]), self.dtype)

    def unchanged(self) -> bool:
        """Every byte as uploaded, gaps and guards too."""
        same = np.array_equal(self.memory.read(), self.image.view(np.uint8))
        return same and self.memory.guards_whole()

    def gaps_whole(self) -> bool:
        """An output's poison between the elements is still there."""
        flat, view = self._now()
        view[...] = np.iinfo(view.dtype).max
        return bool((flat == POISON).all()) and self.memory.guards_whole()

    def poison(self) -> None:
        cu("cudaMemset", self.memory.pointer(), POISON, self.memory.size)


@dataclass
class Case:
    """One attention on the device, ready to run: everything poisoned that a kernel may not read."""

    q: Array
    k: Array
    v: Array
    kernel: str = "auto"
    scale: float | None = None
    bias: Array | None = None
    causal: bool = False
    dtypes: Sequence[str] = ("f32",) * 4  # of q, k, v, o
    layouts: Sequence[Layout] = (DENSE,) * 4
    bias_lead: int = 0
    bias_gap: int = 0
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def __enter__(self) -> "Case":
        shape = (*self.q.shape[:2], self.k.shape[1], self.q.shape[2], self.k.shape[2], self.q.shape[3])
        self.desc = describe(self.kernel, shape, self.scale, self.causal)
        out_shape = (*self.q.shape[:3], self.v.shape[3])
        self.owned: list[Memory] = []
        for name, x, dtype, layout in zip("qkv", (self.q, self.k, self.v), self.dtypes, self.layouts, strict=False):
            self.tensors[name] = Tensor.put(x, dtype, layout)
        self.tensors["o"] = Tensor.blank(out_shape, self.dtypes[3], self.layouts[3])
        for name, tensor in self.tensors.items():
            tensor.fill(getattr(self.desc, name))
            self.owned.append(tensor.memory)
        if self.bias is not None:
            rows, lk = self.bias.shape
            host = np.full(self.bias_lead + rows * (lk + self.bias_gap), POISON, np.uint8).repeat(4).view(np.float32)
            host[self.bias_lead :].reshape(rows, -1)[:, :lk] = self.bias
            self.bias_memory = Memory(host.nbytes)
            self.bias_memory.write(host)
            self.owned.append(self.bias_memory)
            self.desc.bias = ffi.cast("const float *", self.bias_memory.address + 4 * self.bias_lead)
            self.desc.bias_stride = lk + self.bias_gap if rows > 1 else 0
        self.choice = choose(self.desc)
        self.workspace = Memory(self.choice.workspace)
        self.owned.append(self.workspace)
        return self

    def __exit__(self, *_: object) -> None:
        for memory in self.owned:
            memory.free()

    def launch(self, stream: Stream | None = None) -> None:
        handle = ffi.NULL if stream is None else ffi.cast("void *", int(cuda_ffi.cast("uintptr_t", stream.handle)))
        pointer = ffi.cast("void *", self.workspace.address)
        check(sage().sage_attn_run(self.desc, pointer, self.workspace.size, handle))

    def reset(self) -> None:
        """Output and workspace as before the first run."""
        self.tensors["o"].poison()
        cu("cudaMemset", self.workspace.pointer(), POISON, self.workspace.size)

    def run(self) -> NDArray[np.float32]:
        self.launch()
        synchronize()
        return self.values()

    def values(self) -> NDArray[np.float32]:
        return self.tensors["o"].values()

    def bits(self) -> Array:
        return self.tensors["o"].bits()

    def assert_clean(self) -> None:
        """Nothing but the output's elements and the workspace was written."""
        for name in "qkv":
            assert self.tensors[name].unchanged(), f"{name} was written to"
        assert self.tensors["o"].gaps_whole(), "written between or beside the output's elements"
        assert self.workspace.guards_whole(), "written beside the workspace"
