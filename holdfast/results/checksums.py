"""SHA256SUMS in a run's folder: the hashes of its finished files, in the format of `sha256sum`.

They notice damage and mix-ups. Someone who changes a file on purpose can change them as well. Older runs have none."""

import hashlib
import re
from pathlib import Path

from holdfast.errors import HoldfastError
from holdfast.files import read_limited, sha256_of, write_atomic

NAME = "SHA256SUMS"
MODEL = "model.safetensors"
FILES = ("config.toml", "plan.json", "record.jsonl", MODEL)  # beside result.json, which is written last
LINE = re.compile(rf"([0-9a-f]{{64}})  ({'|'.join(map(re.escape, (*FILES, 'result.json')))})")
LARGEST = 2**16


def write_sums(folder: Path, result: bytes) -> None:
    """Writes the hashes of the folder's files and of the result that will be written next."""
    sums = {name: sha256_of(folder / name) for name in FILES if (folder / name).exists()}
    sums["result.json"] = hashlib.sha256(result).hexdigest()
    write_atomic(folder / NAME, "".join(f"{digest}  {name}\n" for name, digest in sums.items()).encode())


def read_sums(folder: Path) -> dict[str, str]:
    """The hash of each file; empty for a run that is not finished, or of an older version."""
    if not (folder / NAME).exists() or not (folder / "result.json").exists():
        return {}
    lines = read_limited(folder / NAME, LARGEST).decode("utf-8", "replace").splitlines()
    found = [LINE.fullmatch(line) for line in lines]
    if not found or not all(found):
        raise HoldfastError(f"{folder / NAME} is damaged; delete it if you trust the files of this run anyway")
    return {match[2]: match[1] for match in found if match}


def check_content(folder: Path, name: str, content: bytes) -> None:
    """Raises HoldfastError if this is not the file that the run wrote."""
    if read_sums(folder).get(name, digest := hashlib.sha256(content).hexdigest()) != digest:
        raise _changed(folder, name)


def check_files(folder: Path) -> None:
    """The same for all files that are still there."""
    for name, digest in read_sums(folder).items():
        if (folder / name).exists() and sha256_of(folder / name) != digest:
            raise _changed(folder, name)


def _changed(folder: Path, name: str) -> HoldfastError:
    return HoldfastError(
        f"{folder / name} is damaged (it does not match its hash in {NAME}); restore it, or delete the folder and run "
        "it again"
    )
