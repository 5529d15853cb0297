"""The shortest useful program: a video of the embedded tiny model. python api_minimal.py circle.mp4

For a model of your own, give its files in place of `files`, and its size, steps and guidance.
"""

import sys

import sdsage
from sdsage import media, presets

output = media.plan_output(sys.argv[1] if sys.argv[1:] else "circle.mp4", video=True, count=17)  # before the work
files = presets.load("tiny").options
params = sdsage.SdCtxParams(
    diffusion_model_path=files["diffusion_model"],
    high_noise_diffusion_model_path=files["high_noise_diffusion_model"],
    vae_path=files["vae"],
    t5xxl_path=files["t5xxl"],
)
prompt = "a red circle moves to the right"
job = sdsage.SdVidGenParams(prompt=prompt, width=96, height=96, video_frames=17, seed=42)
job.high_noise_sample_params.sample_steps = -1  # as many of the steps as the noise level says
for sample in (job.sample_params, job.high_noise_sample_params):
    sample.guidance.txt_cfg = 3.5
    sample.flow_shift = 3.0
job.sample_params.sample_steps = 12

with sdsage.Context(params, on_progress=lambda p: print(p.stage, p.step, p.steps)) as ctx:
    result = ctx.generate_video(job)
output.write(result.frames, fps=16)
print(f"{output.path}: {len(result.frames)} frames in {result.timings.total:.1f} s")
