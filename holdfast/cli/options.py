"""The arguments and options that several commands share."""

import os
from pathlib import Path
from typing import Annotated

import typer

from holdfast.data.sources import SOURCES
from holdfast.errors import HoldfastError

ConfigFile = Annotated[
    Path | None,
    typer.Argument(
        help="a TOML file, or a packaged config: demo, glyphs-mini, ...; see `holdfast settings`", show_default=False
    ),
]
RunFolder = Annotated[Path, typer.Argument(help="the folder of a run, or its model.safetensors", show_default=False)]
MethodName = Annotated[str | None, typer.Option("--method", help="see `holdfast methods`; module:Class for your own")]
DataName = Annotated[
    str | None, typer.Option("--dataset", help="one of " + ", ".join(SOURCES) + ":<path>, or see `holdfast data list`")
]
Tasks = Annotated[str | None, typer.Option(help="number of equal tasks, or their sizes in classes: 10,5,5")]
Seed = Annotated[int | None, typer.Option(help="the seed of all random choices")]
Sets = Annotated[
    list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="any setting; may be repeated")
]
Json = Annotated[bool, typer.Option("--json", help="print JSON for a script")]
Root = Annotated[
    Path | None, typer.Option("--data-root", help="the folder with your data sets; HOLDFAST_DATA if not given")
]


def use_root(root: Path | None) -> None:
    """From here on, this process and those it starts look for data sets in `root`."""
    if root is not None:
        os.environ["HOLDFAST_DATA"] = str(root)


def check_folder(folder: Path) -> None:
    """Fails before anything is run if the folder cannot be written to."""
    there = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    if not there.is_dir():
        raise HoldfastError(f"cannot write to the folder {folder}: {there} is a file; choose another")
    if not os.access(there, os.W_OK):
        raise HoldfastError(f"cannot write to the folder {folder}: you may not write to {there}; choose another")


def check_file(file: Path) -> None:
    """The same for a file."""
    if file.is_dir():
        raise HoldfastError(f"cannot write {file}, which is a folder; name a file")
    check_folder(file.parent)


def a_png(picture: Path | None) -> Path | None:
    """Checks what --picture names."""
    if picture is not None and picture.suffix.lower() != ".png":
        raise HoldfastError(f"--picture {picture} would be a PNG file; give it a name that ends in .png")
    return picture
