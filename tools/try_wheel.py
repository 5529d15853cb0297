"""Installs a wheel into an empty virtual environment outside the checkout, and runs the tests against it there.

    python tools/try_wheel.py WHEEL [PYTEST OPTION...]
    python tools/try_wheel.py --installed [PYTEST OPTION...]      in this environment, as cibuildwheel does it

The tests of the build and of its native programs are left out: they need the build folder, which no wheel carries.
A wheel for CUDA needs NVIDIA's driver to load; it gets the extra cuda.
"""

import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Of the source tree, the build, or programs that only a build folder has.
LEFT_OUT = (
    "sage",
    "test_attention.py",
    "test_build.py",
    "test_build_backend.py",
    "test_build_options.py",
    "test_bump_check.py",
    "test_compile_commands.py",
    "test_coverage.py",
    "test_cuda_toolkit.py",
    "test_examples.py",
    "test_gpu_engine.py",
    "test_guidance.py",
    "test_levers.py",
    "test_make_wheels.py",
    "test_memory_estimate.py",
    "test_native.py",
    "test_offload.py",
    "test_other_engines.py",
    "test_packaging.py",
    "test_philox.py",
    "test_sage_engine.py",
    "test_second_engine.py",
    "test_stock_sizes.py",
    "test_upstream.py",
)
WHERE = "import sdsage; print(sdsage.__file__)"


def environment() -> dict[str, str]:
    """Without what leads to another package or library than the installed one."""
    led = ("PYTHON", "SDSAGE_")
    return {name: value for name, value in os.environ.items() if not name.startswith(led)}


def run_tests(python: str, options: list[str], folder: Path) -> int:
    """The exit code of pytest, run in `folder` with the package that `python` has installed."""
    env = {**environment(), "SDSAGE_CACHE_DIR": str(folder / "cache")}
    found = subprocess.run([python, "-P", "-c", WHERE], cwd=folder, env=env, capture_output=True, text=True)
    if found.returncode != 0:
        print(f"try_wheel: the package can't be imported:\n{found.stderr}", file=sys.stderr)
        return 1
    print(f"try_wheel: testing {found.stdout.strip()}", flush=True)
    if ROOT in Path(found.stdout.strip()).resolve().parents:
        print("try_wheel: that is the checkout, not an installed wheel", file=sys.stderr)
        return 1
    command = [python, "-P", "-m", "pytest", "-p", "no:cacheprovider", "--rootdir", str(ROOT)]
    command += ["-c", str(ROOT / "pyproject.toml"), "-m", "not slow and not gpu"]
    command += [f"--ignore={ROOT / 'tests' / name}" for name in LEFT_OUT]
    return subprocess.run([*command, str(ROOT / "tests"), *options], cwd=folder, env=env).returncode


def install(wheel: Path, folder: Path) -> str:
    """The Python of a new virtual environment with the wheel and what the tests need."""
    venv.create(folder / "venv", with_pip=True)
    python = folder / "venv" / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    extras = "video,hub,cuda" if "+cu" in wheel.name else "video,hub"
    subprocess.run([*pip, "--upgrade", "pip>=25.1"], check=True, env=environment())
    subprocess.run([*pip, f"{wheel}[{extras}]"], check=True, env=environment())
    group = f"{ROOT / 'pyproject.toml'}:wheel-test"
    subprocess.run([*pip, "--group", group], check=True, env=environment())
    return str(python)


def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        print(__doc__, file=sys.stderr)
        sys.exit(2)
    what, *options = sys.argv[1:]
    wheel = Path(what).resolve()
    if what != "--installed" and not (wheel.is_file() and wheel.suffix == ".whl"):
        print(f"try_wheel: {what} is not a wheel; make wheel-cpu puts one into dist/", file=sys.stderr)
        sys.exit(2)
    with tempfile.TemporaryDirectory(prefix="sdsage-wheel-") as tmp:
        folder = Path(tmp)
        python = sys.executable if what == "--installed" else install(wheel, folder)
        sys.exit(run_tests(python, options, folder))


if __name__ == "__main__":
    main()
