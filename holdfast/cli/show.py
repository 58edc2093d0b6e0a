"""The commands that print what is there: `holdfast show | predict | methods | settings`."""

import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from holdfast.cli.console import finished_parts, out
from holdfast.cli.options import Json, RunFolder, a_png, check_file
from holdfast.cli.results import ARCHIVES, REFERENCE
from holdfast.config import Metrics, describe
from holdfast.data.sources import SOURCE_TABLE
from holdfast.errors import HoldfastError
from holdfast.files import write_atomic
from holdfast.methods import METHOD_TABLE
from holdfast.methods.sends import sends, sends_line
from holdfast.models import BACKBONE_TABLE, BACKBONES
from holdfast.predict import Guess
from holdfast.predict import predict as predict_images
from holdfast.results.plots import comparison_curves
from holdfast.results.record import Result, configs_of, read_clients, read_config, read_result
from holdfast.results.runs import runs_of
from holdfast.results.stored import stored
from holdfast.results.tables import (
    as_csv,
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
    runs: Annotated[list[Path], typer.Argument(help=f"folders of runs, or {ARCHIVES}", show_default=False)],
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
    """Print the table of a run, as far as it has come, or compare several side by side."""
    runs = [run for path in runs for run in runs_of(path)]
    if not runs:
        raise HoldfastError("there is no finished run in these archives; give others")
    for run in runs:
        stored(run).check()
    with finished_parts(runs) as parts:
        _show(parts, as_json, as_markdown, picture, metrics, reference)


def _show(
    runs: list[Path],
    as_json: bool,
    as_markdown: bool,
    picture: Path | None,
    metrics: Metrics | None,
    reference: str,
) -> None:
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
    images: Annotated[list[Path], typer.Argument(help="image files, and folders of them", show_default=False)],
    top: Annotated[int, typer.Option("--top-k", min=1, help="how many classes to name, the most probable first")] = 3,
    table: Annotated[Path | None, typer.Option("--csv", help="also write all of it into this CSV file")] = None,
    as_json: Json = False,
) -> None:
    """Classify images with the model of a run, the last one so far if the run is not finished."""
    if table:
        check_file(table)
    if run.is_file():
        guesses = predict_images(run, images, top)
    else:
        with finished_parts([run], with_model=True) as [part]:
            guesses = predict_images(part, images, top)
    if table:
        table.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(table, as_csv(_rows(guesses, top)).encode())
    if as_json:
        print(json.dumps([{"image": g.image, "classes": g.classes, "probabilities": g.probabilities} for g in guesses]))
        return
    rows = [[g.image, *_likely(g)[:1], ", ".join(_likely(g)[1:])] for g in guesses]
    out.print(rows_table("", ["image", "class", "or"], rows))


def methods(as_json: Json = False) -> None:
    """List the methods: what each is, and what its clients send to whom, with its default settings."""
    known = METHOD_TABLE.all()
    if as_json:
        print(json.dumps({name: {"about": cls.about, "sends": sends(cls())} for name, cls in known.items()}))
        return
    rows = [[name, cls.about, sends_line(cls())] for name, cls in known.items()]
    out.print(rows_table("", ["method", "what it is", "what its clients send"], rows))


def settings(
    method: Annotated[str | None, typer.Option(help="only the settings that apply to this method")] = None,
    as_json: Json = False,
) -> None:
    """List every setting with its default."""
    rows = describe(method)
    if as_json:
        print(json.dumps([dict(zip(("setting", "default", "about"), row, strict=True)) for row in rows]))
        return
    out.print(rows_table("", ["setting", "default", "what it is"], rows))
    out.print("(preset): the method's default. A table \\[for.<method>] in a config is for that method only.")
    if method is not None:
        return
    sources = SOURCE_TABLE.all().items()
    out.print(rows_table("", ["data set", "what it is"], [[name, source.about] for name, source in sources]))
    if own := [name for name in BACKBONE_TABLE.all() if name not in BACKBONES]:
        out.print(f"further backbones for model.name: {', '.join(own)}", highlight=False)


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


def _rows(guesses: Sequence[Guess], top: int) -> list[list[str | float]]:
    """A head and a line per image: class and probability by rank; no probabilities if the model has none."""
    places = range(max((len(guess.classes) for guess in guesses), default=top))
    some = any(guess.probabilities for guess in guesses)
    head = [
        word for i in places for word in ([f"class_{i + 1}", f"probability_{i + 1}"] if some else [f"class_{i + 1}"])
    ]
    rows: list[list[str | float]] = [["image", *head]]
    for guess in guesses:
        cells = zip(guess.classes, guess.probabilities, strict=True) if guess.probabilities else zip(guess.classes)
        rows.append([guess.image, *(cell for pair in cells for cell in pair)])
    return rows


def _likely(guess: Guess) -> list[str]:
    """The classes, each with its probability if the model gives one."""
    if guess.probabilities is None:
        return guess.classes
    return [f"{name} ({percent(p)} %)" for name, p in zip(guess.classes, guess.probabilities, strict=True)]
