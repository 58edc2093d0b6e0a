"""Where a finished run is stored: in its own folder, or as a line of an archive. Both provide the same parts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from holdfast.errors import HoldfastError
from holdfast.files import parse_json, parse_toml, read_limited
from holdfast.results import archive
from holdfast.results.checksums import check_content, check_files

LARGEST = 2**28  # bytes of a file of a run

Tree = dict[str, Any]  # settings as in a config file: section -> key -> value


@dataclass(frozen=True)
class Clients:
    """What readers need of a plan: per client its name, its group in the last task, and the classes it has held."""

    names: Sequence[str]  # empty if clients have no names
    groups: Sequence[str]
    held: Sequence[Sequence[str]]

    def __post_init__(self) -> None:
        if len(self.groups) != len(self.held) or len(self.names) not in (0, len(self.held)):
            raise ValueError("its lists have different numbers of clients")
        if not all(isinstance(word, str) for words in (self.names, self.groups, *self.held) for word in words):
            raise ValueError("its names are not text")

    def name(self, client: int) -> str:
        return self.names[client] if client < len(self.names) else f"client {client}"


class StoredRun(Protocol):
    """The parts of a run as plain values, not yet validated; `damaged` makes an error about one of them."""

    def result(self) -> Any: ...

    def record(self) -> list[Any] | None: ...

    def config(self) -> Tree | None: ...

    def clients(self) -> Clients | None: ...

    def picture(self, name: str) -> Path | None: ...

    def check(self) -> None:
        """Raises HoldfastError if anything of the run does not match its hash."""

    def damaged(self, part: str, reason: object) -> HoldfastError: ...


def stored(run: Path) -> StoredRun:
    """The run in this folder, or at this address of an archive."""
    place = archive.split_address(run)
    return ArchivedRun(*place) if place else FolderRun(run)


@dataclass(frozen=True)
class FolderRun:
    """A run as the experiment wrote it: result.json, record.jsonl, config.toml, plan.json and pictures."""

    folder: Path

    def result(self) -> Any:
        try:
            return parse_json(self._read("result.json"))
        except ValueError as error:
            raise self.damaged("result.json", error) from error

    def record(self) -> list[Any] | None:
        """None if the record is missing."""
        if not (self.folder / "record.jsonl").exists():
            return None
        try:
            return [parse_json(line) for line in self._read("record.jsonl").splitlines()]
        except ValueError as error:
            raise self.damaged("record.jsonl", error) from error

    def config(self) -> Tree | None:
        if not (self.folder / "config.toml").exists():
            return None
        try:
            return parse_toml(self._read("config.toml").decode("utf-8-sig"))
        except ValueError as error:
            raise self.damaged("config.toml", error) from error

    def clients(self) -> Clients | None:
        if not (self.folder / "plan.json").exists():
            return None
        try:
            plan = parse_json(self._read("plan.json"))
            if not all(isinstance(plan[key], list) for key in ("class_names", "clients", "arrivals", "groups")):
                raise ValueError("it is not the plan of a run")
            return _clients_of(plan)
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise self.damaged("plan.json", error) from error

    def picture(self, name: str) -> Path | None:
        file = self.folder / name
        return file if file.exists() else None

    def check(self) -> None:
        check_files(self.folder)

    def _read(self, name: str) -> bytes:
        content = read_file(self.folder, name)
        check_content(self.folder, name, content)
        return content

    def damaged(self, part: str, reason: object) -> HoldfastError:
        return HoldfastError(f"{self.folder / part} is damaged ({reason}); delete the folder and run it again")


@dataclass(frozen=True)
class ArchivedRun:
    """A run as a line of an archive."""

    file: Path
    name: str

    def _line(self) -> archive.Line:
        line = archive.find(self.file, self.name)
        if line["result"] is None:
            raise HoldfastError(
                f"{archive.address(self.file, self.name)} has no result: its training diverged ({line['diverged']})"
            )
        return line

    def result(self) -> Any:
        return self._line()["result"]

    def record(self) -> list[Any] | None:
        return self._line()["record"] or None

    def config(self) -> Tree | None:
        config: Tree | None = self._line()["config"]
        return config

    def clients(self) -> Clients | None:
        line = self._line()
        facts = line["clients"]
        if facts is None:
            return None
        try:
            held = [[line["result"]["classes"][place] for place in places] for places in facts["held"]]
            return Clients(list(facts["names"]), list(facts["groups"]), held)
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise self.damaged("clients", error) from error

    def picture(self, name: str) -> Path | None:
        """Archives hold no pictures; they may be in a folder with the run's name beside the archive."""
        file = self.file.parent / archive.find(self.file, self.name)["name"] / name
        return file if file.exists() else None

    def check(self) -> None:
        self._line()  # every line has been checked

    def damaged(self, part: str, reason: object) -> HoldfastError:
        place = archive.address(self.file, self.name)
        return HoldfastError(f"{part} of {place} is damaged ({reason}); download the archive again, or remove the run")


def read_file(folder: Path, name: str) -> bytes:
    try:
        return read_limited(folder / name, LARGEST)
    except OSError as error:
        raise HoldfastError(
            f"{folder} is not the folder of a finished run: cannot read {name} there ({error.strerror})"
        ) from error


def _clients_of(plan: Mapping[str, Any]) -> Clients:
    names, held = plan["class_names"], []
    for arrivals in plan["arrivals"]:
        classes = sorted({c for arrival in arrivals for c in arrival["classes"]})
        held.append([names[c] for c in classes])
    return Clients(plan["clients"], plan["groups"][-1], held)
