"""The backend `openvla` of the policy `vla`: a pretrained OpenVLA or OpenVLA-OFT model.

The model reads images, an instruction and, in some checkpoints, the robot's state. The model returns one token for each
number in a chunk of actions:

    tokens = language_model([bos, projector(vision(images)), state, instruction, action tokens])
    number = centre of the token's bin between low and high

An action token is one of the last tokens of the vocabulary. `low` and `high` are the 1 % and 99 % quantiles of the data
that the model was trained on. The bins between `low` and `high` have equal widths. For a number that the checkpoint
does not scale, such as the opening of a gripper, the bins are between -1 and 1. There are two ways to decode:

- parallel (OpenVLA-OFT): all tokens in one pass. The inputs of these tokens are zeros, and each token attends to all
  other tokens.
- autoregressive (OpenVLA): one token after the other. Each token attends to the earlier tokens.

Sources: Kim et al. 2024 (OpenVLA), arXiv:2406.09246. Kim et al. 2025 (OpenVLA-OFT), arXiv:2502.19645. Li et al. 2025
(SimpleVLA-RL), arXiv:2509.09674.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, cast

import torch
import torch.nn.functional as F
from pydantic import Field
from tensordict import TensorDict
from torch import Tensor, nn

from ecrl import kernels as k
from ecrl import rng
from ecrl.config import Config, PolicyConfig
from ecrl.config.model import Positive
from ecrl.errors import ConfigError, extra
from ecrl.policies.checkpoint_folder import check_folder
from ecrl.policies.core import Policy, flatten, one_batch, policy_params
from ecrl.policies.images import channel_shape, to_channels
from ecrl.policies.low_rank import add_adapters, merged
from ecrl.policies.networks import Pure, make_network, pure
from ecrl.policies.openvla_checkpoint import (
    OpenVLAModel,
    Shape,
    Statistics,
    read_model,
    read_shape,
    read_statistics,
    write_model,
)
from ecrl.policies.pretrained import PretrainedConfig, pretrained_model, weights_of
from ecrl.policies.vla_inputs import VLAInputs, check_unscaled_images, vla_inputs
from ecrl.registry import register_vla_backend
from ecrl.spaces import Box, Space, box, flat_dim

_KIND, _PREFIX = "openvla", "openvla."
_STOP = 2
"""Id of the token that ends a sequence in Llama's vocabulary."""


class OpenVLAConfig(PretrainedConfig):
    """Settings of the backend `openvla`. The checkpoint at `model_path` sets the sizes of the network."""

    inert: ClassVar = {"gaussian_sigma": "actions are drawn as tokens"}

    decoding: Literal["parallel", "autoregressive"] = Field(
        "parallel",
        description="parallel: all tokens in one pass (OpenVLA-OFT); autoregressive: one after the other (OpenVLA)",
    )
    temperature: Positive = Field(
        1.0, description="number that divides the logits of tokens, when acting and when learning"
    )
    dataset: str | None = Field(
        None,
        description=(
            "name of the data set whose bounds of actions and states are used; required if the checkpoint has several "
            "data sets"
        ),
    )


class ActionTokens(NamedTuple):
    """Conversion between actions and the indices of action tokens.

    In the methods, a token is given by its index, not by its id. Indices count back from the end of the vocabulary: the
    token with the index i has the id `vocabulary - 1 - i`.

    Attributes:
        bins: number of action tokens. There are only `bins - 1` centres, because the last two tokens share a centre.
    """

    bins: int

    def numbers(self, tokens: Tensor, like: Tensor) -> Tensor:
        """Return the centres of tokens, from -1 to 1, in the dtype of `like`.

            edges = linspace(-1, 1, bins);    number = (edges[i] + edges[i + 1]) / 2,    i = min(token, bins - 2)

        >>> ActionTokens(5).numbers(torch.tensor([0, 1, 3, 4]), torch.zeros(()))
        tensor([-0.7500, -0.2500,  0.7500,  0.7500])
        """
        index = tokens.clamp(max=self.bins - 2).to(like.dtype)
        return (2.0 * index + 1.0) / (self.bins - 1) - 1.0

    def tokens(self, numbers: Tensor) -> Tensor:
        """Return the tokens of numbers, int64. Numbers are clipped to [-1, 1].

            edges = linspace(-1, 1, bins);    token = max(i such that edges[i] <= number)

        >>> ActionTokens(5).tokens(torch.tensor([-2.0, -0.3, 0.8, 1.0]))
        tensor([0, 1, 3, 4])
        """
        position = (numbers.clamp(-1.0, 1.0) + 1.0) * (0.5 * (self.bins - 1))
        return position.floor().to(torch.int64)


class _Model(nn.Module):
    """Module whose methods read observations, compute logits and sample tokens with the parts of an OpenVLA model."""

    def __init__(self, model: OpenVLAModel, decoding: str):
        super().__init__()
        self.openvla, self.is_parallel = model, decoding == "parallel"

    def _embed(self, ids: Tensor) -> Tensor:
        return cast(Any, self.openvla.language_model).model.embed_tokens(ids)

    def _prefix(self, images: Tensor, ids: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the tokens `[n, P, width]` of n observations, and a bool mask `[n, P]` that is False for padding."""
        words, found = self._embed(ids), [self.openvla.see(images)]
        if state is not None:
            found.append(self.openvla.proprio_projector(state).unsqueeze(1))
        x = torch.cat((words[:, :1], *found, words[:, 1:]), 1)
        before = ids.new_ones(len(ids), x.shape[1] - ids.shape[1] + 1, dtype=torch.bool)
        return x, torch.cat((before, ids[:, 1:] != 0), 1)

    def _read(self, x: Tensor, mask: Tensor, cache: Any = None) -> tuple[Tensor, Any]:
        """Return the outputs of the language model at the S new tokens `x`, `[n, S, width]`, and the argument `cache`.

        If `cache` is not None, the language model adds the keys and values of the new tokens to it. `mask` `[n, P + S]`
        is False for padding. The mask covers the P earlier tokens in the cache and the S new tokens. Without a cache, P
        is 0.
        """
        position = (mask.to(torch.int64).cumsum(-1) - 1).clamp(min=0)
        own = position[:, -x.shape[1] :]
        visible = mask.unsqueeze(1).expand(-1, x.shape[1], -1)
        if not self.is_parallel:
            visible = visible & (position.unsqueeze(1) <= own.unsqueeze(2))
        visible = visible | torch.eye(mask.shape[1], dtype=torch.bool, device=x.device)[-x.shape[1] :]
        language: Any = self.openvla.language_model
        out = language.model(
            inputs_embeds=x,
            attention_mask=visible.unsqueeze(1),
            position_ids=own,
            past_key_values=cache,
            use_cache=cache is not None,
        )
        return out.last_hidden_state, cache

    def _scores(self, features: Tensor) -> Tensor:
        """Return the logits `[..., bins]` of the action tokens, in the dtype of the weights even under autocast."""
        shape, rows = self.openvla.shape, cast(Any, self.openvla.language_model).lm_head.weight
        with torch.autocast(features.device.type, enabled=False):
            rows = rows[shape.vocabulary - shape.bins : shape.vocabulary].flip(0)
            return F.linear(features.to(rows.dtype), rows)

    def _token_input(self, tokens: Tensor) -> Tensor:
        return self._embed(self.openvla.shape.vocabulary - 1 - tokens)

    def logits(self, images: Tensor, ids: Tensor, state: Tensor | None, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits `[n, m, bins]` of all tokens in one pass, and the features `[n, width]` for a critic.

        `tokens` are the chosen tokens `[n, m]`. Parallel decoding reads only their shape.
        """
        prefix, mask = self._prefix(images, ids, state)
        count = tokens.shape[1]
        if self.is_parallel:
            end = self._embed(torch.full_like(tokens[:, :1], _STOP))
            after = torch.cat((end.new_zeros(len(end), count, end.shape[-1]), end), 1)
        else:
            after = self._token_input(tokens[:, :-1])
        seen = torch.cat((mask, mask.new_ones(after.shape[:2])), 1)
        out, _ = self._read(torch.cat((prefix, after), 1), seen)
        first = _last(out[:, : prefix.shape[1]], mask)
        rest = out[:, prefix.shape[1] : prefix.shape[1] + count - 1]
        return self._scores(torch.cat((first.unsqueeze(1), rest), 1)), first

    def features(self, images: Tensor, ids: Tensor, state: Tensor | None, count: int) -> Tensor:
        """Return the features `[n, width]` for a critic.

        `count` is the number of tokens of an action. With parallel decoding, the features depend on this number.
        """
        if self.is_parallel:
            return self.logits(images, ids, state, ids.new_zeros(len(ids), count))[1]
        prefix, mask = self._prefix(images, ids, state)
        return _last(self._read(prefix, mask)[0], mask)

    def sample_in_turn(
        self, images: Tensor, ids: Tensor, state: Tensor | None, noise: Tensor | None, count: int, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """Sample one token after the other. Return the tokens and their log-probabilities, each `[n, count]`."""
        from transformers import DynamicCache

        prefix, mask = self._prefix(images, ids, state)
        out, cache = self._read(prefix, mask, DynamicCache())
        features, tokens, log_probs = _last(out, mask), [], []
        for i in range(count):
            logits = self._scores(features) / temperature
            token = k.categorical_mode(logits) if noise is None else k.categorical_sample(logits, noise[:, i])
            tokens.append(token)
            log_probs.append(k.categorical_log_prob(logits, token))
            if i + 1 < count:
                mask = torch.cat((mask, mask.new_ones(len(mask), 1)), 1)
                features = self._read(self._token_input(token.unsqueeze(1)), mask, cache)[0][:, 0]
        return torch.stack(tokens, 1), torch.stack(log_probs, 1)


def _last(out: Tensor, mask: Tensor) -> Tensor:
    """Return the output at the last token whose mask is True, `[n, width]`."""
    last = mask.sum(-1) - 1
    return out.gather(1, last.reshape(-1, 1, 1).expand(-1, 1, out.shape[-1])).squeeze(1)


class _Reader(NamedTuple):
    """Conversion of observations to the inputs of the model.

    Attributes:
        inputs: the parts of an observation.
        has_state: True if the model reads a state.
    """

    inputs: VLAInputs
    has_state: bool

    def read(self, params: TensorDict, obs: Any) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return images `[n, cameras, 3, size, size]`, ids `[n, L]` and the state `[n, S]` or None."""
        images = [to_channels(self.inputs.part(obs, name), space) for name, space in self.inputs.images.items()]
        ids = self.inputs.part(obs, cast(Any, self.inputs.words)[0])
        if not self.has_state:
            return torch.stack(images, 1), ids, None
        state = _normalized(params, "proprio", flatten(obs, self.inputs.others)).clamp(-1.0, 1.0)
        return torch.stack(images, 1), ids, state


def _normalized(params: TensorDict, kind: str, x: Tensor) -> Tensor:
    """Scale each number whose flag `is_scaled` is True from [low, high] to [-1, 1]. `kind` is "action" or "proprio"."""
    low, high, is_scaled = _bounds(params, kind)
    return torch.where(is_scaled, 2.0 * (x - low) / (high - low + 1e-8) - 1.0, x)


def _in_units(params: TensorDict, kind: str, x: Tensor) -> Tensor:
    """Undo `_normalized`: scale each number whose flag `is_scaled` is True from [-1, 1] to [low, high]."""
    low, high, is_scaled = _bounds(params, kind)
    return torch.where(is_scaled, 0.5 * (x + 1.0) * (high - low + 1e-8) + low, x)


def _bounds(params: TensorDict, kind: str) -> tuple[Tensor, ...]:
    found = cast(Any, params["statistics", kind])
    return tuple(found[name] for name in Statistics._fields)


def _statistics_params(statistics: Mapping[str, Statistics]) -> dict[str, TensorDict]:
    """Return the bounds as frozen parameters, which the state of a run includes."""
    return {
        kind: TensorDict({name: torch.tensor(x) for name, x in bounds._asdict().items()}, [])
        for kind, bounds in statistics.items()
    }


def _reader(folder: Path, shape: Shape, cfg: OpenVLAConfig, observation_space: Space) -> _Reader:
    """Return the reader of the observations. Raise ConfigError if the observations do not fit the checkpoint."""
    inputs = vla_inputs(observation_space, cfg.instruction)
    if not inputs.images or inputs.words is None:
        absent = "instruction" if inputs.images else "image"
        raise ConfigError(f"policy vla: backend openvla needs an {absent}, but the observations have none; add one")
    size = shape.vision[0].image
    for name, space in inputs.images.items():
        if channel_shape(space) != (3, size, size):
            problem = f"image {name!r} is {list(space.shape)}, but the checkpoint reads [{size}, {size}, 3]"
            raise ConfigError(f"policy vla: {problem}; render it at this size")
    if max(inputs.words[1]) > shape.vocabulary:
        problem = f"{inputs.words[0]!r} has ids up to {max(inputs.words[1]) - 1}, but the checkpoint has"
        raise ConfigError(
            f"policy vla: {problem} {shape.vocabulary} tokens; encode instructions with encode_instructions"
        )
    numbers = flat_dim(inputs.others)
    if numbers != shape.state:
        reads = f"a state of {shape.state} numbers" if shape.state else "no state"
        problem = f"the observations beside images and instruction have {numbers} numbers, but the checkpoint reads"
        raise ConfigError(f"policy vla: {problem} {reads}; select observations that fit")
    return _Reader(inputs, bool(numbers))


def _make_model(folder: Path, shape: Shape, cfg: OpenVLAConfig) -> nn.Module:
    """Read the model and add the adapters. The weights of the adapters are drawn from torch's global generator."""
    model = read_model(folder, shape)
    if cfg.adapters is not None:
        add_adapters(model, cfg.adapters, "policy.vla.adapters")
    return _Model(model, cfg.decoding)


@register_vla_backend("openvla")
def openvla(cfg: OpenVLAConfig, observation_space: Space, action_space: Box, policy_cfg: PolicyConfig) -> Policy:
    """Build the policy of an OpenVLA checkpoint.

    An action is a chunk of k steps with A numbers each. `act` returns the tokens of an action as `action_tokens`, int64
    `[*B, k, A]`, and the action in units of the environment. `sample_log_prob` and the results of `evaluate` have the
    shape `[*B, k, A]`. `evaluate` reads `action_tokens` or, if steps have none, the tokens of `action`.

    The params are `model`, `adapters` and `critic`. Empty parts are left out. The frozen parameters are `base` and
    `statistics`. `base` has the weights that are not trained. `statistics` has the bounds of the actions and, if the
    model reads a state, the bounds of the state.

    Raises: ConfigError if the checkpoint cannot be read, or if it does not fit the environment. MissingExtraError if
        transformers is not installed.
    """
    folder = check_folder(cfg.model_path, _KIND)
    with extra("vla"):
        import transformers  # noqa: F401
    shape = read_shape(folder)
    reader = _reader(folder, shape, cfg, observation_space)
    if policy_cfg.normalize_obs and reader.has_state:
        raise ConfigError("policy.normalize_obs: true, but the checkpoint has bounds of the state; set it to false")
    check_unscaled_images(reader.inputs, policy_cfg.normalize_obs)
    chunk = action_space.shape[0] if len(action_space.shape) == 2 else 1, action_space.shape[-1]
    count, tokens = chunk[0] * chunk[1], ActionTokens(shape.bins)
    statistics = {"action": read_statistics(folder, cfg.dataset, "action", chunk[1])}
    if reader.has_state:
        statistics["proprio"] = read_statistics(folder, cfg.dataset, "proprio", shape.state)
    net = pure(lambda: _make_model(folder, shape, cfg), "policy.vla", policy_cfg.bf16)
    networks: dict[str, Pure] = {}
    if cfg.critic is not None:
        features = box(-torch.inf, torch.inf, shape.width)
        networks["critic"] = make_network(cfg.critic, features, 1, False, "policy.vla.critic")
    model = pretrained_model(net, cfg, lambda name: False, networks)

    def draw(keys: Tensor) -> Tensor:
        return rng.gumbel(keys, (*chunk, shape.bins))

    def sample(params: TensorDict, inputs: tuple, noise: Tensor | None) -> tuple[Tensor, Tensor]:
        weights = weights_of(params)
        if cfg.decoding == "autoregressive":
            return net.call(weights, "sample_in_turn", *inputs, noise, count, cfg.temperature)
        unknown = inputs[1].new_zeros(len(inputs[1]), count)
        logits = net.call(weights, "logits", *inputs, unknown)[0] / cfg.temperature
        chosen = k.categorical_mode(logits) if noise is None else k.categorical_sample(logits, noise)
        return chosen, k.categorical_log_prob(logits, chosen)

    def act(params: TensorDict, carry: TensorDict, obs: Any, drawn: Any) -> tuple[TensorDict, TensorDict]:
        rows, batch = one_batch(obs, reader.inputs.space)
        noise = None if drawn is None else drawn.reshape(batch.numel(), count, shape.bins)
        chosen, log_prob = (x.reshape(*batch, *chunk) for x in sample(params, reader.read(params, rows), noise))
        action = _in_units(params, "action", tokens.numbers(chosen, log_prob)).reshape(*batch, *action_space.shape)
        fields: dict[str, Any] = {"action": action, "action_tokens": chosen, "sample_log_prob": log_prob}
        return carry, TensorDict(fields, batch)

    def outputs(params: TensorDict, steps: TensorDict) -> tuple[Tensor, Tensor, Tensor, torch.Size]:
        rows, batch = one_batch(steps["obs"], reader.inputs.space)
        if "action_tokens" in steps:
            chosen = steps["action_tokens"]
        else:
            chosen = tokens.tokens(_normalized(params, "action", steps["action"].reshape(*batch, *chunk)))
        chosen = chosen.reshape(batch.numel(), count)
        logits, features = net.call(weights_of(params), "logits", *reader.read(params, rows), chosen)
        return logits / cfg.temperature, chosen, features, batch

    def densities(logits: Tensor, chosen: Tensor, batch: torch.Size) -> tuple[Tensor, Tensor]:
        both = k.categorical_log_prob(logits, chosen), k.categorical_entropy(logits)
        log_prob, entropy = (x.reshape(*batch, *chunk) for x in both)
        return log_prob, entropy

    def evaluate(params: TensorDict, carry: TensorDict, steps: TensorDict) -> tuple[Tensor, Tensor]:
        logits, chosen, _, batch = outputs(params, steps)
        return densities(logits, chosen, batch)

    init_frozen = partial(model.init_frozen, _statistics_params(statistics))
    policy = Policy(model.init, draw, act, evaluate, None, init_frozen=init_frozen, export=save_openvla)
    if cfg.critic is None:
        return policy
    critic = networks["critic"]

    def value(params: TensorDict, carry: TensorDict, obs: Any) -> Tensor:
        rows, batch = one_batch(obs, reader.inputs.space)
        features = net.call(weights_of(params), "features", *reader.read(params, rows), count)
        return critic.forward(cast(TensorDict, params["critic"]), features).reshape(batch)

    def evaluate_and_value(params: TensorDict, carry: TensorDict, steps: TensorDict) -> tuple[Tensor, Tensor, Tensor]:
        logits, chosen, features, batch = outputs(params, steps)
        value = critic.forward(cast(TensorDict, params["critic"]), features).reshape(batch)
        return *densities(logits, chosen, batch), value

    return replace(policy, value=value, evaluate_and_value=evaluate_and_value)


def save_openvla(folder: str | Path, state: TensorDict, cfg: Config) -> None:
    """Write the policy of a run as an OpenVLA checkpoint, in the format of the checkpoint that the run began with.

    Adapters are added to the weights of their layers. A critic is left out. All unused weights and all other files,
    such as the files of the tokenizer, are copied.

    Args:
        folder: path of a new folder, which appears complete or not at all.
        state: state of a run.
        cfg: config of the run, whose `policy.vla` has the backend `openvla`.

    Raises: ConfigError if the folder exists or cannot be made, or if the config has another policy. Also raised if the
        original checkpoint cannot be read, or if its weights or bounds do not match the run.
    """
    section = getattr(cfg.policy, "vla", None)
    if not isinstance(section, OpenVLAConfig):
        raise ConfigError(
            "policy: save_openvla needs the policy vla with the backend openvla; use ecrl.save for other policies"
        )
    params, source = policy_params(state), check_folder(section.model_path, _KIND)
    for kind, bounds in cast(Any, params["statistics"]).items():
        found = read_statistics(source, section.dataset, kind, len(bounds["low"]))
        if any(bounds[name].tolist() != torch.tensor(x).tolist() for name, x in found._asdict().items()):
            problem = f"{str(source)!r}: the bounds of {kind} differ from those of the run"
            raise ConfigError(f"{problem}; use the checkpoint that the run began with")
    weights = {name.removeprefix(_PREFIX): weight.detach().cpu() for name, weight in weights_of(params).items()}
    scale = 1.0 if section.adapters is None else section.adapters.scale
    write_model(Path(folder), source, merged(weights, scale))
