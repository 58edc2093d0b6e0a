"""Pure tensor functions, one for each equation, named in words. B samples, C classes, G growths (the paper's tasks)."""

import torch
import torch.nn.functional as F
from torch import Tensor

TINY = 1e-12  # a group of samples whose gradients are all below this is not reweighted (methods.md, N2)
FLOOR = 1e-4  # of the soft labels in the literal direction of Eq. 6, which divides by them (N5)


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean softmax cross-entropy (Eq. 1): logits (B, C), labels (B,)."""
    return F.cross_entropy(logits, labels)


def entropy(logits: Tensor) -> Tensor:
    """-sum_j p_j ln p_j of each sample (Eq. 8), (B,); the paper prints it without the minus."""
    terms: Tensor = torch.special.entr(logits.softmax(dim=1))
    return terms.sum(dim=1)


def softmax_gradient(logits: Tensor, labels: Tensor) -> Tensor:
    """|V| = 1 - p_y (Eq. 2), (B,); from the other classes' mass, so that it stays exact when p_y rounds to 1 (N2)."""
    logits = logits.detach()
    others = logits.scatter(1, labels[:, None], -torch.inf)
    return torch.exp(others.logsumexp(dim=1) - logits.logsumexp(dim=1))


def sigmoid_gradient(logits: Tensor, labels: Tensor) -> Tensor:
    """|V| = 1 - s_y for a sigmoid head, (B,)."""
    return torch.sigmoid(-logits.detach().gather(1, labels[:, None]).squeeze(1))


def sharpening(old_classes: int, new_classes: int) -> float:
    """The exponent of Eq. 4: the share of old classes among those that a client has."""
    return old_classes / max(1, old_classes + new_classes)


def group_balanced_weights(gradients: Tensor, groups: Tensor, exponent: float) -> Tensor:
    """w_i = |V_i|^e over its mean in i's group (Eqs. 3-5), (B,): the mean weight of every group is 1."""
    sharp = gradients**exponent  # 0^0 is 1: without old classes every weight is 1 (N1)
    count = int(groups.max()) + 1
    sums = sharp @ F.one_hot(groups, count).to(sharp.dtype)  # a product, because adding by index has no order on a GPU
    means = (sums / torch.bincount(groups, minlength=count).clamp(min=1))[groups]
    return torch.where(means < TINY, torch.ones_like(sharp), sharp / means.clamp(min=TINY))


def weighted_cross_entropy(logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    """L_CB (Eq. 5): mean of w_i CE_i."""
    return (weights * F.cross_entropy(logits, labels, reduction="none")).mean()


def one_hot(labels: Tensor, like: Tensor) -> Tensor:
    """Labels (B,) as vectors of the width and type of `like` (B, C)."""
    return F.one_hot(labels, like.shape[1]).to(like.dtype)


def soft_labels(labels: Tensor, classes: int, teacher: Tensor) -> Tensor:
    """Y (B, C): the one-hot label with the teacher's probabilities (B, K) over its own K first entries (N15)."""
    hard = F.one_hot(labels, classes).to(teacher.dtype)
    return torch.cat([teacher.detach(), hard[:, teacher.shape[1] :]], dim=1)


def semantic_distillation(logits: Tensor, soft: Tensor, weights: Tensor) -> Tensor:
    """L_SD (Eq. 6) target first: sum_j Y_j (ln Y_j - ln P_j), 0 ln 0 = 0 (N5); raw slices add up to the whole (N6)."""
    return (weights * (torch.xlogy(soft, soft) - soft * logits.log_softmax(dim=1)).sum(dim=1)).mean()


def semantic_distillation_literal(logits: Tensor, soft: Tensor, weights: Tensor) -> Tensor:
    """L_SD (Eq. 6) in the direction as printed, sum_j P_j (ln P_j - ln Y_j), with Y floored (N5)."""
    log_p = logits.log_softmax(dim=1)
    return (weights * (log_p.exp() * (log_p - soft.clamp(min=FLOOR).log())).sum(dim=1)).mean()


def semantic_distillation_by_growth(
    logits: Tensor, labels: Tensor, teacher_logits: Tensor, weights: Tensor, growth_of: Tensor
) -> Tensor:
    """L_SD with each growth's slice a distribution of its own (N6): old slices against the teacher's, for all samples;
    the slices that the teacher does not have against the label, for the samples whose label is there."""
    terms = torch.zeros_like(weights)
    width = teacher_logits.shape[1]
    for growth in growth_of.unique().tolist():
        columns = torch.nonzero(growth_of == growth).flatten()
        mine = logits[:, columns].log_softmax(dim=1)
        if columns[-1] < width:
            theirs = teacher_logits.detach()[:, columns].log_softmax(dim=1)
            terms = terms + (theirs.exp() * (theirs - mine)).sum(dim=1)
        else:
            here = growth_of[labels] == growth
            place = torch.where(here, labels - columns[0], 0)
            terms = terms - torch.where(here, mine.gather(1, place[:, None]).squeeze(1), 0)
    return (weights * terms).mean()


def weighted_binary_cross_entropy(logits: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """Mean over samples and classes of w_i BCE(o_ic, target_ic): both losses of the sigmoid form."""
    terms = F.binary_cross_entropy_with_logits(logits, targets.to(logits.dtype), reduction="none")
    return (weights[:, None] * terms).mean()


def distillation_binary_cross_entropy(logits: Tensor, teacher: Tensor) -> Tensor:
    """iCaRL's distillation: mean BCE of the old outputs (B, K) against the teacher's sigmoids (B, K)."""
    return F.binary_cross_entropy_with_logits(logits[:, : teacher.shape[1]], teacher.detach())


def augmentation_scale(previous: float, old_classes: int, traces: Tensor) -> float:
    """omega^t (Eq. 12): the mean of Tr(cov)/d over all classes seen; `traces` has those of the new classes (N8)."""
    total = old_classes + len(traces)
    return (old_classes * previous + float(traces.sum())) / total if total else 0.0


def bounded_noise(noise: Tensor, variance: Tensor, radius: float) -> Tensor:
    """Noise (..., d) brought back into the ball |noise|^2 <= radius sum(variance) of Eq. 11, where it left it (N9)."""
    bound = (radius * variance.sum(dim=-1, keepdim=True)).sqrt()
    length = noise.norm(dim=-1, keepdim=True)
    return noise * torch.where(length > bound, bound / length.clamp(min=TINY), torch.ones_like(length))
