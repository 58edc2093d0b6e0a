"""What clients tell of their classes, by their places in the head, which are not their numbers."""

from typing import Any

import pytest
import torch
from clients import client_of, federation_of

from holdfast.client.prototypes import nearest_to_mean, share_prototypes
from holdfast.methods.answers import class_sums
from holdfast.methods.bic import BiC
from holdfast.methods.dde import DDE
from holdfast.methods.roles import PrototypeSharing
from holdfast.models.encoder import GradientEncoder
from holdfast.privacy.encode import labels_of
from holdfast.simulation.federation import Federation


@pytest.fixture
def odd(small: dict[str, Any]) -> Federation:
    """Classes 1, 4 and 5 came first, and then 0, 2 and 3."""
    federation = federation_of("lga", small, perturb_steps=1)
    names = federation.data.classes
    for growth in ((1, 4, 5), (0, 2, 3)):
        federation.server.grow(tuple(names[c] for c in growth))
    return federation


def encoder_of(federation: Federation) -> GradientEncoder:
    assert federation.selector.encoder is not None
    return federation.selector.encoder


def test_class_sums_stand_at_the_places_of_their_classes(odd: Federation) -> None:
    rows = odd.data.train.by_class
    context = client_of(odd, (4, 0), {0: rows[0][:4], 1: rows[1][:3]})
    assert class_sums(context, context.exemplars).tensors["counts"].tolist() == [3, 0, 0, 4, 0, 0]


def test_old_and_new_are_told_apart_by_growth(odd: Federation) -> None:
    rows = odd.data.train.by_class
    assert client_of(odd, (), {0: rows[0][:2], 1: rows[1][:2]}).has_old_and_new
    assert not client_of(odd, (), {0: rows[0][:2], 3: rows[3][:2]}).has_old_and_new
    assert not client_of(odd, (), {4: rows[4][:2], 1: rows[1][:2]}).has_old_and_new
    context = client_of(odd, (4, 0), {1: rows[1][:2]})
    assert context.everything[DDE().fresh(context)].tolist() == rows[0].tolist()


def test_bic_holds_out_old_exemplars_and_new_images(odd: Federation) -> None:
    rows, labels = odd.data.train.by_class, odd.data.train.labels
    held = BiC(held_out=0.5).validation(client_of(odd, (0,), {1: rows[1][:4]}))
    assert sorted(set(labels[held].tolist())) == [0, 1]
    assert not len(BiC(held_out=0.5).validation(client_of(odd, (5,), {1: rows[1][:4]})))


def test_a_prototypes_gradient_tells_the_place_of_its_class(odd: Federation) -> None:
    context = client_of(odd, (4, 0), {}, noticed=1)
    shares = share_prototypes(context, encoder_of(odd), PrototypeSharing(None))[1]
    assert [int(labels_of({n: g[None] for n, g in share.gradient.items()})) for share in shares] == [1, 3]


def test_a_share_has_the_nearest_images_gradient_and_the_classs_variance(odd: Federation) -> None:
    """The image is chosen under the client's own model; the variance is under the broadcast one (N12)."""
    context = client_of(odd, (3, 4), {}, noticed=1)
    with torch.no_grad():
        for p in context.model.parameters():
            p.mul_(1.5)  # as if it had been trained
    state, shares = share_prototypes(context, encoder_of(odd), PrototypeSharing(None))
    rows = odd.data.train.by_class
    assert [share.count for share in shares] == [12, 12]
    for c, share, chosen in zip((3, 4), shares, context.notes["prototype.ids"].tolist(), strict=True):
        broadcast = context.features(context.broadcast, rows[c])
        torch.testing.assert_close(share.variance, broadcast.var(dim=0, correction=0))
        assert chosen == int(rows[c][nearest_to_mean(context.features(context.model, rows[c]))])
    context.state = state
    assert share_prototypes(context, encoder_of(odd), PrototypeSharing(None)) == (state, ())  # once
