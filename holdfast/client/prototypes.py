"""What a client sends the proxy of its new classes: one perturbed image each, as a gradient."""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from holdfast.methods.context import ClientContext
from holdfast.methods.roles import Perturbation, PrototypeSharing
from holdfast.models.encoder import GradientEncoder
from holdfast.models.passes import frozen
from holdfast.privacy.encode import prototype_gradients
from holdfast.privacy.perturb import perturb
from holdfast.protocol.messages import PrototypeShare
from holdfast.protocol.state import ClientState, new_classes


def share_prototypes(
    context: ClientContext, encoder: GradientEncoder, sharing: PrototypeSharing
) -> tuple[ClientState, tuple[PrototypeShare, ...]]:
    """The prototypes of all classes that the client has noticed and not yet shared, once their places are known."""
    state = context.state
    waiting = new_classes(state.arrivals, state.shared, state.noticed)
    if not waiting or any(name not in context.registry.position for name in waiting):
        return state, ()
    done = replace(state, shared=state.noticed)
    held = {**context.exemplars_by_class, **context.data_by_class}  # current images, or else exemplars
    ids = {name: held[name] for name in waiting if name in held}
    if not ids:
        return done, ()
    labels = torch.tensor([context.registry.position[name] for name in ids], device=context.device)
    chosen, images = _prototype_images(context, ids, labels, sharing.perturbation)
    gradients = {name: g.cpu() for name, g in prototype_gradients(encoder, images, labels).items()}
    shares = []
    for i, mine in enumerate(ids.values()):
        # Under the broadcast model, because variances of different local models cannot be put together (N12).
        variance = context.features(context.broadcast, mine).var(dim=0, correction=0)
        shares.append(PrototypeShare({name: g[i].clone() for name, g in gradients.items()}, len(mine), variance))
    context.notes |= {
        "prototype.ids": chosen.int(),
        "prototype.perturbed": images.mul(255).round().byte().cpu(),
        "prototype.fingerprint": torch.stack([torch.tensor(list(s.fingerprint), dtype=torch.uint8) for s in shares]),
    }
    return done, tuple(shares)


def _prototype_images(
    context: ClientContext, ids: dict[str, Tensor], labels: Tensor, perturbation: Perturbation | None
) -> tuple[Tensor, Tensor]:
    """One image of each class, by its id, and the perturbed images (N, 3, S, S) with pixels from 0 to 1."""
    with frozen(context.model):
        features = [context.features(context.model, mine) for mine in ids.values()]
        picks = zip(ids.values(), features, strict=True)
        chosen = torch.stack([mine[nearest_to_mean(some)] for mine, some in picks])
        images = context.images.pixels(chosen).to(context.device).float().div(255)
        if perturbation is None:
            return chosen, images
        deviations = torch.stack([some.var(dim=0, correction=0).sqrt() for some in features]).to(context.device)
        perturbed = perturb(
            context.model,
            context.transform,
            images,
            labels,
            deviations,
            noise=perturbation.noise,
            steps=perturbation.steps,
            rate=perturbation.rate,
            rng=context.secret_generator("perturb"),
        )
    return chosen, perturbed


def nearest_to_mean(features: Tensor) -> int:
    """The image whose unit feature (N, d) is nearest to the mean of them all."""
    unit = F.normalize(features, dim=1)
    return int((unit - unit.mean(dim=0)).square().sum(dim=1).argmin())
