"""Tar files from anywhere, read with limits: of what is unpacked, and of what is read into memory."""

import bz2
import gzip
import io
import lzma
import tarfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import BinaryIO, cast

MEMBERS = 1_000
HEADERS = 2**22  # bytes of all headers
UNPACKED = 2**29  # bytes of the whole tar file
OPENERS = {b"\x1f\x8b": gzip.open, b"BZh": bz2.open, b"\xfd7zXZ": lzma.open}


class _Limited(io.RawIOBase):
    """A file of which at most `left` bytes are read, none of them beyond UNPACKED."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.left = file, HEADERS

    def read(self, size: int = -1) -> bytes:
        if size > self.left:
            raise tarfile.ReadError("it is larger than any such archive")
        content = self.file.read(self.left + 1 if size < 0 else size)
        self.left -= len(content)
        if self.left < 0:
            raise tarfile.ReadError("it is larger than any such archive")
        return content

    def seek(self, offset: int, whence: int = 0) -> int:
        if not 0 <= offset <= UNPACKED or whence:
            raise tarfile.ReadError("it is larger than any such archive")
        return self.file.seek(offset)

    def tell(self) -> int:
        return self.file.tell()


class Tarball:
    """The files of a tar file by the last part of their names."""

    def __init__(self, archive: tarfile.TarFile, limited: _Limited, members: dict[str, tarfile.TarInfo]) -> None:
        self.archive, self.limited, self.members = archive, limited, members

    def read(self, name: str, most: int) -> bytes:
        """A file's content; raises tarfile.ReadError if it has more than `most` bytes."""
        if self.members[name].size > most:
            raise tarfile.ReadError(f"{name} has more than {most:,} bytes")
        self.limited.left = most
        file = self.archive.extractfile(self.members[name])
        assert file is not None
        return file.read()

    def read_to_the_end(self) -> None:
        """Where the checksum of a compressed file is."""
        self.limited.left = UNPACKED
        while self.limited.read(1 << 20):
            pass


@contextmanager
def open_tar(path: Path) -> Iterator[Tarball]:
    """Raises tarfile.ReadError for what is no tar file, or too large."""
    with ExitStack() as stack:
        with open(path, "rb") as file:
            start = file.read(6)
        opener = next((opener for magic, opener in OPENERS.items() if start.startswith(magic)), open)
        limited = _Limited(cast(BinaryIO, stack.enter_context(opener(path, "rb"))))  # type: ignore[operator]
        archive = stack.enter_context(tarfile.open(fileobj=cast(BinaryIO, limited), mode="r:"))
        members = {}
        for count, member in enumerate(archive):
            if count >= MEMBERS:
                raise tarfile.ReadError("it has more files than any such archive")
            if member.isfile() and not member.issparse():
                members[Path(member.name).name] = member
        yield Tarball(archive, limited, members)
