"""The traced sample as a picture that a page carries inside itself."""

import struct
import zlib
from base64 import b64encode

from anybatch.records import TracedImage


def image_address(image: TracedImage) -> str | None:
    """A PNG as a `data:` address; None where the numbers of pixels and sides do not agree, as in a damaged file."""
    line = image.width * image.channels
    values = [value for value in image.pixels if isinstance(value, int | float)]
    if image.channels not in (1, 3) or not line or len(values) != line * image.height:
        return None
    pixels = bytes(min(max(int(value), 0), 255) for value in values)
    # every line begins with the number of its filter: 0 is none
    lines = b"".join(b"\0" + pixels[start : start + line] for start in range(0, len(pixels), line))
    colour = 0 if image.channels == 1 else 2
    head = struct.pack(">IIBBBBB", image.width, image.height, 8, colour, 0, 0, 0)
    png = b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", head) + _chunk(b"IDAT", zlib.compress(lines, 9)) + _chunk(b"IEND", b"")
    return f"data:image/png;base64,{b64encode(png).decode()}"


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
