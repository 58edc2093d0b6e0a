"""Zip files from anywhere: opened and read with limits, so that a small file cannot fill the memory."""

import zipfile
from pathlib import Path

from holdfast.errors import HoldfastError

PACKED = {zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED}  # the others unpack whole blocks before their size is known
CHUNK = 1 << 20
LARGEST_NAME = 1024  # characters


def open_zip(path: Path) -> zipfile.ZipFile:
    """The zip file; raises HoldfastError if it is none, or a member has no usable name."""
    try:
        archive = zipfile.ZipFile(path)
    except Exception as error:  # a damaged directory raises nearly any type
        reason = error.strerror if isinstance(error, OSError) else "damaged, or neither a folder nor a zip file"
        raise HoldfastError(f"{path} cannot be opened ({reason}); download it again or correct data.path") from error
    for info in archive.infolist():
        if not info.filename.strip("/") or len(info.filename) > LARGEST_NAME:
            archive.close()
            raise HoldfastError(
                f"{path} has a member without a name, or with one of more than {LARGEST_NAME} characters; pack it again"
            )
    return archive


def read_member(archive: zipfile.ZipFile, name: str, most: int) -> bytes:
    """A member's content; raises ValueError, before it is in memory, if it has more than `most` bytes."""
    info = archive.getinfo(name)
    if info.compress_type not in PACKED:
        raise ValueError("it is packed in another way than zip files usually are; pack it again")
    if info.file_size > most:
        raise ValueError(f"it unpacks to {info.file_size:,} bytes, and at most {most:,} are read")
    parts = []
    with archive.open(info) as file:  # never reads more than `file_size`
        while part := file.read(CHUNK):
            parts.append(part)
    return b"".join(parts)
