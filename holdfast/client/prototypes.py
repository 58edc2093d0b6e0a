"""What a client sends the proxy server of its new classes: one perturbed image each, as a gradient."""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from holdfast.methods.context import Local
from holdfast.models.passes import frozen
from holdfast.privacy.encode import prototype_gradients
from holdfast.privacy.perturb import perturb
from holdfast.protocol.messages import PrototypeShare, State
from holdfast.simulation.plan import new_classes


@dataclass(frozen=True)
class Perturbation:
    """How prototype images are perturbed (Eqs. 13-14)."""

    noise: float  # in the latent feature, epsilon
    steps: int
    rate: float = 1.0


def share_prototypes(local: Local, perturbation: Perturbation | None) -> tuple[State, tuple[PrototypeShare, ...]]:
    """The prototypes of all classes that the client has noticed and not yet shared, once their places are known."""
    state, world = local.state, local.world
    waiting = new_classes(world.plan.arrivals[state.client], state.shared, state.noticed)
    if not waiting or int(local.positions[waiting].min()) < 0:
        return state, ()
    done = replace(state, shared=state.noticed)
    rows = {c: local.images_of(c) for c in waiting}
    rows = {c: mine for c, mine in rows.items() if len(mine)}
    if not rows:
        return done, ()
    labels = local.positions[list(rows)].to(world.device)
    with frozen(local.model):
        features = {c: local.features(local.model, mine) for c, mine in rows.items()}
        chosen = torch.stack([mine[nearest_to_mean(features[c])] for c, mine in rows.items()])
        images = world.train.images[chosen].to(world.device).float().div(255)
        if perturbation:
            deviations = [features[c].var(dim=0, correction=0).sqrt() for c in rows]
            images = perturb(
                local.model,
                world.transform,
                images,
                labels,
                torch.stack(deviations).to(world.device),
                noise=perturbation.noise,
                steps=perturbation.steps,
                rate=perturbation.rate,
                rng=local.generator("perturb"),
            )
    assert world.encoder is not None
    gradients = {name: g.cpu() for name, g in prototype_gradients(world.encoder, images, labels).items()}
    shares = []
    for i, mine in enumerate(rows.values()):
        # Under the broadcast model, because variances of different local models cannot be put together (N12).
        variance = local.features(local.broadcast, mine).var(dim=0, correction=0)
        shares.append(PrototypeShare({name: g[i].clone() for name, g in gradients.items()}, len(mine), variance))
    kept = {
        "prototype.rows": chosen.int(),
        "prototype.perturbed": images.mul(255).round().byte().cpu(),
        "prototype.fingerprint": torch.stack([torch.tensor(list(s.fingerprint), dtype=torch.uint8) for s in shares]),
    }
    return replace(done, notes={**state.notes, **kept}), tuple(shares)


def nearest_to_mean(features: Tensor) -> int:
    """The image whose unit feature (N, d) is nearest to the mean of them all."""
    unit = F.normalize(features, dim=1)
    return int((unit - unit.mean(dim=0)).square().sum(dim=1).argmin())
