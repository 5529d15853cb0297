"""Tiny models: the real architectures, a few megabytes, unpacked or made on the user's machine.

The trained ones draw (docs/tiny-model.md). Those with random weights serve as test models; their pictures follow prompt
and seed, and mean nothing.
"""

from sdsage.tiny.cache import cache_dir, ensure
from sdsage.tiny.files import FILES

__all__ = ["FILES", "cache_dir", "ensure"]
