"""The estimate of a run's memory: against what autograd really stores and what a process really takes."""

import json
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from holdfast import experiment
from holdfast.config import load_config
from holdfast.data.sources import load_data
from holdfast.errors import HoldfastError
from holdfast.experiment import memory_needed, plan_of, run_to_folder
from holdfast.models.incremental import IncrementalModel, ModelSpec
from holdfast.paper.items import Experiment
from holdfast.privacy.reconstruct import group_bytes, group_size
from holdfast.reproduce import config_of, plan_without_images
from holdfast.seeding import torch_generator
from holdfast.simulation.memory import Memory, activations, machine_memory


@pytest.mark.parametrize(("name", "size"), [("convnet", 32), ("resnet18", 32), ("resnet18", 96)])
def test_activations_are_what_autograd_stores(name: str, size: int) -> None:
    spec = ModelSpec(name, "batch", size, 16)
    found, largest = activations(IncrementalModel(spec, torch_generator(0)), size)
    model = IncrementalModel(spec, torch_generator(0)).train()
    model.grow(1, torch_generator(1))
    own = {tensor.data_ptr() for tensor in model.state_dict().values()}
    kept: dict[int, Tensor] = {}  # the tensors themselves, so that no address is used twice

    def keep(tensor: Tensor) -> Tensor:
        kept.setdefault(tensor.data_ptr(), tensor)
        return tensor

    images = torch.randn(2, 3, size, size).to(memory_format=torch.channels_last)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(images).logits.sum()
    sizes = [tensor.untyped_storage().nbytes() / 2 for place, tensor in kept.items() if place not in own]
    assert found == pytest.approx(sum(sizes), rel=0.02)
    assert largest == pytest.approx(max(sizes), rel=0.02)


PEAK = """
import sys, torch
from holdfast.config import load_config
from holdfast.experiment import run_to_folder
from pathlib import Path
run_to_folder(load_config(eval(sys.argv[1])), Path(sys.argv[2]))
print([int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmHWM")][0])
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_the_estimate_is_near_what_a_process_takes(tmp_path: Any) -> None:
    tree = {
        "data": {"name": "glyphs", "classes": 4, "train_per_class": 64, "test_per_class": 4, "size": 96},
        "plan": {"tasks": 1, "clients": 2, "selected": 1, "rounds": 1, "memory": 8, "class_share": 1.0},
        "model": {"name": "resnet18", "width": 32},
        "train": {"epochs": 1, "batch": 96},
        "method": {"name": "fedavg"},
        "run": {"engine": "serial"},
    }
    config = load_config(tree)
    data = load_data(config.data)
    expected = memory_needed(config, data, plan_of(config, data)).total(0)
    command = [sys.executable, "-c", PEAK, repr(tree), str(tmp_path / "run")]
    peak = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1])
    assert 0.7 < expected / peak < 1.5


def test_what_cannot_fit_is_refused_before_training(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = {
        "data": {"name": "glyphs", "classes": 4, "train_per_class": 8, "test_per_class": 4, "size": 16},
        "plan": {"tasks": 2, "clients": 3, "join_per_task": 0, "selected": 2, "rounds": 1, "memory": 8},
        "method": {"name": "lga"},
        "run": {"engine": "pool", "workers": 2},
    }
    monkeypatch.setattr(experiment, "machine_memory", lambda: 10**8)
    with pytest.raises(
        HoldfastError, match=r"needs about 1\.\d GB of memory with 2 worker processes, and this machine"
    ):
        run_to_folder(load_config(tree), tmp_path / "run")
    monkeypatch.setattr(experiment, "machine_memory", lambda: 800 * 10**6)
    with pytest.raises(HoldfastError, match=r"set run\.(workers=1|engine=serial)"):
        run_to_folder(load_config(tree), tmp_path / "other")


def test_imagenet_as_in_table_2_fits_into_24_gb() -> None:
    config = config_of(Experiment("imagenet", 5, "lga"), "paper", 2021)
    memory = memory_needed(config, *plan_without_images(config))
    assert 15e9 < memory.total(2) < 24e9
    assert memory.main > 10 * 140 * 3e6  # the prototypes of ten clients with 140 classes, 3.1 MB each


def test_totals_by_hand() -> None:
    memory = Memory(worker=500 * 2**20, main=400 * 2**20, images=2**20)
    assert memory.total(2) == (1400 + 2) * 2**20
    assert memory.total(0) == (1 + 400 + 500 - 350) * 2**20
    assert (group_size(32), group_size(224)) == (1820, 37)
    assert group_bytes(224, 1400) == 12 * 224**2 * (48 * 37 + 2 * 1400)
    assert (machine_memory() or 2**30) > 2**28


def test_plan_says_what_a_run_will_need(tmp_path: Any) -> None:
    command = [sys.executable, "-m", "holdfast", "plan", "--dataset", "glyphs", "--set", "data.classes=5", "--json"]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path).stdout)
    memory = found["memory"]
    assert memory["total"] >= memory["main"]
    assert memory["worker"] > 350 * 2**20
    spoken = subprocess.run(command[:-1], capture_output=True, text=True, check=True, cwd=tmp_path).stdout
    assert f"{memory['worker'] / 1e9:.1f} GB per worker process" in spoken
