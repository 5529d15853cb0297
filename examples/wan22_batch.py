"""wan22_batch.yaml from Python: Wan2.2 T2V A14B with a LoRA for each expert, every prompt with every seed.

    sdsage models pull wan2.2-t2v-14b-4step
    python wan22_batch.py                                # goes on where it was when it is given again
    python wan22_batch.py video_frames=81                # another setting makes other jobs
    python wan22_batch.py --preset tiny --loras FOLDER sage_attn=false      # the embedded model, on any machine

It needs the extras: pip install 'sdsage[batch,video,hub]'
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import yaml

import sdsage


def pair(text: str) -> list[str]:
    if "=" not in text:
        raise argparse.ArgumentTypeError(f"{text} is no setting: give OPTION=VALUE, such as video_frames=81")
    return text.split("=", 1)


parser = argparse.ArgumentParser(description="Wan2.2 with a LoRA for each expert, every prompt with every seed.")
parser.add_argument("--preset", help="in place of the one of the job file")
parser.add_argument("--loras", help="folder of LoRAs that do not come with the preset")
parser.add_argument("settings", nargs="*", type=pair, metavar="OPTION=VALUE", help="over those of the job file")
asked = parser.parse_intermixed_args()

jobs = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
given = {"preset": asked.preset, "lora_model_dir": asked.loras, **dict(asked.settings)}
jobs["models"]["wan22"] |= {name: value for name, value in given.items() if value is not None}


def show(job: dict[str, Any]) -> None:
    """Each job when it is over, as in results.jsonl."""
    print(f"{job['output']}: {job['state']} in {job['seconds']:.1f} s", job["message"], flush=True)


try:
    done = sdsage.Batch(jobs).run(on_result=show)  # on all GPUs, else on the CPU
except sdsage.BadRequest as error:  # found before anything is loaded: a line for each fault
    parser.error(str(error))
print(f"{done.progress.done} of {done.progress.total} done, model loads: {done.progress.loads}, {done.sheet}")
sys.exit(1 if done.progress.failed else 0)
