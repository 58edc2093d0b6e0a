"""Pure tensor functions, one per equation. B samples, C classes, G growths (the paper's tasks)."""

import torch
import torch.nn.functional as F
from torch import Tensor

TINY = 1e-12  # a group of samples whose mean gradient is below this is not reweighted (N2)
FLOOR = 1e-4  # lower bound of the soft labels in the literal form of Eq. 6, which divides by them (N5)


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean softmax cross-entropy (Eq. 1): logits (B, C), labels (B,)."""
    return F.cross_entropy(logits, labels)


def log_counts(counts: Tensor, absent: float) -> Tensor:
    """log max(n_c, eps) of a client's image counts (C,), which logit adjustment (Menon et al., 2021) adds to the
    outputs of a softmax while it is trained. A class without images counts as `absent`, eps."""
    return counts.float().clamp(min=absent).log()


def log_odds(counts: Tensor, absent: float) -> Tensor:
    """log max(n_c, eps) - log max(n - n_c, eps) (C,), the same for sigmoid outputs, each of which decides between its
    class and all others. A softmax does not change when all outputs are shifted alike, but sigmoids do."""
    return log_counts(counts, absent) - log_counts(counts.sum() - counts, absent)


def entropy(logits: Tensor) -> Tensor:
    """-sum_j p_j ln p_j of each sample (Eq. 8), (B,); the paper prints it without the minus."""
    terms: Tensor = torch.special.entr(logits.softmax(dim=1))
    return terms.sum(dim=1)


def softmax_gradient(logits: Tensor, labels: Tensor) -> Tensor:
    """|V| = 1 - p_y (Eq. 2), (B,); computed from the other classes' mass, to stay exact when p_y rounds to 1 (N2)."""
    logits = logits.detach()
    others = logits.scatter(1, labels[:, None], -torch.inf)
    return torch.exp(others.logsumexp(dim=1) - logits.logsumexp(dim=1))


def sigmoid_gradient(logits: Tensor, labels: Tensor) -> Tensor:
    """|V| = 1 - s_y for a sigmoid head, (B,)."""
    return torch.sigmoid(-logits.detach().gather(1, labels[:, None]).squeeze(1))


def sharpening(old_classes: int, new_classes: int) -> float:
    """The exponent of Eq. 4: the fraction of old classes among the classes that a client has."""
    return old_classes / max(1, old_classes + new_classes)


def group_balanced_weights(gradients: Tensor, groups: Tensor, exponent: float) -> Tensor:
    """w_i = |V_i|^e over its mean in i's group (Eqs. 3-5), (B,): the mean weight of every group is 1."""
    sharp = gradients**exponent  # 0^0 is 1: without old classes every weight is 1 (N1)
    count = int(groups.max()) + 1
    sums = sharp @ F.one_hot(groups, count).to(sharp.dtype)  # a product, as index_add has no fixed order on a GPU
    means = (sums / torch.bincount(groups, minlength=count).clamp(min=1))[groups]
    return torch.where(means < TINY, torch.ones_like(sharp), sharp / means.clamp(min=TINY))


def cumulative_weights(gradients: Tensor, groups: Tensor, newest: int, exponent: float) -> Tensor:
    """The weights w_i (B,) of the authors' code (D4): the group of old growth k holds growths 0 to k, and |V_i|^e is
    divided by the mean of every old group that contains sample i and summed. The newest growth is a group of its own.
    A group whose mean is 0 adds 1 (N2)."""
    sharp = gradients**exponent
    member = F.one_hot(groups, newest + 1).to(sharp.dtype)  # (B, G)
    sums, counts = sharp @ member, member.sum(dim=0)
    old_means = sums[:newest].cumsum(0) / counts[:newest].cumsum(0).clamp(min=1)
    means = torch.cat([old_means, sums[newest:] / counts[newest:].clamp(min=1)])  # (G,)
    saturated = means < TINY
    factors = torch.where(saturated, 0, 1 / means.clamp(min=TINY))

    def over_groups(values: Tensor) -> Tensor:
        """The sum over all groups that contain a growth (G,)."""
        return torch.cat([values[:newest].flip(0).cumsum(0).flip(0), values[newest:]])

    return sharp * over_groups(factors)[groups] + over_groups(saturated.to(sharp.dtype))[groups]


def weighted_cross_entropy(logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    """L_CB (Eq. 5): mean of w_i CE_i."""
    return (weights * F.cross_entropy(logits, labels, reduction="none")).mean()


def one_hot(labels: Tensor, like: Tensor) -> Tensor:
    """Labels (B,) as vectors of the width and type of `like` (B, C)."""
    return F.one_hot(labels, like.shape[1]).to(like.dtype)


def soft_labels(labels: Tensor, classes: int, teacher: Tensor) -> Tensor:
    """Y (B, C): the one-hot label, its first K entries replaced by the teacher's probabilities (B, K) (N15)."""
    hard = F.one_hot(labels, classes).to(teacher.dtype)
    return torch.cat([teacher.detach(), hard[:, teacher.shape[1] :]], dim=1)


def semantic_distillation(logits: Tensor, soft: Tensor, weights: Tensor) -> Tensor:
    """L_SD (Eq. 6) target first: sum_j Y_j (ln Y_j - ln P_j), 0 ln 0 = 0 (N5); raw slices add up to the whole (N6)."""
    return (weights * (torch.xlogy(soft, soft) - soft * logits.log_softmax(dim=1)).sum(dim=1)).mean()


def semantic_distillation_literal(logits: Tensor, soft: Tensor, weights: Tensor) -> Tensor:
    """L_SD (Eq. 6) in the printed direction, sum_j P_j (ln P_j - ln Y_j), with Y floored (N5)."""
    log_p = logits.log_softmax(dim=1)
    return (weights * (log_p.exp() * (log_p - soft.clamp(min=FLOOR).log())).sum(dim=1)).mean()


def semantic_distillation_by_growth(
    logits: Tensor, labels: Tensor, teacher_logits: Tensor, weights: Tensor, growth_of: Tensor
) -> Tensor:
    """L_SD with a separate distribution per growth (N6): old growths against the teacher's, for all samples; growths
    that the teacher does not have against the label, for the samples whose label belongs to them."""
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
    """omega^t (Eq. 12): the mean of Tr(cov)/d over all classes seen; `traces` holds those of the new classes (N8)."""
    total = old_classes + len(traces)
    return (old_classes * previous + float(traces.sum())) / total if total else 0.0


def bounded_noise(noise: Tensor, variance: Tensor, radius: float) -> Tensor:
    """Noise (..., d), projected onto the ball |noise|^2 <= radius sum(variance) of Eq. 11 if outside of it (N9)."""
    bound = (radius * variance.sum(dim=-1, keepdim=True)).sqrt()
    length = noise.norm(dim=-1, keepdim=True)
    return noise * torch.where(length > bound, bound / length.clamp(min=TINY), torch.ones_like(length))


def distillation(logits: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """Mean over samples of KL(softmax(teacher/T) || softmax(o/T)) on the teacher's K outputs (B, K)."""
    theirs = (teacher.detach() / temperature).log_softmax(dim=1)
    mine = (logits[:, : teacher.shape[1]] / temperature).log_softmax(dim=1)
    return (theirs.exp() * (theirs - mine)).sum(dim=1).mean()


def distillation_by_growth(logits: Tensor, teacher: Tensor, temperature: float, growths: list[int]) -> Tensor:
    """SS-IL: the sum over old growths of T^2 KL, with a separate distribution per growth."""
    slices = zip(logits[:, : sum(growths)].split(growths, dim=1), teacher.split(growths, dim=1), strict=True)
    terms = [temperature**2 * distillation(mine, theirs, temperature) for mine, theirs in slices]
    return torch.stack(terms).sum()


def separated_cross_entropy(logits: Tensor, labels: Tensor, old: int) -> Tensor:
    """SS-IL: a softmax over new classes for new samples, over the first `old` for old ones; mean over the batch."""
    fresh = labels >= old
    terms = logits.new_zeros(())
    if fresh.any():
        terms = terms + F.cross_entropy(logits[fresh][:, old:], labels[fresh] - old, reduction="sum")
    if not fresh.all():
        terms = terms + F.cross_entropy(logits[~fresh][:, :old], labels[~fresh], reduction="sum")
    return terms / len(labels)


def nca(scores: Tensor, labels: Tensor) -> Tensor:
    """PODNet's loss as in the published code: -s_y + log(1 + sum of e^s_j over the others), after subtracting the
    largest score. Gradients flow through that subtraction, or a common shift of all scores would matter. The code's
    margin is left out: it is subtracted from every class and so changes nothing."""
    shifted = scores - scores.amax(dim=1, keepdim=True)
    own = shifted.gather(1, labels[:, None]).squeeze(1)
    others = shifted.scatter(1, labels[:, None], -torch.inf).exp().sum(dim=1)
    return (torch.log1p(others) - own).mean()


def pod_spatial(maps: list[Tensor], teacher: list[Tensor]) -> Tensor:
    """PODNet: the distance of squared maps (B, c, h, w), summed over width and over height, each vector normalised to
    unit length; the mean over samples and stages."""
    return torch.stack(
        [_distance(_pooled(mine), _pooled(theirs.detach())).mean() for mine, theirs in zip(maps, teacher, strict=True)]
    ).mean()


def _pooled(map_: Tensor) -> Tensor:
    squares = _squares(map_)
    return _unit(torch.cat([squares.sum(dim=2).flatten(1), squares.sum(dim=1).flatten(1)], dim=1))


def _squares(map_: Tensor) -> Tensor:
    """As (B, h, w, c), the memory order of maps: sums over pixels and their gradients are fast there."""
    return map_.permute(0, 2, 3, 1).square()


def _unit(vectors: Tensor) -> Tensor:
    """Unit length along axis 1, like F.normalize, which is slow if that is not the last axis."""
    return vectors / vectors.square().sum(dim=1, keepdim=True).clamp(min=1e-24).sqrt()


def _distance(a: Tensor, b: Tensor) -> Tensor:
    """Euclidean along axis 1; the gradient at 0 is 0, because student and teacher are equal when a task begins."""
    distance: Tensor = ((a - b).square().sum(dim=1) + TINY).sqrt() - TINY**0.5
    return distance


def pod_flat(features: Tensor, teacher: Tensor) -> Tensor:
    """PODNet: mean of 1 - cos of features (B, d)."""
    return (1 - F.cosine_similarity(features, teacher.detach(), dim=1)).mean()


def channel_discrepancy(maps: list[Tensor], teacher: list[Tensor], importance: list[Tensor]) -> Tensor:
    """AFC: the distance of normalised squared maps per channel, weighted by the channel's importance (c,); the mean
    over samples, channels and stages."""
    terms = []
    for mine, theirs, weight in zip(maps, teacher, importance, strict=True):
        a, b = (_unit(_squares(m).flatten(1, 2)) for m in (mine, theirs.detach()))
        terms.append((weight * _distance(a, b)).mean())
    return torch.stack(terms).mean()


def neighbour_cross_entropy(logits: Tensor, labels: Tensor, neighbours: Tensor) -> Tensor:
    """DDE: -ln of the mean of a sample's own probability and its neighbours' mean (B,), which has no gradient."""
    own = logits.softmax(dim=1).gather(1, labels[:, None]).squeeze(1)
    return -((own + neighbours.detach()) / 2 + TINY).log().mean()


def geodesic_flow(start: Tensor, end: Tensor) -> Tensor:
    """GeoDL's kernel G (d, d): the integral of the projections onto the subspaces along the geodesic between two
    n-dimensional subspaces, in closed form. `start` and `end` (d, n) are orthonormal bases, in float64."""
    u, cosines, vt = torch.linalg.svd(start.T @ end)
    cosines = cosines.clamp(-1, 1)
    angles = torch.arccos(cosines)
    sines = (1 - cosines.square()).clamp(min=0).sqrt()
    q = start @ u
    r = torch.where(sines > 1e-6, (end @ vt.T - q * cosines) / sines.clamp(min=1e-6), 0.0)
    small = angles < 1e-4
    safe = torch.where(small, 1.0, angles)
    ratio = torch.where(small, 1 - (2 * angles) ** 2 / 6, torch.sin(2 * safe) / (2 * safe))
    first, third = (1 + ratio) / 2, (1 - ratio) / 2
    second = torch.where(small, angles / 2, (1 - torch.cos(2 * safe)) / (4 * safe))
    cross = (q * second) @ r.T
    kernel: Tensor = (q * first) @ q.T + cross + cross.T + (r * third) @ r.T
    return kernel


def geodesic_distance(features: Tensor, teacher: Tensor, kernel: Tensor) -> Tensor:
    """GeoDL: mean of 1 - z'Gz* / sqrt(z'Gz z*'Gz*) over unit features (B, d) of student and teacher."""
    z, old = F.normalize(features, dim=1), F.normalize(teacher.detach(), dim=1)
    z, old = z.double(), old.double()
    cross = ((z @ kernel) * old).sum(dim=1)
    lengths = ((z @ kernel) * z).sum(dim=1) * ((old @ kernel) * old).sum(dim=1)
    return (1 - cross / lengths.clamp(min=TINY).sqrt()).mean().to(features.dtype)


def subspace(features: Tensor, size: int) -> Tensor:
    """An orthonormal basis (d, size) of the main directions of the normalised features (B, d), in float64."""
    unit = F.normalize(features.detach(), dim=1).double()
    basis: Tensor = torch.linalg.svd(unit, full_matrices=False)[2][:size].T
    return basis
