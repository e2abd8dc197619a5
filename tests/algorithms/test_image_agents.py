"""Agents that see images, or stacks of frames: learning, forms, resuming, seeds, export and rollout sizes."""

import json
from typing import Any

import pytest
import torch
from support.catch import NETWORK, catching
from support.checks import close
from support.long_cases import long_except
from support.small_runs import last_state, same
from torch.func import vmap

import ecrl
from ecrl import rng
from ecrl.algorithms.core import collect
from ecrl.algorithms.rows import rows_of
from ecrl.errors import ConfigError
from ecrl.kernels import stack_frames
from ecrl.loop.build import build
from ecrl.loop.iteration import init_state, make_iteration
from ecrl.loop.policy_check import check_policy
from ecrl.policies import make_policy
from ecrl.run.export import export
from ecrl.spaces import Discrete, MultiDiscrete, box, dict_space

LINEAR = {"network_cfg": {"hidden_sizes": []}}
SHARED = {"name": "actor_critic", "encoder": NETWORK | {"features": 16}, "actor": LINEAR, "critic": LINEAR}
ENCODED = {"type": "fused", "network_cfg": {"encoders": {"board": NETWORK | {"features": 8}}, "hidden_sizes": [16]}}
RECURRENT = {
    "name": "recurrent",
    "encoder": NETWORK,
    "cell": {"hidden_size": 8},
    "actor": LINEAR,
    "critic": LINEAR,
}
STACK = {"env.frame_stack": 3}
FIXED = {"algorithm.cfg.initial_epsilon": 0.1, "algorithm.cfg.final_epsilon": 0.1}
"""Settings without schedules, so that a longer run begins like a shorter one."""

AGENTS: dict[str, dict[str, Any]] = {
    "image": {},
    "shared encoder": {"policy": SHARED},
    "dict": {
        "env.cfg.observe": "dict",
        "policy": {"name": "actor_critic", "actor": ENCODED, "critic": NETWORK, "critic_obs": ["board"]},
    },
    "stack": {**STACK, "algorithm.cfg.segment_length": 8},
    "memory": {"policy": RECURRENT, "algorithm.cfg.segment_length": 8},
    "stack and memory": {**STACK, "policy": RECURRENT, "algorithm.cfg.segment_length": 8},
    "dqn": FIXED,
    "dqn stack": {**STACK, **FIXED, "algorithm.cfg.prioritized": {"final_beta": 0.4}, "algorithm.cfg.n_step": 2},
}


def agent(name: str, **changes: Any) -> ecrl.Config:
    return catching("dqn" if name.startswith("dqn") else "ppo", **{**AGENTS[name], **changes})


@pytest.mark.slow
@pytest.mark.parametrize("name", long_except(["dict"], ["image", "dict", "dqn stack"]))
def test_an_agent_learns_to_catch(name):
    longer = {"trainer.iterations": 120}
    if not name.startswith("dqn"):
        longer = {"trainer.iterations": 60, "trainer.num_envs": 32, "algorithm.cfg.batch_size": 128}
    cfg = agent(name, **longer, **{"algorithm.cfg.learning_rate": 3e-3})
    assert ecrl.evaluate(last_state(cfg), cfg)["eval/avg_reward"] > 0.7


@pytest.mark.slow
@pytest.mark.usefixtures("traced_or_compiled")
@pytest.mark.parametrize("name", long_except(["stack and memory"], AGENTS))
def test_a_compiled_run_equals_an_eager_one(name):
    eager, compiled = (last_state(agent(name, **{"env.cfg.steps": 5, "trainer.compile": c})) for c in ("off", "on"))
    for path, leaf in eager["params"].items(True, True):
        close(compiled["params"][path], leaf, tol=1e-4)


@pytest.mark.parametrize("name", AGENTS)
def test_a_resumed_run_continues_in_the_middle_of_an_episode(name, tmp_path):
    cfg = agent(name)
    first = last_state(cfg.replace(**{"trainer.iterations": 2}))
    assert first["env", "row"].any(), "episodes cross the boundary"
    ecrl.save(tmp_path / "middle", first, cfg)
    state, loaded = ecrl.load(tmp_path / "middle")
    assert same(last_state(loaded, state), last_state(cfg))


@pytest.mark.parametrize("name", [name for name in AGENTS if not name.startswith("dqn")])
def test_seeds_under_vmap_equal_single_runs(name):
    cfg = agent(name)
    iteration, keys = make_iteration(cfg), [rng.key(seed) for seed in range(3)]
    single = [iteration(iteration(init_state(cfg, key))[0])[0] for key in keys]
    together = torch.stack([init_state(cfg, key) for key in keys])
    together = vmap(iteration)(vmap(iteration)(together)[0])[0]
    for i, state in enumerate(single):
        for path, leaf in state["params"].items(True, True):
            close(together["params"][path][i].detach(), leaf.detach(), tol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["image", pytest.param("memory", marks=pytest.mark.long)])
def test_64_seeds_under_vmap_equal_single_runs(name):
    cfg = agent(name)
    iteration, keys = make_iteration(cfg), [rng.key(seed) for seed in range(64)]
    single = torch.stack([iteration(init_state(cfg, key))[0] for key in keys])
    together = vmap(iteration)(torch.stack([init_state(cfg, key) for key in keys]))[0]
    for path, leaf in single["params"].items(True, True):
        close(together["params"][path].detach(), leaf.detach(), tol=1e-4)


@pytest.mark.parametrize("name", AGENTS)
def test_nothing_is_found_in_the_policies(name):
    assert check_policy(agent(name)).findings == []


@pytest.mark.parametrize("name", ["image", "dict", "stack", "stack and memory", "dqn stack"])
def test_an_exported_policy_acts_alike(name, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    cfg = agent(name)
    state = init_state(cfg)
    with torch.no_grad():
        export(state, cfg, tmp_path)
        about = json.loads((tmp_path / "policy.json").read_text())
        module, run = torch.export.load(tmp_path / "policy.pt2").module(), build(cfg)
        session = onnxruntime.InferenceSession(tmp_path / "policy.onnx")
        env, carry = run.env.reset(rng.split(rng.key(1), 4)), run.policy.init_carry(state["params"], 4)
        memory = {
            one["name"]: torch.zeros(4, *one["shape"][1:], dtype=getattr(torch, one["dtype"]))
            for one in about["inputs"]
            if one["name"].startswith("carry")
        }
        for step in range(4):
            obs = {"obs": env["obs"]} if isinstance(env["obs"], torch.Tensor) else env["obs"]
            named = {one["name"] for one in about["inputs"]}
            inputs = {key if key in named else f"obs_{key}": x for key, x in obs.items()}
            first = {"is_first": torch.tensor([step == 0] * 4)} if memory else {}
            outputs = module(**inputs, **first, **memory)
            outputs = outputs if isinstance(outputs, tuple | list) else [outputs]
            results = dict(zip([one["name"] for one in about["outputs"]], outputs, strict=True))
            carry, out = run.policy.act(state["params"], carry, env["obs"], None)
            assert torch.equal(results["action"], out["action"])
            arrays = {key: x.numpy() for key, x in (inputs | first | memory).items()}
            for ours, other in zip(outputs, session.run(None, arrays), strict=True):
                close(torch.as_tensor(other), ours)
            memory = {name: results[f"next_{name}"] for name in memory}
            env = run.env.step(env, out["action"], run.env.draw(rng.split(rng.key(step), 4)))


@pytest.mark.parametrize("name", ["image", "stack"])
def test_a_rollout_keeps_each_frame_once(name):
    """The rollout, its first frames of each segment and its final frames take at most 1.1 bytes per pixel."""
    sizes = {"trainer.buffer_size": 128, "trainer.num_envs": 8}
    segments = {"algorithm.cfg.segment_length": 128, "algorithm.cfg.batch_size": 128} if name == "stack" else {}
    cfg = agent(name, **sizes, **segments)
    batch = collect(build(cfg), init_state(cfg))[1]
    images = [x for x in batch.values(True, True) if x.dtype == torch.uint8]
    pixels = 8 * 128 * 10 * 5
    assert pixels < sum(x.numel() * x.element_size() for x in images) <= 1.1 * pixels
    floats = [x for x in batch.values(True, True) if x.is_floating_point() and x.numel() >= pixels]
    assert not floats, "no image is stored as floats"


def test_a_stack_has_the_latest_frames_of_the_episode():
    cfg = agent("stack", **{"env.cfg.steps": 4, "algorithm.cfg.segment_length": 16})
    run, state = build(cfg), last_state(agent("stack", **{"env.cfg.steps": 4, "trainer.iterations": 1}))
    batch = collect(run, state)[1]
    rows = rows_of(run, batch)
    stacks = stack_frames(rows["carry", "frames"], rows["carry", "started"], rows["obs"], rows["done"])
    board_rows = stacks[..., :-1, :, 0].flatten(-2).to(torch.float32).argmax(-1) // 5  # of the ball
    age = rows["obs"][..., :-1, :, 0].flatten(-2).to(torch.float32).argmax(-1) // 5
    for back in range(3):
        assert torch.equal(board_rows[..., 2 - back], (age - back).clamp(min=0))
    assert run.policy.frame_stack == 3 and age.max() == 3


def test_the_stack_decides_which_frames_the_networks_read():
    for frames, channels in ((1, 1), (4, 4)):
        params = init_state(agent("image", **{"env.frame_stack": frames}))["params"]
        assert params["actor", "convolutions.0.weight"].shape[1] == channels
    assert same(init_state(agent("image", **{"env.frame_stack": 1}))["params"], init_state(agent("image"))["params"])


MASKED = dict_space(
    {"camera": box(0, 255, 6, 6, 1, dtype=torch.uint8), "x": box(-1.0, 1.0, 2), "action_mask": MultiDiscrete((2,) * 3)}
)
FUSED = {"type": "fused", "network_cfg": {"encoders": {"camera": NETWORK | {"features": 4}}, "hidden_sizes": [8]}}


BOTH = {"name": "actor_critic", "actor": FUSED, "critic": FUSED}


@pytest.mark.parametrize("policy", [BOTH, {"name": "q_network", "critic": FUSED}])
def test_a_mask_is_not_stacked(policy):
    made = make_policy({**policy, "normalize_obs": True}, MASKED, Discrete(3), 3)
    assert check_policy(made, MASKED, Discrete(3)).findings == []
    params = made.init(rng.key(0))
    carry = made.init_carry(params, 2)
    assert set(carry["frames"].keys()) == {"camera", "x"}


def test_masks_and_images_inside_a_dict_are_handled():
    space = dict_space({"arm": MASKED, "y": box(-1.0, 1.0, 1)})
    encoders = {"arm": {"type": "keypoints", "network_cfg": {"channels": [4], "kernel_sizes": [3], "strides": [1]}}}
    net = {"type": "fused", "network_cfg": {"encoders": encoders, "hidden_sizes": [8]}}
    made = make_policy({"name": "actor_critic", "actor": net, "critic": net}, space, Discrete(3), 3)
    assert check_policy(made, space, Discrete(3)).findings == []


def test_stacks_that_do_not_fit_are_refused():
    with pytest.raises(ConfigError, match=r"env\.frame_stack: must be at least 1, got 0"):
        catching(**{"env.frame_stack": 0})
    pqn = {"policy": {"name": "q_network", "critic": NETWORK}, "algorithm": {"name": "pqn", "cfg": {}}}
    with pytest.raises(ConfigError, match=r"env\.frame_stack: 3, but pqn learns from single observations; use dqn, or"):
        init_state(catching(**pqn, **STACK))
    with pytest.raises(ConfigError, match=r"env\.frame_stack: only Box observations can be stacked, got Discrete"):
        make_policy({"name": "actor_only", "actor": "mlp"}, Discrete(3), Discrete(2), 2)
    with pytest.raises(ValueError, match="frame_stack is 0, expected at least 2 frames"):
        make_policy({"name": "actor_only", "actor": "mlp"}, box(-1.0, 1.0, 2), Discrete(2), 0)
    with pytest.raises(ConfigError, match=r"n_step 1 and frame_stack 9 needs 10; make it larger"):
        init_state(catching("dqn", **{"env.frame_stack": 9, "algorithm.cfg.capacity": 36, "trainer.buffer_size": 8}))


def test_a_memory_without_frames_is_refused():
    policy = build(agent("stack")).policy
    params = policy.init(rng.key(0))
    carry = policy.init_carry(params, 2).exclude("frames")
    with pytest.raises(ConfigError, match=r"^policy: the carry has no stacked observations; pass init_carry\(params, "):
        policy.act(params, carry, torch.zeros(2, 10, 5, 1, dtype=torch.uint8), None)


def test_frames_of_another_size_are_refused():
    policy = build(agent("stack")).policy
    params, small = policy.init(rng.key(0)), torch.zeros(2, 5, 5, 1, dtype=torch.uint8)
    carry = policy.init_carry(params, 2)
    problem = (
        r"^policy: an observation has the shape \[2, 5, 5, 1\], but the networks were built for \[\.\.\., 10, 5, 1\]"
    )
    with pytest.raises(ConfigError, match=problem):
        policy.act(params, carry, small, None)
    wrong = carry.copy().set("frames", torch.zeros(2, 2, 5, 5, 1, dtype=torch.uint8))
    with pytest.raises(
        ConfigError, match=r"has the shape \[2, 2, 5, 5, 1\], but the networks were built for \[\.\.\., 2, "
    ):
        policy.act(params, wrong, torch.zeros(2, 10, 5, 1, dtype=torch.uint8), None)
