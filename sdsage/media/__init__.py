"""Files in and out: images, videos and the parameters embedded in them.

Pillow does images, GIF and animated WebP; PyAV (extra `video`) does MP4 and WebM and is imported only for
these.
"""

from sdsage.media.load import load_image, load_images_dir
from sdsage.media.metadata import Metadata, parameters_text, read_metadata
from sdsage.media.output import Output, plan_output

__all__ = [
    "Metadata",
    "Output",
    "load_image",
    "load_images_dir",
    "parameters_text",
    "plan_output",
    "read_metadata",
]
