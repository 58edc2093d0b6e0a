"""Puts a data set onto this machine: a resumable, verified download, or an import of a local file or folder."""

import http.client
import os
import shutil
import urllib.request
import zipfile
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path

from holdfast.data.sources import Download, Source
from holdfast.data.zips import PACKED, open_zip
from holdfast.errors import HoldfastError
from holdfast.files import sha256_of, sync_folder
from holdfast.locks import lock_file
from holdfast.progress import progress_bar

CHUNK = 1 << 20
TIMEOUT = 60  # seconds without a byte


def download(wanted: Download, root: Path) -> Path:
    """Downloads a file into `root` and verifies it; continues a part that an earlier attempt left behind."""
    target = root / wanted.file
    if target.exists():
        check_file(target, wanted)
        return target
    _folder(root)
    part = root / f"{wanted.file}.part"
    try:
        gate = root / f".{wanted.file}.lock"
        with open(gate, "w") as lock:
            lock_file(lock)  # two processes would write into the same file
            if target.exists():
                return target
            _fetch(wanted, part)
            check_file(part, wanted)
            os.replace(part, target)
            gate.unlink(missing_ok=True)  # processes that wait for it find the file
    except (OSError, http.client.HTTPException) as error:
        reason = " ".join(str(getattr(error, "reason", None) or error).split())
        raise HoldfastError(
            f"{wanted.url} cannot be downloaded ({reason}); run the same command again to continue, or download it "
            "yourself and import it with --from"
        ) from error
    sync_folder(root)
    return target


def _fetch(wanted: Download, part: Path) -> None:
    there = part.stat().st_size if part.exists() else 0
    if there >= wanted.bytes:
        return
    request = urllib.request.Request(wanted.url, headers={"Range": f"bytes={there}-"} if there else {})
    with urllib.request.urlopen(request, timeout=TIMEOUT) as answer, progress_bar() as bar:
        goes_on = answer.status == 206  # a server without range requests sends everything again
        task = bar.add_task(wanted.file, total=wanted.bytes, completed=there if goes_on else 0)
        with open(part, "ab" if goes_on else "wb") as file:
            while file.tell() <= wanted.bytes and (chunk := answer.read(CHUNK)):
                file.write(chunk)
                bar.advance(task, len(chunk))
            file.flush()
            os.fsync(file.fileno())
    if part.stat().st_size < wanted.bytes:
        raise OSError(f"the connection ended after {part.stat().st_size:,} of {wanted.bytes:,} bytes")


def torn_member(place: Path) -> str | None:
    """The first member of a zip file that does not match its checksum; None if all do."""
    if not zipfile.is_zipfile(place):
        return None
    with open_zip(place) as archive, progress_bar() as bar:
        infos = archive.infolist()
        task = bar.add_task(f"{place.name}: checksums", total=len(infos))
        for info in infos:
            try:
                if info.compress_type not in PACKED:
                    return info.filename
                with archive.open(info) as file:
                    while file.read(CHUNK):
                        pass
            except Exception:  # bad checksum, bad compression, encryption, truncated file: each has its own type
                return info.filename
            bar.advance(task)
    return None


def check_file(file: Path, wanted: Download) -> None:
    """Raises HoldfastError unless this is exactly the published file."""
    found = sha256_of(file)
    if found != wanted.sha256:
        raise HoldfastError(
            f"{file} is not the published file: its SHA-256 is {found[:12]}..., not {wanted.sha256[:12]}...; "
            "delete it and run the command again"
        )


def import_local(source: Source, given: Path, root: Path, check: Callable[[Path], object]) -> Path:
    """Puts a local archive (a copy) or folder (a link) where it will be found, after `check` has read it."""
    given = given.expanduser()
    if not given.exists():
        raise HoldfastError(f"there is nothing at {given}; give the archive or folder of {source.title} with --from")
    check(given)
    _folder(root)
    named = any(fnmatch(given.name, pattern) for pattern in source.patterns)
    name = given.name if named else _name_for(source, given)
    target = root / name
    if target.exists():
        if target.samefile(given):
            return target
        raise HoldfastError(f"{target} exists already; remove it first to import another")
    try:
        if given.is_dir():
            target.symlink_to(given.resolve(), target_is_directory=True)
        else:
            part = root / f"{name}.part"
            shutil.copyfile(given, part)
            os.replace(part, target)
    except OSError as error:
        raise HoldfastError(f"cannot write {target}: {error.strerror}; free space or choose another place") from error
    return target


def _name_for(source: Source, given: Path) -> str:
    """The usual name of a folder or an archive of this data set."""
    ending = "" if given.is_dir() else "".join(given.suffixes[-2:]) if given.suffix == ".gz" else given.suffix
    for pattern in source.patterns:
        if "*" not in pattern and (pattern.endswith(ending) if ending else "." not in pattern):
            return pattern
    raise HoldfastError(f"{given} is not a known form of {source.title}: {', '.join(source.patterns)}")


def _folder(root: Path) -> None:
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise HoldfastError(
            f"cannot make the folder {root} ({error.strerror}); set HOLDFAST_DATA to another one"
        ) from error
