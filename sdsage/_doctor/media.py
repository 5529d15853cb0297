"""PyAV and the codecs of .mp4 and .webm; Pillow, which writes the rest, is needed for everything."""

from sdsage._doctor.child import ChildFailed, ask
from sdsage._doctor.report import Level, Report

GET_PYAV = "pip install 'sdsage[video]'"


def look(report: Report) -> None:
    try:
        found = ask("media")
    except ChildFailed as error:
        mend = "pip install --force-reinstall --no-cache-dir av"
        report.add(Level.WARNING, "pyav-broken", f".mp4 and .webm can't be written: {error}", mend)
        return
    report.facts["codecs"] = found["codecs"]
    if found["missing"]:
        text = "PyAV can't be imported, so .mp4 and .webm can't be written (.webp, .gif and pictures can)"
        report.add(Level.WARNING, "pyav-missing", f"{text}: {found['missing']}", GET_PYAV)
        return
    for codec in found["codecs"]:
        if not codec["present"] and codec["default_of"]:
            mend = "pip install --force-reinstall --only-binary :all: av"
            text = f"{' and '.join(codec['default_of'])} can't be written in {codec['codec']}: {codec['why_not']}"
            report.add(Level.WARNING, "codec-missing", text, mend)
