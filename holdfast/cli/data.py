"""The commands for data: `holdfast data list | info | prepare | check`."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from holdfast.cli.console import out
from holdfast.cli.options import Json, Root, a_png, use_root
from holdfast.config import load_config
from holdfast.data import cache, folder, prepare
from holdfast.data.images import DataSet
from holdfast.data.settings import DataSettings
from holdfast.data.sources import SOURCE_TABLE, SOURCES, Source, data_root, load_data, place_of, source_of
from holdfast.errors import HoldfastError
from holdfast.files import sha256_of
from holdfast.results.plots import contact_sheet
from holdfast.results.tables import rows_table
from holdfast.terminal import write

data = typer.Typer(no_args_is_help=True, help="List, describe, obtain and check data sets.")

Name = Annotated[str, typer.Argument(help="see `holdfast data list`; folder:<path> for your own images")]
PathOption = Annotated[str | None, typer.Option("--path", help="its archive or folder, if it is not in the data root")]
Size = Annotated[int | None, typer.Option(help="image side in pixels; the data set's own if not given")]
Sheet = Annotated[Path | None, typer.Option(help="also draw samples of each class into this PNG file", callback=a_png)]


@data.command(name="list")
def list_(root: Root = None, as_json: Json = False) -> None:
    """List the data sets that Holdfast knows, and which are on this machine."""
    use_root(root)
    rows = {
        name: {"about": source.about, "here": _here(name), "licence": source.licence}
        for name, source in SOURCE_TABLE.all().items()
    }
    if as_json:
        print(json.dumps({"data_root": str(data_root()), "cache": str(cache.cache_folder()), "data_sets": rows}))
        return
    cells = [[name, str(row["about"]), row["here"] or "no", str(row["licence"])] for name, row in rows.items()]
    out.print(rows_table("", ["data set", "what it is", "here", "licence"], cells))
    out.print(
        f"data root: {data_root()} (HOLDFAST_DATA or --data-root); cache: {cache.cache_folder()}", highlight=False
    )


@data.command()
def info(
    name: Name,
    path: PathOption = None,
    size: Size = None,
    picture: Sheet = None,
    root: Root = None,
    as_json: Json = False,
) -> None:
    """Print where a data set comes from, its licence, what is on disk, and how many images each class has."""
    use_root(root)
    if name == "folder" and path is None:
        print(json.dumps({"name": name, "layout": folder.__doc__}) if as_json else folder.__doc__)
        return
    settings, source = _settings(name, path, size), source_of(name)
    facts: dict[str, Any] = {"name": name, "about": source.about, "origin": source.origin, "licence": source.licence}
    facts |= {"official": source.official, "obtain": _obtain(name, source), "here": _here(name, path)}
    if facts["here"]:
        found = load_data(replace(settings, corrupt="skip"))
        facts |= {**_counts(found), "unreadable": list(found.unreadable)}
        if picture:
            contact_sheet(found, picture)
    elif picture:
        raise HoldfastError(f"{source.title} is not here, so there is nothing to draw; {_obtain(name, source)}")
    if as_json:
        print(json.dumps(facts))
        return
    for word in ("about", "origin", "licence", "official"):
        if facts[word]:
            _say(f"{word}: {facts[word]}")
    if not facts["here"]:
        _say(f"It is not here. {facts['obtain'][0].upper()}{facts['obtain'][1:]}.")
        return
    _say(f"here: {facts['here']}")
    _print_counts(facts)
    if picture:
        write(f"picture: {picture}\n")


@data.command(name="prepare")
def prepare_(
    name: Name,
    given: Annotated[Path | None, typer.Option("--from", help="import this local archive or folder")] = None,
    size: Size = None,
    root: Root = None,
    as_json: Json = False,
) -> None:
    """Download or import a data set and decode it, so that runs start without delay."""
    use_root(root)
    settings, source = _settings(name, None, size), source_of(name)
    if given is not None and not source.patterns:
        raise HoldfastError(f"{name} needs no file; leave --from out")
    if name.startswith("folder") and given is not None:
        raise HoldfastError(f"your own images stay where they are; leave --from out and name folder:{given}")
    if given is not None:
        prepare.import_local(source, given, data_root(), lambda place: load_data(replace(settings, path=str(place))))
    elif source.patterns and not _here(name):
        if source.download is None:
            raise HoldfastError(f"{source.title} may not be downloaded here; {_obtain(name, source)}")
        prepare.download(source.download, data_root())
    facts = {"name": name, "here": _here(name), **_counts(load_data(settings))}
    if as_json:
        print(json.dumps(facts))
    else:
        _say(f"{source.title} is ready: {facts['here']}")
        _print_counts(facts, brief=True)


@data.command()
def check(name: Name, path: PathOption = None, size: Size = None, root: Root = None, as_json: Json = False) -> None:
    """Decode what is not decoded yet, verify the checksums of archive and cache, and name what is wrong (exit code
    2)."""
    use_root(root)
    settings = _settings(name, path, size)
    found = load_data(replace(settings, corrupt="skip"))
    entry = found.train.images.file and found.train.images.file.parent
    whole = entry is None or cache.is_whole(entry)
    facts = {"name": name, "here": _here(name, path), "cache_is_whole": whole, **_counts(found)}
    facts["unreadable"] = list(found.unreadable)
    known, place = source_of(name).download, Path(str(facts["here"]))
    torn = prepare.torn_member(place)
    if known is not None and place.name == known.file:
        facts["published"] = sha256_of(place) == known.sha256
        if not facts["published"] and not as_json:
            _say(f"{place} is readable and complete, but it is not the published file: its SHA-256 differs")
    if as_json:
        print(json.dumps(facts))
    else:
        for sentence in found.unreadable:
            _say(sentence)
        _print_counts(facts, brief=True)
    if torn is not None:
        raise HoldfastError(f"{torn} in {place} is damaged, though it was intact when it was decoded; obtain it again")
    if not whole:
        raise HoldfastError(f"the cached data in {entry} is damaged; delete that folder and run again")
    if found.unreadable:
        raise HoldfastError(
            f"{len(found.unreadable)} images cannot be read; replace or remove them, or set data.corrupt=skip"
        )


def _say(text: str) -> None:
    """Prints a line unchanged: names may contain brackets and colons, which the console would interpret."""
    out.print(text, highlight=False, soft_wrap=True, markup=False, emoji=False)


def _settings(name: str, path: str | None, size: int | None) -> DataSettings:
    flags = {"data.name": name, "data.path": path, "data.size": size}
    return load_config(None, [(key, value) for key, value in flags.items() if value is not None]).data


def _here(name: str, path: str | None = None) -> str | None:
    """Where the data set is on this machine."""
    if not source_of(name).patterns:
        return "always"
    if name == "folder" and path is None:
        return "wherever you say"
    try:
        return str(place_of(DataSettings(name=name, path=path)))
    except HoldfastError:
        if path is not None or name.startswith("folder:"):
            raise
        return None


def _obtain(name: str, source: Source) -> str:
    if source.download:
        return f"run 'holdfast data prepare {name}' to download it ({source.download.bytes / 1e6:.0f} MB)"
    give = (
        f", then run 'holdfast data prepare {name} --from <its folder>'" if name in SOURCES and name != "folder" else ""
    )
    return f"{source.obtain}{give}" if source.patterns else "it needs no file"


def _counts(found: DataSet) -> dict[str, Any]:
    """How many images there are, per class and, in a federated folder, per client."""
    classes = {
        name: {"train": len(found.train.by_class.get(c, ())), "test": len(found.test.by_class.get(c, ()))}
        for c, name in enumerate(found.classes)
    }
    facts: dict[str, Any] = {"size": found.size, "train": len(found.train), "test": len(found.test), "classes": classes}
    if found.train.owners is not None:
        held = found.train.owners.bincount(minlength=len(found.clients)).tolist()
        facts["clients"] = dict(zip(found.clients, held, strict=True))
    return facts


def _print_counts(facts: dict[str, Any], brief: bool = False) -> None:
    counts = [(c["train"], c["test"]) for c in facts["classes"].values()]
    (least, less), (most, more) = (tuple(f(pair[i] for pair in counts) for i in (0, 1)) for f in (min, max))
    train = f"{least}" if least == most else f"{least}-{most}"
    test = f"{less}" if less == more else f"{less}-{more}"
    out.print(
        f"{len(counts)} classes, {facts['train']:,} training and {facts['test']:,} test images of {facts['size']} px; "
        f"{train} and {test} per class",
        highlight=False,
        soft_wrap=True,
    )
    if "clients" in facts:
        text = ", ".join(f"{name} {count}" for name, count in facts["clients"].items())
        _say(f"clients: {text}")
    if not brief:
        rows = [[name, str(c["train"]), str(c["test"])] for name, c in facts["classes"].items()]
        out.print(rows_table("", ["class", "training", "test"], rows))
