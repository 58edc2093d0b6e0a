"""Archives of finished runs: a gzip-compressed file (`NAME.jsonl.gz`) with one line of JSON per run.

A run in an archive has an address, which commands accept in place of a run's folder:
`benchmarks/tiny-mini.jsonl.gz:tiny-mini/lga-2021`. The last part of the name is enough if only one run has it.
A line holds `schema`, `name`, `config`, `plan` (the SHA-256 of plan.json), `clients` (see `stored.Clients`), `machine`,
`commit` (of the code, if known), `result` and `record`; a run that diverged has `diverged` instead of a
result. `sha256` is the hash of all the rest; older archives have none."""

import gzip
import hashlib
import io
import json
import zlib
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from holdfast.errors import HoldfastError, nearest
from holdfast.files import parse_json, write_atomic

SCHEMA = 1
SUFFIX = ".jsonl.gz"
MAX_LINE = 32 * 2**20  # bytes of one run, decompressed
LONGEST_NAME = 255  # bytes of a run's name
MAX_FILE = 256 * 2**20  # bytes of a whole archive, decompressed

Line = dict[str, Any]


class _Entry(NamedTuple):
    raw: bytes  # the line of a run
    finished: bool  # False: its training diverged


def is_archive(path: Path) -> bool:
    return path.name.endswith(SUFFIX)


def address(file: Path, name: str) -> Path:
    """The address of a run in an archive, in the form that all readers of runs accept."""
    return Path(f"{file}:{name}")


def split_address(run: Path) -> tuple[Path, str] | None:
    """The archive and the run's name in it; None for a folder."""
    head, mark, name = str(run).partition(f"{SUFFIX}:")
    return (Path(head + SUFFIX), name) if mark else None


def names(file: Path) -> list[str]:
    """The runs that have a result, in the order of the archive."""
    return [name for name, entry in _indexed(file).items() if entry.finished]


def find(file: Path, name: str) -> Line:
    """The line of one run, by its name or by the end of its name if that is unique.

    Raises HoldfastError if the archive holds no such run, or several."""
    known = _indexed(file)
    chosen = [name] if name in known else [one for one in known if one.endswith(f"/{name}")]
    if len(chosen) != 1:
        hint = f"it is one of {', '.join(chosen[:5])}" if chosen else nearest(name, known)
        raise HoldfastError(f"{file} has no single run called {name!r}; {hint}")
    line: Line = json.loads(known[chosen[0]].raw)
    return line


def read(file: Path) -> Iterator[Line]:
    """All lines of an archive, those of diverged runs included."""
    return (json.loads(entry.raw) for entry in _indexed(file).values())


def add(file: Path, lines: Iterable[Line]) -> None:
    """Puts runs into an archive, which is created if it does not exist; a run of the same name is replaced. The same
    runs give the same bytes."""
    known = {name: entry.raw for name, entry in _indexed(file).items()} if file.exists() else {}
    for line in lines:
        raw = _packed({**line, "sha256": _digest(line)}) + b"\n"
        known[_checked(raw, f"the run {line.get('name')!r}")["name"]] = raw
    if sum(map(len, known.values())) > MAX_FILE or max(map(len, known.values()), default=0) > MAX_LINE:
        raise HoldfastError(f"{file} would be larger than an archive may be; put these runs into another one")
    content = io.BytesIO()
    with gzip.GzipFile(filename="", mode="wb", compresslevel=9, fileobj=content, mtime=0) as packed:
        packed.writelines(known[name] for name in sorted(known))
    write_atomic(file, content.getvalue())


def _indexed(file: Path) -> dict[str, _Entry]:
    """The lines by name; they are cached until the file changes."""
    try:
        facts = file.stat()
    except OSError as error:
        raise HoldfastError(f"cannot read the archive {file}: {error.strerror}; give the path of one") from error
    return _read_lines(file.absolute(), facts.st_mtime_ns, facts.st_size)


@lru_cache(maxsize=8)
def _read_lines(file: Path, _changed: int, _size: int) -> dict[str, _Entry]:
    found: dict[str, _Entry] = {}
    for place, raw in enumerate(_decompressed(file), 1):
        line = _checked(raw, f"{file}, line {place},")
        name = line["name"]
        if name in found:
            raise HoldfastError(f"{file}, line {place}, has the run {name!r} for a second time; remove one of them")
        found[name] = _Entry(raw, line["result"] is not None)
    return found


def _decompressed(file: Path) -> Iterator[bytes]:
    """The lines, never reading more than the largest allowed archive."""
    total = 0
    try:
        with gzip.open(file, "rb") as stream:
            while raw := stream.readline(MAX_LINE + 1):
                total += len(raw)
                if len(raw) > MAX_LINE or total > MAX_FILE:
                    raise HoldfastError(f"{file} is larger than an archive of runs may be when decompressed")
                yield raw
    except (OSError, EOFError, zlib.error) as error:
        raise HoldfastError(f"{file} is not an archive of runs ({error}); download it again") from error


def _checked(raw: bytes, where: str) -> Line:
    """The parsed line, if it has everything that readers rely on."""
    try:
        line = parse_json(raw)
        if not isinstance(line, dict) or not isinstance(line.get("schema"), int):
            raise ValueError("it has no schema")
        if line["schema"] > SCHEMA:
            raise HoldfastError(f"{where} was written by a newer version of Holdfast; update Holdfast to read it")
        if not isinstance(line["name"], str) or not _is_name(line["name"]):
            raise ValueError(f"{line['name']!r} is not a valid run name")
        if line["result"] is None and not isinstance(line.get("diverged"), str):
            raise ValueError("it has no result")
        kinds: dict[str, type | tuple[type, ...]] = {"config": (dict, type(None)), "record": list}
        kinds |= {key: (str, type(None)) for key in ("plan", "machine", "commit")}
        kinds |= {key: (dict, type(None)) for key in ("clients", "result")}
        wrong = [key for key, kind in kinds.items() if not isinstance(line[key], kind)]
        if wrong:
            raise ValueError(f"its {wrong[0]} is invalid")
        if "sha256" in line and line["sha256"] != _digest(line):
            raise ValueError("it does not match its hash")
        return line
    except (ValueError, KeyError) as error:
        raise HoldfastError(f"{where} is not a run ({error}); download the archive again, or remove it") from error


def _digest(line: Line) -> str:
    return hashlib.sha256(_packed({key: value for key, value in line.items() if key != "sha256"})).hexdigest()


def _packed(line: Line) -> bytes:
    return json.dumps(line, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")


def _is_name(name: str) -> bool:
    """Could it be a folder below the archive's own? The pictures of a run are expected there."""
    if not name.isprintable() or len(name.encode()) > LONGEST_NAME:
        return False
    parts = PurePosixPath(name).parts
    return bool(parts) and ".." not in parts and not name.startswith("/") and name == "/".join(parts)
