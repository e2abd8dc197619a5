"""The backend `pi0` of the policy `vla`: a pretrained flow model of the package transformers.

The model reads images, an instruction and the robot's state. In several denoising steps, the model turns noise into a
chunk of actions:

    x[1] ~ N(0, 1),    x[t - delta] = step(x[t], velocity(x[t], t, observation)),    action = x[0]

A policy gradient needs the log-probability of the sampled action. There are two ways to sample:

- Flow-SDE: one denoising step, chosen at random for each action, gets noise (`ecrl.kernels.flow_sde_step`). The size of
  the noise depends only on the time, on `noise_level` and on the number of denoising steps. The other steps get no
  noise. `sample_log_prob` is the log-density of the noisy step.
- Flow-Noise: each denoising step gets noise. A network computes the standard deviation of the noise.
  `sample_log_prob` is the mean of the log-densities of the steps.

The model's chunks may be longer and wider than the environment's actions. The environment reads the first k steps of a
chunk and the first A numbers of each step. A denoising step adds noise only to these numbers. The step computes the
other numbers from the sample before the step, without noise. The log-density of the numbers that get noise is therefore
the log-density of the whole step. For a deterministic action, denoising always starts from the same sample, and no step
adds noise.

Later denoising steps mix all steps of a chunk, so the noise of each number changes all numbers of the chunk.
`sample_log_prob` therefore has one token axis `[k * A]`: all numbers count, even if an episode ends inside the chunk.

Behaviour cloning needs no log-probability. The loss of behaviour cloning is the flow matching loss:

    t = scale * Beta(alpha, 1) + offset,    x[t] = (1 - t) action + t noise
    loss = mean((velocity(x[t], t, observation) - (noise - action))^2)

`alpha`, `scale` and `offset` are settings of the checkpoint. The mean is over the numbers that the environment reads,
without the steps of a chunk that the environment did not execute.

Sources: Black et al. 2024 (pi0), arXiv:2410.24164. Chen et al. 2025 (pi_RL, Flow-SDE and Flow-Noise), arXiv:2510.25889.
"""

from dataclasses import replace
from functools import partial
from math import log
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple, Protocol, Self, cast

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from tensordict import TensorDict
from torch import Tensor, nn

from ecrl import kernels as k
from ecrl import rng
from ecrl.config import Config, PolicyConfig
from ecrl.config.model import Positive
from ecrl.errors import ConfigError, extra
from ecrl.kernels import loop
from ecrl.policies.checkpoint_folder import check_folder
from ecrl.policies.core import Policy, flatten, one_batch, policy_params
from ecrl.policies.images import channel_shape, to_channels
from ecrl.policies.low_rank import add_adapters, is_in, merged
from ecrl.policies.networks import NetworkConfig, Pure, make_network, pure
from ecrl.policies.pi0_checkpoint import Statistics, read_model, read_statistics, write_model
from ecrl.policies.pretrained import PretrainedConfig, pretrained_model, weights_of
from ecrl.policies.vla_inputs import VLAInputs, check_unscaled_images, vla_inputs
from ecrl.registry import register_vla_backend
from ecrl.spaces import Box, Space, box, flat_dim

_KIND, _PREFIX = "pi0", "pi0."
_READ_OF_LAST = ("input_layernorm", "k_proj", "v_proj")
"""Parts of the language model's last layer that the actions depend on.

The actions read only the keys and values of this layer.
"""
Cache = list[tuple[Tensor, Tensor]]
"""Keys and values of each layer, from the images and the instruction."""


class Pi0Config(PretrainedConfig):
    """Settings of the backend `pi0`. The checkpoint at `model_path` sets the sizes of the network."""

    inert: ClassVar = {"gaussian_sigma": "policy.vla.noise_level or noise_head sets the noise of a denoising step"}

    denoising_steps: Annotated[int, Field(ge=1, le=1000)] | None = Field(
        None, description="number of denoising steps of an action; the checkpoint's number if absent"
    )
    noise_level: Positive | None = Field(
        None, description="factor of the noise of a denoising step (Flow-SDE); 0.5 if absent"
    )
    noise_head: NetworkConfig | None = Field(
        None,
        description=(
            "network that computes the standard deviations of the noise (Flow-Noise); if absent, the policy uses "
            "Flow-SDE"
        ),
    )
    noise_range: Annotated[tuple[Positive, Positive], Field(strict=False)] | None = Field(
        None, description="lowest and highest standard deviation that noise_head returns; [0.08, 0.16] if absent"
    )

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.noise_range is not None and self.noise_range[0] >= self.noise_range[1]:
            low, high = self.noise_range
            raise ValueError(f"noise_range begins with {low}, which is not below {high}; change one of them")
        if self.noise_head is not None and self.noise_level is not None:
            raise ValueError("noise_level is for Flow-SDE, but noise_head chooses Flow-Noise; leave one of them out")
        if self.noise_head is None and self.noise_range is not None:
            raise ValueError("noise_range limits the output of noise_head, which is absent; leave noise_range out")
        return self


class _Model(nn.Module):
    """The two functions of a pi0 model that a policy calls: `read` for observations, `velocity` for denoising steps."""

    def __init__(self, pi0: Any):
        super().__init__()
        self.pi0 = pi0

    def read(self, pixels: Tensor, ids: Tensor) -> tuple[Cache, Tensor, Tensor]:
        """Read images and instructions. Return the cache, a mask `[n, P]` and the mean features `[n, H]`.

        The mask has one entry for each of the P tokens, which is 0 for padding and otherwise 1. `pixels` are images
        `[n, cameras, 3, size, size]` with values from -1 to 1. `ids` `[n, L]` are the instructions, padded with zeros.
        """
        config = self.pi0.config.vlm_config
        tokens = pixels.shape[1] * (config.vision_config.image_size // config.vision_config.patch_size) ** 2
        images = ids.new_full((len(ids), tokens), config.image_token_id)
        ids = torch.cat((images, ids), 1)
        mask = (ids != 0).long()
        cameras = torch.ones(pixels.shape[:2], dtype=torch.bool, device=pixels.device)
        embedded = self.pi0.model.embed_prefix(ids, pixels, cameras)
        out = self.pi0.model.vlm(
            inputs_embeds=embedded,
            attention_mask=mask,
            position_ids=mask.cumsum(-1) - 1,
            token_type_ids=torch.zeros_like(embedded)[:, :, 0],
            use_cache=True,
        )
        cache = [(keys, values) for keys, values, *_ in out.past_key_values]
        weight = mask.unsqueeze(-1).to(embedded.dtype)
        return cache, mask, (out.last_hidden_state * weight).sum(1) / weight.sum(1)

    def velocity(self, cache: Cache, mask: Tensor, state: Tensor, x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        """Return the velocity and the features of noisy actions `[n, C, M]` at times `[n]`."""
        from transformers import DynamicCache

        embedded = self.pi0.embed_action_time(state, x, t)
        out = self.pi0.model(action_embeds=embedded, attention_mask=mask, past_key_values=DynamicCache(cache))
        features = out.last_hidden_state[:, -x.shape[1] :]
        return self.pi0.action_out_proj(features), features


class _Read(NamedTuple):
    """The cache and the mask that `_Model.read` returns, and the padded state `[n, S]`."""

    cache: Cache
    mask: Tensor
    state: Tensor

    def repeated(self, count: int) -> "_Read":
        """Repeat each row `count` times. The copies of a row are adjacent."""
        copies = [x.repeat_interleave(count, 0) for x in (self.mask, self.state)]
        return _Read([tuple(x.repeat_interleave(count, 0) for x in pair) for pair in self.cache], *copies)  # pyright: ignore


class _Flow(NamedTuple):
    """Sizes of the flow, and the model as pure functions.

    Attributes:
        net: the model `_Model`.
        steps: number of denoising steps.
        chunk: number C of action steps in one chunk of the model.
        width: size M of each step of this chunk.
        taken: the tuple (k, A). The environment reads the first k steps of this chunk, and the first A numbers of each
            step.
    """

    net: Pure
    steps: int
    chunk: int
    width: int
    taken: tuple[int, int]

    def times(self, like: Tensor) -> Tensor:
        """Return the times `[steps]` at which the denoising steps begin, from 1 downwards."""
        return torch.tensor([1.0 - i / self.steps for i in range(self.steps)], dtype=like.dtype, device=like.device)

    def deltas(self, like: Tensor) -> Tensor:
        """Return the durations `[steps]` of the denoising steps."""
        return torch.full((self.steps,), 1.0 / self.steps, dtype=like.dtype, device=like.device)

    def velocity(self, weights: TensorDict, read: _Read, x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        """Return the velocity and the features at samples `[n, C, M]` and times `[n]`."""
        return self.net.call(weights, "velocity", read.cache, read.mask, read.state, x, t)

    def corner(self, x: Tensor) -> Tensor:
        """Return the numbers that the environment reads, `[..., k, A]`, from samples `[..., C, M]`."""
        rows, columns = self.taken
        return x[..., :rows, :columns]

    def with_corner(self, x: Tensor, corner: Tensor) -> Tensor:
        """Return the samples `x`, `[..., C, M]`, with the numbers that the environment reads replaced by `corner`."""
        rows, columns = self.taken
        top = torch.cat((corner, x[..., :rows, columns:]), -1)
        return torch.cat((top, x[..., rows:, :]), -2)


class _Imitation(NamedTuple):
    """The flow matching loss, as in the pretraining of the model.

    The times are drawn from `scale * Beta(alpha, 1) + offset`. If u is uniform between 0 and 1, then `u^(1 / alpha)` is
    a sample of `Beta(alpha, 1)`.
    """

    flow: _Flow
    alpha: float
    scale: float
    offset: float

    def draw(self, keys: Tensor) -> TensorDict:
        """Draw the time `t` and the noise `start`, `[C, M]`, of each action."""
        start, t = rng.split(keys, 2)
        share = rng.uniform(t) ** (1.0 / self.alpha)
        noise = rng.normal(start, (self.flow.chunk, self.flow.width))
        return TensorDict({"t": self.scale * share + self.offset, "start": noise}, keys.shape)

    def loss(self, weights: TensorDict, read: _Read, actions: Tensor, t: Tensor, start: Tensor) -> Tensor:
        """Return the squared errors of the velocity, `[n, k, A]`, for the numbers that the environment reads.

        `actions`, of shape `[n, k, A]`, are scaled like the model's numbers. To get a chunk of the model, the function
        adds the model's other numbers as zeros, as in pretraining. The errors of the added numbers are left out.
        """
        flow = self.flow
        data = flow.with_corner(torch.zeros_like(start), actions)
        x = k.flow_interpolate(data, start, t[:, None, None])
        velocity, _ = flow.velocity(weights, read, x, t)
        return k.flow_matching_loss(flow.corner(velocity), actions, flow.corner(start))


class _Noise(Protocol):
    """A way to sample actions: Flow-SDE or Flow-Noise."""

    def draw(self, keys: Tensor) -> TensorDict: ...

    def sample(self, params: TensorDict, weights: TensorDict, read: _Read, noise: TensorDict | None) -> Any: ...

    def evaluate(self, params: TensorDict, weights: TensorDict, read: _Read, steps: Any) -> tuple[Tensor, Tensor]: ...

    def fields(self) -> tuple[str, ...]: ...


def _start(flow: _Flow, read: _Read, noise: TensorDict | None) -> Tensor:
    """Return the samples at time 1. Without noise, all observations have the same sample, drawn from a fixed key."""
    if noise is not None:
        return cast(Tensor, noise["start"])
    fixed = rng.normal(rng.key(0, read.state.device), (flow.chunk, flow.width))
    return fixed.to(read.state.dtype).expand(len(read.state), -1, -1).clone()


class _FlowSDE(NamedTuple):
    """Sample with noise in one denoising step, chosen at random for each action.

    The standard deviation of the noise depends only on the time, on `noise_level` and on the number of steps.

    The rollout has three more fields. `flow_step` `[*B]` is the index of the noisy step. `flow_sample` `[*B, C, M]` is
    the sample before this step. `flow_next` `[*B, k, A]` has the numbers with noise after this step.
    """

    flow: _Flow
    noise_level: float

    def draw(self, keys: Tensor) -> TensorDict:
        flow, (start, noise, step) = self.flow, rng.split(keys, 3)
        fields = {
            "start": rng.normal(start, (flow.chunk, flow.width)),
            "noise": rng.normal(noise, flow.taken),
            "step": rng.randint(step, low=0, high=flow.steps),
        }
        return TensorDict(cast(Any, fields), keys.shape)

    def sample(self, params: TensorDict, weights: TensorDict, read: _Read, noise: TensorDict | None) -> Any:
        """Return the sampled numbers `[n, k, A]`, their log-probabilities and the fields of the rollout."""
        flow, x = self.flow, _start(self.flow, read, noise)
        step = torch.zeros(len(x), dtype=torch.int64, device=x.device) if noise is None else cast(Tensor, noise["step"])
        drawn = None if noise is None else noise["noise"]
        corner = flow.corner(x).contiguous()
        carry = {"x": x, "flow_sample": x, "flow_next": corner, "log_prob": torch.zeros_like(corner)}
        xs = {"t": flow.times(x), "delta": flow.deltas(x), "index": torch.arange(flow.steps, device=x.device)}

        def body(carry: dict, xs: dict, weights: TensorDict, read: tuple, step: Tensor, drawn: Tensor | None) -> Any:
            x, delta, is_noisy = carry["x"], xs["delta"], (step == xs["index"])[:, None, None]
            velocity, _ = flow.velocity(weights, _Read(*read), x, xs["t"].expand(len(x)))
            plain, corner = k.flow_ode_step(x, velocity, delta), flow.corner
            noisy = k.flow_sde_step(corner(x), corner(velocity), xs["t"], delta, noise_level=self.noise_level)
            after = corner(plain) if drawn is None else noisy.mean + noisy.std * drawn
            log_prob = k.flow_log_prob(noisy.mean, noisy.std, after)
            kept = {
                "flow_sample": torch.where(is_noisy, x, carry["flow_sample"]),
                "flow_next": torch.where(is_noisy, after, carry["flow_next"]),
                "log_prob": torch.where(is_noisy, log_prob, carry["log_prob"]),
            }
            return {"x": flow.with_corner(plain, torch.where(is_noisy, after, corner(plain))), **kept}, None

        carry = loop(body, carry, xs, weights, tuple(read), step, drawn)[0]
        fields = {"flow_step": step, "flow_sample": carry["flow_sample"], "flow_next": carry["flow_next"]}
        return flow.corner(carry["x"]), carry["log_prob"], fields

    def evaluate(self, params: TensorDict, weights: TensorDict, read: _Read, steps: Any) -> tuple[Tensor, Tensor]:
        """Return the log-probability and the entropy of each number with noise, `[n, k, A]`."""
        flow, x = self.flow, steps["flow_sample"]
        t, delta = flow.times(x)[steps["flow_step"]], flow.deltas(x)[0]
        velocity, _ = flow.velocity(weights, read, x, t)
        corners, t = (flow.corner(x), flow.corner(velocity)), t[:, None, None]
        noisy = k.flow_sde_step(*corners, t, delta, noise_level=self.noise_level)
        log_prob = k.flow_log_prob(noisy.mean, noisy.std, steps["flow_next"])
        return log_prob, k.flow_entropy(noisy.std).expand_as(log_prob)

    def fields(self) -> tuple[str, ...]:
        return "flow_step", "flow_sample", "flow_next"


class _FlowNoise(NamedTuple):
    """Sample with noise in each denoising step. A network computes the standard deviations from the step's features.

    The field `flow_chain` `[*B, steps + 1, C, M]` of the rollout has the samples before each step and after the last
    step.
    """

    flow: _Flow
    head: Pure
    range: tuple[float, float]

    def draw(self, keys: Tensor) -> TensorDict:
        flow, (start, noise) = self.flow, rng.split(keys, 2)
        fields = {
            "start": rng.normal(start, (flow.chunk, flow.width)),
            "noise": rng.normal(noise, (flow.steps, *flow.taken)),
        }
        return TensorDict(cast(Any, fields), keys.shape)

    def std(self, head: TensorDict, features: Tensor) -> Tensor:
        """Return the standard deviations `[n, k, A]`, interpolated logarithmically between the ends of `range`."""
        low, high = map(log, self.range)
        share = 0.5 * (1.0 + self.head.forward(head, features[:, : self.flow.taken[0]]).tanh())
        return (low + (high - low) * share).exp()

    def sample(self, params: TensorDict, weights: TensorDict, read: _Read, noise: TensorDict | None) -> Any:
        """Return the sampled numbers `[n, k, A]`, their log-probabilities and the fields of the rollout."""
        flow, x = self.flow, _start(self.flow, read, noise)
        xs = {"t": flow.times(x), "delta": flow.deltas(x)}
        if noise is not None:
            xs["noise"] = cast(Tensor, noise["noise"]).movedim(1, 0)

        def body(x: Tensor, xs: dict, weights: TensorDict, read: tuple, head: TensorDict) -> Any:
            velocity, features = flow.velocity(weights, _Read(*read), x, xs["t"].expand(len(x)))
            plain, std = k.flow_ode_step(x, velocity, xs["delta"]), self.std(head, features)
            mean = flow.corner(plain)
            after = mean + std * xs["noise"] if "noise" in xs else mean
            return flow.with_corner(plain, after), (x, k.flow_log_prob(mean, std, after))

        last, (chain, log_prob) = loop(body, x, xs, weights, tuple(read), params["noise_head"])
        chain = torch.cat((chain.movedim(0, 1), last.unsqueeze(1)), 1)
        return flow.corner(last), log_prob.mean(0), {"flow_chain": chain}

    def evaluate(self, params: TensorDict, weights: TensorDict, read: _Read, steps: Any) -> tuple[Tensor, Tensor]:
        """Return log-probabilities and entropies `[n, k, A]`, averaged over the denoising steps.

        The denoising steps are evaluated as one batch.
        """
        flow, chain = self.flow, steps["flow_chain"]
        before, after = chain[:, :-1].flatten(0, 1), flow.corner(chain[:, 1:]).flatten(0, 1)
        t, delta = flow.times(before).repeat(len(chain)), flow.deltas(before)[0]
        velocity, features = flow.velocity(weights, read.repeated(flow.steps), before, t)
        std = self.std(cast(TensorDict, params["noise_head"]), features)
        mean = flow.corner(k.flow_ode_step(before, velocity, delta))
        both = k.flow_log_prob(mean, std, after), k.flow_entropy(std)
        log_prob, entropy = (x.unflatten(0, (-1, flow.steps)).mean(1) for x in both)
        return log_prob, entropy

    def fields(self) -> tuple[str, ...]:
        return ("flow_chain",)


class _Reader(NamedTuple):
    """Convert observations to the inputs of the model, and convert between actions and numbers of the model.

    Attributes:
        inputs: the parts of an observation.
        state: size of the model's state vector.
    """

    inputs: VLAInputs
    state: int

    def pixels(self, obs: Any) -> Tensor:
        """Return all images as `[n, cameras, 3, size, size]`, with values from -1 to 1."""
        images = [to_channels(self.inputs.part(obs, name), space) for name, space in self.inputs.images.items()]
        return 2.0 * torch.stack(images, 1) - 1.0

    def ids(self, obs: Any, like: Tensor) -> Tensor:
        """Return the ids of the instruction, `[n, L]`. Without an instruction, L is 0."""
        if self.inputs.words is None:
            return torch.zeros(len(like), 0, dtype=torch.int64, device=like.device)
        return self.inputs.part(obs, self.inputs.words[0])

    def states(self, params: TensorDict, obs: Any, like: Tensor) -> Tensor:
        """Return the other observations as the state `[n, S]`, padded with zeros.

        If the checkpoint has statistics of the state, the state is standardised before the padding.
        """
        if flat_dim(self.inputs.others) == 0:
            return like.new_zeros(len(like), self.state)
        x = flatten(obs, self.inputs.others)
        if (found := _statistics(params, "state")) is not None:
            x = (x - found["mean"]) / (found["std"] + 1e-8)
        return F.pad(x, (0, self.state - x.shape[-1]))

    def actions(self, params: TensorDict, x: Tensor) -> Tensor:
        """Convert numbers of the model `[..., A]` to actions."""
        found = _statistics(params, "actions")
        return x if found is None else x * (found["std"] + 1e-8) + found["mean"]

    def numbers(self, params: TensorDict, actions: Tensor) -> Tensor:
        """Convert actions to numbers of the model `[..., A]`, the inverse of `actions`."""
        found = _statistics(params, "actions")
        return actions if found is None else (actions - found["mean"]) / (found["std"] + 1e-8)


def _statistics(params: TensorDict, name: str) -> dict[str, Tensor] | None:
    """Return the mean and the standard deviation of the state or of the actions, or None if the checkpoint has none."""
    found: Any = params.get("statistics", None)
    return dict(found[name].items()) if found is not None and name in found else None


def _statistics_params(statistics: Statistics) -> dict[str, TensorDict]:
    """Return frozen parameters with the statistics `state` and `actions`, without those that the checkpoint lacks."""
    found = {name: pair for name, pair in statistics._asdict().items() if pair is not None}
    return {
        name: TensorDict({"mean": torch.tensor(mean), "std": torch.tensor(std)}, [])
        for name, (mean, std) in found.items()
    }


def _reader(
    config: Any, cfg: Pi0Config, folder: Path, observation_space: Space, action_space: Box
) -> tuple[_Reader, Statistics]:
    """Return the reader and the statistics. Raise ConfigError if observations or actions do not fit the checkpoint."""
    inputs = vla_inputs(observation_space, cfg.instruction)
    if not inputs.images:
        raise ConfigError("policy vla: backend pi0 needs an image, but the observations have none; add a camera")
    size = config.vlm_config.vision_config.image_size
    for name, space in inputs.images.items():
        if channel_shape(space) != (3, size, size):
            problem = f"image {name!r} is {list(space.shape)}, but the checkpoint reads [{size}, {size}, 3]"
            raise ConfigError(f"policy vla: {problem}; render it at this size")
    vocabulary = min(config.vlm_config.text_config.vocab_size, config.vlm_config.image_token_id)
    if inputs.words is not None and max(inputs.words[1]) > vocabulary:
        problem = f"{inputs.words[0]!r} has ids up to {max(inputs.words[1]) - 1}, but the checkpoint has {vocabulary}"
        raise ConfigError(f"policy vla: {problem} tokens; encode instructions with encode_instructions")
    k_steps, numbers = action_space.shape if len(action_space.shape) == 2 else (1, *action_space.shape)
    sizes = (
        ("state", flat_dim(inputs.others), config.max_state_dim, "numbers; leave some observations out"),
        ("step of an action", numbers, config.max_action_dim, "numbers; use an action space with fewer"),
        ("chunk of actions", k_steps, config.chunk_size, "steps; lower env.action_chunk"),
    )
    for what, have, most, advice in sizes:
        if have > most:
            raise ConfigError(f"policy vla: a {what} has {have}, but the checkpoint has room for {most} {advice}")
    return _Reader(inputs, config.max_state_dim), read_statistics(folder, flat_dim(inputs.others), numbers)


def _imitation(flow: _Flow, config: Any) -> _Imitation:
    """Return the flow matching loss, with the checkpoint's distribution of times."""
    if config.time_sampling_beta_beta != 1.0:
        problem = f"config.json: time_sampling_beta_beta is {config.time_sampling_beta_beta:g}, expected 1"
        raise ConfigError(f"policy vla: {problem}, as in all released checkpoints of pi0; set it to 1")
    scale, offset = config.time_sampling_scale, config.time_sampling_offset
    return _Imitation(flow, config.time_sampling_beta_alpha, scale, offset)


def _make_model(folder: Path, cfg: Pi0Config) -> nn.Module:
    """Read the model and add the adapters. The weights of the adapters are drawn from torch's global generator."""
    pi0 = read_model(folder)
    if cfg.adapters is not None:
        add_adapters(pi0, cfg.adapters, "policy.vla.adapters")
    return _Model(pi0)


def _is_unused(config: Any, cfg: Pi0Config, name: str) -> bool:
    """Return True for a weight that has no effect on actions and values."""
    if is_in(name, ["dit.embed_tokens"]):
        return True
    last = config.vlm_config.text_config.num_hidden_layers - 1
    is_at_end = is_in(name, [f"language_model.layers.{last}"]) and not is_in(name, _READ_OF_LAST)
    return cfg.critic is None and (is_at_end or is_in(name, ["language_model.norm"]))


@register_vla_backend("pi0")
def pi0(cfg: Pi0Config, observation_space: Space, action_space: Box, policy_cfg: PolicyConfig) -> Policy:
    """Build the policy of a pi0 checkpoint.

    An action is a chunk of k steps with A numbers each. `sample_log_prob` and the results of `evaluate` have the shape
    `[*B, k * A]`, and all numbers of a chunk count.
    `act` also returns fields about the denoising steps, which `evaluate` reads. The names of these fields begin with
    `flow_`.

    The params are `model`, `adapters`, `noise_head` and `critic`. Empty parts are left out. The frozen parameters are
    `base` and, if the checkpoint has statistics, `statistics`. `base` has the weights that are not trained.

    Raises: ConfigError if the checkpoint cannot be read, or if it does not fit the environment. MissingExtraError if
        transformers is not installed.
    """
    folder = check_folder(cfg.model_path, _KIND)
    with extra("vla"):
        import transformers  # noqa: F401
    net = pure(lambda: _make_model(folder, cfg), "policy.vla", policy_cfg.bf16)
    config = cast(Any, net.module).pi0.config
    reader, statistics = _reader(config, cfg, folder, observation_space, action_space)
    if policy_cfg.normalize_obs and statistics.state is not None:
        problem = "true, but processor_config.json of the checkpoint already standardises the state"
        raise ConfigError(f"policy.normalize_obs: {problem}; set it to false")
    check_unscaled_images(reader.inputs, policy_cfg.normalize_obs)
    numbers = action_space.shape[-1]
    taken = action_space.shape[0] if len(action_space.shape) == 2 else 1, numbers
    tokens = taken[0] * numbers
    steps = cfg.denoising_steps or config.num_inference_steps
    flow = _Flow(net, steps, config.chunk_size, config.max_action_dim, taken)
    networks: dict[str, Pure] = {}
    if cfg.noise_head is not None:
        features = box(-torch.inf, torch.inf, config.dit_config.hidden_size)
        networks["noise_head"] = make_network(cfg.noise_head, features, numbers, False, "policy.vla.noise_head")
    if cfg.critic is not None:
        features = box(-torch.inf, torch.inf, config.vlm_config.text_config.hidden_size)
        networks["critic"] = make_network(cfg.critic, features, 1, False, "policy.vla.critic")
    noise: _Noise = _FlowSDE(flow, cfg.noise_level or 0.5)
    if cfg.noise_head is not None:
        noise = _FlowNoise(flow, networks["noise_head"], cfg.noise_range or (0.08, 0.16))

    model = pretrained_model(net, cfg, partial(_is_unused, config, cfg), networks)

    def init_frozen(device: torch.device) -> TensorDict:
        return model.init_frozen(_statistics_params(statistics), device)

    def read(params: TensorDict, obs: Any) -> tuple[TensorDict, _Read, Tensor]:
        """Return the model's weights, a `_Read` of the observations `[n, ...]`, and the features for a critic."""
        weights, pixels = weights_of(params), reader.pixels(obs)
        cache, mask, features = net.call(weights, "read", pixels, reader.ids(obs, pixels))
        return weights, _Read(cache, mask, reader.states(params, obs, pixels)), features

    def act(params: TensorDict, carry: TensorDict, obs: Any, drawn: Any) -> tuple[TensorDict, TensorDict]:
        rows, batch = one_batch(obs, reader.inputs.space)
        weights, inputs, _ = read(params, rows)
        x, log_prob, fields = noise.sample(params, weights, inputs, None if drawn is None else drawn.reshape(-1))
        action = reader.actions(params, x).reshape(*batch, *action_space.shape)
        fields = {name: field.reshape(*batch, *field.shape[1:]) for name, field in fields.items()}
        fields |= {"action": action, "sample_log_prob": log_prob.reshape(*batch, tokens)}
        return carry, TensorDict(cast(Any, fields), batch)

    def rows_of(steps: TensorDict) -> tuple[Any, dict[str, Tensor], torch.Size]:
        """Return the observations and the `flow_` fields with one batch axis, and the original batch shape."""
        absent = [name for name in noise.fields() if name not in steps]
        if absent:
            advice = "learn from rollouts of this policy, with ppo or grpo"
            raise ConfigError(f"policy vla: the steps have no {absent[0]}, which act of backend pi0 returns; {advice}")
        rows, batch = one_batch(steps["obs"], reader.inputs.space)
        fields: dict[str, Any] = {name: steps[name] for name in noise.fields()}
        return rows, {name: x.reshape(batch.numel(), *x.shape[len(batch) :]) for name, x in fields.items()}, batch

    def evaluate(params: TensorDict, carry: TensorDict, steps: TensorDict) -> tuple[Tensor, Tensor]:
        rows, fields, batch = rows_of(steps)
        weights, inputs, _ = read(params, rows)
        log_prob, entropy = noise.evaluate(params, weights, inputs, fields)
        return log_prob.reshape(*batch, tokens), entropy.reshape(*batch, tokens)

    imitation = _imitation(flow, config)

    def imitation_loss(params: TensorDict, carry: TensorDict, steps: TensorDict) -> Tensor:
        rows, batch = one_batch(steps["obs"], reader.inputs.space)
        weights, inputs, _ = read(params, rows)
        t, start = (steps["imitation_noise", name] for name in ("t", "start"))
        actions = reader.numbers(params, steps["action"]).reshape(batch.numel(), *taken)
        errors = imitation.loss(weights, inputs, actions, t.reshape(-1), start.reshape(-1, *start.shape[-2:]))
        mean = errors.mean(-1)
        if "executed" not in steps:
            return mean.mean(-1).reshape(batch)
        executed = steps["executed"].reshape(-1, 1)
        counts = torch.arange(taken[0], device=mean.device) < executed
        return (mean.masked_fill(~counts, 0.0).sum(-1) / executed.squeeze(-1).clamp(min=1)).reshape(batch)

    options: dict[str, Any] = {"imitation_loss": imitation_loss, "draw_imitation": imitation.draw, "export": save_pi0}
    policy = Policy(model.init, cast(Any, noise.draw), act, evaluate, None, init_frozen=init_frozen, **options)
    if cfg.critic is None:
        return policy
    critic = networks["critic"]

    def value(params: TensorDict, carry: TensorDict, obs: Any) -> Tensor:
        rows, batch = one_batch(obs, reader.inputs.space)
        return critic.forward(cast(TensorDict, params["critic"]), read(params, rows)[2]).reshape(batch)

    def evaluate_and_value(params: TensorDict, carry: TensorDict, steps: TensorDict) -> tuple[Tensor, Tensor, Tensor]:
        rows, fields, batch = rows_of(steps)
        weights, inputs, features = read(params, rows)
        log_prob, entropy = noise.evaluate(params, weights, inputs, fields)
        values = critic.forward(cast(TensorDict, params["critic"]), features).reshape(batch)
        return log_prob.reshape(*batch, tokens), entropy.reshape(*batch, tokens), values

    return replace(policy, value=value, evaluate_and_value=evaluate_and_value)


def save_pi0(folder: str | Path, state: TensorDict, cfg: Config) -> None:
    """Write the policy of a run as a checkpoint that `PI0ForConditionalGeneration.from_pretrained` loads.

    Adapters are added to the weights of their layers. The critic and the noise head are left out, because the model in
    transformers has no place for them. Files of the original checkpoint, such as those of the tokenizer, are copied.
    Weights in other formats and Python code are not copied.

    Args:
        folder: path of a new folder, which appears complete or not at all.
        state: state of a run.
        cfg: config of the run, whose `policy.vla` has the backend `pi0`.

    Raises: ConfigError if the folder exists or cannot be made, or if the config has another policy. Also raised if the
        original checkpoint cannot be read, or if its weights have other names or shapes than those of
        the run.
    """
    section = getattr(cfg.policy, "vla", None)
    if not isinstance(section, Pi0Config):
        raise ConfigError(
            "policy: save_pi0 needs the policy vla with the backend pi0; use ecrl.save for other policies"
        )
    found = weights_of(policy_params(state)).items()
    weights = {name.removeprefix(_PREFIX): weight.detach().cpu() for name, weight in found}
    scale = 1.0 if section.adapters is None else section.adapters.scale
    write_model(Path(folder), check_folder(section.model_path, _KIND), merged(weights, scale))
