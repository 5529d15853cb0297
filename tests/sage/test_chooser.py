"""The selection table of the specification with made-up devices: no GPU, but the compiled library."""

import itertools
import threading
from typing import Any

import binding
import pytest
from binding import NO_LIBRARY, Choice, StatusError, describe, device, ffi, sage, text
from codes import workspace_layout

pytestmark = pytest.mark.skipif(binding.library_path() is None, reason=NO_LIBRARY)

ALL = "80 86 89 90a 100a 103a 110a 120a 121a"
EMULATED = {90, 100, 103, 110}  # e4m3 mma.sync is native on SM89 and SM12x alone


HOPPER = "80 86 87 89 90a"
BLACKWELL = f"{HOPPER} 100a 120a"
NEWEST = f"{HOPPER} 100a 103a 120a 121a"
# The most that a build with each toolkit can hold, as docs/builds.md has it for those that were tried.
KNOWN = {
    **dict.fromkeys((12000, 12010, 12020, 12030, 12040, 12050, 12060), HOPPER),
    12080: BLACKWELL,
    **dict.fromkeys((12090, 13000, 13010, 13020, 13030, 13040, 13050), NEWEST),
}
# The toolkit to rebuild with, in the words of the choice, for the kernel that is chosen instead of a better one.
REBUILD = {"fp16": "12.4", "fp8": "12.8"}


def expected(cc: int, toolkit: int) -> str | None:
    """The table, row by row, for a build with code for each of these GPUs."""
    if cc == 90 and toolkit >= 12000:
        return "hopper"
    if cc >= 89 and toolkit >= 12080:
        return "fp8++"
    if cc >= 89 and toolkit >= 12040:
        return "fp8"
    if cc >= 80 and toolkit >= 12000:
        return "fp16"
    return None


def ask(cc: int, toolkit: int = 13000, kernel: str = "auto", architectures: str = ALL, **more: Any) -> Choice:
    return binding.choose(describe(kernel, **more), device(cc, toolkit, architectures))


@pytest.mark.parametrize("toolkit", [11080, 12000, 12030, 12040, 12060, 12080, 12090, 13000])
@pytest.mark.parametrize("cc", [70, 75, 80, 86, 87, 89, 90, 100, 103, 110, 120, 121])
def test_the_selection_table(cc: int, toolkit: int) -> None:
    choice, want = ask(cc, toolkit), expected(cc, toolkit)
    assert choice.supported == (want is not None)
    assert (choice.compute_capability, choice.toolkit, choice.architectures) == (cc, toolkit, ALL)
    assert choice.abi_version == binding.ABI_VERSION
    if want is None:
        assert choice.reason
        return
    assert choice.kernel == want
    assert choice.reason == ""
    assert choice.emulated == (want in ("fp8", "fp8++") and cc in EMULATED)
    if choice.emulated:
        assert "fp16" in choice.why_not_better
    assert bool(choice.why_not_better) == (want not in ("fp8++", "hopper") or choice.emulated)
    assert choice.workspace % 256 == 0


@pytest.mark.parametrize("toolkit", KNOWN)
@pytest.mark.parametrize("cc", [80, 86, 87, 89, 90, 100, 103, 120, 121])
def test_the_table_for_all_that_a_toolkit_can_build(cc: int, toolkit: int) -> None:
    """What runs, and with which toolkit to build again for what is better."""
    choice = ask(cc, toolkit, architectures=KNOWN[toolkit])
    if str(cc) not in KNOWN[toolkit].replace("a", "").split():
        assert not choice.supported
        assert "not compiled for this GPU's architecture" in choice.reason
        return
    want = expected(cc, toolkit)
    assert choice.supported
    assert choice.kernel == want
    if cc < 89:
        assert "8.9 or newer" in choice.why_not_better
    elif want in ("fp8++", "hopper"):
        assert "build" not in choice.why_not_better
    else:
        assert f"CUDA {REBUILD[want]} or newer: build them with a newer toolkit" in choice.why_not_better


@pytest.mark.parametrize("toolkit", KNOWN)
@pytest.mark.parametrize(("kernel", "first"), [("fp8", 12040), ("fp8++", 12080)])
def test_a_pinned_kernel_names_the_toolkit_it_needs(kernel: str, first: int, toolkit: int) -> None:
    choice = ask(89, toolkit, kernel, KNOWN[toolkit])
    assert choice.supported == (toolkit >= first)
    if not choice.supported:
        assert f"{kernel} needs kernels compiled with CUDA {first // 1000}.{first // 10 % 100}" in choice.reason


@pytest.mark.parametrize("toolkit", [12000, 12040, 12080, 13000])
@pytest.mark.parametrize("cc", [80, 86, 89, 90, 100, 120])
@pytest.mark.parametrize(
    ("kernel", "first_cc", "first_toolkit"),
    [("fp16", 80, 12000), ("fp8", 89, 12040), ("fp8++", 89, 12080), ("hopper", 90, 12000)],
)
def test_an_explicit_kernel_runs_or_is_refused_with_a_reason(
    kernel: str, first_cc: int, first_toolkit: int, cc: int, toolkit: int
) -> None:
    choice = ask(cc, toolkit, kernel)
    there = cc == 90 if kernel == "hopper" else cc >= first_cc
    assert choice.supported == (there and toolkit >= first_toolkit), choice
    if choice.supported:
        assert choice.kernel == kernel
        assert choice.emulated == (kernel in ("fp8", "fp8++") and cc in EMULATED)
    else:
        assert len(choice.reason) > 20


@pytest.mark.parametrize(
    ("cc", "architectures", "want"),
    [
        (86, "80", "fp16"),  # code for 8.0 runs on 8.6
        (87, "80 86", "fp16"),
        (89, "80 86", "fp16"),  # and on 8.9, but holds no FP8 kernel
        (80, "86", None),  # code for 8.6 does not run on 8.0
        (90, "80 86 89", None),
        (89, "90a", None),
        (90, "90a", "hopper"),
        (90, "90", "fp8"),  # wgmma is of 9.0a alone
        (90, "90 90a", "fp8"),  # which of the two runs is not ours to say
        (100, "90a 120a", None),
        (103, "100a", None),  # 'a' code runs on its own chip alone
        (121, "120a", None),
        (120, "80 120a", "fp8++"),
        (120, "", None),
    ],
)
def test_only_compiled_architectures_run(cc: int, architectures: str, want: str | None) -> None:
    choice = ask(cc, architectures=architectures)
    assert choice.supported == (want is not None), choice
    if want is None:
        assert "architecture" in choice.reason
    else:
        assert choice.kernel == want
        assert choice.why_not_better or want in ("fp8++", "hopper")


@pytest.mark.parametrize("dim", [1, 8, 40, 63, 64, 65, 80, 96, 127, 128])
def test_head_sizes_up_to_128(dim: int) -> None:
    assert ask(89, shape=(1, 2, 1, 5, 7, dim)).supported


@pytest.mark.parametrize("dim", [129, 160, 256, 384, 512])
def test_larger_heads_are_refused_by_size(dim: int) -> None:
    choice = ask(89, shape=(1, 1, 1, 64, 64, dim))
    assert not choice.supported
    assert "128" in choice.reason


def test_workspace_grows_with_the_problem() -> None:
    """At least a byte for every element of q, k and v, padded; and 64-bit sizes."""
    for kernel in ("fp16", "fp8", "fp8++"):
        sizes = [ask(89, kernel=kernel, shape=(2, 8, 4, 1000, n, 72)).workspace for n in (1, 64, 65, 1000, 4097)]
        assert sizes == sorted(sizes)
        small, large = (ask(89, kernel=kernel, shape=(1, 40, 40, n, n, 128)).workspace for n in (2**15, 2**20))
        assert small >= 3 * 40 * 2**15 * 128
        assert large >= 3 * 40 * 2**20 * 128 > 2**32


@pytest.mark.parametrize(
    ("architectures", "kernel", "rows"),
    [
        ("90a", "fp16", 192),  # wgmma
        ("80 90a", "fp16", 192),
        ("90", "fp16", 128),
        ("90 90a", "fp16", 128),  # which of the two runs is not ours to say
        ("90a", "fp8", 128),
    ],
)
def test_where_codes_and_scales_lie(architectures: str, kernel: str, rows: int) -> None:
    """Parts of the workspace, whole and apart, padded to the tiles of the kernel that runs."""
    on, desc = device(90, 13000, architectures), describe(kernel, (2, 4, 2, 200, 300, 72))
    layout = workspace_layout(desc, on)
    assert layout.padded_dim == 128
    assert (layout.q_rows, layout.k_rows) == (-(-200 // rows) * rows, 384)
    v_bytes = 2 if kernel == "fp16" else 1
    sizes = {
        "q_codes": 2 * 4 * layout.q_rows * 128,
        "k_codes": 2 * 2 * 384 * 128,
        "v_codes": 2 * 2 * 384 * 128 * v_bytes,
        "q_scales": 2 * 4 * layout.q_rows // 32 * 8 * 4,
        "k_scales": 2 * 2 * 384 // 64 * 4 * 4,
        "v_scales": 2 * 2 * 128 * 4,
        "k_mean": 2 * 2 * 128 * 4,
        "v_mean": 2 * 2 * 128 * 4,
    }
    ends = sorted((getattr(layout, name), getattr(layout, name) + size) for name, size in sizes.items())
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ends))
    assert ends[-1][1] <= binding.choose(desc, on).workspace


def test_a_layout_is_refused_as_a_run_is() -> None:
    on = device(89, 13000, ALL)
    with pytest.raises(StatusError) as error:
        workspace_layout(describe(shape=(1, 1, 1, 8, 8, 160)), on)
    assert error.value.status == sage().SAGE_UNSUPPORTED
    layout = ffi.new("sage_attn_layout *")  # without its struct_size
    assert sage().sage_attn_workspace_layout(describe(), on, layout) == sage().SAGE_BAD_ARGUMENT
    assert sage().sage_attn_workspace_layout(describe(), on, ffi.NULL) == sage().SAGE_BAD_ARGUMENT
    assert text(sage().sage_last_error())


BAD = {
    "struct_size": 0,
    "kernel": 99,
    "batch": 0,
    "heads": 3,  # not a multiple of 2
    "kv_heads": 0,
    "head_dim": 0,
    "lq": 0,
    "lk": -1,
    "softmax_scale": float("nan"),
}


@pytest.mark.parametrize("field", BAD)
def test_a_contradiction_is_a_status_with_text(field: str) -> None:
    desc = describe(shape=(1, 4, 2, 8, 8, 16))
    setattr(desc, field, BAD[field])
    with pytest.raises(StatusError) as error:
        binding.choose(desc, device(89, 13000, ALL))
    assert error.value.status == sage().SAGE_BAD_ARGUMENT
    assert len(error.value.text) > 10


@pytest.mark.parametrize("tensor", "qkvo")
def test_an_unknown_type_is_a_status(tensor: str) -> None:
    desc = describe()
    getattr(desc, tensor).dtype = 7
    with pytest.raises(StatusError) as error:
        binding.choose(desc, device(89, 13000, ALL))
    assert error.value.status == sage().SAGE_BAD_ARGUMENT


def test_null_pointers_are_statuses() -> None:
    desc, on, choice = describe(), device(89, 13000, ALL), ffi.new("sage_attn_choice *")
    choice.struct_size = ffi.sizeof("sage_attn_choice")
    for args in ((ffi.NULL, on, choice), (desc, ffi.NULL, choice), (desc, on, ffi.NULL)):
        assert sage().sage_attn_choose(*args) == sage().SAGE_BAD_ARGUMENT
        assert text(sage().sage_last_error())
    choice.struct_size = 4
    assert sage().sage_attn_choose(desc, on, choice) == sage().SAGE_BAD_ARGUMENT


@pytest.mark.parametrize(("batch", "lq", "lk"), [(1, 2**62, 8), (1, 8, 2**62), (2**31 - 1, 2**40, 8)])
def test_sizes_past_all_memory_never_wrap(batch: int, lq: int, lk: int) -> None:
    desc = describe(shape=(1, 1, 1, 8, 8, 128))
    desc.batch, desc.lq, desc.lk = batch, lq, lk
    try:
        choice = binding.choose(desc, device(89, 13000, ALL))
    except StatusError:
        return
    assert not choice.supported or choice.workspace >= 2**40


def test_kernel_names() -> None:
    names = ["auto", "fp16", "fp8", "fp8++", "hopper"]
    assert [text(sage().sage_kernel_name(n)) for n in range(5)] == names
    sage().sage_kernel_name(99)  # whatever it says, it returns


def test_the_last_error_is_each_threads_own() -> None:
    with pytest.raises(StatusError):
        binding.choose(describe(shape=(0, 1, 1, 1, 1, 1)), device(89, 13000, ALL))
    other: list[str] = []
    thread = threading.Thread(target=lambda: other.append(text(sage().sage_last_error())))
    thread.start()
    thread.join()
    assert other == [""]
    assert text(sage().sage_last_error())


def test_choosing_is_the_same_from_many_threads() -> None:
    found: list[Choice] = []

    def work() -> None:
        for dim in range(1, 129):
            found.append(ask(89, shape=(1, 2, 1, 33, 77, dim)))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 512
    assert len({(c.kernel, c.workspace) for c in found}) <= 128


def test_without_a_driver_the_query_is_a_status() -> None:
    """On a machine without a GPU the library still loads, and says so."""
    status = sage().sage_device_query(10**6, ffi.new("sage_device *"))
    assert status != sage().SAGE_OK
    assert text(sage().sage_last_error())
    assert sage().sage_device_query(0, ffi.NULL) == sage().SAGE_BAD_ARGUMENT
