"""A backbone of your own: any `torch.nn.Module` that takes images and returns features, a feature map, or features and
the maps of its stages. Run this file, or use its class from a command in this folder:

    python examples/own_backbone.py
    holdfast run --dataset digits --tasks 5 --method lga --set model.name=own_backbone:Patches
"""

import torch
from torch import Tensor, nn

import holdfast


@holdfast.register_backbone("patches")
class Patches(nn.Module):
    """Patches of 4 x 4 pixels, mixed by two convolutions. It returns a feature map (B, C, h, w)."""

    def __init__(self, width: int = 64) -> None:  # model.width
        super().__init__()
        self.patches = nn.Conv2d(3, width, kernel_size=4, stride=4)
        self.mix = nn.Sequential(nn.GroupNorm(4, width), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1))
        self.out = nn.Sequential(nn.GroupNorm(4, width), nn.ReLU(), nn.Dropout(0.1), nn.Conv2d(width, 2 * width, 3))

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images)
        return torch.relu(self.out(x + self.mix(x)))


SMALL = {
    "data": {"name": "digits", "train_per_class": 60, "test_per_class": 30, "size": 16},
    "plan": {"tasks": 2, "rounds": 3, "clients": 4, "join_per_task": 1, "selected": 3, "memory": 100},
    "train": {"epochs": 3, "batch": 16},
    "method": {"name": "fedavg", "replay": True},
}

if __name__ == "__main__":
    for freeze in (0, 1):  # with 1 the patches keep their initial weights, and clients do not send them
        result = holdfast.run(SMALL, model={"name": "patches", "width": 32, "freeze": freeze})
        sent = result.bytes["server"]["up"] / 1e6
        print(f"{freeze} frozen: {result.last_accuracy:.1%} on all ten digits, {sent:.2f} MB sent back")
