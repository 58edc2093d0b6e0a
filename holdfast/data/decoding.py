"""Decodes many image files on all cores: each process reads its own files and writes directly into one shared file.

Threads would not help: Pillow holds Python's global lock for most of the time a small image takes. Blocks are written,
not memory-mapped, so that no process ever holds more than a block in memory."""

import hashlib
import io
import json
import os
import subprocess
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from selectors import EVENT_READ, DefaultSelector
from typing import Any

import numpy as np

from holdfast.data.decode import LARGEST, BadImage, decode_image
from holdfast.data.zips import open_zip, read_member
from holdfast.errors import HoldfastError
from holdfast.files import read_limited

BLOCK = 250  # files per block
FEW = 2_000  # up to this many files one process is faster than starting several


@dataclass(frozen=True)
class Block:
    """Some files that have been decoded: where they begin, a checksum of their pixels, and which could not be read."""

    start: int
    count: int
    digest: str
    bad: tuple[tuple[int, str], ...]  # row, and a sentence


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def decode_files(
    target: Path, place: Path, files: Sequence[str], size: int, done: Collection[int] = (), processes: int | None = None
) -> Iterator[Block]:
    """Writes the images of `files`, which lie in the zip file or below the folder `place`, into the .npy file `target`,
    (N, 3, size, size) uint8, block by block, except for the blocks whose start is in `done`. An image that cannot be
    read is black."""
    blocks = (range(s, min(s + BLOCK, len(files))) for s in range(0, len(files), BLOCK) if s not in done)
    count = processes or (cores() if len(files) - BLOCK * len(done) > FEW else 1)
    if count > 1:
        yield from _shared_out(target, place, files, size, blocks, count)
        return
    with _Decoder(target, place, size) as decoder:
        for block in blocks:
            yield decoder.decode([files[i] for i in block], block.start)


def make_room(target: Path, count: int, size: int) -> bool:
    """Creates an .npy file for `count` images unless it exists; returns whether it was created."""
    shape = (count, 3, size, size)
    with suppress(OSError, ValueError, EOFError):  # missing, or cut short
        if np.load(target, mmap_mode="r", allow_pickle=False).shape == shape:
            return False
    unfinished = target.with_suffix(".tmp")
    np.lib.format.open_memmap(unfinished, "w+", np.uint8, shape).flush()
    unfinished.replace(target)
    return True


def block_digest(target: Path, start: int, count: int, size: int) -> str:
    """The checksum of the pixels of this block of the file."""
    with open(target, "rb") as file:
        file.seek(_offset(target) + start * 3 * size * size)
        return hashlib.sha256(file.read(count * 3 * size * size)).hexdigest()


def _offset(target: Path) -> int:
    """Where the pixels of an .npy file begin."""
    return int(np.load(target, mmap_mode="r", allow_pickle=False).offset)


def _shared_out(
    target: Path, place: Path, files: Sequence[str], size: int, blocks: Iterator[range], count: int
) -> Iterator[Block]:
    """Gives blocks to processes until all are done."""
    command = [sys.executable, "-m", "holdfast.data.decoding", str(target), str(place), str(size)]
    processes = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(count)
    ]
    try:
        with DefaultSelector() as selector:
            busy = 0
            for process in processes:
                assert process.stdout is not None
                selector.register(process.stdout, EVENT_READ, process)
                busy += _give(process, files, blocks)
            while busy:
                for key, _ in selector.select():
                    process = key.data
                    line = process.stdout.readline()
                    answer = json.loads(line) if line else {"error": f"a process that decodes images from {place} died"}
                    if "error" in answer:
                        raise _failure(answer)
                    yield Block(**{**answer, "bad": tuple(map(tuple, answer["bad"]))})
                    busy += _give(process, files, blocks) - 1
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def _failure(answer: dict[str, Any]) -> Exception:
    number = answer.get("number")  # the operating system's error number, for example for a full disk
    return HoldfastError(answer["error"]) if number is None else OSError(number, answer["error"])


def _give(process: subprocess.Popen[str], files: Sequence[str], blocks: Iterator[range]) -> bool:
    block = next(blocks, None)
    if block is None:
        return False
    assert process.stdin is not None
    print(json.dumps([block.start, [files[i] for i in block]]), file=process.stdin, flush=True)
    return True


class _Decoder:
    """Reads and decodes files of a zip file or a folder into an .npy file."""

    def __init__(self, target: Path, place: Path, size: int) -> None:
        self.place, self.size = place, size
        self.archive = None if place.is_dir() else open_zip(place)
        self.offset = _offset(target)
        self.file = open(target, "r+b")  # noqa: SIM115

    def __enter__(self) -> "_Decoder":
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()
        if self.archive:
            self.archive.close()

    def decode(self, files: Sequence[str], start: int) -> Block:
        pixels = np.zeros((len(files), 3, self.size, self.size), np.uint8)
        bad = []
        for i, name in enumerate(files):
            try:
                pixels[i] = decode_image(io.BytesIO(self._read(name)), self.size, f"{name} in {self.place}")
            except BadImage as error:
                bad.append((start + i, str(error)))
        self.file.seek(self.offset + start * 3 * self.size * self.size)
        self.file.write(pixels.data)
        self.file.flush()
        return Block(start, len(files), hashlib.sha256(pixels.data).hexdigest(), tuple(bad))

    def _read(self, name: str) -> bytes:
        try:
            if self.archive:
                return read_member(self.archive, name, LARGEST)
            return read_limited(self.place / name, LARGEST)
        except HoldfastError as error:
            raise BadImage(str(error)) from error
        except OSError as error:  # not the image file's fault
            file = f"{name} in {self.place}" if self.archive else str(self.place / name)
            raise HoldfastError(f"{file} cannot be read ({error.strerror}); make it readable, or replace it") from error
        except Exception as error:  # bad checksum, bad compression, encryption, truncated file: each has its own type
            raise BadImage(f"{name} in {self.place} cannot be read ({error}); download the archive again") from error


def main(target: Path, place: Path, size: int) -> None:
    """A decoding process: takes blocks from standard input, one per line, until there are no more."""
    with _Decoder(target, place, size) as decoder:
        for line in sys.stdin:
            start, files = json.loads(line)
            try:
                answer = asdict(decoder.decode(files, start))
            except OSError as error:  # a full disk
                answer = {"error": error.strerror, "number": error.errno}
            except HoldfastError as error:
                answer = {"error": str(error)}
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    with suppress(BrokenPipeError):  # the parent process has been killed
        main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
