"""What others add: by registration, entry point or `module:Class`; what is wrong with it is one sentence."""

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from own_things import CALM, HEADER

import holdfast
from holdfast import extensions
from holdfast.client.client import Client
from holdfast.client.data import ClientImages
from holdfast.config import describe, load_config, to_toml
from holdfast.data.images import DataSet, Images, ImageSet
from holdfast.data.settings import DataSettings
from holdfast.data.sources import SOURCE_TABLE, Source, load_data
from holdfast.engines.pool import Pool
from holdfast.engines.serial import Serial
from holdfast.errors import HoldfastError
from holdfast.experiment import build_federation, choose_engine, plan_of, pool_of, run_name
from holdfast.methods import METHOD_TABLE, method_of
from holdfast.models import BACKBONE_TABLE
from holdfast.simulation.rounds import run_rounds

MISTAKES = (
    HEADER
    + """
class NoMethod:
    name, about = "no", "no method"

class Bare(Method):
    name, about = "bare", "without the decorator"

@dataclass(frozen=True, config=STRICT)
class Nameless(Method):
    about: ClassVar[str] = "no name"

@dataclass(frozen=True, config=STRICT)
class Silent(Method):
    name: ClassVar[str] = "silent"

@dataclass(frozen=True, config=STRICT)
class Thief(Method):
    name: ClassVar[str] = "lga"
    about: ClassVar[str] = "a built-in name"

@dataclass(frozen=True, config=STRICT)
class Needy(Method):
    name: ClassVar[str] = "needy"
    about: ClassVar[str] = "a setting without a default"
    weight: float

@dataclass(frozen=True, config=STRICT)
class Odd(Method):
    name: ClassVar[str] = "odd"
    about: ClassVar[str] = "a default that no config can hold"
    weight: complex = 1j

class NoModule:
    pass

number = 3
"""
)


@pytest.fixture(autouse=True)
def apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Every test has its own current folder, modules, import paths and tables."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(extensions, "_allowed", set())
    for table in (METHOD_TABLE, BACKBONE_TABLE, SOURCE_TABLE):
        for name in ("registered", "_loaded"):
            monkeypatch.setattr(table, name, {})
        monkeypatch.setattr(table, "_broken", set())
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if getattr(sys.modules[name], "__file__", None) and str(tmp_path) in str(sys.modules[name].__file__):
            del sys.modules[name]


def packaged(folder: Path, points: str) -> None:
    """An installed package `mylab` with these entry points."""
    (folder / "site").mkdir()
    (folder / "site" / "mylab.py").write_text(CALM)
    info = folder / "site" / "mylab-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mylab\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(points)
    sys.path.insert(0, str(folder / "site"))


def federation_of(settings: dict[str, Any]) -> Any:
    config = load_config(settings)
    data = load_data(config.data)
    return config, data, build_federation(config, data, plan_of(config, data))


def played(settings: dict[str, Any], workers: int = 0) -> list[Any]:
    """The lines of a run, and its final weights; in this process, or by workers."""
    _, data, federation = federation_of(settings)
    with pool_of(federation, data, workers) if workers else Serial() as engine:
        lines = [{**done.line, "seconds": None} for done in run_rounds(federation, engine)]
    return [lines, {name: tensor.tolist() for name, tensor in federation.server.weights.items()}]


# the four ways to a name


def test_a_class_of_the_current_folder_has_the_same_bits_in_workers(small: dict[str, Any], tmp_path: Path) -> None:
    """Its backbone draws from torch's global generators: in its constructor, and for its dropout."""
    (tmp_path / "mine.py").write_text(CALM)
    settings = {**small, "method": {"name": "mine:Calm", "weight": 0.5}, "model": {"name": "mine:Net"}}
    state = torch.get_rng_state()
    alone = played(settings)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(1)
    assert played(settings, workers=2) == alone
    assert alone[0][-1]["losses"]["penalty"] > 0
    assert played({**settings, "seed": 1})[1] != alone[1]


def test_the_written_config_names_the_class_and_is_read_back(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(CALM)
    flags = [("method.name", "mine:Calm"), ("model.name", "mine:Net"), ("data.name", "mine:cells")]
    config = load_config(None, flags)
    (tmp_path / "config.toml").write_text(to_toml(config))
    text = (tmp_path / "config.toml").read_text()
    assert all(f'name = "{place}"' in text for _, place in flags)
    assert load_config(tmp_path / "config.toml") == config
    assert run_name(config).startswith("mine-cells-calm-seed2021-")
    assert config.method.label == "calm"


def test_entry_points_are_found_listed_and_described(small: dict[str, Any], tmp_path: Path, holdfast: Any) -> None:
    points = "[holdfast.methods]\ncalm = mylab:Calm\n[holdfast.backbones]\nnet = mylab:Net\n"
    packaged(tmp_path, points + "[holdfast.datasets]\ncells = mylab:cells\n")
    assert "calm" in holdfast("methods")[1]
    _, listed, _ = holdfast("data", "list")
    assert "cells" in listed
    assert "Squares and noise." in listed
    code, info, _ = holdfast("data", "info", "cells")
    assert code == 0
    assert "4 classes, 80 training" in info
    assert ("method.weight", "0.1", "calm: weight of the penalty") in describe()
    assert "net" in holdfast("settings")[1].split("further backbones")[1]
    plan = {**small["plan"], "tasks": 2}
    settings = {"data": {"name": "cells"}, "plan": plan, "train": small["train"], "method": {"name": "calm"}}
    settings["model"] = {"name": "net"}
    config, _, _ = federation_of(settings)
    assert (config.method_name, config.model.name, config.data.name) == ("calm", "net", "cells")
    assert played(settings) == played(settings, workers=1)


def test_what_a_module_registers_is_stored_as_its_class(small: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(CALM)
    sys.path.append(str(tmp_path))
    import mine  # type: ignore[import-not-found]

    assert holdfast.register_method(mine.Calm) is mine.Calm
    holdfast.register_backbone("net", mine.Net)
    holdfast.register_dataset("cells", mine.cells)
    holdfast.register_method(mine.Calm)  # again, as a notebook does
    names = [("method.name", "calm"), ("model.name", "net"), ("data.name", "cells")]
    config = load_config(None, names)
    assert (config.method_name, config.model.name, config.data.name) == ("mine:Calm", "mine:Net", "mine:cells")
    assert config == load_config(None, [("method.name", "mine:Calm"), *names[1:]])
    settings = {**small, "method": {"name": "calm"}, "model": {"name": "net"}}
    assert played(settings) == played(settings, workers=1)


def test_what_only_this_process_knows_keeps_to_one_process(
    small: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    space: dict[str, Any] = {"__name__": "__main__"}
    exec(CALM, space)
    holdfast.register_method(space["Calm"])
    config, data, federation = federation_of({**small, "method": {"name": "calm"}, "train": {"epochs": 500}})
    assert isinstance(choose_engine(replace(config, run=replace(config.run, workers=2)), data, federation), Serial)
    assert "the method 'calm' is defined in a script or notebook" in capsys.readouterr().err
    with pytest.raises(HoldfastError, match=r"its own file, or use run\.engine=serial"):
        choose_engine(replace(config, run=replace(config.run, engine="pool")), data, federation)
    played({**small, "method": {"name": "calm"}})
    with (
        choose_engine(  # a built-in method does use workers
            load_config({**small, "run": {"engine": "pool", "workers": 2}}), *federation_of(small)[1:]
        ) as engine
    ):
        assert isinstance(engine, Pool)


def test_a_registered_data_set_is_used(small: dict[str, Any]) -> None:
    @holdfast.register_dataset("squares")
    def squares(settings: DataSettings) -> DataSet:
        """Grey squares."""
        assert settings.path == "/here"
        pixels = np.repeat(np.arange(60, dtype=np.uint8), 3 * 16 * 16).reshape(60, 3, 16, 16)
        part = ImageSet(Images.of(pixels), torch.arange(60) % 6)
        return DataSet("squares", tuple("abcdef"), part, part, (0.5,) * 3, (0.25,) * 3, flip=True)

    data = load_data(load_config({"data": {"name": "squares", "classes": 4, "path": "/here"}}).data)
    assert data.classes == tuple("abcd")
    assert len(data.train) == 40
    holdfast.register_dataset("as a source".replace(" ", "-"), Source("S", "more of it", {"size": 16}, squares))
    assert load_config({"data": {"name": "as-a-source"}}).data.size == 16


# mistakes


@pytest.mark.parametrize(
    ("place", "says"),
    [
        ("mistakes:NoMethod", "is not a subclass of holdfast.methods.base.Method"),
        ("mistakes:Bare", "lacks the line @dataclass(frozen=True, config=STRICT) above class Bare"),
        ("mistakes:Nameless", "needs a line of text as its name"),
        ("mistakes:Silent", "needs a line of text as its about"),
        ("mistakes:Thief", "has the name of a built-in method, 'lga'"),
        ("mistakes:Needy", "gives its setting 'weight' no default"),
        ("mistakes:Odd", "not plain values"),
        ("mistakes:Bar", "has no 'Bar'; did you mean 'Bare'?"),
        ("mistakes:number", "is not a subclass"),
        ("broken:Calm", "fails (ZeroDivisionError: division by zero)"),
        ("leaves:Calm", "fails (SystemExit: 3)"),
        ("halfway:Calm", "fails (ModuleNotFoundError: No module named 'nowhere')"),
        ("absent.part:Calm", "there is no module 'absent' for the method"),
        ("x", "choose one of afc"),
        ("calm", "(your own is named module:Class)"),
        ("no-module:Calm", "unknown method 'no-module:Calm'"),
    ],
)
def test_a_wrong_method_is_one_sentence(tmp_path: Path, place: str, says: str, holdfast: Any) -> None:
    (tmp_path / "mistakes.py").write_text(MISTAKES)
    (tmp_path / "broken.py").write_text("1 / 0")
    (tmp_path / "leaves.py").write_text("raise SystemExit(3)")
    (tmp_path / "halfway.py").write_text("import nowhere")
    code, _, said = holdfast("run", "--method", place)
    assert code == 2
    assert says in " ".join(said.split())
    assert len(said.splitlines()) == 1


@pytest.mark.parametrize(
    ("key", "place", "says"),
    [
        ("model.name", "mistakes:NoModule", "is not a torch.nn.Module"),
        ("model.name", "mistakes:number", "is neither a class nor a function"),
        ("model.name", "resnet", "did you mean 'resnet18'?"),
        ("data.name", "mistakes:NoModule", "is neither a function of DataSettings nor a Source"),
        ("data.name", "mistakes:absent", "has no 'absent'"),
    ],
)
def test_a_wrong_backbone_or_data_set_is_one_sentence(tmp_path: Path, key: str, place: str, says: str) -> None:
    (tmp_path / "mistakes.py").write_text(MISTAKES)
    with pytest.raises(HoldfastError) as error:
        load_config(None, [(key, place)])
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_a_data_set_that_is_none_is_said(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def cells(settings):\n    return [1]\n")
    with pytest.raises(HoldfastError, match="'mine:cells' gives a list, not a DataSet"):
        load_data(load_config({"data": {"name": "mine:cells"}}).data)


def test_names_that_are_taken_or_impossible_are_refused() -> None:
    with pytest.raises(HoldfastError, match="there is a method 'lga' already"):
        METHOD_TABLE.register("lga", METHOD_TABLE.find("lga"))
    with pytest.raises(HoldfastError, match="is no name for a backbone"):
        holdfast.register_backbone("../net", torch.nn.Identity)
    holdfast.register_backbone("net", torch.nn.Identity)
    with pytest.raises(HoldfastError, match="there is a backbone 'net' already"):
        holdfast.register_backbone("net", torch.nn.Flatten)


def test_a_broken_entry_point_is_one_warning(tmp_path: Path, holdfast: Any) -> None:
    packaged(tmp_path, "[holdfast.methods]\nbroken = absent:Calm\nother = mylab:Calm\n")
    code, listed, said = holdfast("methods")
    assert code == 0
    assert "lga" in listed
    warnings = said.splitlines()
    assert len(warnings) == 2
    assert "the method 'broken' of an installed package cannot be used" in warnings[0]
    assert "is called 'calm' in its class; use one name" in warnings[1]
    assert holdfast("methods")[2] == ""  # once per process
    code, _, said = holdfast("run", "--method", "broken")
    assert code == 2
    assert "importing absent:Calm fails" in said


def test_two_packages_with_one_name_are_told_apart(tmp_path: Path) -> None:
    packaged(tmp_path, "[holdfast.methods]\ncalm = mylab:Calm\n")
    info = tmp_path / "site" / "other-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[holdfast.methods]\ncalm = other:Calm\n")
    with pytest.raises(HoldfastError, match="several packages offer a method 'calm'"):
        load_config(None, [("method.name", "calm")])
    assert load_config(None, [("method.name", "mylab:Calm")]).method.name == "calm"


# who may name a module


def test_a_name_from_a_message_imports_nothing(small: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "trap.py").write_text("raise RuntimeError('imported')")
    sys.path.append(str(tmp_path))
    _, data, federation = federation_of(small)
    client = Client(ClientImages(data.train, data.classes))
    with pytest.raises(HoldfastError, match="'trap:Calm' may not be imported here"):
        client.receive(replace(federation.enrolment, method={"name": "trap:Calm"}))
    enrolment = replace(federation.enrolment, spec=replace(federation.enrolment.spec, backbone="trap:Net"))
    client.receive(enrolment)
    with pytest.raises(HoldfastError, match="'trap:Net' may not be imported here"):
        client.work._load("student", (), {})
    with pytest.raises(HoldfastError, match="fails"):  # the user's own word is enough
        load_config(None, [("method.name", "trap:Calm")])
    (tmp_path / "fine.py").write_text(CALM)
    with pytest.raises(HoldfastError, match="may not be imported"):
        method_of({"name": "fine:Calm"})
    extensions.allow("fine:Calm")
    assert method_of({"name": "fine:Calm", "weight": 0.3}).label == "calm weight=0.3"


def test_a_file_of_the_current_folder_replaces_no_module_of_a_package(tmp_path: Path) -> None:
    (tmp_path / "pydantic.py").write_text(CALM)
    with pytest.raises(HoldfastError, match="has no 'Calm'"):
        load_config(None, [("method.name", "pydantic:Calm")])


# mistakes in workers


def test_a_mistake_in_a_workers_loss_is_named_at_once(
    small: dict[str, Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text(CALM.replace("self.weight * logits", "self.wait * logits"))
    _, data, federation = federation_of({**small, "method": {"name": "mine:Calm"}})
    with pool_of(federation, data, 1) as pool, pytest.raises(HoldfastError) as error:
        list(run_rounds(federation, pool))
    assert "'Calm' object has no attribute 'wait'" in str(error.value)
    assert "mine.py, line" in str(error.value)
    assert "self.wait * logits" in capfd.readouterr().err  # the traceback


def test_a_worker_that_cannot_import_says_so_at_once(small: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(CALM)
    _, data, federation = federation_of({**small, "method": {"name": "mine:Calm"}})
    (tmp_path / "mine.py").unlink()
    with pool_of(federation, data, 1) as pool, pytest.raises(HoldfastError, match="there is no module 'mine'"):
        list(run_rounds(federation, pool))
