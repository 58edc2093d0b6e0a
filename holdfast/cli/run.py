"""The commands that run an experiment, or plan one: `holdfast run | resume | plan`."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from holdfast.cli.console import STOPPED, out, stop
from holdfast.cli.options import ConfigFile, DataName, Json, MethodName, Root, Seed, Sets, Tasks, use_root
from holdfast.cli.show import metrics_of, print_result
from holdfast.config import Config, Metrics, load_config, parse_setting, tasks_setting
from holdfast.data.sources import load_data
from holdfast.experiment import Run, bytes_of, folder_of, memory_needed, plan_of, run_to_folder, workers_of
from holdfast.experiment import resume as resume_run
from holdfast.results.tables import plan_tables, traffic_table
from holdfast.simulation.memory import machine_memory
from holdfast.simulation.traffic import by_task
from holdfast.terminal import write


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
    """Run an experiment and write its folder: config, plan, record, result, model and pictures.

    A run that was stopped continues where it stopped; a complete one is only shown."""
    use_root(root)
    chosen = _config(config, method, dataset, tasks, seed, set_)
    folder = folder_of(chosen, out_)
    _report(_or_stopped(lambda: run_to_folder(chosen, folder), folder), chosen.metrics, as_json)


def resume(
    run: Annotated[Path, typer.Argument(help="the folder of a run that was stopped", show_default=False)],
    root: Root = None,
    as_json: Json = False,
) -> None:
    """Continue a run that was stopped or killed; the result has the same bits as that of an uninterrupted run."""
    use_root(root)
    done = _or_stopped(lambda: resume_run(run), run)
    _report(done, metrics_of(run), as_json)


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
    memory, workers = memory_needed(chosen, data, made), workers_of(chosen, made)
    needed = {"worker": memory.worker, "main": memory.main, "workers": workers, "total": memory.total(workers)}
    if as_json:
        facts = {"data": data.fingerprint, **made.to_json(data.classes, data.clients), "bytes": account}
        print(json.dumps({**facts, "memory": {**needed, "machine": machine_memory()}}))
        return
    for table in [*plan_tables(made, data.classes, data.clients), traffic_table(by_task(made, account))]:
        out.print(table)
    gb = {name: f"{count / 1e9:.1f} GB" for name, count in needed.items()}
    out.print(
        f"memory, about: {gb['worker']} per worker process, {gb['main']} for global server and proxy; "
        f"{gb['total']} with {workers or 'no'} workers",
        highlight=False,
    )


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


def _or_stopped(work: Callable[[], Run], folder: Path) -> Run:
    """What `work` returns; if the user stops it, a sentence that says how to continue."""
    try:
        return work()
    except KeyboardInterrupt:
        stop(f"stopped; finished rounds are kept. Continue with: holdfast resume {folder}", STOPPED)


def _report(done: Run, metrics: Metrics, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"folder": str(done.folder), **done.result.to_json()}))
        return
    print_result(done.folder, done.result, metrics)
    if not done.fresh:
        out.print("This run was complete already; delete its folder to run it again.")
    write(f"{done.folder} (picture: {done.folder / 'accuracy.png'})\n")
