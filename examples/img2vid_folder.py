"""Every picture of a folder becomes a video, with one load of the model.

    sdsage models pull wan2.2-i2v-14b
    python img2vid_folder.py pictures videos -p "the camera moves slowly closer"

A text file beside a picture (cat.txt for cat.png) has its own prompt. Given again, the command makes what is missing:
pictures that came in the meantime, and those whose text, or whose bytes, have changed. It needs the extras:
pip install 'sdsage[batch,video,hub]'
"""

import argparse
import sys
from pathlib import Path

import sdsage
from sdsage.media import naming

KINDS = {".png", ".jpg", ".jpeg", ".webp"}


def pair(text: str) -> list[str]:
    if "=" not in text:
        raise argparse.ArgumentTypeError(f"{text} is no setting: give OPTION=VALUE, such as video_frames=81")
    return text.split("=", 1)


parser = argparse.ArgumentParser(description="Every picture of a folder becomes a video.")
parser.add_argument("pictures", type=Path, help="a folder")
parser.add_argument("videos", type=Path, help="a folder, made if it is not there")
parser.add_argument("-p", "--prompt", default="", help="of pictures that have no text file beside them")
parser.add_argument("--preset", default="wan2.2-i2v-14b", help="a preset for pictures (%(default)s)")
parser.add_argument("--seed", type=int, default=42, help="of every video (%(default)s)")
parser.add_argument("settings", nargs="*", type=pair, metavar="OPTION=VALUE", help="for all videos")
asked = parser.parse_intermixed_args()

if not asked.pictures.is_dir():
    parser.error(f"{asked.pictures} is no folder: name one with pictures ({', '.join(sorted(KINDS))})")
jobs = []
for picture in sorted(path for path in asked.pictures.iterdir() if path.suffix.lower() in KINDS):
    text = picture.with_suffix(".txt")
    jobs.append(
        {
            "init_img": str(picture),
            "prompt": text.read_text(encoding="utf-8").strip() if text.is_file() else asked.prompt,
            # cat.png and cat.jpg are two; a brace in a name is no field
            "output": naming.literal(str(asked.videos / f"{picture.name}.mp4")),
        }
    )
if not jobs:
    parser.error(f"there is no picture in {asked.pictures}: it takes {', '.join(sorted(KINDS))}")

defaults = {"mode": "vid-gen", "preset": asked.preset, "seed": asked.seed, **dict(asked.settings)}
try:
    # A picture whose text or bytes have changed is a new job, whose video replaces the old one.
    batch = sdsage.Batch({"defaults": defaults, "jobs": jobs}, folder=asked.videos)
    done = batch.run(
        on_result=lambda job: print(job["state"], job["output"], job["message"], flush=True), overwrite=True
    )
except sdsage.BadRequest as error:
    parser.error(str(error))
print(f"{done.progress.done} of {done.progress.total} videos are there, {len(done.ran)} were tried now: {done.sheet}")
sys.exit(1 if done.progress.failed else 0)
