"""sage_cuda.h as others will include it, and the tests' own binding where it needs no library."""

import subprocess
from pathlib import Path

import binding
import numpy as np
import pytest
from binding import HEADER, Layout, ffi, from_bf16, to_bf16

USER = """
#include "sage_cuda.h"
#ifdef __cplusplus
int main() { return sage_abi_version() != SAGE_ABI_VERSION || SAGE_OK != 0; }
#else
int main(void) {
    sage_attn_desc d = {.struct_size = sizeof(d), .kernel = SAGE_KERNEL_AUTO, .bias = NULL};
    sage_attn_choice c = {.struct_size = sizeof(c)};
    sage_device v = {.compute_capability = 90, .toolkit = 13000, .architectures = "90a"};
    sage_status (*run)(const sage_attn_desc *, void *, size_t, void *) = sage_attn_run;
    return run == NULL || sage_attn_choose(&d, &v, &c) != SAGE_OK;
}
#endif
"""
WARNINGS = ["-Wall", "-Wextra", "-Werror", "-pedantic"]


@pytest.mark.parametrize(("compiler", "suffix", "standard"), [("cc", "c", "c11"), ("c++", "cpp", "c++20")])
def test_header_compiles_alone(compiler: str, suffix: str, standard: str, tmp_path: Path) -> None:
    source = tmp_path / f"user.{suffix}"
    source.write_text(USER)
    options = [f"-std={standard}", *WARNINGS, f"-I{HEADER.parent}", "-o", str(tmp_path / "user.o")]
    done = subprocess.run([compiler, *options, "-c", str(source)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_structs_have_the_compilers_layout(tmp_path: Path) -> None:
    """The binding reads the header as text: sizes and offsets must come out as a compiler's."""
    fields = [
        (kind, name)
        for kind in ("sage_tensor", "sage_attn_desc", "sage_device", "sage_attn_choice", "sage_attn_layout")
        for name, _ in ffi.typeof(kind).fields
    ]
    lines = [f'printf("%zu %zu\\n", sizeof({kind}), offsetof({kind}, {name}));' for kind, name in fields]
    source = tmp_path / "layout.c"
    source.write_text(f'#include <stdio.h>\n#include "sage_cuda.h"\nint main(void) {{ {"".join(lines)} return 0; }}')
    program = tmp_path / "layout"
    subprocess.run(["cc", f"-I{HEADER.parent}", source, "-o", program], check=True)
    printed = subprocess.run([program], capture_output=True, text=True, check=True).stdout.splitlines()
    assert printed == [f"{ffi.sizeof(kind)} {ffi.offsetof(kind, name)}" for kind, name in fields]


def test_bf16_rounds_to_even() -> None:
    x = np.array([1.0, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, -3.1e38, np.inf, -0.0], np.float32)
    assert from_bf16(to_bf16(x)).tolist() == [
        1.0,
        1.0,
        1 + 2**-6,
        1 + 2**-7,
        float(from_bf16(to_bf16(x))[4]),
        np.inf,
        0,
    ]
    assert abs(from_bf16(to_bf16(x))[4] / x[4] - 1) < 2**-8
    assert np.isnan(from_bf16(to_bf16(np.array([np.nan])))[0])


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("layout", [Layout(), Layout("bth", (3, 5, 7), 1), Layout("tbh", (0, 8, 16), 4)], ids=str)
def test_what_lies_between_the_elements_is_poison(dtype: str, layout: Layout) -> None:
    x = np.arange(2 * 3 * 4 * 5, dtype=np.float32).reshape(2, 3, 4, 5)
    flat, view = binding.host_image(x, dtype, layout)
    (b, h, t), size = layout.strides(x.shape)
    assert len(flat) == size
    assert np.array_equal(binding.load(view, dtype), x)
    values = binding.load(flat, dtype)
    assert np.isnan(values).sum() == size - x.size
    assert values[layout.lead + b + 2 * h + 3 * t + 4] == x[1, 2, 3, 4]
