"""The shortest useful program: a video of the embedded tiny model. python api_minimal.py cat.mp4

For a model of your own, give its files in place of `files`, and its size, steps and guidance.
"""

import sys

import sdsage
from sdsage import media, presets

output = media.plan_output(sys.argv[1] if sys.argv[1:] else "cat.mp4", video=True, count=9)  # before the work
files = presets.load("tiny").options
params = sdsage.SdCtxParams(
    diffusion_model_path=files["diffusion_model"],
    high_noise_diffusion_model_path=files["high_noise_diffusion_model"],
    vae_path=files["vae"],
    t5xxl_path=files["t5xxl"],
)
job = sdsage.SdVidGenParams(prompt="a lovely cat", width=128, height=128, video_frames=9, seed=42)
job.sample_params.sample_steps = job.high_noise_sample_params.sample_steps = 2

with sdsage.Context(params, on_progress=lambda p: print(p.stage, p.step, p.steps)) as ctx:
    result = ctx.generate_video(job)
output.write(result.frames, fps=16)
print(f"{output.path}: {len(result.frames)} frames in {result.timings.total:.1f} s")
