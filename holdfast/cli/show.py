"""The commands that print what is there: `holdfast show | predict | methods | settings`."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from holdfast.cli.console import out
from holdfast.cli.options import Json, RunFolder, a_png
from holdfast.cli.results import ARCHIVES, REFERENCE
from holdfast.config import Metrics, describe
from holdfast.data.sources import SOURCES
from holdfast.errors import HoldfastError
from holdfast.methods import METHODS
from holdfast.predict import Guess
from holdfast.predict import predict as predict_images
from holdfast.results.plots import comparison_curves
from holdfast.results.record import Result, configs_of, read_clients, read_config, read_result
from holdfast.results.runs import runs_of
from holdfast.results.stored import stored
from holdfast.results.tables import (
    by_protocol,
    comparison,
    markdown,
    names_of,
    percent,
    result_lines,
    result_table,
    rows_table,
)
from holdfast.terminal import on_one_line, write


def show(
    runs: Annotated[list[Path], typer.Argument(help=f"folders of finished runs, or {ARCHIVES}", show_default=False)],
    as_json: Json = False,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="print the comparison as Markdown")] = False,
    picture: Annotated[
        Path | None, typer.Option(help="also draw the curves of all runs into this PNG file", callback=a_png)
    ] = None,
    metrics: Annotated[
        Metrics | None,
        typer.Option(help="which F1 and recall a single run shows; as its config says if not given"),
    ] = None,
    reference: Annotated[str, typer.Option(help="the method whose advantage over the others is shown")] = REFERENCE,
) -> None:
    """Print the table of a finished run, or compare several side by side."""
    runs = [run for path in runs for run in runs_of(path)]
    if not runs:
        raise HoldfastError("there is no finished run in these archives; give others")
    for run in runs:
        stored(run).check()
    results = [read_result(run) for run in runs]
    if metrics and len(runs) > 1:
        raise HoldfastError("--metrics is for one run; see several with 'holdfast compare --measure f1-batchwise128'")
    configs = configs_of(results, runs)
    if picture:
        comparison_curves(results, picture, names=names_of(results, configs))
    if as_json:
        print(json.dumps([result.to_json() for result in results] if len(runs) > 1 else results[0].to_json()))
    elif as_markdown:
        tables = {
            data: markdown(*comparison(some, names_of(some, configs), reference))
            for data, some in by_protocol(results).items()
        }
        write("\n\n".join(f"**{on_one_line(data)}**\n\n{table}" for data, table in tables.items()) + "\n")
    elif len(runs) > 1:
        for data, some in by_protocol(results).items():
            title = f"{data}: accuracy in %, mean (± standard deviation) over seeds"
            out.print(rows_table(title, *comparison(some, names_of(some, configs), reference)))
    else:
        print_result(runs[0], results[0], metrics or metrics_of(runs[0]))


def predict(
    run: RunFolder,
    images: Annotated[list[Path], typer.Argument(help="image files", show_default=False)],
    as_json: Json = False,
) -> None:
    """Classify images with the final model of a run."""
    guesses = predict_images(run, images)
    if as_json:
        print(json.dumps([{"image": g.image, "classes": g.classes, "probabilities": g.probabilities} for g in guesses]))
        return
    rows = [[g.image, *_likely(g)[:1], ", ".join(_likely(g)[1:])] for g in guesses]
    out.print(rows_table("", ["image", "class", "or"], rows))


def methods(as_json: Json = False) -> None:
    """List the methods, one line each."""
    if as_json:
        print(json.dumps({name: cls.about for name, cls in METHODS.items()}))
    else:
        out.print(rows_table("", ["method", "what it is"], [[name, cls.about] for name, cls in METHODS.items()]))


def settings(as_json: Json = False) -> None:
    """List every setting with its default."""
    if as_json:
        print(json.dumps([dict(zip(("setting", "default", "about"), row, strict=True)) for row in describe()]))
        return
    out.print(rows_table("", ["setting", "default", "what it is"], describe()))
    out.print("(preset): the method's default. A table \\[for.<method>] in a config is for that method only.")
    out.print(rows_table("", ["data set", "what it is"], [[name, source.about] for name, source in SOURCES.items()]))


def metrics_of(folder: Path) -> Metrics:
    """Which F1 and recall the run's config asks for."""
    with suppress(HoldfastError):
        return "batchwise128" if (read_config(folder) or {}).get("metrics") == "batchwise128" else "whole"
    return "whole"


def print_result(folder: Path, result: Result, metrics: Metrics) -> None:
    """Prints the table of a run, and the lines below it."""
    clients = read_clients(folder, result)
    out.print(result_table(result))
    for line in result_lines(result, clients.names if clients else (), metrics):
        out.print(line, highlight=False, markup=False)


def _likely(guess: Guess) -> list[str]:
    """The classes, each with its probability if the model gives one."""
    if guess.probabilities is None:
        return guess.classes
    return [f"{name} ({percent(p)} %)" for name, p in zip(guess.classes, guess.probabilities, strict=True)]
