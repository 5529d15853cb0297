"""Presets: every file parses, names only model files that exist, and resolves to paths."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from sdsage import presets
from sdsage.errors import BadRequest
from sdsage.tiny import FILES

FOLDER = Path(presets.__file__).parent
NAMES = ["tiny", "tiny-flux", "tiny-i2v", "tiny-ti2v"]  # those of a hub are in test_models.py


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SDSAGE_CACHE_DIR", str(tmp_path))
    return tmp_path


def test_names() -> None:
    assert [name for name in presets.names() if name.startswith("tiny")] == NAMES
    assert presets.names() == sorted(presets.names())


@pytest.mark.parametrize("name", NAMES)
def test_preset_file(name: str) -> None:
    table = tomllib.loads((FOLDER / f"{name}.toml").read_text(encoding="utf-8"))
    assert set(table) == {"description", "mode", "files", "settings"}
    assert table["mode"] in ("vid-gen", "img-gen")
    assert set(table["files"].values()) <= set(FILES)
    assert not set(table["files"]) & set(table["settings"])
    for option in (*table["files"], *table["settings"]):
        assert option == option.lower().replace("-", "_")
    assert presets.describe(name) == table["description"]


@pytest.mark.parametrize("name", ["tiny-flux", "tiny"])
def test_load_makes_the_files_once(name: str, cache: Path) -> None:
    made: list[Path] = []
    preset = presets.load(name, made.append)
    files = [Path(v) for v in map(str, preset.options.values()) if Path(v).name in FILES]
    assert sorted(made) == sorted(files)
    for path in files:
        assert path.is_absolute()
        assert path.is_relative_to(cache)
        assert path.is_file()
    assert preset.name == name
    assert preset.options["width"] == 128
    assert presets.load(name, made.append) == preset
    assert len(made) == len(files)


def test_both_experts_are_in_tiny() -> None:
    options = presets.load("tiny").options
    assert options["diffusion_model"] != options["high_noise_diffusion_model"]
    assert options["steps"]
    assert options["high_noise_steps"]


@pytest.mark.parametrize(("asked", "hint"), [("tiny-i2", "did you mean 'tiny-i2v'?"), ("../x", "choose one of these")])
def test_unknown_preset(asked: str, hint: str) -> None:
    with pytest.raises(BadRequest) as e:
        presets.load(asked)
    assert str(e.value) == f"no preset is called {asked!r}; there are {', '.join(presets.names())}: {hint}"


def test_listing_presets_stays_light() -> None:
    code = (
        "import sys; from sdsage import presets; [presets.describe(n) for n in presets.names()];"
        "assert 'numpy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-P", "-c", code], check=True)
