"""docs/cli.md, from the table of options: `python -m sdsage.cli.docs > docs/cli.md`."""

from collections.abc import Iterator

from sdsage import presets

from .app import BENCHES, SWITCH_NOTE, VERBS
from .option import BENCH_GEN, GENERATE, Kind, Option, Panel
from .options import REMOVED, RENAMED, of_verb

_HEAD = """\
# Command line

<!-- Written by `python -m sdsage.cli.docs > docs/cli.md`; do not edit by hand. -->

`sdsage VERB --help` shows the same options. Results go to stdout, progress and messages to stderr.

| exit code | meaning |
|---|---|
| 0 | done |
| 1 | failed while running |
| 2 | misuse or bad input; nothing was written |
| 130 | interrupted; unfinished files are gone |

`SDSAGE_DEBUG=1` adds the traceback to an error.

## From sd-cli to sdsage

`vid-gen` and `img-gen` take the options of the native `sd-cli` under the same names and with the same defaults, so
an `sd-cli` command works with `sdsage vid-gen` or `sdsage img-gen` in place of its first word. What differs:

- A video goes to `output.mp4` unless `--output` says otherwise; the container is always the one that was asked for,
  and `.avi` is not among them.
- Files that exist are kept unless `--overwrite` is given.
- A LoRA that is not found, and a number, file or name that can't be used, is an error (exit code 2), not a warning.
- `.ckpt`, `.pt` and `.pth` files need `--allow-pickle`.
- An option that can't have an effect beside the others gives a warning.

## Presets and config files

A preset sets model files and options, a config file wins over it, and the command line wins over both. A config file
is TOML; its keys are the long options without the leading dashes, with `_` for `-`. Paths in it are taken from the
current folder, like those on the command line.

```toml
preset = "tiny"
cfg_scale = 5.0
vae_tiling = true
ref_image = ["front.png", "side.png"]
skip_layers = [7, 8, 9]
```

`sdsage config show vid-gen ...` takes the options of `vid-gen` (or `img-gen`) and prints the settings that the command
would use as such a file, with the place where each came from: option, config file, preset, `--from` file or default.
With `--json` it is one object.

`sdsage completion bash` (or `zsh`, `fish`) prints a script that completes verbs, options and values in that shell.

## Seeds, names and repeating

Every picture and every video has its own seed, which stands in the file and, with its file names, in `results` of
`--json`. `-b 4` makes four pictures, or four videos one after the other, with `--seed` and the seeds that follow it;
`--seeds 1,5,9` names them. The model is loaded once. Each video is written before the next one begins.

| in `--output` | stands for |
|---|---|
| `%d`, `%04d` | the number of the picture; in a video that goes to pictures, the number of the frame |
| `{index}` | the number of the picture or video |
| `{seed}` | its seed |
| `{prompt}` | the prompt without its LoRA tags, made a safe name of at most 80 bytes |
| `{date}` | the day on which the run began, such as 2025-01-31 |

`{{` and `}}` stand for braces. Several results under a plain name get `_0`, `_1`, ... before the extension. Names that
would be the same, and files that exist, end the command before any work.

Files carry their settings: PNG in text chunks, JPEG in comments, EXIF and XMP, WebP in EXIF and XMP, GIF in a comment,
MP4 and WebM in the tag `comment`; each as one JSON object, PNG, JPEG and WebP also as the text that other image tools
read. Models, LoRAs, embeddings and input pictures are recorded by name, size and SHA-256, never with folders. The hash
is computed while the model is at work, once for each file, and remembered in the cache folder; one that is not ready
when the run ends is left out, and a note says so. `--no-metadata` leaves all of it out.

`sdsage vid-gen --from cat.mp4` repeats a run: settings and seed come from the file, and a preset, a config file and
options win over them. Files are looked for in each `--model-dir`, then in the current folder and that of the `--from`
file, folders below included; a renamed one is found by size and hash. One that is missing, or has another content, is
an error that names it and its hash, unless its own option names another or `--ignore-hashes` is given. Pickles still
need `--allow-pickle`. The same frames are to be expected from the same version on the same kind of device.

## Videos

A video is played at the speed of its model unless `--fps` says otherwise: 24 frames per second for Wan2.2 TI2V and
LTX, 16 for every other Wan; the summary says which, and why. `--codec` and `--crf` choose how `.mp4` and `.webm` are
written; `--codec list` prints what this machine can write. MP4 and WebM need even sizes: an odd edge is repeated once,
and a note says so. Every file is opened again and checked before it gets its name (frames, times, size, pixel format,
codec; of pictures, that they decode): one that is not right is an error, and an older file stays.

Input pictures may be of any format that Pillow reads. They are turned as their EXIF orientation says, laid on white
where they are transparent (masks on black), and of an animation the first image is used; notes say so. 16-bit samples
keep their high byte. `sd-cli` knows neither orientation nor transparency, so there its result differs.

`--extend 3` makes four parts: each begins with the last frame of the one before, which is kept once, so 33 frames
become 129. The model must take a first picture (Wan2.2 I2V and TI2V, Wan2.1 I2V); `--end-img` is the end of the whole.
Part i has seed + i, and all are in `part_seeds` of the metadata. What passes a seam is one picture, not the movement in
it: motion may change there, and colours may drift a little with each part. When a later part fails, those before it are
written to a file of their own, `cat_first_2_parts.mp4`.

`sdsage upscale -i cat.mp4` enlarges a video, GIF or animated WebP frame by frame into `.mp4` or `.webm`: same speed,
also where frames are uneven, with its metadata, and with its sound where the new file can hold it.

## Models

`sdsage models list` shows the presets below; `show NAME` the files and settings of one; `pull NAME` fetches its files,
for which the extra `hub` is needed (`pip install 'sdsage[hub]'`); `path NAME` prints where they are. Files are kept in
the cache that other programs of the hub use (`HF_HOME`), and found there when another program has fetched them. A pull
asks for the free disk space first, goes on where an earlier one stopped, and checks the hash of each file. Then
`--preset NAME` uses them where they are; files that are given as options are not needed. The LoRAs of a preset stand
in the prompt that is recorded, and a tag of the same name in `--prompt` wins over them. `HF_ENDPOINT` names another
hub, `HF_TOKEN` a key for files with terms.

## Nothing is lost

While a run samples, each answer of the model is added to a hidden file next to the output,
`.NAME.sdsage-checkpoint`; before decoding, the final latents take its place. It goes when the result is written.

- A run that was ended (killed, out of memory, a power cut) goes on with `--resume`: the same command with that switch,
  or `sdsage vid-gen -o NAME --resume` alone. The sampler runs again from its beginning with the recorded answers, which
  takes a moment, and then computes the rest, so the result is that of a run that was not ended, whatever the sampler. A
  setting that decides on the result and is not the same is an error that names it; other files, folders, devices,
  threads and memory options are free. Only step caches (`--cache-mode`) begin anew, and the summary says so.
- Ctrl-C within the first minute leaves nothing; later it leaves the file, and says how to go on.
- A decode that fails for want of memory is tried again in tiles, with a warning; `adjusted` in the summary and in the
  file says so. If that fails too, the exit code is 1, the latents are kept as `NAME.latents.safetensors`, and the
  command that decodes them is printed. `sdsage decode` needs the VAE alone, no diffusion model and no text encoder.
- `--save-latents` keeps that file in any case: float32 tensors `latents.0`, `latents.1`, ..., one for each picture
  (1 x C x H x W) or one for the video (1 x C x T x H x W), and a JSON object in the metadata under `sdsage`.

A call of the model takes as many bytes as the latents have: 8.4 MB for 81 frames of Wan at 832x480, written in 20 ms
(`benchmarks/checkpoint_cost.py`). `--checkpoint-every 5` writes every fifth time only, 0 never. With `--extend` there
is no checkpoint: the parts that are done are written when a later one fails.

## Batches

`sdsage batch jobs.yaml` runs many jobs with one load of each model, on all GPUs, and goes on where it was when it
is given again; `sdsage batch status FOLDER` looks at it from another terminal. [batch.md](batch.md) explains job files,
the journal, and what happens when something fails.

"""


def document() -> str:
    """The whole file."""
    return "\n".join(_lines())


def _lines() -> Iterator[str]:
    yield _HEAD.rstrip("\n")
    yield from _presets()
    yield f"\n{SWITCH_NOTE}"
    yield from _section("sdsage vid-gen, sdsage img-gen", ("vid-gen", "img-gen"))
    for verb in VERBS:
        if verb not in GENERATE:
            yield from _section(f"sdsage {verb}", (verb,))
    for verb in BENCHES:
        yield from _section(f"sdsage {verb}", (verb,))
    yield from _old_names()


def _presets() -> Iterator[str]:
    yield "\n| preset | verb | what it is |\n|---|---|---|"
    for name in presets.names():
        yield f"| `{name}` | `{presets.mode(name)}` | {presets.describe(name)} |"


def _section(title: str, verbs: tuple[str, ...]) -> Iterator[str]:
    yield f"\n## {title}\n"
    for verb in verbs:
        told = (VERBS | BENCHES)[verb]
        yield f"{told.help}\n\n```sh\n{told.example}\n```\n"
    options = of_verb(verbs[0])
    if verbs == (BENCH_GEN,):
        yield (
            "It takes the options of `vid-gen` above for models, prompt, input pictures, sampling, size, memory and "
            "speed too.\n"
        )
        options = tuple(option for option in options if BENCH_GEN in option.verbs)
    for panel in Panel.ORDER:
        rows = [o for o in options if o.panel == panel]
        if rows:
            yield f"### {panel}\n" if len(verbs) > 1 else f"{panel}:\n"
            yield "| option | what it does | value | default |\n|---|---|---|---|"
            yield "\n".join(map(_row, rows)) + "\n"


def _row(option: Option) -> str:
    metavar = f" {option.kind.metavar}" if option.kind.metavar and not option.positional else ""
    names = ", ".join(f"`{name}{metavar}`" for name in option.names)
    use = f"{option.help}." + (f" Only in {option.only}." if option.only else "")
    if option.needs:
        use += f" Needs {' or '.join(f'`{name}`' for name in option.needs)}."
    cells = (names, use, _value(option), option.shown_default())
    return "| " + " | ".join(cell.replace("|", "\\|").replace("<", "&lt;") for cell in cells) + " |"


def _value(option: Option) -> str:
    if option.choices:
        return ", ".join(f"`{choice}`" for choice in option.choices)
    if option.kind is Kind.SWITCH:
        return "switch"
    parts = [option.unit or option.kind.unit, option.span(), "may be repeated" if option.many else ""]
    return ", ".join(filter(None, parts))


def _old_names() -> Iterator[str]:
    yield "\n## Names of other versions\n"
    yield "| option | now |\n|---|---|"
    for old, new in RENAMED.items():
        yield f"| `{old}` | `{new}`; the old name still works |"
    for old, removed in REMOVED.items():
        yield f"| `{old}` | an error: {removed.advice} |"


if __name__ == "__main__":
    print(document())
