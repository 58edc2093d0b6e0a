"""The commands for the results of several runs: `holdfast compare | reproduce | report | export`."""

import json
import shlex
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.markdown import Markdown

from holdfast.cli.console import finished_parts, out
from holdfast.cli.options import ConfigFile, Json, Root, Tasks, a_png, check_file, check_folder, use_root
from holdfast.compare import Spec, grid, known_runs, names_of_specs, one_protocol, parse_seeds, parse_specs, run_all
from holdfast.config import Config, Metrics, load_config, parse_setting, tasks_setting
from holdfast.data.sources import place_of, source_of
from holdfast.errors import HoldfastError, nearest
from holdfast.experiment import run_name
from holdfast.files import write_atomic
from holdfast.model_export import write_card, write_onnx
from holdfast.paper import published as paper
from holdfast.paper.items import ITEMS, Experiment, Scale
from holdfast.paper.tables import Found
from holdfast.reproduce import config_of, page_of, passes
from holdfast.results import comparison
from holdfast.results.archive import split_address
from holdfast.results.export import write_csv, write_events
from holdfast.results.plots import comparison_curves
from holdfast.results.record import read_result
from holdfast.results.report import write_report
from holdfast.results.runs import runs_in
from holdfast.results.tables import rows_table
from holdfast.terminal import Terminal, write

ARCHIVES = "archives of runs (FILE.jsonl.gz for all in it, FILE.jsonl.gz:RUN for one)"
REFERENCE = "lga"  # the method whose advantage over the others `show` and `report` print
Format = Literal["text", "markdown", "latex", "csv", "json"]
WRITERS: dict[str, Callable[[comparison.Comparison], str]] = {
    "markdown": comparison.as_markdown,
    "latex": comparison.as_latex,
    "csv": comparison.as_csv,
    "json": lambda table: json.dumps(comparison.as_json(table)) + "\n",
}


def compare(
    config: ConfigFile = None,
    methods: Annotated[
        str,
        typer.Option(help="separated by commas; settings in brackets: fedavg\\[replay=true],lga\\[cbl=false]"),
    ] = "lga,fedavg",
    seeds: Annotated[str, typer.Option(help="separated by commas")] = "2021,2022,2023",
    dataset: Annotated[str | None, typer.Option(help="see `holdfast data list`")] = None,
    tasks: Tasks = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="any setting, for all methods")
    ] = None,
    reference: Annotated[
        str | None,
        typer.Option(help="the method whose improvement over the others is shown; the first of --methods if not given"),
    ] = None,
    measure: Annotated[str, typer.Option(help="one of " + ", ".join(comparison.MEASURES))] = "accuracy",
    form: Annotated[Format, typer.Option("--format", help="how the table is printed")] = "text",
    runs: Annotated[
        Path, typer.Option("--out", "--runs", help="the folder that holds the runs' folders and archives, old and new")
    ] = Path("runs"),
    save: Annotated[
        Path | None, typer.Option(help="also write the table as .md, .tex, .csv and .json into this folder")
    ] = None,
    picture: Annotated[
        Path | None, typer.Option(help="also draw the curves into this PNG file", callback=a_png)
    ] = None,
    root: Root = None,
    as_json: Json = False,
) -> None:
    """Run methods with the same seeds under one protocol and compare them. Runs that are complete are not repeated."""
    use_root(root)
    if measure not in comparison.MEASURES:
        raise HoldfastError(f"unknown --measure {measure}; use {', '.join(comparison.MEASURES)}")
    flags = [parse_setting(text) for text in set_ or []]
    for key, option in (("seed", "--seeds"), ("method.name", "--methods")):
        if key in dict(flags):
            raise HoldfastError(f"--set {key} would apply to all methods and seeds, which {option} lists; use {option}")
    flags += [("data.name", dataset)] if dataset else []
    flags += [tasks_setting(tasks)] if tasks else []

    def build(settings: list[tuple[str, Any]]) -> Config:
        return load_config(config, [*flags, *settings])

    specs, numbers = parse_specs(methods), parse_seeds(seeds)
    configs = grid(build, specs, numbers)
    one_protocol(specs, configs[:: len(numbers)])
    names = names_of_specs(specs, configs[:: len(numbers)])
    chosen = names[0] if reference is None else _reference(reference, specs, names)
    if save:
        check_folder(save)
    if picture:
        check_file(picture)
    if measure != "accuracy":
        wanted = {run_name(config) for config in configs}
        for folder in (place for name, place in known_runs(runs).items() if name in wanted):
            if comparison.MEASURES[measure] not in (read_result(folder).curves or {}):
                raise HoldfastError(f"{folder} is of an older version and has no {measure}; delete it to run it again")
    done = run_all(configs, runs)
    results = [replace(run.result, method=names[i // len(numbers)]) for i, run in enumerate(done)]
    table = comparison.compared(results, chosen, measure)
    if form == "text" and not as_json:
        width = 32 + max(len(name) for name in names) + 8 * len(table.seen)
        out.print(comparison.as_text(table), width=max(out.width, width), crop=False)
    else:
        write(WRITERS["json" if as_json else form](table))
    if picture:
        picture.parent.mkdir(parents=True, exist_ok=True)
        comparison_curves(results, picture, measure)
    if save:
        save.mkdir(parents=True, exist_ok=True)
        for kind, suffix in (("markdown", "md"), ("latex", "tex"), ("csv", "csv"), ("json", "json")):
            write_atomic(save / f"comparison.{suffix}", WRITERS[kind](table).encode())


def _reference(word: str, specs: Sequence[Spec], names: Sequence[str]) -> str:
    """The name of the row that the user means; it may also be written as in --methods."""
    known = {spec.text: name for spec, name in zip(specs, names, strict=True)} | {name: name for name in names}
    for text, name in known.items():
        if text.replace(" ", "") == word.replace(" ", ""):
            return name
    raise HoldfastError(f"--reference {word!r} is not one of the compared methods: {', '.join(dict.fromkeys(names))}")


def reproduce(
    item: Annotated[str, typer.Argument(help="list, table1 ... table12, fig3 ... fig8, or all")],
    scale: Annotated[
        Scale, typer.Option(help="mini: runs on two cores, with stand-in data; paper: as published")
    ] = "mini",
    methods: Annotated[
        str | None,
        typer.Option(
            help="as the tables name them, separated by commas, or all; a short list for most items if not given"
        ),
    ] = None,
    seeds: Annotated[str, typer.Option(help="separated by commas")] = "2021,2022,2023",
    runs: Annotated[Path, typer.Option(help="the folder that holds the runs' folders, old and new")] = Path("runs"),
    to: Annotated[Path, typer.Option("--out", "--to", help="the folder for pages, pictures and CSV files")] = Path(
        "reproduced"
    ),
    show: Annotated[bool, typer.Option("--show", help="make the pages from existing runs; run nothing")] = False,
    root: Root = None,
    as_json: Json = False,
) -> None:
    """Make a table or figure of the paper, with our numbers beside the published ones."""
    use_root(root)
    if item == "list":
        _list_items(scale, as_json)
        return
    names = list(ITEMS) if item == "all" else [item]
    for name in names:
        if name not in ITEMS:
            raise HoldfastError(f"there is no {name!r} to reproduce; {nearest(name, [*ITEMS, 'all', 'list'])}")
    if methods and methods != "all" and len(names) > 1:
        everybody = {one.method for name in names for one in ITEMS[name].experiments}
        for one in (word.strip() for word in methods.split(",")):
            if one not in everybody:
                raise HoldfastError(f"no table has the method {one!r}; {nearest(one, everybody)}")
    numbers = parse_seeds(seeds)
    if show and not runs.is_dir() and any(ITEMS[name].experiments for name in names):
        raise HoldfastError(f"there is no folder {runs} with runs to show; name another with --runs, or omit --show")
    check_folder(to)
    same = f" --seeds {','.join(map(str, numbers))}" if numbers != list(paper.SEEDS) else ""
    same += f" --runs {shlex.quote(str(runs))}" if runs != Path("runs") else ""
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
        needs = "prototypes.png" if name == "fig5" else None
        if not show:
            wanted = _available(wanted, scale)
            run_all([config_of(one, scale, seed) for one in wanted for seed in numbers], runs, needs)
        known = known_runs(runs, needs)
        found = {
            one: Found(tuple(there), tuple(read_result(folder) for folder in there))
            for one in chosen.wanted(scale, known_methods)
            if (there := [known[n] for n in (run_name(config_of(one, scale, s)) for s in numbers) if n in known])
        }
        command = f"holdfast reproduce {name} --scale {scale}{same}"
        options = (f" --methods {shlex.quote(methods)}" if methods else "") + (" --show" if show else "")
        page, draw, numbers_csv = page_of(
            chosen, scale, found, numbers, f"{command}{options}", f"{command} --methods all"
        )
        to.mkdir(parents=True, exist_ok=True)
        stem = chosen.stem(scale)
        write_atomic(to / f"{stem}.md", page.encode())
        if numbers_csv:
            write_atomic(to / f"{stem}.csv", numbers_csv.encode())
        if draw and found:
            draw(to / f"{stem}.png")
        pages.append(str(to / f"{stem}.md"))
        if not as_json:
            out.print(Markdown(page))
    if as_json:
        print(json.dumps({"pages": pages}))


def _available(wanted: list[Experiment], scale: Scale) -> list[Experiment]:
    """The experiments whose data set is on this machine. The others are named; if none is left, that is an error."""
    missing: dict[str, HoldfastError] = {}
    for one in wanted:
        settings = config_of(one, scale, 0).data
        if source_of(settings.name).patterns and one.dataset not in missing:
            try:
                place_of(settings)
            except HoldfastError as error:
                missing[one.dataset] = error
    here = [one for one in wanted if one.dataset not in missing]
    if wanted and not here:
        raise next(iter(missing.values()))
    for what in missing.values():
        Terminal(stderr=True).print(f"left out: {what}", style="yellow", highlight=False, soft_wrap=True, markup=False)
    return here


def report(
    runs: Annotated[
        list[Path], typer.Argument(help=f"folders of finished runs, folders that hold them, or {ARCHIVES}")
    ],
    to: Annotated[Path, typer.Option("--out", help="the HTML file")] = Path("report.html"),
    metrics: Annotated[
        Metrics | None, typer.Option(help="F1 and recall that are shown; as each run's config says, if not given")
    ] = None,
    reference: Annotated[str, typer.Option(help="the method whose advantage over the others is shown")] = REFERENCE,
    as_json: Json = False,
) -> None:
    """Write one HTML page about a run, or several side by side. It opens without a network."""
    check_file(to)
    runs = runs_in(runs)
    with finished_parts(runs) as parts:
        found = write_report(parts, to, metrics, reference)
    named = [str(run) for run, part in zip(runs, parts, strict=True) if part in found]
    write(f"{json.dumps({'page': str(to), 'runs': named}) if as_json else to}\n")


def export(
    runs: Annotated[list[Path], typer.Argument(help=f"folders of runs, folders that hold them, or {ARCHIVES}")],
    to: Annotated[
        Path | None, typer.Option("--out", help="the folder to write to; for one run's model: the run's")
    ] = None,
    form: Annotated[
        Literal["csv", "tensorboard", "onnx", "card"],
        typer.Option("--format", help="the record as csv or tensorboard; the model as onnx, with its card; the card"),
    ] = "csv",
    as_json: Json = False,
) -> None:
    """Write the record of runs for a spreadsheet or for TensorBoard, or their models for other programs."""
    found = [run.resolve() for run in runs_in(runs)]
    names = _file_names(found)
    of_model = form in ("onnx", "card")
    if to is None:
        if not of_model or len(found) > 1 or split_address(found[0]):
            raise HoldfastError("name the folder to write to with --out")
        to, names = found[0], ["model"]
    for name in names:
        check_folder(to / name if form == "tensorboard" else to)
    to.mkdir(parents=True, exist_ok=True)
    files: list[Path] = []
    with finished_parts(found, with_model=form == "onnx") as parts:
        for run, name in zip(parts, names, strict=True):
            if form == "csv":
                write_csv(run, to / f"{name}.csv")
                files.append(to / f"{name}.csv")
            elif form == "tensorboard":
                files.append(write_events(run, to / name))
            if form == "onnx":
                files.append(write_onnx(run, to / f"{name}.onnx"))
            if of_model:
                files.append(write_card(run, to / f"{name}.md", name))
    write((json.dumps({"files": [str(file) for file in files]}) if as_json else "\n".join(map(str, files))) + "\n")


def _file_names(runs: Sequence[Path]) -> list[str]:
    """A file name per run: the end of its path, as long as it takes to tell all runs apart."""
    for depth in range(1, max(len(run.parts) for run in runs)):
        names = ["-".join(run.parts[1:][-depth:]) for run in runs]
        if len(set(names)) == len(names):
            return names
    raise HoldfastError("two of these runs would be written to the same file; export them one by one")


def _list_items(scale: Scale, as_json: bool) -> None:
    """Prints what each item shows, and what it costs to run."""
    facts = []
    for item in ITEMS.values():
        wanted = item.wanted(scale)
        images, hours = sum(passes(config_of(one, scale, 0)) for one in wanted), _hours(wanted, scale)
        facts.append((item.name, item.title, len(wanted), images, round(hours, 2)))
    keys = ("item", "about", "runs_a_seed", "images_a_seed", "hours_a_seed")
    if as_json:
        print(json.dumps([dict(zip(keys, line, strict=True)) for line in facts]))
        return
    rows = [
        [name, about, str(runs), f"{images / 1e6:.1f}", f"{hours:.1f}"] for name, about, runs, images, hours in facts
    ]
    out.print(
        rows_table("", ["item", "what it shows", "runs per seed", "million images trained on", "hours per seed"], rows)
    )
    out.print(COSTS[scale], highlight=False, soft_wrap=True)
    out.print("Tables and figures share runs: a run that one has made is not repeated for the next.", highlight=False)


SPEED = 1.1e3  # images trained on per second at mini scale, with teachers, on two cores; measured
# The same for ResNet-18 at 20 TFLOP/s, from the operations per image of each size (docs/performance.md).
GPU_SPEED = {"cifar100": 4.5e3, "mini-imagenet": 8.4e3, "tiny-imagenet": 1.1e3, "imagenet": 1.4e3}
COSTS = {
    "mini": "hours: on two cores like those of docs/performance.md.",
    "paper": "hours: on one GPU of 20 TFLOP/s, as assumed in docs/performance.md; estimated, not measured.",
}


def _hours(wanted: list[Experiment], scale: Scale) -> float:
    speeds = [SPEED if scale == "mini" else GPU_SPEED[one.dataset] for one in wanted]
    return sum(passes(config_of(one, scale, 0)) / speed for one, speed in zip(wanted, speeds, strict=True)) / 3600
