"""Generate the reference pages for `ecrl` and for the modules that the how-to pages mention, except the kernels."""

PAGES: dict[str, tuple[str, dict[str, list[str]]]] = {
    "ecrl": (
        "Python API",
        {
            "Configs": ["ecrl.load_config", "ecrl.Config", "ecrl.ConfigModel", "ecrl.PolicyConfig", "ecrl.ConfigError"],
            "Training": [
                "ecrl.init_state",
                "ecrl.train",
                "ecrl.train_iter",
                "ecrl.train_many",
                "ecrl.exploit_and_explore",
                "ecrl.make_iteration",
                "ecrl.summary",
                "ecrl.train_from_config",
                "ecrl.close",
            ],
            "Evaluation and checks": [
                "ecrl.evaluate",
                "ecrl.check_env",
                "ecrl.env_check.check.EnvCheck",
                "ecrl.check_policy",
                "ecrl.loop.policy_check.PolicyCheck",
            ],
            "Saving": ["ecrl.save", "ecrl.load"],
            "Demonstrations": ["ecrl.record_demonstrations", "ecrl.run.demonstrations.Summary"],
            "History": ["ecrl.run.history.History"],
        },
    ),
    "parts": (
        "Components",
        {
            "Records": ["ecrl.Env", "ecrl.Policy", "ecrl.Algorithm", "ecrl.algorithms.Run", "ecrl.algorithms.Static"],
            "Off-policy turns": [
                "ecrl.algorithms.interleaved.interleaved",
                "ecrl.algorithms.interleaved.take_steps",
                "ecrl.algorithms.interleaved.new_replay",
                "ecrl.algorithms.interleaved.store",
                "ecrl.algorithms.interleaved.sample_keys",
                "ecrl.algorithms.interleaved.collect_exploring",
            ],
            "Construction": ["ecrl.make_env", "ecrl.make_policy", "ecrl.make_algorithm", "ecrl.module_policy"],
            "Registration": [
                "ecrl.registered",
                "ecrl.register_env",
                "ecrl.register_policy",
                "ecrl.register_algorithm",
                "ecrl.register_network",
                "ecrl.register_vla_backend",
                "ecrl.register_event",
                "ecrl.register_action",
                "ecrl.register_observation",
                "ecrl.register_reward",
                "ecrl.register_expert",
                "ecrl.register_robot",
            ],
            "Environments": [
                "ecrl.envs.state_of",
                "ecrl.envs.time_limit",
                "ecrl.envs.chunked",
                "ecrl.envs.auto_reset",
                "ecrl.envs.clip_action",
                "ecrl.envs.with_events",
                "ecrl.envs.gymnasium.from_vector",
                "ecrl.envs.make_expert",
                "ecrl.envs.experts.open_loop",
            ],
            "MuJoCo tasks": [
                "ecrl.envs.mujoco.make_task.task_env",
                "ecrl.envs.mujoco.terms.term.target",
                "ecrl.envs.mujoco.terms.term.ActionTerm",
                "ecrl.envs.mujoco.terms.term.IntegerTerm",
            ],
            "Policies": [
                "ecrl.policies.acting_params",
                "ecrl.policies.flatten",
                "ecrl.policies.normalized",
                "ecrl.policies.encode_instructions",
                "ecrl.policies.openvla.save_openvla",
                "ecrl.policies.pi0.save_pi0",
            ],
            "Spaces": [
                "ecrl.spaces.Box",
                "ecrl.spaces.Discrete",
                "ecrl.spaces.MultiDiscrete",
                "ecrl.spaces.Dict",
                "ecrl.spaces.box",
                "ecrl.spaces.dict_space",
                "ecrl.spaces.flat_dim",
                "ecrl.spaces.is_image",
            ],
        },
    ),
    "consumers": (
        "Evaluation, checkpoints and logs",
        {
            "Records": ["ecrl.types.LogData"],
            "Consumers": [
                "ecrl.run.evaluation.with_evaluation",
                "ecrl.run.checkpointing.with_checkpoints",
                "ecrl.run.checkpointing.with_best_checkpoint",
                "ecrl.run.trackers.with_tensorboard",
                "ecrl.run.trackers.with_wandb",
                "ecrl.run.loggers.with_jsonl",
                "ecrl.run.loggers.with_progress",
            ],
            "Runs on disk": [
                "ecrl.run.resume.resume",
                "ecrl.run.export.export",
                "ecrl.run.crash.replay",
                "ecrl.run.video.record",
            ],
            "Plots": ["ecrl.report.plots.plot"],
            "Several processes": [
                "ecrl.distributed.start",
                "ecrl.distributed.rank",
                "ecrl.distributed.world_size",
                "ecrl.distributed.all_sum",
                "ecrl.distributed.all_mean",
            ],
        },
    ),
}
MODULES = {"rng": ("Random numbers", "ecrl.rng"), "world": ("MuJoCo simulation", "ecrl.envs.mujoco.world")}
"""Map the name of each page that documents a whole module to the page's title and the module."""


def names() -> list[str]:
    """Return all Python names in PAGES, without the members of the modules in MODULES."""
    return [name for _, groups in PAGES.values() for group in groups.values() for name in group]


def _entries(group: list[str]) -> str:
    return "\n\n".join(f"::: {name}\n    options:\n      heading_level: 3" for name in group)


def api_pages() -> dict[str, str]:
    """Return a dict from the path of each page to its Markdown."""
    pages = {
        page: f"# {title}\n\n" + "\n\n".join(f"## {heading}\n\n{_entries(group)}" for heading, group in groups.items())
        for page, (title, groups) in PAGES.items()
    }
    no_heading = "    options:\n      show_root_heading: false\n      show_root_toc_entry: false"
    pages |= {
        page: f"# {title}\n\n`{module}`\n\n::: {module}\n{no_heading}\n" for page, (title, module) in MODULES.items()
    }
    return {f"reference/{page}.md": text for page, text in pages.items()}
