"""How much a MessagePack message says it holds, read before anything is made of it.

Owns one pass over the bytes; imports nothing of ours. Why: msgpack makes a list of the declared length before it has seen the
entries, and nested lists each declare their own, so that a message of five kilobytes can ask for a hundred megabytes.
Invariant: a whole message never declares more entries than it has bytes, since each entry takes one at least.
"""

from __future__ import annotations

import re

# Whatever has no length of its own and no entries: numbers, nil, booleans, empty texts, lists and maps, and short texts.
_NUMBERS = rb"[\x00-\x7f\xe0-\xff\x80\x90\xa0\xc0\xc2\xc3]|[\xcc\xd0].|[\xcd\xd1]..|[\xca\xce\xd2].{4}|[\xcb\xcf\xd3].{8}"
_TEXTS = b"|".join(b"%s.{%d}" % (re.escape(bytes([0xA0 + n])), n) for n in range(1, 32))
_PLAIN = re.compile(b"(?:%s|%s)*+" % (_NUMBERS, _TEXTS), re.DOTALL)
_LENGTH_BYTES = {  # of what states its length after its first byte
    0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4, 0xDC: 2, 0xDD: 4, 0xDE: 2, 0xDF: 4,
}  # fmt: skip
_LISTS, _MAPS = (0xDC, 0xDD), (0xDE, 0xDF)


def declared_entries(data: bytes | memoryview) -> int:
    """Entries of all its lists and maps together, a pair as two; more than len(data) if it lies, where counting stops."""
    entries, at, size = 0, 0, len(data)
    while entries <= size:
        match = _PLAIN.match(data, at)
        at = match.end() if match else at
        if at >= size:
            break
        first = data[at]
        if 0x80 <= first <= 0x9F:
            entries += (first & 15) * (2 if first < 0x90 else 1)
            at += 1
            continue
        width = _LENGTH_BYTES.get(first)
        if width is None:
            break  # an extension, or no MessagePack: refused by whoever reads it
        length = int.from_bytes(data[at + 1 : at + 1 + width])
        at += 1 + width
        if first in _LISTS or first in _MAPS:
            entries += length * (2 if first in _MAPS else 1)
        else:
            at += length
    return entries
