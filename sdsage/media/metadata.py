"""Generation parameters inside the files: written by us, read back exactly.

Every container carries one JSON object {"parameters": text, "sdsage": data}. It is pure ASCII, because a GIF
comment, a JPEG comment and an EXIF description know no other encoding; JSON escapes bring any text through.

  PNG          text chunk "sdsage"; the readable text also in "parameters"
  JPEG         COM segments that begin with "sdsage:" (one holds 64 kB); the text also in the EXIF UserComment, and
               both in XMP as far as they fit into one segment
  WebP         EXIF ImageDescription; the text also in the EXIF UserComment, and both in XMP
  GIF          comment block
  MP4, WebM    container tag "comment"
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from PIL import Image, PngImagePlugin, UnidentifiedImageError
from PIL.JpegImagePlugin import JpegImageFile

from sdsage.errors import BadRequest
from sdsage.media import xmp

_DESCRIPTION, _EXIF_IFD, _USER_COMMENT = 0x010E, 0x8769, 0x9286
_UNICODE = b"UNICODE\0"  # EXIF's name for UTF-16 in the byte order of the file
_JPEG_PREFIX = b"sdsage:"
_JPEG_SEGMENT = 65533  # bytes that fit behind a segment's own length
_EXIF_OVERHEAD = 512  # header, directory and tags around the UserComment


@dataclass(frozen=True)
class Metadata:
    """What is embedded in one file.

    Attributes:
        parameters: readable text, see `parameters_text`.
        data: the same and more as plain JSON values (dict, list, str, int, finite float, bool, None).
    """

    parameters: str = ""
    data: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        """The embedded object. Raises BadRequest when `data` holds something that JSON has no word for."""
        try:
            return json.dumps({"parameters": self.parameters, "sdsage": self.data}, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise BadRequest(f"metadata takes plain JSON values only: {error}") from error


def parameters_text(prompt: str, negative_prompt: str, fields: Mapping[str, object]) -> str:
    """The layout that image tools look for: prompt, "Negative prompt: ...", then "Name: value, Name: value".

    A value that holds a comma, colon, quote or line break is quoted as JSON; a None is left out.
    """
    lines = [prompt]
    if negative_prompt:
        lines.append(f"Negative prompt: {negative_prompt}")
    lines.append(", ".join(f"{name}: {_quoted(value)}" for name, value in fields.items() if value is not None))
    return "\n".join(lines)


def _quoted(value: object) -> str:
    text = str(value)
    return json.dumps(text, ensure_ascii=False) if any(c in text for c in ',:"\n') else text


def _readable(text: str) -> str:
    """The text for other programs: half surrogates, which no encoding takes, become question marks."""
    return text.encode("utf-8", "replace").decode("utf-8")


def png_text(metadata: Metadata) -> PngImagePlugin.PngInfo:
    """Text chunks for Pillow's PNG writer."""
    chunks = PngImagePlugin.PngInfo()
    chunks.add_text("parameters", _readable(metadata.parameters))
    chunks.add_text("sdsage", metadata.to_json())
    return chunks


def webp_exif(metadata: Metadata) -> bytes:
    """EXIF block for Pillow's WebP writer, which has no limit of length."""
    return _exif(metadata.parameters, metadata.to_json())


def jpeg_exif(metadata: Metadata) -> bytes:
    """EXIF block for Pillow's JPEG writer; empty when the text is longer than a segment."""
    exif = _exif(metadata.parameters, None)
    return exif if len(exif) <= _JPEG_SEGMENT else b""


def _exif(text: str, description: str | None) -> bytes:
    exif = Image.Exif()
    exif.endian = ">"  # and with it the UTF-16
    if description is not None:
        exif[_DESCRIPTION] = description
    exif[_EXIF_IFD] = {_USER_COMMENT: _UNICODE + _readable(text).encode("utf-16-be")}
    return exif.tobytes()


def webp_xmp(metadata: Metadata) -> bytes:
    """XMP packet for Pillow's WebP writer."""
    return xmp.packet(metadata.parameters, metadata.to_json())


def _jpeg_xmp(metadata: Metadata) -> bytes:
    """The body of an XMP segment: text and JSON, or the text alone, or nothing, whatever fits."""
    for json_text in (metadata.to_json(), None):
        body = xmp.JPEG_HEADER + xmp.packet(metadata.parameters, json_text)
        if len(body) <= _JPEG_SEGMENT:
            return body
    return b""


def with_jpeg_segments(jpeg: bytes, metadata: Metadata) -> bytes:
    """A JPEG file's bytes with XMP and the JSON put behind the last of its leading APP segments."""
    at = 2  # behind the start-of-image marker
    while jpeg[at] == 0xFF and 0xE0 <= jpeg[at + 1] <= 0xEF:
        at += 2 + int.from_bytes(jpeg[at + 2 : at + 4])
    body = metadata.to_json().encode("ascii")
    step = _JPEG_SEGMENT - len(_JPEG_PREFIX)
    chunks = [(b"\xff\xe1", packet)] if (packet := _jpeg_xmp(metadata)) else []
    chunks += [(b"\xff\xfe", _JPEG_PREFIX + body[begin : begin + step]) for begin in range(0, len(body), step)]
    segments = b"".join(marker + (len(chunk) + 2).to_bytes(2) + chunk for marker, chunk in chunks)
    return jpeg[:at] + segments + jpeg[at:]


def read_metadata(path: str | os.PathLike[str]) -> Metadata | None:
    """What a file of ours carries; None when it carries nothing.

    An image of another program that has the readable text only gives that text with empty data.
    Raises BadRequest when the file can't be read, MissingExtra for .mp4 and .webm without PyAV.
    """
    file = Path(path)
    try:
        with Image.open(file) as image:
            places, readable = [_embedded(image), xmp.json_of(_xmp_packet(image))], _readable_text(image)
    except UnidentifiedImageError:
        places, readable = [_video_comment(file)], ""
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise BadRequest(f"{file} can't be read: {error}") from error
    for embedded in places:
        try:
            value = json.loads(embedded)
        except (ValueError, RecursionError):
            continue  # nothing there, or the comment of another program
        match value:
            case {"parameters": str(parameters), "sdsage": dict(data)}:
                return Metadata(parameters, data)
    return Metadata(readable) if readable else None


def _embedded(image: Image.Image) -> str:
    """The text in the place where the format carries our JSON."""
    if isinstance(image, JpegImageFile):
        parts = [body for name, body in image.applist if name == "COM" and body.startswith(_JPEG_PREFIX)]
        return b"".join(part.removeprefix(_JPEG_PREFIX) for part in parts).decode("ascii", "replace")
    if image.format == "GIF":
        comment: bytes = image.info.get("comment", b"")
        return comment.decode("ascii", "replace")
    if image.format == "WEBP":
        return str(image.getexif().get(_DESCRIPTION, ""))
    return str(image.info.get("sdsage", ""))


def _xmp_packet(image: Image.Image) -> bytes:
    if isinstance(image, JpegImageFile):
        parts = [body for name, body in image.applist if name == "APP1" and body.startswith(xmp.JPEG_HEADER)]
        return parts[0].removeprefix(xmp.JPEG_HEADER) if parts else b""
    found = image.info.get("xmp", b"")
    return found if isinstance(found, bytes) else b""


def _readable_text(image: Image.Image) -> str:
    """The text in the places where image tools look for it: PNG "parameters", EXIF UserComment."""
    exif = image.getexif()
    comment = exif.get_ifd(_EXIF_IFD).get(_USER_COMMENT, b"")
    if isinstance(comment, bytes) and comment.startswith(_UNICODE):
        order = "utf-16-le" if exif.endian == "<" else "utf-16-be"
        return comment.removeprefix(_UNICODE).decode(order, "replace")
    return str(image.info.get("parameters", ""))


def _video_comment(file: Path) -> str:
    from sdsage.media import pyav  # which imports this module

    tags = pyav.read_tags(file)
    return next((value for name, value in tags.items() if name.lower() == "comment"), "")
