"""The command that shows running experiments in the browser: `holdfast watch`."""

from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from holdfast.errors import HoldfastError
from holdfast.live.server import serve
from holdfast.live.watched import Watched


def watch(
    runs: Annotated[Path, typer.Argument(help="the folder that holds the runs' folders")] = Path("runs"),
    port: Annotated[int, typer.Option(min=0, max=65535, help="on 127.0.0.1; 0 takes a free one")] = 8707,
) -> None:
    """Show all runs below a folder on a local page, on which running ones move. Ctrl-C ends it; runs go on."""
    if not runs.is_dir():
        raise HoldfastError(f"there is no folder {runs}; name the folder that holds your runs")
    with suppress(KeyboardInterrupt):
        serve(Watched(runs).state, port, lambda address: print(f"{address} shows {runs}; Ctrl-C ends it", flush=True))
