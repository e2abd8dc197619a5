"""A vision transformer, whose weights have the same names as in the package timm and in OpenVLA's checkpoints.

    x = patches W^T + b + position                                               before the first block
    x = x + scale1 * attention(norm(x));    x = x + scale2 * mlp(norm(x))        in each block

If the model has a class token or registers, these learnt tokens are placed before the tokens of the patches.

The output consists of the patch tokens after the second to last block, without a final norm.

Sources: Dosovitskiy et al. 2021, arXiv:2010.11929. Darcet et al. 2024 (registers), arXiv:2309.16588. Karamcheti et al.
2024 (the second to last block), arXiv:2402.07865.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_EPS = 1e-6
_HEADS = {"vit_tiny": 3, "vit_small": 6, "vit_base": 12, "vit_large": 16, "vit_so400m": 16, "test_vit": 2}
"""Number of attention heads of timm's models, by the beginning of the model's name."""


class ViTSizes(NamedTuple):
    """Sizes of a vision transformer.

    Attributes:
        width: size of a token.
        hidden: number of hidden units of each MLP.
        heads: number of attention heads.
        blocks: number of blocks that are computed: one fewer than in the checkpoint, because the output is taken before
            the last block.
        patch: height and width of a patch, pixels.
        image: height and width of an image, pixels.
        tokens: names (`cls_token` or `reg_token`) and numbers of the tokens before the patches.
        positions: number of tokens with a position embedding.
        is_scaled: True if `ls1` and `ls2` scale the outputs of attention and MLP.
    """

    width: int
    hidden: int
    heads: int
    blocks: int
    patch: int
    image: int
    tokens: tuple[tuple[str, int], ...]
    positions: int
    is_scaled: bool

    @property
    def patches(self) -> int:
        """Return the number of patches of an image."""
        return (self.image // self.patch) ** 2

    @classmethod
    def of(cls, name: str, image: int, shapes: Mapping[str, tuple[int, ...]]) -> Self:
        """Read the sizes from a model's name in timm and the shapes of its weights.

        Raises: ValueError if the name or the weights belong to another kind of model.
        """
        heads = next((count for start, count in _HEADS.items() if name.startswith(start)), None)
        if heads is None:
            raise ValueError(f"unknown vision model {name!r}; known: {', '.join(_HEADS)}")
        needed = "patch_embed.proj.weight", "pos_embed", "blocks.0.mlp.fc1.weight"
        if absent := [key for key in needed if key not in shapes]:
            raise ValueError(f"the vision model {name!r} has no weight {absent[0]!r}; copy the checkpoint again")
        width, _, patch, _ = shapes[needed[0]]
        blocks = 1 + max(int(key.split(".")[1]) for key in shapes if key.startswith("blocks."))
        tokens = tuple((key, shapes[key][1]) for key in ("cls_token", "reg_token") if key in shapes)
        sizes = cls(
            width=width,
            hidden=shapes[needed[2]][0],
            heads=heads,
            blocks=blocks - 1,
            patch=patch,
            image=image,
            tokens=tokens,
            positions=shapes["pos_embed"][1],
            is_scaled="blocks.0.ls1.scale_factor" in shapes,
        )
        possible = sizes.patches, sizes.patches + sum(count for _, count in tokens)
        if blocks < 2 or sizes.positions not in possible:
            problem = f"{blocks} blocks and {sizes.positions} positions"
            counts = " or ".join(map(str, dict.fromkeys(possible)))
            raise ValueError(
                f"the vision model {name!r} has {problem}, expected 2 blocks or more and {counts} positions for "
                f"images of {image} pixels; copy the checkpoint again"
            )
        return sizes


class _Scale(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.scale_factor = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale_factor


class _Attention(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.proj(F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2))


class _MLP(nn.Module):
    def __init__(self, width: int, hidden: int):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


class _Block(nn.Module):
    def __init__(self, sizes: ViTSizes):
        super().__init__()
        width, scale = sizes.width, _Scale if sizes.is_scaled else nn.Identity
        self.norm1, self.attn, self.ls1 = nn.LayerNorm(width, _EPS), _Attention(width, sizes.heads), scale(width)
        self.norm2, self.mlp, self.ls2 = nn.LayerNorm(width, _EPS), _MLP(width, sizes.hidden), scale(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.ls1(self.attn(self.norm1(x)))
        return x + self.ls2(self.mlp(self.norm2(x)))


class _Patches(nn.Module):
    def __init__(self, sizes: ViTSizes):
        super().__init__()
        self.proj = nn.Conv2d(3, sizes.width, sizes.patch, sizes.patch)

    def forward(self, pixels: Tensor) -> Tensor:
        return self.proj(pixels).flatten(2).transpose(1, 2)


class VisionTransformer(nn.Module):
    """Network that maps standardised images `[n, 3, size, size]` to tokens of patches `[n, patches, width]`."""

    def __init__(self, sizes: ViTSizes):
        super().__init__()
        self.sizes = sizes
        for name, count in sizes.tokens:
            setattr(self, name, nn.Parameter(torch.zeros(1, count, sizes.width)))
        self.pos_embed = nn.Parameter(torch.zeros(1, sizes.positions, sizes.width))
        self.patch_embed = _Patches(sizes)
        self.blocks = nn.ModuleList(_Block(sizes) for _ in range(sizes.blocks))

    def forward(self, pixels: Tensor) -> Tensor:
        """Return the tokens of the patches after the second to last block of the pretrained model."""
        x, n = self.patch_embed(pixels), len(pixels)
        before: list[Any] = [getattr(self, name).expand(n, -1, -1) for name, _ in self.sizes.tokens]
        if self.sizes.positions == x.shape[1]:
            x = torch.cat((*before, x + self.pos_embed), 1)
        else:
            x = torch.cat((*before, x), 1) + self.pos_embed
        for block in self.blocks:
            x = block(x)
        return x[:, -self.sizes.patches :]
