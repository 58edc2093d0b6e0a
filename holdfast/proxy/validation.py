"""The proxy checks shares by itself, on arrival: the global server never sees one."""

from collections.abc import Sequence

from holdfast.models.encoder import GradientEncoder
from holdfast.privacy.encode import labels_of
from holdfast.protocol.checks import Form, Like, Misfit, Refusal, misfit
from holdfast.protocol.messages import PrototypeShare

MOST_IMAGES = 1_000_000  # of one class at one client
ROUNDING = 1e-3  # by which the entries of p - y may differ from a sum of 0


class ShareCheck:
    """What a usable share looks like: a gradient of the encoding network for one image with one label that the head
    knows, and a variance per feature."""

    def __init__(self, encoder: GradientEncoder, features: int) -> None:
        parameters = {name: Like(tuple(p.shape), p.dtype) for name, p in encoder.named_parameters()}
        # The last layer's bias has the gradient p - y: probabilities, less 1 at the label.
        parameters["linear.bias"] = parameters["linear.bias"]._replace(least=-1.0, most=1.0)
        self.form: Form = {**parameters, "variance": Like((features,), least=0.0)}

    def __call__(self, share: PrototypeShare, classes: int) -> Misfit | None:
        """Why this share cannot be used while the head has so many classes; None if it can."""
        problem = misfit("its share", {**share.gradient, "variance": share.variance}, self.form)
        if problem is not None:
            return problem
        if type(share.count) is not int or not 1 <= share.count <= MOST_IMAGES:
            return Misfit("samples", f"{share.count} images of one class are not between 1 and {MOST_IMAGES}")
        label = self.label(share)
        if label is None or abs(float(share.gradient["linear.bias"].double().sum())) > ROUNDING:
            return Misfit("label", "its share is not the gradient of one image with one label")
        return None if label < classes else Misfit("label", f"its share is of class {label + 1} of {classes}")

    @staticmethod
    def label(share: PrototypeShare) -> int | None:
        try:
            return int(labels_of({"linear.bias": share.gradient["linear.bias"][None]}))
        except ValueError:
            return None


def admit(
    check: ShareCheck, shares: Sequence[tuple[int, PrototypeShare]], classes: int
) -> tuple[list[PrototypeShare], list[Refusal]]:
    """The usable shares of a round, without their senders, and what was refused of whom. A client has one share per
    class and round, so no more than there are classes: whatever comes after that many is not even looked at."""
    kept: list[PrototypeShare] = []
    refused: list[Refusal] = []
    sent: dict[int, int] = {}
    known: set[tuple[int, int | None]] = set()
    for client, share in shares:
        sent[client] = sent.get(client, 0) + 1
        if sent[client] > classes:
            if sent[client] == classes + 1:
                refused.append(Refusal(client, "too many", f"more than {classes} shares in one round"))
            continue
        problem = check(share, classes)
        mine = None if problem else (client, check.label(share))
        if mine in known:
            problem = Misfit("duplicate", "a second share of the same class in one round")
        if problem is not None:
            refused.append(Refusal(client, problem.kind, problem.reason))
            continue
        assert mine is not None
        known.add(mine)
        kept.append(share)
    return kept, refused
