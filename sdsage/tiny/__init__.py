"""Tiny models with random weights: the real architectures, a few megabytes, made on the user's machine by NumPy.

They show that everything works and serve as test models; their pictures follow prompt and seed, and mean nothing.
"""

from sdsage.tiny.cache import cache_dir, ensure
from sdsage.tiny.files import FILES

__all__ = ["FILES", "cache_dir", "ensure"]
