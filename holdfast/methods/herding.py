"""Herding: which images represent a class best."""

import torch
import torch.nn.functional as F
from torch import Tensor


def herd(features: Tensor, count: int) -> Tensor:
    """Positions of the `count` images whose running mean stays nearest to the mean of all (iCaRL), best first."""
    unit = F.normalize(features.double(), dim=1)  # (N, d)
    mean = unit.mean(dim=0)
    wanted = mean.clone()
    free = torch.ones(len(unit), dtype=torch.bool, device=unit.device)
    chosen = []
    for _ in range(min(count, len(unit))):
        # With features of length 1, the nearest running mean is where this product is largest.
        best = int((unit @ wanted).masked_fill(~free, -torch.inf).argmax())
        free[best] = False
        chosen.append(best)
        wanted += mean - unit[best]
    return torch.tensor(chosen, dtype=torch.int64)
