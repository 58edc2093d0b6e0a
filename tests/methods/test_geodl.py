"""GeoDL: the kernel of the geodesic between subspaces, and the distance under it."""

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from clients import Answers, federation_of
from torch import Tensor

from holdfast.engines.serial import Serial
from holdfast.errors import HoldfastError
from holdfast.losses import geodesic_distance, geodesic_flow, subspace
from holdfast.methods.geodl import GeoDL
from holdfast.seeding import torch_generator
from holdfast.simulation.rounds import run_rounds


def basis(d: int, n: int, seed: int) -> Tensor:
    """A random orthonormal basis (d, n)."""
    q: Tensor = torch.linalg.qr(torch.randn(d, n, generator=torch_generator(seed), dtype=torch.float64))[0]
    return q


def integrated(start: Tensor, end: Tensor, nodes: int = 40) -> np.ndarray:
    """The integral of the projections along the geodesic, which the tangent at `start` gives: no formula of GeoDL."""
    a, b = start.numpy(), end.numpy()
    tangent = (b - a @ (a.T @ b)) @ np.linalg.inv(a.T @ b)
    u, s, vt = np.linalg.svd(tangent, full_matrices=False)
    angles = np.arctan(s)
    total = np.zeros((len(a), len(a)))
    for x, weight in zip(*np.polynomial.legendre.leggauss(nodes), strict=True):
        t = (x + 1) / 2
        here = a @ vt.T * np.cos(t * angles) + u * np.sin(t * angles)
        total += weight / 2 * here @ here.T
    return total


@pytest.mark.parametrize(("d", "n"), [(2, 1), (6, 3), (20, 4), (16, 8), (10, 7)])
def test_the_kernel_is_the_integral_over_the_geodesic(d: int, n: int) -> None:
    start, end = basis(d, n, 1), basis(d, n, 2)
    kernel = geodesic_flow(start, end)
    np.testing.assert_allclose(kernel.numpy(), integrated(start, end), atol=2.5e-9)
    assert float(kernel.trace()) == pytest.approx(n, abs=1e-9)
    torch.testing.assert_close(kernel, kernel.T)
    assert float(torch.linalg.eigvalsh(kernel).min()) > -1e-10


def test_equal_subspaces_give_their_projection_whatever_their_bases() -> None:
    p = basis(9, 4, 3)
    torch.testing.assert_close(geodesic_flow(p, p), p @ p.T, atol=1e-7, rtol=0)
    turned = p @ basis(4, 4, 4)
    torch.testing.assert_close(geodesic_flow(p, turned), p @ p.T, atol=1e-7, rtol=0)
    end = basis(9, 4, 5)
    torch.testing.assert_close(geodesic_flow(p, end @ basis(4, 4, 6)), geodesic_flow(turned, end), atol=1e-10, rtol=0)


def test_orthogonal_lines_by_hand() -> None:
    """theta = pi/2: half of each projection, and (1 - cos pi) / (2 pi) = 1 / pi across."""
    e = torch.eye(3, dtype=torch.float64)
    expected = torch.tensor([[0.5, 1 / math.pi, 0], [1 / math.pi, 0.5, 0], [0, 0, 0]], dtype=torch.float64)
    torch.testing.assert_close(geodesic_flow(e[:, :1], e[:, 1:2]), expected)


@pytest.mark.parametrize("angle", [1e-2, 2e-4, 1.01e-4, 0.99e-4, 1e-5])
def test_small_angles_have_no_step(angle: float) -> None:
    """lambda1 -> 1 - theta^2/3, lambda2 -> theta/2, lambda3 -> theta^2/3."""
    start = torch.tensor([[1.0], [0.0]], dtype=torch.float64)
    end = torch.tensor([[math.cos(angle)], [math.sin(angle)]], dtype=torch.float64)
    kernel = geodesic_flow(start, end)
    assert float(kernel[0, 0]) == pytest.approx(1 - angle**2 / 3, abs=angle**4)
    assert float(kernel[0, 1]) == pytest.approx(angle / 2, rel=1e-4)
    assert float(kernel[1, 1]) == pytest.approx(angle**2 / 3, rel=1e-3)
    vanishing = torch.tensor([[1.0], [1e-8]], dtype=torch.float64)
    assert bool(geodesic_flow(start, vanishing).isfinite().all())


def test_a_subspace_is_where_the_unit_features_lie() -> None:
    features = torch.randn(12, 9, generator=torch_generator(7))
    unit = np.stack([f / np.linalg.norm(f) for f in features.double().numpy()])
    _, vectors = np.linalg.eigh(unit.T @ unit)
    largest = vectors[:, -4:]
    found = subspace(features, 4)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found.T @ found, torch.eye(4, dtype=torch.float64))
    np.testing.assert_allclose((found @ found.T).numpy(), largest @ largest.T, atol=1e-5)
    lengths = torch.rand(12, 1, generator=torch_generator(8)) + 0.5
    again = subspace(features * lengths, 4)
    torch.testing.assert_close(again @ again.T, found @ found.T, atol=1e-5, rtol=0)


def test_the_distance_by_loops_and_zero_between_equals() -> None:
    z = torch.randn(5, 6, generator=torch_generator(9), dtype=torch.float64)
    old = torch.randn(5, 6, generator=torch_generator(10), dtype=torch.float64)
    kernel = geodesic_flow(basis(6, 3, 1), basis(6, 3, 2))
    g = kernel.numpy()
    expected = 0.0
    for a, b in zip(z.numpy(), old.numpy(), strict=True):
        expected += (1 - a @ g @ b / math.sqrt((a @ g @ a) * (b @ g @ b))) / 5
    assert float(geodesic_distance(z, old, kernel)) == pytest.approx(expected)
    assert float(geodesic_distance(3 * z, old, kernel)) == pytest.approx(expected)
    assert float(geodesic_distance(z, 2 * z, kernel)) == pytest.approx(0, abs=1e-12)
    assert float(geodesic_distance(z, -z, kernel)) == pytest.approx(2)


def test_the_distances_gradient_is_the_features_own() -> None:
    kernel = geodesic_flow(basis(6, 3, 1), basis(6, 3, 2))
    z = torch.randn(4, 6, generator=torch_generator(9), dtype=torch.float64, requires_grad=True)
    old = torch.randn(4, 6, generator=torch_generator(10), dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: geodesic_distance(x, old, kernel), (z,))
    geodesic_distance(z, old, kernel).backward()
    assert old.grad is None
    assert not subspace(z, 2).requires_grad


@pytest.mark.parametrize(("images", "d", "n"), [(6, 20, 4), (20, 8, 4), (4, 10, 2), (10, 10, 5)])
def test_subspaces_have_two_less_than_the_batch_and_half_the_features(images: int, d: int, n: int) -> None:
    features = torch.randn(images, d, generator=torch_generator(11), requires_grad=True)
    teacher = features.detach() + torch.randn(images, d, generator=torch_generator(12)) / 2
    found = GeoDL().distance(features, teacher)
    kernel = torch.from_numpy(integrated(subspace(teacher, n), subspace(features, n)))
    torch.testing.assert_close(found, geodesic_distance(features, teacher, kernel))
    assert 0 < float(found.detach()) < 2
    (slope,) = torch.autograd.grad(found, features)
    (fixed,) = torch.autograd.grad(geodesic_distance(features, teacher, kernel), features)
    torch.testing.assert_close(slope, fixed)  # no gradient through the kernel
    assert float(GeoDL().distance(teacher, teacher)) == pytest.approx(0, abs=1e-6)


def terms(method: GeoDL, images: int, old: bool = True) -> dict[str, Tensor]:
    draw = torch.randn(40, 30, generator=torch_generator(13))
    teacher = Answers((3, 3), logits=draw[20 : 20 + images, :6], features=draw[20 : 20 + images, 8:24])
    context: Any = SimpleNamespace(
        model=Answers((3, 3, 2), logits=draw[:images, :8], features=draw[:images, 8:24]),
        predecessor=teacher if old else None,
        registry=SimpleNamespace(growths=(3, 3, 2)),
    )
    batch: Any = SimpleNamespace(images=torch.zeros(images, 1), labels=torch.arange(images) % 8)
    found = method.loss(context, batch)
    torch.testing.assert_close(found["classification"], F.cross_entropy(draw[:images, :8], batch.labels))
    if "geodesic" in found and method.strength:
        distance = method.distance(draw[:images, 8:24], draw[20 : 20 + images, 8:24])
        torch.testing.assert_close(found["geodesic"], method.strength * math.sqrt(6 / 2) * distance)
    if "distillation" in found:
        t = method.temperature
        q, p = (draw[20 : 20 + images, :6] / t).softmax(1), (draw[:images, :6] / t).softmax(1)
        torch.testing.assert_close(found["distillation"], method.distil * (q * (q / p).log()).sum(1).mean())
    return found


def test_the_distance_weighs_lambda_times_the_root_of_old_over_new_classes() -> None:
    assert GeoDL().strength == 10
    assert set(terms(GeoDL(), 10)) == {"classification", "geodesic"}
    assert set(terms(GeoDL(strength=14.0), 4)) == {"classification", "geodesic"}
    assert set(terms(GeoDL(distil=0.5), 10)) == {"classification", "geodesic", "distillation"}


def test_the_first_task_and_batches_of_a_few_images_are_plain_classification() -> None:
    assert set(terms(GeoDL(), 10, old=False)) == {"classification"}
    for images in (1, 2, 3):
        assert set(terms(GeoDL(), images)) == {"classification"}


def test_images_that_are_alike_or_have_no_feature_stay_finite() -> None:
    one = torch.randn(1, 16, generator=torch_generator(14))
    alike = one.expand(8, 16).clone().requires_grad_()
    for teacher in (one.expand(8, 16), torch.zeros(8, 16)):
        distance = GeoDL().distance(alike, teacher)
        (slope,) = torch.autograd.grad(distance, alike)
        assert bool(distance.isfinite())
        assert bool(slope.isfinite().all())


def test_newcomers_stayers_and_clients_with_one_image_take_part(small: dict[str, Any]) -> None:
    plan = {**small["plan"], "partition": "dirichlet:0.3", "selected": 5, "move_on": 0.5, "zo_data": "memory"}
    federation = federation_of("geodl", {**small, "plan": plan, "train": {"epochs": 1, "batch": 5}})
    lines = [done.line for done in run_rounds(federation, Serial())]
    assert "geodesic" not in lines[0]["losses"]
    assert all(0 < line["losses"]["geodesic"] < 10 * math.sqrt(2) * 2 for line in lines[2:])


def test_a_rate_that_is_too_high_is_answered_in_one_sentence(small: dict[str, Any]) -> None:
    """Features that are no longer finite have no decomposition; that must not be an error of its own."""
    federation = federation_of("geodl", {**small, "train": {"epochs": 2, "batch": 4}})
    rounds = run_rounds(federation, Serial())
    next(rounds)
    next(rounds)
    training = federation.enrolment.training
    wild = replace(training, optimiser=replace(training.optimiser, lr=1e30))
    federation.enrolment = replace(federation.enrolment, training=wild)
    with pytest.raises(HoldfastError, match="no longer finite"):
        list(run_rounds(federation, Serial(), start=2))
