"""How fast a model's videos are played: the speed of the clips that it was trained on. Imports nothing."""

DEFAULT = 16
# The beginning of the engine's name of the architecture, and frames per second.
_SPEEDS = (("Wan 2.2 TI2V", 24), ("LTX", 24))


def model_fps(version_name: str) -> int:
    """Frames per second of a model, by the engine's name of it (`Context.version_name`)."""
    return next((fps for name, fps in _SPEEDS if version_name.startswith(name)), DEFAULT)
