"""Finds finished runs in folders and archives, and packs folders into archives."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from holdfast.errors import HoldfastError
from holdfast.files import sha256_of
from holdfast.results import archive
from holdfast.results.record import read_clients, read_config, read_run
from holdfast.results.stored import FolderRun


def runs_below(folder: Path) -> list[Path]:
    """The finished runs anywhere below a folder: first those in archives, then those in folders."""
    archived = [run for file in sorted(folder.rglob(f"*{archive.SUFFIX}")) for run in runs_of(file)]
    return [*archived, *sorted(result.parent for result in folder.rglob("result.json"))]


def unfinished_below(folder: Path) -> list[Path]:
    """The folders of runs that have a record and no result: they are running, or were stopped."""
    found = folder.rglob("record.jsonl") if folder.is_dir() else iter(())
    return sorted(record.parent for record in found if not (record.parent / "result.json").exists())


def runs_of(path: Path) -> list[Path]:
    """The addresses of all runs of an archive; an address is completed to the run's full name; other paths are kept."""
    if place := archive.split_address(path):
        return [archive.address(place[0], archive.find(*place)["name"])]
    if not archive.is_archive(path):
        return [path]
    return [archive.address(path, name) for name in archive.names(path)]


def runs_in(paths: Sequence[Path]) -> list[Path]:
    """These runs, each once. An archive or a folder that holds runs stands for all finished ones in it; other files are
    ignored."""
    found: dict[Path, Path] = {}
    for path in paths:
        whole = (path / "result.json").exists() or (path / "record.jsonl").exists()  # a run, perhaps not finished
        alone = whole or archive.is_archive(path) or archive.split_address(path)
        inside = runs_of(path) if alone else runs_below(path)
        if not inside and not path.is_file():
            raise HoldfastError(f"{path} holds no finished run; give the folder of a run, or of several")
        for run in inside:
            found.setdefault(run.resolve(), run)
    if not found:
        raise HoldfastError(f"{paths[0]} is not the folder of a run; give the folder of a run, or of several")
    return list(found.values())


def packed(folder: Path, name: str, commit: str | None = None) -> archive.Line:
    """The line of an archive for the run in this folder, which is validated before it is packed. A folder with a file
    called `diverged` is a run without a result; the file contains the reason."""
    run = FolderRun(folder)
    line: archive.Line = {"schema": archive.SCHEMA, "name": name, "config": read_config(folder), "commit": commit}
    if (folder / "diverged").exists():
        reason = (folder / "diverged").read_text(encoding="utf-8").strip()
        return {
            **line,
            "plan": None,
            "clients": None,
            "machine": None,
            "diverged": reason,
            "result": None,
            "record": [],
        }
    result, _ = read_run(folder)
    clients, plan = read_clients(folder, result), folder / "plan.json"
    place = {one: i for i, one in enumerate(result.classes)}
    facts = clients and {
        "names": clients.names,
        "groups": clients.groups,
        "held": [[place[one] for one in held] for held in clients.held],
    }
    return {
        **line,
        "plan": sha256_of(plan) if plan.exists() else None,
        "clients": facts,
        "machine": result.machine,
        "result": run.result(),
        "record": run.record(),
    }


def add_to_archive(file: Path, folders: Iterable[Path], commit: str | None = None) -> list[str]:
    """Adds the runs of these folders to an archive, replacing runs of the same name; the last two parts of a folder's
    path are its name there. Returns the names."""
    lines = []
    for folder in folders:
        whole = folder.resolve()
        lines.append(packed(folder, f"{whole.parent.name}/{whole.name}", commit))
    archive.add(file, lines)
    return [line["name"] for line in lines]
