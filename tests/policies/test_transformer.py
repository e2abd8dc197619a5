"""The transformer equals an independent oracle in float64, and cached decoding equals one pass."""

import pytest
import torch
import torch.nn.functional as F
from support.checks import close

from ecrl import rng
from ecrl.policies.transformer import (
    decode,
    decode_one,
    empty_cache,
    init_layers,
    read_prefix,
)

N, P, M, WIDTH, HEADS, LAYERS = 3, 5, 4, 12, 3, 2


def case(dtype=torch.float64):
    """Return weights that are not 0 anywhere, a prefix, its mask and tokens."""
    weights = init_layers(rng.key(0), WIDTH, LAYERS)
    names = sorted(weights.keys(True, True))
    for i, name in enumerate(names):
        x = weights[name]
        weights[name] = (x + 0.3 * rng.normal(rng.fold_in(rng.key(1), i), x.shape)).to(dtype)
    prefix, tokens = (rng.normal(rng.key(i), (N, m, WIDTH)).to(dtype) for i, m in ((2, P), (3, M)))
    seen = torch.ones(N, P, dtype=torch.bool)
    seen[0, 1] = seen[2, 3] = False
    return weights, prefix, seen, tokens


def oracle(weights, x, mask):
    """All tokens in one sequence `[P + M, WIDTH]`, one example after the other, with torch's own attention."""
    for i in range(LAYERS):
        w = weights[f"layer_{i}"]

        def affine(name, x, w=w):
            return x @ w[name]["weight"] + w[name]["bias"]

        def normalised(name, x, w=w):
            centred = x - x.mean(-1, keepdim=True)
            scaled = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
            return scaled * w[name]["weight"] + w[name]["bias"]

        q, k, v = affine("input", normalised("norm_1", x)).split(WIDTH, -1)
        heads = [
            F.scaled_dot_product_attention(*(part[:, h * 4 : (h + 1) * 4] for part in (q, k, v)), attn_mask=mask)
            for h in range(HEADS)
        ]
        x = x + affine("output", torch.cat(heads, -1))
        x = x + affine("down", F.gelu(affine("up", normalised("norm_2", x))))
    return x


def whole_mask(seen, causal):
    mask = torch.zeros(P + M, P + M, dtype=torch.bool)
    mask[:, :P] = seen
    mask[P:, P:] = torch.ones(M, M).tril().bool() if causal else True
    return mask


@pytest.mark.parametrize("causal", [False, True])
def test_one_pass_equals_the_oracle(causal):
    weights, prefix, seen, tokens = case()
    cache, features = read_prefix(weights, HEADS, prefix, seen, has_output=True)
    mask = torch.ones(M, M).tril().bool() if causal else None
    out = decode(weights, HEADS, cache, seen, tokens, mask)
    for n in range(N):
        expected = oracle(weights, torch.cat((prefix[n], tokens[n])), whole_mask(seen[n], causal))
        close(features[n], expected[:P], tol=1e-10)
        close(out[n], expected[P:], tol=1e-10)


def test_the_cache_alone_needs_no_output_of_the_last_layer():
    weights, prefix, seen, _ = case()
    cache, features = read_prefix(weights, HEADS, prefix, seen, has_output=False)
    expected, _ = read_prefix(weights, HEADS, prefix, seen, has_output=True)
    assert features is None
    for one, other in zip(cache, expected, strict=True):
        assert torch.equal(one.keys, other.keys) and torch.equal(one.values, other.values)


@pytest.mark.parametrize(("dtype", "tol"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_decoding_one_by_one_equals_one_pass(dtype, tol):
    weights, prefix, seen, tokens = case(dtype)
    cache, _ = read_prefix(weights, HEADS, prefix, seen, has_output=False)
    expected = decode(weights, HEADS, cache, seen, tokens, torch.ones(M, M).tril().bool())
    own = empty_cache(cache, M)
    for i in range(M):
        own, out = decode_one(weights, HEADS, cache, seen, own, torch.tensor(i), tokens[:, i])
        close(out, expected[:, i], tol=tol)


def test_what_is_not_seen_changes_nothing():
    weights, prefix, seen, tokens = case()
    other = prefix.masked_fill(~seen.unsqueeze(-1), 9.0)
    out = [
        decode(weights, HEADS, read_prefix(weights, HEADS, x, seen, has_output=False)[0], seen, tokens, None)
        for x in (prefix, other)
    ]
    assert torch.equal(*out)


def test_gradients_are_those_of_finite_differences():
    weights, prefix, seen, tokens = case()

    def f(prefix, tokens):
        cache, _ = read_prefix(weights, HEADS, prefix, seen, has_output=False)
        return decode(weights, HEADS, cache, seen, tokens, torch.ones(M, M).tril().bool())[..., :2]

    assert torch.autograd.gradcheck(f, (prefix.requires_grad_(), tokens.requires_grad_()))
