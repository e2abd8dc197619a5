"""Short runs of every algorithm, with the settings that add logs, and the names of their logs."""

from collections.abc import Iterator

from ecrl.config import Config, config_from_dict
from ecrl.loop.iteration import init_state, train_iter
from ecrl.run.loggers import scalar_name
from support.demos import BASE, balancing, balancing_path
from support.off_policy_agents import agent, is_continuous
from support.small_runs import NET, small
from support.token_agent import speaking

_OFF_POLICY = {
    "dqn": ["dqn", "prioritized dqn"],
    "pqn": ["pqn"],
    "ddpg": ["ddpg"],
    "td3": ["td3"],
    "sac": ["sac", "discrete sac"],
    "fast_td3": ["fast_td3"],
    "fast_sac": ["fast_sac"],
}
_ACTOR_ONLY = {"policy": {"name": "actor_only", "actor": NET}}
_SKIP = {"trainer.finite_guard": "skip"}
_FEW = {"trainer.iterations": 3}


def configs(algorithm: str) -> Iterator[Config]:
    """Yield runs of an algorithm that together have all of its logs."""
    if algorithm in _OFF_POLICY:
        for name in _OFF_POLICY[algorithm]:
            yield agent(name, **_FEW)
            yield agent(name, **_FEW, **_SKIP)
        if is_continuous(algorithm):
            yield agent(algorithm, **_FEW, **{"algorithm.cfg.critic_learning_rate": 0.01})
        if "temperature_learning_rate" in type(agent(algorithm).algorithm.cfg).model_fields:
            yield agent(algorithm, **_FEW, **{"algorithm.cfg.temperature_learning_rate": 0.01})
        return
    yield from {"ppo": _ppo, "grpo": _grpo, "apg": _apg, "bc": _bc}[algorithm]()


def _ppo() -> Iterator[Config]:
    yield small()
    yield small(**_SKIP)
    yield small(**{"algorithm.cfg.target_kl": 0.01, "algorithm.cfg.critic_learning_rate": 0.01})
    yield speaking(**{"trainer.iterations": 1, "algorithm.cfg.ratio": "token"})


def _grpo() -> Iterator[Config]:
    grpo = {"name": "grpo", "cfg": {"group_size": 2, "n_epochs": 1, "batch_size": 16, "kl_coef": 0.1}}
    yield small(**_ACTOR_ONLY, algorithm=grpo)
    yield small(**_ACTOR_ONLY, **_SKIP, algorithm=grpo)
    limits = {"target_kl": 0.01, "min_group_score": 0.0, "max_group_score": 1e3}
    yield small(**_ACTOR_ONLY, algorithm=grpo | {"cfg": grpo["cfg"] | limits})
    tokens = {"name": "grpo", "cfg": {"group_size": 2, "n_epochs": 1, "batch_size": 64, "ratio": "token"}}
    yield speaking(**{"trainer.iterations": 1}, algorithm=tokens)


def _apg() -> Iterator[Config]:
    for guard in ("stop", "skip"):
        yield small(
            **_ACTOR_ONLY, **{"env.name": "point_mass", "trainer.finite_guard": guard}, algorithm={"name": "apg"}
        )


def _bc() -> Iterator[Config]:
    balancing()
    bc = {"name": "bc", "cfg": {"demos": str(balancing_path()), "batch_size": 32, "holdout": 0.25}}
    for guard in ("stop", "skip"):
        yield config_from_dict(BASE | {"algorithm": bc}).replace(**{"trainer.finite_guard": guard})


def logged_names(cfg: Config) -> set[str]:
    """Return the names of the logs in a run's files, as `ecrl.run.loggers.scalar_name` gives them."""
    records = train_iter(init_state(cfg), cfg)
    return {scalar_name(record["log_type"], name) for record in records for name in record["logs"]}
