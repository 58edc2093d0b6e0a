"""Records for other programs: CSV for a spreadsheet, event files for TensorBoard."""

import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from holdfast.files import write_atomic
from holdfast.results.record import read_run
from holdfast.results.tables import as_csv
from holdfast.terminal import printable

LARGEST = float(np.finfo(np.float32).max)  # TensorBoard's numbers are of 32 bits


def flat(line: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """The numbers of a line of a record, nested ones by dotted names; tasks numbered from 1, other lists counted."""
    for key, value in line.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from flat(value, f"{name}.")
        elif key == "task_accuracy":
            yield from ((f"{name}.{i}", float(one)) for i, one in enumerate(value, 1))
        elif isinstance(value, list):
            yield f"{name}.count", float(len(value))
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield name, float(max(-LARGEST, min(value, LARGEST)))


def write_csv(run: Path, file: Path) -> None:
    """Writes one line per round, with one column per number."""
    lines = [dict(flat(line)) for line in read_run(run)[1]]
    names = list(dict.fromkeys(name for line in lines for name in line))
    rows = [[f"{line[name]:.12g}" if name in line else "" for name in names] for line in lines]
    write_atomic(file, as_csv([names, *rows]).encode())


def write_events(run: Path, folder: Path) -> Path:
    """Writes a TensorBoard event file with one scalar per number and round; rounds are the steps."""
    records = [_event(0, _field(3, b"brain.Event:2"))]
    for line in read_run(run)[1]:
        values = b"".join(
            _field(1, _field(1, printable(name).replace(".", "/").encode()) + b"\x15" + struct.pack("<f", value))
            for name, value in flat(line)
            if name not in ("round", "task")
        )
        records.append(_event(line["round"], _field(5, values)))
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "events.out.tfevents.0000000000.holdfast"  # a fixed name, so that the same run gives the same file
    write_atomic(file, b"".join(map(_framed, records)))
    return file


def _event(step: int, what: bytes) -> bytes:
    """A tensorflow.Event: wall time (1; the step, because records have no clock), step (2), and the rest."""
    return b"\x09" + struct.pack("<d", float(step)) + b"\x10" + _varint(step) + what


def _field(number: int, content: bytes) -> bytes:
    """A field of bytes, text or a message, in the protocol buffers' wire format."""
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def _framed(content: bytes) -> bytes:
    """A TFRecord: length and content, each with its masked checksum."""
    length = struct.pack("<Q", len(content))
    return length + _masked(length) + content + _masked(content)


def _masked(content: bytes) -> bytes:
    checksum = crc32c(content)
    return struct.pack("<I", ((checksum >> 15 | checksum << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def _entry(value: int) -> int:
    for _ in range(8):
        value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
    return value


_TABLE = [_entry(i) for i in range(256)]


def crc32c(content: bytes) -> int:
    """Castagnoli's checksum."""
    checksum = 0xFFFFFFFF
    for byte in content:
        checksum = _TABLE[(checksum ^ byte) & 0xFF] ^ checksum >> 8
    return checksum ^ 0xFFFFFFFF
