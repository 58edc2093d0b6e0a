"""The settings of an engine."""

from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from holdfast.settings import STRICT, setting


@dataclass(frozen=True, config=STRICT)
class RunSettings:
    """Where and how it is computed; changes no result but through the device's arithmetic."""

    device: str = setting("auto", "auto, cpu, cuda or cuda:<n>")
    engine: Literal["auto", "serial", "pool"] = setting(
        "auto",
        "who computes: serial (this process), pool (worker processes), or auto (a pool if it is worth its start)",
    )
    workers: Annotated[int, Field(ge=1, le=1024)] | None = setting(
        None, "worker processes of the pool; by default one per core, or four per GPU"
    )
