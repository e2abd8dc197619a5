"""Translate the flags of abcdRL, a library of reinforcement-learning algorithms, into ecrl's keys.

- A flag with the same meaning as a key of ecrl sets this key. Some values are converted to another unit.
- A flag without a meaning in ecrl is *inert*: ecrl removes the flag with a warning.
- A flag whose meaning differs from every key of ecrl is a fault, because the run would have different results.

Each warning about a flag, and each fault that this module finds in a known flag, refers to the flag's row in
`docs/migration.md`.

The sections of the flags are `trainer`, `logger`, `evaluator` and `saver`. The name `trainer.buffer_size` is ambiguous.
In ecrl, this key is the number of steps per iteration. In abcdRL, this flag is the capacity of the replay buffer. If
the algorithm has a replay buffer, a config with flags of the trainer must therefore not have `trainer.buffer_size`.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from ecrl.config.aliases import MISSING, RawConfig, get_path, part_entry, remove_path, set_path, split_path
from ecrl.config.model import Fault, format_key, known_keys
from ecrl.registry import nearest

_CFG = "algorithm.cfg."
PAGE = "docs/migration.md"
"""Page that maps the names of abcdRL to ecrl's names. Each flag has a row, whose anchor is the name of the flag."""

Changes = dict[str, Any]


class Context(NamedTuple):
    """The parts of a config that determine the meaning of a flag.

    Attributes:
        algorithm: name of the algorithm.
        keys: keys that the settings of the algorithm may have.
        cfg: settings of the algorithm without the flags.
        num_envs: number of environments.
        flags: dict from the name of each flag of the config to its value.
    """

    algorithm: str
    keys: set[str]
    cfg: dict[str, Any]
    num_envs: Any
    flags: Mapping[str, Any]


class Refused(Exception):
    """Error for a flag whose meaning differs from ecrl's keys. The message has a remedy."""


class Inert(Exception):
    """Error for a flag without a meaning in ecrl. The message has the reason."""


class Flag(NamedTuple):
    """A flag of abcdRL.

    Attributes:
        kind: JSON type of the value.
        convert: function that takes the value and the `Context`, and returns values by ecrl's dotted keys. Values of a
            wrong type are not converted, so validation reports them. The function may raise `Refused` or `Inert`.
    """

    kind: str
    convert: Callable[[Any, Context], Changes]


def _with_row(text: str, anchor: str) -> str:
    """Add a reference to a row or a section of `docs/migration.md` to a message.

    >>> _with_row("remove it", "trainer.tau")
    'remove it (see docs/migration.md#trainer.tau)'
    """
    return f"{text} (see {PAGE}#{anchor})"


def flag_fault(flag: str, text: str) -> Fault:
    """Return a fault of a flag. The message ends with a reference to the flag's row in `docs/migration.md`."""
    return split_path(flag), _with_row(text, flag)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _same(kind: str, key: str) -> Flag:
    """Return a flag whose value becomes the value of the key without conversion."""
    return Flag(kind, lambda value, context: {key: value})


def _inert(kind: str, reason: str) -> Flag:
    def convert(value: Any, context: Context) -> Changes:
        raise Inert(reason)

    return Flag(kind, convert)


def _choice(key: str, if_true: Any, if_false: Any) -> Flag:
    """Return a boolean flag that sets the key to `if_true` or `if_false`."""

    def convert(value: Any, context: Context) -> Changes:
        return {key: {True: if_true, False: if_false}[value] if isinstance(value, bool) else value}

    return Flag("boolean", convert)


def _env_id(value: Any, context: Context) -> Changes:
    return {"env.name": f"gymnasium:{value}" if isinstance(value, str) else value}


def _learning_starts(value: Any, context: Context) -> Changes:
    """Set `learning_starts` in steps of all environments together. abcdRL counts the steps of one environment."""
    is_known = _is_count(value) and _is_count(context.num_envs)
    return {f"{_CFG}learning_starts": value * context.num_envs if is_known else value}


def _whole_steps(value: int, num_envs: int) -> int:
    """Round a number of environment steps down to a multiple of the number of environments, but at least to 1.

    abcdRL rounds its periods in this way.

    >>> [_whole_steps(value, 4) for value in (3, 4, 10)]
    [1, 4, 8]
    """
    return max(value // num_envs * num_envs, 1)


def _target_network_frequency(value: Any, context: Context) -> Changes:
    """Set the period of target updates in environment steps.

    Raises: Refused if the algorithm cannot update its targets with this period.
    """
    if not (_is_count(value) and _is_count(context.num_envs)) or "target_update_freq" in context.keys:
        rounded = _whole_steps(value, context.num_envs) if _is_count(value) and _is_count(context.num_envs) else value
        return {f"{_CFG}target_update_freq": rounded}
    if "tau" in context.keys and _whole_steps(value, context.num_envs) <= context.num_envs:
        return {}
    if "tau" in context.keys:
        text = f"{context.algorithm} moves the targets after each gradient step; leave it out, and lower {_CFG}tau"
        raise Refused(text)
    raise Refused(f"algorithm {context.algorithm!r} has no target_update_freq; remove it")


def _policy_frequency(value: Any, context: Context) -> Changes:
    """Set the period of the actor's updates, in gradient steps. abcdRL counts environment steps.

    Raises: Refused for a period longer than one step of all environments, if the algorithm cannot update its actor with
        this period or if the algorithm's `train_freq` is not 1.
    """
    if not (_is_count(value) and _is_count(context.num_envs)):
        return {f"{_CFG}policy_delay": value}
    period = _whole_steps(value, context.num_envs)
    if period <= context.num_envs:  # the actor moves in each gradient step
        return {} if context.algorithm == "ddpg" else {f"{_CFG}policy_delay": 1}
    if context.algorithm == "sac":
        raise Refused("abcdRL updates the actor this many times in a row, but ecrl only once at a time; leave it out")
    if context.algorithm == "ddpg":
        advice = 'use td3 with "policy_noise": 0.0, and a policy with "num_critics": 1'
        raise Refused(f"ddpg moves the actor in each gradient step; {advice}")
    if context.flags.get("trainer.train_frequency", context.cfg.get("train_freq", 1)) != 1:
        raise Refused(f"counts environment steps; set {_CFG}policy_delay, which counts gradient steps")
    return {f"{_CFG}policy_delay": period // context.num_envs}


def _has_learnt_temperature(context: Context) -> bool:
    return context.flags.get("trainer.autotune", context.cfg.get("learn_temperature", True)) is not False


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _alpha(value: Any, context: Context) -> Changes:
    """Set the temperature of SAC, or the exponent of the priorities in DQN's replay buffer.

    The exponent is doubled, because abcdRL's priorities are squared errors. Raise Inert if SAC learns its temperature.
    """
    if context.algorithm == "dqn":
        return {f"{_CFG}prioritized.alpha": 2.0 * value if _is_number(value) else value}
    if context.algorithm == "sac" and _has_learnt_temperature(context):
        raise Inert("abcdRL reads it only without autotune, and starts with a temperature of 1")
    return {f"{_CFG}temperature": value}


def _beta(value: Any, context: Context) -> Changes:
    """Set the initial and final exponent of the importance weights, because the exponent is constant in abcdRL."""
    return {f"{_CFG}prioritized.beta": value, f"{_CFG}prioritized.final_beta": value}


def _q_lr(value: Any, context: Context) -> Changes:
    """Set the learning rates of the critics and of any learnt temperature."""
    has_rate = "temperature_learning_rate" in context.keys and _has_learnt_temperature(context)
    own = {f"{_CFG}temperature_learning_rate": value} if has_rate else {}
    return {f"{_CFG}critic_learning_rate": value} | own


def _in_action_units(name: str) -> Flag:
    """Return a flag for noise in the environment's action units.

    The conversion raises Refused if the algorithm has this noise, because ecrl's unit is half the action range.
    """

    def convert(value: Any, context: Context) -> Changes:
        if name not in context.keys:
            return {f"{_CFG}{name}": value}
        unit = "half the action range"
        raise Refused(f"is in units of the action; divide it by {unit}, and set {_CFG}{name}")

    return Flag("number", convert)


def _vf_coef(value: Any, context: Context) -> Changes:
    return {f"{_CFG}vf_coef": value / 2.0 if _is_number(value) else value}


def _num_minibatches(value: Any, context: Context) -> Changes:
    return {f"{_CFG}num_minibatches": value, f"{_CFG}batch_size": None}


FLAGS = {
    "trainer.cuda": _choice("trainer.device", "auto", "cpu"),
    "trainer.capture_video": _inert("boolean", "ecrl record makes videos of a run"),
    "trainer.env_id": Flag("string", _env_id),
    "trainer.gamma": _same("number", f"{_CFG}gamma"),
    "trainer.start_epsilon": _same("number", f"{_CFG}initial_epsilon"),
    "trainer.end_epsilon": _same("number", f"{_CFG}final_epsilon"),
    "trainer.exploration_fraction": _same("number", f"{_CFG}exploration_fraction"),
    "trainer.exploration_noise": _same("number", f"{_CFG}exploration_noise"),
    "trainer.policy_noise": _in_action_units("policy_noise"),
    "trainer.noise_clip": _in_action_units("noise_clip"),
    "trainer.batch_size": _same("integer", f"{_CFG}batch_size"),
    "trainer.learning_rate": _same("number", f"{_CFG}learning_rate"),
    "trainer.policy_lr": _same("number", f"{_CFG}learning_rate"),
    "trainer.q_lr": Flag("number", _q_lr),
    "trainer.tau": _same("number", f"{_CFG}tau"),
    "trainer.alpha": Flag("number", _alpha),
    "trainer.beta": Flag("number", _beta),
    "trainer.autotune": _same("boolean", f"{_CFG}learn_temperature"),
    "trainer.learning_starts": Flag("integer", _learning_starts),
    "trainer.train_frequency": _same("integer", f"{_CFG}train_freq"),
    "trainer.target_network_frequency": Flag("integer", _target_network_frequency),
    "trainer.policy_frequency": Flag("integer", _policy_frequency),
    "trainer.num_steps": _same("integer", "trainer.buffer_size"),
    "trainer.anneal_lr": _choice(f"{_CFG}lr_scheduler", {"name": "linear"}, None),
    "trainer.update_epochs": _same("integer", f"{_CFG}n_epochs"),
    "trainer.num_minibatches": Flag("integer", _num_minibatches),
    "trainer.norm_adv": _choice(f"{_CFG}normalize_advantage", "minibatch", "none"),
    "trainer.clip_coef": _same("number", f"{_CFG}clip_coef"),
    "trainer.clip_vloss": _same("boolean", f"{_CFG}clip_vloss"),
    "trainer.ent_coef": _same("number", f"{_CFG}ent_coef"),
    "trainer.vf_coef": Flag("number", _vf_coef),
    "trainer.max_grad_norm": _same("number", f"{_CFG}max_grad_norm"),
    "trainer.target_kl": _same("number", f"{_CFG}target_kl"),
    "trainer.gae_lambda": _same("number", f"{_CFG}gae_lambda"),
    "logger.track": _same("boolean", "trainer.use_wandb"),
    "logger.wandb_project_name": _same("string", "trainer.wandb_project_name"),
    "logger.wandb_tags": _inert("array", "set the environment variable WANDB_TAGS"),
    "logger.wandb_entity": _inert("string", "set the environment variable WANDB_ENTITY"),
    "evaluator.eval_frequency": _same("integer", "trainer.eval_freq"),
    "evaluator.num_steps_eval": _inert("integer", "an evaluation has trainer.num_eval_episodes whole episodes"),
    "evaluator.eval_env_seed": _same("integer", "trainer.eval_seed"),
    "saver.save_frequency": _same("integer", "trainer.save_freq"),
}
"""Map each flag of abcdRL to its translation, unless the flag is also a key of ecrl.

The trainer's flags `exp_name`, `seed`, `num_envs` and `total_timesteps` are also keys of ecrl.
"""

SECTIONS = ("logger", "evaluator", "saver")
"""Sections of abcdRL's flags that are not sections of an ecrl config."""
_OWN_SECTIONS = ("trainer", "env", "policy", "algorithm")


def switch(key: str) -> tuple[str, bool] | None:
    """Return the boolean flag that a key without a value sets, and the value. Return None for other keys.

    abcdRL's command line switches a flag on by its name, and off by `no_` before its name.

    >>> switch("trainer.cuda"), switch("trainer.no_cuda"), switch("trainer.tau")
    (('trainer.cuda', True), ('trainer.cuda', False), None)
    """
    section, _, name = key.partition(".")
    for flag, value in ((key, True), (f"{section}.{name.removeprefix('no_')}", False)):
        if flag in FLAGS and FLAGS[flag].kind == "boolean":
            return flag, value
    return None


class Taken(NamedTuple):
    """Result of separating abcdRL's flags from the other keys of a config, or from the other overrides.

    Attributes:
        flags: dict from the name of each flag to its value.
        rest: the config or the overrides without the flags.
        faults: unknown flags in the sections `SECTIONS`, and misspelt names of these sections.
    """

    flags: dict[str, Any]
    rest: Any
    faults: list[Fault]


def _unknown_flag(section: str, flag: str) -> Fault:
    known = ", ".join(name.partition(".")[2] for name in FLAGS if name.startswith(f"{section}."))
    return (section, flag), _with_row(f"unknown key; known: {known}", "abcdrl-flags")


def _misspelt_sections(names: Iterable[Any]) -> list[Fault]:
    """Return a fault for each unknown section that is more similar to a section of flags than to ecrl's sections.

    >>> _misspelt_sections(["evaluater", "trianer", "trainer"])
    [(('evaluater',), "unknown key; did you mean 'evaluator'?")]
    """
    known = (*_OWN_SECTIONS, *SECTIONS)
    near = [(format_key(name), nearest(name, known)) for name in names if name not in known]
    return [((key,), f"unknown key; did you mean {section!r}?") for key, section in near if section in SECTIONS]


def flags_in_config(data: Any) -> Taken:
    """Separate abcdRL's flags from the other keys of a config.

    >>> flags_in_config({"trainer": {"seed": 1, "tau": 0.5}, "logger": {"track": True}}).rest
    {'trainer': {'seed': 1}}
    """
    flags, rest, faults = {}, data, []
    for flag in FLAGS:
        if (value := get_path(data, split_path(flag))) is not MISSING:
            flags[flag], rest = value, remove_path(rest, split_path(flag))
    for section in SECTIONS:
        if isinstance(left := get_path(rest, (section,)), dict):
            faults += [_unknown_flag(section, format_key(key)) for key in left]
            rest = remove_path(rest, (section,))
    return Taken(flags, rest, faults + _misspelt_sections(rest if isinstance(rest, dict) else ()))


def flags_in_overrides(overrides: Mapping[str, Any]) -> Taken:
    """Separate abcdRL's flags from the other overrides. The keys of `overrides` are dotted keys."""
    flags = {key: value for key, value in overrides.items() if key in FLAGS}
    rest = {key: value for key, value in overrides.items() if key not in FLAGS}
    unknown = [key for key in rest if key.partition(".")[0] in SECTIONS and "." in key]
    faults = [_unknown_flag(*key.split(".", 1)) for key in unknown]
    faults += _misspelt_sections(dict.fromkeys(key.partition(".")[0] for key in rest if key not in unknown))
    return Taken(flags, {key: value for key, value in rest.items() if key not in unknown}, faults)


def context_of(raw: RawConfig, flags: Mapping[str, Any], defaults: Mapping[str, Any]) -> Context | None:
    """Return the context of flags, from a config without its flags.

    Return None if the name of the algorithm is missing or resembles no known name.
    """
    section: Any = raw.data.get("algorithm")
    if (entry := part_entry("algorithm", section)) is None:
        return None
    cfg, num_envs = get_path(section, ("cfg",)), get_path(raw.data, ("trainer", "num_envs"))
    return Context(
        section["name"],
        known_keys(entry.config),
        cfg if isinstance(cfg, dict) else {},
        defaults.get("num_envs") if num_envs is MISSING else num_envs,
        flags,
    )


class Translated(NamedTuple):
    """Result of `translate_flags`.

    Attributes:
        values: dict from ecrl's dotted key to the value that a flag sets.
        names: dict from the dotted key to the name of the flag that sets the key.
        faults: flags that ecrl refuses, each with a message.
        inert: flags without a meaning in ecrl, each with the reason.
    """

    values: dict[str, Any]
    names: dict[str, str]
    faults: list[Fault]
    inert: list[Fault]


def translate_flags(flags: Mapping[str, Any], context: Context) -> Translated:
    """Convert the flags of a config or of its overrides to values of ecrl's keys. Collect faults and inert flags.

    >>> cfg = Context("td3", {"gamma", "policy_delay", "tau"}, {}, 1, {})
    >>> translate_flags({"trainer.gamma": 0.9, "trainer.policy_frequency": 2}, cfg).values
    {'algorithm.cfg.gamma': 0.9, 'algorithm.cfg.policy_delay': 2}
    """
    values, names, faults, inert = {}, {}, [], []
    for flag, value in flags.items():
        try:
            changes = FLAGS[flag].convert(value, context)
        except Refused as refused:
            faults.append(flag_fault(flag, str(refused)))
            continue
        except Inert as reason:
            inert.append((split_path(flag), f"{reason}; see {PAGE}#{flag}"))
            continue
        for key, new in changes.items():
            name = key.removeprefix(_CFG).partition(".")[0]
            if key.startswith(_CFG) and name not in context.keys:
                faults.append(flag_fault(flag, f"algorithm {context.algorithm!r} has no {name}; remove it"))
                break
            if key in values:
                faults.append(flag_fault(flag, f"sets {key!r}, which {names[key]} also sets; keep one"))
                break
            values[key], names[key] = new, flag
    return Translated(values, names, faults, inert)


def buffer_size_faults(taken: Taken, buffer_size: Any, context: Context) -> list[Fault]:
    """Return a fault if `trainer.buffer_size` is ambiguous.

    The key is ambiguous if flags of the trainer are also given, and the algorithm has a replay buffer.
    """
    others = [flag for flag in taken.flags if flag.startswith("trainer.")]
    if buffer_size is MISSING or not others or "capacity" not in context.keys:
        return []
    text = (
        f"next to abcdRL's {others[0]}, it may mean the capacity of the replay buffer; set {_CFG}capacity instead, or "
        "use only ecrl's keys, where buffer_size is the number of steps per iteration"
    )
    return [flag_fault("trainer.buffer_size", text)]


def with_values(data: dict[str, Any], translated: Translated) -> tuple[dict[str, Any], list[Fault]]:
    """Set the translated values in a config, and return the config and the faults.

    A key is a fault if it is already set, or if its section is not an object.
    """
    faults = []
    for key, value in translated.values.items():
        flag = translated.names[key]
        if get_path(data, split_path(key)) is not MISSING:
            faults.append(flag_fault(flag, f"sets {key!r}, which is also given; keep one"))
            continue
        try:
            data = set_path(data, split_path(key), value)
        except KeyError as error:
            faults.append(flag_fault(flag, f"sets {key!r}, but {error.args[0]!r} is not a section"))
    return data, faults
