"""The backend `builtin` of the policy `vla`: a small network that learns from scratch to follow instructions.

The network computes the distribution of an action in three steps:

- Convolutions compute the positions of keypoints in each image (`ecrl.policies.convolutions`). The words of the
  instruction scale and shift the features of the convolutions (FiLM).
- A transformer (`ecrl.policies.transformer`) reads a prefix: the words, tokens of the keypoints, one token of all other
  observations and, with a value network, one token of the critic.
- The transformer decodes one token for each number in a chunk of actions. The values of a token are the bins of
  `ecrl.policies.action_bins`. With parallel decoding, the tokens are independent given the observation. With
  autoregressive decoding, each token depends on the values of the earlier tokens.

Both `act` and `evaluate` divide the logits of a token by the setting `temperature`.
"""

from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self, cast

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from tensordict import TensorDict
from torch import Tensor, nn

from ecrl import kernels as k
from ecrl import rng
from ecrl.config import PolicyConfig
from ecrl.config.model import LIST, NUMBER, NonNegative, Positive, by_kind
from ecrl.errors import ConfigError
from ecrl.kernels import loop
from ecrl.memory import check_room
from ecrl.policies.action_bins import ActionBins
from ecrl.policies.convolutions import ImageKeypoints, KeypointsConfig, Sizes
from ecrl.policies.core import Policy, flatten, one_batch, sum_tokens
from ecrl.policies.images import describe, layer_name
from ecrl.policies.mlp import Width
from ecrl.policies.networks import NetworkConfig, Pure, make_network, pure, seeded
from ecrl.policies.transformer import (
    KeysAndValues,
    decode,
    decode_one,
    empty_cache,
    init_layers,
    init_linear,
    init_norm,
    linear,
    norm,
    read_prefix,
)
from ecrl.policies.vla_config import VLAConfig
from ecrl.policies.vla_inputs import VLAInputs, vla_inputs
from ecrl.registry import register_vla_backend
from ecrl.spaces import Box, Space, box, flat_dim

_CONDITION = 32
"""Size of a word's embedding that scales and shifts the features of the convolutions."""

_Bins = Annotated[int, Field(ge=2, le=4096)]
_Small = Annotated[int, Field(ge=1, le=256)]


class BuiltinVLAConfig(VLAConfig):
    """Settings of the backend `builtin`. With the defaults, its network has about 0.3 million weights."""

    inert: ClassVar = {"gaussian_sigma": "actions are sampled as tokens; policy.vla.temperature sets their randomness"}

    decoding: Literal["parallel", "autoregressive"] = Field(
        "parallel",
        description=(
            "parallel: all tokens of an action at once; autoregressive: one after the other, each given the earlier "
            "tokens"
        ),
    )
    bins: Annotated[
        Annotated[_Bins, NUMBER] | Annotated[tuple[_Bins, ...], Field(strict=False, min_length=1), LIST],
        by_kind("a number, or a list of numbers"),
    ] = Field(32, description="number of bins of each dimension of an action; a list has one entry per dimension")
    temperature: Positive = Field(1.0, description="number that divides the logits, when acting and when learning")
    width: Width = Field(96, description="size of a token of the transformer; a multiple of heads")
    layers: _Small = Field(2, description="number of layers of the transformer")
    heads: _Small = Field(4, description="number of attention heads of each layer")
    channels: Sizes = Field(
        (32, 48), description="output channels of each convolution; each convolution halves height and width"
    )
    keypoints: Width = Field(
        48, description="keypoints per image, which are the output channels of a final convolution"
    )
    image_tokens: _Small = Field(4, description="tokens per image; each token is a linear function of the keypoints")
    instruction: str | None = Field(
        None,
        description=(
            'name of the observation with the word ids of the instruction; by default, the observation "instruction", '
            "if any"
        ),
    )
    label_smoothing: NonNegative = Field(
        1.0, description="standard deviation, in bins, of the smoothed target in imitation; 0 for a target of one bin"
    )
    critic: NetworkConfig | None = Field(
        None, description="value network on the output of the transformer; no critic if absent"
    )

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.width % self.heads:
            raise ValueError(f"width={self.width} is not a multiple of heads={self.heads}; change one of them")
        if self.model_path is not None:
            problem = "model_path is given, but backend builtin begins with new weights"
            raise ValueError(f"{problem}; leave it out, or choose a backend that reads checkpoints")
        return self


class _ImageTokens(nn.Module):
    """Network that returns the tokens `[B, tokens, width]` of B images.

    The features of the convolutions depend on the argument `condition` of `forward`. This tensor, `[B, size]`, is the
    sum of the embeddings of the words in the instruction. If the observations have no instruction, `forward` ignores
    `condition`.
    """

    def __init__(self, space: Box, condition: int, cfg: BuiltinVLAConfig):
        super().__init__()
        sizes, last = len(cfg.channels), (3,) * len(cfg.channels)
        of_keypoints: dict[str, Any] = {
            "channels": (*cfg.channels, cfg.keypoints),
            "kernel_sizes": (5, *last),
            "strides": (*(2,) * sizes, 1),
            "activation": "gelu",
        }
        self.keypoints = ImageKeypoints(space, condition, KeypointsConfig(**of_keypoints))
        self.tokens = nn.Linear(self.keypoints.outputs, cfg.image_tokens * cfg.width)
        self.width = cfg.width

    def forward(self, image: Tensor, condition: Tensor) -> Tensor:
        return self.tokens(self.keypoints(image, condition)).unflatten(-1, (-1, self.width))


class _Network(NamedTuple):
    """The network as pure functions of its weights, for observations with one batch axis.

    Attributes:
        cfg: settings.
        inputs: the parts of an observation.
        images: pure functions of the networks that read the images (`_ImageTokens`), by the name of the image.
        critic: pure functions of the value network, or None.
        bins: the bins of an action.
    """

    cfg: BuiltinVLAConfig
    inputs: VLAInputs
    images: dict[str, Pure]
    critic: Pure | None
    bins: ActionBins

    def init(self, key: Tensor) -> TensorDict:
        """Return new weights, drawn from a 0-d key on the CPU.

        The initial weights of the head of the action tokens are near 0, so a new policy chooses all bins with similar
        probability. The word embeddings that condition the convolutions also start small, so the convolutions learn
        features that all phrasings of an instruction share. With a standard deviation of 1 instead of 0.2 for these
        embeddings, two of five policies that behaviour cloning trained did not learn to find the blocks of
        ReachColorRL.
        """
        cfg, width, count = self.cfg, self.cfg.width, len(self.bins.space.low)
        keys = iter(rng.split(key, 8).unbind())
        parts: dict[str, Any] = {}
        with seeded(next(keys)):
            images = {layer_name(name): network.init() for name, network in self.images.items()}
        if images:
            parts["images"] = TensorDict(images, [])
        own = next(keys)
        if self.inputs.words is not None:
            length, values = len(self.inputs.words[1]), max(self.inputs.words[1])
            position = 0.02 * rng.normal(rng.fold_in(own, 2), (length, width))
            words = {"embedding": rng.normal(rng.fold_in(own, 0), (values, width)), "position": position}
            if images:
                words["condition"] = 0.2 * rng.normal(rng.fold_in(own, 1), (values, _CONDITION))
            parts["words"] = TensorDict(words, [])
        if flat_dim(self.inputs.others):
            parts["others"] = init_linear(next(keys), flat_dim(self.inputs.others), width)
        parts["layers"] = init_layers(next(keys), width, cfg.layers)
        actions: dict[str, Any] = {
            "query": 0.02 * rng.normal(next(keys), (count, width)),
            "norm": init_norm(width),
            "head": init_linear(next(keys), width, self.bins.width, 0.1),
        }
        if cfg.decoding == "autoregressive":
            before = rng.normal(next(keys), (self.bins.width + 1, width))
            actions |= {"embedding": before[1:].clone(), "start": before[0].clone()}
        parts["actions"] = TensorDict(actions, [])
        if self.critic is not None:
            own = rng.fold_in(key, 1)
            with seeded(rng.fold_in(own, 0)):
                network = self.critic.init()
            token = rng.normal(rng.fold_in(own, 1), (width,))
            parts["critic"] = TensorDict({"token": token, "norm": init_norm(width), "network": network}, [])
        return TensorDict(parts, []).apply(lambda x: x.to(torch.get_default_dtype()))

    def prefix(self, params: TensorDict, obs: Any) -> tuple[Tensor, Tensor]:
        """Return the tokens of observations, `[n, P, width]`, and a bool mask `[n, P]` of the tokens visible to others.

        The mask is False for padding. The mask is also False for the critic's token, so that the critic does not change
        the actions.
        """
        tokens, seen = [], []
        condition = torch.empty(0)
        if self.inputs.words is not None:
            words, weights = self.inputs.part(obs, self.inputs.words[0]), cast(Any, params["words"])
            is_word = words != 0
            tokens.append(F.embedding(words, weights["embedding"]) + weights["position"])
            seen.append(is_word)
            if self.images:
                of_words = F.embedding(words, weights["condition"])
                condition = of_words.masked_fill(~is_word.unsqueeze(-1), 0.0).sum(-2)
        for name, network in self.images.items():
            weights = cast(TensorDict, params["images", layer_name(name)])
            tokens.append(network.forward(weights, self.inputs.part(obs, name), condition))
        if flat_dim(self.inputs.others):
            tokens.append(linear(params["others"], flatten(obs, self.inputs.others)).unsqueeze(-2))
        n = tokens[0].shape[0]
        if self.critic is not None:
            tokens.append(params["critic", "token"].expand(n, 1, -1))
        x = torch.cat(tokens, -2)
        padding = torch.ones(n, x.shape[-2] - sum(mask.shape[-1] for mask in seen), dtype=torch.bool, device=x.device)
        if self.critic is not None:
            padding = torch.cat((padding[:, :-1], torch.zeros_like(padding[:, -1:])), -1)
        return x, torch.cat((*seen, padding), -1)

    def read(self, params: TensorDict, obs: Any, has_output: bool) -> tuple[list[KeysAndValues], Tensor, Tensor | None]:
        """Return the cache and the mask of the prefix and, if `has_output`, the output of the critic's token."""
        x, seen = self.prefix(params, obs)
        cache, out = read_prefix(params["layers"], self.cfg.heads, x, seen, has_output=has_output)
        return cache, seen, None if out is None else out[:, -1]

    def logits(self, params: TensorDict, cache: list[KeysAndValues], seen: Tensor, tokens: Tensor | None) -> Tensor:
        """Return the logits `[n, k * A, bins]` of all tokens in one pass.

        `tokens` are the chosen bins `[n, k * A]`, which only autoregressive decoding reads (teacher forcing).
        """
        weights, mask = cast(Any, params["actions"]), None
        x = weights["query"].expand(seen.shape[0], -1, -1)
        if self.cfg.decoding == "autoregressive":
            chosen = F.embedding(cast(Tensor, tokens)[:, :-1], weights["embedding"])
            first = weights["start"].expand(chosen.shape[0], 1, -1)
            x = x + torch.cat((first, chosen), 1)
            slots = torch.arange(x.shape[1], device=x.device)
            mask = slots <= slots.unsqueeze(-1)
        out = decode(params["layers"], self.cfg.heads, cache, seen, x, mask)
        return self.scaled(weights, out, self.bins.legal(out.device))

    def scaled(self, weights: Any, out: Tensor, legal: Tensor) -> Tensor:
        """Return the logits of decoded tokens, divided by the temperature. Illegal bins are masked."""
        logits = linear(weights["head"], norm(weights["norm"], out)) / self.cfg.temperature
        return k.mask_logits(logits, legal.expand_as(logits))

    def sample(self, params: TensorDict, obs: Any, noise: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return chosen bins and their log-probabilities, each `[n, k * A]`. `noise` is `[n, k * A, bins]` or None."""
        cache, seen, _ = self.read(params, obs, False)
        if self.cfg.decoding == "autoregressive":
            return self.sample_in_turn(params, cache, seen, noise)
        logits = self.logits(params, cache, seen, None)
        tokens = _chosen(logits, noise)
        return tokens, k.categorical_log_prob(logits, tokens)

    def sample_in_turn(
        self, params: TensorDict, cache: list[KeysAndValues], seen: Tensor, noise: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Sample one token after the other, in a loop with a cache of the keys and values of earlier tokens."""
        weights: Any = params["actions"]
        query, n = weights["query"], seen.shape[0]
        own = empty_cache(cache, len(query))
        xs = {"query": query, "position": torch.arange(len(query), device=query.device)}
        xs["legal"] = self.bins.legal(query.device)
        if noise is not None:
            xs["noise"] = noise.movedim(1, 0)
        carry = {"keys": own.keys, "values": own.values, "before": weights["start"].expand(n, -1).clone()}

        def body(
            carry: dict[str, Tensor],
            x: dict[str, Tensor],
            layers: TensorDict,
            actions: TensorDict,
            prefix: list,
            seen: Tensor,
        ) -> Any:
            before = [KeysAndValues(*pair) for pair in prefix]
            own, token = KeysAndValues(carry["keys"], carry["values"]), x["query"] + carry["before"]
            own, out = decode_one(layers, self.cfg.heads, before, seen, own, x["position"], token)
            logits = self.scaled(actions, out, x["legal"])
            token = _chosen(logits, x.get("noise"))
            after = {"keys": own.keys, "values": own.values, "before": F.embedding(token, actions["embedding"])}
            return after, (token, k.categorical_log_prob(logits, token))

        constants = params["layers"], weights.exclude("query", "start"), [tuple(pair) for pair in cache], seen
        tokens, log_prob = loop(body, carry, xs, *constants)[1]
        return tokens.t(), log_prob.t()

    def value(self, params: TensorDict, features: Tensor) -> Tensor:
        """Return V `[n]` from the output of the critic's token, `[n, width]`."""
        critic, weights = cast(Pure, self.critic), cast(TensorDict, params["critic"])
        return critic.forward(weights["network"], norm(weights["norm"], features)).squeeze(-1)


def _chosen(logits: Tensor, noise: Tensor | None) -> Tensor:
    return k.categorical_mode(logits) if noise is None else k.categorical_sample(logits, noise)


def _smoothed(tokens: Tensor, legal: Tensor, width: float, like: Tensor) -> Tensor:
    """Return the target of imitation: probabilities `[*B, bins]`, given the demonstrated bins `tokens`, `[*B]`.

        target[j] = exp(-(j - token)^2 / (2 width^2)) / sum        over the legal bins
        target[j] = 1 if j is the token, otherwise 0               if width is 0

    `width` is a standard deviation in bins. The bool tensor `legal` is True for the bins that a token may choose.
    """
    distance = (torch.arange(legal.shape[-1], device=tokens.device) - tokens.unsqueeze(-1)).to(like.dtype)
    if width == 0.0:
        return (distance == 0.0).to(like.dtype)
    score = (-0.5 * (distance / width).square()).masked_fill(~legal, -torch.inf)
    return score.softmax(-1)


def _bins(cfg: BuiltinVLAConfig, space: Box) -> ActionBins:
    """Return the bins of an action space. Raise ConfigError unless the space is float32 and matches `cfg.bins`."""
    if space.dtype != torch.float32:
        raise ConfigError(f"policy vla: actions of {describe(space)} are not supported; use float32")
    size = space.shape[-1]
    counts = cfg.bins if isinstance(cfg.bins, tuple) else (cfg.bins,) * size
    if len(counts) != size:
        raise ConfigError(f"policy.vla.bins: has {len(counts)} entries for steps of {size} numbers; give {size}")
    return ActionBins(space, counts)


def _network(cfg: BuiltinVLAConfig, observation_space: Space, action_space: Box, bf16: bool) -> _Network:
    bins, inputs = _bins(cfg, action_space), vla_inputs(observation_space, cfg.instruction)
    if bf16 and not inputs.images:
        raise ConfigError("policy.bf16: only convolutions run in bfloat16, but there is no image; leave it out")
    weights = 12 * cfg.layers * cfg.width**2
    check_room(8 * weights, torch.device("cpu"), f"policy.vla.width: {weights:,} weights and their gradients")
    condition = _CONDITION if inputs.words else 0
    images = {
        name: pure(lambda space=space: _ImageTokens(space, condition, cfg), "policy.vla", bf16)
        for name, space in inputs.images.items()
    }
    features, critic = box(-torch.inf, torch.inf, cfg.width), None
    if cfg.critic is not None:
        critic = make_network(cfg.critic, features, 1, False, "policy.vla.critic")
    return _Network(cfg, inputs, images, critic, bins)


@register_vla_backend("builtin")
def builtin(cfg: BuiltinVLAConfig, observation_space: Space, action_space: Box, policy_cfg: PolicyConfig) -> Policy:
    """Build the policy of the backend `builtin`.

    An action is a chunk of k steps with A numbers each. `act` returns the bins of these numbers as `action_tokens`,
    int64 `[*B, k, A]`, and the action, whose numbers are the centres of these bins. `sample_log_prob` and the results
    of `evaluate` have the shape `[*B, k, A]`. `evaluate` reads `action_tokens` or, if steps have none, the bins of
    `action`. If an entry of an action has equal bounds, its token does not count in the log-probability, and `act` also
    returns a `token_mask`.

    The params are `layers`, `actions` and, with a value network, `critic`. If the observations have images, an
    instruction or other parts, the params also have `images`, `words` or `others`, respectively.
    """
    if not policy_cfg.clip_actions:
        raise ConfigError("policy.clip_actions: false, but bins are inside the action space; leave it out")
    net = _network(cfg, observation_space, action_space, policy_cfg.bf16)
    bins, shape = net.bins, net.bins.shape
    counted = tuple(not fixed for fixed in bins.fixed())

    def init(key: Tensor) -> TensorDict:
        return net.init(key.cpu()).to(key.device)

    def draw(keys: Tensor) -> Tensor:
        return rng.gumbel(keys, (*shape, bins.width))

    def act(params: TensorDict, carry: TensorDict, obs: Any, noise: Tensor | None) -> tuple[TensorDict, TensorDict]:
        rows, batch = one_batch(obs, net.inputs.space)
        noise = None if noise is None else noise.reshape(batch.numel(), -1, bins.width)
        tokens, log_prob = (x.reshape(*batch, *shape) for x in net.sample(params, rows, noise))
        fields = {
            "action": bins.centres(tokens, log_prob),
            "action_tokens": tokens,
            "sample_log_prob": log_prob,
        }
        if not all(counted):
            mask = torch.tensor(counted, device=tokens.device).reshape(shape)
            fields["token_mask"] = mask.expand_as(tokens).clone()
        return carry, TensorDict(cast(Any, fields), batch)

    def tokens_of(steps: TensorDict) -> Tensor:
        return steps["action_tokens"] if "action_tokens" in steps else bins.tokens(steps["action"])

    def logits_of(params: TensorDict, steps: TensorDict, tokens: Tensor, has_output: bool = False) -> Any:
        rows, batch = one_batch(steps["obs"], net.inputs.space)
        cache, seen, features = net.read(params, rows, has_output)
        logits = net.logits(params, cache, seen, tokens.reshape(batch.numel(), -1))
        return logits.reshape(*batch, *shape, bins.width), features

    def evaluate(params: TensorDict, carry: TensorDict, steps: TensorDict) -> tuple[Tensor, Tensor]:
        tokens = tokens_of(steps)
        logits, _ = logits_of(params, steps, tokens)
        return k.categorical_log_prob(logits, tokens), k.categorical_entropy(logits)

    def imitation_loss(params: TensorDict, carry: TensorDict, steps: TensorDict) -> Tensor:
        tokens = tokens_of(steps)
        logits, _ = logits_of(params, steps, tokens)
        legal = bins.legal(logits.device).reshape(*shape, bins.width)
        target = _smoothed(tokens, legal, cfg.label_smoothing, logits)
        log_p = F.log_softmax(logits, -1).masked_fill(~legal, 0.0)
        return sum_tokens(-(target * log_p).sum(-1), steps)

    policy = Policy(init, draw, act, evaluate, None, imitation_loss=imitation_loss)
    if net.critic is None:
        return policy

    def value(params: TensorDict, carry: TensorDict, obs: Any) -> Tensor:
        rows, batch = one_batch(obs, net.inputs.space)
        features = net.read(params, rows, True)[2]
        return net.value(params, cast(Tensor, features)).reshape(batch)

    def evaluate_and_value(params: TensorDict, carry: TensorDict, steps: TensorDict) -> tuple[Tensor, Tensor, Tensor]:
        tokens = tokens_of(steps)
        logits, features = logits_of(params, steps, tokens, True)
        values = net.value(params, features).reshape(tokens.shape[:-2])
        return k.categorical_log_prob(logits, tokens), k.categorical_entropy(logits), values

    return replace(policy, value=value, evaluate_and_value=evaluate_and_value)
