"""Mutations for scripts/fuzz.py: of bytes, of JSON, and of files whose checksums and lengths are put right again."""

import json
import random
import struct
import zlib
from collections.abc import Callable, Sequence
from typing import Any

NUMBERS = [0, 1, -1, 2, 127, 255, 256, 65535, 2**31 - 1, 2**31, 2**32 - 1, 2**53, 2**63 - 1, -(2**63), 2**64, 10**30]
TEXTS = [
    "",
    "\0",
    "a",
    "../../x",
    "/",
    "\x1b[2J",
    "\ud800",
    "é" * 300,
    "[" * 50,
    "x" * 5000,
    "nan",
    "=1+1",
    "[/x]",
    "0",
]
LEAVES: list[Any] = [
    None,
    True,
    False,
    0.5,
    1e308,
    -1e308,
    float("inf"),
    float("nan"),
    [],
    {},
    [[]],
    [None],
    {"": None},
]
TOKENS = [
    b"\0",
    b"\xff\xff\xff\xff",
    b"[",
    b"]",
    b"{",
    b"}",
    b'"',
    b",",
    b":",
    b"=",
    b"\n",
    b"'",
    b".",
    b"<",
    b"1e999",
    b"NaN",
]


def mutated(chance: random.Random, blob: bytes, others: Sequence[bytes]) -> bytes:
    """One to a few small changes."""
    found = bytearray(blob)
    for _ in range(chance.choice([1, 1, 1, 2, 3, 8])):
        _change(chance, found, others)
    return bytes(found)


def _change(chance: random.Random, blob: bytearray, others: Sequence[bytes]) -> None:
    place = chance.randrange(len(blob) + 1)
    length = min(len(blob) - place, chance.choice([1, 1, 2, 4, 8, 16, 100]))
    kind = chance.randrange(10)
    if kind <= 1 and place < len(blob):
        blob[place] ^= 1 << chance.randrange(8)
    elif kind == 2:
        blob[place : place + length] = chance.randbytes(length)
    elif kind == 3:
        del blob[place : place + length]
    elif kind == 4:
        blob[place:place] = chance.choice(TOKENS) * chance.choice([1, 1, 1, 3, 50, 2_000])
    elif kind == 5:
        blob[place:place] = blob[place : place + length] * chance.choice([1, 2, 100])
    elif kind == 6:
        other = chance.choice(others)
        start = chance.randrange(len(other) + 1)
        blob[place : place + length] = other[start : start + chance.choice([1, 8, 64, 1000])]
    elif kind == 7:
        form = chance.choice(["<I", ">I", "<Q", ">Q", "<H", ">H"])
        most = 1 << 8 * struct.calcsize(form)
        blob[place : place + struct.calcsize(form)] = struct.pack(form, chance.choice(NUMBERS) % most)
    elif kind == 8:
        _number(chance, blob)
    else:
        del blob[place:]


def _number(chance: random.Random, blob: bytearray) -> None:
    """Another number where digits are."""
    digits = [i for i, byte in enumerate(blob[:20_000]) if 48 <= byte <= 57]
    if digits:
        start = end = chance.choice(digits)
        while end < len(blob) and 48 <= blob[end] <= 57:
            end += 1
        blob[start:end] = str(chance.choice(NUMBERS)).encode()


def mutated_json(chance: random.Random, text: bytes) -> bytes:
    """A JSON text in which some values are others."""
    value = json.loads(text)
    for _ in range(chance.choice([1, 1, 2, 4])):
        value = _node(chance, value)
    return json.dumps(value, ensure_ascii=chance.random() < 0.9).encode("utf-8", "surrogatepass")


def _node(chance: random.Random, value: Any) -> Any:
    """The value with one change somewhere in it."""
    if isinstance(value, dict) and value and chance.random() < 0.95:
        key = chance.choice(list(value))
        kind = chance.random()
        if kind < 0.1:
            return {k: v for k, v in value.items() if k != key}
        if kind < 0.15:
            return {**value, chance.choice(TEXTS): chance.choice(LEAVES)}
        return {**value, key: _node(chance, value[key])}
    if isinstance(value, list) and value and chance.random() < 0.9:
        place = chance.randrange(len(value))
        kind = chance.random()
        if kind < 0.1:
            return value[:place] + value[place + 1 :]
        if kind < 0.2:
            return [*value, value[place]]
        if kind < 0.22:
            return value * chance.choice([2, 100, 3000])
        return [*value[:place], _node(chance, value[place]), *value[place + 1 :]]
    if chance.random() < 0.1:
        return [value]
    return chance.choice([*LEAVES, chance.choice(NUMBERS), chance.choice(TEXTS), chance.choice(NUMBERS) + 0.5])


def mutated_tensors(chance: random.Random, blob: bytes) -> bytes:
    """A safetensors blob with other facts or another header, whose length is right."""
    length = int.from_bytes(blob[:8], "little")
    header = json.loads(blob[8 : 8 + length])
    if chance.random() < 0.7:
        facts = mutated_json(chance, header["__metadata__"]["holdfast"].encode())
        header["__metadata__"]["holdfast"] = facts.decode("utf-8", "surrogatepass")
        text = json.dumps(header).encode()
    else:
        text = mutated_json(chance, blob[8 : 8 + length])
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + blob[8 + length :]


def mutated_png(chance: random.Random, blob: bytes) -> bytes:
    """A PNG with other chunks, whose checksums are right."""
    place, chunks = 8, []
    while place < len(blob):
        (length,) = struct.unpack_from(">I", blob, place)
        chunks.append((blob[place + 4 : place + 8], blob[place + 8 : place + 8 + length]))
        place += 12 + length
    i = chance.randrange(len(chunks))
    kind, content = chunks[i]
    if kind == b"IDAT" and chance.random() < 0.7:
        content = zlib.compress(mutated(chance, zlib.decompress(content), [blob]))
    else:
        content = mutated(chance, content, [blob])
    chunks[i : i + chance.choice([0, 1, 1, 1])] = [(kind, content)]
    whole = b"".join(
        struct.pack(">I", len(c)) + kind + c + struct.pack(">I", zlib.crc32(kind + c)) for kind, c in chunks
    )
    return blob[:8] + whole


def mutated_tar(chance: random.Random, blob: bytes) -> bytes:
    """A tar file with another header, whose checksum is right."""
    found = bytearray(blob)
    start = 512 * chance.randrange(max(1, len(found) // 512))
    header = bytearray(mutated(chance, bytes(found[start : start + 512]), [blob])[:512].ljust(512, b"\0"))
    if chance.random() < 0.3:
        header[156:157] = chance.choice([b"x", b"g", b"L", b"K", b"S", b"1", b"5", b"\0"])
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    found[start : start + 512] = header
    return bytes(found)


Mutation = Callable[[random.Random, bytes], bytes]
