"""Mixed precision. What needs a GPU is tested only where there is one; docs/performance.md says so."""

from typing import Any

import pytest
import torch
from torch import nn

from holdfast.client.precision import check_precision, reduced, scaler_of, step
from holdfast.config import load_config
from holdfast.data.sources import load_data
from holdfast.engines.serial import Serial
from holdfast.errors import HoldfastError
from holdfast.experiment import build_federation, plan_of, run_name
from holdfast.seeding import torch_generator
from holdfast.simulation.rounds import run_rounds

CPU = torch.device("cpu")


def trained(scaler: torch.amp.GradScaler, scale: float = 1.0, clamp: float | None = None) -> tuple[torch.Tensor, float]:
    """A linear layer after three steps; and how much its losses are scaled by then."""
    layer = nn.Linear(6, 3)
    with torch.no_grad():
        layer.weight.normal_(generator=torch_generator(1))
        layer.bias.zero_()
    optimiser = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
    rng = torch_generator(2)
    for _ in range(3):
        optimiser.zero_grad()
        loss = scale * layer(torch.randn(5, 6, generator=rng)).square().mean()
        step(scaler, optimiser, loss, layer, clamp)
    return layer.weight.detach().clone(), scaler.get_scale()


@pytest.mark.parametrize("clamp", [None, 0.01])
def test_scaled_losses_take_the_same_steps(clamp: float | None) -> None:
    """Scales are powers of two, so that not one bit differs; gradients are clamped at their true size."""
    plain, _ = trained(torch.amp.GradScaler("cpu", enabled=False), clamp=clamp)
    scaled, scale = trained(torch.amp.GradScaler("cpu", init_scale=2.0**10), clamp=clamp)
    assert scale == 2.0**10
    assert torch.equal(plain, scaled)
    assert clamp is None or not torch.equal(plain, trained(torch.amp.GradScaler("cpu", enabled=False))[0])


def test_a_step_that_overflows_is_left_out_and_the_scale_halved() -> None:
    start = torch.empty(3, 6).normal_(generator=torch_generator(1))
    weights, scale = trained(torch.amp.GradScaler("cpu", init_scale=2.0**127), scale=1e10)
    assert scale == 2.0**124
    assert torch.equal(weights, start)


def test_only_fp16_scales_and_fp32_changes_nothing() -> None:
    assert not scaler_of("fp32", CPU).is_enabled()
    assert not scaler_of("bf16", CPU).is_enabled()
    assert scaler_of("fp16", CPU).is_enabled()
    with reduced("fp32", CPU):
        assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_processor_refuses_16_bits_in_one_sentence(precision: str, holdfast: Any) -> None:
    code, _, said = holdfast("run", "--set", f"run.precision={precision}", "--set", "run.device=cpu")
    assert code == 2
    assert said == f"holdfast: run.precision={precision} is for GPUs, and this runs on the cpu; use fp32\n"


def test_a_client_refuses_it_too() -> None:
    with pytest.raises(HoldfastError, match="is for GPUs"):
        check_precision("bf16", CPU)
    with pytest.raises(HoldfastError, match="unknown precision 'fp8'"):
        check_precision("fp8", CPU)


def test_precision_is_part_of_the_experiment_unless_it_is_full(small: dict[str, Any]) -> None:
    plain = run_name(load_config(dict(small)))
    assert run_name(load_config({**small, "run": {"precision": "fp32", "workers": 2}})) == plain
    names = {run_name(load_config({**small, "run": {"precision": kind}})) for kind in ("fp32", "bf16", "fp16")}
    assert len(names) == 3


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_gpu_learns_in_16_bits(small: dict[str, Any], precision: str) -> None:
    config = load_config({**small, "run": {"precision": precision}, "method": {"name": "lga", "iterations": 2}})
    data = load_data(config.data)
    federation = build_federation(config, data, plan_of(config, data))
    lines = [done.line for done in run_rounds(federation, Serial())]
    assert all(tensor.dtype != torch.float16 for tensor in federation.server.weights.values())
    assert lines[1]["accuracy"] > 0.5
