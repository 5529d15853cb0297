"""SageAttention on and off with the same seed: how long each part takes, and how far the frames are apart.

    python compare_attention.py --preset wan2.2-t2v-14b -p "a lovely cat" --steps 4
    python compare_attention.py --random tiny              # the embedded model, in seconds, on any machine

Takes what `sdsage bench gen` takes, which does the measuring (docs/verify.md); this shows how to read its result.
"""

import json
import subprocess
import sys

STAGES = {"load": "load", "first_step": "first step", "mean_later_steps": "later steps (mean)", "decode": "decode"}

command = [sys.executable, "-m", "sdsage", "bench", "gen", "--json", *(sys.argv[1:] or ["--random", "tiny"])]
done = subprocess.run(command, stdout=subprocess.PIPE, text=True)  # what it has to say goes to stderr
if done.returncode:
    sys.exit(done.returncode)
found = json.loads(done.stdout.splitlines()[-1])  # events come before it

runs = found["runs"]
off, on = runs["flash"]["seconds"], runs["sage"]["seconds"] if "sage" in runs else {}
print(f"{found['model']} on {found['device']['name']}, seed {found['seed']}, seconds")
print(f"{'':20}{'off':>10}{'on':>10}{'faster':>10}")
for stage, title in STAGES.items():
    if off[stage] is None:  # one step has no later ones
        continue
    more = f"{on[stage]:10.3f}{off[stage] / on[stage]:9.2f}x" if on else f"{'-':>10}{'-':>10}"
    print(f"{title:20}{off[stage]:10.3f}{more}")
if on:
    kernels = {entry["kernel"] for entry in runs["sage"]["attention"]} - {"flash", "ordinary"}
    psnr = found["apart"]["frames_db"]
    print(f"kernels of SageAttention: {', '.join(sorted(kernels))}")
    print(f"PSNR of the frames: {'the same bytes' if psnr is None else f'{psnr} dB'}")
else:
    print(f"SageAttention needs an NVIDIA GPU and an engine built for CUDA, so it was off alone: {found['no_sage']}")
