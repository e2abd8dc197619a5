"""Gymnasium computes in float64: float32 agrees within 1e-5, float64 within rounding."""

from math import nextafter, pi

import gymnasium
import numpy as np
import pytest
import torch
from support.checks import close

from ecrl import rng
from ecrl.config import EventConfig
from ecrl.envs import auto_reset, make_env, state_of, with_events
from ecrl.spaces import from_gymnasium, to_gymnasium

pytestmark = pytest.mark.ref
IDS = {"cartpole": ("CartPole-v1", 500), "pendulum": ("Pendulum-v1", 200)}
TILT = 12 * 2 * pi / 360  # CartPole's largest angle


def _tol(variant):
    return 1e-12 if variant.name == "double" else 1e-5


CARTPOLE = {"gravity": 9.8, "cart_mass": 1.0, "pole_mass": 0.1, "half_length": 0.5, "force": 10.0}
PENDULUM = {"gravity": 10.0, "mass": 1.0, "length": 1.0}


def _columns(x, constants):
    return {name: torch.full_like(x[:, 0], value) for name, value in constants.items()}


def _cartpole_state(x, elapsed, **constants):
    return state_of(x, x.shape[:1], elapsed=elapsed, **_columns(x, CARTPOLE | constants))


def _pendulum_state(x, elapsed, **constants):
    angle, speed = x.unbind(-1)
    obs = torch.stack((angle.cos(), angle.sin(), speed), -1)
    return state_of(obs, x.shape[:1], angle=angle, speed=speed, elapsed=elapsed, **_columns(x, PENDULUM | constants))


STATE = {"cartpole": _cartpole_state, "pendulum": _pendulum_state}


def _random(name, count, seed):
    draw = np.random.default_rng(seed)
    if name == "cartpole":
        scale = [3.0, 4.0, 0.3, 4.0]
        return torch.tensor(draw.uniform(-1, 1, (count, 4)) * scale).float(), torch.tensor(draw.integers(0, 2, count))
    angle, speed = draw.uniform(-10.0, 10.0, count), draw.uniform(-8.5, 8.5, count)
    torque = torch.tensor(draw.uniform(-5.0, 5.0, (count, 1))).float()  # Gymnasium clips at 2, so must we
    return torch.tensor(np.stack((angle, speed), -1)).float(), torch.where(torque.abs() > 4.5, 1000.0 * torque, torque)


def _gym_action(name, action):
    return int(action) if name == "cartpole" else action.double().numpy()


def _gym_steps(name, states, actions):
    """Gymnasium's answers, one step from each state; its time limit counts from the last reset."""
    env_id, limit = IDS[name]
    env = gymnasium.make(env_id, disable_env_checker=True)
    rows = []
    for i, (state, action) in enumerate(zip(states.double().numpy(), actions, strict=True)):
        if i % limit == 0:
            env.reset(seed=0)
        env.unwrapped.state = state
        env.unwrapped.steps_beyond_terminated = None  # CartPole pays nothing for stepping on after the end
        obs, reward, terminated, truncated, _ = env.step(_gym_action(name, action))
        rows.append((env.unwrapped.state.copy(), obs, reward, terminated, truncated))
    return [np.stack(column) for column in zip(*rows, strict=True)]


def _compare(after, expected, tol):
    _, obs, reward, terminated, truncated = expected
    close(after["obs"], obs, max(tol, 1e-6))  # Gymnasium hands observations out in float32
    close(after["reward"], reward, tol)
    assert after["terminated"].tolist() == terminated.tolist()
    assert after["truncated"].tolist() == truncated.tolist()


@pytest.mark.parametrize("name", IDS)
def test_random_states_and_actions(variant, name):
    count, limit = 2000, IDS[name][1]
    states, actions = _random(name, count, seed=1)
    if name == "cartpole":  # closer to a threshold, float32 and float64 may differ
        edges = (states + 0.02 * states.roll(-1, -1))[:, [0, 2]].abs() - torch.tensor([2.4, TILT])
        states = states[edges.abs().amin(-1) > 1e-5][: count // limit * limit - limit]
        actions = actions[: len(states)]
    elapsed = torch.arange(len(states)) % limit
    expected = _gym_steps(name, states, actions)
    exact = states.double() if variant.name == "double" else states  # 9.8 is another number in float32
    state, flags = STATE[name](exact, elapsed), torch.ones(len(states)).bool()
    state.update({"terminated": flags, "truncated": flags.clone()})  # a step sets its flags, independent of the state's
    after = variant(make_env(name).step)(state, actions, torch.arange(len(states)))
    _compare(after, expected, _tol(variant))
    assert 0 < after["truncated"].sum() == len(states) // limit
    inner = torch.stack((after["angle"], after["speed"]), -1) if name == "pendulum" else after["obs"]
    close(inner, expected[0], _tol(variant))


@pytest.mark.parametrize("name", IDS)
def test_long_trajectory(name):
    # Resynchronised each step, so that errors do not add up; CartPole is balanced to its time limit.
    limit = IDS[name][1]
    env, state, states, afters, actions = make_env(name), make_env(name).reset(rng.split(rng.key(0), 1)), [], [], []
    for t in range(limit):
        obs = state["obs"]
        lean = obs @ torch.tensor([0.1, 0.2, 1.0, 0.5]) if name == "cartpole" else obs[..., 2:]
        actions.append((lean > 0).long() if name == "cartpole" else 2.0 * lean.sign() * (1.0 if t < 100 else -1.0))
        states.append(obs if name == "cartpole" else torch.stack((state["angle"], state["speed"]), -1))
        state = env.step(state, actions[-1], None)
        afters.append(state)
    after = torch.cat(afters)
    _compare(after, _gym_steps(name, torch.cat(states), torch.cat(actions)), 1e-5)
    assert after["truncated"].tolist() == [False] * (limit - 1) + [True]
    assert not after["terminated"].any()
    if name == "pendulum":
        assert after["angle"].abs().max() > 2 * pi  # it went round, which the reward must not see


@pytest.mark.parametrize("side", [-1.0, 1.0])
@pytest.mark.parametrize(("column", "edge"), [(0, 2.4), (2, TILT)])
def test_cartpole_thresholds_are_exclusive(column, edge, side):
    # At rest the coordinate does not change: the threshold itself continues, the next float beyond it ends.
    states = torch.zeros(3, 4, dtype=torch.float64)
    states[:, column] = side * torch.tensor([edge, nextafter(edge, 9.0), nextafter(edge, 0.0)], dtype=torch.float64)
    actions = torch.zeros(3, dtype=torch.int64)
    after = make_env("cartpole").step(_cartpole_state(states, torch.zeros(3, dtype=torch.int64)), actions, None)
    _compare(after, _gym_steps("cartpole", states, actions), 1e-12)
    assert after["terminated"].tolist() == [False, True, False]


@pytest.mark.parametrize("name", IDS)
def test_spaces(name):
    env, gym_env = make_env(name), gymnasium.make(IDS[name][0])
    for actual, expected in (
        (env.observation_space, gym_env.observation_space),
        (env.action_space, gym_env.action_space),
    ):
        assert to_gymnasium(actual) == expected
        assert to_gymnasium(from_gymnasium(expected)) == expected


@pytest.mark.parametrize(("name", "high"), [("cartpole", [0.05] * 4), ("pendulum", [pi, 1.0])])
def test_starts_are_uniform(variant, name, high):
    # 20,000 draws: the largest gap between empirical and true distribution is below 0.0138 with probability 0.999.
    state = variant(make_env(name).reset)(rng.split(rng.key(3), 20_000))
    start = torch.stack((state["angle"], state["speed"]), -1) if name == "pendulum" else state["obs"]
    share = (start / torch.tensor(high) + 1.0) / 2.0
    assert share.min() >= 0.0 and share.max() <= 1.0
    grid = (torch.arange(20_000) + 0.5) / 20_000
    assert (share.sort(0).values - grid.unsqueeze(-1)).abs().max() < 0.0138
    assert (torch.corrcoef(share.T) - torch.eye(share.shape[-1])).abs().max() < 0.03
    if name == "pendulum":
        close(state["obs"], torch.stack((start[:, 0].cos(), start[:, 0].sin(), start[:, 1]), -1))


def test_settings_reach_the_dynamics():
    # Upright and at rest: acceleration = 3 torque / (m l^2), so the speed after dt is dt * 3 * 0.5 / (2 * 9) = dt / 12.
    env = make_env({"name": "pendulum", "cfg": {"mass": 2.0, "length": 3.0, "dt": 0.12, "max_torque": 0.5}})
    start = env.reset(torch.arange(1)).update({"angle": torch.zeros(1), "speed": torch.zeros(1)})
    after = env.step(start, torch.tensor([[9.0]]), None)
    close(after["speed"], [0.01])
    close(after["reward"], [-0.001 * 0.25])
    # A still pole on a still cart: push = F / M = 1 / 2, turn = -push / (l (4/3 - m / M)) = -0.5 / (5/3) = -0.3,
    # acceleration = push - m l turn / M = 0.5 + 0.3 = 0.8.
    cfg = {"cart_mass": 1.0, "pole_mass": 1.0, "half_length": 2.0, "force": 1.0, "dt": 0.1}
    env = make_env({"name": "cartpole", "cfg": cfg})
    after = env.step(env.reset(torch.arange(1)).set("obs", torch.zeros(1, 4)), torch.tensor([1]), None)
    close(after["obs"], [[0.0, 0.08, 0.0, -0.03]])


def _cartpole_with(state, action, *, gravity=9.8, half_length=0.5, pole_mass=0.1):
    """A step of Gymnasium's own CartPole with other constants."""
    env = gymnasium.make("CartPole-v1").unwrapped
    env.reset(seed=0)
    env.gravity, env.length, env.masspole = gravity, half_length, pole_mass
    env.total_mass, env.polemass_length = env.masscart + env.masspole, env.masspole * env.length
    env.state = tuple(state)
    env.step(action)
    return np.array(env.state)


def test_a_step_of_cartpole_vmapped_over_gravity_and_length():
    states, actions = _random("cartpole", 6, seed=4)
    gravity, half_length = torch.tensor([1.6, 3.7, 9.8, 24.8]).double(), torch.tensor([0.25, 0.5, 1.0, 2.0]).double()
    start = _cartpole_state(states.double(), torch.zeros(6, dtype=torch.int64))

    def next_obs(gravity, half_length):
        ones = torch.ones(6, dtype=torch.float64)
        state = start.copy().update({"gravity": gravity * ones, "half_length": half_length * ones})
        return make_env("cartpole").step(state, actions, None)["obs"]

    expected = [
        [
            _cartpole_with(x.double().numpy(), int(a), gravity=float(g), half_length=float(h))
            for x, a in zip(states, actions, strict=True)
        ]
        for g, h in zip(gravity, half_length, strict=True)
    ]
    actual = torch.func.vmap(next_obs)(gravity, half_length)
    close(actual, np.array(expected), 1e-12)
    assert (actual[0] - actual[3]).abs().amax() > 1e-3


def test_a_step_of_pendulum_vmapped_over_its_constants():
    # Gymnasium's equation: acceleration 3 g / (2 l) sin(angle) + 3 / (m l^2) torque, over 0.05 s.
    states, actions = _random("pendulum", 6, seed=4)
    start = _pendulum_state(states.double(), torch.zeros(6, dtype=torch.int64))
    constants = {"gravity": [1.6, 9.8], "mass": [0.5, 2.0], "length": [0.7, 1.5]}

    def next_speed(gravity, mass, length):
        ones = torch.ones(6, dtype=torch.float64)
        state = start.copy().update({"gravity": gravity * ones, "mass": mass * ones, "length": length * ones})
        return make_env("pendulum").step(state, actions.double(), None)["speed"]

    angle, speed, torque = states.double().numpy().T[0], states.double().numpy().T[1], actions.double().numpy()[:, 0]
    torque = np.clip(torque, -2.0, 2.0)
    expected = [
        np.clip(speed + 0.05 * (3 * g / (2 * r) * np.sin(angle) + 3 / (m * r**2) * torque), -8.0, 8.0)
        for g, m, r in zip(*constants.values(), strict=True)
    ]
    actual = torch.func.vmap(next_speed)(*(torch.tensor(column, dtype=torch.float64) for column in constants.values()))
    close(actual, np.array(expected), 1e-12)


def test_randomize_field_draws_the_constants_of_cartpole():
    params = {"field": "gravity", "low": 5.0, "high": 15.0}
    event = EventConfig.model_validate({"func": "randomize_field", "mode": "startup", "params": params})
    env = with_events(auto_reset(make_env({"name": "cartpole", "cfg": {"max_episode_steps": 2}})), {"world": event})
    keys = rng.split(rng.key(7), 6)
    state = env.reset(keys)
    gravity = state["gravity"]
    assert gravity.unique().numel() == 6 and gravity.min() >= 5.0 and gravity.max() < 15.0
    tilted = torch.tensor([0.1, 0.2, 0.1, -0.3])
    after = env.step(state.copy().set("obs", tilted.expand(6, 4).clone()), torch.ones(6).long(), env.draw(keys))
    expected = [_cartpole_with(tilted.double().numpy(), 1, gravity=float(g)) for g in gravity]
    close(after["obs"], np.array(expected), 1e-6)
    ended = env.step(after, torch.ones(6).long(), env.draw(keys + 1))
    assert ended["truncated"].all() and torch.equal(ended["gravity"], gravity)  # the next episode keeps its world
