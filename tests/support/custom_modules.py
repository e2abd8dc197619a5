"""Modules as users write them, registered as users do."""

import torch
from torch import nn
from torch.distributions import Categorical, Normal

from ecrl.config import PolicyConfig
from ecrl.policies import flatten, module_policy
from ecrl.registry import register_policy
from ecrl.spaces import Box, flat_dim


class Trunk(nn.Module):
    """Actor and critic on shared layers; `log_std` is a parameter for Box actions."""

    def __init__(self, observation_space, action_space):
        super().__init__()
        self.space, width = observation_space, flat_dim(action_space)
        self.body = nn.Sequential(nn.Linear(flat_dim(observation_space), 8), nn.Tanh())
        self.output, self.value = nn.Linear(8, width), nn.Linear(8, 1)
        self.register_buffer("scale", torch.tensor(0.5))
        if isinstance(action_space, Box):
            self.log_std = nn.Parameter(torch.full((width,), -0.5))

    def forward(self, obs):
        h = self.body(flatten(obs, self.space)) * self.scale
        return self.output(h), self.value(h).squeeze(-1)


class Attends(Trunk):
    """Attention between the numbers of an observation. It has layers in training mode whose dropout is 0."""

    def __init__(self, observation_space, action_space):
        super().__init__(observation_space, action_space)
        self.tokens = nn.Linear(1, 8)
        self.attention = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        del self.body

    def forward(self, obs):
        tokens = self.tokens(flatten(obs, self.space).unsqueeze(-1))
        h = self.attention(tokens).mean(-2)
        return self.output(h), self.value(h).squeeze(-1)


class OwnStd(Trunk):
    """A log-std that depends on the observation."""

    def __init__(self, observation_space, action_space):
        super().__init__(observation_space, action_space)
        del self.log_std
        self.spread = nn.Linear(8, flat_dim(action_space))

    def forward(self, obs):
        output, value = super().forward(obs)
        return output, value, self.spread(self.body(flatten(obs, self.space))) - 0.5


class Acts(Trunk):
    """Upstream's interface; its own sampling."""

    def distribution(self, tensordict):
        output, value = self(tensordict["obs"])
        if not hasattr(self, "log_std"):
            return Categorical(logits=output), value
        return Normal(output, self.log_std.exp()), value

    def log_prob_and_entropy(self, distribution, action):
        log_prob, entropy = distribution.log_prob(action), distribution.entropy()
        return (log_prob, entropy) if isinstance(distribution, Categorical) else (log_prob.sum(-1), entropy.sum(-1))

    def get_action(self, tensordict, deterministic=False):
        distribution, value = self.distribution(tensordict)
        tensordict["action"] = distribution.mode if deterministic else distribution.sample()
        tensordict["sample_log_prob"] = self.log_prob_and_entropy(distribution, tensordict["action"])[0]
        tensordict["value"] = value
        return tensordict

    def get_value(self, tensordict):
        tensordict["value"] = self(tensordict["obs"])[1]  # and returns nothing

    def evaluate_actions(self, tensordict):
        distribution, value = self.distribution(tensordict)
        log_prob, entropy = self.log_prob_and_entropy(distribution, tensordict["action"])
        return tensordict.empty().update({"log_prob": log_prob, "entropy": entropy, "value": value})


class ActsOnNoise(Acts):
    """The same, drawing nothing itself."""

    def get_action(self, tensordict, deterministic=False, noise=None):
        output, _ = self(tensordict["obs"])
        if hasattr(self, "log_std"):
            action = output if deterministic else output + self.log_std.exp() * noise
        else:
            action = (output if deterministic else output + noise).argmax(-1)
        tensordict["action"] = action
        tensordict["sample_log_prob"] = self.log_prob_and_entropy(self.distribution(tensordict)[0], action)[0]
        return tensordict


class ModuleConfig(PolicyConfig):
    """A config without settings."""


@register_policy("trunk")
def trunk(cfg: ModuleConfig, observation_space, action_space):
    return module_policy(lambda: Trunk(observation_space, action_space), cfg, observation_space, action_space)


@register_policy("attends")
def attends(cfg: ModuleConfig, observation_space, action_space):
    return module_policy(lambda: Attends(observation_space, action_space), cfg, observation_space, action_space)


@register_policy("trunk_squashed")
def trunk_squashed(cfg: ModuleConfig, observation_space, action_space):
    make = lambda: Trunk(observation_space, action_space)  # noqa: E731
    return module_policy(make, cfg, observation_space, action_space, squash=True)


@register_policy("own_std")
def own_std(cfg: ModuleConfig, observation_space, action_space):
    return module_policy(lambda: OwnStd(observation_space, action_space), cfg, observation_space, action_space)


@register_policy("acts")
def acts(cfg: ModuleConfig, observation_space, action_space):
    return module_policy(lambda: Acts(observation_space, action_space), cfg, observation_space, action_space)


@register_policy("acts_on_noise")
def acts_on_noise(cfg: ModuleConfig, observation_space, action_space):
    return module_policy(lambda: ActsOnNoise(observation_space, action_space), cfg, observation_space, action_space)
