"""Several experiments, one after another: complete runs are not repeated, stopped runs continue."""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.progress import TextColumn

from holdfast.config import Config, load_config, parse_setting, to_tree
from holdfast.data.sources import load_data
from holdfast.errors import HoldfastError
from holdfast.experiment import Overall, Run, own_images, plan_of, run_name, run_to_folder
from holdfast.progress import progress_bar
from holdfast.results.archive import split_address
from holdfast.results.record import read_config, read_result
from holdfast.results.runs import runs_below
from holdfast.results.stored import stored
from holdfast.results.tables import differences, settings_of

NAME = r"[\w.:-]+"
ONE = rf"\s*{NAME}\s*(\[[^\[\]]*\]\s*)?"
LIST = re.compile(f"{ONE}(,{ONE})*")
SPEC = re.compile(rf"\s*({NAME})\s*(?:\[(.*)\])?\s*")


@dataclass(frozen=True)
class Spec:
    """A method and its settings: `lga[cbl=false]`, `fedavg[replay=true, train.lr=0.05]`."""

    name: str
    settings: tuple[tuple[str, Any], ...] = ()

    @property
    def text(self) -> str:
        """As a user writes it."""
        words = [
            f"{key.removeprefix('method.')}={value if isinstance(value, str) else json.dumps(value)}"
            for key, value in self.settings
        ]
        return f"{self.name}[{','.join(words)}]" if words else self.name


def parse_specs(text: str) -> list[Spec]:
    """Methods separated by commas; a key in brackets without a section is a setting of the method."""
    parts = [SPEC.fullmatch(part) for part in re.findall(r"[^,\[\]]+(?:\[[^\]]*\])?", text)]
    if not LIST.fullmatch(text) or not all(parts):
        raise HoldfastError(f"--methods {text!r} is not a list such as fedavg,lga[cbl=false]; see 'holdfast methods'")
    specs = []
    for match in filter(None, parts):
        part = match[0]
        words = [one.strip() for one in (match[2] or "").split(",") if one.strip()]
        for word in words:
            if not word.partition("=")[0].strip() or "=" not in word:
                raise HoldfastError(
                    f"--methods {part.strip()!r}: {word!r} is not of the form key=value, as in lga[cbl=false]; "
                    "put settings that are lists into a config"
                )
        pairs = [parse_setting(word) for word in words]
        settings = tuple((key if "." in key else f"method.{key}", value) for key, value in pairs)
        if "method.name" in dict(settings):
            raise HoldfastError(f"--methods {part.strip()!r} names two methods; name only one")
        specs.append(Spec(match[1], settings))
    return specs


def names_of_specs(specs: Sequence[Spec], configs: Sequence[Config]) -> list[str]:
    """What to call each method of a comparison; `configs` has one config per spec, all with the same seed.

    A method is called by its label, unless the label is ambiguous or leaves out a setting; then by its spec. Settings
    that a config has for some methods only are added. Specs that come to the same experiment share one name, which
    lists them."""
    runs = [run_name(config) for config in configs]
    labels = {run: config.method.title(config.model.name) for run, config in zip(runs, configs, strict=True)}
    texts: dict[str, dict[str, None]] = {run: {} for run in runs}
    said: dict[str, set[str]] = {run: set() for run in runs}
    for run, spec in zip(runs, specs, strict=True):
        texts[run][spec.text] = None
        said[run] |= {key for key, _ in spec.settings if not key.startswith("method.")}
    several = Counter(labels.values())
    unsaid = differences(
        dict(zip(runs, (settings_of(to_tree(config)) for config in configs), strict=True)), ("plan", "model")
    )
    names = {}
    for run, label in labels.items():
        alone = len(texts[run]) == 1 and several[label] == 1 and not said[run]
        words = [word for word in unsaid[run] if word.partition("=")[0] not in said[run]]
        names[run] = (label if alone else " = ".join(texts[run])) + (f" ({', '.join(words)})" if words else "")
    return [names[run] for run in runs]


def one_protocol(specs: Sequence[Spec], configs: Sequence[Config]) -> None:
    """Raises HoldfastError if a method of a comparison has other images or tasks; `configs` has one config per spec."""
    trees = [to_tree(config) for config in configs]
    keys = [("data", key) for key in {key: None for tree in trees for key in tree["data"]}]
    for section, key in [*keys, ("plan", "tasks"), ("plan", "order")]:
        for spec, tree in zip(specs, trees, strict=True):
            here, there = tree[section].get(key), trees[0][section].get(key)
            if here != there:
                raise HoldfastError(
                    f"{spec.text} has {section}.{key}={here} and {specs[0].text} has {there}, so they cannot be "
                    f"compared; set {section}.{key} for all methods"
                )


def parse_seeds(text: str) -> list[int]:
    try:
        seeds = [int(part) for part in text.split(",")]
    except ValueError:
        raise HoldfastError(f"--seeds {text!r} is not a list such as 2021,2022,2023") from None
    return list(dict.fromkeys(seeds))


def known_runs(folder: Path, needs: str | None = None) -> dict[str, Path]:
    """The complete runs in folders and archives anywhere below `folder`, by their config's name; only those with a
    picture called `needs`. A run of one's own images is known by its folder alone, for an archive does not tell whether
    they have changed."""
    known = {}
    for run in runs_below(folder):
        if needs and not stored(run).picture(needs):
            continue
        with suppress(HoldfastError):  # a config of another version
            tree = read_config(run)
            config = load_config(tree) if tree else None
            if config and not (own_images(config) and split_address(run)):
                known[run_name(config)] = run
    return known


def run_all(configs: Sequence[Config], folder: Path, needs: str | None = None) -> list[Run]:
    """Runs each config that has no complete run anywhere below `folder`, under one progress bar. A run without a file
    called `needs` is not complete."""
    unique = {run_name(config): config for config in configs}
    known = known_runs(folder, needs)
    runs = {
        name: run_to_folder(config, known[name])
        if own_images(config)
        else Run(known[name], read_result(known[name]), False)
        for name, config in unique.items()
        if name in known
    }
    unique = {name: config for name, config in unique.items() if name not in known}
    lengths = _lengths(unique)
    if not unique:
        return [runs[run_name(config)] for config in configs]
    done = 0
    with progress_bar(TextColumn("{task.fields[note]}")) as bar:
        all_runs = bar.add_task("all runs", total=sum(lengths.values()), note=f"0 of {len(unique)}")
        for name, config in unique.items():
            runs[name] = run_to_folder(config, folder / name, Overall(bar, all_runs))
            done += 1
            bar.update(all_runs, note=f"{done} of {len(unique)}")
            if bar.disable:  # standard error is a log file
                bar.console.print(f"{done} of {len(unique)} runs: {name}", highlight=False)
    return [runs[run_name(config)] for config in configs]


def _lengths(configs: Mapping[str, Config]) -> dict[str, int]:
    """How many times a client trains in each run; the same for all runs that differ in their method alone."""
    known: dict[str, int] = {}
    lengths = {}
    for name, config in configs.items():
        key = repr((config.data, config.plan))
        if key not in known:
            known[key] = sum(map(len, plan_of(config, load_data(config.data)).selected))
        lengths[name] = known[key]
    return lengths


def grid(build: Callable[[list[tuple[str, Any]]], Config], specs: Iterable[Spec], seeds: Iterable[int]) -> list[Config]:
    """The config of each method with each seed; `build(settings)` makes one."""
    seeds = list(seeds)
    return [build([("method.name", spec.name), *spec.settings, ("seed", seed)]) for spec in specs for seed in seeds]
