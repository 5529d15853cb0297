"""The values that a job may have. Nothing is imported: the command line shows them without loading anything."""

MAX_SIZE = 16384  # pixels; the engine's own arithmetic is in 32 bits
MAX_STEPS = 10_000
MAX_PICTURES = 1000
MAX_PROMPT_BYTES = 16384  # the prompt parser recurses once a character
MAX_THREADS = 1024
# The Wan VAE builds one graph over all frames, and the engine's graphs have a fixed room: 669 frames abort in TI2V,
# 205 where every frame is encoded too (measured; it depends on the number of layers, which all Wan VAEs share).
MAX_FRAMES = 573
MAX_FRAMES_ENCODED = 197
LEVERS = ("linear", "fuse", "vae", "batch")


def lever_problem(levers: str | None) -> str:
    """What is wrong with a value of `engine_levers`; empty if nothing is."""
    names = (levers or "default").split(",")
    unknown = [] if names == ["none"] else [name for name in names if name not in ("default", *LEVERS)]
    if not unknown:
        return ""
    allowed = f"it takes none, or some of default, {', '.join(LEVERS)} joined by commas"
    return f"{levers!r} can't be used, there is no lever {unknown[0]!r}: {allowed}"


def aligned_frames(asked: int) -> int:
    """The frame count that is made: the next 4n + 1 below."""
    return (asked - 1) // 4 * 4 + 1
