"""Guidance's two forwards of a step."""

from edits.table import SD, Edit, Group

GUIDANCE = Group(
    name="guidance",
    why="With guidance every step computes the model twice, one picture at a time: small pictures do not fill a GPU, and"
    " every weight is read twice. The lever `batch` makes one forward of both.",
    guard="tests/test_guidance.py",
    drop="upstream computes both in one batch",
    edits=(
        Edit(SD, ">", '#include "diffusion_model.hpp"\n', '#include "sdsage_guidance.hpp"\n'),
        Edit(
            SD,
            "<",
            "        auto denoise = [&](const sd::Tensor<float>& x, float sigma, int step) -> sd::Tensor<float> {\n",
            "        sdsage::Guidance forwards(work_diffusion_model, version);\n",
        ),
        Edit(
            SD,
            "=",
            "                auto output_opt = work_diffusion_model->compute(n_threads, diffusion_params);\n",
            "                auto output_opt = forwards.forward(condition, cond, uncond, diffusion_params, [&](const DiffusionParams& p) {\n"
            "                    return work_diffusion_model->compute(n_threads, p);\n"
            "                });\n",
        ),
    ),
)
