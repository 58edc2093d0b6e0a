"""Decodes any number of image files into the cache, in little memory; a killed process can be resumed."""

import json
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from holdfast.data import decoding
from holdfast.data.cache import Entry, Facts, Key, clear_errors, entry_of
from holdfast.errors import HoldfastError
from holdfast.files import parse_json, write_atomic

FORMAT = 2  # version of the cached arrays; changing it rebuilds every cache


@dataclass(frozen=True)
class Split:
    """Which files hold the images of a split, and the class index of each."""

    files: list[str]
    labels: np.ndarray  # (N,) int64


def decoded(folder: Path, key: Key, place: Path, splits: Mapping[str, Split], size: int, title: str) -> Entry:
    """The images and labels of `splits`, whose files lie in the zip file or below the folder `place`: <split>_images
    (N, 3, size, size) uint8 and <split>_labels (N,), -1 for an image that cannot be read; the facts list those."""

    def fill(growing: Path) -> Facts:
        _room_for(growing, sum(len(split.files) for split in splits.values()) * 3 * size * size)
        unreadable: list[str] = []
        for name, split in splits.items():
            with clear_errors(folder):
                labels = split.labels.copy()
                for row, sentence in _decode(growing, name, place, split.files, size, f"{title}: {name} images"):
                    labels[row] = -1
                    unreadable.append(sentence.encode("utf-8", "replace").decode())  # file names may not be valid text
                np.save(growing / f"{name}_labels.npy", labels, allow_pickle=False)
        for journal in growing.glob("*.jsonl"):
            journal.unlink()
        return {"unreadable": unreadable}

    return entry_of(folder, {**key, "size": size, "decoded": FORMAT}, fill)


def _decode(growing: Path, name: str, place: Path, files: list[str], size: int, text: str) -> list[tuple[int, str]]:
    """Decodes what earlier processes have not; returns row and error of all images that cannot be read."""
    from holdfast.progress import progress_bar  # here, so that the decoding processes, which need none, start sooner

    target, journal = growing / f"{name}_images.npy", growing / f"{name}.jsonl"
    if decoding.make_room(target, len(files), size):
        journal.unlink(missing_ok=True)
    done = _journalled(journal, target, len(files), size)
    bad = [pair for block in done.values() for pair in block.bad]
    with progress_bar() as bar, open(journal, "a", encoding="utf-8") as log:
        task = bar.add_task(text, total=len(files), completed=sum(block.count for block in done.values()))
        for block in decoding.decode_files(target, place, files, size, done):
            log.write(_line(block))
            log.flush()
            bad += block.bad
            bar.advance(task, block.count)
    return sorted(bad)


def _journalled(journal: Path, target: Path, files: int, size: int) -> dict[int, decoding.Block]:
    """The blocks that an earlier process finished and whose pixels are on disk as written. The journal is rewritten
    with only these, because its last line may be cut short."""
    found: dict[int, decoding.Block] = {}
    lines = journal.read_bytes().decode("utf-8", "replace").splitlines() if journal.exists() else []
    for line in lines:
        with suppress(ValueError, TypeError):
            start, count, digest, bad = parse_json(line)
            expected = min(decoding.BLOCK, files - start)
            if start % decoding.BLOCK or count != expected:
                continue
            if decoding.block_digest(target, start, count, size) == digest:
                found[start] = decoding.Block(start, count, digest, tuple(map(tuple, bad)))
    write_atomic(journal, "".join(_line(block) for block in found.values()).encode())
    return found


def _line(block: decoding.Block) -> str:
    return json.dumps([block.start, block.count, block.digest, block.bad]) + "\n"


def _room_for(growing: Path, needed: int) -> None:
    there = sum(file.stat().st_blocks * 512 for file in growing.iterdir())  # from an earlier, killed process
    free = shutil.disk_usage(growing).free
    if needed - there > free:
        raise HoldfastError(
            f"the decoded images take {needed / 1e9:.1f} GB, but {growing.parent} has only "
            f"{(free + there) / 1e9:.1f} GB free; choose a smaller data.size, or set XDG_CACHE_HOME to a larger disk"
        )
