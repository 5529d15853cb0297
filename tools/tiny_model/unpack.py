"""The weights that the package carries, as training keeps them: python -m tools.tiny_model.unpack STATE

Later stages go on from there: `vae` from `pictures`, which is the packed VAE, the experts from `trunk`, the packed
low-noise one. They are as exact as the package is: Q8_0, and the VAE with few bits of mantissa.
"""

import argparse
from pathlib import Path

from tools.tiny_model import arrays, golden

STAGES = {"vae": ("vae", "pictures"), "text": ("text",), "low": ("low", "trunk"), "high": ("high",)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("state", type=Path, help="folder of train.py; weights of the same stages are replaced")
    a = parser.parse_args()
    weights = golden.package()
    for part, stages in STAGES.items():
        for stage in stages:
            arrays.save(a.state, f"{stage}.ema", weights[part], {"finished": "1", "step": "0", "minutes": "0"})
            print(f"{stage}.ema: {sum(w.size for w in weights[part].values()) / 1e6:.2f} M weights")


if __name__ == "__main__":
    main()
