"""--codec list: what .mp4 and .webm can be written with here."""

from .console import console
from .settings import Settings


def show_codecs(settings: Settings) -> None:
    """Prints the codecs, each tried with a frame.

    Raises:
        MissingExtra: PyAV is not installed.
    """
    from sdsage.media.codecs import listing

    rows = listing()
    if settings["json"]:
        console().result({"codecs": rows})
        return
    for row in rows:
        files = ", ".join(f"{s} (default)" if s in row["default_of"] else s for s in row["files"])
        crf = f"--crf {row['crf_range'][0]} to {row['crf_range'][1]}, default {row['crf']}"
        state = "present" if row["present"] else row["why_not"]
        print(f"{row['codec']:<5} {row['encoder']:<11} {files:<16} {crf:<29} {state}")
