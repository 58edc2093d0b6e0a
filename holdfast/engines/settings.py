"""The settings of an engine."""

from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from holdfast.settings import STRICT, setting

TIMEOUT = 3600.0  # seconds


@dataclass(frozen=True, config=STRICT)
class RunSettings:
    """Where and how a run is computed; it affects results only through arithmetic."""

    device: str = setting("auto", "auto, cpu, cuda or cuda:<n>")
    engine: Literal["auto", "serial", "pool"] = setting(
        "auto",
        "engine: serial (this process), pool (worker processes), or auto (a pool for runs long enough to benefit)",
    )
    workers: Annotated[int, Field(ge=1, le=1024)] | None = setting(
        None, "worker processes of the pool; default: one per core, or four per GPU"
    )
    precision: Literal["fp32", "bf16", "fp16"] = setting(
        "fp32", "arithmetic of training on a GPU: fp32, or mixed with bf16 or fp16; it counts as part of the experiment"
    )
    timeout: Annotated[float, Field(gt=0)] = setting(
        TIMEOUT, "seconds after which a worker that has not finished one client's work is replaced"
    )
