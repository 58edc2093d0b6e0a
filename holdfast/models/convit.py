"""A small vision transformer with one token and one head per task (DyTox): patches, gated and class attention."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from holdfast.models.backbone import Backbone
from holdfast.models.incremental import IncrementalModel, ModelSpec, Output, require_maps
from holdfast.models.layers import Particular, materialise, without_values

PATCHES = ((64, 4), (128, 8))  # below so many pixels, patches of so many per side; LARGE_PATCH for larger images
LARGE_PATCH = 16


def patch_of(image_size: int) -> int:
    """The side of a patch: 4 at 32 pixels, 8 at 64 and 84, 16 at 224, so that there are never many patches."""
    return next((patch for below, patch in PATCHES if image_size < below), LARGE_PATCH)


class GatedAttention(Particular):
    """Attention by content and by position, mixed by a gate that each head learns (ConViT). It is initialised like a
    convolution: each head attends to one neighbouring position, in a square around the patch, and copies its value."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.queries_keys = nn.Linear(width, 2 * width, bias=False)
        self.values, self.out = nn.Linear(width, width, bias=False), nn.Linear(width, width)
        self.place = nn.Linear(3, heads)
        self.gate = nn.Parameter(torch.empty(heads))

    @torch.no_grad()
    def begin(self) -> None:
        """Head h attends to position h of a square around the patch: -|step - h|^2, up to a constant."""
        nn.init.eye_(self.values.weight)
        side = math.isqrt(self.heads)
        for head in range(side**2):
            across, down = head % side - (side - 1) / 2, head // side - (side - 1) / 2
            self.place.weight[head] = torch.tensor([2 * across, 2 * down, -1.0])
        self.place.bias.zero_()
        self.gate.fill_(1.0)

    def forward(self, x: Tensor, places: Tensor) -> Tensor:
        """x (B, N, D), the relative positions of the N patches (N, N, 3)."""
        queries, keys = self.queries_keys(x).unflatten(2, (2, self.heads, -1)).permute(2, 0, 3, 1, 4)
        content = (queries @ keys.transpose(2, 3) / math.sqrt(queries.shape[-1])).softmax(dim=-1)  # (B, h, N, N)
        place = self.place(places).permute(2, 0, 1).softmax(dim=-1)  # (h, N, N)
        gate = torch.sigmoid(self.gate).view(1, -1, 1, 1)
        values = self.values(x).unflatten(2, (self.heads, -1)).transpose(1, 2)
        mixed = ((1 - gate) * content + gate * place) @ values
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out


class ClassAttention(nn.Module):
    """Every token attends to itself and to all patches, but to no other token."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.queries, self.keys_values = nn.Linear(width, width, bias=False), nn.Linear(width, 2 * width, bias=False)
        self.out = nn.Linear(width, width)

    def forward(self, tokens: Tensor, patches: Tensor) -> Tensor:
        """tokens (T, D), patches (B, N, D), to (B, T, D). The patches' keys and values are computed once."""
        queries = self.queries(tokens).unflatten(1, (self.heads, -1)).transpose(0, 1)  # (h, T, d)
        own_keys, own_values = self.keys_values(tokens).unflatten(1, (2, self.heads, -1)).permute(1, 2, 0, 3)
        keys, values = self.keys_values(patches).unflatten(2, (2, self.heads, -1)).permute(2, 0, 3, 1, 4)
        own = (queries * own_keys).sum(dim=2, keepdim=True).expand(patches.shape[0], -1, -1, -1)  # (B, h, T, 1)
        scores = torch.cat([own, queries @ keys.transpose(2, 3)], dim=3) / math.sqrt(queries.shape[-1])
        weights = scores.softmax(dim=3)
        mixed = weights[..., :1] * own_values + weights[..., 1:] @ values  # (B, h, T, d)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out


class Mlp(nn.Sequential):
    """Two linear layers with a hidden layer four times as wide."""

    def __init__(self, width: int) -> None:
        super().__init__(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


class EncoderBlock(nn.Module):
    """Gated attention and a perceptron, each with layer norm before it and a residual connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), GatedAttention(width, heads)
        self.norm2, self.mlp = nn.LayerNorm(width), Mlp(width)

    def forward(self, x: Tensor, places: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), places)
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class DecoderBlock(nn.Module):
    """Class attention and a perceptron, for each token separately."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), ClassAttention(width, heads)
        self.norm2, self.mlp = nn.LayerNorm(width), Mlp(width)

    def forward(self, tokens: Tensor, patches: Tensor) -> Tensor:
        attended = tokens + self.attention(self.norm1(tokens), self.norm1(patches))
        out: Tensor = attended + self.mlp(self.norm2(attended))
        return out


class Encoder(nn.Module):
    """Images to patches (B, N, D): image patches with learned position embeddings, through blocks of gated attention;
    or the last maps of a convolutional backbone, unchanged."""

    def __init__(self, spec: ModelSpec, width: int, heads: int, blocks: int, trunk: Backbone | None) -> None:
        super().__init__()
        self.trunk = trunk
        side = 1 if trunk else patch_of(spec.image_size)
        self.patches = nn.Conv2d(trunk.channels[-1] if trunk else 3, width, side, side)
        count = math.ceil(spec.image_size / side)
        self.rest = count * side - spec.image_size  # pixels that the last patches lack
        self.positions = None if trunk else nn.Embedding(count**2, width)
        self.blocks = nn.ModuleList(EncoderBlock(width, heads) for _ in range(0 if trunk else blocks))

    def parts(self) -> list[list[nn.Module]]:
        """Those of the convolutional backbone; else the patches and their positions, and every block."""
        if self.trunk:
            return self.trunk.parts()
        assert self.positions is not None
        return [[self.patches, self.positions], *([block] for block in self.blocks)]

    def forward(self, images: Tensor) -> Tensor:
        maps = F.relu(self.trunk(images)[1][-1]) if self.trunk else F.pad(images, (0, self.rest, 0, self.rest))
        grid: Tensor = self.patches(maps)
        x = grid.flatten(2).transpose(1, 2)
        if self.positions is None:
            return x
        x = x + self.positions.weight
        places = relative_places(*grid.shape[-2:]).to(x)
        for block in self.blocks:
            x = block(x, places)
        return x


class TokenModel(IncrementalModel):
    """An encoder that all tasks share; one token and one head per task; and a divergence head that tells the newest
    task's classes from all old ones, which the next growth replaces. Features are the outputs of all tokens."""

    def __init__(
        self, spec: ModelSpec, rng: torch.Generator, width: int, heads: int, blocks: int, convolutional: bool
    ) -> None:
        nn.Module.__init__(self)
        trunk = spec.build_backbone(rng) if convolutional else None
        if trunk is not None:
            require_maps(trunk, spec)
        with torch.device("meta"):
            self.backbone = Encoder(spec, width, heads, blocks, trunk)
            self.decoder = DecoderBlock(width, heads)
        for part in (self.backbone, self.decoder):
            _materialise(part, rng)
        self.features = width
        self.tokens = nn.ParameterList()
        self._start(spec, self.backbone.parts())
        self.divergence: nn.Module | None = None

    @property
    def trunk(self) -> Backbone | None:
        assert isinstance(self.backbone, Encoder)
        return self.backbone.trunk

    @property
    def growths(self) -> list[int]:
        return [block[1].out_features for block in self.blocks]  # type: ignore[index]

    def grow(self, classes: int, rng: torch.Generator) -> None:
        super().grow(classes, rng)
        token = torch.empty(1, 1, self.features).normal_(0, 0.02, generator=rng)
        self.tokens.append(nn.Parameter(token.to(self.device)))
        with torch.device("meta"):
            divergence = nn.Sequential(nn.LayerNorm(self.features), nn.Linear(self.features, classes + 1))
        materialise(divergence, rng)
        self.divergence = divergence.to(self.device)

    def new_block(self, classes: int, rng: torch.Generator) -> nn.Module:
        with torch.device("meta"):
            block = nn.Sequential(nn.LayerNorm(self.features), nn.Linear(self.features, classes))
        materialise(block, rng)
        return block

    def classify(self, features: Tensor) -> Tensor:
        """The concatenated outputs of all tokens (B, T D), to logits (B, C)."""
        if not self.blocks:
            return features.new_zeros(len(features), 0)
        outputs = features.split(self.features, dim=1)
        return torch.cat([head(output) for head, output in zip(self.blocks, outputs, strict=True)], dim=1)

    def forward(self, images: Tensor) -> Output:
        patches = self.backbone(images)
        tokens = [token[0] for token in self.tokens]
        features = self.decoder(torch.cat(tokens), patches).flatten(1) if tokens else patches.mean(dim=1)
        return Output(self.classify(features), features, [])


@torch.no_grad()
def _materialise(module: nn.Module, rng: torch.Generator) -> None:
    """As for other networks, but the transformer's linear layers start as published: normal with a standard deviation
    of 0.02, biases 0. Heads, also as published, start like those of other networks."""
    parts = without_values(module)
    materialise(module, rng)
    for part in parts:
        if isinstance(part, nn.Linear):
            part.weight.normal_(0, 0.02, generator=rng)
            if part.bias is not None:
                part.bias.zero_()
    for part in parts:
        if isinstance(part, Particular):
            part.begin()


def relative_places(height: int, width: int) -> Tensor:
    """(N, N, 3): the horizontal, vertical and squared distance of each patch from each other one."""
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    place = torch.stack([columns.flatten(), rows.flatten()], dim=1).float()
    steps = place[None, :, :] - place[:, None, :]
    return torch.cat([steps, steps.square().sum(dim=2, keepdim=True)], dim=2)
