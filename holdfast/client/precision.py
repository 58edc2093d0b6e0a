"""Mixed precision: on a GPU, training may compute in 16 bits; weights, optimiser and evaluation keep 32."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from holdfast.errors import HoldfastError

KINDS = {"bf16": torch.bfloat16, "fp16": torch.float16}


def check_precision(precision: str, device: torch.device) -> None:
    """Raises HoldfastError if this device cannot train so."""
    if precision not in ("fp32", *KINDS):
        raise HoldfastError(f"unknown precision {precision!r}; use fp32, bf16 or fp16")
    if precision != "fp32" and device.type != "cuda":
        raise HoldfastError(f"run.precision={precision} is for GPUs, and this runs on the {device.type}; use fp32")


def reduced(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """The context in which losses are computed."""
    return torch.autocast(device.type, KINDS[precision]) if precision in KINDS else nullcontext()


def scaler_of(precision: str, device: torch.device) -> torch.amp.GradScaler:
    """Scales losses so that small gradients are not lost in fp16, whose numbers end at 6e-8; does nothing otherwise."""
    return torch.amp.GradScaler(device.type, enabled=precision == "fp16")


def step(
    scaler: torch.amp.GradScaler,
    optimiser: torch.optim.Optimizer,
    loss: Tensor,
    model: torch.nn.Module,
    clamp: float | None,
) -> None:
    """One step down the loss; gradients are clamped at their true size. A step whose gradients overflow is left out,
    and the next losses are scaled less."""
    scaler.scale(loss).backward()
    if clamp is not None:
        scaler.unscale_(optimiser)
        torch.nn.utils.clip_grad_value_(model.parameters(), clamp)
    scaler.step(optimiser)
    scaler.update()
