"""XMP: the packet of RDF that photo editors show and keep, when they drop comments and rewrite EXIF."""

import re
import xml.etree.ElementTree as ET
from xml.sax.saxutils import escape

JPEG_HEADER = b"http://ns.adobe.com/xap/1.0/\0"
_X, _RDF = "adobe:ns:meta/", "http://www.w3.org/1999/02/22-rdf-syntax-ns#"
_DC, _XMP = "http://purl.org/dc/elements/1.1/", "http://ns.adobe.com/xap/1.0/"
_OURS = "urn:sdsage:parameters"
_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_LONGEST = 64 << 20  # bytes of a packet that is looked at

_PACKET = """\
<?xpacket begin="\ufeff" id="W5M0MpCehiHzreSzNTczkc9d"?>
<x:xmpmeta xmlns:x="{x}"><rdf:RDF xmlns:rdf="{rdf}"><rdf:Description rdf:about="" xmlns:dc="{dc}" xmlns:xmp="{xmp}" \
xmlns:sdsage="{ours}" xmp:CreatorTool="sdsage">
<dc:description><rdf:Alt><rdf:li xml:lang="x-default">{text}</rdf:li></rdf:Alt></dc:description>
{data}</rdf:Description></rdf:RDF></x:xmpmeta>
<?xpacket end="r"?>"""


def packet(text: str, json_text: str | None) -> bytes:
    """The packet for a readable text and, where there is room, our JSON (pure ASCII)."""
    data = "" if json_text is None else f"<sdsage:json>{escape(json_text)}</sdsage:json>\n"
    readable = escape(_NOT_XML.sub("", text))
    return _PACKET.format(x=_X, rdf=_RDF, dc=_DC, xmp=_XMP, ours=_OURS, text=readable, data=data).encode("utf-8")


def json_of(packet: bytes) -> str:
    """Our JSON in a packet of any origin; empty when there is none.

    An editor may have turned the element into an attribute, which means the same in RDF.
    """
    if len(packet) > _LONGEST or b"<!DOCTYPE" in packet or b"<!ENTITY" in packet:  # nothing of ours, and it can explode
        return ""
    try:
        root = ET.fromstring(packet.rstrip(b"\0 ").decode("utf-8"))
    except (ET.ParseError, UnicodeDecodeError):
        return ""
    name = f"{{{_OURS}}}json"
    for description in root.iter(f"{{{_RDF}}}Description"):
        found = description.get(name) or description.findtext(name)
        if found:
            return found
    return ""
