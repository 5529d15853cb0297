"""The library as a C program sees it: visible symbols, another ggml beside it, errors, the C example."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from conftest import BUILD, ROOT, ctx_params, small_image

import sdsage
from sdsage import _ffi
from sdsage._ffi import ffi, lib, text
from sdsage._library import ABI_VERSION, cdef_path, library_path

LIBRARY = library_path()


def declared_functions() -> set[str]:
    return {name for name in dir(lib) if callable(getattr(lib, name)) and not name.isupper()}


def test_only_the_api_is_visible() -> None:
    listed = subprocess.run(["nm", "-D", "--defined-only", LIBRARY], capture_output=True, text=True, check=True)
    assert {line.split()[-1] for line in listed.stdout.splitlines()} == declared_functions()


def test_no_path_of_the_build_machine_is_in_the_library() -> None:
    """Log lines, assertions and build information name files of the tree."""
    assert "/" not in text(lib.sdsage_build_info())
    content = LIBRARY.read_bytes()
    for folder in (ROOT, BUILD):
        assert os.fsencode(folder) not in content
    assert b"src/wan.hpp" in content


def test_build_info_names_pin_and_backend() -> None:
    info = sdsage.build_info()
    assert info["upstream"]["name"] == "stable-diffusion-cpp-python"
    assert re.fullmatch(r"[0-9a-f]{64}", info["upstream"]["sha256"])
    assert "cpu" in info["backends"]
    assert os.access(info["sd_cli"], os.X_OK)


def test_devices_are_named_as_device_takes_them() -> None:
    cpu = next(d for d in sdsage.devices() if d.kind == "cpu")
    assert cpu.name == "cpu"
    assert cpu.memory_total > 2**28


BESIDE = """
import ctypes, sys
other = ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL)
assert other.ggml_type_size(0) == 4          # it is the other one, and it works
import sdsage
sys.path.insert(0, sys.argv[2])
from conftest import ctx_params, small_image
from sdsage import presets
files = {k: v for k, v in presets.load("tiny-flux").options.items() if str(v).endswith((".gguf", ".safetensors"))}
with sdsage.Context(ctx_params(files)) as ctx:
    sys.stdout.buffer.write(ctx.generate_image(small_image()).frames.tobytes())
"""


def test_another_ggml_loaded_globally_first_changes_nothing(flux_context: Any) -> None:
    """A ggml with another GGML_MAX_NAME (64, ggml's own default) in the same process: neither calls into the other."""
    other = BUILD / "bin" / "libggml-other.so"
    listed = subprocess.run(["nm", "-D", "--defined-only", other], capture_output=True, text=True, check=True).stdout
    assert " ggml_init\n" in listed
    done = subprocess.run([sys.executable, "-P", "-c", BESIDE, other, ROOT / "tests"], capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout == flux_context.generate_image(small_image()).frames.tobytes()


def test_exception_becomes_error(preset_files: Any, tmp_path: Path) -> None:
    """A width that is no multiple of the head size throws inside the engine; the C API returns NULL with the reason."""
    from sdsage.tiny.gguf import header, pad
    from sdsage.tiny.tensors import Constant, DType, Tensor

    tensors = [
        Tensor("patch_embedding.weight", (96 * 16, 1, 2, 2), DType.F16, Constant(0.0)),
        Tensor("patch_embedding.bias", (96,), DType.F32, Constant(0.0)),
        Tensor("blocks.0.cross_attn.norm_k.weight", (96,), DType.F32, Constant(1.0)),
    ]
    bad = tmp_path / "width96.gguf"
    bad.write_bytes(header(tensors, {"general.architecture": "wan"}) + b"".join(pad(t.data(0)) for t in tensors))
    files = {**preset_files("tiny-random"), "diffusion_model": str(bad)}
    del files["high_noise_diffusion_model"]
    with pytest.raises(sdsage.SdsageError, match=r"width 96.*multiple of the head size 128"):
        sdsage.Context(ctx_params(files))


def test_null_arguments_are_errors() -> None:
    assert lib.generate_image(ffi.NULL, ffi.NULL) == ffi.NULL
    assert lib.sdsage_last_status() == lib.SDSAGE_FAILED
    assert text(lib.sdsage_last_error())


def test_log_lines_are_whole() -> None:
    """Eight threads log at once; with upstream's one static buffer lines mix."""
    done = subprocess.run([BUILD / "bin" / "probe_log"], capture_output=True, text=True)
    assert done.stdout == "16000 whole lines\n"


ABORT = """
import sdsage
from sdsage._ffi import ffi, lib
@ffi.callback("sdsage_abort_cb_t")
def on_abort(message, data):
    print("HANDED OVER", ffi.string(message).decode(), flush=True)
lib.sdsage_set_abort_callback(on_abort, ffi.NULL)
from conftest import ctx_params
import numpy as np
from sdsage import presets
files = {k: v for k, v in presets.load("tiny-random").options.items() if str(v).endswith((".gguf", ".safetensors"))}
ctx = sdsage.Context(ctx_params(files))
keep = []
img = ffi.new("sd_img_gen_params_t *")
lib.sd_img_gen_params_init(img)
img.prompt = a = ffi.new("char[]", b"x")
img.width = img.height = 64
img.init_image = sdsage._ffi.image_to_c(np.zeros((64, 64, 3), np.uint8), keep)   # the VAE has no encoder: ggml aborts
lib.generate_image(ctx._native, img)
"""


def test_abort_message_is_handed_over() -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-c", ABORT],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": _pythonpath()},
    )
    assert done.returncode == -6, done.stdout + done.stderr
    assert "HANDED OVER" in done.stdout
    assert "GGML_ASSERT" in done.stdout
    assert "GGML_ASSERT" in done.stderr


def _pythonpath() -> str:
    return os.pathsep.join(filter(None, [str(ROOT / "tests"), os.environ.get("PYTHONPATH")]))


def test_one_job_at_a_time(preset_files: Any, flux_context: Any) -> None:
    """Two contexts in two threads: jobs wait for each other, and no callback hears the other's job."""
    heard: dict[str, list[Any]] = {"a": [], "b": []}
    spans: dict[str, list[str]] = {"order": []}

    def listen(name: str) -> Any:
        def on_progress(p: Any) -> None:
            heard[name].append(p)
            spans["order"].append(name)

        return on_progress

    with sdsage.Context(ctx_params(preset_files("tiny-flux"))) as second:
        jobs = {"a": (flux_context, small_image(seed=1)), "b": (second, small_image(seed=2))}
        made: dict[str, Any] = {}

        def work(name: str) -> None:
            ctx, job = jobs[name]
            made[name] = ctx.generate_image(job, on_progress=listen(name)).frames

        threads = [threading.Thread(target=work, args=(name,)) for name in jobs]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    order = "".join(spans["order"])
    assert re.fullmatch(r"a+b+|b+a+", order), order
    assert [p.stage for p in heard["a"]] == [p.stage for p in heard["b"]]
    assert (made["a"] != made["b"]).any()


def test_a_callback_cannot_start_a_job(flux_context: Any) -> None:
    def on_progress(p: Any) -> None:
        flux_context.generate_image(small_image())

    with pytest.raises(sdsage.SdsageError, match="callback can't start another native job"):
        flux_context.generate_image(small_image(), on_progress=on_progress)


def test_the_c_example_on_the_installed_tree(preset_files: Any, tmp_path: Path) -> None:
    """examples/c_api.c, compiled as C11 against what `cmake --install` gave, makes a picture."""
    prefix = ROOT / "build" / "prefix"
    if not prefix.is_dir():
        subprocess.run(["cmake", "--install", BUILD, "--prefix", tmp_path / "prefix"], check=True, capture_output=True)
        prefix = tmp_path / "prefix"
    build = tmp_path / "c"
    configure = ["cmake", "-S", ROOT / "examples" / "cmake", "-B", build, f"-DCMAKE_PREFIX_PATH={prefix}"]
    subprocess.run(configure, check=True, capture_output=True)
    subprocess.run(["cmake", "--build", build], check=True, capture_output=True)
    files = preset_files("tiny-random")
    out = tmp_path / "frame.ppm"
    args = [build / "c_api", files["diffusion_model"], files["vae"], files["t5xxl"], out]
    done = subprocess.run(args, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "5 frames of 64x64 by Wan 2.x" in done.stdout
    assert out.read_bytes().startswith(b"P6\n64 64\n255\n")
    assert out.stat().st_size == 13 + 64 * 64 * 3
    wrong = subprocess.run([*args[:1], "/nonexistent.gguf", *args[2:]], capture_output=True, text=True)
    assert wrong.returncode == 1
    assert "/nonexistent.gguf" in wrong.stderr


def test_a_mismatched_library_is_an_import_error(tmp_path: Path) -> None:
    """Size and last offset of each struct are compared with cdef.h."""
    shutil.copy(LIBRARY, tmp_path)
    cdef = cdef_path().read_text()
    assert cdef.count(" float max_vram;") == 1
    (tmp_path / "cdef.h").write_text(cdef.replace(" float max_vram;", " float max_vram; int more;"))
    done = subprocess.run(
        [sys.executable, "-P", "-c", "import sdsage; sdsage.devices()"],
        capture_output=True,
        text=True,
        env={**os.environ, "SDSAGE_LIB_DIR": str(tmp_path)},
    )
    assert done.returncode == 1
    assert re.search(r"ImportError: struct sd_ctx_params_t is \d+ bytes .* but \d+ and \d+ in cdef.h", done.stderr)


def test_another_abi_is_an_import_error(tmp_path: Path) -> None:
    source = tmp_path / "other.c"
    source.write_text("int sdsage_abi_version(void) { return 99; }\n")
    subprocess.run(["cc", "-shared", "-fPIC", source, "-o", tmp_path / "libsdsage.so"], check=True)
    shutil.copy(cdef_path(), tmp_path)
    env = {**os.environ, "SDSAGE_LIB_DIR": str(tmp_path)}
    command = [sys.executable, "-P", "-c", "import sdsage; sdsage.devices()"]
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert f"ImportError: libsdsage has ABI version 99, this package needs {ABI_VERSION}" in done.stderr


def import_alone(folder: Path) -> subprocess.CompletedProcess[str]:
    """`import sdsage`, and nothing else, with the library of another folder."""
    env = {**os.environ, "SDSAGE_LIB_DIR": str(folder)}
    return subprocess.run([sys.executable, "-P", "-c", "import sdsage"], capture_output=True, text=True, env=env)


@pytest.mark.parametrize("missing", ["cdef.h", "libsdsage.so"])
def test_importing_without_the_library_names_the_path(missing: str, tmp_path: Path) -> None:
    for path in (cdef_path(), library_path()):
        if path.name != missing:
            (tmp_path / path.name).symlink_to(path)
    done = import_alone(tmp_path)
    assert done.returncode == 1
    assert f"ImportError: sdsage's native library is not built: {tmp_path / missing} is missing" in done.stderr


def test_importing_beside_declarations_of_another_version_shows_both(tmp_path: Path) -> None:
    (tmp_path / "libsdsage.so").symlink_to(library_path())
    text = cdef_path().read_text()
    for first, shown in (("/* ABI 99 */\n", "99"), ("", "none")):
        (tmp_path / "cdef.h").write_text(text.replace(f"/* ABI {ABI_VERSION} */\n", first))
        done = import_alone(tmp_path)
        assert done.returncode == 1
        said = f"has ABI version {shown}, this package needs {ABI_VERSION}"
        assert f"ImportError: {tmp_path / 'cdef.h'} {said}" in done.stderr
    (tmp_path / "cdef.h").write_text(text)
    assert import_alone(tmp_path).returncode == 0


def test_importing_loads_no_native_code() -> None:
    code = "import sdsage, sys; assert not {'cffi', 'numpy', 'sdsage._ffi'} & set(sys.modules)"
    subprocess.run([sys.executable, "-P", "-c", code], check=True)


def test_ggml_max_name_is_upstream_s_in_every_target() -> None:
    """Two values in one program would corrupt memory: the compile commands agree."""
    import json

    commands = json.loads((BUILD / "compile_commands.json").read_text())
    users = [
        c for c in commands if "/ggml/" in c["file"] or "/native/" in c["file"] or "stable-diffusion.cpp" in c["file"]
    ]
    ggml_users = [c for c in users if "params_json" not in c["file"] and "ggml-other" not in c["output"]]
    assert len(ggml_users) > 20
    for c in ggml_users:
        assert "-DGGML_MAX_NAME=128" in c["command"], c["file"]


def test_only_ffi_imports_cffi() -> None:
    package = Path(_ffi.__file__).parent
    importers = {p.name for p in package.rglob("*.py") if re.search(r"^\s*(import|from) cffi", p.read_text(), re.M)}
    assert importers == {"_ffi.py"}


def test_declarations_that_the_build_has_read(tmp_path: Path) -> None:
    """cdef.cffi spares reading cdef.h; one of another cdef.h is left alone."""
    spec = importlib.util.spec_from_file_location("generate", ROOT / "native" / "sd_cli" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    generate = importlib.util.module_from_spec(spec)
    sys.modules["generate"] = generate
    spec.loader.exec_module(generate)
    cdef = cdef_path().read_text()
    (tmp_path / "cdef.h").write_text(cdef)
    (tmp_path / "libsdsage.so").symlink_to(library_path().resolve())
    code = """if True:
        import sys, sdsage
        from sdsage._ffi import ffi, lib
        params = sdsage.SdVidGenParams(prompt="x", seed=5)
        assert params.to_c([]).seed == 5 and ffi.string(params.to_c([]).prompt) == b"x"
        print(lib.sdsage_abi_version(), params.high_noise_sample_params.sample_steps, "pycparser" in sys.modules)
    """
    env = {**os.environ, "SDSAGE_LIB_DIR": str(tmp_path)}
    for source, read_again in ((None, True), (cdef, False), (cdef + "\n", True)):
        if source is not None:
            (tmp_path / "cdef.cffi").write_text(generate.declarations(source))
        done = subprocess.run([sys.executable, "-P", "-c", code], env=env, capture_output=True, text=True, check=True)
        assert done.stdout == f"{ABI_VERSION} -1 {read_again}\n"
