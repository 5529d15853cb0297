"""A video from Python with the embedded tiny model: python video.py out.webp"""

import sys

from PIL import Image

import sdsage
from sdsage import presets


def main(output: str) -> None:
    files = presets.load("tiny").options
    params = sdsage.SdCtxParams(
        diffusion_model_path=files["diffusion_model"],
        high_noise_diffusion_model_path=files["high_noise_diffusion_model"],
        vae_path=files["vae"],
        t5xxl_path=files["t5xxl"],
    )
    job = sdsage.SdVidGenParams(prompt="a lovely cat", width=128, height=128, video_frames=9, seed=42)
    job.sample_params.sample_steps = 2
    job.high_noise_sample_params.sample_steps = 2
    with sdsage.Context(params, on_progress=lambda p: print(p.stage, p.step, p.steps)) as ctx:
        result = ctx.generate_video(job)
    frames = [Image.fromarray(frame) for frame in result.frames]
    frames[0].save(output, save_all=True, append_images=frames[1:], duration=62, lossless=True)
    print(f"{output}: {len(frames)} frames, first step {result.timings.first_step:.2f} s")


if __name__ == "__main__":
    main(sys.argv[1])
