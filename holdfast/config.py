"""All settings: read once from TOML and flags, validated once, and frozen."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass
from pydantic.fields import FieldInfo

from holdfast.data.settings import DataSettings
from holdfast.data.sources import SOURCE_TABLE, source_of
from holdfast.engines.settings import RunSettings
from holdfast.errors import HoldfastError, nearest
from holdfast.extensions import allow
from holdfast.files import LONGEST, parse_toml, read_limited, sha256_of
from holdfast.methods import METHOD_TABLE
from holdfast.methods.base import Method
from holdfast.methods.settings import TrainSettings, with_aggregator
from holdfast.models import BACKBONE_TABLE
from holdfast.models.settings import ModelSettings
from holdfast.protocol.enrolment import Preset
from holdfast.settings import setting
from holdfast.simulation.settings import FaultSettings, PlanSettings

CONFIGS = Path(__file__).parent / "configs"
Metrics = Literal["whole", "batchwise128"]


@dataclass(frozen=True, config=ConfigDict(extra="forbid", arbitrary_types_allowed=True))
class Config:
    """Everything that decides a run."""

    method: Method
    method_name: str  # as other processes find its class
    seed: Annotated[int, Field(ge=0, lt=2**63)] = setting(
        2021, "seed of the plan, the initial weights, batches and augmentation"
    )
    metrics: Metrics = setting(
        "whole",
        "which F1 and recall to show: whole (over the whole test set), or batchwise128 (also those averaged over "
        "batches of 128, the only way the paper's can have been computed); both are always recorded",
    )
    data: DataSettings = Field(default_factory=DataSettings)
    plan: PlanSettings = Field(default_factory=PlanSettings)
    model: ModelSettings = Field(default_factory=ModelSettings)
    train: TrainSettings = Field(default_factory=TrainSettings)
    run: RunSettings = Field(default_factory=RunSettings)
    faults: FaultSettings = Field(default_factory=FaultSettings)


LONGEST_NAME = 4  # words of a setting: for.method.section.key
PRESET = [field.name for field in fields(Preset)]
SECTIONS: dict[str, type] = {
    "data": DataSettings,
    "plan": PlanSettings,
    "model": ModelSettings,
    "train": TrainSettings,
    "run": RunSettings,
    "faults": FaultSettings,
}


def load_config(source: Path | Mapping[str, Any] | None = None, settings: Sequence[tuple[str, Any]] = ()) -> Config:
    """The config of a TOML file or its content, overridden by `settings` (dotted key, value). `source` may
    also be the name of a packaged config, such as demo."""
    tree = _plain(dict(source) if isinstance(source, Mapping) else _read_toml(config_file(source)) if source else {})
    per_method = _table("for", tree.pop("for", {}))
    own = {known: _table(f"for.{known}", values) for known, values in per_method.items()}
    for known, values in own.items():
        if not METHOD_TABLE.knows(known):
            hint = nearest(known, METHOD_TABLE.all())
            raise HoldfastError(f"unknown method {known!r} in table [for.{known}]; {hint}")
        wrong = [section for section in values if section not in ("method", *SECTIONS)]
        wrong += ["method.name"] * ("name" in _table("method", values.get("method", {})))
        if wrong:
            raise HoldfastError(f"[for.{known}] may hold settings such as train.lr or method.<field>, not {wrong[0]!r}")
    flags: dict[str, Any] = {}
    for key, value in settings:
        _put(flags, key.split("."), _plain(value))
    written = _table("method", tree.get("method", {})).get("name", "fedavg")
    name = _table("method", flags.get("method", {})).get("name", written)
    if name != written:  # the file's hyper-parameters belong to another method
        tree = {**tree, "method": {}}
    return _build_config(_overlay(_overlay(tree, own.get(str(name), {})), flags))


TOP = ("seed", "metrics")  # settings outside the sections


def _build_config(tree: Mapping[str, Any]) -> Config:
    """Validates nested plain values; raises HoldfastError with one sentence about the first error."""
    rest = dict(tree)
    method_fields = {"name": "fedavg", **_table("method", rest.pop("method", {}))}
    name = method_fields.pop("name")
    if not isinstance(name, str):
        raise METHOD_TABLE.unknown(name)
    allow(name)
    method: Method = _build("method", METHOD_TABLE.find(name), method_fields)
    if "train" in rest:
        rest["train"] = with_aggregator(_table("train", rest["train"]))
    sections = {
        section: _build(section, kind, _table(section, rest.pop(section, {}))) for section, kind in SECTIONS.items()
    }
    for key in rest:
        if key not in TOP:
            hint = _elsewhere(key, method) or nearest(key, [*TOP, "method", *SECTIONS])
            raise HoldfastError(f"unknown setting {key!r}; {hint}")
    stored = {"method": method, "method_name": METHOD_TABLE.stored_name(name)}
    config: Config = _build("", Config, {**stored, **sections, **rest})
    return _resolve(config)


def _resolve(config: Config) -> Config:
    """Fills missing settings from the method's preset and the data set's defaults."""
    for name in (config.data.name, config.model.name):
        allow(name)
    source = source_of(config.data.name)
    BACKBONE_TABLE.find(config.model.name)
    data = replace(_fill(config.data, source.defaults), name=SOURCE_TABLE.stored_name(config.data.name))
    model = replace(config.model, name=BACKBONE_TABLE.stored_name(config.model.name))
    if model.weights and not model.weights_sha256:
        model = replace(model, weights_sha256=_sha256_of(model.weights))
    train = _fill(config.train, {"schedule": config.method.preset.schedule})
    steps = {"milestones", "gamma"}
    if train.schedule == "cosine" and (train.milestones is not None or train.gamma is not None):
        raise HoldfastError(
            "train.milestones and train.gamma belong to train.schedule=steps; the schedule is cosine here"
        )
    preset = {
        key: value
        for key, value in asdict(config.method.preset).items()
        if train.schedule == "steps" or key not in steps
    }
    return replace(config, data=data, model=model, train=_fill(train, preset))


def _sha256_of(weights: str) -> str:
    try:
        return sha256_of(Path(weights))
    except OSError as error:
        raise HoldfastError(
            f"cannot read model.weights={weights!r}: {error.strerror}; give the path of a file"
        ) from error


def _fill(settings: Any, defaults: Mapping[str, Any]) -> Any:
    missing = {key: value for key, value in defaults.items() if getattr(settings, key) is None}
    return replace(settings, **missing)


def to_tree(config: Config) -> dict[str, Any]:
    """The config as nested plain values, without unset ones."""
    tree: dict[str, Any] = {key: getattr(config, key) for key in TOP}
    tree["method"] = {"name": config.method_name, **_given(config.method)}
    sections = {section: _given(getattr(config, section)) for section in SECTIONS}
    return {**tree, **{section: values for section, values in sections.items() if values}}


def _given(settings: Any) -> dict[str, Any]:
    return _set(asdict(settings))


def _set(values: Mapping[str, Any]) -> dict[str, Any]:
    """Without what is not set, in inner tables too."""
    given = {key: value for key, value in values.items() if value is not None}
    return {key: _set(value) if isinstance(value, dict) else value for key, value in given.items()}


def to_toml(config: Config) -> str:
    """The config as a TOML file that `load_config` reads back."""
    lines = []
    for name, value in to_tree(config).items():
        if isinstance(value, dict):
            lines += ["", f"[{name}]", *(f"{key} = {_toml(inner)}" for key, inner in value.items())]
        else:
            lines.append(f"{name} = {_toml(value)}")
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_toml(inner)}" for key, inner in value.items()) + " }"
    # JSON's strings, numbers, booleans and lists are valid TOML if characters are not written as surrogate pairs.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def parse_setting(text: str) -> tuple[str, Any]:
    """`section.key=value` as a dotted key and a value; a value that is not TOML is a string."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise HoldfastError(f"--set {text!r} is not of the form section.key=value, for example --set train.lr=0.1")
    try:
        return key.strip(), parse_toml(f"value = {value}")["value"]
    except ValueError:
        return key.strip(), value


def tasks_setting(text: str) -> tuple[str, Any]:
    """The setting for --tasks: a number of tasks, or their sizes separated by commas."""
    return parse_setting(f"plan.tasks=[{text}]" if "," in text and "[" not in text else f"plan.tasks={text}")


def describe(method: str | None = None) -> list[tuple[str, str, str]]:
    """Every setting: its dotted name, its default and its description. For a method, only those that it has, with its
    own presets."""
    methods = METHOD_TABLE.all()
    if method is not None and method not in methods:
        allow(method)
        methods[method] = METHOD_TABLE.find(method)
    preset = asdict(methods[method]().preset) if method else {}
    if preset.get("schedule") == "cosine":
        preset |= dict.fromkeys(("milestones", "gamma"))
    rows = [(key, _toml(info.default), str(info.description)) for key, info in _fields(Config) if key in TOP]
    for section, kind in SECTIONS.items():
        for key, info in _fields(kind):
            own = "(preset)" if key not in preset else "" if preset[key] is None else _toml(preset[key])
            default = own if key in PRESET else "" if info.default is None else _toml(info.default)
            rows.append((f"{section}.{key}", default, info.description or ""))
    rows.append(("method.name", "fedavg", "method: " + ", ".join(methods) + ", or module:Class of your own"))
    for name, cls in methods.items():
        for key, info in _fields(cls) if method in (None, name) else []:
            default = "" if info.default is None else _toml(info.default)
            rows.append((f"method.{key}", default, f"{name}: {info.description or 'a setting of this method'}"))
    return rows


def _fields(kind: type) -> list[tuple[str, FieldInfo]]:
    return list(kind.__pydantic_fields__.items())  # type: ignore[attr-defined]


def _elsewhere(key: str, method: Any = None) -> str:
    """A hint for a key that stands outside of its section."""
    sections = {**SECTIONS, **({"method": type(method)} if method else {})}
    found = [f"{section}.{key}" for section, kind in sections.items() if key in [field.name for field in fields(kind)]]
    return f"did you mean {' or '.join(map(repr, found))}?" if found else ""


def _plain(value: Any) -> Any:
    """The value as TOML has it: NumPy's numbers and arrays, tuples and paths may come from Python."""
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, list | tuple | range):
        return [_plain(inner) for inner in value]
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def config_file(source: Path) -> Path:
    """The config that is meant: a file, or else the packaged config of this name (demo, demo.toml or
    configs/demo.toml)."""
    if source.exists() or source.parent not in (Path(), Path("configs")):
        return source
    packaged = {file.stem: file for file in CONFIGS.glob("*.toml")}
    name = source.name.removesuffix(".toml")
    if name not in packaged:
        raise HoldfastError(
            f"there is no config {str(source)!r}; give the path of a TOML file, or the name of a packaged config: "
            f"{nearest(name, packaged)}"
        )
    return packaged[name]


def _read_toml(file: Path) -> dict[str, Any]:
    try:
        return parse_toml(read_limited(file, LONGEST).decode("utf-8-sig"))
    except OSError as error:
        raise HoldfastError(f"cannot read the config {file}: {error.strerror}; give the path of a TOML file") from error
    except ValueError as error:
        raise HoldfastError(f"the config {file} is not TOML: {error}; see configs/ for examples") from error


def _put(tree: dict[str, Any], path: list[str], value: Any) -> None:
    if len(path) > LONGEST_NAME:
        raise HoldfastError(f"unknown setting {'.'.join(path)[:80]!r}; settings are named section.key")
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
        if not isinstance(tree, dict):
            raise HoldfastError(f"unknown setting {'.'.join(path)!r}; settings are named section.key")
    tree[path[-1]] = value


def _overlay(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        both = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
        merged[key] = _overlay(merged[key], value) if both else value
    return merged


def _table(section: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise HoldfastError(f"{section} = {value!r} should be a table of settings, such as [{section}]")
    return dict(value)


def _build(section: str, kind: type, values: Mapping[str, Any]) -> Any:
    """An instance of a settings class; raises HoldfastError with one sentence about the first error."""
    known = [field.name for field in fields(kind)]
    dot = f"{section}." if section else ""
    for key in values:
        if key not in known:
            hint = nearest(key, known) if known else f"{section} has no settings here"
            hint = _elsewhere(key) or hint
            raise HoldfastError(f"unknown setting '{dot}{key}'; {hint}")
    try:
        return kind(**values)
    except ValidationError as error:
        where = error.errors()[0]["loc"][:1]
        key = str(where[0]) if where else section
        # Of a union, report the alternative that was meant: a list with a wrong entry, or a wrong number.
        forms = [problem for problem in error.errors() if problem["loc"][:1] == where]
        first = forms[-1 if isinstance(values.get(key), list) else 0]
        reason = first["msg"][0].lower() + first["msg"][1:]
        raise HoldfastError(f"{dot}{key} = {values.get(key)!r} is not possible: {reason}") from error
