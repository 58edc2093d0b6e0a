"""The cost of reconstructing prototypes together, one by one, and by the authors' procedure."""

from collections.abc import Callable
from time import perf_counter

import torch
from torch import Tensor

from holdfast.bench import Ratio, Report
from holdfast.data import glyphs
from holdfast.machine import one_thread
from holdfast.models.encoder import GradientEncoder
from holdfast.privacy.encode import Gradients, prototype_gradients
from holdfast.privacy.reconstruct import reconstruct
from holdfast.seeding import torch_generator

PROTOTYPES, SIZE, CLASSES, ITERATIONS = 48, 32, 100, 60
SINGLE = 16  # images that are also reconstructed alone
PUBLISHED = 2  # images that are also reconstructed as published
STEPS, INNER, RATE = 250, 20, 0.1  # of the published procedure
BOUND = 3.0


def measure(tell: Callable[[str], None]) -> Report:
    """Reconstructs the same prototypes in the three ways."""
    with one_thread():
        encoder = GradientEncoder(SIZE, CLASSES, torch_generator(0))
        images = torch.from_numpy(glyphs.render(PROTOTYPES, 1, 1, SIZE, 0)["train_images"]).float() / 255
        labels = torch.arange(PROTOTYPES)
        wanted = prototype_gradients(encoder, images, labels)
        noise = torch.randn(images.shape, generator=torch_generator(1))

        def rebuild(some: slice) -> tuple[float, Tensor]:
            start = perf_counter()
            mine = {name: gradient[some] for name, gradient in wanted.items()}
            _, losses = reconstruct(encoder, mine, labels[some], noise[some], ITERATIONS)
            return perf_counter() - start, losses

        rebuild(slice(0, 2))
        tell(f"{PROTOTYPES} prototypes together")
        seconds, losses = rebuild(slice(None))
        together = seconds / PROTOTYPES
        tell(f"{SINGLE} of them one by one")
        alone = sum(rebuild(slice(i, i + 1))[0] for i in range(SINGLE)) / SINGLE
        tell(f"{PUBLISHED} of them by the published procedure, to the same loss")
        published, reached = 0.0, 0
        for i in range(PUBLISHED):
            mine = {name: gradient[i : i + 1] for name, gradient in wanted.items()}
            start = perf_counter()
            reached += _published(encoder, mine, labels[i : i + 1], noise[i : i + 1], float(losses[i]))
            published += (perf_counter() - start) / PUBLISHED
    rows = [
        [f"{PROTOTYPES} together, {ITERATIONS} iterations", f"{1000 * together:.1f}", "1.0"],
        ["one by one", f"{1000 * alone:.1f}", f"{alone / together:.1f}"],
        [
            f"published ({reached} of {PUBLISHED} reached the same loss)",
            f"{1000 * published:.1f}",
            f"{published / together:.1f}",
        ],
    ]
    facts = {"together": together, "one_by_one": alone, "published": published, "published_reached_the_loss": reached}
    ratios = [Ratio("one by one / together", alone / together, BOUND)]
    return Report(ratios, ["prototypes", "ms per image", "times"], rows, {"seconds_an_image": facts})


def _published(encoder: GradientEncoder, wanted: Gradients, label: Tensor, start: Tensor, enough: float) -> bool:
    """Reconstructs one image with PyTorch's optimiser and automatic differentiation. Returns whether the loss fell to
    `enough`."""
    image = start.clone().requires_grad_()
    optimiser = torch.optim.LBFGS([image], lr=RATE, max_iter=INNER)
    parameters = dict(encoder.named_parameters())
    loss = torch.inf

    def closure() -> Tensor:
        nonlocal loss
        optimiser.zero_grad()
        error = torch.nn.functional.cross_entropy(encoder(image), label)
        found = torch.autograd.grad(error, list(parameters.values()), create_graph=True)
        pairs = zip(found, (wanted[name][0] for name in parameters), strict=True)
        distance = torch.stack([(a - b).square().sum() for a, b in pairs]).sum()
        distance.backward()
        loss = float(distance.detach())
        return distance

    for _ in range(STEPS):
        optimiser.step(closure)
        if loss <= enough:
            return True
    return False
