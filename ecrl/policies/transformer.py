"""A small transformer as pure functions. A prefix is read once, and further tokens are decoded after the prefix.

The prefix tokens attend to each other. `read_prefix` returns the cache: the keys and values of the prefix in each
layer. Decoded tokens attend to the prefix and to each other. There are two ways to decode:

- `decode` computes all tokens in one pass. A mask defines which tokens each token attends to.
- `decode_one` computes one token, and stores its keys and values in a cache of a fixed size. The token attends to the
  earlier tokens. With a causal mask, `decode` gives the same results, up to rounding.

A layer normalises its input before the attention and before the perceptron:

    x = x + attention(norm_1(x)) W_out + b_out
    x = x + gelu(norm_2(x) W_up + b_up) W_down + b_down

Source: Vaswani et al. 2017, arXiv:1706.03762; Xiong et al. 2020, arXiv:2002.04745 (normalisation before each part).
"""

from collections.abc import Sequence
from math import sqrt
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from tensordict import TensorDict
from torch import Tensor

from ecrl import rng


class KeysAndValues(NamedTuple):
    """Keys and values of m tokens in one layer, each `[n, H, m, D]` for H heads of size D."""

    keys: Tensor
    values: Tensor


def init_linear(key: Tensor, inputs: int, outputs: int, scale: float = 1.0) -> TensorDict:
    """Return the weights of a linear layer. The matrix has the variance `scale^2 / inputs`, and the bias is 0.

    The matrix is drawn from a 0-d key.
    """
    weight = scale / sqrt(inputs) * rng.normal(key, (inputs, outputs))
    return TensorDict({"weight": weight, "bias": torch.zeros(outputs)}, []).to(torch.get_default_dtype())


def linear(weights: Any, x: Tensor) -> Tensor:
    """Return `x W + b`."""
    return x @ weights["weight"] + weights["bias"]


def init_norm(width: int) -> TensorDict:
    """Return the weights of a layer normalisation."""
    return TensorDict({"weight": torch.ones(width), "bias": torch.zeros(width)}, [])


def norm(weights: Any, x: Tensor) -> Tensor:
    """Normalise the last axis to mean 0 and variance 1, and then scale and shift it."""
    return F.layer_norm(x, x.shape[-1:], weights["weight"], weights["bias"])


def init_layers(key: Tensor, width: int, layers: int) -> TensorDict:
    """Return the weights of the layers, `layer_0` and so on, drawn from a 0-d key.

    The initial output weights of each residual branch are divided by the square root of the number of branches, as in
    GPT-2.
    """
    small = 1.0 / sqrt(2 * layers)

    def layer(key: Tensor) -> TensorDict:
        keys = rng.split(key, 4).unbind()
        parts = {
            "norm_1": init_norm(width),
            "input": init_linear(keys[0], width, 3 * width),
            "output": init_linear(keys[1], width, width, small),
            "norm_2": init_norm(width),
            "up": init_linear(keys[2], width, 4 * width),
            "down": init_linear(keys[3], 4 * width, width, small),
        }
        return TensorDict(parts, [])

    return TensorDict({f"layer_{i}": layer(rng.fold_in(key, i)) for i in range(layers)}, [])


def _layers(weights: Any) -> list[Any]:
    return [weights[f"layer_{i}"] for i in range(len(weights.keys()))]


def _split_heads(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(-1, (heads, -1)).transpose(-3, -2)


def _queries(layer: Any, x: Tensor, heads: int) -> tuple[Tensor, KeysAndValues]:
    """Return the queries, keys and values of tokens `[n, m, width]`."""
    q, k, v = (_split_heads(part, heads) for part in linear(layer["input"], norm(layer["norm_1"], x)).chunk(3, -1))
    return q, KeysAndValues(k, v)


def attend(query: Tensor, seen: Sequence[tuple[KeysAndValues, Tensor | None]]) -> Tensor:
    """Compute the attention of tokens to several groups of tokens.

        softmax(query keys^T / sqrt(D)) values        over the tokens of all groups

    Args:
        query: `[n, H, m, D]`.
        seen: the groups, each with a bool mask that is True for visible tokens. A mask broadcasts to
            `[n, H, m, tokens of the group]`. None means that all tokens of the group are visible.

    Returns: `[n, H, m, D]`.
    Gradient: flows through the query, and through the keys and values of visible tokens.
    """
    scores = []
    for (keys, _), mask in seen:
        score = query @ keys.transpose(-2, -1) / sqrt(query.shape[-1])
        scores.append(score if mask is None else score.masked_fill(~mask, torch.finfo(score.dtype).min))
    weights = torch.cat(scores, -1).softmax(-1).split([score.shape[-1] for score in scores], -1)
    parts = [weight @ values for weight, ((_, values), _) in zip(weights, seen, strict=True)]
    return torch.stack(parts).sum(0) if len(parts) > 1 else parts[0]


def _add(layer: Any, x: Tensor, attended: Tensor) -> Tensor:
    """Add the attention and the perceptron of a layer to its input."""
    x = x + linear(layer["output"], attended.transpose(-3, -2).flatten(-2))
    return x + linear(layer["down"], F.gelu(linear(layer["up"], norm(layer["norm_2"], x))))


def read_prefix(
    weights: TensorDict, heads: int, x: Tensor, seen: Tensor, *, has_output: bool
) -> tuple[list[KeysAndValues], Tensor | None]:
    """Return the cache of the prefix in each layer and, if `has_output`, the output of the last layer.

    Args:
        weights: weights of the layers.
        heads: number of heads.
        x: prefix tokens `[n, P, width]`.
        seen: `[n, P]` bool, False for tokens that no token attends to, such as padding.
        has_output: if False, the last layer only computes its keys and values.

    Returns: the cache, and `[n, P, width]` or None.
    Gradient: flows through `weights` and `x`.
    """
    cache, layers = [], _layers(weights)
    for i, layer in enumerate(layers):
        query, own = _queries(layer, x, heads)
        cache.append(own)
        if i + 1 < len(layers) or has_output:
            x = _add(layer, x, attend(query, [(own, seen[:, None, None])]))
    return cache, x if has_output else None


def decode(
    weights: TensorDict,
    heads: int,
    prefix: Sequence[KeysAndValues],
    seen: Tensor,
    x: Tensor,
    mask: Tensor | None,
) -> Tensor:
    """Decode all tokens in one pass, and return the output of the last layer.

    Args:
        weights: weights of the layers.
        heads: number of heads.
        prefix: cache of the prefix.
        seen: `[n, P]` bool, False for prefix tokens that no token attends to.
        x: tokens `[n, m, width]`.
        mask: `[m, m]` bool, True in row i and column j if token i attends to token j. None if all tokens attend to each
            other.

    Returns: `[n, m, width]`.
    Gradient: flows through `weights`, `prefix` and `x`.
    """
    for layer, before in zip(_layers(weights), prefix, strict=True):
        query, own = _queries(layer, x, heads)
        x = _add(layer, x, attend(query, [(before, seen[:, None, None]), (own, mask)]))
    return x


def empty_cache(prefix: Sequence[KeysAndValues], size: int) -> KeysAndValues:
    """Return an empty cache for all layers, with room for `size` tokens.

    The keys and the values are zeros, each `[layers, n, H, size, D]`.
    """
    n, heads, _, width = prefix[0].keys.shape
    keys, values = (prefix[0].keys.new_zeros(len(prefix), n, heads, size, width) for _ in range(2))
    return KeysAndValues(keys, values)


def decode_one(
    weights: TensorDict,
    heads: int,
    prefix: Sequence[KeysAndValues],
    seen: Tensor,
    cache: KeysAndValues,
    position: Tensor,
    x: Tensor,
) -> tuple[KeysAndValues, Tensor]:
    """Decode the token at a position. The token attends to the prefix, to the earlier tokens and to itself.

    Args:
        weights: weights of the layers.
        heads: number of heads.
        prefix: cache of the prefix.
        seen: `[n, P]` bool, False for prefix tokens that no token attends to.
        cache: cache of the tokens before this one, from `empty_cache` and earlier calls.
        position: index of the token, 0-d int64.
        x: the token `[n, width]`.

    Returns: the cache with this token, and the output of the last layer, `[n, width]`.
    Gradient: flows through `weights`, `prefix`, `cache` and `x`.
    """
    slots = torch.arange(cache.keys.shape[-2], device=x.device)
    here, until, x = (slots == position)[:, None], slots <= position, x[:, None]
    keys, values = [], []
    for i, (layer, before) in enumerate(zip(_layers(weights), prefix, strict=True)):
        query, new = _queries(layer, x, heads)
        keys.append(torch.where(here, new.keys, cache.keys[i]))
        values.append(torch.where(here, new.values, cache.values[i]))
        own = KeysAndValues(keys[-1], values[-1])
        x = _add(layer, x, attend(query, [(before, seen[:, None, None]), (own, until)]))
    return KeysAndValues(torch.stack(keys), torch.stack(values)), x[:, 0]
