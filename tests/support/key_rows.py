"""Rows per key of the schema: a config in which the key matters, another value, and the effect that must change."""

from typing import Any

from support import tiny_openvla
from support.catch import NETWORK
from support.demos import balancing_path, cues_path, start_path
from support.dots import SMALL
from support.grasping_key_rows import GRASPS
from support.key_effects import (
    NET,
    Changes,
    answer,
    best,
    device,
    evaluations,
    files,
    folder_name,
    form,
    imitation,
    level,
    matrices,
    one_of_two,
    params,
    played,
    processes,
    refused,
    saved_replay,
    tracked,
)
from support.key_row import Row
from support.mujoco_key_rows import MUJOCO
from support.recurrent_agent import remembering  # noqa: F401  it registers the environment and the policy of `REMEMBER`
from support.tiny_pi0 import checkpoint
from support.token_agent import spelling  # noqa: F401  it registers the environment and the policy of `SPELLING`


def rows(part: str, base: Changes, **values: Any) -> list[Row]:
    """Rows of a part that are seen in the parameters, all on one base."""
    return [Row(f"{part}.{name}", value, base) for name, value in values.items()]


def alg(**changes: Any) -> Changes:
    """Keys of the algorithm."""
    return {f"algorithm.cfg.{name}": value for name, value in changes.items()}


ACTOR = {"name": "actor_only", "actor": NET}
BOTH = {"name": "actor_critic", "actor": NET, "critic": NET}
PPO: Changes = {}
APG: Changes = {"env": {"name": "point_mass"}, "policy": ACTOR, "algorithm": {"name": "apg"}}
Q: Changes = {"name": "q_network", "critic": NET}
DQN: Changes = {
    "policy": Q,
    "algorithm": {"name": "dqn", "cfg": {"batch_size": 16, "capacity": 256, "learning_starts": 0}},
    "trainer.buffer_size": 4,
}
PQN: Changes = {"policy": Q, "algorithm": {"name": "pqn", "cfg": {"batch_size": 32}}}
BC: Changes = {"algorithm": {"name": "bc", "cfg": {"demos": str(balancing_path()), "batch_size": 32}}}
FAST = alg(learning_rate=1e-2, n_epochs=4)  # far enough from the old policy that clipping is felt
REMEMBER = {"env": {"name": "remember_cue"}, "policy": {"name": "tanh_cell"}}
BC_REMEMBER = BC | REMEMBER | alg(demos=str(cues_path()))
RECURRENT = {"name": "recurrent", "actor": NET, "critic": NET, "cell": {"hidden_size": 8}}
SEPARATE = RECURRENT | {"memory": "separate"}
PENDULUM = {"env": {"name": "pendulum", "cfg": {"max_episode_steps": 5}}}
GRPO = {**PENDULUM, "policy": ACTOR, "algorithm": {"name": "grpo", "cfg": {"n_epochs": 2, "batch_size": 32}}}
SPELLING = {"env": {"name": "spelling"}, "policy": {"name": "two_tokens"}}
SPELLING_GRPO = {**GRPO, **SPELLING, "trainer.num_envs": 256, **alg(batch_size=512)}
EVAL = {**PENDULUM, "trainer.enable_eval": True, "trainer.eval_freq": 64}
SEEING = {"env": {"name": "catch"}, "policy": BOTH | {"actor": NETWORK}}
SEEING_TWO = {"env": {"name": "catch", "cfg": {"observe": "dict"}}}
GYM = {"env": {"name": "gymnasium", "cfg": {"id": "CartPole-v1"}}}
PUSH = {"func": "randomize_field", "mode": "interval", "params": {"field": "angle", "low": -0.1, "high": 0.1}}
EVENT = {**PENDULUM, "trainer.events.train.push": PUSH}
EVAL_EVENT = {**EVAL, "trainer.events.eval.push": PUSH}

TRAINER = [
    Row("trainer.exp_name", "another", {}, folder_name),
    Row("trainer.device", "cuda:1", {}, device),
    Row("trainer.compile", "on", {}, form),
    Row("trainer.distributed", True, {}, one_of_two),
    Row("trainer.tf32", True, {}, matrices),
    Row("trainer.tf32", True, {}, form),
    *rows("trainer", {}, seed=2, num_envs=4, iterations=3, buffer_size=16),
    Row("trainer.enable_eval", True, EVAL | {"trainer.enable_eval": False}, evaluations),
    Row("trainer.eval_freq", 128, EVAL, evaluations),
    Row("trainer.num_eval_envs", 1, EVAL | {"trainer.num_eval_episodes": 4}, evaluations),
    Row("trainer.num_eval_episodes", 3, EVAL, evaluations),
    Row("trainer.eval_seed", 3, EVAL, evaluations),
    Row("trainer.eval_seed", 3, EVAL | {"trainer.eval_seed": 4}, evaluations),
    Row("trainer.best_eval_metric", "eval/std_reward", EVAL | {"trainer.iterations": 4}, best),
    Row("trainer.best_eval_mode", "min", EVAL | {"trainer.iterations": 4}, best),
    Row("trainer.save_freq", 64, {}, files),
    Row("trainer.keep_checkpoints", 1, {"trainer.save_freq": 64}, files),
    Row("trainer.keep_checkpoints", 1, {"trainer.save_freq": 64, "trainer.keep_checkpoints": 2}, files),
    Row("trainer.init_from", str(start_path(7)), {}),
    Row("trainer.init_from", str(start_path(7)), {"trainer.init_from": str(start_path(8))}),
    Row("trainer.log_freq", 2, {"trainer.iterations": 4, "trainer.save_freq": 1}, files),
    Row("trainer.save_replay", False, {}, saved_replay),
    Row("trainer.finite_guard", "off", APG | alg(learning_rate=3e38), refused("NaN or infinity in")),
    Row("trainer.use_wandb", True, {}, tracked),
    Row("trainer.wandb_project_name", "another", {"trainer.use_wandb": True}, tracked),
]
EVENTS = [
    Row(f"trainer.events.{use}.*.{key}", value, base, see)
    for use, base, see in (("train", EVENT, params), ("eval", EVAL_EVENT, evaluations))
    for key, value in (("func", "nudge"), ("mode", "reset"), ("interval_step", 2))
] + rows("event.randomize_field", EVENT, field="speed", low=-0.2, high=0.2, operation="add")

TWO_PARTS = {"env": {"name": "two_parts"}}
CHOICES = DQN | {"env": {"name": "two_choices"}}
QUANTILE = DQN | {"policy": Q | {"distribution": "quantile"}, "policy.num_atoms": 5}
C51 = Q | {"distribution": "categorical", "v_min": -5.0, "v_max": 5.0}
POINT_MASS = {"env": {"name": "point_mass"}}
SLOW = {"env": {"name": "gymnasium:Napping-v0", "cfg": {"asynchronous": True}}, "trainer.num_envs": 1}

ATARI = {"env": {"name": "gymnasium:FakeAtari-v0", "cfg": {"atari": {}}}}
ATARI_KEYS = {"noop_max": 0, "frame_skip": 3, "screen_size": 42, "grayscale_obs": False}
ATARI_KEYS |= {"terminal_on_life_loss": False, "fire_on_reset": False, "clip_reward": False}


def minatar(name: str) -> list[Row]:
    """Rows of a game of MinAtar."""
    part, base = f"env.minatar_{name}", {"env": {"name": f"minatar_{name}"}}
    ramp = [] if name in ("breakout", "freeway") else [Row(f"{part}.difficulty_ramping", False, base, level)]
    actions = [] if name == "seaquest" else rows(part, base, use_minimal_action_set=False)
    limited = rows(part, base | {"env.cfg.max_episode_steps": 5}, max_episode_steps=3)
    return [*ramp, *actions, *limited, *rows(part, base, max_episode_steps=3, sticky_action_prob=0.9)]


ENVS = [
    Row("env.name", "point_mass", PENDULUM),
    Row("env.frame_stack", 3, SEEING),
    Row("env.frame_stack", 3, SEEING | {"env.frame_stack": 2}),
    Row("env.action_chunk", 2, PENDULUM),
    Row("env.action_chunk", 3, PENDULUM | {"env.action_chunk": 2}),
    *rows("env.cartpole", {}, gravity=5.0, cart_mass=2.0, pole_mass=0.5, half_length=1.0, force=5.0, dt=0.05),
    *rows("env.cartpole", {}, max_position=0.05, max_angle=0.02, start=0.2, max_episode_steps=3),
    *rows("env.cartpole", {}, observe_velocity=False),
    *rows("env.pendulum", PENDULUM, gravity=5.0, mass=2.0, length=2.0, dt=0.1, max_speed=0.5, max_torque=0.5),
    *rows("env.pendulum", PENDULUM, max_episode_steps=3, observe_velocity=False),
    *rows("env.t_maze", {"env": {"name": "t_maze", "cfg": {"length": 2}}}, length=1, max_episode_steps=3),
    *rows("env.repeat_previous", {"env": {"name": "repeat_previous"}}, k=2, suits=3, max_episode_steps=5),
    *minatar("breakout"),
    *minatar("asterix"),
    *minatar("freeway"),
    *minatar("space_invaders"),
    *minatar("seaquest"),
    *rows("env.point_mass", POINT_MASS, max_episode_steps=3, workspace_half=2.0, mass=2.0, force_scale=1.0),
    *rows("env.point_mass", POINT_MASS, linear_damping=1.0, dt=0.1, success_threshold=1.0),
    *rows("env.point_mass", POINT_MASS, obstacle_radius_range=[0.2, 0.3], obstacle_min_goal_distance=0.5),
    *rows("env.point_mass", {"env": {"name": "point_mass", "cfg": {"success_threshold": 1.0}}}, success_bonus=5.0),
    *rows("env.gymnasium", GYM, id="Acrobot-v1", kwargs={"sutton_barto_reward": True}, max_episode_steps=3),
    *rows("env.gymnasium", GYM | {"env.cfg.max_episode_steps": 5}, max_episode_steps=3),
    Row("env.gymnasium.asynchronous", True, GYM, processes),
    Row("env.gymnasium.timeout", 0.3, SLOW | alg(batch_size=8), answer),
    *(Row(f"env.gymnasium.atari.{name}", value, ATARI, played) for name, value in ATARI_KEYS.items()),
]


def policy(name: str, base: Changes) -> list[Row]:
    """Rows of keys that both policies have, on an environment that reacts to actions outside of its space."""
    part, box = f"policy.{name}", base | TWO_PARTS
    return [
        Row(f"{part}.action_dim", 3, base, refused(r"policy.action_dim: 3 does not match the environment's")),
        *rows(part, box, normalize_obs=True, clip_actions=False, bf16=True, actor_obs=["place"]),
        *rows(part, box | {"policy.actor_obs": ["other"]}, actor_obs=["place"]),
        *rows(part, box, initial_log_std=-1.0, squash=True, **{"actor.type": "one_layer"}),
    ]


def network(place: str) -> list[Row]:
    """Return rows of the perceptron's keys, as a network of a policy."""
    keys = {"hidden_sizes": [4], "activation": "relu", "last_activation": "tanh", "use_layernorm": True}
    keys["orthogonal_init"] = 0.5
    rows = [Row(f"network.mlp.{key}", value, {}, path=f"{place}.{key}") for key, value in keys.items()]
    for key, value in (("last_activation", "relu"), ("orthogonal_init", [0.5, 2.0])):  # besides None, another value
        rows.append(Row(f"network.mlp.{key}", value, {f"{place}.{key}": keys[key]}, path=f"{place}.{key}"))
    return [*rows, Row("network.mlp.dropout_p", 0.1, {}, refused("dropout_p=0.1, expected 0"), f"{place}.dropout_p")]


def convolutions(name: str, cfg: Changes, **own: Any) -> list[Row]:
    """Return rows of the keys of a network with convolutions."""
    base = SEEING | {"policy.actor": {"type": name, "network_cfg": cfg}}
    keys = {"hidden_sizes": [4], "activation": "tanh", "last_activation": "tanh", "use_layernorm": True, **own}
    rows = [Row(f"network.{name}.{key}", value, base) for key, value in {**keys, "orthogonal_init": 0.5}.items()]
    for key, values in (("last_activation", ("relu", "tanh")), ("orthogonal_init", (0.5, [0.5, 2.0]))):
        rows.append(Row(f"network.{name}.{key}", values[1], base | {f"policy.actor.network_cfg.{key}": values[0]}))
    return rows


FUSED = {"encoders": {"board": NETWORK | {"features": 4}}, "hidden_sizes": [8]}
FUSING = SEEING_TWO | {"policy": BOTH | {"actor": {"type": "fused", "network_cfg": FUSED}}}
_BOARD = "policy.actor.network_cfg.encoders.board"
ENCODED = {"policy": BOTH | {"encoder": NET | {"features": 4}}}

NETWORKS = [
    *convolutions("cnn", NETWORK["network_cfg"], channels=[4], kernel_sizes=[2], strides=[2]),
    *convolutions("impala", {"channels": [4], "hidden_sizes": [8]}, channels=[2]),
    *convolutions(
        "keypoints",
        {"channels": [4, 4], "kernel_sizes": [3, 3], "strides": [1, 1], "hidden_sizes": [8]},
        channels=[4, 2],
        kernel_sizes=[1, 3],
        strides=[2, 1],
    ),
    *rows("network.fused", FUSING, hidden_sizes=[4], activation="relu", last_activation="tanh", use_layernorm=True),
    *rows("network.fused", FUSING, orthogonal_init=0.5),
    *rows("network.fused", FUSING | {"policy.actor.network_cfg.last_activation": "relu"}, last_activation="tanh"),
    *rows("network.fused", FUSING | {"policy.actor.network_cfg.orthogonal_init": 0.5}, orthogonal_init=[0.5, 2.0]),
    Row("network.fused.dropout_p", 0.1, FUSING, refused("dropout_p=0.1, expected 0")),
    Row("network.fused.encoders.*.type", "impala", FUSING, path=_BOARD),
    Row("network.fused.encoders.*.features", 6, FUSING, path=f"{_BOARD}.features"),
    Row("network.fused.encoders.*.activation", "tanh", FUSING, path=f"{_BOARD}.activation"),
    Row(
        "network.fused.encoders.*.activation",
        "tanh",
        FUSING | {f"{_BOARD}.activation": None},
        path=f"{_BOARD}.activation",
    ),
    *rows("policy.actor_critic", ENCODED, **{"encoder.type": "one_layer", "encoder.features": 6}),
    *rows("policy.actor_critic", ENCODED, **{"encoder.activation": "tanh"}),
    *rows("policy.actor_critic", ENCODED | {"policy.encoder.activation": None}, **{"encoder.activation": "tanh"}),
]

VLA: Changes = {
    "env": {"name": "dots", "action_chunk": 2},
    "policy": {"name": "vla", "vla": SMALL | {"critic": NET}},
}

VLAS = [
    Row("policy.vla.name", BOTH, VLA, path="policy"),
    Row("policy.vla.action_dim", 3, VLA, refused("policy.action_dim: 3 does not match the environment's")),
    Row("policy.vla.clip_actions", False, VLA, refused("bins are inside the action space; leave it out")),
    *rows("policy.vla", VLA, normalize_obs=True, bf16=True),
    Row("vla_backend.builtin.backend", "another", VLA, refused("unknown vla_backend 'another'")),
    Row("vla_backend.builtin.model_path", "weights", VLA, refused("backend builtin begins with new weights")),
    Row("vla_backend.builtin.action_horizon", 4, VLA, refused("4, but an action of the environment has 2 steps")),
    Row(
        "vla_backend.builtin.instruction",
        "words",
        VLA | {"policy.vla.instruction": "instruction"},
        refused("policy.vla.instruction: the observations have no 'words'"),
    ),
    *rows("vla_backend.builtin", VLA, decoding="autoregressive", bins=[5, 3], temperature=0.5, width=8, layers=2),
    *rows("vla_backend.builtin", VLA, heads=4, channels=[4, 4], keypoints=5, image_tokens=3),
    *rows("vla_backend.builtin", VLA, **{"critic.type": "one_layer"}),
    Row("vla_backend.builtin.label_smoothing", 0.0, VLA, imitation),
]

PI0: Changes = {
    "env": {"name": "dots", "action_chunk": 2},
    "policy": {"name": "vla", "vla": {"backend": "pi0", "model_path": checkpoint(), "critic": NET}},
    "trainer.buffer_size": 4,
}
_HEAD = PI0 | {"policy.vla.noise_head": NET}
_ADAPTED = PI0 | {"policy.vla.adapters": {"rank": 2}}

PI0S = [
    Row("vla_backend.pi0.backend", "another", PI0, refused("unknown vla_backend 'another'")),
    Row("vla_backend.pi0.model_path", checkpoint(1), PI0 | {"policy.vla.model_path": checkpoint()}),
    Row("vla_backend.pi0.action_horizon", 4, PI0, refused("4, but an action of the environment has 2 steps")),
    Row(
        "vla_backend.pi0.instruction",
        "words",
        PI0 | {"policy.vla.instruction": "instruction"},
        refused("policy.vla.instruction: the observations have no 'words'"),
    ),
    *rows("vla_backend.pi0", PI0 | {"policy.vla.denoising_steps": 1}, denoising_steps=2),
    *rows("vla_backend.pi0", PI0 | {"policy.vla.noise_level": 0.9}, noise_level=0.3),
    *rows("vla_backend.pi0", _HEAD, **{"noise_head.type": "one_layer"}),
    *rows("vla_backend.pi0", _HEAD | {"policy.vla.noise_range": [0.1, 0.2]}, noise_range=[0.1, 0.3]),
    *rows("vla_backend.pi0", PI0 | {"policy.vla.trained": ["dit"]}, trained=["action_out_proj"]),
    *rows("vla_backend.pi0", _ADAPTED, **{"adapters.rank": 3, "adapters.layers": ["q_proj"], "adapters.scale": 2.0}),
    *rows("vla_backend.pi0", PI0, **{"critic.type": "one_layer"}),
]

OPENVLA: Changes = {
    "env": {"name": "dots", "action_chunk": 2},
    "policy": {"name": "vla", "vla": {"backend": "openvla", "model_path": tiny_openvla.checkpoint(), "critic": NET}},
    "trainer.buffer_size": 4,
}
_TWO_DATA_SETS = OPENVLA | {
    "policy.vla.model_path": tiny_openvla.checkpoint_of_two_data_sets(),
    "policy.vla.dataset": "small",
}
_ADAPTED_OPENVLA = OPENVLA | {"policy.vla.adapters": {"rank": 2}}

OPENVLAS = [
    Row("vla_backend.openvla.backend", "another", OPENVLA, refused("unknown vla_backend 'another'")),
    Row(
        "vla_backend.openvla.model_path",
        tiny_openvla.checkpoint(1),
        OPENVLA | {"policy.vla.model_path": tiny_openvla.checkpoint()},
    ),
    Row("vla_backend.openvla.action_horizon", 4, OPENVLA, refused("4, but an action of the environment has 2 steps")),
    Row(
        "vla_backend.openvla.instruction",
        "words",
        OPENVLA | {"policy.vla.instruction": "instruction"},
        refused("policy.vla.instruction: the observations have no 'words'"),
    ),
    *rows("vla_backend.openvla", OPENVLA, decoding="autoregressive", temperature=0.5),
    *rows("vla_backend.openvla", _TWO_DATA_SETS, dataset="large"),
    *rows("vla_backend.openvla", OPENVLA | {"policy.vla.trained": ["projector"]}, trained=["lm_head"]),
    *rows(
        "vla_backend.openvla",
        _ADAPTED_OPENVLA,
        **{"adapters.rank": 3, "adapters.layers": ["q_proj"], "adapters.scale": 2.0},
    ),
    *rows("vla_backend.openvla", OPENVLA, **{"critic.type": "one_layer"}),
]

POLICIES = [
    Row(
        "policy.actor_critic.name",
        ACTOR,
        GRPO | {"policy": BOTH},
        path="policy",
    ),
    Row("policy.actor_only.name", BOTH, GRPO, path="policy"),
    *policy("actor_critic", PPO),
    *policy("actor_only", GRPO),
    *rows("policy.actor_critic", TWO_PARTS, critic_obs=["place"], **{"critic.type": "one_layer"}),
    *rows("policy.actor_critic", TWO_PARTS | {"policy.critic_obs": ["other"]}, critic_obs=["place"]),
    Row("policy.q_network.name", BOTH, DQN, refused("dqn needs a policy with a Q-function"), path="policy"),
    Row("policy.q_network.action_dim", 3, DQN, refused("policy.action_dim: 3 does not match the environment's")),
    Row("policy.q_network.clip_actions", False, DQN, refused("q_network has no Box actions to clip")),
    *rows("policy.q_network", CHOICES, normalize_obs=True, bf16=True, dueling=True, distribution="quantile"),
    *rows("policy.q_network", CHOICES, critic_obs=["place"], **{"critic.type": "one_layer"}),
    *rows("policy.q_network", CHOICES | {"policy.critic_obs": ["other"]}, critic_obs=["place"]),
    Row("policy.q_network.distribution", C51, QUANTILE, path="policy"),
    *rows("policy.q_network", QUANTILE, num_atoms=7),
    *rows("policy.q_network", DQN, noisy=True),
    *rows("policy.q_network", DQN | {"policy.noisy": True}, noisy_std=2.0),
    *rows("policy.q_network", DQN | {"policy.noisy": True, "policy.noisy_std": 1.0}, noisy_std=2.0),
    *rows("policy.q_network", DQN | {"policy": C51, "policy.v_min": -5.0, "policy.v_max": 5.0}, v_min=-1.0, v_max=1.0),
    Row("policy.recurrent.name", BOTH, {"policy": RECURRENT}, path="policy"),
    *policy("recurrent", {"policy": SEPARATE}),
    *rows("policy.recurrent", {"policy": RECURRENT}, memory="actor"),
    *rows("policy.recurrent", {"policy": RECURRENT | {"encoder": NET}}, **{"encoder.type": "one_layer"}),
    *rows("policy.recurrent", {"policy": RECURRENT}, **{"cell.type": "lstm", "cell.hidden_size": 4}),
    *rows("policy.recurrent", TWO_PARTS | {"policy": SEPARATE}, critic_obs=["place"], **{"critic.type": "one_layer"}),
    *rows("policy.recurrent", TWO_PARTS | {"policy": SEPARATE, "policy.critic_obs": ["other"]}, critic_obs=["place"]),
    *network("policy.actor.network_cfg"),
    *network("policy.critic.network_cfg"),
]

SGD = {"name": "sgd", "learning_rate": 1e-2}
SCHEDULE = "algorithm.cfg.lr_scheduler.kwargs"
OPTIMIZER = "algorithm.cfg.optimizer.kwargs"
ADAPTIVE = {
    "desired_kl": (1e-9, {}),
    "factor": (3.0, {}),
    "min_rate": (9e-4, {"desired_kl": 1e-9}),
    "max_rate": (1.1e-3, {}),
}


def learning(name: str, base: Changes) -> list[Row]:
    """Return rows of optimisers and schedules, which every algorithm has."""
    part = f"algorithm.{name}"

    def using(optimizer: str, **kwargs: Any) -> Changes:
        block = {"name": optimizer, "learning_rate": 1e-3, "kwargs": kwargs}
        return base | alg(optimizer=block)

    def under(scheduler: str, **kwargs: Any) -> Changes:
        return base | alg(lr_scheduler={"name": scheduler, "kwargs": kwargs}, learning_rate=1e-3)

    kwargs = f"{part}.lr_scheduler.kwargs"
    return [
        *rows(part, base, learning_rate=1e-2),
        *rows(part, base | alg(learning_rate=1e-3), learning_rate=1e-2),
        *rows(part, using("sgd"), max_grad_norm=1e-3),
        *rows(f"{part}.optimizer", using("adam"), name="sgd", learning_rate=1e-2),
        *rows(f"{part}.optimizer.kwargs", using("adam"), betas=[0.5, 0.9], eps=1.0),
        *rows(f"{part}.optimizer.kwargs", using("adamw"), weight_decay=0.5),
        *rows(f"{part}.optimizer.kwargs", using("adam") | {f"{OPTIMIZER}.weight_decay": 0.1}, weight_decay=0.5),
        *rows(f"{part}.optimizer.kwargs", using("adam", betas=[0.9, 0.2]), amsgrad=True),
        *rows(f"{part}.optimizer.kwargs", using("sgd"), momentum=0.5),
        *rows(f"{part}.optimizer.kwargs", using("sgd", momentum=0.5), nesterov=True),
        *rows(f"{part}.optimizer.kwargs", using("rmsprop"), centered=True),
        *rows(f"{part}.optimizer.kwargs", using("rmsprop"), alpha=0.5, eps=1.0),
        *rows(f"{part}.lr_scheduler", under("linear"), name="exponential"),
        *rows(kwargs, under("linear"), start_factor=0.5, end_factor=0.5, total_iters=1),
        *rows(kwargs, under("cosine"), eta_min=1e-4, T_max=1),
        *rows(kwargs, under("linear") | {f"{SCHEDULE}.total_iters": 1}, total_iters=3),
        *rows(kwargs, under("cosine") | {f"{SCHEDULE}.T_max": 1}, T_max=3),
        *rows(kwargs, under("step", gamma=0.5), step_size=2, gamma=0.1),
        *rows(kwargs, under("exponential"), gamma=0.5),
        *rows(kwargs, under("warmup_constant"), warmup_factor=0.5, warmup_iters=2),
    ]


def adaptive(name: str, base: Changes) -> list[Row]:
    """Return rows of the adaptive rate, which algorithms with minibatch steps have."""

    def block(**kwargs: float) -> Changes:
        return {"name": "adaptive", "kwargs": kwargs}

    return [
        Row(
            f"algorithm.{name}.lr_scheduler.kwargs.{key}",
            value,
            base | alg(learning_rate=1e-3, lr_scheduler=block(**kwargs)),
        )
        for key, (value, kwargs) in ADAPTIVE.items()
    ]


def not_adaptive(name: str, base: Changes, needed: str, without: str) -> list[Row]:
    """Return rows of the adaptive rate for an algorithm without a distance from the old policy, which refuses it."""
    see = refused(f"lr_scheduler adaptive needs the KL {needed}, which {without} does not have")
    return [
        Row(f"algorithm.{name}.lr_scheduler.kwargs.{key}", block, base, see, "algorithm.cfg.lr_scheduler")
        for key, (value, _) in ADAPTIVE.items()
        for block in [{"name": "adaptive", "kwargs": {key: value}}]
    ]


def minibatch(name: str, base: Changes) -> list[Row]:
    """Rows of keys that PPO and GRPO share."""
    part = f"algorithm.{name}"
    return [
        *rows(part, base, n_epochs=3, batch_size=16, gamma=0.5, ent_coef=0.5, target_kl=1e-9),
        *rows(part, base | alg(batch_size=None), num_minibatches=4),
        *rows(part, base | alg(batch_size=None, num_minibatches=2), num_minibatches=4),
        *rows(part, base | alg(batch_size=8), batch_size=16),
        *rows(part, base | FAST | alg(target_kl=1e-9), target_kl=1e3),
        *rows(part, base | FAST, clip_coef=1e-3),
        *rows(part, base | REMEMBER, segment_length=2),
        *rows(part, base | REMEMBER | alg(segment_length=4), segment_length=2),
    ]


REPLAY_HAS_NO_KL = "to the policy that collected the steps", "learning from replay"


def replay(name: str, base: Changes) -> list[Row]:
    """Rows of keys that algorithms with a replay buffer share."""
    part = f"algorithm.{name}"
    return [
        *learning(name, base),
        *not_adaptive(name, base | alg(learning_rate=1e-3), *REPLAY_HAS_NO_KL),
        *rows(part, base, gamma=0.5, n_step=3, capacity=32, batch_size=8, learning_starts=32),
        *rows(part, base, train_freq=2, gradient_steps=2, normalize_reward=True),
    ]


ALGORITHMS = [
    Row(
        "algorithm.name",
        "ppo",
        PENDULUM | {"algorithm": {"name": "grpo"}},
    ),
    *learning("ppo", PPO),
    *learning("grpo", GRPO),
    *learning("apg", APG),
    *adaptive("ppo", PPO),
    *adaptive("grpo", GRPO),
    *not_adaptive("apg", APG | alg(learning_rate=1e-3), "of a minibatch step", "apg"),
    *minibatch("ppo", PPO),
    *minibatch("grpo", GRPO),
    *rows("algorithm.ppo", PPO, gae_lambda=0.5, vf_coef=5.0, normalize_advantage="none", normalize_reward=True),
    *rows("algorithm.ppo", PPO, normalize_advantage="minibatch"),
    *rows("algorithm.ppo", FAST | alg(clip_coef=1e-3), clip_vloss=True),
    *rows("algorithm.ppo", PPO, critic_learning_rate=1e-2),
    *rows("algorithm.ppo", alg(critic_learning_rate=1e-3), critic_learning_rate=1e-2),
    *rows("algorithm.ppo", alg(optimizer=SGD), critic_max_grad_norm=1e-3),
    *rows("algorithm.ppo", alg(optimizer=SGD, critic_max_grad_norm=0.1), critic_max_grad_norm=1e-3),
    *rows("algorithm.grpo", GRPO, group_size=2, eps=1.0, kl_coef=1.0),
    *rows("algorithm.grpo", GRPO | FAST | alg(kl_coef=0.5), ref_update_freq=1),
    *rows("algorithm.grpo", GRPO | FAST | alg(ref_update_freq=1) | {"trainer.iterations": 3}, ref_update_freq=2),
    *rows("algorithm.grpo", GRPO, reset_every_rollout=False, truncate_at_first_done=False),
    *rows("algorithm.grpo", SPELLING_GRPO, ratio="token", loss_mean="sequence", advantage="episode"),
    *rows("algorithm.grpo", SPELLING_GRPO, ratio="sequence", loss_mean="fixed_length"),
    *rows("algorithm.grpo", GRPO, baseline="centered"),
    *rows("algorithm.grpo", GRPO, baseline="leave_one_out"),
    *rows("algorithm.grpo", GRPO | FAST | alg(clip_coef=1e-3), clip_coef_high=1.0),
    *rows("algorithm.grpo", GRPO | FAST | alg(clip_coef=1e-3, clip_coef_high=0.002), clip_coef_high=1.0),
    *rows("algorithm.grpo", GRPO | FAST | alg(clip_coef=1e-3), dual_clip=1.01),
    *rows("algorithm.grpo", GRPO | FAST | alg(clip_coef=1e-3, dual_clip=100.0), dual_clip=1.01),
    *rows("algorithm.grpo", SPELLING_GRPO, min_group_score=0.1, max_group_score=0.1),
    *rows("algorithm.grpo", SPELLING_GRPO | alg(min_group_score=-1.0), min_group_score=0.1),
    *rows("algorithm.grpo", SPELLING_GRPO | alg(max_group_score=2.0), max_group_score=0.1),
    *rows("algorithm.grpo", SPELLING_GRPO, drop_masked=True),
    *rows("algorithm.ppo", SPELLING, ratio="token"),
    *rows("algorithm.ppo", FAST | alg(clip_coef=1e-3), clip_coef_high=1.0, dual_clip=1.01),
    *rows("algorithm.ppo", FAST | alg(clip_coef=1e-3, clip_coef_high=0.002), clip_coef_high=1.0),
    *rows("algorithm.ppo", FAST | alg(clip_coef=1e-3, dual_clip=100.0), dual_clip=1.01),
    *replay("dqn", DQN),
    *rows("algorithm.dqn", DQN | alg(learning_rate=0.1), double=False),
    *rows("algorithm.dqn", DQN, target_update_freq=8, huber_delta=1e-3, initial_epsilon=0.5),
    *rows("algorithm.dqn", DQN, final_epsilon=0.9, exploration_fraction=1.0),
    *rows("algorithm.dqn", DQN | alg(target_update_freq=8), tau=0.5),
    *rows("algorithm.dqn.prioritized", DQN | alg(prioritized={}), alpha=0.1, beta=1.0, final_beta=0.4, eps=1.0),
    *learning("bc", BC),
    *not_adaptive("bc", BC | alg(learning_rate=1e-3), "to the policy that collected the steps", "bc"),
    *rows("algorithm.bc", BC, demos=str(balancing_path(1)), holdout=0.5, n_epochs=2, batch_size=16),
    *rows("algorithm.bc", BC | alg(batch_size=8), batch_size=16),
    *rows("algorithm.bc", BC | alg(batch_size=None), num_minibatches=4),
    *rows("algorithm.bc", BC | alg(batch_size=None, num_minibatches=2), num_minibatches=4),
    *rows("algorithm.bc", BC_REMEMBER, segment_length=2),
    *rows("algorithm.bc", BC_REMEMBER | alg(segment_length=4), segment_length=2),
    *learning("pqn", PQN),
    *not_adaptive("pqn", PQN | alg(learning_rate=1e-3), "to the policy that collected the steps", "pqn"),
    *rows("algorithm.pqn", PQN, n_epochs=3, batch_size=16, gamma=0.5, q_lambda=0.1, initial_epsilon=0.5),
    *rows("algorithm.pqn", PQN, final_epsilon=0.9, exploration_fraction=1.0, normalize_reward=True),
    *rows("algorithm.pqn", PQN | alg(batch_size=8), batch_size=16),
    *rows("algorithm.pqn", PQN | alg(batch_size=None), num_minibatches=4),
    *rows("algorithm.pqn", PQN | alg(batch_size=None, num_minibatches=2), num_minibatches=4),
    Row("algorithm.pqn.segment_length", 4, PQN, refused("policy q_network learns from single steps; leave it out")),
    *rows("algorithm.apg", APG, gamma=0.5, ent_coef=0.5, segment_length=2, deterministic_actions=True),
    *rows("algorithm.apg", APG | alg(segment_length=4), segment_length=2),
]


def continuous(name: str, policy: str, **cfg: Any) -> Changes:
    """A run of an algorithm with a replay buffer for continuous actions, with four updates."""
    sizes = {"capacity": 48, "batch_size": 16, "learning_starts": 0, "train_freq": 4}
    networks = {"name": f"{policy}_actor_critic", "actor": NET, "critic": NET}
    algorithm = {"name": name, "cfg": {**sizes, **cfg}}
    return {**PENDULUM, "policy": networks, "algorithm": algorithm, "trainer.buffer_size": 4}


CATEGORICAL: Changes = {"name": "categorical_actor_critic", "actor": NET, "critic": NET}
DISCRETE_SAC: Changes = {
    "policy": CATEGORICAL,
    "algorithm": {"name": "sac", "cfg": {"capacity": 256, "batch_size": 16, "learning_starts": 0, "train_freq": 4}},
}
ATOMS = {"policy.distribution": "categorical", "policy.num_atoms": 7, "policy.v_min": -60.0, "policy.v_max": 5.0}
DDPG, TD3 = continuous("ddpg", "deterministic"), continuous("td3", "deterministic", policy_delay=1)
SAC = continuous("sac", "squashed")
FAST_TD3 = continuous("fast_td3", "deterministic", policy_delay=1, gradient_steps=1) | ATOMS
FAST_SAC = continuous("fast_sac", "squashed", policy_delay=1, gradient_steps=1) | ATOMS


def actor_and_critics(name: str, base: Changes) -> list[Row]:
    """Rows of keys that all algorithms with critics of continuous actions share."""
    part = f"algorithm.{name}"
    return [
        *replay(name, base),
        *rows(part, base, tau=0.5, critic_learning_rate=1e-2),
        *rows(part, base | alg(critic_learning_rate=1e-4), critic_learning_rate=1e-2),
    ]


def critics(name: str, base: Changes, other: str, env: Changes, clip: str) -> list[Row]:
    """Rows of the policies with several critics. The observations of the environment `env` have two names."""
    part, two = f"policy.{name}", base | env
    wrong = refused(r"policy.action_dim: 3 does not match the environment's")
    return [
        Row(f"{part}.name", other, base, refused("policy.name: ")),
        Row(f"{part}.action_dim", 3, base, wrong),
        Row(f"{part}.clip_actions", False, base, refused(clip)),
        *rows(part, two, normalize_obs=True, bf16=True, num_critics=3, actor_obs=["place"], critic_obs=["place"]),
        *rows(part, two | {"policy.actor_obs": ["other"]}, actor_obs=["place"]),
        *rows(part, two | {"policy.critic_obs": ["other"]}, critic_obs=["place"]),
        *rows(part, two, **{"actor.type": "one_layer", "critic.type": "one_layer"}),
    ]


def distributions(name: str, fast: Changes) -> list[Row]:
    """Rows of the policies whose critics predict distributions in the run `fast`."""
    part = f"policy.{name}"
    return [
        Row(f"{part}.distribution", None, fast, refused("v_min and v_max are bounds of a categorical")),
        *rows(part, fast, num_atoms=5, v_min=-40.0, v_max=9.0),
        *rows(part, fast | {"policy.num_atoms": None}, num_atoms=5),
    ]


TWO_CHOICES = {"env": {"name": "two_choices"}}
BOUNDED = "are always inside their bounds"


CONTINUOUS = [
    *critics("deterministic_actor_critic", DDPG, "squashed_actor_critic", TWO_PARTS, BOUNDED),
    *critics("squashed_actor_critic", SAC, "deterministic_actor_critic", TWO_PARTS, BOUNDED),
    *critics("categorical_actor_critic", DISCRETE_SAC, "squashed_actor_critic", TWO_CHOICES, "no Box actions to clip"),
    *distributions("deterministic_actor_critic", FAST_TD3),
    *distributions("squashed_actor_critic", FAST_SAC),
    *actor_and_critics("ddpg", DDPG),
    *actor_and_critics("td3", TD3),
    *actor_and_critics("sac", SAC),
    *actor_and_critics("fast_td3", FAST_TD3),
    *actor_and_critics("fast_sac", FAST_SAC),
    *rows("algorithm.ddpg", DDPG | alg(learning_starts=32), exploration_noise=0.5),
    *rows("algorithm.td3", TD3, exploration_noise=0.5, policy_delay=2, policy_noise=0.5),
    *rows("algorithm.td3", TD3 | alg(policy_noise=5.0), noise_clip=0.1),
    *rows("algorithm.sac", SAC, temperature=0.1, learn_temperature=False, target_entropy=-9.0, policy_delay=2),
    *rows("algorithm.sac", SAC | alg(target_entropy=-3.0), target_entropy=-9.0),
    *rows("algorithm.sac", DISCRETE_SAC, temperature=0.1, target_entropy=0.1, policy_delay=2),
    *rows("algorithm.sac", SAC, temperature_learning_rate=1e-2),
    *rows("algorithm.sac", SAC | alg(temperature_learning_rate=1e-4), temperature_learning_rate=1e-2),
    *rows("algorithm.fast_td3", FAST_TD3, min_exploration_noise=0.3, max_exploration_noise=0.9),
    *rows("algorithm.fast_td3", FAST_TD3, policy_noise=0.5, policy_delay=2),
    *rows("algorithm.fast_td3", FAST_TD3 | alg(policy_noise=5.0), noise_clip=0.1),
    *rows("algorithm.fast_sac", FAST_SAC, temperature=0.1, target_entropy=-9.0, policy_delay=2),
    *rows("algorithm.fast_sac", FAST_SAC, temperature_learning_rate=1e-2),
    *rows("algorithm.fast_sac", FAST_SAC | alg(temperature_learning_rate=1e-4), temperature_learning_rate=1e-2),
]

TABLE = [
    *TRAINER,
    *EVENTS,
    *ENVS,
    *NETWORKS,
    *POLICIES,
    *VLAS,
    *PI0S,
    *OPENVLAS,
    *ALGORITHMS,
    *CONTINUOUS,
    *MUJOCO,
    *GRASPS,
]
