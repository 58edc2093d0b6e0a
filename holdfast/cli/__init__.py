"""The doors: every command of `holdfast`."""

import io
import json
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.markup import escape

from holdfast.bench import Report
from holdfast.bench import clients as clients_bench
from holdfast.bench import data as data_bench
from holdfast.bench import engine as engine_bench
from holdfast.bench import reconstruct as reconstruct_bench
from holdfast.cli.data import Json, Root, a_png, out, use_root
from holdfast.cli.data import data as data_commands
from holdfast.cli.results import ARCHIVES, REFERENCE, compare, export, report, reproduce
from holdfast.config import Config, Metrics, describe, load_config, parse_setting, tasks_setting
from holdfast.data.sources import SOURCES, load_data
from holdfast.errors import HoldfastError
from holdfast.experiment import Run, bytes_of, folder_of, plan_of, run_to_folder
from holdfast.experiment import resume as resume_run
from holdfast.methods import METHODS
from holdfast.predict import Guess
from holdfast.predict import predict as predict_images
from holdfast.results.plots import comparison_curves, phases_bar
from holdfast.results.record import Result, configs_of, read_clients, read_config, read_result
from holdfast.results.runs import runs_of
from holdfast.results.tables import (
    by_protocol,
    comparison,
    markdown,
    names_of,
    percent,
    plan_tables,
    result_lines,
    result_table,
    rows_table,
    traffic_table,
)
from holdfast.simulation.traffic import by_task

STOPPED = 130  # the exit code of what the user or the system ends, as shells have it
app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
bench = typer.Typer(no_args_is_help=True, help="Measure how fast Holdfast is on this machine, as ratios in one run.")
app.add_typer(bench, name="bench")
app.add_typer(data_commands, name="data")
app.command()(compare)
app.command()(reproduce)
app.command()(report)
app.command()(export)

ConfigFile = Annotated[
    Path | None, typer.Argument(help="a TOML file; see configs/ and `holdfast settings`", show_default=False)
]
MethodName = Annotated[str | None, typer.Option("--method", help="see `holdfast methods`")]
DataName = Annotated[str | None, typer.Option("--dataset", help="one of " + ", ".join(SOURCES) + ":<path>")]
Tasks = Annotated[str | None, typer.Option(help="number of equal tasks, or their sizes in classes: 10,5,5")]
Seed = Annotated[int | None, typer.Option(help="the seed of everything that chance decides")]
Sets = Annotated[
    list[str] | None, typer.Option("--set", metavar="ROOM.KEY=VALUE", help="any setting; may be given again and again")
]
RunFolder = Annotated[Path, typer.Argument(help="the folder of a finished run", show_default=False)]


def _print_version(wanted: bool) -> None:
    if wanted:
        print(version("holdfast"))
        raise typer.Exit


@app.callback()
def holdfast(
    show_version: Annotated[bool, typer.Option("--version", callback=_print_version, is_eager=True)] = False,
) -> None:
    """Federated class-incremental learning: many clients, ever more classes, nobody's classes forgotten."""


@app.command()
def run(
    config: ConfigFile = None,
    method: MethodName = None,
    dataset: DataName = None,
    tasks: Tasks = None,
    seed: Seed = None,
    set_: Sets = None,
    out_: Annotated[Path | None, typer.Option("--out", help="the run's folder; runs/<name> if not given")] = None,
    root: Root = None,
    as_json: Json = False,
) -> None:
    """Run an experiment and write its folder: config, plan, record, result, model, pictures.

    A run that was stopped goes on where it was; a complete one is shown."""
    use_root(root)
    chosen = _config(config, method, dataset, tasks, seed, set_)
    folder = folder_of(chosen, out_)
    _report(_or_stopped(lambda: run_to_folder(chosen, folder), folder), chosen.metrics, as_json)


@app.command()
def resume(
    run: Annotated[Path, typer.Argument(help="the folder of a run that was stopped", show_default=False)],
    root: Root = None,
    as_json: Json = False,
) -> None:
    """Go on with a run that was stopped or killed; it ends with the same bits as one that was not."""
    use_root(root)
    done = _or_stopped(lambda: resume_run(run), run)
    _report(done, _metrics_of(run), as_json)


def _or_stopped(work: Callable[[], Run], folder: Path) -> Run:
    """What `work` gives; or, if the user stops it, one sentence on how to go on."""
    try:
        return work()
    except KeyboardInterrupt:
        _stop(f"stopped; what was done is kept. Go on with: holdfast resume {folder}", STOPPED)


def _report(done: Run, metrics: Metrics, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"folder": str(done.folder), **done.result.to_json()}))
        return
    _show(done.folder, done.result, metrics)
    if not done.fresh:
        out.print("This very run was complete already; delete its folder to run it again.")
    print(f"{done.folder} (picture: {done.folder / 'accuracy.png'})")


@app.command()
def show(
    runs: Annotated[list[Path], typer.Argument(help=f"folders of finished runs, or {ARCHIVES}", show_default=False)],
    as_json: Json = False,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="print the comparison as Markdown")] = False,
    picture: Annotated[
        Path | None, typer.Option(help="also draw the curves of all runs into this PNG file", callback=a_png)
    ] = None,
    metrics: Annotated[
        Metrics | None, typer.Option(help="F1 and recall of a single run; as its config says, if not given")
    ] = None,
    reference: Annotated[str, typer.Option(help="the method whose advantage over the others is shown")] = REFERENCE,
) -> None:
    """Print the table of a finished run again, or set several side by side."""
    runs = [run for path in runs for run in runs_of(path)]
    if not runs:
        raise HoldfastError("there is no finished run in these archives; give others")
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
        print("\n\n".join(f"**{data}**\n\n{table}" for data, table in tables.items()))
    elif len(runs) > 1:
        for data, some in by_protocol(results).items():
            title = f"{data}: accuracy in %, mean (± standard deviation) over seeds"
            out.print(rows_table(title, *comparison(some, names_of(some, configs), reference)))
    else:
        _show(runs[0], results[0], metrics or _metrics_of(runs[0]))


@app.command()
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


@app.command()
def plan(
    config: ConfigFile = None,
    method: MethodName = None,
    dataset: DataName = None,
    tasks: Tasks = None,
    seed: Seed = None,
    set_: Sets = None,
    root: Root = None,
    as_json: Json = False,
) -> None:
    """Print who joins when, holds which classes, is selected when, and what will be sent, without training."""
    use_root(root)
    chosen = _config(config, method, dataset, tasks, seed, set_)
    data = load_data(chosen.data)
    made = plan_of(chosen, data)
    account = bytes_of(chosen, data, made)
    if as_json:
        print(json.dumps({"data": data.fingerprint, **made.to_json(data.classes, data.clients), "bytes": account}))
    else:
        for table in [*plan_tables(made, data.classes, data.clients), traffic_table(by_task(made, account))]:
            out.print(table)


@app.command()
def methods(as_json: Json = False) -> None:
    """List the methods, one line each."""
    if as_json:
        print(json.dumps({name: cls.about for name, cls in METHODS.items()}))
    else:
        out.print(rows_table("", ["method", "what it is"], [[name, cls.about] for name, cls in METHODS.items()]))


@app.command()
def settings(as_json: Json = False) -> None:
    """List every setting with its default."""
    if as_json:
        print(json.dumps([dict(zip(("setting", "default", "about"), row, strict=True)) for row in describe()]))
        return
    out.print(rows_table("", ["setting", "default", "what it is"], describe()))
    out.print("(preset): the method's own. A table \\[for.<method>] in a config holds settings for that method only.")
    out.print(rows_table("", ["data set", "what it is"], [[name, source.about] for name, source in SOURCES.items()]))


@bench.command()
def engine(
    network: Annotated[list[str] | None, typer.Option(help="resnet18 or convnet; both if not given")] = None,
    picture: Annotated[
        Path | None, typer.Option(help="also draw where the time of a round goes (PNG)", callback=a_png)
    ] = None,
    as_json: Json = False,
) -> None:
    """How much of a round is arithmetic that nothing could do without, and what two processes gain over one."""
    for name in network or []:
        if name not in engine_bench.BOUNDS:
            raise HoldfastError(f"unknown --network {name}; use {' or '.join(engine_bench.BOUNDS)}")
    found = _measured(lambda tell: engine_bench.measure(network or list(engine_bench.BOUNDS), tell), as_json)
    if picture:
        phases_bar({name: facts["phases"] for name, facts in found.facts["networks"].items()}, picture)


@bench.command()
def clients(as_json: Json = False) -> None:
    """Seconds a round and memory with 30 to 100,000 registered clients, ten of them selected."""
    _measured(clients_bench.measure, as_json)


@bench.command()
def reconstruct(as_json: Json = False) -> None:
    """Prototypes rebuilt together, one by one, and by the published procedure."""
    _measured(reconstruct_bench.measure, as_json)


@bench.command()
def data(as_json: Json = False) -> None:
    """Images decoded a second, by one core and by all."""
    _measured(data_bench.measure, as_json)


def _measured(measure: Callable[[Callable[[str], None]], Report], as_json: bool) -> Report:
    """Runs a benchmark, saying what it is doing, and shows what it found."""
    with Console(stderr=True).status("") as status:
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


def main() -> None:
    """The command line: a mistake is one sentence and exit code 2."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that cannot show a class's name shows a question mark
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        code = app(standalone_mode=False)
    except (HoldfastError, OSError) as error:  # a disk that is full or gone is the user's business, not a bug's
        _stop(str(error), 2)
    except MemoryError:
        _stop("there is not enough memory; use fewer or smaller images (data.*), or a smaller batch", 2)
    except (typer.Abort, KeyboardInterrupt):
        code = STOPPED
    except Exception as error:
        # A wrong option or command; which class says so depends on the version of typer.
        say = getattr(error, "format_message", None)
        if say is None:
            raise
        if not say():  # no command at all: the help has been printed
            sys.exit(2)
        _stop(f"{' '.join(say().split()).rstrip('.')}; see 'holdfast --help'", 2)
    if code == STOPPED:
        _stop("stopped; what was done is kept, and the same command goes on", STOPPED)
    sys.exit(code)


def _interrupt(*_: object) -> NoReturn:
    """Being told to end (by a batch system, or when the machine goes down) is the same as Ctrl-C: workers and what is
    in shared memory are cleared away."""
    raise KeyboardInterrupt


def _stop(sentence: str, code: int) -> NoReturn:
    Console(stderr=True, emoji=False).print(f"[red]holdfast:[/red] {escape(sentence)}", soft_wrap=True, highlight=False)
    sys.exit(code)


def _config(
    file: Path | None,
    method: str | None,
    dataset: str | None,
    tasks: str | None,
    seed: int | None,
    sets: list[str] | None,
) -> Config:
    flags: list[tuple[str, Any]] = [parse_setting(text) for text in sets or []]
    for key, value in {"method.name": method, "data.name": dataset, "seed": seed}.items():
        if value is not None:
            flags.append((key, value))
    if tasks is not None:
        flags.append(tasks_setting(tasks))
    return load_config(file, flags)


def _metrics_of(folder: Path) -> Metrics:
    """What the run's own config wants to see."""
    with suppress(HoldfastError):
        return "batchwise128" if (read_config(folder) or {}).get("metrics") == "batchwise128" else "whole"
    return "whole"


def _show(folder: Path, result: Result, metrics: Metrics) -> None:
    clients = read_clients(folder, result)
    out.print(result_table(result))
    for line in result_lines(result, clients.names if clients else (), metrics):
        out.print(line, highlight=False)


def _likely(guess: Guess) -> list[str]:
    """The classes, with how sure the model is of each where it says."""
    if guess.probabilities is None:
        return guess.classes
    return [f"{name} ({percent(p)} %)" for name, p in zip(guess.classes, guess.probabilities, strict=True)]
