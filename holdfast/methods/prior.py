"""The local prior as an option of other methods' classification losses."""

from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from holdfast.losses import log_counts
from holdfast.methods.base import Method
from holdfast.methods.context import ClientContext
from holdfast.settings import STRICT

ABSENT = 0.1  # the count of a class that the client has no image of


@dataclass(frozen=True, config=STRICT)
class LocalPrior(Method):
    """A method whose clients may add the logarithms of their own image counts to the outputs that the classification
    loss sees (logit adjustment), so that the outputs themselves need not prefer the classes that a client holds."""

    prior: float = Field(
        default=0.0,
        ge=0,
        description="local prior: how much of the logarithm of a client's image counts is added to the outputs in the "
        "classification loss, tau; 0 is off",
    )

    def local_prior(self, context: ClientContext, ids: Tensor | None = None) -> Tensor | float:
        """What is added to the outputs (C,), from the counts of the images that the client trains on, or of these."""
        if not self.prior:
            return 0.0
        return self.prior * log_counts(context.counts if ids is None else context.counts_of(ids), ABSENT)
