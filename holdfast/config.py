"""All settings: read once from TOML and flags, validated once, and frozen."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass
from pydantic.fields import FieldInfo

from holdfast.data.settings import DataSettings
from holdfast.data.sources import source_of
from holdfast.engines.settings import RunSettings
from holdfast.errors import HoldfastError, nearest
from holdfast.files import LONGEST, parse_toml, read_limited
from holdfast.methods import METHODS
from holdfast.methods.base import Method
from holdfast.methods.settings import TrainSettings
from holdfast.models import BACKBONES
from holdfast.models.settings import ModelSettings
from holdfast.protocol.enrolment import Preset
from holdfast.settings import setting
from holdfast.simulation.settings import PlanSettings

Metrics = Literal["whole", "batchwise128"]


@dataclass(frozen=True, config=ConfigDict(extra="forbid", arbitrary_types_allowed=True))
class Config:
    """Everything that decides a run."""

    method: Method
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


LONGEST_NAME = 4  # words of a setting: for.method.section.key
PRESET = [field.name for field in fields(Preset)]
SECTIONS: dict[str, type] = {
    "data": DataSettings,
    "plan": PlanSettings,
    "model": ModelSettings,
    "train": TrainSettings,
    "run": RunSettings,
}


def load_config(source: Path | Mapping[str, Any] | None = None, settings: Sequence[tuple[str, Any]] = ()) -> Config:
    """The config of a TOML file or its content, overridden by `settings` (dotted key, value)."""
    tree = dict(source) if isinstance(source, Mapping) else _read_toml(source) if source else {}
    per_method = _table("for", tree.pop("for", {}))
    own = {known: _table(f"for.{known}", values) for known, values in per_method.items()}
    for known, values in own.items():
        if known not in METHODS:
            raise HoldfastError(f"unknown method {known!r} in table [for.{known}]; {nearest(known, METHODS)}")
        wrong = [section for section in values if section not in ("method", *SECTIONS)]
        wrong += ["method.name"] * ("name" in _table("method", values.get("method", {})))
        if wrong:
            raise HoldfastError(f"[for.{known}] may hold settings such as train.lr or method.<field>, not {wrong[0]!r}")
    flags: dict[str, Any] = {}
    for key, value in settings:
        _put(flags, key.split("."), value)
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
    if not isinstance(name, str) or name not in METHODS:
        raise HoldfastError(f"unknown method {name!r}; {nearest(str(name), METHODS)}")
    method: Method = _build("method", METHODS[name], method_fields)
    sections = {
        section: _build(section, kind, _table(section, rest.pop(section, {}))) for section, kind in SECTIONS.items()
    }
    for key in rest:
        if key not in TOP:
            raise HoldfastError(f"unknown setting {key!r}; {nearest(key, [*TOP, 'method', *SECTIONS])}")
    config: Config = _build("", Config, {"method": method, **sections, **rest})
    return _resolve(config)


def _resolve(config: Config) -> Config:
    """Fills missing settings from the method's preset and the data set's defaults."""
    source = source_of(config.data.name)
    if config.model.name not in BACKBONES:
        raise HoldfastError(
            f"unknown backbone model.name={config.model.name!r}; {nearest(config.model.name, BACKBONES)}"
        )
    data = _fill(config.data, source.defaults)
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
    return replace(config, data=data, train=_fill(train, preset))


def _fill(settings: Any, defaults: Mapping[str, Any]) -> Any:
    missing = {key: value for key, value in defaults.items() if getattr(settings, key) is None}
    return replace(settings, **missing)


def to_tree(config: Config) -> dict[str, Any]:
    """The config as nested plain values, without unset ones."""
    tree: dict[str, Any] = {key: getattr(config, key) for key in TOP}
    tree["method"] = {"name": config.method.name, **_given(config.method)}
    return {**tree, **{section: _given(getattr(config, section)) for section in SECTIONS}}


def _given(settings: Any) -> dict[str, Any]:
    return {key: value for key, value in asdict(settings).items() if value is not None}


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


def describe() -> list[tuple[str, str, str]]:
    """Every setting: its dotted name, its default and its description."""
    rows = [(key, _toml(info.default), str(info.description)) for key, info in _fields(Config) if key in TOP]
    for section, kind in SECTIONS.items():
        for key, info in _fields(kind):
            default = "(preset)" if key in PRESET else "" if info.default is None else _toml(info.default)
            rows.append((f"{section}.{key}", default, info.description or ""))
    rows.append(("method.name", "fedavg", "method: " + ", ".join(METHODS)))
    for name, cls in METHODS.items():
        for key, info in _fields(cls):
            default = "" if info.default is None else _toml(info.default)
            rows.append((f"method.{key}", default, f"{name}: {info.description}"))
    return rows


def _fields(kind: type) -> list[tuple[str, FieldInfo]]:
    return list(kind.__pydantic_fields__.items())  # type: ignore[attr-defined]


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
