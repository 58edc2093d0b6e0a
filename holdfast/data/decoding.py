"""Decoding many image files on all cores: each process reads its own files and writes straight into one mapped array.

Threads would not help: for most of a small image's time Pillow holds Python's lock."""

import io
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from selectors import EVENT_READ, DefaultSelector

import numpy as np

from holdfast.data.decode import decode_image
from holdfast.errors import HoldfastError

BLOCK = 250  # files that a process takes at a time
FEW = 2_000  # files that one process has decoded before others have started


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def decode_files(place: Path, files: Sequence[str], size: int, text: str, processes: int | None = None) -> np.ndarray:
    """The images of `files`, which lie in the zip file or below the folder `place`: (N, 3, size, size) uint8."""
    from holdfast.progress import progress_bar  # here, because the processes below need none and start sooner without

    count = processes or (cores() if len(files) > FEW else 1)
    with tempfile.TemporaryDirectory(prefix="holdfast-") as folder, progress_bar() as bar:
        file = Path(folder) / "images.npy"
        images = np.lib.format.open_memmap(file, "w+", np.uint8, (len(files), 3, size, size))
        task = bar.add_task(text, total=len(files))
        blocks = (range(start, min(start + BLOCK, len(files))) for start in range(0, len(files), BLOCK))
        if count == 1:
            with _Reader(place) as reader:
                for block in blocks:
                    reader.decode([files[i] for i in block], images, block.start)
                    bar.advance(task, len(block))
        else:
            for done in _shared_out(place, files, file, blocks, count):
                bar.advance(task, done)
        return images  # its memory stays mapped when the file's name is gone


def _shared_out(place: Path, files: Sequence[str], target: Path, blocks: Iterator[range], count: int) -> Iterator[int]:
    """Gives blocks to processes until all are done; yields how many files each finished block had."""
    command = [sys.executable, "-m", "holdfast.data.decoding", str(place), str(target)]
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
                        raise HoldfastError(answer["error"])
                    yield int(answer["done"])
                    busy += _give(process, files, blocks) - 1
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def _give(process: subprocess.Popen[str], files: Sequence[str], blocks: Iterator[range]) -> bool:
    block = next(blocks, None)
    if block is None:
        return False
    assert process.stdin is not None
    print(json.dumps([block.start, [files[i] for i in block]]), file=process.stdin, flush=True)
    return True


class _Reader:
    """Reads and decodes files of a zip file or a folder."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.archive = None if place.is_dir() else zipfile.ZipFile(place)

    def __enter__(self) -> "_Reader":
        return self

    def __exit__(self, *_: object) -> None:
        if self.archive:
            self.archive.close()

    def decode(self, files: Sequence[str], images: np.ndarray, start: int) -> None:
        for row, name in enumerate(files, start):
            images[row] = decode_image(io.BytesIO(self._read(name)), images.shape[-1], f"{name} in {self.place}")

    def _read(self, name: str) -> bytes:
        try:
            return self.archive.read(name) if self.archive else (self.place / name).read_bytes()
        except OSError as error:
            file = f"{name} in {self.place}" if self.archive else str(self.place / name)
            raise HoldfastError(f"{file} cannot be read ({error.strerror}); allow reading it, or replace it") from error
        except Exception as error:  # bad checksum, bad compression, encryption, a file cut short: each its own type
            raise HoldfastError(f"{name} in {self.place} cannot be read ({error}); get the archive anew") from error


def main(place: Path, target: Path) -> None:
    """One of the processes: takes blocks from standard input, a line each, until there are no more."""
    images = np.lib.format.open_memmap(target, "r+")
    with _Reader(place) as reader:
        for line in sys.stdin:
            start, files = json.loads(line)
            try:
                reader.decode(files, images, start)
                answer: dict[str, str | int] = {"done": len(files)}
            except HoldfastError as error:
                answer = {"error": str(error)}
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
