"""How far two results are apart."""

import math
from typing import Any

import numpy as np


def psnr(a: Any, b: Any, peak: float) -> float | None:
    """dB; None when they are the same."""
    error = float(np.mean((np.asarray(a, np.float64) - b) ** 2))
    return round(10 * math.log10(peak**2 / error), 1) if error else None
