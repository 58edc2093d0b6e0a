"""What every settings class shares: strict validation, bounded numbers, and a description for `holdfast settings`."""

from typing import Annotated, Any

from pydantic import ConfigDict, Field

STRICT = ConfigDict(extra="forbid", allow_inf_nan=False)
Count = Annotated[int, Field(ge=1, le=1_000_000)]
Fraction = Annotated[float, Field(gt=0, le=1)]


def setting(default: Any, about: str) -> Any:
    """A field of a settings class."""
    return Field(default=default, description=about)
