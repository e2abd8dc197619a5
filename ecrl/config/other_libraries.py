"""Names of settings in other libraries. Error messages suggest ecrl's key instead of such a name."""

from collections.abc import Iterable

from ecrl.registry import did_you_mean, lookup, registered

_CFG = "algorithm.cfg."
KEYS = {
    **dict.fromkeys(("lr", "learning_rate", "step_size"), f"{_CFG}learning_rate"),
    **dict.fromkeys(("n_steps", "num_steps", "rollout_length", "horizon"), "trainer.buffer_size"),
    **dict.fromkeys(("n_envs", "nenvs"), "trainer.num_envs"),
    **dict.fromkeys(("total_timesteps", "total_steps", "max_steps"), "trainer.total_timesteps"),
    **dict.fromkeys(("clip_range", "clip_ratio", "clip_eps", "clip_epsilon"), f"{_CFG}clip_coef"),
    **dict.fromkeys(("update_epochs", "num_epochs", "epochs"), f"{_CFG}n_epochs"),
    **dict.fromkeys(("minibatch_size", "mini_batch_size"), f"{_CFG}batch_size"),
    **dict.fromkeys(("entropy_coef", "entropy_coeff"), f"{_CFG}ent_coef"),
    **dict.fromkeys(("value_coef", "value_loss_coef", "vf_loss_coeff"), f"{_CFG}vf_coef"),
    **dict.fromkeys(("lambda", "lam", "gae_lam"), f"{_CFG}gae_lambda"),
    **dict.fromkeys(("discount", "discount_factor"), f"{_CFG}gamma"),
    **dict.fromkeys(("replay_size", "buffer_capacity"), f"{_CFG}capacity"),
    **dict.fromkeys(("target_update_interval", "target_network_frequency"), f"{_CFG}target_update_freq"),
    "norm_adv": f"{_CFG}normalize_advantage",
    "norm_obs": "policy.normalize_obs",
    **dict.fromkeys(("env_id", "env_name", "environment"), "env.id"),
}
"""Map the name of a setting in other libraries to ecrl's dotted key of the same setting."""

UNBUILT = {
    "sensor": "put cameras into events and observations, and remove the key",
    "articulation": "put articulated objects into an MJCF scene file, see mjcf, and remove the key",
    "rigid_object_group": "list the objects in rigid_object, and remove the key",
}
"""Remedy for each key of EmbodiChain's scenes whose parts ecrl does not build. An empty list is ignored."""

ABSENT = UNBUILT | {
    "physics_update_step": "an event does not step the physics; remove the key, and set init_pos to a position of rest",
    "recompute_inertia": "the inertia always follows from the mass; remove the key",
    "min_mass": "the lower end of mass_range is the smallest mass; remove the key",
    "attrs": "the robot's URDF or MJCF file defines its masses, frictions and gravity; remove the key",
}
"""Reason and remedy for each key of EmbodiChain's scenes, terms, events and robots that ecrl refuses.

`docs/migration.md` lists these keys.
"""

_TIME_LIMIT = "max_episode_steps"
_TIME_LIMITS = ("max_steps", "max_length", "episode_length", "horizon", "time_limit", _TIME_LIMIT)
"""Names of an episode's time limit, as keys of `env` or `env.cfg`."""


def _algorithms_with(key: str) -> list[str]:
    return [name for name in registered("algorithm") if key in lookup("algorithm", name).config.model_fields]


def suggestion(key: str, known: Iterable[str], in_algorithm: bool) -> str:
    """Return advice on an unknown key of a section, as text for an error message.

    Args:
        key: the unknown key.
        known: keys of the section.
        in_algorithm: True if the section is `algorithm.cfg`.

    >>> suggestion("lr", ["seed"], in_algorithm=False), suggestion("sede", ["seed"], in_algorithm=False)
    ('set algorithm.cfg.learning_rate', "did you mean 'seed'?")
    >>> suggestion("min_mass", ["mass_range"], in_algorithm=False)
    'the lower end of mass_range is the smallest mass; remove the key'
    >>> suggestion("kl_coef", ["clip_coef"], in_algorithm=True)
    'a key of grpo, not of this algorithm'
    """
    known = [*known]
    if key == "total_timesteps" and "iterations" in known:  # only Config translates this key
        return 'set iterations, or change the whole config: cfg.replace(**{"trainer.total_timesteps": ...})'
    if key.lower() in _TIME_LIMITS and (_TIME_LIMIT in known or "action_chunk" in known):  # env.cfg or env
        return f"set env.cfg.{_TIME_LIMIT}"
    target = KEYS.get(key.lower())
    if target is not None and not (in_algorithm and target.startswith(_CFG) and target.removeprefix(_CFG) not in known):
        return f"set {target}"
    if key in ABSENT:
        return ABSENT[key]
    others = _algorithms_with(key) if in_algorithm else []
    return f"a key of {', '.join(others)}, not of this algorithm" if others else did_you_mean(key, known)


def option_for(name: str) -> str | None:
    """Return the complete option for an option that lacks the section of its key, or None for an unknown option.

    The function also replaces names from other libraries by ecrl's options, and adds the section to flags of abcdRL.

    >>> option_for("--seed"), option_for("--lr"), option_for("--gamma"), option_for("--nothing")
    ('--trainer.seed', '--algorithm.cfg.learning_rate', '--algorithm.cfg.gamma', None)
    >>> option_for("--train-frequency"), option_for("--no-cuda")
    ('--trainer.train_frequency', '--trainer.no_cuda')
    """
    # import here, because these modules import this module
    from ecrl.config.abcdrl import FLAGS
    from ecrl.config.config import PolicyConfig, TrainerConfig

    key = name.lstrip("-").replace("-", "_").lower()
    if key in TrainerConfig.model_fields:
        return f"--trainer.{key}"
    if key in KEYS:
        return f"--{KEYS[key]}"
    if key in PolicyConfig.model_fields:
        return f"--policy.{key}"
    if _algorithms_with(key):
        return f"--{_CFG}{key}"
    flag = key.removeprefix("no_")
    section = next((name.partition(".")[0] for name in FLAGS if name.partition(".")[2] == flag), None)
    return f"--{section}.{key}" if section else None
