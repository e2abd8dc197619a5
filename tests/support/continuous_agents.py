"""Small runs of DDPG, TD3, soft actor-critic, FastTD3 and FastSAC on the pendulum.

Their networks are also plain modules in float64.
"""

from typing import Any, cast

import torch
from tensordict import TensorDict
from torch import Tensor, nn
from torch.distributions import Normal, TanhTransform, TransformedDistribution

from ecrl.config import Config, config_from_dict
from support.checks import close
from support.small_runs import NET

N, T, B = 3, 4, 16
LEARNING = {"algorithm.cfg.learning_starts": 8 * N, "algorithm.cfg.capacity": 8 * N + 5}
"""A run that first collects, and then overwrites its buffer while it learns."""
NORMALIZED = {"policy.normalize_obs": True, "algorithm.cfg.normalize_reward": True}
SGD = {"algorithm.cfg.learning_rate": None, "algorithm.cfg.optimizer": {"name": "sgd", "learning_rate": 0.05}}
C51 = {"distribution": "categorical", "num_atoms": 5, "v_min": -6.0, "v_max": 4.0}
SUPPORT = torch.tensor([-6.0, -3.5, -1.0, 1.5, 4.0], dtype=torch.float64)
"""The returns of `C51`, 2.5 apart."""


def continuous(name: str, **changes: Any) -> Config:
    """A small run of an algorithm, eager, with dotted keys changed."""
    policy = "squashed_actor_critic" if name.endswith("sac") else "deterministic_actor_critic"
    critics = C51 if name.startswith("fast") else {}
    base = {
        "trainer": {"num_envs": N, "buffer_size": T, "iterations": 5, "compile": "off", "enable_eval": False},
        "env": {"name": "pendulum", "cfg": {"max_episode_steps": 7}},
        "policy": {"name": policy, "actor": NET, "critic": NET, **critics},
        "algorithm": {
            "name": name,
            "cfg": {"capacity": 21, "batch_size": B, "learning_rate": 0.02, "learning_starts": N * T},
        },
    }
    return config_from_dict(base).replace(**changes)


def transitions(seed: int = 0) -> TensorDict:
    """Random transitions of the pendulum. One is terminated, and the last one is masked and holds NaN."""
    torch.manual_seed(seed)
    batch = TensorDict(
        {
            "obs": torch.randn(B, 3),
            "action": 4.0 * torch.rand(B, 1) - 2.0,
            "reward": torch.randn(B),
            "terminated": torch.arange(B) == 1,
            "discount": torch.rand(B),
            "next_obs": torch.randn(B, 3),
            "mask": torch.arange(B) < B - 1,
        },
        [B],
    )
    batch["reward"][-1] = torch.nan
    return batch


def module(weights: TensorDict) -> nn.Sequential:
    """The multilayer perceptron with these weights, in float64."""
    layers = [nn.Linear(weights[f"{i}.weight"].shape[1], len(weights[f"{i}.weight"])) for i in (0, 2)]
    net = nn.Sequential(layers[0], nn.Tanh(), layers[1]).double()
    net.load_state_dict({name: weight.double() for name, weight in weights.items()})
    return net


class Nets:
    """The actor and the critics of parameters, as modules. Critics take unit actions."""

    def __init__(self, params: Any):
        self.actor = module(params["actor"]) if "actor" in params else None
        count = len(params["critic", "0.bias"])
        self.critics = [module(params["critic"].apply(lambda w, c=c: w[c], batch_size=[])) for c in range(count)]

    def q(self, obs: Tensor, unit: Tensor) -> Tensor:
        """The values [C, B] of actions in [-1, 1]."""
        return self.logits(obs, unit)[..., 0]

    def logits(self, obs: Tensor, unit: Tensor) -> Tensor:
        """The outputs [C, B, K] of the critics for actions in [-1, 1]."""
        return torch.stack([critic(torch.cat((unit, obs), -1)) for critic in self.critics])


def drawn(net: Any, obs: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Actions of the squashed Gaussian in [-1, 1], and their log-probabilities by torch.distributions."""
    mean, log_std = net(obs).chunk(2, -1)
    normal = Normal(mean, log_std.clamp(-5.0, 2.0).exp())
    action = torch.tanh(normal.mean + normal.stddev * noise)
    squashed = TransformedDistribution(normal, TanhTransform(cache_size=1))
    return action, squashed.log_prob(action).sum(-1)


def projected(probs: Tensor, atoms: Tensor) -> Tensor:
    """Project distributions [B, K] with any returns [B, K] onto `SUPPORT`, between two neighbours each."""
    place = ((atoms - SUPPORT[0]) / 2.5).clamp(0.0, 4.0)
    below = place.floor().clamp(max=3.0)
    out = torch.zeros_like(probs)
    out.scatter_add_(1, below.long(), probs * (below + 1.0 - place))
    return out.scatter_add_(1, below.long() + 1, probs * (place - below))


def descend(loss: Tensor, nets: list[nn.Module], rate: float) -> None:
    """Take one step of plain gradient descent."""
    weights = [weight for net in nets for weight in net.parameters()]
    with torch.no_grad():
        for weight, grad in zip(weights, torch.autograd.grad(loss, weights), strict=True):
            weight -= rate * grad


def weights_of(nets: Nets) -> dict[str, Tensor]:
    """The weights by path, as in the parameters of the policy."""
    actor = {} if nets.actor is None else {f"actor/{name}": w for name, w in nets.actor.state_dict().items()}
    names = nets.critics[0].state_dict()
    stacked = {f"critic/{n}": torch.stack([critic.state_dict()[n] for critic in nets.critics]) for n in names}
    return actor | stacked


def follow(targets: Nets, nets: Nets, tau: float) -> None:
    """Move the weights of the targets towards those of the networks."""
    pairs = [*zip(targets.critics, nets.critics, strict=True)]
    pairs += [] if targets.actor is None else [(targets.actor, cast(nn.Sequential, nets.actor))]
    with torch.no_grad():
        for slow, fast in pairs:
            for old, new in zip(slow.parameters(), fast.parameters(), strict=True):
                old.copy_(tau * new + (1.0 - tau) * old)


def assert_step(after: TensorDict, logs: dict[str, Tensor], by_hand: tuple[Nets, Nets, dict[str, Tensor]]) -> None:
    """Check a gradient step, given its networks, its targets and its logs by hand."""
    nets, targets, expected = by_hand
    for name, value in expected.items():
        close(logs[name], value.detach(), tol=1e-4)
    for params, modules in ((after["params"], nets), (after["target_params"], targets)):
        for path, weight in weights_of(modules).items():
            close(params[tuple(path.split("/"))], weight, tol=1e-5)
