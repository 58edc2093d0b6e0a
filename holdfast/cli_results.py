"""The doors to results of several runs: `holdfast compare`, `reproduce`, `report` and `export`."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.markdown import Markdown

from holdfast.cli_data import Json, Root, out, use_root
from holdfast.compare import grid, known_runs, parse_seeds, parse_specs, run_all
from holdfast.config import Config, load_config, parse_setting
from holdfast.errors import HoldfastError, nearest
from holdfast.experiment import run_name
from holdfast.files import write_atomic
from holdfast.reproduce import ITEMS, Scale, config_of, passes
from holdfast.results import comparison
from holdfast.results.export import write_csv, write_events
from holdfast.results.paper_tables import Found, page_of
from holdfast.results.plots import comparison_curves
from holdfast.results.record import read_result
from holdfast.results.report import write_report
from holdfast.results.tables import rows_table

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

    configs = grid(build, parse_specs(methods), parse_seeds(seeds))
    labels = dict.fromkeys(config.method.label for config in configs)
    if reference is not None and reference not in labels:
        raise HoldfastError(f"--reference {reference!r} is none of the methods compared: {', '.join(labels)}")
    results = [run.result for run in run_all(configs, runs)]
    table = comparison.compared(results, reference, measure)
    if picture:
        comparison_curves(results, picture)
    if save:
        save.mkdir(parents=True, exist_ok=True)
        for kind, suffix in (("markdown", "md"), ("latex", "tex"), ("csv", "csv"), ("json", "json")):
            write_atomic(save / f"comparison.{suffix}", WRITERS[kind](table).encode())
    if form == "text" and not as_json:
        out.print(comparison.as_text(table), width=max(out.width, 40 + 8 * len(table.seen)), crop=False)
    else:
        sys.stdout.write(WRITERS["json" if as_json else form](table))


def reproduce(
    item: Annotated[str, typer.Argument(help="list, table1 ... table12, fig3 ... fig8, or all")],
    scale: Annotated[
        Scale, typer.Option(help="mini: runs on two cores, with stand-in data; paper: as published")
    ] = "mini",
    methods: Annotated[
        str | None, typer.Option(help="with commas, as the tables name them; all; those of an hour if not given")
    ] = None,
    seeds: Annotated[str, typer.Option(help="with commas")] = "2021,2022,2023",
    runs: Annotated[Path, typer.Option(help="the folder in which runs are looked for and written")] = Path("runs"),
    to: Annotated[Path, typer.Option(help="the folder for pages, pictures and CSV files")] = Path("reproduced"),
    show: Annotated[
        bool, typer.Option("--show", help="make the pages from the runs that are there; run nothing")
    ] = False,
    root: Root = None,
    as_json: Json = False,
) -> None:
    """Make a table or figure of the paper: our figures beside the published ones."""
    use_root(root)
    if item == "list":
        _list_items(scale, as_json)
        return
    names = list(ITEMS) if item == "all" else [item]
    for name in names:
        if name not in ITEMS:
            raise HoldfastError(f"there is no {name!r} to reproduce; {nearest(name, [*ITEMS, 'all', 'list'])}")
    known = known_runs(runs)
    pages = []
    for name in names:
        chosen = ITEMS[name]
        named = [one.strip() for one in methods.split(",")] if methods and methods != "all" else None
        known_methods = list(dict.fromkeys(experiment.method for experiment in chosen.experiments))
        for one in named or ():
            if one not in known_methods and len(names) == 1:
                raise HoldfastError(f"{name} has no method {one!r}; it has {', '.join(known_methods) or 'none'}")
        everything = [experiment.method for experiment in chosen.experiments] if methods == "all" else None
        wanted = chosen.wanted(scale, named or everything)
        numbers = parse_seeds(seeds)
        if not show:
            run_all([config_of(one, scale, seed) for one in wanted for seed in numbers], runs)
            known = known_runs(runs)
        found = {
            one: Found(tuple(there), tuple(read_result(folder) for folder in there))
            for one in chosen.experiments
            if (there := [known[n] for n in (run_name(config_of(one, scale, s)) for s in numbers) if n in known])
        }
        command = f"holdfast reproduce {name} --scale {scale}"
        page, draw, numbers_csv = page_of(chosen, scale, found, command)
        to.mkdir(parents=True, exist_ok=True)
        write_atomic(to / f"{name}.md", page.encode())
        if numbers_csv:
            write_atomic(to / f"{name}.csv", numbers_csv.encode())
        if draw and found:
            draw(to / f"{name}.png")
        pages.append(str(to / f"{name}.md"))
        if not as_json:
            out.print(Markdown(page))
    if as_json:
        print(json.dumps({"pages": pages}))


def report(
    runs: Annotated[list[Path], typer.Argument(help="folders of finished runs, or folders that hold them")],
    to: Annotated[Path, typer.Option("--out", help="the HTML file")] = Path("report.html"),
) -> None:
    """Write one page that shows everything about a run, or several side by side; it opens without a network."""
    write_report(runs, to)
    print(to)


def export(
    runs: Annotated[list[Path], typer.Argument(help="folders of finished runs")],
    to: Annotated[Path, typer.Option("--out", help="the folder to write to; a file or folder for each run")],
    form: Annotated[Literal["csv", "tensorboard"], typer.Option("--format", help="csv or tensorboard")] = "csv",
) -> None:
    """Write the record of runs, round by round, for a spreadsheet or for TensorBoard."""
    to.mkdir(parents=True, exist_ok=True)
    for run in runs:
        name = run.resolve().name
        if form == "csv":
            write_csv(run, to / f"{name}.csv")
            print(to / f"{name}.csv")
        else:
            print(write_events(run, to / name))


def _list_items(scale: Scale, as_json: bool) -> None:
    """What each item asks and costs."""
    facts = []
    for item in ITEMS.values():
        wanted = item.wanted(scale)
        images = sum(passes(config_of(one, scale, 0)) for one in wanted)
        facts.append({"item": item.name, "about": item.title, "runs_a_seed": len(wanted), "images_a_seed": images})
    if as_json:
        print(json.dumps(facts))
        return
    rows = [
        [
            str(f["item"]),
            str(f["about"]),
            str(f["runs_a_seed"]),
            f"{int(str(f['images_a_seed'])) / 1e6:.1f}",
            _hours(int(str(f["images_a_seed"])), scale),
        ]
        for f in facts
    ]
    out.print(
        rows_table("", ["item", "what it asks", "runs a seed", "million images trained on", "hours a seed"], rows)
    )
    out.print(COSTS[scale], highlight=False, soft_wrap=True)
    out.print("Tables and figures share runs: what one has made the next does not make again.", highlight=False)


SPEED = {"mini": 1.1e3, "paper": 2.5e3}  # images trained on a second, with teachers: measured here; assumed of a GPU
COSTS = {
    "mini": "hours: on two cores like those of docs/performance.md.",
    "paper": "hours: on one GPU of 20 TFLOP/s, as assumed in docs/performance.md, for 32 px; larger images cost more.",
}


def _hours(images: int, scale: Scale) -> str:
    return f"{images / SPEED[scale] / 3600:.2g}"
