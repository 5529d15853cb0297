"""Tiny models: file formats, determinism, and the cache that several processes share."""

import hashlib
import json
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from math import prod
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from sdsage import presets
from sdsage.errors import BadRequest, ModelError, OutputError
from sdsage.tiny import FILES, cache_dir, ensure, packed
from sdsage.tiny.files import RANDOM, ModelFile
from sdsage.tiny.tensors import Blur, Carry, Constant, DType, Fill, Tensor, Uniform, encode

SMALL = "wan21-vae.safetensors"  # quick to make
TRAINED = "trained/wan21-vae.safetensors"  # quick to unpack

# --- readers written from the format descriptions, independent of the writers ---

Read = dict[str, tuple[str, tuple[int, ...], bytes]]  # name -> type, row-major shape, data


def read_gguf(content: bytes) -> tuple[dict[str, object], Read]:
    at = 0

    def take(form: str) -> tuple[int, ...]:
        nonlocal at
        values = struct.unpack_from("<" + form, content, at)
        at += struct.calcsize("<" + form)
        return values

    def text() -> str:
        nonlocal at
        (n,) = take("Q")
        at += n
        return content[at - n : at].decode()

    assert content[:4] == b"GGUF"
    at = 4
    version, n_tensors, n_keys = take("IQQ")
    assert version == 3
    metadata: dict[str, object] = {}
    for _ in range(n_keys):
        key = text()
        (kind,) = take("I")
        metadata[key] = text() if kind == 8 else take("I")[0]
        assert kind in (4, 8)
    entries = []
    for _ in range(n_tensors):
        name = text()
        (n_dims,) = take("I")
        ne = take(f"{n_dims}Q")
        kind, offset = take("IQ")
        entries.append((name, ne[::-1], kind, offset))
    start = -(-at // 32) * 32
    tensors: Read = {}
    for name, shape, kind, offset in entries:
        dtype, block, size = {0: ("F32", 1, 4), 1: ("F16", 1, 2), 8: ("Q8_0", 32, 34)}[kind]
        assert offset % 32 == 0
        data = content[start + offset : start + offset + prod(shape) // block * size]
        tensors[name] = (dtype, shape, data)
    return metadata, tensors


def read_safetensors(content: bytes) -> tuple[dict[str, object], Read]:
    (n,) = struct.unpack_from("<Q", content)
    assert n % 8 == 0
    entries = json.loads(content[8 : 8 + n])
    metadata = entries.pop("__metadata__")
    data = content[8 + n :]
    tensors: Read = {}
    end = 0
    for name, e in entries.items():
        assert e["data_offsets"][0] == end  # the format forbids gaps
        end = e["data_offsets"][1]
        tensors[name] = (e["dtype"], tuple(e["shape"]), data[slice(*e["data_offsets"])])
    assert end == len(data)
    return metadata, tensors


def decode(dtype: str, shape: tuple[int, ...], data: bytes) -> NDArray[np.float32]:
    if dtype == "Q8_0":
        blocks = np.frombuffer(data, np.dtype([("d", "<f2"), ("q", "i1", 32)]))
        values = blocks["q"].astype(np.float32) * blocks["d"].astype(np.float32)[:, None]
    else:
        values = np.frombuffer(data, {"F32": "<f4", "F16": "<f2"}[dtype]).astype(np.float32)
    return values.reshape(shape)


READERS: dict[str, Callable[[bytes], tuple[dict[str, object], Read]]] = {
    ".gguf": read_gguf,
    ".safetensors": read_safetensors,
}


@st.composite
def tensor_lists(draw: st.DrawFn, dtypes: tuple[DType, ...]) -> list[Tensor]:
    tensors = []
    for name in draw(st.lists(st.text("abc.01_é", min_size=1, max_size=9), min_size=1, max_size=5, unique=True)):
        dtype = draw(st.sampled_from(dtypes))
        shape = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
        shape[-1] *= dtype.block
        fills: list[Fill] = [Uniform(0.5), Uniform(3e-3), Constant(0.0), Constant(1.25)]
        fill = draw(st.sampled_from(fills))
        tensors.append(Tensor(name, tuple(shape), dtype, fill))
    return tensors


def check_round_trip(name: str, tensors: list[Tensor]) -> None:
    content = ModelFile(name, "test", lambda: tensors, seed=7).build()
    _, read = READERS[Path(name).suffix](content)
    assert list(read) == [t.name for t in tensors]
    for t in tensors:
        dtype, shape, data = read[t.name]
        assert (dtype, shape, data) == (t.dtype.name, t.shape, t.data(7))
        exact = decode("F32", shape, Tensor(t.name, t.shape, DType.F32, t.fill).data(7))
        # float16 rounds the value, or the scale of up to 127 steps; Q8_0 rounds to half a step as well
        steps = 127 if dtype == "Q8_0" else 1
        top = float(np.abs(exact).max())
        limit = top * 2.0**-11 + steps * 2.0**-25 + (0.501 * top / steps if dtype == "Q8_0" else 0.0)
        error = float(np.abs(decode(dtype, shape, data) - exact).max())
        assert error <= (0.0 if dtype == "F32" else limit)


@given(tensor_lists((DType.F32, DType.F16, DType.Q8_0)))
def test_gguf_round_trip(tensors: list[Tensor]) -> None:
    check_round_trip("x.gguf", tensors)


@given(tensor_lists((DType.F32, DType.F16)))
def test_safetensors_round_trip(tensors: list[Tensor]) -> None:
    check_round_trip("x.safetensors", tensors)


@pytest.mark.parametrize(
    ("name", "tensor", "says"),
    [
        ("x.safetensors", Tensor("t", (32,), DType.Q8_0, Constant(0)), "safetensors has no type Q8_0"),
        ("x.gguf", Tensor("t", (1, 1, 1, 1, 1), DType.F32, Constant(0)), "1 to 4 dimensions"),
    ],
)
def test_what_a_container_can_not_hold_is_refused(name: str, tensor: Tensor, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        ModelFile(name, "test", lambda: [tensor]).build()


def test_a_row_must_be_whole_blocks() -> None:
    with pytest.raises(ValueError, match="blocks of 32"):
        Tensor("t", (32, 31), DType.Q8_0, Constant(0))


# --- values ---

PINNED: list[tuple[Fill, DType, str]] = [
    (Uniform(1.0), DType.F32, "ac8cbbfa7d86ae06a4cd40c0638585d305fd7f522e8c684705efdcf1d6e4f4ec"),
    (Uniform(0.1), DType.F16, "5515fb0c7ed0884e01bf229cc1ed0f8968a72528688d78eca9c59f560143c006"),
    (Uniform(1.0), DType.Q8_0, "5acab329a7e88b7bb5db477789236b1eccd6962355529d2356dc3328c65ce221"),
    (
        Blur(0.3, ((0.25, 0.5, 0.25), (0.25,) * 32), repeat=2),
        DType.F16,
        "5399db1427e338c836c77e8c66b4521136b2b6f484b55674e13f4e78aea3dee6",
    ),
    (
        Blur(0.3, ((0.25, 0.5, 0.25), (0.25,) * 32), centred=True),
        DType.F32,
        "042833b4a003f2e174b99aa4055f8462637b05c50b6006fc7440b664f9a1ec1c",
    ),
    (
        Carry(((0.25, 0.5, 0.25), (0.1,) * 32)),
        DType.F16,
        "daf684c8c4b56bbf185ee66ee74f842e730e7d66e148ce955f340e7e2a9ab341",
    ),
]


@pytest.mark.parametrize(("fill", "dtype", "digest"), PINNED)
def test_bytes_are_the_same_everywhere(fill: Fill, dtype: DType, digest: str) -> None:
    """A new digest here means that every user's files are made anew: raise GENERATOR with it."""
    tensor = Tensor("blocks.0.ffn.0.weight", (4, 5, 3, 32), dtype, fill)
    assert hashlib.sha256(tensor.data(3)).hexdigest() == digest


def values(name: str, seed: int, fill: Fill | None = None, shape: tuple[int, ...] = (64, 1024)) -> NDArray[np.float32]:
    fill = fill or Uniform(0.5)
    return decode("F32", shape, Tensor(name, shape, DType.F32, fill).data(seed))


def test_uniform_has_the_deviation_it_names() -> None:
    x = values("a", 0)
    assert abs(float(x.mean())) < 0.01
    assert abs(float(x.std()) - 0.5) < 0.01
    assert np.abs(x).max() <= np.float32(0.5 * 3**0.5)


def test_every_name_and_seed_has_values_of_its_own() -> None:
    base = values("a", 0).ravel()
    for other in (values("a", 1), values("b", 0)):
        assert abs(float(np.corrcoef(base, other.ravel())[0, 1])) < 0.02


def test_blur_mixes_channels_with_one_kernel() -> None:
    x = values("a", 0, Blur(0.5, ((0.25, 0.75), (0.5, 0.25, 0.25))), (8, 16, 2, 3))
    mix = x.sum(axis=(2, 3))
    assert abs(float(mix.std()) - 0.5) < 0.05
    kernel = np.multiply.outer([0.25, 0.75], [0.5, 0.25, 0.25])
    np.testing.assert_allclose(x, mix[..., None, None] * kernel, rtol=1e-5)


def test_repeated_rows_and_centred_rows() -> None:
    mix = values("a", 0, Blur(1.0, (), repeat=2), (8, 16))
    assert (mix[0::2] == mix[1::2]).all()
    assert len(np.unique(mix)) == 4 * 16
    mix = values("a", 0, Blur(0.5, (), centred=True), (64, 256))
    np.testing.assert_allclose(mix.sum(axis=1), 0, atol=1e-4)
    assert abs(float(mix.std()) - 0.5) < 0.02


def test_carry_hands_each_channel_on() -> None:
    x = values("a", 0, Carry(((0.25, 0.75), (1.0,))), (4, 2, 2, 1))
    np.testing.assert_array_equal(x.sum(axis=(2, 3)), [[1, 0], [0, 1], [1, 0], [0, 1]])
    np.testing.assert_array_equal(x[0, 0, :, 0], [0.25, 0.75])


def test_q8_0_of_zeros_is_zeros() -> None:
    assert encode(np.zeros(64, np.float32), DType.Q8_0) == bytes(2 * 34)


# --- the files ---


@pytest.mark.parametrize("name", [n for n in RANDOM if n != "umt5.gguf"])
def test_file_is_made_of_finite_values_and_recognised(name: str) -> None:
    file = RANDOM[name]
    content = file.build()
    assert content == file.build()
    assert file.is_whole(content)
    metadata, tensors = READERS[Path(name).suffix](content)
    assert len(str(metadata["sdsage.data"])) == len(str(metadata["sdsage.recipe"])) == 64
    assert list(tensors) == [t.name for t in file.tensors()]
    for dtype, shape, data in tensors.values():
        assert np.isfinite(decode(dtype, shape, data)).all()


def test_vocabularies_fit_the_tokenizers_of_the_engine() -> None:
    shapes = {t.name: t.shape for n in ("umt5.gguf", "clip-l.safetensors") for t in RANDOM[n].tensors()}
    assert shapes["token_embd.weight"][0] == 256384
    assert shapes["text_model.embeddings.token_embedding.weight"][0] == 49408


def test_experts_differ_in_every_drawn_tensor() -> None:
    for kind in ("t2v", "i2v"):
        _, low = read_gguf(RANDOM[f"wan-{kind}-low.gguf"].build())
        _, high = read_gguf(RANDOM[f"wan-{kind}-high.gguf"].build())
        drawn = {t.name for t in RANDOM[f"wan-{kind}-low.gguf"].tensors() if not isinstance(t.fill, Constant)}
        assert {name for name in low if low[name] != high[name]} == drawn


def damaged(content: bytes) -> list[bytes]:
    flipped = bytearray(content)
    flipped[-100] ^= 1
    header = bytearray(content)
    header[200] ^= 1
    return [b"", content[:7], content[:-1], content + b"\0", bytes(flipped), bytes(header), bytes(len(content))]


@pytest.mark.parametrize("name", [SMALL, "wan-t2v-low.gguf", TRAINED])
def test_damage_is_seen(name: str) -> None:
    file = FILES[name]
    content = file.build()
    assert file.is_whole(content)
    assert [file.is_whole(bad) for bad in damaged(content)] == [False] * 7


def test_a_file_of_another_seed_is_another() -> None:
    file = RANDOM[SMALL]
    assert not file.is_whole(ModelFile(SMALL, file.architecture, file.tensors, seed=99).build())


# --- trained models ---


def test_the_package_has_all_that_its_presets_name_and_nothing_else() -> None:
    named = {file for name in presets.names() for file in presets.files(name).values() if isinstance(file, str)}
    assert named == set(FILES)
    archives = {file.archive for file in packed.files().values()}
    assert {path.name for path in packed.FOLDER.iterdir()} == archives | {packed.TABLE.name}
    assert sum((packed.FOLDER / name).stat().st_size for name in archives) <= 12_000_000


@pytest.mark.parametrize("name", packed.files())
def test_trained_files_are_of_finite_values(name: str) -> None:
    _, tensors = READERS[Path(name).suffix](FILES[name].build())
    for dtype, shape, data in tensors.values():
        values = decode(dtype, shape, data)
        assert np.isfinite(values).all()


@pytest.mark.parametrize(
    "spoil", [lambda p: p.unlink(), lambda p: p.write_bytes(p.read_bytes()[:-9]), lambda p: p.write_bytes(b"x")]
)
def test_a_damaged_installation_is_told(
    spoil: Callable[[Path], object], cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = packed.files()[TRAINED].archive
    spoilt = Path(shutil.copy(packed.FOLDER / archive, tmp_path))
    monkeypatch.setattr(packed, "FOLDER", tmp_path)
    spoil(spoilt)
    with pytest.raises(ModelError, match=rf"{archive} is damaged or missing: install sdsage again"):
        ensure([TRAINED])
    assert not (cache / TRAINED).exists()


# --- the cache ---


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SDSAGE_CACHE_DIR", str(tmp_path / "a cache"))
    return tmp_path / "a cache" / "tiny"


@pytest.mark.parametrize("name", [SMALL, TRAINED])
def test_cache_makes_a_file_once(name: str, cache: Path) -> None:
    made: list[Path] = []
    path = ensure([name], made.append)[name]
    stamp = path.stat()
    assert path == cache / name
    assert ensure([name], made.append) == {name: path}
    assert made == [path]
    assert path.stat().st_mtime_ns == stamp.st_mtime_ns
    assert os.listdir(path.parent) == [path.name]


@pytest.mark.parametrize("name", [SMALL, TRAINED])
def test_cache_mends_damage(name: str, cache: Path) -> None:
    path = ensure([name])[name]
    content = path.read_bytes()
    for bad in damaged(content):
        path.write_bytes(bad)
        ensure([name])
        assert path.read_bytes() == content
    assert os.listdir(path.parent) == [path.name]


def test_cache_leaves_nothing_behind_when_writing_fails(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OutputError, match=r"No space left on device; set SDSAGE_CACHE_DIR"):
        ensure([SMALL])
    assert os.listdir(cache) == []


def test_cache_folder_that_is_a_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("SDSAGE_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(OutputError, match=r"file/tiny/wan21-vae\.safetensors can't be made: Not a directory"):
        ensure([SMALL])


def test_unknown_file_is_refused(cache: Path) -> None:
    with pytest.raises(BadRequest, match=r"no tiny model file is called 'nope'; there are wan-t2v-low\.gguf"):
        ensure(["nope"])


def test_processes_may_race(cache: Path) -> None:
    """Each process that comes back from `ensure` finds whole files, whoever wrote them."""
    code = (
        "import sys; from sdsage.tiny import FILES, ensure; print(flush=True); sys.stdin.read()\n"
        "for n, p in ensure(sys.argv[1:]).items(): assert FILES[n].is_whole(p.read_bytes()), n"
    )
    names = [SMALL, "wan-t2v-low.gguf", TRAINED, "trained/umt5-q8_0.gguf"]
    command = [sys.executable, "-P", "-c", code, *names]
    racers = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(3)]
    for racer in racers:
        assert racer.stdout is not None
        racer.stdout.readline()  # it has imported everything
    for racer in racers:
        assert racer.stdin is not None
        racer.stdin.close()  # go
    assert [racer.wait(60) for racer in racers] == [0, 0, 0]
    assert sorted(p.relative_to(cache).as_posix() for p in cache.rglob("*") if p.is_file()) == sorted(names)


@pytest.mark.parametrize(
    ("own", "xdg", "expected"),
    [
        ("/own", "/xdg", "/own"),
        (None, "/xdg", "/xdg/sdsage"),
        (None, "relative", "/home/me/.cache/sdsage"),
        ("", None, "/home/me/.cache/sdsage"),
    ],
)
def test_cache_folder(own: str | None, xdg: str | None, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for key, value in (("SDSAGE_CACHE_DIR", own), ("XDG_CACHE_HOME", xdg), ("HOME", "/home/me")):
        if value is None:
            monkeypatch.delenv(key, raising=False)
        else:
            monkeypatch.setenv(key, value)
    assert cache_dir() == Path(expected)
