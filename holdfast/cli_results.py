"""The doors to results of several runs: `holdfast compare`."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from holdfast.cli_data import Json, Root, out, use_root
from holdfast.compare import grid, parse_seeds, parse_specs, run_all
from holdfast.config import Config, load_config, parse_setting
from holdfast.errors import HoldfastError
from holdfast.files import write_atomic
from holdfast.results import comparison
from holdfast.results.plots import comparison_curves

Format = Literal["text", "markdown", "latex", "csv", "json"]
WRITERS: dict[str, Callable[[comparison.Comparison], str]] = {
    "markdown": comparison.as_markdown,
    "latex": comparison.as_latex,
    "csv": comparison.as_csv,
    "json": lambda table: json.dumps(comparison.as_json(table)) + "\n",
}


def compare(
    config: Annotated[Path | None, typer.Argument(help="a TOML file; see configs/", show_default=False)] = None,
    methods: Annotated[
        str, typer.Option(help="with commas; with settings of their own: fedavg[replay=true],lga[cbl=false]")
    ] = "fedavg,lga",
    seeds: Annotated[str, typer.Option(help="with commas")] = "2021,2022,2023",
    dataset: Annotated[str | None, typer.Option(help="see `holdfast data list`")] = None,
    tasks: Annotated[str | None, typer.Option(help="number of equal tasks, or their sizes in classes: 10,5,5")] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="ROOM.KEY=VALUE", help="any setting, for all methods")
    ] = None,
    reference: Annotated[
        str | None, typer.Option(help="the method whose improvement over the others is shown; the last if not given")
    ] = None,
    measure: Annotated[str, typer.Option(help="one of " + ", ".join(comparison.MEASURES))] = "accuracy",
    form: Annotated[Format, typer.Option("--format", help="how the table is printed")] = "text",
    runs: Annotated[Path, typer.Option(help="the folder that holds the runs' folders")] = Path("runs"),
    save: Annotated[
        Path | None, typer.Option(help="also write the table as .md, .tex, .csv and .json into this folder")
    ] = None,
    picture: Annotated[Path | None, typer.Option(help="also draw the curves into this PNG file")] = None,
    root: Root = None,
    as_json: Json = False,
) -> None:
    """Run methods with the same seeds under one protocol and set them side by side; what is done is not done again."""
    use_root(root)
    if measure not in comparison.MEASURES:
        raise HoldfastError(f"unknown --measure {measure}; use {', '.join(comparison.MEASURES)}")
    flags = [parse_setting(text) for text in set_ or []]
    flags += [("data.name", dataset)] if dataset else []
    flags += [parse_setting(f"plan.tasks=[{tasks}]" if "," in tasks else f"plan.tasks={tasks}")] if tasks else []

    def build(settings: list[tuple[str, Any]]) -> Config:
        return load_config(config, [*flags, *settings])

    done = run_all(grid(build, parse_specs(methods), parse_seeds(seeds)), runs)
    results = [run.result for run in done]
    table = comparison.compared(results, reference, measure)
    if reference is not None and table.reference != reference:
        known = ", ".join(row.method for row in table.rows)
        raise HoldfastError(f"--reference {reference!r} is none of the methods compared: {known}")
    if picture:
        comparison_curves(results, picture)
    if save:
        save.mkdir(parents=True, exist_ok=True)
        for kind, suffix in (("markdown", "md"), ("latex", "tex"), ("csv", "csv"), ("json", "json")):
            write_atomic(save / f"comparison.{suffix}", WRITERS[kind](table).encode())
    if form == "text" and not as_json:
        out.print(comparison.as_text(table))
    else:
        sys.stdout.write(WRITERS["json" if as_json else form](table))
