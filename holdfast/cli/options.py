"""The arguments and options that several commands share."""

import os
from pathlib import Path
from typing import Annotated

import typer

from holdfast.data.sources import SOURCES
from holdfast.errors import HoldfastError

ConfigFile = Annotated[
    Path | None, typer.Argument(help="a TOML file; see configs/ and `holdfast settings`", show_default=False)
]
RunFolder = Annotated[Path, typer.Argument(help="the folder of a finished run", show_default=False)]
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


def a_png(picture: Path | None) -> Path | None:
    """Checks what --picture names."""
    if picture is not None and picture.suffix.lower() != ".png":
        raise HoldfastError(f"--picture {picture} would be a PNG file; give it a name that ends in .png")
    return picture
