"""Pure tensor functions, one for each equation, named in words."""

import torch.nn.functional as F
from torch import Tensor


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean softmax cross-entropy (Eq. 1): logits (B, C), labels (B,)."""
    return F.cross_entropy(logits, labels)
