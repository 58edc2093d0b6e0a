"""A network is built only if it is about as large as the weights that it is built for."""

import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from holdfast.client.client import encoder_of
from holdfast.config import load_config
from holdfast.methods import METHODS
from holdfast.models.encoder import GradientEncoder
from holdfast.models.incremental import IncrementalModel, ModelSpec, grow_to, load_grown
from holdfast.models.limited import AtMost, as_large_as
from holdfast.models.stored import write_model
from holdfast.predict import predict
from holdfast.protocol.codec import MalformedMessage
from holdfast.protocol.messages import Encoder
from holdfast.seeding import torch_generator

SPEC = ModelSpec("convnet", "batch", 16)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.empty(1000),
        lambda: torch.zeros(10, 100),
        lambda: torch.full((1000,), 2.0),
        lambda: torch.empty(500, dtype=torch.float64),
        lambda: torch.nn.Linear(999, 1),
        lambda: torch.nn.Linear(999, 1, device="meta").to_empty(device="cpu"),
    ],
)
def test_new_tensors_count(make: Callable[[], object]) -> None:
    with AtMost(4000):
        make()
    with AtMost(3999), pytest.raises(ValueError, match="much larger than its weights"):
        make()


def test_what_is_computed_or_without_memory_does_not_count() -> None:
    x = torch.ones(1000)
    with AtMost(0):
        assert float((x + x).sum()) == 2000
        torch.nn.Linear(10_000, 10_000, device="meta")


@pytest.mark.parametrize("name", METHODS)
def test_every_methods_own_network_is_within_the_limit(name: str) -> None:
    method = load_config({"method": {"name": name}}).method
    model = method.build_model(SPEC, torch_generator(0))
    growths = [1] * 12
    grow_to(model, growths, torch_generator(0))
    weights = model.state_dict()
    with as_large_as(weights):
        again = method.build_model(SPEC, torch_generator(1))
    load_grown(again, growths, weights)
    assert all(torch.equal(tensor, again.state_dict()[key]) for key, tensor in weights.items())


CHANGES: list[dict[str, Any]] = [
    {"growths": [10**9], "classes": 10**9},
    {"growths": [10**7], "classes": 10**7},
    {"growths": [1] * 10**6, "classes": 10**6},
    {"growths": [-1, 3]},
    {"growths": "2"},
    {"growths": [True, 1]},
    {"image_size": 10**9},
    {"image_size": 2**20},
    {"image_size": -1},
    {"width": 2**20},
    {"width": 8192, "backbone": "resnet18"},
    {"classes": {"a": 1, "b": 2}},
    {"classes": [1, 2]},
    {"method": {"name": "dytox", "width": 4096, "heads": 64, "depth": 64}},
]

LIMITED = """
import resource, sys
from pathlib import Path
from holdfast.errors import HoldfastError
from holdfast.predict import predict
resource.setrlimit(resource.RLIMIT_AS, (2**31, 2**31))
for folder in map(Path, sys.argv[1:]):
    try:
        predict(folder, [folder / "x.png"])
        print("it was read")
    except HoldfastError as error:
        print(error)
status = Path("/proc/self/status").read_text()  # ru_maxrss would also count the process that has started this one
print(int(status.partition("VmHWM:")[2].split()[0]) // 1024)
"""


def test_a_header_of_a_huge_model_is_refused_before_anything_is_allocated(tmp_path: Path) -> None:
    model = IncrementalModel(SPEC, torch_generator(0))
    model.grow(2, torch_generator(1))
    facts: dict[str, Any] = {"method": {"name": "fedavg"}, "backbone": "convnet", "norm": "batch", "image_size": 16}
    facts |= {"classes": ["a", "b"], "growths": [2], "mean": [0.5, 0.5, 0.5], "std": [0.5, 0.5, 0.5]}
    folders = []
    for i, change in enumerate([{}, *CHANGES]):
        folders.append(tmp_path / str(i))
        folders[-1].mkdir()
        if isinstance(count := change.get("classes"), int):
            change = {**change, "classes": [""] * min(count, 10**6)}
        Image.new("RGB", (16, 16)).save(folders[-1] / "x.png")
        write_model(folders[-1] / "model.safetensors", model.state_dict(), {**facts, **change})
    assert len(predict(folders[0], [folders[0] / "x.png"])) == 1
    line = [sys.executable, "-c", LIMITED, *map(str, folders)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=120, check=False)
    assert done.stderr == ""
    first, *others, peak = done.stdout.splitlines()
    assert first == "it was read"
    assert len(others) == len(CHANGES)
    assert all("model.safetensors is damaged" in other for other in others), others
    assert int(peak) < 1000  # megabytes


def test_a_message_of_a_huge_encoder_is_refused_before_anything_is_allocated() -> None:
    weights = GradientEncoder(16, 10, torch_generator(0)).state_dict()
    encoder_of(Encoder(weights), 16)
    with pytest.raises(MalformedMessage, match="does not have the weights of an encoding network"):
        encoder_of(Encoder({**weights, "linear.bias": torch.zeros(10**7)}), 16)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 2 * 2**20  # kilobytes


def test_a_head_that_the_weights_do_not_have_is_not_built() -> None:
    model = IncrementalModel(SPEC, torch_generator(0))
    model.grow(2, torch_generator(1))
    weights = model.state_dict()
    fresh = IncrementalModel(SPEC, torch_generator(0))
    with pytest.raises(ValueError, match="weights of 1 growths, not of 1000000"):
        load_grown(fresh, [1] * 10**6, weights)
    with pytest.raises(ValueError, match="much larger than its weights"):
        load_grown(fresh, [10**6], weights)
    assert len(fresh.blocks) == 0
    load_grown(fresh, [2], weights)
