"""The point mass: a step by hand, a NumPy oracle, exact gradients, starts, terminal metrics, every key."""

import math

import numpy as np
import pytest
import torch
from support.checks import assert_no_retrace, assert_pure, close
from tensordict import TensorDict

from ecrl import rng
from ecrl.envs import auto_reset, make_env
from ecrl.envs.core import state_of
from ecrl.envs.point_mass import PointMassConfig, point_mass
from ecrl.errors import ConfigError

FIELDS = ("position", "velocity", "goal", "last_action", "obstacles", "radii", "path_length", "collision_count")


def env_of(**cfg):
    return make_env({"name": "point_mass", "cfg": cfg})


def starts(count, seed=0, **cfg):
    return env_of(**cfg).reset(rng.split(rng.key(seed), count))


def by_hand(**fields):
    """Return two envs in a state, by default with two far obstacles."""
    n = len(fields["position"])
    default = {
        "last_action": torch.zeros(n, 2),
        "obstacles": torch.tensor([[-0.9, -0.9], [-0.9, 0.9]]).repeat(n, 1, 1),
        "radii": torch.full((n, 2), 0.1),
        "path_length": torch.full((n,), 2.0),
        "collision_count": torch.full((n,), 3.0),
    }
    fields = default | {name: torch.tensor(x) for name, x in fields.items()}
    obs = torch.zeros(n, 14)
    return state_of(obs, torch.Size([n]), **fields).set("elapsed", torch.zeros(n, dtype=torch.int64))


def test_a_step_by_hand(variant):
    # dt 0.1, damping 5/s and 5 N on 1 kg: v' = 0.5 v + 0.5 a. Env 0: the action 2 counts as 1, v' = 0.1 + 0.5 = 0.6,
    # x' = 0.06, d = 0.36 - 0.06 = 0.3; 0.05 deep in obstacle 0; the action moved by 0.5.
    # Env 1: v' = 0.2, x' = 0.99 + 0.02 held at 1, where the goal is: d = 0, bonus 5, the end.
    state = by_hand(
        position=[[0.0, 0.0], [0.99, 0.5]],
        velocity=[[0.2, 0.0], [0.4, 0.0]],
        goal=[[0.36, 0.0], [1.0, 0.5]],
        last_action=[[0.5, 0.0], [0.0, 0.0]],
        obstacles=[[[0.06, 0.1], [0.9, 0.9]], [[0.0, 0.0], [-0.9, 0.9]]],
        radii=[[0.15, 0.1], [0.1, 0.1]],
    )
    env = env_of(dt=0.1, success_bonus=5.0)
    after = variant(env.step)(state, torch.tensor([[2.0, 0.0], [0.0, 0.0]]), torch.arange(2))
    close(after["velocity"], [[0.6, 0.0], [0.2, 0.0]])
    close(after["position"], [[0.06, 0.0], [1.0, 0.5]])
    close(after["reward"], [-0.3 + 0.5 * math.exp(-18.0) - 0.005 - 0.0036 - 0.00025, 0.5 - 0.0004 + 5.0])
    assert after["terminated"].tolist() == after["info", "success"].tolist() == [False, True]
    assert after["truncated"].tolist() == [False, False]
    close(after["obs"][0], [0.06, 0.0, 0.6, 0.0, 0.36, 0.0, 1.0, 0.0, 0.06, 0.1, 0.9, 0.9, 0.15, 0.1])
    close(after["info", "metrics", "path_length"], [2.06, 2.01])
    close(after["info", "metrics", "collision_count"], [4.0, 3.0])
    close(after["info", "metrics", "final_distance"], [0.3, 0.0])
    terms = {"distance": -0.3, "near": math.exp(-18.0), "penetration": 0.0025, "speed": 0.36, "change": 0.25}
    assert {name: pytest.approx(float(x[0]), abs=1e-6) for name, x in after["info", "rewards"].items()} == {
        **terms,
        "success": 0.0,
    }


def oracle(start, actions, bonus):
    """Reward and whether it ended, `[T]`, of one env from its start on: plain float64, no resets."""
    x, v, goal, last = (
        np.array(start[f].tolist(), np.float64) for f in ("position", "velocity", "goal", "last_action")
    )
    centres, radii = (np.array(start[f].tolist()) for f in ("obstacles", "radii"))
    rewards, ended = [], []
    for a in np.clip(np.array(actions.tolist()), -1.0, 1.0):
        v = v * (1.0 - 5.0 / 60.0) + 5.0 * a / 60.0
        x = np.clip(x + v / 60.0, -1.0, 1.0)
        d = np.sqrt(((x - goal) ** 2).sum())
        reward = -d + 0.5 * np.exp(-(d**2) / (2.0 * 0.05**2)) - 0.01 * (v**2).sum() - 0.001 * ((a - last) ** 2).sum()
        for centre, radius in zip(centres, radii, strict=True):
            reward -= 2.0 * max(0.0, radius - np.sqrt(((x - centre) ** 2).sum())) ** 2
        rewards.append(reward + bonus * (d < 0.03))
        ended.append(d < 0.03)
        last = a
    return rewards, ended


def test_an_episode_equals_the_oracle():
    env, state = env_of(success_bonus=2.0), starts(64).double()
    to_goal = torch.sign(state["goal"] - state["position"])  # so that some reach it, and some the walls
    actions = 2.0 * rng.normal(rng.key(1), (80, 64, 2), torch.float64) + to_goal
    states = [state]
    for action in actions:
        states.append(env.step(states[-1], action, None))
    after = torch.stack(states[1:], 1)
    expected = [oracle(state[i], actions[:, i], 2.0) for i in range(64)]
    close(after["reward"], np.array([rewards for rewards, _ in expected]), tol=1e-12)
    assert after["terminated"].tolist() == [ended for _, ended in expected]
    assert after["terminated"].any() and (after["position"].abs() == 1.0).any()
    assert (after["info", "rewards", "penetration"] > 0.0).any()
    assert after["reward"].dtype == torch.float64


def test_gradients_of_a_return_equal_finite_differences():
    env = env_of()
    state = starts(6, seed=3).double()
    state["goal"][0] = state["position"][0] + 0.02  # near enough that the bonus around the goal matters
    state["obstacles"][1, 0] = state["position"][1] + 0.05
    assert env.step(state, torch.zeros(6, 2), None)["info", "rewards", "penetration"][1] > 0.0

    def total(position, velocity, actions):
        now = state.copy().update({"position": position, "velocity": velocity})
        rewards = []
        for action in actions.unbind():
            now = env.step(now, action, None)
            rewards.append(now["reward"])
        return torch.stack(rewards).sum(0)

    actions = 0.5 * rng.normal(rng.key(2), (5, 6, 2), torch.float64).clamp(-1.9, 1.9)
    inputs = [state["position"].clone(), state["velocity"] + 0.3, actions]
    assert torch.autograd.gradcheck(total, [x.requires_grad_() for x in inputs], eps=1e-7, atol=1e-6)


@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_are_finite_where_a_norm_is_zero_and_zero_beyond_a_clamp(compiled):
    state = by_hand(
        position=[[0.3, 0.3], [0.0, 0.0], [1.0, 0.0]],
        velocity=[[0.0, 0.0]] * 3,
        goal=[[0.3, 0.3], [0.5, 0.0], [0.5, 0.0]],
        obstacles=[[[0.3, 0.3], [0.9, 0.9]]] * 3,
    )
    step = env_of().step
    step = torch.compile(step, backend="aot_eager", fullgraph=True) if compiled else step
    action = torch.tensor([[0.0, 0.0], [1.5, 0.5], [0.5, 0.0]], requires_grad=True)
    after = step(state, action, None)
    (gradient,) = torch.autograd.grad(after["reward"].sum() + after["info", "metrics", "path_length"].sum(), action)
    assert gradient.isfinite().all()
    assert gradient[0].tolist() == [0.0, 0.0]  # on the goal, at rest, in the centre of an obstacle
    assert gradient[1, 0] == 0.0 and gradient[1, 1] != 0.0
    (moved,) = torch.autograd.grad(step(state, action, None)["position"].sum(), action)
    assert moved[2, 0] == 0.0 and moved[2, 1] > 0.0  # held by the wall


def test_starts_lie_within_the_bounds_of_the_task():
    state = starts(4000)
    limits = {"goal": 0.7, "position": 0.6, "obstacles": 0.8}
    for field, limit in limits.items():
        assert 0.99 * limit < state[field].abs().max() <= limit + 1e-6
        assert abs(float(state[field].mean())) < 0.02
    apart = (state["obstacles"] - state["goal"].unsqueeze(1)).norm(dim=-1)
    assert 0.25 < apart.min() < 0.26
    assert 0.08 <= state["radii"].min() < 0.0803 and 0.1497 < state["radii"].max() <= 0.15
    assert abs(float((state["obstacles"][:, 0] * state["obstacles"][:, 1]).mean())) < 0.01  # drawn apart
    # Uniform on a square of half-width 0.8 without the disc around the goal: a known second moment, by rejection.
    points = (torch.rand(400_000, 2, generator=torch.Generator().manual_seed(0)) * 2 - 1) * 0.8
    goals = (torch.rand(400_000, 2, generator=torch.Generator().manual_seed(1)) * 2 - 1) * 0.7
    far = points[(points - goals).norm(dim=-1) > 0.25]
    close(state["obstacles"].square().mean(), far.square().mean(), tol=0.01)


def test_an_obstacle_that_finds_no_place_goes_to_the_opposite_corner():
    state = starts(500, obstacle_min_goal_distance=1.1)
    apart = (state["obstacles"] - state["goal"].unsqueeze(1)).norm(dim=-1)
    assert apart.min() > 1.1
    corners = (state["obstacles"].abs() == state["obstacles"].new_tensor(0.8)).all(-1)
    assert corners.any() and not corners.all()


def test_reset_step_and_draw_in_every_variant(variant):
    env, keys = auto_reset(env_of(max_episode_steps=2)), rng.split(rng.key(5), 4)
    state, noise = variant(env.reset)(keys), variant(env.draw)(keys)
    once = variant(env.step)(state, torch.ones(4, 2), noise)
    twice = variant(env.step)(once, torch.ones(4, 2), noise)
    assert twice["truncated"].all() and not once["truncated"].any()
    close(twice["obs"], noise["start", "obs"])
    single = assert_pure(env_of().step, once, torch.ones(4, 2), keys)
    close(twice["final_obs"], single["obs"])
    close(twice["info", "metrics", "path_length"], single["path_length"])
    close(twice["path_length"], torch.zeros(4))


def test_new_values_do_not_retrace():
    env = auto_reset(env_of())
    first, second = (rng.split(rng.key(seed), 4) for seed in (1, 2))
    assert_no_retrace(env.draw, (first,), (second,))
    args = [(env.reset(keys), torch.full((4, 2), 0.1 * i), env.draw(keys)) for i, keys in enumerate((first, second))]
    assert_no_retrace(env.step, *args)


def test_state_keys_are_the_same_before_and_after_a_step():
    env = auto_reset(env_of())
    keys = rng.split(rng.key(0), 3)
    before = env.reset(keys)
    after = env.step(before, torch.zeros(3, 2), env.draw(keys))
    shapes = [{name: (x.shape, x.dtype) for name, x in s.flatten_keys("/").items()} for s in (before, after)]
    assert shapes[0] == shapes[1]
    assert set(FIELDS) <= set(before.keys())


def test_terminal_metrics_are_of_the_whole_episode():
    env, keys = auto_reset(env_of(max_episode_steps=60)), rng.split(rng.key(9), 100)
    state, states = env.reset(keys), []
    for t in range(60):
        states.append(state)
        action = 4.0 * (state["goal"] - state["position"])
        state = env.step(state, action, env.draw(rng.fold_in(keys, t)))
        states[-1] = TensorDict({"from": states[-1]["position"], "after": state}, [100])
    done = torch.stack([s["after"]["terminated"] | s["after"]["truncated"] for s in states])
    first = done.int().argmax(0)
    assert done.any(0).all() and len(first.unique()) > 3
    hit = 0
    for i in range(100):
        rows = [states[t][i] for t in range(int(first[i]) + 1)]
        reached = [row["after", "final_obs"][:2] for row in rows]
        path = sum((b - row["from"]).norm() for b, row in zip(reached, rows, strict=True))
        obs = rows[-1]["after", "final_obs"]
        inside = [((x - obs[8:12].reshape(2, 2)).norm(dim=-1) < obs[12:]).any() for x in reached]
        metrics = rows[-1]["after", "info", "metrics"]
        close(metrics["path_length"], path)
        close(metrics["final_distance"], (obs[:2] - obs[4:6]).norm())
        assert int(metrics["collision_count"]) == sum(map(int, inside))
        hit += bool(metrics["collision_count"] > 0)
        assert bool(rows[-1]["after", "info", "success"]) == bool(metrics["final_distance"] < 0.03)
    assert hit > 5


KEYS = {
    "max_episode_steps": 3,
    "workspace_half": 0.5,
    "mass": 2.0,
    "force_scale": 2.0,
    "linear_damping": 0.0,
    "dt": 0.1,
    "success_threshold": 0.5,
    "success_bonus": 1.0,
    "obstacle_radius_range": [0.1, 0.4],
    "obstacle_min_goal_distance": 0.5,
}


def after_some_steps(**cfg):
    env, keys = auto_reset(env_of(**cfg)), rng.split(rng.key(4), 64)
    state = env.reset(keys)
    for t in range(20):
        action = torch.sign(state["goal"] - state["position"])
        state = env.step(state, action, env.draw(rng.fold_in(keys, t)))
    return torch.cat((state["obs"], state["reward"].unsqueeze(-1)), -1)


@pytest.mark.parametrize("key", KEYS)
def test_every_key_changes_the_world(key):
    assert set(KEYS) == set(PointMassConfig.model_fields)
    base = {"success_threshold": 0.1}
    assert torch.equal(after_some_steps(**base), after_some_steps(**base))
    assert not torch.equal(after_some_steps(**base), after_some_steps(**base | {key: KEYS[key]}))


@pytest.mark.parametrize(
    ("cfg", "message"),
    [
        ({"obstacle_radius_range": [0.2, 0.1]}, r"obstacle_radius_range is \[0.2, 0.1\]; give the smaller"),
        ({"obstacle_radius_range": [0.2]}, r"cfg.obstacle_radius_range\[1\]: missing"),
        ({"obstacle_min_goal_distance": 1.2}, "obstacle_min_goal_distance is 1.2, expected less than 1.131"),
        ({"mass": 0.0}, "cfg.mass: must be above 0.0, got 0.0; mass of the point, kg"),
    ],
)
def test_impossible_settings_are_refused(cfg, message):
    with pytest.raises(ConfigError, match=message):
        env_of(**cfg)


def test_it_has_upstreams_name_too():
    env, keys = make_env({"name": "PointMassRL", "cfg": {"success_bonus": 5.0}}), torch.arange(3)
    assert env.observation_space.shape == (14,) and env.action_space.shape == (2,)
    close(env.reset(keys)["obs"], point_mass(PointMassConfig(success_bonus=5.0)).reset(keys)["obs"], tol=0.0)
