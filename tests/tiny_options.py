"""Prints the model options of the tiny preset as an sd-cli command takes them."""

from pathlib import Path

from sdsage import presets

for name, value in presets.load("tiny-random").options.items():
    if isinstance(value, str) and Path(value).is_file():
        print(f"--{name.replace('_', '-')} {value}", end=" ")
