"""How an experiment runs: config -> plan -> rounds -> record."""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.progress import Progress, TaskID, TextColumn

from holdfast import __version__
from holdfast.checkpoint import Checkpoints
from holdfast.config import Config, load_config, to_toml, to_tree
from holdfast.data.decoding import cores
from holdfast.data.images import DataSet
from holdfast.data.sources import load_data
from holdfast.engines.pool import Pool
from holdfast.engines.serial import Serial
from holdfast.errors import HoldfastError
from holdfast.files import parse_json, unfinished, write_atomic, write_json
from holdfast.machine import choose_device, machine_of, one_thread
from holdfast.models.incremental import ModelSpec
from holdfast.models.stored import write_model
from holdfast.models.transform import Transform
from holdfast.progress import progress_bar
from holdfast.protocol.enrolment import Enrolment, Preset, Training
from holdfast.protocol.messages import Encoder
from holdfast.proxy.prototype_server import SelectorSetup, build_selector
from holdfast.results.checksums import MODEL, check_files
from holdfast.results.plots import accuracy_curve, image_sheet, prototype_sheet
from holdfast.results.record import NEWER, Record, Result, only_writer, read_record, read_result, write_result
from holdfast.results.stored import read_file
from holdfast.results.summary import summarise
from holdfast.seeding import torch_generator
from holdfast.server.metrics import Counts
from holdfast.server.server import Server
from holdfast.simulation.engine import Engine
from holdfast.simulation.federation import Federation
from holdfast.simulation.plan import Plan, all_at_once, make_plan
from holdfast.simulation.rounds import run_rounds
from holdfast.simulation.streams import plan_of_folders
from holdfast.simulation.traffic import Bytes, traffic_of

WORKERS_PER_GPU = 4  # a small network leaves most of a GPU idle
WORTH_A_POOL = 10_000  # training images; about 15 seconds of the small network on one core
NAME = 60  # characters of the data set's name in a folder name
SHEET = 12  # prototypes on the sheet of a run, and exemplars per class
SHEET_CLASSES = 25  # the newest classes whose exemplars are shown
SHORT = {"method": "method.name", "dataset": "data.name", "tasks": "plan.tasks"}


@dataclass(frozen=True)
class Overall:
    """The progress display of several runs: a bar, and the task in it that all of them advance."""

    bar: Progress
    task: TaskID


@dataclass(frozen=True)
class Run:
    """A finished run: its folder and its result."""

    folder: Path
    result: Result
    fresh: bool  # False: it had been finished before


def run(config: Path | str | Mapping[str, Any] | None = None, out: Path | str | None = None, **settings: Any) -> Result:
    """Runs an experiment and returns its result: `run("configs/demo.toml", method="fedavg", train={"lr": 0.1})`.

    `config` is a TOML file or its content; settings are sections of it, or `method`, `dataset`, `tasks` and `seed`."""
    source = Path(config) if isinstance(config, str) else config
    flags: list[tuple[str, Any]] = []
    for section, value in settings.items():
        if isinstance(value, Mapping):
            flags += [(f"{section}.{key}", inner) for key, inner in value.items()]
        else:
            flags.append((SHORT.get(section, section), value))
    return run_to_folder(load_config(source, flags), Path(out) if out else None).result


def run_to_folder(config: Config, out: Path | None = None, overall: Overall | None = None) -> Run:
    """Runs an experiment into its own folder; a run that is already complete there is not computed again. `overall` is
    the progress display of the series of runs that this one is part of."""
    folder = folder_of(config, out)
    done = _is_done(folder, config)
    if done and not own_images(config):
        return Run(folder, read_result(folder), fresh=False)
    data = load_data(config.data)
    _same_data(folder, data)
    if done:
        return Run(folder, read_result(folder), fresh=False)
    plan = plan_of(config, data)
    with one_thread():
        federation = build_federation(config, data, plan)
        _prepare(folder, config)
        with only_writer(folder):
            if _is_done(folder, config):  # another process finished it in the meantime
                return Run(folder, read_result(folder), fresh=False)
            write_json(folder / "plan.json", {"data": data.fingerprint, **plan.to_json(data.classes, data.clients)})
            checkpoints = Checkpoints(folder, _identity(config))
            counts = _run(config, data, federation, folder, checkpoints, overall)
            _write_model(folder / MODEL, config, federation)
            result = summarise(_named(config, data), plan, data.classes, read_record(folder), counts)
            accuracy_curve(result, folder / "accuracy.png")
            _draw_prototypes(federation, folder / "prototypes.png")
            _draw_exemplars(federation, folder / "exemplars.png")
            write_result(folder, result)
            checkpoints.remove()
    return Run(folder, result, fresh=True)


def resume(folder: Path) -> Run:
    """Continues a run that was stopped; a complete run is read."""
    if not (folder / "config.toml").is_file():
        raise HoldfastError(f"{folder} holds no config.toml; give the folder of a run")
    check_files(folder)
    return run_to_folder(load_config(folder / "config.toml"), folder)


def bytes_of(config: Config, data: DataSet, plan: Plan) -> list[Bytes]:
    """The bytes that every round will send, by arithmetic."""
    return traffic_of(config.method, selector_setup(config, data, torch.device("cpu")), plan, config.plan.observe)


def plan_of(config: Config, data: DataSet) -> Plan:
    """The plan of a run, as its method requires it."""
    if data.clients:
        plan = plan_of_folders(config.plan, data, config.seed)
    else:
        images = {c: rows.tolist() for c, rows in data.train.by_class.items()}
        plan = make_plan(config.plan, data.classes, images, config.seed)
    return all_at_once(plan) if config.method.all_at_once else plan


def build_federation(config: Config, data: DataSet, plan: Plan) -> Federation:
    """Server, teacher selector and clients."""
    device = choose_device(config.run.device)
    setup = selector_setup(config, data, device)
    model = config.method.build_model(setup.spec, torch_generator(config.seed, "model")).to(device)
    train = config.train
    given = {field.name: getattr(train, field.name) for field in fields(Preset)}
    optimiser = Preset(**{key: value for key, value in given.items() if value is not None})
    enrolment = Enrolment(
        client=0,
        method=to_tree(config)["method"],
        spec=setup.spec,
        transform=setup.transform,
        training=Training(train.epochs, train.batch, optimiser),
        memory=config.plan.memory,
        seed=config.seed,
    )
    return Federation(
        plan,
        data,
        config.method,
        enrolment,
        Server(model, config.seed, train.weighting),
        build_selector(config.method, setup),
        config.plan.growth,
        config.plan.observe,
        device,
    )


def selector_setup(config: Config, data: DataSet, device: torch.device) -> SelectorSetup:
    """The inputs from which a teacher selector is built."""
    spec = ModelSpec(config.model.name, config.model.norm, data.size, config.model.width)
    return SelectorSetup(spec, Transform(data.mean, data.std, data.flip), len(data.classes), config.seed, device)


def choose_engine(config: Config, data: DataSet, federation: Federation) -> Engine:
    """A pool with one worker per core, or several per GPU; serial for a single worker or a short run."""
    run, device = config.run, choose_device(config.run.device)
    devices = _gpus(run.device) if device.type == "cuda" else ["cpu"]
    default = min(cores(), WORKERS_PER_GPU * len(devices)) if device.type == "cuda" else cores()
    workers = min(run.workers or default, max(map(len, federation.plan.selected)))
    if run.engine == "serial" or (run.engine == "auto" and (workers == 1 or not _worth_a_pool(federation))):
        return Serial()
    return pool_of(federation, data, workers, devices)


def pool_of(federation: Federation, data: DataSet, workers: int, devices: Sequence[str] = ("cpu",)) -> Pool:
    """Worker processes for this federation."""
    encoder = federation.selector.encoder
    message = Encoder(encoder.state_dict()) if encoder is not None else None
    return Pool(federation.enrolment, data, workers, message, devices)


def _worth_a_pool(federation: Federation) -> bool:
    """Is there enough training to justify starting workers?"""
    plan, data = federation.plan, federation.data
    current = (plan.arrivals[c][plan.current(c, r)] for r, chosen in enumerate(plan.selected) for c in chosen)
    images = (
        sum(len(data.train.by_class[c]) for c in arrival.classes) if arrival.images is None else len(arrival.images)
        for arrival in current
    )
    return federation.enrolment.training.epochs * sum(images) >= WORTH_A_POOL


def _gpus(name: str) -> list[str]:
    """All GPUs, unless the user has named one."""
    return [name] if ":" in name else [f"cuda:{i}" for i in range(torch.cuda.device_count())]


def folder_of(config: Config, out: Path | None) -> Path:
    return out or Path("runs") / run_name(config)


def run_name(config: Config) -> str:
    """A folder name that is the same whenever the same experiment is run."""
    data = re.sub(r"[^\w.]+", "-", config.data.name)[-NAME:]
    return f"{data}-{config.method.name}-seed{config.seed}-{_digest(_identity(config))}"


def _identity(config: Config) -> dict[str, Any]:
    """All settings that decide a run's result: everything except where it is computed and what is shown of it. A
    setting that was added later counts only if it differs from its default, so that older runs keep their names."""
    tree = {section: values for section, values in to_tree(config).items() if section not in ("run", "metrics")}
    for section, newer in NEWER.items():
        tree[section] = {k: value for k, value in tree[section].items() if k not in newer or newer[k] != value}
    return tree


def _digest(tree: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()[:8]


def own_images(config: Config) -> bool:
    """Are these a user's own images, which may change at any time?"""
    return config.data.name.partition(":")[0] == "folder"


def _same_data(folder: Path, data: DataSet) -> None:
    """Refuses to continue or show a run that was started on other images."""
    try:
        known = parse_json(read_file(folder, "plan.json")).get("data")
    except (HoldfastError, ValueError, AttributeError):
        return
    if known is not None and known != data.fingerprint:
        raise HoldfastError(
            f"{folder} holds this run on other images than {data.name} has now; choose another folder or delete it"
        )


def _named(config: Config, data: DataSet) -> dict[str, Any]:
    """The fields of a result that identify its run."""
    same = {key: value for key, value in _identity(config).items() if key != "seed"}
    return {
        "version": __version__,
        "experiment": _digest({**same, "images": data.fingerprint} if own_images(config) else same),
        "method": config.method.title(config.model.name),
        "dataset": config.data.name,
        "seed": config.seed,
        "machine": machine_of(choose_device(config.run.device)),
    }


def _is_done(folder: Path, config: Config) -> bool:
    """Is this run complete in the folder? A folder that contains anything else is refused."""
    if not folder.exists():
        return False
    if _holds(folder, config):
        return (folder / "result.json").exists()
    if not folder.is_dir() or any(not unfinished(file) for file in folder.iterdir()):
        raise HoldfastError(f"{folder} contains something else already; choose another folder")
    return False


def _holds(folder: Path, config: Config) -> bool:
    if not (folder / "config.toml").exists():
        return False
    try:
        return _identity(load_config(folder / "config.toml")) == _identity(config)
    except HoldfastError as error:
        raise HoldfastError(
            f"{folder} contains a config.toml that cannot be read ({error}); delete the folder, or choose another"
        ) from error


def _prepare(folder: Path, config: Config) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomic(folder / "config.toml", to_toml(config).encode())
    except OSError as error:
        raise HoldfastError(f"cannot write to {folder}: {error.strerror}; choose another folder") from error


def _run(
    config: Config,
    data: DataSet,
    federation: Federation,
    folder: Path,
    checkpoints: Checkpoints,
    overall: Overall | None,
) -> Counts:
    """Runs the remaining rounds and records each, with a progress bar that advances after every client."""
    plan, name = federation.plan, federation.method.name
    done, counts, complaints = checkpoints.restore(federation)
    view = nullcontext(overall.bar) if overall else progress_bar(TextColumn("{task.fields[note]}", markup=False))
    with Record(folder, done, checkpoints.record) as record, view as bar:
        for complaint in complaints:
            bar.console.print(complaint, highlight=False)
        if done:
            bar.console.print(f"{name}: continuing after round {done} of {plan.rounds}", highlight=False)
        clients = [len(chosen) for chosen in plan.selected]
        task = bar.add_task(name, total=sum(clients), completed=sum(clients[:done]), note="")

        def tick() -> None:
            bar.advance(task)
            if overall:
                bar.advance(overall.task)

        if overall:
            bar.advance(overall.task, sum(clients[:done]))
        if done < plan.rounds:
            with choose_engine(config, data, federation) as engine:
                for finished in run_rounds(federation, engine, tick, start=done):
                    record.write(finished.line)
                    done, counts = finished.line["round"], finished.counts
                    checkpoints.save(done, federation, counts, record.digest)
                    note = _note(finished.line, plan)
                    bar.update(task, note=note)
                    if bar.disable and plan.ends_task(done - 1):
                        bar.console.print(f"{name}: {note}", highlight=False)  # for a log file
        if overall:
            bar.remove_task(task)
    assert counts is not None
    return counts


def _note(line: Mapping[str, Any], plan: Plan) -> str:
    where = f"task {line['task']}/{len(plan.tasks)}, round {line['round']}/{plan.rounds}"
    return f"{where}, accuracy {line['accuracy']:.1%}"


def _write_model(file: Path, config: Config, federation: Federation) -> None:
    enrolment, registry = federation.enrolment, federation.server.registry
    facts = {
        "classes": registry.names,
        "growths": registry.growths,
        "method": to_tree(config)["method"],
        "backbone": enrolment.spec.backbone,
        "norm": enrolment.spec.norm,
        "width": enrolment.spec.width,
        "image_size": enrolment.spec.image_size,
        "mean": enrolment.transform.mean,
        "std": enrolment.transform.std,
    }
    write_model(file, federation.server.weights, facts)


def _draw_exemplars(federation: Federation, file: Path) -> None:
    """Draws the exemplars of the client with the most classes in its memory; possible only in a simulation."""
    population, train = federation.population, federation.data.train
    states = (population.state(client) for client in federation.plan.selected[-1])
    memory = max((state.memory for state in states), key=len, default={})
    shown = [(name, kept) for name, kept in memory.items() if len(kept)][-SHEET_CLASSES:]
    if shown:
        image_sheet({name: train.images[kept.long()[:SHEET]] for name, kept in shown}, file)


def _draw_prototypes(federation: Federation, file: Path) -> None:
    """Draws the last prototypes that clients shared, each as its client and as the proxy has it. Only here, outside of
    the federation, are both sides known."""
    seen_by_proxy, train = federation.selector.gallery(), federation.data.train
    columns: dict[str, list[np.ndarray]] = {}
    for state in federation.population.states.values():
        if "prototype.ids" not in state.notes:
            continue
        kept = (state.notes[f"prototype.{part}"] for part in ("ids", "perturbed", "fingerprint"))
        for row, perturbed, fingerprint in zip(*kept, strict=True):
            found = seen_by_proxy.get(bytes(fingerprint.tolist()))
            if found is not None:
                name = federation.data.classes[int(train.labels[int(row)])]
                images = (train.images[int(row)], perturbed, found.mul(255).round().byte().cpu())
                columns.setdefault(name, [image.permute(1, 2, 0).numpy() for image in images])
    if columns:
        prototype_sheet(list(columns.items())[:SHEET], file)
