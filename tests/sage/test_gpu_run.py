"""How a run behaves: deterministic, on the caller's stream, capturable, without errors left behind; random cases."""

import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import binding
import numpy as np
import pytest
import reference as ref
from binding import Case, Layout, StatusError, Stream, capture, cu, describe, ffi, sage, synchronize
from checked import attention, available, close, each_kernel, gpu, need, normal
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytestmark = gpu

SHAPES = [(1, 2, 2, 300, 500, 128), (2, 4, 2, 129, 1000, 64)]


@each_kernel
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_two_runs_agree_bit_for_bit(kernel: str, shape: Any) -> None:
    """Over many repetitions: an accuracy limit does not see a rare race. The workspace starts as NaN or as zeros."""
    need(kernel)
    with Case(*normal(*shape), kernel) as case:
        case.run()
        right = case.bits()
        for i in range(100):
            case.reset()
            if i % 2:
                cu("cudaMemset", case.workspace.pointer(), 0, case.workspace.size)
            case.launch()
            synchronize()
            assert np.array_equal(case.bits(), right)
        case.assert_clean()


@each_kernel
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize(
    "more", [{}, {"causal": True}, {"bias": np.zeros((1, 2000), np.float32)}], ids=["", "causal", "bias"]
)
def test_a_large_run_repeats_bit_for_bit(kernel: str, dim: int, more: Any) -> None:
    """All of the chip busy, the last tile ragged: a stage of shared memory that is reused too early shows only so."""
    need(kernel)
    with Case(*normal(1, 24, 24, 2048, 2000, dim), kernel, dtypes=("f16",) * 3 + ("f32",), **more) as case:
        case.run()
        right = case.bits()
        for _ in range(20):
            for _ in range(10):
                case.launch()
            synchronize()
            assert np.array_equal(case.bits(), right)


@each_kernel
def test_batch_position_does_not_matter(kernel: str) -> None:
    q, k, v = normal(1, 2, 2, 100, 300, 64)
    one = attention(kernel, q, k, v)
    many = attention(kernel, np.repeat(q, 5, 0), np.repeat(k, 5, 0), np.repeat(v, 5, 0))
    assert all(np.array_equal(many[b : b + 1], one) for b in range(5))


@each_kernel
def test_two_streams_at_once(kernel: str) -> None:
    """K27. Interleaved launches on two streams that do not wait for each other."""
    need(kernel)
    streams = [Stream(), Stream()]
    shapes = [(1, 8, 8, 1024, 1024, 128), (2, 6, 3, 777, 1500, 64)]
    with Case(*normal(*shapes[0]), kernel) as a, Case(*normal(*shapes[1]), kernel) as b:
        right = []
        for case in (a, b):
            case.run()
            right.append(case.bits())
            case.reset()
        synchronize()
        for _ in range(20):
            for case, stream in zip((a, b), streams, strict=True):
                case.launch(stream)
        for stream in streams:
            stream.synchronize()
        assert np.array_equal(a.bits(), right[0])
        assert np.array_equal(b.bits(), right[1])
        synchronize()
    for stream in streams:
        stream.free()


@each_kernel
def test_two_threads_at_once(kernel: str) -> None:
    need(kernel)
    failures: list[str] = []

    def work(seed: int) -> None:
        try:
            stream = Stream()
            q, k, v = normal(1, 4, 2, 200 + seed, 500, 64, seed)
            with Case(q, k, v, kernel) as case:
                for _ in range(20):
                    case.launch(stream)
                stream.synchronize()
                close(kernel, case.values(), q, k, v)
        except BaseException as error:
            failures.append(repr(error))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


@each_kernel
def test_the_callers_stream_alone_is_used(kernel: str) -> None:
    """K27. Work waits behind a long fill on its stream: a launch elsewhere would read the inputs too early."""
    need(kernel)
    stream, q, k, v = Stream(), *normal(1, 2, 2, 200, 300, 64)
    big = binding.Memory(2**30, poison=False)
    with Case(q, k, v, kernel) as case:
        right = case.run()
        late = binding.Tensor.put(q)  # the query arrives on the stream, behind the fill
        cu("cudaMemset", case.tensors["q"].memory.pointer(), 0, q.nbytes)
        case.reset()
        synchronize()
        for _ in range(20):
            cu("cudaMemsetAsync", big.pointer(), 1, big.size, stream.handle)
        cu("cudaMemcpyAsync", case.tensors["q"].memory.pointer(), late.memory.pointer(), q.nbytes, 3, stream.handle)
        case.launch(stream)
        still_busy = binding.busy(stream)
        stream.synchronize()
        assert still_busy, "the run waited for the stream"
        assert np.array_equal(case.values(), right)
        late.memory.free()
    big.free()
    stream.free()


@each_kernel
@pytest.mark.parametrize(
    "more", [{}, {"causal": True}, {"bias": np.zeros((1, 700), np.float32)}], ids=["", "causal", "bias"]
)
def test_graph_capture_and_replay(kernel: str, more: Any) -> None:
    """K27. Strict capture: nothing in a run may allocate or synchronise. New data under the same graph."""
    need(kernel)
    stream = Stream()
    q, k, v = normal(1, 4, 2, 300, 700, 64)
    with Case(q, k, v, kernel, **more) as case:
        right = case.run()
        case.reset()
        synchronize()
        with capture(stream) as made:
            case.launch(stream)
        graph = made[0]
        assert graph.nodes >= 1
        assert np.isnan(case.values()).all(), "ran while it was captured"
        for _ in range(3):
            case.reset()
            synchronize()
            graph.launch(stream)
            stream.synchronize()
            assert np.array_equal(case.values(), right)
        case.tensors["v"].memory.write(np.ascontiguousarray(-v))
        graph.launch(stream)
        stream.synchronize()
        assert np.array_equal(case.values(), -right)
        graph.free()
    stream.free()


def fresh_process(code: str) -> None:
    """`code` with a case of its own; what it breaks stays its own."""
    head = "import binding\nimport numpy as np\nq = np.ones((1, 1, 70, 64), np.float32)\n"
    done = subprocess.run(
        [sys.executable, "-c", head + code], cwd=Path(__file__).parent, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_capture_before_any_run() -> None:
    """What a first run sets up must be allowed under capture too."""
    fresh_process(
        "with binding.Case(q, q, q) as case:\n"
        "    stream = binding.Stream()\n"
        "    with binding.capture(stream) as made: case.launch(stream)\n"
        "    made[0].launch(stream); stream.synchronize()\n"
        "    assert abs(case.values() - 1).max() < 0.01\n"
    )


# --- several devices -------------------------------------------------------------------------------------------------


def test_a_second_device() -> None:
    if binding.device_count() < 2:
        pytest.skip("one device")
    q, k, v = normal(1, 2, 2, 200, 300, 64)
    right = attention("auto", q, k, v)
    cu("cudaSetDevice", 1)
    try:
        assert np.array_equal(attention("auto", q, k, v), right)
    finally:
        cu("cudaSetDevice", 0)
    assert np.array_equal(attention("auto", q, k, v), right)


# --- errors ----------------------------------------------------------------------------------------------------------


def refused(case: Case, status: str, change: Any = None, **run: Any) -> str:
    """A run that must fail with a text and write nothing."""
    case.reset()
    keep = ffi.new("sage_attn_desc *", case.desc[0])
    if change is not None:
        change(case.desc)
    address = case.workspace.address + run.get("shift", 0)
    workspace = ffi.NULL if run.get("no_workspace") else ffi.cast("void *", address)
    desc = ffi.NULL if run.get("no_desc") else case.desc
    got = sage().sage_attn_run(desc, workspace, run.get("size", case.workspace.size), ffi.NULL)
    said = binding.text(sage().sage_last_error())
    case.desc[0] = keep[0]
    synchronize()
    assert got == getattr(sage(), status), said
    assert len(said) > 10
    assert (case.tensors["o"].memory.read() == binding.POISON).all(), "wrote output"
    assert (case.workspace.read() == binding.POISON).all(), "wrote to the workspace"
    return said


def setter(path: str, value: Any) -> Any:
    *parts, last = path.split(".")

    def change(desc: Any) -> None:
        for part in parts:
            desc = getattr(desc, part)
        setattr(desc, last, value)

    return change


BAD = [
    ("struct_size", 0),
    ("kernel", 99),
    ("batch", 0),
    ("batch", -1),
    ("heads", 3),
    ("kv_heads", 0),
    ("head_dim", 0),
    ("head_dim", -64),
    ("lq", 0),
    ("lk", 0),
    ("softmax_scale", float("nan")),
    ("softmax_scale", float("inf")),
    *((f"{name}.dtype", 5) for name in "qkvo"),
    *((f"{name}.data", ffi.NULL) for name in "qkvo"),
]


@pytest.mark.parametrize(("field", "value"), BAD, ids=lambda x: str(x))
def test_a_contradiction_writes_nothing(field: str, value: Any) -> None:
    with Case(*normal(1, 4, 2, 70, 90, 64)) as case:
        refused(case, "SAGE_BAD_ARGUMENT", setter(field, value))
        right = case.run()  # and leaves nothing behind
        assert np.isfinite(right).all()


@pytest.mark.parametrize("dim", [129, 160, 256, 384, 512])
def test_larger_heads_write_nothing(dim: int) -> None:
    """K13."""
    with Case(*normal(1, 4, 2, 70, 90, 64)) as case:
        assert str(dim) in refused(case, "SAGE_UNSUPPORTED", setter("head_dim", dim))


def test_the_workspace_is_checked() -> None:
    with Case(*normal(1, 4, 2, 70, 90, 64)) as case:
        refused(case, "SAGE_BAD_ARGUMENT", size=case.workspace.size - 1)
        refused(case, "SAGE_BAD_ARGUMENT", size=0)
        refused(case, "SAGE_BAD_ARGUMENT", shift=16)
        refused(case, "SAGE_BAD_ARGUMENT", no_workspace=True)
        refused(case, "SAGE_BAD_ARGUMENT", no_desc=True)


@pytest.mark.parametrize("name", "qkvo")
def test_half_an_element_of_offset_is_refused(name: str) -> None:
    """In a process of its own: unrefused, it ends the process's use of the device."""
    fresh_process(
        "with binding.Case(q, q, q, dtypes=('f16',) * 4) as case:\n"
        f"    case.desc.{name}.data = binding.ffi.cast('char *', case.desc.{name}.data) + 1\n"
        "    try: case.run()\n"
        "    except binding.StatusError as error: assert error.status == binding.sage().SAGE_BAD_ARGUMENT\n"
        "    else: raise SystemExit('it ran')\n"
    )


@each_kernel
def test_a_refused_kernel_writes_nothing(kernel: str) -> None:
    """Where the device has the kernel there is nothing to refuse."""
    q, k, v = normal(1, 2, 2, 70, 90, 64)
    choice = binding.choose(describe(kernel))
    if choice.supported:
        assert choice.kernel == kernel
        return
    with Case(q, k, v) as case:
        said = refused(case, "SAGE_UNSUPPORTED", setter("kernel", binding.KERNELS[kernel]))
        assert kernel in said
        with pytest.raises(StatusError):
            binding.check(sage().SAGE_UNSUPPORTED)


def test_auto_runs_what_the_choice_says() -> None:
    q, k, v = normal(1, 2, 2, 100, 200, 64)
    name = binding.choose(describe()).kernel
    assert np.array_equal(attention("auto", q, k, v), attention(name, q, k, v))


def test_the_listed_architectures_are_those_in_the_file() -> None:
    tool = shutil.which("cuobjdump") or shutil.which("cuobjdump", path="/usr/local/cuda/bin")
    if tool is None:
        pytest.skip("no cuobjdump")
    listed = subprocess.run(
        [tool, "--list-elf", str(binding.library_path())], capture_output=True, text=True, check=True
    )
    names = binding.text(binding.real_device().architectures).split()
    assert set(re.findall(r"\.sm_(\w+)\.", listed.stdout)) == {name for name in names if "compute" not in name}


# --- random cases ----------------------------------------------------------------------------------------------------

LENGTHS = st.sampled_from([1, 2, 7, 15, 16, 17, 31, 33, 63, 64, 65, 127, 128, 129, 191, 257]) | st.integers(1, 400)
GAPS = st.sampled_from([0, 0, 1, 3, 4, 8, 16])
LAYOUTS = st.builds(
    Layout, st.permutations("bht").map("".join), st.tuples(GAPS, GAPS, GAPS), st.sampled_from([0, 0, 1, 2, 4, 8])
)
DTYPES = st.sampled_from(["f32", "f16", "bf16"])


def random_bias(kind: str, batch: int, lk: int, rng: np.random.Generator) -> Any:
    if kind == "none":
        return None
    bias = rng.normal(0, 2, (batch if "each" in kind else 1, lk)).astype(np.float32)
    if "holes" in kind:
        bias[rng.random(bias.shape) < rng.random()] = -np.inf
    if "run" in kind:
        bias[-1, int(rng.integers(0, lk)) :] = -np.inf
    return bias


@settings(max_examples=400, deadline=None, database=None, print_blob=True, suppress_health_check=list(HealthCheck))
@given(
    kernel=st.sampled_from(ref.KERNELS),
    batch=st.integers(1, 3),
    kv_heads=st.integers(1, 3),
    share=st.integers(1, 3),
    lq=LENGTHS,
    lk=LENGTHS,
    dim=st.sampled_from([1, 8, 40, 63, 64, 65, 72, 80, 96, 127, 128]) | st.integers(1, 128),
    layouts=st.tuples(LAYOUTS, LAYOUTS, LAYOUTS, LAYOUTS),
    dtypes=st.tuples(DTYPES, DTYPES, DTYPES, DTYPES),
    bias=st.sampled_from(["none", "none", "shared", "each", "shared holes", "each holes", "each run"]),
    causal=st.booleans(),
    seed=st.integers(0, 2**20),
)
def test_random_cases(
    kernel: str,
    batch: int,
    kv_heads: int,
    share: int,
    lq: int,
    lk: int,
    dim: int,
    layouts: Any,
    dtypes: Any,
    bias: str,
    causal: bool,
    seed: int,
) -> None:
    if not binding.choose(describe(kernel)).supported:
        return
    q, k, v = normal(batch, kv_heads * share, kv_heads, lq, lk, dim, seed)
    given_bias = random_bias(bias, batch, lk, np.random.default_rng(seed))
    more = {"bias": given_bias, "causal": causal}
    out = attention(kernel, q, k, v, dtypes, layouts, bias_lead=seed % 3, bias_gap=seed % 5, **more)
    close(kernel, out, q, k, v, dtypes, **more)
    assert np.array_equal(attention(kernel, q, k, v, dtypes, **more), out), "differs from the contiguous copy"


def test_2000_calls() -> None:
    """Random shapes one after the other, each checked for errors, every tenth for its result."""
    rng = np.random.default_rng(5)
    kernels = available()
    free = 0
    for i in range(2000):
        kv_heads, share = int(rng.integers(1, 4)), int(rng.integers(1, 4))
        lq, lk = (int(2 ** rng.uniform(0, 10)) for _ in range(2))
        q, k, v = normal(int(rng.integers(1, 3)), kv_heads * share, kv_heads, lq, lk, int(rng.integers(1, 129)), i)
        kernel, causal = kernels[i % len(kernels)], bool(rng.random() < 0.3)
        with Case(q, k, v, kernel, causal=causal) as case:
            out = case.run()
            assert np.isfinite(out).all()
            if i % 10 == 0:
                case.assert_clean()
                close(kernel, out, q, k, v, causal=causal)
        if i == 200:
            free = binding.free_memory()
    assert binding.free_memory() >= free - 2**24, "memory is lost"
