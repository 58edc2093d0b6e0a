"""The commands that measure Holdfast: `holdfast bench engine | clients | reconstruct | data | deploy`."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from holdfast.bench import Report
from holdfast.bench import clients as clients_bench
from holdfast.bench import data as data_bench
from holdfast.bench import deploy as deploy_bench
from holdfast.bench import engine as engine_bench
from holdfast.bench import reconstruct as reconstruct_bench
from holdfast.cli.console import out
from holdfast.cli.options import Json, a_png
from holdfast.errors import HoldfastError
from holdfast.results.plots import phases_bar
from holdfast.results.tables import rows_table
from holdfast.terminal import Terminal

bench = typer.Typer(no_args_is_help=True, help="Measure how fast Holdfast is on this machine, as ratios of one run.")


@bench.command()
def engine(
    network: Annotated[list[str] | None, typer.Option(help="resnet18 or convnet; both if not given")] = None,
    picture: Annotated[
        Path | None, typer.Option(help="also draw where the time of a round goes (PNG)", callback=a_png)
    ] = None,
    as_json: Json = False,
) -> None:
    """How much of a round is unavoidable arithmetic, and what two processes gain over one."""
    for name in network or []:
        if name not in engine_bench.BOUNDS:
            raise HoldfastError(f"unknown --network {name}; use {' or '.join(engine_bench.BOUNDS)}")
    found = _measured(lambda tell: engine_bench.measure(network or list(engine_bench.BOUNDS), tell), as_json)
    if picture:
        phases_bar({name: facts["phases"] for name, facts in found.facts["networks"].items()}, picture)


@bench.command()
def clients(as_json: Json = False) -> None:
    """Seconds per round and memory with 30 to 100,000 registered clients, ten of them selected."""
    _measured(clients_bench.measure, as_json)


@bench.command()
def reconstruct(as_json: Json = False) -> None:
    """Prototypes reconstructed together, one by one, and by the published procedure."""
    _measured(reconstruct_bench.measure, as_json)


@bench.command()
def data(as_json: Json = False) -> None:
    """Images decoded per second, by one core and by all."""
    _measured(data_bench.measure, as_json)


@bench.command()
def deploy(
    sites: Annotated[list[int] | None, typer.Option(help="how many sites; 3 if not given")] = None,
    megabytes: Annotated[list[float] | None, typer.Option(help="size of the model; 1 and 44.7 if not given")] = None,
    as_json: Json = False,
) -> None:
    """What a round over Flower and TLS costs beside the same bytes in one process, and how many bytes it sends."""
    counts, sizes = sites or deploy_bench.SITES, megabytes or deploy_bench.MEGABYTES
    _measured(lambda tell: deploy_bench.measure(tell, counts, sizes), as_json)


def _measured(measure: Callable[[Callable[[str], None]], Report], as_json: bool) -> Report:
    """Runs a benchmark with a status line, and prints what it found."""
    with Terminal(stderr=True).status("") as status:
        found = measure(lambda text: status.update(text))
    if as_json:
        print(json.dumps(found.to_json()))
        return found
    out.print(rows_table("", found.head, found.rows))
    words = {True: "at most", False: "at least"}
    rows = [
        [ratio.name, f"{ratio.value:.3g}", f"{words[ratio.at_most]} {ratio.bound:g}", "yes" if ratio.holds else "NO"]
        for ratio in found.ratios
    ]
    out.print(rows_table("", ["ratio", "measured", "wanted", "holds"], rows))
    return found
