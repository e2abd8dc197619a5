"""Build a run from its config: choose the device, choose compiled or eager execution, and create the components."""

import warnings
from functools import partial
from math import inf
from typing import Literal

import torch

from ecrl.algorithms import Algorithm, Run, Static, make_algorithm
from ecrl.algorithms.core import OnPolicy, max_truncations
from ecrl.algorithms.minibatch_sgd import MinibatchConfig
from ecrl.algorithms.replay_learning import ReplayConfig
from ecrl.compile.background import BackgroundJit, switch_of
from ecrl.compile.jit import Form, choose_form, compilations_of
from ecrl.config import Config, total_steps
from ecrl.distributed import local_device, world_size
from ecrl.envs import Env, auto_reset, clip_action, make_env, with_events
from ecrl.envs.validate import check_fields
from ecrl.errors import ConfigError
from ecrl.kernels import scan
from ecrl.memory import check_room
from ecrl.policies import Policy, make_policy
from ecrl.spaces import element_bytes

_COMPILING_S, _VECTOR_STEP_S, _GRADIENT_STEP_S, _SEQUENCE_STEP_S = 30.0, 0.35e-3, 4.5e-3, 1e-3
"""Estimates in seconds: the time to compile with an empty cache, and the times that compiling saves.

Compiling saves time in each vectorised step and in each gradient step. If a gradient step contains a loop over the
steps of sequences, compiling also saves time in each step of this loop after the first.
"""


def device_of(cfg: Config) -> torch.device:
    """Return the device of a run. If the config sets "auto", choose cuda if a GPU is available, else cpu.

    Raises: ConfigError if the device is not available.
    """
    name, count = local_device(cfg.trainer.device), torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "auto":
        name = "cuda" if count else "cpu"
    have = ["cpu", *(f"cuda:{i}" for i in range(count))]
    if name not in have and not (name == "cuda" and count):
        raise ConfigError(f"trainer.device: {name} is not available; available: {', '.join(have)} (or auto)")
    return torch.device(name)


def _env_and_policy(cfg: Config) -> tuple[Env, Policy]:
    env = make_env(cfg.env, chunk_gamma=getattr(cfg.algorithm.cfg, "gamma", 1.0))
    on_host = env.scene is not None and env.scene.backend == "mujoco"
    if on_host and (device := device_of(cfg)).type == "cuda":
        text = f"trainer.device: {device}, but {cfg.env.label} steps in MuJoCo on the CPU"
        raise ConfigError(f'{text}; set it to cpu, or env.cfg.physics.backend to "warp"')
    check_fields(env, cfg.env.label)
    try:
        return env, make_policy(cfg.policy, env.observation_space, env.action_space, env.frame_stack)
    except ConfigError as error:
        if cfg.env.action_chunk == 1 or str(env.action_space) not in str(error):
            raise
        reason = f"env.action_chunk {cfg.env.action_chunk} makes each action a chunk of this number of actions"
        raise ConfigError(f"{error} ({reason})") from None


def check_envs(cfg: Config, env: Env, num_envs: int, key: str) -> None:
    """Raise ConfigError if the observations of `num_envs` environments do not fit in memory.

    The error message names `key`, the config key that sets `num_envs`.
    """
    check_room(num_envs * element_bytes(env.observation_space), device_of(cfg), f"{key}: {num_envs:,} environments")


def check_rollout(cfg: Config, run: Run) -> None:
    """Raise ConfigError if a rollout does not fit in memory."""
    row = element_bytes(run.env.observation_space) + element_bytes(run.env.action_space)
    row += 19  # bytes per step: four float32 numbers (log-probability, reward, two values) and three bool flags
    num_envs, buffer_size = cfg.trainer.num_envs, cfg.trainer.buffer_size
    steps = num_envs * (buffer_size + 1)
    need = steps * row
    # An on-policy batch also contains the observations at time limits.
    if isinstance(run.algorithm.iterate, OnPolicy) and run.policy.value is not None:
        final = num_envs * min(buffer_size, max_truncations(run.env, buffer_size))
        need += final * element_bytes(run.env.observation_space)
    check_room(need, device_of(cfg), f"trainer.num_envs: num_envs * (buffer_size + 1) = {steps:,} steps")


def _saved_s(policy: Policy, algorithm: Algorithm, static: Static, iterations: int) -> float:
    """Estimate the seconds that compiling saves in a run. If the number of gradient steps is unknown, return inf."""
    if algorithm.gradient_steps is None:
        return inf
    looped = static.row_steps - 1 if policy.unit == "sequence" else 0
    gradient_step = _GRADIENT_STEP_S + policy.time_loops * looped * _SEQUENCE_STEP_S
    per_iteration = static.buffer_size * _VECTOR_STEP_S + algorithm.gradient_steps(static) * gradient_step
    return iterations * per_iteration


def form_of(cfg: Config) -> Form:
    """Choose the form (compiled or eager) of a run with this config, and explain the choice (see `planned_form`)."""
    policy = _env_and_policy(cfg)[1]
    return planned_form(cfg, policy, make_algorithm(cfg.algorithm), static_of(cfg, policy))


def form_in_use(run: Run) -> str:
    """Return "compiled" if no function of the run is eager, "eager" if all functions are eager, else "partly eager"."""
    switch = switch_of(run.jit)
    if run.jit is partial or (switch is not None and switch.eager):
        return "eager"
    compilations = compilations_of(run.jit)
    faults = sum(one.fault is not None for one in compilations)
    if not faults:
        return "compiled"
    return "eager" if faults == len(compilations) else "partly eager"


def planned_form(cfg: Config, policy: Policy, algorithm: Algorithm, static: Static) -> Form:
    """Choose the form (compiled or eager) of a run with this policy and algorithm, and explain the choice.

    Warn if `trainer.tf32` has no effect.

    Raises: ConfigError if `trainer.compile` is "on" and the run cannot be compiled, or if `trainer.compile` is
        "background" and the run has several processes or trains on a GPU.
    """
    device, mode = device_of(cfg).type, cfg.trainer.compile
    if not policy.compiles:
        reason = f"policy {cfg.policy.name} draws its own random numbers, which cannot be compiled"
        if mode == "on":
            raise ConfigError(f"trainer.compile: on, but {reason}; use auto")
        form = Form("eager", reason, partial, scan)
    elif mode == "auto" and (saved := _saved_s(policy, algorithm, static, cfg.trainer.iterations)) < _COMPILING_S:
        reason = f"compiling takes about {_COMPILING_S:.0f} s and would save about {saved:.0f} s of the whole run"
        form = Form("eager", reason, partial, scan)
    else:
        form = choose_form("auto" if mode == "background" else mode, device)
    if mode == "background" and form.name == "compiled":
        form = _in_background(form, device, static)
    if not cfg.trainer.tf32:
        return form
    if device != "cuda":
        warnings.warn(f"trainer.tf32 is for cuda; matrix products on {device} stay in float32", stacklevel=2)
        return form
    return form._replace(reason=f"{form.reason}, TF32 matrices")


def _in_background(form: Form, device: str, static: Static) -> Form:
    """Return the form of a run that is eager until another process has compiled the run.

    Raises: ConfigError if the run has several processes or trains on a GPU.
    """
    advice = "only runs of one process on the CPU can be compiled in the background; use auto"
    if static.world_size > 1:
        raise ConfigError(f"trainer.compile: background, but the run has {static.world_size} processes; {advice}")
    if device != "cpu":
        raise ConfigError(f"trainer.compile: background, but trainer.device is {device}; {advice}")
    return form._replace(reason=f"{form.reason}; eager until another process has compiled", jit=BackgroundJit())


def build(cfg: Config) -> Run:
    """Build a run from its config. The run's environment has auto-reset and the training events of the config.

    Call this function once, and pass the run to other functions. A run does not contain the seed, the run name, the
    path of the initial policy, the number of iterations, hyperparameters in `state["hyper"]`, or settings that only
    `init` reads. If two configs differ only in these settings, their runs are equal and share compiled functions, with
    two exceptions. If `trainer.compile` is "auto", a run with few iterations may be eager, and a run with more
    iterations compiled. If `env.action_chunk` is above 1, the environment contains the hyperparameter `gamma`. A run
    has no camera events, because `ecrl.run.video_writer` renders videos from the states.

    >>> from ecrl import load_config
    >>> cfg = load_config("configs/cartpole_ppo.json")
    >>> build(cfg) == build(cfg.replace(**{"trainer.iterations": 999, "algorithm.cfg.gamma": 0.5}))
    True
    """
    env, policy = _env_and_policy(cfg)
    algorithm, static = make_algorithm(cfg.algorithm), static_of(cfg, policy)
    _check_learning_starts(cfg)
    form = planned_form(cfg, policy, algorithm, static)
    return Run(with_training_wrappers(env, cfg, "train"), policy, algorithm, form.jit, form.scan, static)


def _check_learning_starts(cfg: Config) -> None:
    """Raise ConfigError if a run with a replay buffer would end before its first gradient step."""
    own, total = cfg.algorithm.cfg, total_steps(cfg, world_size()) * cfg.env.action_chunk
    last = total - total // cfg.trainer.iterations  # the largest possible number of env steps before the last iteration
    if isinstance(own, ReplayConfig) and own.learning_starts > last:
        raise ConfigError(
            f"algorithm.cfg.learning_starts: {own.learning_starts:,} is above {last:,}, the env steps before the last "
            f"iteration of this run of {total:,} env steps, so the run would learn nothing; use fewer, or a longer run"
        )


def with_eval_events(run: Run, cfg: Config) -> Run:
    """Return a copy of the run with the config's evaluation events instead of its training events."""
    return run._replace(env=with_training_wrappers(make_env(cfg.env), cfg, "eval"))


def with_training_wrappers(env: Env, cfg: Config, events: Literal["train", "eval"] | None) -> Env:
    """Wrap an environment with auto-reset, with action clipping if the config sets it, and with events of the config.

    If `events` is "train", add the training events, and if "eval", the evaluation events. If `events` is None, add no
    events. Camera events are never added.
    """
    env = auto_reset(clip_action(env) if cfg.policy.clip_actions else env)
    if events is None:
        return env
    named = getattr(cfg.trainer.events, events).items()
    if not named:
        return env
    from ecrl.envs.mujoco.camera_config import RecordCameraConfig  # imports the configs of MuJoCo scenes

    happening = {name: event for name, event in named if not isinstance(event.params, RecordCameraConfig)}
    return with_events(env, happening, f"trainer.events.{events}")


def static_of(cfg: Config, policy: Policy) -> Static:
    """Return the settings of a config and its policy that determine the graph of an iteration."""
    trainer = cfg.trainer
    skips, row_steps = trainer.finite_guard == "skip", _row_steps(cfg, policy)
    return Static(trainer.num_envs, trainer.buffer_size, world_size(), skips, row_steps)


def _row_steps(cfg: Config, policy: Policy) -> int:
    """Return the number of consecutive steps in each entry of a minibatch.

    Raises: ConfigError if `segment_length` does not fit the policy, the algorithm or `trainer.buffer_size`.
    """
    own, steps, key = cfg.algorithm.cfg, cfg.trainer.buffer_size, "algorithm.cfg.segment_length"
    length = own.segment_length if isinstance(own, MinibatchConfig) else None
    whole = isinstance(own, MinibatchConfig) and own.needs_episodes
    if length is None:
        return steps if whole or policy.unit == "sequence" else 1
    if policy.unit == "step":
        raise ConfigError(f"{key}: {length}, but policy {cfg.policy.name} learns from single steps; leave it out")
    if steps % length:
        raise ConfigError(f"{key}: {length} does not divide trainer.buffer_size {steps}; use a divisor")
    if whole and length < steps:
        problem = f"the probability ratio of whole episodes needs sequences of {steps} steps"
        raise ConfigError(f"{key}: {length}, but {problem}; leave it out")
    return length
