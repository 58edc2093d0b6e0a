r"""Pretrains a narrow ResNet-18 centrally on TinyImageNet's classes 75-99 at 32 px: `python scripts/pretrain.py`.

It writes the backbone alone, in safetensors, to runs/pretrained.safetensors (--out). The benchmark protocol `tiny-mini`
reports on classes 0-24 and tunes on 50-74, so that it never meets these. "From pretrained against from scratch" is
then, for three seeds each:

    python scripts/pretrain.py --out runs/pretrained.safetensors
    holdfast compare configs/tiny-mini.toml --methods "\
        lga[model.name=resnet18,model.width=16],\
        lga[model.name=resnet18,model.width=16,model.weights=runs/pretrained.safetensors],\
        lga[model.name=resnet18,model.width=16,model.weights=runs/pretrained.safetensors,model.freeze=2],\
        fedavg[replay=true,model.name=resnet18,model.width=16],\
        fedavg[replay=true,model.name=resnet18,model.width=16,model.weights=runs/pretrained.safetensors]" \
        --seeds 2021,2022,2023 --out runs/pretrained

The same command gives the same file again on the same machine."""

import argparse
import json
import math
from pathlib import Path
from time import perf_counter

import torch
import torch.nn.functional as F
from safetensors.torch import save

from holdfast.data.images import DataSet
from holdfast.data.settings import DataSettings
from holdfast.data.sources import load_data
from holdfast.files import write_atomic
from holdfast.machine import choose_device, one_thread
from holdfast.models.incremental import IncrementalModel, ModelSpec
from holdfast.models.passes import in_chunks
from holdfast.models.transform import Transform
from holdfast.progress import track
from holdfast.seeding import torch_generator

SEED = 2021
LR, MOMENTUM, DECAY = 0.1, 0.9, 5e-4


def accuracy(model: IncrementalModel, data: DataSet, transform: Transform, device: torch.device) -> float:
    """On the test images."""
    rows = torch.arange(len(data.test))
    scores = in_chunks(
        model, lambda r: transform.plain(data.test.pixels(r).to(device)), rows, lambda x: model(x).logits
    )
    return float((scores.argmax(dim=1) == data.test.labels).double().mean())


def train(model: IncrementalModel, data: DataSet, transform: Transform, epochs: int, batch: int) -> None:
    """SGD on the cross-entropy; the learning rate falls along a cosine."""
    optimiser = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM, weight_decay=DECAY)
    for epoch in track(range(epochs), "pretraining", epochs):
        model.train()
        for group in optimiser.param_groups:
            group["lr"] = LR * (1 + math.cos(math.pi * epoch / epochs)) / 2
        order = torch.randperm(len(data.train), generator=torch_generator(SEED, "pretrain", "batches", epoch))
        augment = torch_generator(SEED, "pretrain", "augment", epoch)
        for rows in order.split(batch):
            images = transform.augmented(data.train.pixels(rows).to(model.device), augment)
            optimiser.zero_grad()
            F.cross_entropy(model(images).logits, data.train.labels[rows].to(model.device)).backward()
            optimiser.step()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/pretrained.safetensors"))
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--images", type=int, default=None, help="training images per class; all if not given")
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--device", default="auto")
    chosen = parser.parse_args()
    device = choose_device(chosen.device)
    settings = DataSettings("tiny-imagenet", classes=25, first_class=75, size=32, train_per_class=chosen.images)
    data = load_data(settings)
    transform = Transform(data.mean, data.std, data.flip)
    model = IncrementalModel(ModelSpec("resnet18", "batch", data.size, chosen.width), torch_generator(SEED, "pretrain"))
    model.grow(len(data.classes), torch_generator(SEED, "pretrain", "head"))
    model.to(device)
    start = perf_counter()
    with one_thread():
        train(model, data, transform, chosen.epochs, chosen.batch)
        found = accuracy(model, data, transform, device)
    weights = {name: tensor.cpu().contiguous() for name, tensor in model.backbone.state_dict().items()}
    chosen.out.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(chosen.out, save(weights))
    facts = {"classes": len(data.classes), "images": len(data.train), "epochs": chosen.epochs, "accuracy": found}
    print(json.dumps({"file": str(chosen.out), **facts, "seconds": round(perf_counter() - start, 1)}))


if __name__ == "__main__":
    main()
