"""Every aggregation rule against numbers by hand or by another route; outliers; server optimisers."""

import itertools
from statistics import median as middle
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

from holdfast.methods import METHODS
from holdfast.models.incremental import ModelSpec
from holdfast.protocol.messages import Reply
from holdfast.seeding import torch_generator
from holdfast.server.aggregation import (
    Aggregation,
    aggregate,
    clipped,
    geometric_median,
    gram,
    krum_order,
    update_norms,
)
from holdfast.server.optimiser import TAU, ServerOptimiser
from holdfast.server.server import Server

NAMES = ("mean", "samples", "median", "trimmed_mean", "krum", "multi_krum", "geometric_median")


def replies(count: int, seed: int = 0) -> list[Reply]:
    rng = torch_generator(seed)
    return [
        Reply(
            {
                "w": torch.randn(3, 4, generator=rng),
                "b": torch.randn(5, generator=rng),
                "stat": torch.rand(2, generator=rng),
                "count": torch.tensor(7 + i),
            },
            samples=i + 1,
        )
        for i in range(count)
    ]


OVER = {"w", "b"}


def points(some: list[Reply]) -> np.ndarray:
    """The models as vectors over the trainable tensors."""
    return np.stack([np.concatenate([r.weights[n].double().numpy().ravel() for n in ("w", "b")]) for r in some])


def columns(some: list[Reply], name: str) -> np.ndarray:
    return np.stack([reply.weights[name].double().numpy() for reply in some])


@pytest.mark.parametrize("count", [1, 2, 5, 6])
def test_median_and_trimmed_mean_by_coordinate(count: int) -> None:
    some = replies(count)
    found = aggregate(some, Aggregation("median"), OVER)
    for name in ("w", "b", "stat"):
        assert found[name].numpy() == pytest.approx(np.median(columns(some, name), axis=0), rel=1e-6)
    assert int(found["count"]) == 7
    trimmed = aggregate(some, Aggregation("trimmed_mean", trim=0.2), OVER)
    out = {1: 0, 2: 0, 5: 1, 6: 1}[count]
    expected = np.sort(columns(some, "w"), axis=0)[out : count - out].mean(axis=0)
    assert trimmed["w"].numpy() == pytest.approx(expected, rel=1e-6)


def test_trimmed_mean_by_hand() -> None:
    some = [Reply({"w": torch.tensor([float(x)])}, 1) for x in (100, 1, 2, 3, -50)]
    assert float(aggregate(some, Aggregation("trimmed_mean", trim=0.2), OVER)["w"]) == 2.0
    assert float(aggregate(some, Aggregation("trimmed_mean", trim=0.49), OVER)["w"]) == 2.0  # the middle one stays


def brute_krum(vectors: np.ndarray, hostile: int) -> list[int]:
    """By trying all sets of N - f - 2 others and taking the one with the least sum of squared distances."""
    count = len(vectors)
    near = max(1, count - hostile - 2)
    scores = []
    for i in range(count):
        others = [j for j in range(count) if j != i]
        sums = (
            sum(((vectors[i] - vectors[j]) ** 2).sum() for j in chosen)
            for chosen in itertools.combinations(others, near)
        )
        scores.append(min(sums))
    return sorted(range(count), key=lambda i: scores[i])


@pytest.mark.parametrize("hostile", [0, 1, 2])
@pytest.mark.parametrize("seed", range(5))
def test_krum_and_multi_krum_by_brute_force(seed: int, hostile: int) -> None:
    some = replies(6, seed)
    order = brute_krum(points(some), hostile)
    assert krum_order([reply.weights for reply in some], ["w", "b"], hostile) == order
    best = aggregate(some, Aggregation("krum", hostile=hostile), OVER)
    assert all(torch.equal(best[name], some[order[0]].weights[name]) for name in best)
    mean = aggregate(some, Aggregation("multi_krum", hostile=hostile), OVER)
    kept = sorted(order[: 6 - hostile])
    assert mean["stat"].numpy() == pytest.approx(columns([some[i] for i in kept], "stat").mean(axis=0), rel=1e-6)


@pytest.mark.parametrize("seed", range(3))
def test_geometric_median_by_minimising_the_sum_of_distances(seed: int) -> None:
    some = replies(5, seed)
    vectors = points(some)
    result = minimize(lambda z: np.linalg.norm(vectors - z, axis=1).sum(), vectors.mean(axis=0), tol=1e-10)
    weights = np.array(geometric_median(gram([reply.weights for reply in some], ["w", "b"])))
    assert weights.sum() == pytest.approx(1)
    assert weights @ vectors == pytest.approx(result.x, abs=2e-4)
    merged = aggregate(some, Aggregation("geometric_median"), OVER)
    assert merged["w"].numpy().ravel() == pytest.approx((weights @ vectors)[:12], abs=1e-5)


def test_geometric_median_on_a_line_is_the_median() -> None:
    some = [Reply({"w": torch.tensor([x])}, 1) for x in (0.0, 1.0, 2.0, 3.0, 1e6)]
    assert float(aggregate(some, Aggregation("geometric_median"), OVER)["w"]) == pytest.approx(2.0, abs=0.01)


@pytest.mark.parametrize("name", NAMES[2:])
def test_one_hostile_client_among_five_does_not_carry_the_model_away(name: str) -> None:
    """Wherever it stands in the order, and however far it goes."""
    honest = replies(5)
    for place in range(5):
        weights = {n: t * 1e9 if t.is_floating_point() else t for n, t in honest[place].weights.items()}
        some = [*honest[:place], Reply(weights, 1), *honest[place + 1 :]]
        assert float(aggregate(some, Aggregation(name), OVER)["w"].abs().max()) < 10, place


@pytest.mark.parametrize("name", NAMES)
def test_equal_clients_equal_one(name: str) -> None:
    merged = aggregate([replies(1)[0]] * 5, Aggregation(name), OVER)
    for key, tensor in replies(1)[0].weights.items():
        torch.testing.assert_close(merged[key], tensor, rtol=1e-7, atol=0)


# the server


def server_of(**settings: Any) -> Server:
    model = METHODS["fedavg"]().build_model(ModelSpec("convnet", "batch", 16), torch_generator(0))
    host = Server(model, 0, Aggregation(**settings))
    host.grow(("a", "b"))
    return host


def moved(host: Server, by: float) -> Reply:
    """A model whose parameters and statistics have all gone the same way."""
    rng = torch_generator(5)
    weights = {
        name: tensor + by * torch.rand(tensor.shape, generator=rng) if tensor.is_floating_point() else tensor + 1
        for name, tensor in host.weights.items()
    }
    return Reply(weights, 4)


def test_updates_that_are_too_long_are_refused_and_the_rest_is_as_without_them() -> None:
    host, without = server_of(outlier=3.0), server_of()
    some = [moved(host, by) for by in (0.1, 0.12, 50.0, 0.09)]
    norms = update_norms([reply.weights for reply in some], host.weights, host.trainable)
    refused = host.aggregate(list(enumerate(some)))
    without.aggregate([(i, some[i]) for i in (0, 1, 3)])
    assert [(one.client, one.kind) for one in refused] == [(2, "outlier")]
    assert f"{norms[2]:.3g}" in refused[0].reason
    assert all(torch.equal(tensor, without.weights[name]) for name, tensor in host.weights.items())
    flat = np.concatenate(
        [(some[0].weights[n] - server_of().weights[n]).numpy().ravel() for n in sorted(host.trainable)]
    )
    assert norms[0] == pytest.approx(np.linalg.norm(flat), rel=1e-5)


def test_clipping_shortens_them_to_the_limit() -> None:
    host, other = server_of(outlier=2.0, clip=True), server_of()
    some = [moved(host, by) for by in (0.1, 0.1, 8.0)]
    base = {name: tensor.clone() for name, tensor in host.weights.items()}
    norms = update_norms([reply.weights for reply in some], base, host.trainable)
    most = 2 * middle(norms)
    short = clipped(some[2].weights, base, most / norms[2])
    assert update_norms([short], base, host.trainable)[0] == pytest.approx(most, rel=1e-4)
    refused = host.aggregate(list(enumerate(some)))
    other.aggregate([(0, some[0]), (1, some[1]), (2, Reply(short, 4))])
    assert [(one.client, one.kind) for one in refused] == [(2, "clipped")]
    assert all(torch.equal(tensor, other.weights[name]) for name, tensor in host.weights.items())


@pytest.mark.parametrize("kind", ["momentum", "adam"])
def test_server_optimisers_by_hand_on_parameters_only(kind: str) -> None:
    host = server_of(optimiser=kind, rate=0.5, momentum=0.8, beta=0.9)
    first = second = 0.0
    name, statistic = "blocks.0.bias", "backbone.norms.0.running_mean"
    counter = "backbone.norms.0.num_batches_tracked"
    for by in (0.3, -0.2, 0.1):
        before, reply = host.weights[name].double().numpy().copy(), moved(host, by)
        host.aggregate([(0, reply)])
        step = reply.weights[name].double().numpy() - before
        if kind == "momentum":
            first = 0.8 * first + step
            expected = before + 0.5 * first
        else:
            first, second = 0.8 * first + 0.2 * step, 0.9 * second + 0.1 * step**2
            expected = before + 0.5 * first / (np.sqrt(second) + TAU)
        assert host.weights[name].numpy() == pytest.approx(expected, rel=1e-5)
        assert torch.equal(host.weights[statistic], reply.weights[statistic])
        assert torch.equal(host.weights[counter], reply.weights[counter])


@pytest.mark.parametrize("kind", ["none", "momentum", "adam"])
def test_the_optimisers_state_comes_back_to_the_bit(kind: str) -> None:
    host, again = server_of(optimiser=kind), server_of(optimiser=kind)
    host.aggregate([(0, moved(host, 0.3))])
    host.grow(("c",), 1)
    host.aggregate([(0, moved(host, 0.1))])
    again.restore(host.snapshot())
    for one in (host, again):
        one.aggregate([(0, moved(one, -0.2))])
    assert all(torch.equal(tensor, again.weights[name]) for name, tensor in host.weights.items())
    assert ServerOptimiser(Aggregation()).snapshot() == {}


def test_a_rate_of_one_without_momentum_is_the_aggregate() -> None:
    host, plain = server_of(optimiser="momentum", momentum=0.0, rate=1.0), server_of()
    reply = moved(host, 0.3)
    host.aggregate([(0, reply)])
    plain.aggregate([(0, reply)])
    for name, tensor in host.weights.items():
        torch.testing.assert_close(tensor, plain.weights[name], rtol=1e-6, atol=1e-7)
