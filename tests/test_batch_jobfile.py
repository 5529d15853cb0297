"""Job files: every way to write one gives the same jobs, and everything that is wrong is told at once."""

import csv
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from batch_tools import DEFAULTS, VIDEO, batch, write_jobs
from conftest import ROOT
from hypothesis import given
from hypothesis import strategies as st

from sdsage.batch import plan
from sdsage.batch.expand import Wanted, expand
from sdsage.batch.source import Faults, document, read
from sdsage.cli.options import by_key
from sdsage.cli.values import parse
from sdsage.errors import BadRequest

pytestmark = pytest.mark.usefixtures("empty_folder")

TEXT = st.text(st.characters(exclude_categories=("Cs", "Cc")), min_size=1, max_size=12).filter(
    lambda text: text.strip() == text and text[0] not in "[{"
)
VALUES: dict[str, Any] = {
    "prompt": TEXT,
    "seed": st.integers(0, 2**62),
    "steps": st.integers(1, 50),
    "cfg_scale": st.floats(0, 20, width=32),
    "vae_tiling": st.booleans(),
    "sampling_method": st.sampled_from(["euler", "heun"]),
    "skip_layers": st.lists(st.integers(0, 9), min_size=1, max_size=3),
}
GRIDS = {
    key: st.one_of(values, st.lists(values, min_size=1, max_size=3, unique_by=repr)) for key, values in VALUES.items()
}
ENTRY = st.fixed_dictionaries(
    {"mode": st.sampled_from(["vid-gen", "img-gen"]), "output": st.just("a.webp")}, optional=GRIDS
)


def wanted(path: Path) -> list[Wanted]:
    faults = Faults()
    found = expand(read(path, faults), faults)
    faults.stop_if_any()
    return found


def plain(jobs: list[Wanted]) -> list[Any]:
    """Jobs by what they mean."""

    def value(key: str, written: Any) -> Any:
        return parse(by_key()[key], written) if key in by_key() else written

    return [
        (job.number, job.verb, job.output, {key: value(key, written) for key, written in job.raw.items()})
        for job in jobs
    ]


def write_all(entries: list[dict[str, Any]]) -> list[Path]:
    """The same jobs as JSON lines, YAML, JSON and CSV."""
    paths = [Path(f"jobs.{kind}") for kind in ("jsonl", "yaml", "json", "csv")]
    paths[0].write_text("\n".join(map(json.dumps, entries)), encoding="utf-8")
    paths[1].write_text(yaml.safe_dump({"jobs": entries}, allow_unicode=True, sort_keys=False), encoding="utf-8")
    paths[2].write_text(json.dumps(entries), encoding="utf-8")
    names = list(dict.fromkeys(name for entry in entries for name in entry))
    with paths[3].open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        for entry in entries:
            # columns have one order for all rows; that of a grid follows from it
            writer.writerow({k: v if isinstance(v, str) else json.dumps(v) for k, v in entry.items()})
    return paths


@given(st.lists(ENTRY, min_size=1, max_size=4))
def test_every_format_gives_the_same_jobs(entries: list[dict[str, Any]]) -> None:
    order = list(dict.fromkeys(name for entry in entries for name in entry))
    entries = [{name: entry[name] for name in order if name in entry} for entry in entries]
    lines, *others = map(wanted, write_all(entries))
    for other in others:
        assert plain(other) == plain(lines)


def length(key: str, value: Any) -> int:
    """How many values a field stands for: a list of numbers is one value where the option takes such lists."""
    if not isinstance(value, list):
        return 1
    return len(value) if key != "skip_layers" or all(isinstance(item, list) for item in value) else 1


@given(ENTRY)
def test_a_grid_has_every_combination_once(entry: dict[str, Any]) -> None:
    faults = Faults()
    found = expand(document([entry], "jobs", faults), faults)
    faults.stop_if_any()
    assert len(found) == math.prod(length(key, value) for key, value in entry.items())
    assert len({json.dumps(job.raw, sort_keys=True) for job in found}) == len(found)


def test_defaults_models_and_entries_win_in_this_order() -> None:
    Path("jobs.yaml").write_text(
        """
        defaults: {mode: img-gen, steps: 9, cfg_scale: 5, model: flux, video-frames: 5}
        models:
          flux: {preset: tiny-flux, steps: 3}
          wan: {mode: vid-gen, preset: tiny, cfg_scale: 2}
        jobs:
          - {output: a.png}
          - {output: b.png, model: wan, steps: 1}
          - {output: c.png, model: other.safetensors}
        """,
        encoding="utf-8",
    )
    a, b, c = wanted(Path("jobs.yaml"))
    assert (a.verb, a.model, a.raw) == ("img-gen", "flux", {"steps": "3", "cfg_scale": "5", "preset": "tiny-flux"})
    assert (b.verb, b.model) == ("vid-gen", "wan")
    assert b.raw == {"steps": "1", "cfg_scale": "2", "preset": "tiny", "video_frames": "5"}
    assert (c.model, c.raw) == ("", {"model": "other.safetensors", "steps": "9", "cfg_scale": "5"})


def test_a_list_of_models_is_a_grid_too() -> None:
    models = {"a": {"preset": "tiny-flux"}, "b": {"preset": "tiny-flux", "steps": 2}}
    jobs = [{"mode": "img-gen", "model": ["a", "b", "c.gguf"], "seed": [1, 2], "output": "x.png"}]
    faults = Faults()
    found = expand(document({"models": models, "jobs": jobs}, "jobs", faults), faults)
    faults.stop_if_any()
    assert [(job.model, job.raw.get("model"), job.raw["seed"]) for job in found] == [
        ("a", None, "1"), ("a", None, "2"), ("b", None, "1"), ("b", None, "2"), ("", "c.gguf", "1"), ("", "c.gguf", "2")
    ]  # fmt: skip


def test_the_last_of_a_grid_varies_fastest() -> None:
    Path("prompts.txt").write_text("\ufeffa cat\n\n  ein Hund \r\n", encoding="utf-8")
    write_jobs("jobs.jsonl", [{"prompt": {"file": "prompts.txt"}, "seed": [1, 2], "output": "{prompt}_{seed}.png"}])
    found = plan.make("jobs.jsonl")
    assert [job.name(job.seed, "") for job in found.jobs] == [
        "a_cat_1.png",
        "a_cat_2.png",
        "ein_Hund_1.png",
        "ein_Hund_2.png",
    ]
    assert [job.number for job in found.jobs] == [1, 2, 3, 4]


def test_seeds_and_batch_count_make_jobs_of_their_own() -> None:
    write_jobs(
        "jobs.jsonl", [{"seeds": [1, 5], "output": "{seed}.png"}, {"seed": 8, "batch_count": 3, "output": "{seed}.png"}]
    )
    assert [job.seed for job in plan.make("jobs.jsonl").jobs] == [1, 5, 8, 9, 10]


def test_names_take_the_number_and_any_option() -> None:
    write_jobs("jobs.jsonl", [{"steps": [1, 2], "output": "o/{index}-{steps}-{preset}-{sampling_method}.png"}])
    names = [job.name(job.seed, "") for job in plan.make("jobs.jsonl").jobs]
    assert names == ["o/1-1-tiny-flux-euler.png", "o/2-2-tiny-flux-euler.png"]


LINES = [
    '{"defaults": {"mode": "img-gen", "preset": "tiny-flux"}}',
    '{"steps": "nine", "output": "a.png"}',
    '{"seed": 1, "seed": 2, "output": "a.png"}',
    "",
    '{"prompt": 3, "sed": 1, "json": true}',
    "[1]",
    '{"init_img": "nothing.png", "output": "x.avi"}',
    '{"mode": "paint", "output": "a.png"}',
    '{"prompt": {"file": "nothing.txt"}, "output": "a.png"}',
    '{"steps": [], "output": "a.png"}',
    '{"output": "{sead}.png"}',
    '{"steps": NaN, "output": "a.png"}',
]
SAID = [
    r"line 2 \(entry 1\), steps: --steps nine can't be used: it takes a whole number",
    "line 3: this is not a JSON object: 'seed' stands twice",
    r"line 5 \(entry 2\), sed: .* did you mean seed\?",
    r"line 5 \(entry 2\), json: this is not for a job",
    r"line 5 \(entry 2\), prompt: --prompt 3 can't be used: it takes text",
    r"line 5 \(entry 2\), output: it is missing",
    r"line 6 \(entry 3\): \[1\] is no job",
    r"line 7 \(entry 3\): --init-img nothing.png does not exist",
    r"line 7 \(entry 3\): output 'x.avi': .avi is not possible",
    r"line 8 \(entry 4\), mode: 'paint' is not a mode: it takes vid-gen or img-gen",
    r"line 9 \(entry 5\), prompt: file nothing.txt can't be read",
    r"line 10 \(entry 6\), steps: --steps has an empty list",
    r"line 11 \(entry 7\): output '\{sead\}.png': \{sead\} is not known: use .* an option such as \{steps\}",
    "line 12: this is not a JSON object: NaN is no number here",
]


def test_everything_that_is_wrong_is_said_at_once(empty_folder: Path) -> None:
    Path("bad.jsonl").write_text("\n".join(LINES), encoding="utf-8")
    said = batch("bad.jsonl", code=2).stderr
    for sentence in SAID:
        assert len([line for line in said.splitlines() if re.search(sentence, line)]) == 1, sentence
    assert len(said.splitlines()) == len(SAID)
    assert [path.name for path in empty_folder.iterdir()] == ["bad.jsonl"]


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.txt", "x", "a.txt can't be a job file: it takes .jsonl, .yaml, .yml, .json or .csv"),
        ("a.yaml", "jobs: [", "a.yaml, line 1 is not YAML"),
        ("a.yaml", "jobs:\n- {seed: 1, seed: 2}", "a.yaml, line 2 is not YAML: 'seed' stands twice"),
        ("a.yaml", "job: []", "a.yaml, job: there is no such field; did you mean jobs?"),
        ("a.yaml", "jobs: []", "a.yaml: there are no jobs in it"),
        ("a.yaml", "jobs: [3]", "a.yaml, entry 1: "),
        ("a.json", "{", "a.json is not JSON"),
        ("a.csv", 'prompt,prompt\nx,y', "a.csv, line 1: the column 'prompt' stands twice"),
        ("a.csv", 'mode,output\nimg-gen,a.png,b', "a.csv, line 2 (entry 1): 3 cells under 2 names"),
        ("a.csv", "mode,output,preset\n\nimg-gen,a.png,flax", "a.csv, line 3 (entry 1): no preset is called 'flax'"),
        ("a.jsonl", b"\xff", "a.jsonl is not UTF-8 text"),
    ],
)  # fmt: skip
def test_files_that_are_no_job_files(name: str, text: str | bytes, said: str) -> None:
    Path(name).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(BadRequest) as error:
        plan.make(name)
    assert said in str(error.value)


def test_the_same_fault_of_many_jobs_is_one_line() -> None:
    with pytest.raises(BadRequest) as error:
        plan.make([{**DEFAULTS, "vae": "no.gguf", "output": f"{i}.png"} for i in range(40)])
    assert (
        str(error.value) == "jobs, entry 1 and 39 more: --vae no.gguf does not exist: it takes a file; check the path"
    )


def test_a_key_tells_jobs_apart() -> None:
    """What changes the result changes the key; where memory is saved, and the order of the file, does not."""

    def keys(*entries: dict[str, Any]) -> list[str]:
        return [job.key for job in plan.make([{**VIDEO, "output": "o/a.gif", **entry} for entry in entries], "o").jobs]

    same = keys(
        {}, {"seed": 42}, {"offload_to_cpu": True}, {"threads": 3}, {"vae_tiling": False}, {"sampling_method": None}
    )
    assert len(set(same)) == 1
    others = keys({}, {"seed": 1}, {"steps": 2}, {"prompt": "dog"}, {"vae_tiling": True}, {"output": "o/b.gif"},
                  {"seed": -1}, {"seed": -1}, {"preset": "tiny-ti2v"}, {"disable_image_metadata": True})  # fmt: skip
    assert len(set(others)) == len(others)


def test_models_are_loaded_as_seldom_as_can_be() -> None:
    entries = [{**(VIDEO if i % 2 else DEFAULTS), "output": f"{i}.png"} for i in range(6)]
    found = plan.make(entries)
    assert [job.number for job in found.ordered(found.jobs)] == [1, 3, 5, 2, 4, 6]
    assert len({job.group for job in found.jobs}) == 2


@pytest.mark.parametrize("name", ["README.md", "docs/batch.md"])
def test_job_files_of_the_documents_are_ones(name: str) -> None:
    Path("prompts.txt").write_text("a cat\na dog\n", encoding="utf-8")
    text = (ROOT / name).read_text(encoding="utf-8")
    blocks = [block for block in re.findall(r"```yaml\n(.*?)```", text, flags=re.DOTALL) if "jobs:" in block]
    assert blocks
    for block in blocks:
        Path("jobs.yaml").write_text(block, encoding="utf-8")
        assert len(wanted(Path("jobs.yaml"))) > 5
