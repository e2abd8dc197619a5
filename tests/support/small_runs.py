"""Small configs, training in this process and comparison of states."""

import torch
from tensordict import TensorDict

from ecrl.config import Config, config_from_dict
from ecrl.loop.iteration import Watch, init_state, train_iter, unwatched

NET = {"type": "mlp", "network_cfg": {"hidden_sizes": [8], "activation": "tanh"}}
TILT = {"func": "randomize_field", "mode": "reset", "params": {"field": "obs", "low": -0.1, "high": 0.1}}
PUSH = {**TILT, "mode": "interval", "interval_step": 3, "params": {**TILT["params"], "operation": "add"}}


def small(**changes) -> Config:
    """PPO on CartPole for four iterations of 32 steps, eager, with dotted keys changed."""
    base = {
        "trainer": {"num_envs": 4, "buffer_size": 8, "iterations": 4, "compile": "off"},
        "env": {"name": "cartpole"},
        "policy": {"name": "actor_critic", "actor": NET, "critic": NET},
        "algorithm": {"name": "ppo", "cfg": {"n_epochs": 2, "batch_size": 10}},
    }
    return config_from_dict(base).replace(**changes)


def last_state(cfg: Config, state: TensorDict | None = None, watch: Watch = unwatched) -> TensorDict:
    """The state after training from `state` or from a new one."""
    *_, record = train_iter(init_state(cfg) if state is None else state, cfg, watch)
    return record["state"]


def same(a: TensorDict, b: TensorDict) -> bool:
    """Return True if both have the same names and the same bits."""
    a, b = (dict(x.flatten_keys("/").items()) for x in (a, b))
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def steps_of(obs, action) -> TensorDict:
    """Steps as the `evaluate` of a policy gets them."""
    return TensorDict({"obs": obs, "action": action}, [])


def full_config(algorithm: str, form: str) -> Config:
    """Normalisation, a schedule and events of every mode, on a pure environment."""
    critic = {"critic": NET} if algorithm == "ppo" else {}
    point_mass = algorithm == "apg"
    policy = {"name": "actor_critic" if critic else "actor_only", "actor": NET, "normalize_obs": True, **critic}
    cfg = {
        "ppo": {"n_epochs": 2, "batch_size": 20, "normalize_reward": True, "target_kl": 0.05},
        "grpo": {"n_epochs": 2, "batch_size": 20, "group_size": 2, "kl_coef": 0.1, "ref_update_freq": 3},
        "apg": {"segment_length": 4},
    }[algorithm]
    field = {"field": "position", "low": -0.1, "high": 0.1} if point_mass else TILT["params"]
    events = {
        "world": {**TILT, "mode": "startup", "params": field},
        "tilt": {**TILT, "params": field},
        "push": {**PUSH, "params": {**field, "operation": "add"}},
    }
    return config_from_dict(
        {
            "trainer": {
                "num_envs": 4,
                "buffer_size": 8,
                "iterations": 20,
                "compile": form,
                "save_freq": 100,
                "events": {"train": events},
            },
            "env": {"name": "point_mass" if point_mass else "cartpole"},
            "policy": policy,
            "algorithm": {"name": algorithm, "cfg": {**cfg, "lr_scheduler": {"name": "linear"}}},
        }
    )
