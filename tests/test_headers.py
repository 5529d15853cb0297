"""Headers: what is in them is read; what is wrong is an error that names the file, in bounded time and memory."""

import json
import os
import resource
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sdsage._headers import Header, TooLarge, look, read_header, types
from sdsage.errors import ModelError
from sdsage.tiny import gguf, safetensors
from sdsage.tiny.files import RANDOM
from sdsage.tiny.tensors import DType, Tensor, Uniform

MIB = 2**20


@contextmanager
def bounded() -> Iterator[None]:
    """Fails what takes more than 256 MiB or 2 s."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * os.sysconf("SC_PAGE_SIZE") + 256 * MIB, before[1]))
    begun = time.thread_time()  # of this thread alone: others may be busy
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    assert time.thread_time() - begun < 2


def read_bounded(path: Path) -> Header:
    with bounded():
        return read_header(path)


@pytest.mark.parametrize("name", list(RANDOM))
def test_names_shapes_and_places(name: str, tmp_path: Path) -> None:
    file = tmp_path / name
    content = RANDOM[name].build()
    file.write_bytes(content)
    header = read_header(file)
    tensors = RANDOM[name].tensors()
    assert {n: t.shape for n, t in header.tensors.items()} == {t.name: t.shape for t in tensors}
    assert header.size == len(content)
    assert header.nbytes == sum(t.nbytes for t in tensors)
    last = tensors[-1]
    place = header.tensors[last.name]
    assert content[place.begin : place.begin + place.nbytes] == last.data(RANDOM[name].seed)
    assert header.metadata["sdsage.recipe"]
    assert header.container == file.suffix[1:]


def test_types_have_the_engine_s_sizes(preset_files: Any) -> None:
    """The type table against what the engine writes when it converts."""
    import sdsage

    source = Path(preset_files("tiny-random")["diffusion_model"])
    for name in ("f32", "bf16", "q4_0", "q4_1", "q5_0", "q5_1", "q2_K", "q3_K", "q4_K", "q5_K", "q6_K"):
        file = source.parent / f"converted-{name}.gguf"
        sdsage.convert(source, file, type=name, overwrite=True)
        try:
            header = read_header(file)  # places that are not one behind the other would be an error
            end = max(t.begin + t.nbytes for t in header.tensors.values())
            assert name in {t.type for t in header.tensors.values()}
            assert header.size - end < 32
            ordered = sorted(header.tensors.values(), key=lambda t: t.begin)
            assert all(0 <= b.begin - a.begin - a.nbytes < 32 for a, b in pairwise(ordered))
        finally:
            file.unlink()
    assert types.stored_bytes("q4_K", 512) == 288


# ---- a small file of each kind, in pieces that can be changed

SMALL = [Tensor(f"blocks.{i}.weight", (3, 32), DType.F16, Uniform(0.1)) for i in range(4)]
DATA = sum(t.nbytes for t in SMALL)


def small_gguf() -> bytes:
    return gguf.header(SMALL, {"general.architecture": "wan", "general.name": "x"}) + bytes(DATA)


def small_safetensors() -> bytes:
    return safetensors.header(SMALL, {"title": "x"}) + bytes(DATA)


def table() -> dict[str, Any]:
    raw = small_safetensors()
    found: dict[str, Any] = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    return found


def with_table(text: str | bytes, data: int = DATA) -> bytes:
    raw = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw + bytes(data)


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def hand_made(pairs: list[bytes], tensors: list[bytes], data: int = 4096) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(pairs)) + b"".join(pairs + tensors) + bytes(data)


def entry(name: bytes, shape: tuple[int, ...] = (32,), kind: int = 1, offset: int = 0) -> bytes:
    dims = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return text(name) + dims + struct.pack("<IQ", kind, offset)


HUGE = st.sampled_from([2**31, 2**32 - 1, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 1])


@st.composite
def faulty_gguf(draw: st.DrawFn) -> bytes:
    raw = bytearray(small_gguf())
    kind = draw(
        st.sampled_from(["cut", "count", "length", "shape", "offset", "twice", "type", "nested", "align", "many"])
    )
    first = raw.index(b"blocks.0.weight")
    if kind == "cut":
        return bytes(raw[: draw(st.integers(0, len(raw) - 33))])
    if kind == "count":
        struct.pack_into("<Q", raw, draw(st.sampled_from([8, 16])), draw(HUGE | st.integers(50_000, 2**50)))
    elif kind == "length":  # of a name, a key or a text
        at = draw(st.sampled_from([first, raw.index(b"general.name"), raw.index(b"wan")])) - 8
        struct.pack_into("<Q", raw, at, draw(HUGE))
    elif kind == "shape":
        struct.pack_into("<Q", raw, first + 15 + 4 + draw(st.sampled_from([0, 8])), draw(HUGE))
    elif kind == "offset":
        at = raw.index(b"blocks.2.weight") + 15 + 4 + 16 + 4
        struct.pack_into("<Q", raw, at, draw(HUGE | st.integers(0, 2).map(lambda n: n * 32)))
    elif kind == "twice":
        raw[raw.index(b"blocks.1.weight") + 7] = ord("0")
    elif kind == "type":
        struct.pack_into("<I", raw, first + 15 + 4 + 16, draw(st.sampled_from([4, 5, 31, 41, 2**31, 2**32 - 1])))
    elif kind == "nested":  # lists of lists of lists ...
        depth = draw(st.integers(1, 3000))
        nested = struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * depth
        return hand_made([text(b"k") + nested + struct.pack("<IQ", 4, 1) + bytes(4)], [])
    elif kind == "align":
        value = draw(st.sampled_from([0, 3, 33, 2**32 - 1]))
        return hand_made([text(b"general.alignment") + struct.pack("<II", 4, value)], [entry(b"a")])
    else:
        item, count = draw(st.sampled_from([4, 8, 12])), draw(HUGE)
        return hand_made([text(b"k") + struct.pack("<IIQ", 9, item, count)], [])
    return bytes(raw)


@st.composite
def faulty_safetensors(draw: st.DrawFn) -> bytes:
    raw = small_safetensors()
    kinds = ["cut", "length", "not json", "nested", "twice", "shape", "offsets", "dtype", "kind", "overlap", "index"]
    kind = draw(st.sampled_from(kinds))
    entries = table()
    chosen = entries["blocks.1.weight"]
    if kind == "cut":
        return raw[: draw(st.integers(0, len(raw) - 1))]
    if kind == "length":
        return struct.pack("<Q", draw(HUGE | st.integers(0, 40) | st.integers(5000, 2**40))) + raw[8:]
    if kind == "not json":
        return with_table("{" + draw(st.text(max_size=40)).replace("}", ""))
    if kind == "nested":
        return with_table('{"a":' * 50_000 if draw(st.booleans()) else '{"a":' + "[" * 200_000)
    if kind == "twice":
        name = '"blocks.0.weight":'
        return with_table(json.dumps(entries, separators=(",", ":")).replace('"blocks.1.weight":', name))
    if kind == "shape":
        chosen["shape"] = draw(
            st.sampled_from([[2**63], [3, 33], [-3, -32], [96.0], [True], "3", [[3]], [2**40, 2**40]])
        )
    elif kind == "offsets":
        chosen["data_offsets"] = draw(
            st.sampled_from([[0], [192, 2**63], [2**64, 2**64 + 192], [384, 192], [-192, 0], ["0", "192"], None])
        )
    elif kind == "dtype":
        chosen["dtype"] = draw(st.sampled_from(["F17", "", 5, None, "F16" * 1000]))
    elif kind == "kind":
        entries["blocks.1.weight"] = draw(st.sampled_from([None, 5, [], {}, "x", {"dtype": "F16"}]))
    elif kind == "overlap":
        chosen["data_offsets"] = draw(st.sampled_from([[0, 192], [100, 292], [200, 392]]))
    else:
        entries["__metadata__"] = draw(st.sampled_from([5, [], "x"]))
    return with_table(json.dumps(entries))


@settings(max_examples=200, suppress_health_check=list(HealthCheck))
@given(content=faulty_gguf() | faulty_safetensors())
def test_200_faulty_headers(content: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    file = tmp_path_factory.mktemp("faulty") / "model.bin"
    file.write_bytes(content)
    with pytest.raises(ModelError) as caught:
        read_bounded(file)
    assert str(file) in str(caught.value)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 600
    assert look(file) is None


@settings(max_examples=200, suppress_health_check=list(HealthCheck))
@given(
    make=st.sampled_from([small_gguf, small_safetensors]),
    changes=st.lists(st.tuples(st.integers(0, 700), st.integers(0, 255)), min_size=1, max_size=8),
)
def test_any_bytes_are_a_header_or_an_error(
    make: Callable[[], bytes], changes: list[tuple[int, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    raw = bytearray(make())
    for at, value in changes:
        raw[at % len(raw)] = value
    file = tmp_path_factory.mktemp("any") / "model.bin"
    file.write_bytes(raw)
    with bounded():
        header = look(file)  # anything but a ModelError would come out
    assert header is None or all(t.begin + t.nbytes <= len(raw) for t in header.tensors.values())


# ---- the most that a file can ask for, in a file with a hole behind its header


def sparse(path: Path, head: bytes, size: int) -> Path:
    with path.open("wb") as file:
        file.write(head)
        file.truncate(size)
    return path


def test_lying_counts_in_a_huge_file(tmp_path: Path) -> None:
    """A file of 4 TB holds as many entries as the counts say: the limits of the reader end it."""
    texts = text(b"k") + struct.pack("<IIQ", 9, 8, 2**38)  # 2^38 empty texts
    heads = {
        "tensors": b"GGUF" + struct.pack("<IQQ", 3, 2**36, 0),
        "pairs": b"GGUF" + struct.pack("<IQQ", 3, 0, 2**36),
        "texts": b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + texts,
        "json": struct.pack("<Q", 2**31) + b"{",
    }
    for name, head in heads.items():
        with pytest.raises(TooLarge, match="the header has more "):
            read_bounded(sparse(tmp_path / name, head, 2**42))


def test_long_texts_one_behind_the_other(tmp_path: Path) -> None:
    """Each lies a mebibyte behind the one before: every one costs a read."""
    file = tmp_path / "texts.gguf"
    with file.open("wb") as out:
        out.write(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text(b"k") + struct.pack("<IIQ", 9, 8, 1500))
        for _ in range(1500):
            out.write(struct.pack("<Q", MIB))
            out.seek(MIB, os.SEEK_CUR)
        out.truncate()
    with pytest.raises(TooLarge, match="more bytes"):
        read_bounded(file)


@pytest.mark.parametrize(
    "item", ["[],", "{},", '{"a":1},', '"ab",', "1e5,", '"é",', "[[]],", '{"k":[]},', "12345678901,"]
)
def test_tables_of_many_small_things(item: str, tmp_path: Path) -> None:
    """16 MiB of JSON could be 400 MiB of objects."""
    count = (16 * MIB - 100) // len(item.encode())
    for most in (count, 190_000):
        file = tmp_path / f"many{most}"
        file.write_bytes(with_table('{"__metadata__":[' + item * most + "0]}"))
        with pytest.raises(ModelError):
            read_bounded(file)


def test_as_many_tensors_as_are_read(tmp_path: Path) -> None:
    """The limits let through what they promise, within the bounds."""
    entries = {
        f"blocks.{i}.attn.to_q.lora_A.weight": {"dtype": "F16", "shape": [1, 2], "data_offsets": [4 * i, 4 * i + 4]}
        for i in range(50_000)
    }
    file = tmp_path / "many.safetensors"
    file.write_bytes(with_table(json.dumps(entries, separators=(",", ":")), 200_000))
    assert len(read_bounded(file).tensors) == 50_000
    rows = [entry(f"t{i:060}".encode(), (2,), 0, 32 * i) for i in range(50_000)]
    file = tmp_path / "many.gguf"
    file.write_bytes(hand_made([], rows, 32 * 50_000 + 32))
    assert len(read_bounded(file).tensors) == 50_000


def test_a_vocabulary_is_stepped_over(tmp_path: Path) -> None:
    words = b"".join(text(b"token%d" % i) for i in range(800_000))
    pair = text(b"tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, 8, 800_000) + words
    scores = text(b"scores") + struct.pack("<IIQ", 9, 6, 800_000) + bytes(3_200_000)
    name = text(b"general.name") + struct.pack("<I", 8) + text(b"n" * 10_000)
    file = tmp_path / "vocabulary.gguf"
    file.write_bytes(hand_made([pair, scores, name], [entry(b"a")]))
    header = read_bounded(file)
    assert list(header.tensors) == ["a"]
    assert header.metadata == {"general.name": "n" * 4096}


def test_huge_files_with_holes(tmp_path: Path) -> None:
    """A model of 3 TB, of which only the header is on the disk."""
    rows = [entry(b"a", (2**20, 2**20), 1, 0), entry(b"b", (2**20, 2**19), 1, 2**41)]
    file = sparse(tmp_path / "huge.gguf", hand_made([], rows, 0), 2**41 + 2**40 + 4096)
    assert read_bounded(file).nbytes == 2**41 + 2**40
    with pytest.raises(ModelError, match="is truncated: tensor 'b' ends at byte"):
        read_bounded(sparse(file, hand_made([], rows, 0), 2**41 + 4096))


# ---- what a path can be


def test_what_is_no_file(tmp_path: Path) -> None:
    loop, pipe = tmp_path / "loop", tmp_path / "pipe"
    loop.symlink_to(loop)
    os.mkfifo(pipe)
    words = {
        tmp_path / "none.gguf": "does not exist: check the path",
        tmp_path: "is a folder: a model file is needed",
        loop: "can't be read",
        pipe: "is not a file but a device, pipe or socket",
        Path("/dev/zero"): "is not a file but a device",
        tmp_path / "zero\0byte": "can't be read",
    }
    for path, said in words.items():
        with bounded(), pytest.raises(ModelError, match=said):
            read_header(path)
        assert look(path) is None
    assert look(None) is None


def test_other_kinds_of_files(tmp_path: Path) -> None:
    for content, said in {
        b"PK\x03\x04": "a checkpoint of Python pickles, which is not opened here",
        b"\x80\x02": "a checkpoint of Python pickles",
        b"": "neither GGUF nor safetensors",
        b"<html>Access denied</html>": "neither GGUF nor safetensors",
        b"GGUF\x01\0\0\0" + bytes(99): "version 1",
        b"GGUF\0\0\0\x03" + bytes(99): "big-endian",
        b"GGUF\x04\0\0\0" + bytes(99): "version 4: 2 and 3 are known",
    }.items():
        (tmp_path / "file").write_bytes(content)
        with pytest.raises(ModelError, match=said):
            read_header(tmp_path / "file")


# ---- models in several files


def parts(folder: Path, **changes: Any) -> Path:
    where: dict[str, Any] = {}
    for n, tensors in enumerate((SMALL[:2], SMALL[2:]), 1):
        name = f"model-{n:05}-of-00002.safetensors"
        raw = safetensors.header(tensors, {"title": "x"}) + bytes(sum(t.nbytes for t in tensors))
        (folder / name).write_bytes(raw)
        where |= {t.name: name for t in tensors}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": DATA}, "weight_map": where | changes}))
    return index


def test_a_model_in_parts(tmp_path: Path) -> None:
    header = read_bounded(parts(tmp_path))
    assert set(header.tensors) == {t.name for t in SMALL}
    assert [p.name for p in header.parts] == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    assert header.size == sum(p.stat().st_size for p in header.parts)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"x": "model-00001-of-00002.safetensors"}, "do not hold the tensor 'x' of the index"),
        ({"x": "none.safetensors"}, "names the part none.safetensors, which is not beside it"),
        ({"x": "../model.safetensors"}, "which is no safetensors file beside it"),
        ({"x": "/etc/passwd"}, "which is no safetensors file beside it"),
        ({"x": "model.safetensors.index.json"}, "which is no safetensors file beside it"),
        ({"x": "itself.safetensors"}, "is neither GGUF nor safetensors"),
        ({"x": "copy.safetensors"}, "two of its parts hold a tensor 'blocks.0.weight'"),
        ({f"x{i}": f"{i}.safetensors" for i in range(1001)}, "up to 1000 are read"),
    ],
)
def test_faulty_indexes(changes: dict[str, str], said: str, tmp_path: Path) -> None:
    index = parts(tmp_path, **changes)
    (tmp_path / "itself.safetensors").symlink_to(index)  # an index that names itself
    (tmp_path / "copy.safetensors").write_bytes(small_safetensors())
    with pytest.raises(ModelError, match=said):
        read_bounded(index)


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"weight_map": {}}', '{"weight_map": [1]}', '{"weight_map":' * 9999]
)
def test_damaged_indexes(content: str, tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(content)
    with pytest.raises(ModelError):
        read_bounded(index)


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(small_gguf())
    assert len(read_header(file).tensors) == 4
    file.write_bytes(hand_made([], [entry(b"a")]))
    assert list(read_header(file).tensors) == ["a"]


def test_a_length_that_looks_like_a_pickle(tmp_path: Path) -> None:
    for length in (0x280, 0x480, 0x580):
        content = with_table(json.dumps(table()).ljust(length))
        assert content[0] == 0x80
        file = tmp_path / "model.safetensors"
        file.write_bytes(content)
        assert len(read_header(file).tensors) == 4
