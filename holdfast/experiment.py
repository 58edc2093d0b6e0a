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
from rich.progress import TaskID, TextColumn

from holdfast import __version__
from holdfast.checkpoint import Checkpoints
from holdfast.client.precision import check_precision
from holdfast.config import Config, load_config, to_toml, to_tree
from holdfast.data.decoding import cores
from holdfast.data.images import DataSet
from holdfast.data.sources import SOURCES, load_data
from holdfast.engines.pool import Pool
from holdfast.engines.serial import Serial
from holdfast.engines.settings import TIMEOUT
from holdfast.errors import HoldfastError, complain
from holdfast.files import parse_json, unfinished, write_atomic, write_json
from holdfast.machine import choose_device, machine_of, one_thread
from holdfast.methods import METHOD_TABLE
from holdfast.methods.settings import TrainSettings, with_weighting
from holdfast.models import BACKBONE_TABLE
from holdfast.models.incremental import IncrementalModel, ModelSpec
from holdfast.models.pretrained import Loaded, start_from
from holdfast.models.stored import write_model
from holdfast.models.transform import Transform
from holdfast.progress import RoundsProgress, progress_bar
from holdfast.protocol.enrolment import Enrolment, Preset, Training
from holdfast.protocol.messages import Encoder
from holdfast.proxy.prototype_server import SelectorSetup, build_selector
from holdfast.results.checksums import MODEL, check_files
from holdfast.results.plots import accuracy_curve, image_sheet, prototype_sheet
from holdfast.results.record import (
    Record,
    Result,
    newer_settings,
    only_writer,
    read_config,
    read_record,
    read_result,
    write_result,
)
from holdfast.results.stored import read_file
from holdfast.results.summary import summarise
from holdfast.seeding import torch_generator
from holdfast.server.aggregation import Aggregation
from holdfast.server.collection import Quorum
from holdfast.server.metrics import Counts
from holdfast.server.server import Server
from holdfast.simulation.engine import Engine
from holdfast.simulation.faults import Faults
from holdfast.simulation.federation import Federation
from holdfast.simulation.memory import Memory, machine_memory, memory_of
from holdfast.simulation.outlook import outlook
from holdfast.simulation.plan import Plan, all_at_once, make_plan
from holdfast.simulation.rounds import run_rounds
from holdfast.simulation.settings import FaultSettings
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

    bar: RoundsProgress
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
            checkpoints = Checkpoints(folder, identity_of(config))
            counts = _run(config, data, federation, folder, checkpoints, overall)
            _write_model(folder / MODEL, config, federation)
            identity = {**named(config, data.fingerprint), "machine": machine_of(choose_device(config.run.device))}
            identity["weights"] = federation.loaded.to_json() if federation.loaded else None
            result = summarise(identity, plan, data.classes, read_record(folder), counts, data.clients)
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
    return run_to_folder(load_config(read_config(folder)), folder)


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
    check_precision(config.run.precision, device)
    model = config.method.build_model(setup.spec, torch_generator(config.seed, "model")).to(device)
    loaded = _load_weights(config, model)
    train, enrolment = config.train, enrolment_of(config, setup)
    if config.plan.quorum > min(map(len, plan.selected)):
        raise HoldfastError(
            f"plan.quorum={config.plan.quorum}, but a round has only {min(map(len, plan.selected))} clients; "
            "lower it, or raise plan.selected or plan.over_select"
        )
    selector = build_selector(config.method, setup)
    faults = None
    if config.faults != FaultSettings():
        deadline, size = config.plan.deadline, setup.spec.image_size
        faults = Faults(config.faults, config.seed, plan.selected, deadline, selector.encoder, size)
    return Federation(
        plan,
        data,
        config.method,
        enrolment,
        Server(model, config.seed, aggregation_of(train)),
        selector,
        config.plan.growth,
        config.plan.observe,
        device,
        loaded,
        Quorum(config.plan.quorum, config.plan.retries),
        faults,
    )


def enrolment_of(config: Config, setup: SelectorSetup) -> Enrolment:
    """What every client is told; its number differs."""
    return Enrolment(
        client=0,
        method=to_tree(config)["method"],
        spec=setup.spec,
        transform=setup.transform,
        training=training_of(config),
        memory=config.plan.memory,
        seed=config.seed,
        max_samples=config.plan.max_samples,
    )


def aggregation_of(train: TrainSettings) -> Aggregation:
    """How the server aggregates, by the settings of a config."""
    return Aggregation(
        train.aggregator,
        train.trim,
        train.hostile,
        train.outlier,
        train.clip,
        train.server_optimiser,
        train.server_rate,
        train.server_momentum,
        train.server_beta,
    )


def training_of(config: Config) -> Training:
    """Local training as clients are told of it."""
    given = {field.name: getattr(config.train, field.name) for field in fields(Preset)}
    optimiser = Preset(**{key: value for key, value in given.items() if value is not None})
    return Training(config.train.epochs, config.train.batch_size, optimiser, config.run.precision)


def _load_weights(config: Config, model: IncrementalModel) -> Loaded | None:
    """Starts the backbone from `model.weights`, if that is given."""
    settings = config.model
    if settings.weights is None:
        return None
    if model.trunk is None:
        raise HoldfastError(f"{config.method.label} does not use the backbone {settings.name}; leave model.weights out")
    return start_from(model.trunk, Path(settings.weights), settings.weights_sha256)


def selector_setup(config: Config, data: DataSet, device: torch.device) -> SelectorSetup:
    """The inputs from which a teacher selector is built."""
    settings = config.model
    spec = ModelSpec(settings.name, settings.norm, data.size, settings.width, settings.freeze)
    return SelectorSetup(spec, Transform(data.mean, data.std, data.flip), len(data.classes), config.seed, device)


def choose_engine(config: Config, data: DataSet, federation: Federation) -> Engine:
    """A pool with one worker per core, or several per GPU; serial for a single worker or a short run."""
    device = choose_device(config.run.device)
    devices = _gpus(config.run.device) if device.type == "cuda" else ["cpu"]
    workers = workers_of(config, federation.plan, len(devices))
    if config.run.engine == "auto" and not _worth_a_pool(federation):
        workers = 0
    if workers and (alone := _only_here(config)):
        if config.run.engine == "pool":
            raise HoldfastError(f"run.engine=pool, but {alone}; put it into its own file, or use run.engine=serial")
        complain(f"{alone}, so one process computes this run; put it into its own file for a pool of workers")
        workers = 0
    if device.type == "cpu":
        _check_memory(memory_needed(config, data, federation.plan), workers)
    return pool_of(federation, data, workers, devices, config.run.timeout) if workers else Serial()


def workers_of(config: Config, plan: Plan, gpus: int = 1) -> int:
    """How many worker processes the settings ask for; 0 for the serial engine."""
    run, on_gpu = config.run, choose_device(config.run.device).type == "cuda"
    default = min(cores(), WORKERS_PER_GPU * gpus) if on_gpu else cores()
    workers = min(run.workers or default, max(map(len, plan.selected)))
    return 0 if run.engine == "serial" or (run.engine == "auto" and workers == 1) else workers


def memory_needed(config: Config, data: DataSet, plan: Plan) -> Memory:
    """An estimate of the run's memory on the CPU, by arithmetic."""
    setup = selector_setup(config, data, torch.device("cpu"))
    return memory_of(config.method, setup, plan, training_of(config), data)


def _check_memory(memory: Memory, workers: int) -> None:
    """Refuses a run that this machine has no memory for, before hours are spent on it."""
    needed, there = memory.total(workers), machine_memory()
    if there is None or needed <= there:
        return
    fewer = next((count for count in range(workers, -1, -1) if memory.total(count) <= there), None)
    helps = f"set run.workers={fewer}" if fewer else "set run.engine=serial" if fewer == 0 else "lower train.batch"
    raise HoldfastError(
        f"this run needs about {needed / 1e9:.1f} GB of memory with {max(workers, 1)} worker processes, and this "
        f"machine has {there / 1e9:.1f}; {helps}"
    )


def _only_here(config: Config) -> str:
    """Why worker processes cannot compute this run; empty if they can."""
    for table, name in ((METHOD_TABLE, config.method_name), (BACKBONE_TABLE, config.model.name)):
        if table.only_here(name):
            return f"the {table.kind} {name!r} is defined in a script or notebook, where no worker process finds it"
    return ""


def pool_of(
    federation: Federation,
    data: DataSet,
    workers: int,
    devices: Sequence[str] = ("cpu",),
    timeout: float = TIMEOUT,
) -> Pool:
    """Worker processes for this federation."""
    encoder = federation.selector.encoder
    message = Encoder(encoder.state_dict()) if encoder is not None else None
    return Pool(federation.enrolment, data, workers, message, devices, federation.faults, timeout)


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
    return f"{data}-{config.method.name}-seed{config.seed}-{_digest(identity_of(config))}"


def identity_of(config: Config) -> dict[str, Any]:
    """All settings that decide a run's result: everything except where it is computed and what is shown of it. A
    setting that was added later counts only if it differs from its default, so that older runs keep their names."""
    tree = {section: values for section, values in to_tree(config).items() if section not in ("run", "metrics")}
    tree["model"].pop("weights", None)  # its SHA-256 stands for it, wherever the file is
    if config.run.precision != "fp32":
        tree["run"] = {"precision": config.run.precision}
    for section, newer in newer_settings(config.method_name).items():
        tree[section] = {k: value for k, value in tree[section].items() if k not in newer or newer[k] != value}
    tree["train"] = with_weighting(tree["train"])
    return {section: values for section, values in tree.items() if values != {}}


def _digest(tree: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()[:8]


def own_images(config: Config) -> bool:
    """Are these a user's own images, which may change at any time?"""
    return config.data.name.partition(":")[0] == "folder" or config.data.name not in SOURCES


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


def named(config: Config, images: str) -> dict[str, Any]:
    """The fields of a result that identify its run; `images` is the data set's fingerprint."""
    same = {key: value for key, value in identity_of(config).items() if key != "seed"}
    return {
        "version": __version__,
        "experiment": _digest({**same, "images": images} if own_images(config) else same),
        "method": config.method.title(config.model.name),
        "dataset": config.data.name,
        "seed": config.seed,
    }


def _is_done(folder: Path, config: Config) -> bool:
    """Is this run complete in the folder? A folder that contains anything else is refused."""
    if not folder.exists():
        return False
    if (folder / "config.toml").exists():
        _same_config(folder, config)
        return (folder / "result.json").exists()
    if not folder.is_dir() or any(not unfinished(file) for file in folder.iterdir()):
        raise HoldfastError(f"{folder} contains something else already; choose another folder")
    return False


def _same_config(folder: Path, config: Config) -> None:
    """Refuses a folder with a run of other settings, and says which."""
    try:
        there, here = identity_of(load_config(read_config(folder))), identity_of(config)
    except HoldfastError as error:
        raise HoldfastError(
            f"{folder} contains a config.toml that cannot be read ({error}); delete the folder, or choose another"
        ) from error
    if there != here:
        known, wanted = _flat(there), _flat(here)
        differ = [key for key in {**wanted, **known} if known.get(key) != wanted.get(key)]
        first = differ[0]
        more = f" ({len(differ) - 1} more settings differ)" if len(differ) > 1 else ""
        raise HoldfastError(
            f"{folder} holds another run: {first} is {known.get(first, 'unset')} there and "
            f"{wanted.get(first, 'unset')} here{more}; choose another folder"
        )


def _flat(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by their dotted names."""
    flat: dict[str, Any] = {}
    for section, value in tree.items():
        flat |= (
            {f"{section}.{key}": inner for key, inner in value.items()} if isinstance(value, dict) else {section: value}
        )
    return flat


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
        if federation.loaded:
            bar.console.print(federation.loaded.sentence, highlight=False, markup=False, emoji=False, soft_wrap=True)
        if not done and not overall:
            bar.console.print(f"{name}: {_outlook(config, data, federation)}", highlight=False, soft_wrap=True)
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
                    if not overall:  # rows of several runs would be mixed up
                        bar.note(finished.line)
                    bar.update(task, note=note)
                    if bar.disable and plan.ends_task(done - 1):
                        bar.console.print(f"{name}: {note}", highlight=False)  # for a log file
        if overall:
            bar.remove_task(task)
    assert counts is not None
    return counts


def _outlook(config: Config, data: DataSet, federation: Federation) -> str:
    text = outlook(federation.plan, data, federation.enrolment.training)
    unsaid = own_images(config) and config.data.flip is None
    hint = "; images are not mirrored: if left and right do not matter, set data.flip=true"
    return text + hint * unsaid


def _note(line: Mapping[str, Any], plan: Plan) -> str:
    where = f"task {line['task']}/{len(plan.tasks)}, round {line['round']}/{plan.rounds}"
    return f"{where}, accuracy {line['accuracy']:.1%}"


def _write_model(file: Path, config: Config, federation: Federation) -> None:
    enrolment, registry = federation.enrolment, federation.server.registry
    facts = model_facts(config, enrolment.spec, enrolment.transform, registry.names, registry.growths)
    write_model(file, federation.server.weights, facts)


def model_facts(
    config: Config, spec: ModelSpec, transform: Transform, classes: Sequence[str], growths: Sequence[int]
) -> dict[str, Any]:
    """What must be known to use the weights of a run's model."""
    return {
        "classes": classes,
        "growths": growths,
        "method": to_tree(config)["method"],
        "backbone": spec.backbone,
        "norm": spec.norm,
        "width": spec.width,
        "image_size": spec.image_size,
        "mean": transform.mean,
        "std": transform.std,
    }


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
