"""The files of a data set in a folder or a zip file, and its class folders."""

import hashlib
import os
import unicodedata
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import NoReturn

from holdfast.data.decoded import Split
from holdfast.data.zips import open_zip, read_member
from holdfast.errors import HoldfastError
from holdfast.files import read_limited

LAYOUT = {"train", "test", "val", "clients"}  # folders that are not classes
SUFFIXES = {".jpg", ".jpeg", ".jfif", ".jp2", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm", ".pbm"}
# Formats that cannot be decoded here. They count as unreadable images, because skipping them silently would leave a
# client with less data than its owner expects.
SUFFIXES |= {".heic", ".heif", ".avif", ".jxl", ".svg", ".dcm", ".nii", ".dng", ".cr2", ".cr3", ".nef", ".arw"}
LARGEST_TEXT = 2**25  # bytes; the longest list of a published data set has 3 MB
Listed = tuple[str, int, int]  # name, size, and modification time or checksum


@dataclass(frozen=True)
class Tree:
    """The files of a data set, by their names below its top folder."""

    where: Path
    stamps: Mapping[str, tuple[int, int]]  # per file: its size, and its modification time or checksum
    names: tuple[str, ...]  # sorted, so that nothing depends on the file system
    folders: frozenset[str]
    read: Callable[[str], bytes]  # for files other than images, which may have at most LARGEST_TEXT bytes
    place: Path  # the zip file, or the folder that the names are below
    prefix: str  # of the names in a zip file

    def identity(self, splits: Mapping[str, Split]) -> str:
        """A hash of these images and their labels; it changes if one of them does, and only then."""
        digest = hashlib.sha256()
        for name, split in splits.items():
            for file, label in zip(split.files, split.labels.tolist(), strict=True):
                stamp = self.stamps[file.removeprefix(self.prefix)]
                digest.update(repr((name, file, label, stamp)).encode("utf-8", "surrogateescape"))
        return digest.hexdigest()

    def inside(self, files: Sequence[str]) -> list[str]:
        """The names of these files inside `place`."""
        return [self.prefix + name for name in files]

    def text(self, name: str) -> str:
        try:
            return self.read(name).decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise HoldfastError(f"{name} in {self.where} is not UTF-8 text; download the data set again") from error


def find(title: str, path: str | None, root: Path, patterns: Iterable[str], name: str) -> Path:
    """Where a data set is: at `path`, or the first file or folder in `root` that matches one of the patterns."""
    if path is not None:
        if path != path.encode("utf-8", "replace").decode():
            raise HoldfastError(f"the path {path!a} is not UTF-8 text, so no config can contain it; rename the folder")
        place = Path(path).expanduser()
        if os.path.exists(place):
            return place
        if name.startswith("folder:"):
            raise HoldfastError(f"there is no folder or zip file {place.absolute()}; check the path of {name}")
        here = "" if place.is_absolute() else f" (relative to {Path.cwd()})"
        raise HoldfastError(f"there is no {title} at {path}{here}; set data.path to its archive or folder")
    wanted = list(patterns)
    for pattern in wanted:
        for place in sorted(root.glob(pattern)):
            return place
    raise HoldfastError(
        f"{root} holds no {title}; run 'holdfast data prepare {name}', or set data.path to its archive or folder, or "
        f"HOLDFAST_DATA to the folder that holds {wanted[0]}"
    )


@contextmanager
def open_tree(path: Path, top: str = "", mark: str | None = None) -> Iterator[Tree]:
    """The files behind `path`, a zip file or a folder; those below its folder `top`, if it has one. A folder
    without the file `mark` is some other folder, perhaps a huge one, and is not listed."""
    if os.path.isdir(path):
        yield _folder(path, top, mark)
        return
    with open_zip(path) as archive:
        yield _zip(path, archive, top)


def _zip(path: Path, archive: zipfile.ZipFile, top: str) -> Tree:
    infos = [info for info in archive.infolist() if not _hidden(info.filename)]
    prefix = f"{top}/" if top and any(info.filename.startswith(f"{top}/") for info in infos) else _wrapping(infos)
    known = {info.filename.removeprefix(prefix): info for info in infos if info.filename != prefix}

    def read(name: str) -> bytes:
        try:
            return read_member(archive, known[name].filename, LARGEST_TEXT)
        except Exception as error:  # bad checksum, bad compression, encryption, truncated file: each has its own type
            raise HoldfastError(f"{name} in {path} cannot be read ({error}); download the archive again") from error

    names = tuple(sorted(name for name, info in known.items() if not info.is_dir()))
    folders = {name.rstrip("/") for name, info in known.items() if info.is_dir()}
    stamps = {name: (info.file_size, info.CRC) for name, info in known.items()}
    return Tree(path, stamps, names, frozenset(folders), read, path, prefix)


def _hidden(name: str) -> bool:
    """Is this a file that operating systems leave in archives and folders, not data?"""
    return name.startswith("__MACOSX/") or any(part.startswith(".") for part in name.split("/"))


def _wrapping(infos: Sequence[zipfile.ZipInfo]) -> str:
    """The top folder that contains everything in a zip file, if that folder contains folders itself."""
    first = {info.filename.split("/")[0] for info in infos}
    deep = all(info.filename.count("/") > 1 for info in infos if not info.is_dir())
    return f"{first.pop()}/" if len(first) == 1 and deep and not first & LAYOUT else ""


def _folder(path: Path, top: str, mark: str | None) -> Tree:
    try:
        place = path / top if top and top in os.listdir(path) else path
        found = sorted(_below(place)) if mark is None or mark in os.listdir(place) else []
    except OSError as error:
        _unreadable(error)

    def read(name: str) -> bytes:
        try:
            return read_limited(place / name, LARGEST_TEXT)
        except OSError as error:
            _unreadable(error)

    stamps = {name: (size, changed) for name, size, changed in found if size >= 0}
    folders = frozenset(name for name, size, _ in found if size < 0)
    return Tree(path, stamps, tuple(stamps), folders, read, place, "")


def _below(top: Path) -> Iterator[Listed]:
    """Every file, and every folder with size -1; follows links, but not in circles."""
    here = os.stat(top)
    inside: tuple[tuple[int, int], ...] = ((here.st_dev, here.st_ino),)
    waiting = [("", inside)]  # folders still to list, each with its parents
    while waiting:
        name, above = waiting.pop()
        with os.scandir(top / name) as entries:
            for entry in entries:
                if _hidden(entry.name):
                    continue
                inner = f"{name}/{entry.name}" if name else entry.name
                try:
                    stat = entry.stat()
                except OSError as error:
                    raise HoldfastError(
                        f"{top / inner} is a broken or circular link ({error.strerror}); remove it"
                    ) from error
                if entry.is_file():  # not a pipe, which would block
                    yield inner, stat.st_size, stat.st_mtime_ns
                elif entry.is_dir():
                    identity = (stat.st_dev, stat.st_ino)
                    if identity in above:
                        raise HoldfastError(f"{top / inner} is a link to one of its own parent folders; remove it")
                    yield inner, -1, 0
                    waiting.append((inner, (*above, identity)))


def readable(name: str) -> str:
    """A name in the form used for comparison: composed letters (NFC), no surrounding blanks."""
    return unicodedata.normalize("NFC", name).strip()


def is_image(name: str) -> bool:
    return PurePosixPath(name.lower().removesuffix(".gz")).suffix in SUFFIXES  # NIfTI files are mostly compressed


def class_folders(tree: Tree, below: str = "") -> dict[str, list[str]]:
    """The image files per class name; every folder directly below `below` is a class; all sorted."""
    start = len(below)
    folders = {name[start:].split("/")[0] for name in tree.folders if name.startswith(below) and len(name) > start}
    files: dict[str, list[str]] = {name: [] for name in folders}
    for name in tree.names:
        if not name.startswith(below) or not is_image(name):
            continue
        folder, slash, _ = name[start:].partition("/")
        if slash:
            files.setdefault(folder, []).append(name)
    classes: dict[str, list[str]] = {}
    for folder in sorted(files):
        name = readable(folder)
        where = tree.where / below / folder
        if name != name.encode("utf-8", "replace").decode():
            raise HoldfastError(f"the name of the folder {str(where)!a} is not UTF-8 text; rename it")
        if name in classes:
            raise HoldfastError(f"{where} is a second folder of the class {name!r}; merge them or rename one")
        if not files[folder]:
            raise HoldfastError(f"the class {name!r} has no images in {where}; add some or remove the folder")
        classes[name] = files[folder]
    return classes


def _unreadable(error: OSError) -> NoReturn:
    sentence = f"{error.filename} cannot be read ({error.strerror}); make it readable or correct data.path"
    raise HoldfastError(sentence) from error
