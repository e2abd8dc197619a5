"""The policy `recurrent`, which remembers earlier observations of the episode.

Actor and critic each have up to three parts: an encoder of the observation, a cell with memory, and a network:

    features = encoder(obs)                 or `ecrl.policies.flatten(obs)` without an encoder
    memory'  = cell(memory, features)
    output   = network(memory'["h"])        the action's distribution, or the value

`h` is the part of the memory that the cell returns as its output (see `ecrl.policies.cells`). The setting `memory`
chooses whether actor, critic or both have a cell. A network without a cell reads the features.
"""

from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch
from pydantic import Field, model_validator
from tensordict import TensorDict
from torch import Tensor

from ecrl import kernels as k
from ecrl import rng
from ecrl.errors import ConfigError
from ecrl.policies.actor_critic import ActorOnlyConfig
from ecrl.policies.cells import CELLS, CellConfig, cell_inputs, empty_memory, init_cell, unroll
from ecrl.policies.core import Policy, flatten
from ecrl.policies.heads import head_width, initial_log_std, is_masked, make_head
from ecrl.policies.networks import NetworkConfig, Pure, make_network, seeded
from ecrl.policies.visible import Names, visible_space
from ecrl.registry import add_advice, register_policy
from ecrl.spaces import Space, box, flat_dim


class RecurrentConfig(ActorOnlyConfig):
    """Settings of the cell, the encoder, and the networks of actor and critic."""

    cell: CellConfig = Field(CellConfig(), description='the cell, such as {"type": "gru", "hidden_size": 64}')
    memory: Literal["shared", "separate", "actor", "critic"] = Field(
        "shared",
        description=(
            "shared: actor and critic share an encoder and a cell; separate: each has its own encoder and cell; actor: "
            "each has its own encoder, but only the actor has a cell; critic: each has its own encoder, but only the "
            "critic has a cell"
        ),
    )
    encoder: NetworkConfig | None = Field(
        None, description="network between observation and cell, with `hidden_size` outputs; none if absent"
    )
    critic: NetworkConfig | None = Field(
        None, description="critic network; if absent, the policy has no critic, as for GRPO"
    )
    critic_obs: Names | None = Field(
        None,
        description=(
            "names of the observations that the critic reads, if the observation space is a Dict; by default, all "
            "observations or, with a shared cell, the observations of the actor"
        ),
    )

    @model_validator(mode="after")
    def _parts_fit(self) -> "RecurrentConfig":
        if self.critic is None and self.memory in ("separate", "critic"):
            raise ValueError(f'memory={self.memory!r} needs a critic; give critic, or use memory="actor"')
        if self.critic is None and self.critic_obs is not None:
            raise ValueError("critic_obs is given, but critic is not; leave critic_obs out")
        differs = self.critic_obs is not None and {*self.critic_obs} != {*(self.actor_obs or ())}
        if self.memory == "shared" and differs:
            problem = "actor and critic share a cell, so both read the observations of the actor"
            raise ValueError(f'critic_obs: {problem}; leave critic_obs out, or use memory="separate"')
        return self


class Trunk(NamedTuple):
    """The layers before the network of the actor or critic: an optional encoder and an optional cell.

    Attributes:
        space: space of the observations that the trunk reads.
        encoder: the encoder, or None.
        cell: settings of the cell, or None for a trunk without memory.
        width: number of outputs.
    """

    space: Space
    encoder: Pure | None
    cell: CellConfig | None
    width: int

    def init(self, key: Tensor) -> TensorDict:
        """Return new weights, drawn from a 0-d key on the CPU."""
        parts: dict[str, Any] = {}
        if self.encoder is not None:
            with seeded(key):
                parts["encoder"] = self.encoder.init()
        if self.cell is not None:
            inputs = flat_dim(self.space) if self.encoder is None else self.cell.hidden_size
            parts["cell"] = init_cell(self.cell, inputs, rng.fold_in(key, 1))
        return TensorDict(parts, [])

    def features(self, weights: TensorDict, obs: Any) -> Tensor:
        """Return the input of the cell, `[*B, I]`."""
        return flatten(obs, self.space) if self.encoder is None else self.encoder.forward(weights["encoder"], obs)

    def step(self, weights: TensorDict, memory: Any, obs: Any) -> tuple[TensorDict | None, Tensor]:
        """Return the memory and the output after one step, for observations `[*B, ...]` and memory `[*B]`.

        A trunk without a cell ignores `memory`, and returns None as its memory.
        """
        features = self.features(weights, obs)
        if self.cell is None:
            return None, features
        _check_batch(memory, features.shape[:-1])
        cell, x = CELLS[self.cell.type], cell_inputs(weights["cell"], features)
        after = cell.step(weights["cell"], dict(memory.items()), x)
        return TensorDict(after, features.shape[:-1]), after["h"]

    def unroll(self, weights: TensorDict, memory: Any, steps: TensorDict) -> Tensor:
        """Return the output after each step, `[n, S, width]`. The memory restarts after each `done` step.

        A trunk without a cell ignores `memory`.
        """
        features = self.features(weights, steps["obs"])
        if self.cell is None:
            return features
        _check_batch(memory, features.shape[:-2])
        done = steps["done"]
        is_first = torch.cat((torch.zeros_like(done[:, :1]), done[:, :-1]), 1)
        return unroll(self.cell, weights["cell"], dict(memory.items()), features, is_first)


def _check_batch(memory: Any, batch: torch.Size) -> None:
    """Raise ConfigError if the batch shape of the memory is not `batch`, the batch shape of the observations."""
    if (found := memory["h"].shape[:-1]) != batch:
        problem = f"the carry has the batch shape {list(found)}, but the observations have {list(batch)}"
        raise ConfigError(f"policy recurrent: {problem}; pass one memory per environment")


def make_trunk(cfg: RecurrentConfig, observation_space: Space, side: str) -> Trunk:
    """Build the trunk named `side`: shared, actor or critic."""
    key = "critic_obs" if side == "critic" else "actor_obs"
    space = visible_space(observation_space, cfg.critic_obs if side == "critic" else cfg.actor_obs, key)
    if flat_dim(space) == 0:
        problem = "the observations have nothing that a network reads"
        raise ConfigError(f"policy recurrent: {problem}; add another observation")
    size, encoder = cfg.cell.hidden_size, None
    if cfg.encoder is not None:
        encoder = make_network(cfg.encoder, space, size, cfg.bf16, "policy.encoder")
    remembers = cfg.memory in ("shared", "separate", side)
    width = size if remembers or encoder is not None else flat_dim(space)
    return Trunk(space, encoder, cfg.cell if remembers else None, width)


_ADVICE = 'for memory, set policy.name to "recurrent", and policy.cell.type to gru, lstm or mingru; see docs/memory.md'
for _kind in ("network", "policy"):
    for _name in ("rnn", *CELLS):
        add_advice(_kind, {_name: _ADVICE, _name.upper(): _ADVICE})


@register_policy("recurrent")
def recurrent(cfg: RecurrentConfig, observation_space: Space, action_space: Space) -> Policy:
    """Build a policy with memory.

    The params are `actor`, `critic` if the policy has a critic, and `log_std` of shape `[A]` for Box actions. If
    `memory` is "shared", the params also have `shared`, whose field `trunk` has the weights of the shared encoder and
    cell. Otherwise, `actor` and `critic` each have a field `trunk` with the weights of their own encoder and cell, if
    any.
    """
    head, width = make_head(action_space, cfg.squash), head_width(action_space, cfg.action_dim)
    has_mask = is_masked(observation_space, action_space)
    own = ("actor",) if cfg.critic is None else ("actor", "critic")
    sides = ("shared",) if cfg.memory == "shared" else own
    trunks = {side: make_trunk(cfg, observation_space, side) for side in sides}
    of_actor, of_critic = sides[0], sides[-1]
    read = {side: box(-torch.inf, torch.inf, trunk.width) for side, trunk in trunks.items()}
    networks = {"actor": make_network(cfg.actor, read[of_actor], width, cfg.bf16, "policy.actor")}
    if cfg.critic is not None:
        networks["critic"] = make_network(cfg.critic, read[of_critic], 1, cfg.bf16, "policy.critic")

    def init(key: Tensor) -> TensorDict:
        params: dict[str, Any] = {}
        for i, name in enumerate(dict.fromkeys((*sides, *networks))):
            own = rng.fold_in(key.cpu(), i)
            parts = {"trunk": trunks[name].init(rng.fold_in(own, 0))} if name in trunks else {}
            if name in networks:
                with seeded(rng.fold_in(own, 1)):
                    parts["network"] = networks[name].init()
            params[name] = TensorDict(parts, [])
        return TensorDict(params | initial_log_std(action_space, cfg.initial_log_std), []).to(key.device)

    def init_carry(params: TensorDict, num_envs: int) -> TensorDict:
        batch = torch.Size([num_envs])
        memory = {
            name: empty_memory(trunk.cell, params[name, "trunk", "cell"], batch)
            for name, trunk in trunks.items()
            if trunk.cell is not None
        }
        return TensorDict(memory, batch)

    def memory_of(carry: Any, name: str) -> Any:
        if trunks[name].cell is None:
            return None
        if carry is None or name not in carry:
            raise ConfigError(f"policy recurrent: the carry has no {name!r}; pass init_carry(params, num_envs)")
        sizes = {part: x.shape[-1] for part, x in carry[name].items()}
        expected = dict.fromkeys(CELLS[cfg.cell.type].memory, cfg.cell.hidden_size)
        if sizes != expected:
            found, needed = (", ".join(f"{part} [{n}]" for part, n in some.items()) for some in (sizes, expected))
            problem = f"policy recurrent: the carry {name!r} has {found}, expected {needed}"
            raise ConfigError(f"{problem}; pass a carry of this policy, as from init_carry(params, num_envs)")
        return carry[name]

    def step(params: TensorDict, carry: TensorDict, obs: Any, name: str) -> tuple[TensorDict | None, Tensor]:
        return trunks[name].step(params[name, "trunk"], memory_of(carry, name), obs)

    def unrolled(params: TensorDict, carry: TensorDict, steps: TensorDict, name: str) -> Tensor:
        return trunks[name].unroll(params[name, "trunk"], memory_of(carry, name), steps)

    def output(params: TensorDict, features: Tensor, obs: Any) -> tuple[Tensor | None, Tensor]:
        out = networks["actor"].forward(params["actor", "network"], features)
        return params.get("log_std", None), k.mask_logits(out, obs["action_mask"]) if has_mask else out

    def critic(params: TensorDict, features: Tensor) -> Tensor:
        return networks["critic"].forward(params["critic", "network"], features).squeeze(-1)

    def act(params: TensorDict, carry: TensorDict, obs: Any, noise: Tensor | None) -> tuple[TensorDict, TensorDict]:
        used = (name for name, trunk in trunks.items() if name == of_actor or trunk.cell is not None)
        after = {name: step(params, carry, obs, name) for name in used}
        log_std, out = output(params, after[of_actor][1], obs)
        action = head.mode(log_std, out) if noise is None else head.sample(log_std, out, noise)
        log_prob = head.log_prob(log_std, out, action)
        batch = out.shape[:-1]
        memory = {name: kept for name, (kept, _) in after.items() if kept is not None}
        return TensorDict(memory, batch), TensorDict({"action": action, "sample_log_prob": log_prob}, batch)

    def evaluate(params: TensorDict, carry: TensorDict, steps: TensorDict) -> tuple[Tensor, Tensor]:
        log_std, out = output(params, unrolled(params, carry, steps, of_actor), steps["obs"])
        return head.log_prob(log_std, out, steps["action"]), head.entropy(log_std, out)

    def value(
        params: TensorDict, carry: TensorDict, steps: TensorDict, final: TensorDict | None
    ) -> tuple[Tensor, Tensor | None]:
        values = critic(params, unrolled(params, carry, steps, of_critic))
        if final is None:
            return values, None
        return values, critic(params, step(params, final.get("carry", None), final["obs"], of_critic)[1])

    def evaluate_and_value(params: TensorDict, carry: TensorDict, steps: TensorDict) -> tuple[Tensor, Tensor, Tensor]:
        features = unrolled(params, carry, steps, "shared")
        log_std, out = output(params, features, steps["obs"])
        log_prob, entropy = head.log_prob(log_std, out, steps["action"]), head.entropy(log_std, out)
        return log_prob, entropy, critic(params, features)

    loops = 0 if CELLS[cfg.cell.type].linear else sum(trunk.cell is not None for trunk in trunks.values())
    policy = Policy(init, head.noise, act, evaluate, None, init_carry=init_carry, unit="sequence", time_loops=loops)
    if cfg.critic is None:
        return policy
    return replace(policy, value=value, evaluate_and_value=evaluate_and_value if "shared" in trunks else None)
