"""Compile the functions of a run before the run, for example while a container image is built."""

from functools import partial

from ecrl.compile.jit import Compilation, compilations_of
from ecrl.config import Config, total_steps
from ecrl.distributed import world_size
from ecrl.errors import ConfigError
from ecrl.loop.buffers import kinds_of, with_own_buffers
from ecrl.loop.build import build, check_rollout, form_of, with_eval_events
from ecrl.loop.iteration import close, first_state, iterations, phase_of, steps_per_iteration
from ecrl.run.evaluation import with_evaluation


def compile_ahead(cfg: Config) -> list[Compilation]:
    """Compile every function that a run with this config would compile. The compiled code is stored on disk.

    A later run with the same config loads the code instead of compiling, if the type of CPU, the number of threads, the
    torch version and the version of ecrl are also the same. The seed, the hyperparameters in `state["hyper"]` and the
    number of iterations may differ.

    The function trains until each phase of the algorithm (see `ecrl.algorithms.Algorithm`) has run, and discards the
    results. An algorithm with a replay buffer has a phase without learning, so the function first collects
    `learning_starts` steps. If `trainer.enable_eval` is true, the function also evaluates the policy.

    Returns: a `Compilation` for each compilation, with its reason and its duration.
    Raises: ConfigError if the run is eager, if it has several processes, or if a function cannot be compiled.
    """
    if cfg.trainer.distributed or world_size() > 1:
        raise ConfigError("trainer.distributed: only runs of one process can be compiled ahead; set it to false")
    if cfg.trainer.compile == "background":
        cfg = cfg.replace(**{"trainer.compile": "on", "trainer.log_freq": 1})  # as in `ecrl.loop.background`
    run = build(cfg)
    if run.jit is partial:
        raise ConfigError(f"trainer.compile: {cfg.trainer.compile}, but the run is eager: {form_of(cfg).reason}")
    check_rollout(cfg, run)
    state = first_state(run, cfg)
    phase, size = run.algorithm.phase, steps_per_iteration(cfg)
    missing = {None} if phase is None else {phase(step) for step in range(0, total_steps(cfg, 1), size)}
    if phase is not None:  # one record per iteration, so that the loop below sees each phase
        cfg = cfg.replace(**{"trainer.log_freq": 1})
    for record in iterations(run, with_own_buffers(state, kinds_of(run)), cfg):
        if record["log_type"] == "train":
            missing.discard(phase_of(run, state))
            state = record["state"]
            if cfg.trainer.enable_eval and not missing:
                next(with_evaluation(iter(()), cfg, None, record, with_eval_events(run, cfg)))
            if not missing:
                break
    close(state, cfg)
    compilations = [*compilations_of(run.jit)]
    for one in compilations:
        if one.fault is not None:
            raise ConfigError(f"trainer.compile: {one.text}: {one.fault}")
    return compilations
