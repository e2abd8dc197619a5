"""Events: their effect by hand, when they happen and to whom, their noise, what is refused, and training with them."""

from math import cos, pi, sin

import pytest
import torch
from pydantic import Field
from support.checks import assert_no_retrace, assert_pure, close
from support.small_runs import NET, last_state, same, small
from tensordict import TensorDict

from ecrl import rng
from ecrl.config import EventConfig
from ecrl.config.model import ConfigModel
from ecrl.envs import Env, auto_reset, make_env, restart, state_of, time_limit, with_events
from ecrl.errors import ConfigError
from ecrl.loop.build import build, with_eval_events
from ecrl.loop.iteration import init_state, make_iteration
from ecrl.registry import register_event
from ecrl.spaces import Discrete, box

T, F = True, False
N = 4
UNDISTURBED = (0.0, 0.0, 0.0, 0.0)


def event(field="obs", low=0.0, high=None, *, mode="interval", interval_step=1, operation="add"):
    params = {"field": field, "low": low, "high": low if high is None else high, "operation": operation}
    data = {"func": "randomize_field", "mode": mode, "interval_step": interval_step, "params": params}
    return EventConfig.model_validate(data)


def custom(func, mode="reset", **params):
    return EventConfig.model_validate({"func": func, "mode": mode, "params": params})


def _slide_reset(keys):
    inner = TensorDict({"mass": torch.ones(*keys.shape, 2)}, keys.shape)
    start = rng.uniform(keys, (1,))
    return state_of(start, keys.shape, drag=torch.ones(keys.shape), hits=torch.zeros_like(keys)).set("body", inner)


def _slide_step(state, action, noise):
    return state.copy().update({"obs": state["obs"] + 1.0, "reward": state["drag"]})


SPACES = (box(-9.0, 9.0, 1), Discrete(2))
SLIDE = auto_reset(time_limit(Env(_slide_reset, _slide_step, *SPACES), 3))
"""Goes on by 1 a step from a start in [0, 1), for 3 steps, and pays its drag."""


def rollout(env, num_envs=N, length=8, seed=0, index=None):
    """States `[N, length + 1]`, from the reset on."""
    index = torch.arange(num_envs) if index is None else index
    noise = env.draw(rng.stream(rng.key(seed), rng.ENV, index, torch.arange(length).unsqueeze(1)))
    states = [env.reset(rng.stream(rng.key(seed), rng.START, index, 0))]
    action = torch.zeros(len(index), *getattr(env.action_space, "shape", ()))
    for t in range(length):
        states.append(env.step(states[-1], action, noise[t]))
    return torch.stack(states, 1)


def test_without_events_the_environment_is_the_same_object():
    assert with_events(SLIDE, {}) is SLIDE


def test_equal_events_give_the_same_object():
    made = with_events(SLIDE, {"push": event()})
    assert made is with_events(SLIDE, {"push": event()}) and made is not SLIDE
    assert made is not with_events(SLIDE, {"push": event(low=1.0)})
    assert made is not with_events(SLIDE, {"push": event(interval_step=2)})
    assert (made.observation_space, made.action_space, made.observe) == (
        SLIDE.observation_space,
        SLIDE.action_space,
        SLIDE.observe,
    )


def test_a_start_of_cartpole_by_hand(variant):
    # Position and angle are drawn in [0, 1) and [-0.2, 0.2), velocities set to 1 and 2: low + (high - low) u.
    plain = auto_reset(make_env("cartpole"))
    low, high = [0.0, 1.0, -0.2, 2.0], [1.0, 1.0, 0.2, 2.0]
    env = with_events(plain, {"tilt": event("obs", low, high, mode="reset", operation="set")})
    keys = rng.split(rng.key(3), N)
    state = variant(env.reset)(keys)
    u = rng.uniform(rng.fold_in(rng.fold_in(keys, rng.EVENT), 0), (4,))
    one, two = torch.ones(N), torch.full((N,), 2.0)
    close(state["obs"], torch.stack((u[:, 0], one, -0.2 + 0.4 * u[:, 2], two), -1), tol=1e-6)
    close(state["final_obs"], plain.reset(keys)["obs"], tol=0.0)
    assert state["events", "count"].tolist() == [0] * N
    assert torch.equal(state["events", "key"], rng.fold_in(keys, rng.EVENT))
    assert (state["elapsed"] == 0).all() and not (state["terminated"] | state["truncated"]).any()


@pytest.mark.parametrize("mode", ["startup", "reset"])
def test_the_observation_follows_at_a_start_of_pendulum(variant, mode):
    # Episodes of one step: the step ends at some angle, which final_obs keeps; the next one starts at pi / 3.
    plain = auto_reset(make_env({"name": "pendulum", "cfg": {"max_episode_steps": 1}}))
    env = with_events(plain, {"lift": event("angle", pi / 3, mode=mode, operation="set")})
    keys = rng.split(rng.key(3), N)
    state = env.reset(keys)
    close(state["obs"][:, :2], [[cos(pi / 3), sin(pi / 3)]] * N, tol=1e-6)
    after = variant(env.step)(state, torch.ones(N, 1), env.draw(keys + 9))
    without = plain.step(state.exclude("events"), torch.ones(N, 1), plain.draw(keys + 9))
    close(after["angle"], [pi / 3] * N, tol=1e-6)
    close(
        after["obs"], torch.stack((without["angle"] * 0 + 0.5, without["angle"] * 0 + sin(pi / 3), after["speed"]), -1)
    )
    close(after["final_obs"], without["final_obs"], tol=1e-6)
    close(after["reward"], without["reward"], tol=1e-6)
    close(after["speed"], without["speed"], tol=0.0)
    assert after["truncated"].all() and after["events", "count"].tolist() == [1] * N


def test_an_interval_event_of_pendulum_by_hand(variant):
    # Upright and at rest, no torque. Each second step starts with a push of 1 rad/s. Step 1: nothing. Step 2: speed
    # 0 + 1, angle 0.05. Step 3: speed 1 + 0.05 * 15 sin 0.05 = 1.0374844, angle 0.1018742.
    env = with_events(auto_reset(make_env("pendulum")), {"push": event("speed", 1.0, interval_step=2)})
    keys = torch.arange(2)
    state = env.reset(keys).update({"angle": torch.zeros(2), "speed": torch.zeros(2)})
    step = variant(env.step)
    observed = []
    for _ in range(3):
        state = step(state, torch.zeros(2, 1), env.draw(keys))
        observed.append((state["angle"], state["speed"], state["obs"]))
    close(torch.stack([s for _, s, _ in observed], 1), [[0.0, 1.0, 1.0374844]] * 2, tol=1e-6)
    close(torch.stack([a for a, _, _ in observed], 1), [[0.0, 0.05, 0.1018742]] * 2, tol=1e-6)
    close(observed[1][2], [[cos(0.05), sin(0.05), 1.0]] * 2, tol=1e-6)


def test_an_interval_event_of_cartpole_by_hand(variant):
    # Velocity is set to 3 before the step: position 0 + 0.02 * 3. Only for env 0, whose second step this is.
    low = high = [0.0, 3.0, 0.0, 0.0]
    env = with_events(auto_reset(make_env("cartpole")), {"go": event("obs", low, high, interval_step=2)})
    state = env.reset(torch.arange(2)).update({"obs": torch.zeros(2, 4)})
    state = state.set(("events", "count"), torch.tensor([1, 0]))
    after = variant(env.step)(state, torch.zeros(2), env.draw(torch.arange(2)))
    close(after["obs"][:, 0], [0.06, 0.0], tol=1e-6)
    close(after["final_obs"], after["obs"], tol=0.0)


def test_counters_are_each_envs_own(variant):
    env = with_events(SLIDE, {"push": event("drag", 1.0, interval_step=3)})
    state = env.reset(torch.arange(5)).set(("events", "count"), torch.tensor([0, 1, 2, 4, 5]))
    after = variant(env.step)(state, torch.zeros(5), env.draw(torch.arange(5)))
    assert after["reward"].tolist() == [1.0, 1.0, 2.0, 1.0, 2.0]
    assert after["events", "count"].tolist() == [1, 2, 3, 5, 6]


def test_interval_events_count_the_steps_of_a_life_not_of_an_episode():
    # Every fourth step doubles the drag before it is paid; an episode, of 3 steps, starts with a drag of 1.
    states = rollout(with_events(SLIDE, {"push": event("drag", 2.0, interval_step=4, operation="scale")}), length=12)
    assert states["reward"][0, 1:].tolist() == [1, 1, 1, 2, 2, 2, 1, 2, 2, 1, 1, 2]
    assert states["events", "count"][0].tolist() == list(range(13))


def test_reset_events_happen_at_every_start_and_only_there():
    states = rollout(with_events(SLIDE, {"wind": event("drag", 1.0, 2.0, mode="reset")}), length=8)
    drag = states["drag"]
    starts, going = drag[:, [0, 3, 6]], drag[:, [1, 2, 4, 5, 7, 8]]
    assert len(starts.unique()) == 3 * N and ((starts >= 2.0) & (starts < 3.0)).all()
    assert torch.equal(going, starts.repeat_interleave(2, 1))
    assert torch.equal(states["final_obs"][:, 3], rollout(SLIDE)["final_obs"][:, 3])


def test_startup_events_last_over_episodes():
    states = rollout(with_events(SLIDE, {"world": event("body.mass", 0.5, 2.0, mode="startup", operation="scale")}))
    mass = states["body", "mass"]
    assert len(mass[:, 0].unique()) == 2 * N  # each env and element has its own
    assert torch.equal(mass, mass[:, :1].expand_as(mass))
    assert ((mass >= 0.5) & (mass < 2.0)).all()


def test_startup_events_are_applied_to_fresh_starts_with_the_same_draw():
    shift = with_events(SLIDE, {"bias": event("obs", -1.0, 1.0, mode="startup")})
    plain, shifted = rollout(SLIDE)["obs"][..., 0], rollout(shift)["obs"][..., 0]
    close(shifted - plain, (shifted - plain)[:, :1].expand(N, 9), tol=1e-5)
    assert len((shifted - plain)[:, 0].unique()) == N
    assert len(plain[:, [0, 3, 6]].unique()) == 3 * N  # the starts themselves differ


def test_startup_comes_before_reset_whatever_their_order_in_the_config():
    events = {"double": event("drag", 2.0, mode="reset", operation="scale"), "five": event("drag", 5.0, mode="startup")}
    states = rollout(with_events(SLIDE, events))
    assert (states["drag"] == 12.0).all()  # (1 + 5) * 2, not 1 * 2 + 5


def test_starts_and_world_noise_are_those_without_events():
    keys = torch.arange(6).reshape(3, 2)
    env = with_events(SLIDE, {"wind": event("drag", 1.0, 2.0, mode="reset")})
    noise = assert_pure(env.draw, keys)
    assert sorted(noise.keys()) == ["env", "event"] and noise.batch_size == keys.shape
    assert same(noise["env"], SLIDE.draw(keys)) and torch.equal(noise["event"], rng.fold_in(keys, rng.EVENT))
    assert torch.equal(rollout(env)["obs"], rollout(SLIDE)["obs"])


MIXED = {
    "world": event("body.mass", 0.5, 2.0, mode="startup", operation="scale"),
    "wind": event("drag", 0.0, 1.0, mode="reset"),
    "push": event("obs", -1.0, 1.0, interval_step=2),
    "shake": event("obs", -1.0, 1.0, interval_step=2),
}


def test_equal_seeds_give_equal_bits_and_others_do_not():
    env = with_events(SLIDE, MIXED)
    first = rollout(env)
    assert same(first, rollout(env))
    other = rollout(env, seed=1)
    for key in ("obs", "drag", ("body", "mass")):
        assert not (first[key] == other[key]).any()


def test_envs_differ_and_do_not_depend_on_how_many_there_are():
    env = with_events(SLIDE, MIXED)
    few, many = rollout(env, 4), rollout(env, 8)
    assert same(few, many[:4])
    for key in ("obs", "drag"):
        assert len(many[key][:, 2].unique()) == 8


def test_equal_keys_as_in_a_group_give_equal_events():
    states = rollout(with_events(SLIDE, MIXED), index=torch.tensor([0, 0, 1, 1]))
    assert same(states[0], states[1]) and same(states[2], states[3])
    assert not torch.equal(states["drag"][0], states["drag"][2])


def test_two_events_alike_have_noise_of_their_own():
    one = with_events(SLIDE, {"a": event("obs", -1.0, 1.0)})
    two = with_events(SLIDE, {"a": event("obs", -1.0, 1.0), "b": event("obs", -1.0, 1.0)})
    plain, once, twice = (rollout(env)["obs"][:, 1, 0] for env in (SLIDE, one, two))
    assert not torch.isclose(twice - once, once - plain).any()


def test_events_of_one_step_and_the_next_differ():
    moved = rollout(with_events(SLIDE, {"a": event("obs", -1.0, 1.0)}))["final_obs"][:, 1:4, 0].diff(dim=1)
    assert len(moved.unique()) == 2 * N


def test_a_step_with_every_mode(variant):
    # The sixth step is one of the interval's and the last of an episode.
    env = with_events(SLIDE, {name: MIXED[name] for name in ("world", "wind", "push")})
    noise = env.draw(rng.stream(rng.key(0), rng.ENV, torch.arange(N), torch.arange(6).unsqueeze(1)))
    expected = rollout(env, length=6)
    after = variant(env.step)(expected[:, 5], torch.zeros(N), noise[5])
    for key, leaf in after.flatten_keys(".").items():
        close(leaf, expected[:, 6].flatten_keys(".")[key], tol=1e-5)


def test_new_values_do_not_retrace():
    env = with_events(SLIDE, {name: MIXED[name] for name in ("world", "push")})
    first, second = (rng.split(rng.key(seed), N) for seed in (1, 2))
    args = [(env.reset(keys), torch.zeros(N), env.draw(keys)) for keys in (first, second)]
    assert_no_retrace(env.step, *args)


def test_restart_keeps_lives_and_starts_episodes():
    env = with_events(SLIDE, MIXED)
    before = rollout(env)[:, -1]
    keys = rng.split(rng.key(8), N)
    again, born = assert_pure(restart, env, before, keys), env.reset(keys)
    assert same(again["events"], before["events"]) and torch.equal(again["body", "mass"], before["body", "mass"])
    assert not (born["body", "mass"] == before["body", "mass"]).any()
    assert torch.equal(again["obs"], born["obs"]) and torch.equal(again["drag"], born["drag"])
    assert (again["elapsed"] == 0).all() and (born["events", "count"] == 0).all()
    assert same(restart(SLIDE, before.exclude("events"), keys), SLIDE.reset(keys))


@pytest.mark.parametrize(
    ("operation", "low", "expected"),
    [
        ("set", 3.0, [3.0, 3.0]),
        ("set", [3.0, 4.0], [3.0, 4.0]),
        ("add", [1, 0], [2.0, 1.0]),
        ("scale", [0.5, -2.0], [0.5, -2.0]),
    ],
)
def test_operations_by_hand(operation, low, expected):
    env = with_events(SLIDE, {"a": event("body.mass", low, mode="reset", operation=operation)})
    close(env.reset(torch.arange(2))["body", "mass"], [expected] * 2, tol=0.0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_field_keeps_its_dtype(dtype):
    def reset(keys):
        return state_of(torch.ones(*keys.shape, 1, dtype=dtype), keys.shape)

    env = auto_reset(time_limit(Env(reset, _slide_step, *SPACES), 3))
    keys = torch.arange(9)
    obs = with_events(env, {"a": event("obs", -0.3, 2.0, mode="reset", operation="set")}).reset(keys)["obs"]
    u = rng.uniform(rng.fold_in(rng.fold_in(keys, rng.EVENT), 0), (1,))
    assert torch.equal(obs, (-0.3 + 2.3 * u.to(torch.promote_types(dtype, torch.float32))).to(dtype))


def test_draws_fill_the_interval():
    env = with_events(SLIDE, {"a": event("drag", -2.0, [6.0], mode="reset", operation="set")})
    drag = env.reset(torch.arange(20_000))["drag"]
    assert -2.0 <= drag.min() < -1.99 and 5.99 < drag.max() < 6.0
    assert abs(drag.mean() - 2.0) < 0.06 and abs(drag.var() - 64 / 12) < 0.15  # five standard errors or so


def test_observations_may_be_tensordicts():
    def reset(keys):
        obs = {"place": torch.zeros(keys.shape), "gear": torch.zeros(*keys.shape, 2)}
        return state_of(torch.zeros(keys.shape), keys.shape).set("obs", TensorDict(obs, keys.shape))

    env = auto_reset(time_limit(Env(reset, lambda state, action, noise: state.copy(), *SPACES), 2))
    states = rollout(with_events(env, {"a": event("obs.gear", [1.0, 2.0], interval_step=3)}), length=5)
    assert states["obs", "gear"][0].tolist() == [[0, 0], [0, 0], [0, 0], [1, 2], [0, 0], [0, 0]]
    assert states["final_obs", "gear"][0].tolist() == [[0, 0], [0, 0], [0, 0], [1, 2], [1, 2], [0, 0]]


class ShoveConfig(ConfigModel):
    by: float = Field(1.0, description="how far")


class NothingConfig(ConfigModel):
    """No settings."""


def test_an_event_of_a_user(restored_registry):
    @register_event("shove")
    def shove(cfg: ShoveConfig):
        def apply(state, keys):
            return state.update({"hits": state["hits"] + 1, "obs": state["obs"] + cfg.by})

        return apply

    states = rollout(with_events(SLIDE, {"mine": custom("shove", "interval", by=2.0)}), length=2)
    close(states["obs"][:, 2] - states["obs"][:, 0], torch.full((N, 1), 6.0))
    assert states["hits"][0].tolist() == [0, 1, 2]
    with pytest.raises(ConfigError, match=r"replace: trainer.events.train.mine.params.bye: unknown key; did you mean"):
        small(**{"trainer.events.train": {"mine": {"func": "shove", "params": {"bye": 1.0}}}})
    with pytest.raises(ConfigError, match=r"replace: trainer.events.train.mine.func: unknown event 'shov'; did you"):
        small(**{"trainer.events.train": {"mine": {"func": "shov"}}})


def test_an_event_that_is_replaced_is_not_remembered(restored_registry):
    def make(by):
        def shove(cfg: NothingConfig):
            return lambda state, keys: state.copy().update({"drag": state["drag"] + by})

        return shove

    register_event("shove")(make(1.0))
    assert (rollout(with_events(SLIDE, {"mine": custom("shove")}))["drag"] == 2.0).all()
    register_event("shove", override=True)(make(5.0))
    assert (rollout(with_events(SLIDE, {"mine": custom("shove")}))["drag"] == 6.0).all()


def test_an_event_may_write_on_what_it_is_given(restored_registry):
    """The event gets a copy: other environments and the caller's state do not change."""

    @register_event("careless")
    def careless(cfg: NothingConfig):
        def apply(state, keys):
            state["drag"] += 1.0
            state["body", "mass"].zero_()
            return state

        return apply

    env = with_events(SLIDE, {"mine": EventConfig(func="careless", interval_step=2, params=NothingConfig())})
    state = env.reset(torch.arange(2)).set(("events", "count"), torch.tensor([0, 1]))
    after = assert_pure(env.step, state, torch.zeros(2), env.draw(torch.arange(2)))
    assert after["drag"].tolist() == [1.0, 2.0] and after["body", "mass"].tolist() == [[1.0, 1.0], [0.0, 0.0]]


BAD = {
    "adds": (lambda s: s.set("extra", s["drag"]), r"field 'extra' is float32 \[4\] after the event, expected absent"),
    "drops": (lambda s: s.exclude("drag"), r"field 'drag' is absent after the event, expected float32 \[4\]"),
    "drops_deep": (
        lambda s: s.exclude(("body", "mass")),
        r"field 'body.mass' is absent after the event, expected float32 \[4, 2\]",
    ),
    "reshapes": (
        lambda s: s.set("drag", s["obs"]),
        r"field 'drag' is float32 \[4, 1\] after the event, expected float32 \[4\]",
    ),
    "retypes": (
        lambda s: s.set("drag", s["drag"].double()),
        r"field 'drag' is float64 \[4\] after the event, expected float32",
    ),
    "pays": (lambda s: s.set("reward", s["drag"]), r"field 'reward' is float32 \[4\] after the event, expected absent"),
    "ends": (
        lambda s: s.set("terminated", s["drag"] > 0),
        r"field 'terminated' is bool \[4\] after the event, expected absent",
    ),
    "ages": (lambda s: s.set("elapsed", s["hits"]), r"field 'elapsed' is int64 \[4\] after the event, expected absent"),
    "forgets": (lambda s: None, "returns NoneType, expected the state, a TensorDict with body.mass, drag, hits, obs"),
}


@pytest.mark.parametrize("mode", ["startup", "reset", "interval"])
@pytest.mark.parametrize("name", BAD)
def test_events_that_do_not_fit_the_state_are_refused(restored_registry, name, mode):
    change, message = BAD[name]

    @register_event("bad")
    def bad(cfg: NothingConfig):
        return lambda state, keys: change(state)

    with pytest.raises(ConfigError, match=rf"^trainer.events.mine \(bad\): {message}") as error:
        with_events(SLIDE, {"mine": custom("bad", mode)}).reset(torch.arange(N))
    assert "\n" not in str(error.value) and "body.mass, drag, hits, obs" in str(error.value)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"field": "drug"}, "params.field: unknown field 'drug'; did you mean 'drag'?"),
        ({"field": "body"}, "params.field: unknown field 'body'; did you mean 'body.mass'?"),
        ({"field": "reward"}, "params.field: unknown field 'reward'; known: body.mass, drag, hits, obs"),
        ({"field": "hits"}, "params.field: 'hits' is torch.int64, expected a float field"),
        (
            {"field": "obs", "low": [0.0, 0.0]},
            "params.low has 2 values, but field 'obs' has 1 elements; give one value for each",
        ),
        (
            {"field": "body.mass", "high": [1.0] * 3},
            "params.high has 3 values, but field 'body.mass' has 2 elements; give one value for each",
        ),
    ],
)
def test_randomize_field_refuses_what_it_cannot_draw(params, message):
    made = {"dr": custom("randomize_field", **({"low": 0.0, "high": 1.0} | params))}
    with pytest.raises(ConfigError) as error:
        with_events(SLIDE, made).reset(torch.arange(N))
    assert str(error.value) == f"trainer.events.dr (randomize_field): {message}"


@pytest.mark.parametrize("use", ["train", "eval"])
def test_an_event_of_a_run_is_named_by_its_place(use):
    wrong = {"func": "randomize_field", "mode": "reset", "params": {"field": "drug", "low": 0.0, "high": 1.0}}
    cfg = small(**{f"trainer.events.{use}": {"dr": wrong}})
    env = (build(cfg) if use == "train" else with_eval_events(build(cfg), cfg)).env
    with pytest.raises(
        ConfigError, match=rf"^trainer.events.{use}.dr \(randomize_field\): params.field: unknown field"
    ):
        env.reset(torch.arange(N))


def test_a_computed_observation_is_no_field_of_its_own():
    env = with_events(auto_reset(make_env("pendulum")), {"blur": event("obs", 1.0)})
    with pytest.raises(ConfigError, match="unknown field 'obs'; known: angle, gravity, length, mass, speed"):
        env.reset(torch.arange(N))


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"low": 1.0, "high": 0.0}, "params: low 1.0 is above high 0.0"),
        ({"low": [0.0, 2.0], "high": 1.0}, "params: low 2.0 is above high 1.0"),
        ({"low": [0.0, 2.0], "high": [1.0] * 3}, "params: low has 2 values, but high has 3"),
        ({"low": 0.0}, "params.high: missing"),
        (
            {"low": 0.0, "high": 1.0, "operation": "mul"},
            "params.operation: expected 'set', 'add' or 'scale'",
        ),
        ({"low": 0.0, "high": 1e39}, "params.high"),
    ],
)
def test_bad_bounds_are_refused_by_the_config(params, message):
    events = {"dr": {"func": "randomize_field", "params": {"field": "obs"} | params}}
    with pytest.raises(ConfigError) as error:
        small(**{"trainer.events.train": events})
    assert f"trainer.events.train.dr.{message}" in str(error.value)


def test_events_need_tensors():
    host = Env(_slide_reset, _slide_step, *SPACES, is_pure=False)
    assert with_events(host, {}) is host
    with pytest.raises(ConfigError, match=r"^trainer.events.gust \(randomize_field\): events change tensors, but"):
        with_events(host, {"gust": event()})


def test_events_need_auto_reset():
    with pytest.raises(ValueError, match=r"with_events\(auto_reset\(env\)\)"):
        with_events(make_env("cartpole"), {"gust": event()}).reset(torch.arange(N))


def config(mode="reset", interval_step=1, low=UNDISTURBED, high=None, operation="set", **changes):
    """Cartpole with episodes of 3 steps and a policy that does not learn: no pole falls in 3 steps."""
    params = {"field": "obs", "low": list(low), "high": list(low if high is None else high), "operation": operation}
    data = {"func": "randomize_field", "mode": mode, "interval_step": interval_step, "params": params}
    fixed = {"env.cfg": {"max_episode_steps": 3}, "trainer.iterations": 2, "algorithm.cfg.learning_rate": 1e-30}
    return small(**fixed, **{"trainer.events.train": {"dr": data}}, **changes)


def check_training(mode, form):
    """The last of 2 * 9 steps ends an episode: the next starts at the drawn place. The last of 2 * 8 does not, and an
    event before it puts cart and pole at 0, where one step at rest leaves them."""
    place = [0.5, 0.25, 0.125, -0.5]
    if mode == "interval":
        cfg = config(mode, 16, **{"trainer.compile": form})
        obs = last_state(cfg)["env"]["obs"]
        close(obs[:, [0, 2]], torch.zeros(4, 2), tol=0.0)
        assert (obs[:, [1, 3]].abs() > 0.01).all()
        cfg = config(mode, 15, **{"trainer.compile": form})
        assert (last_state(cfg)["env"]["obs"][:, [0, 2]] != 0.0).all()
    else:
        cfg = config(mode, low=place, **{"trainer.compile": form, "trainer.buffer_size": 9})
        close(last_state(cfg)["env"]["obs"], [place] * 4, tol=0.0)
        close(init_state(cfg)["env"]["obs"], [place] * 4, tol=0.0)


@pytest.mark.parametrize("mode", ["startup", "reset", "interval"])
def test_a_train_event_changes_the_environments_in_training(mode):
    check_training(mode, "off")


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["startup", "reset", "interval"])
@pytest.mark.usefixtures("traced_or_compiled")
def test_a_train_event_changes_the_environments_in_compiled_training(mode):
    check_training(mode, "on")


WIDE = {"low": [-0.1] * 4, "high": [0.1] * 4, "operation": "add"}
MANY = {
    name: {"func": "randomize_field", "mode": mode, "interval_step": 3, "params": {"field": "obs", **WIDE}}
    for name, mode in (("a", "startup"), ("b", "reset"), ("c", "interval"))
}


@pytest.mark.slow
@pytest.mark.usefixtures("traced_or_compiled")
def test_compiled_training_with_events_equals_eager():
    eager = small(**{"trainer.events.train": MANY, "env.cfg": {"max_episode_steps": 5}})
    first, second = last_state(eager), last_state(eager.replace(**{"trainer.compile": "on"}))
    for name, leaf in first.flatten_keys("/").items():
        close(second.flatten_keys("/")[name], leaf, tol=1e-4)


def test_an_iteration_with_events_is_pure_and_resumes_with_the_same_bits():
    cfg = small(**{"trainer.events.train": MANY, "env.cfg": {"max_episode_steps": 5}})
    state = init_state(cfg)
    half, _ = assert_pure(make_iteration(cfg), state)
    assert same(last_state(cfg, half.clone()), last_state(cfg))


def test_vmapped_seeds_with_events_equal_single_ones():
    cfg = small(**{"trainer.events.train": MANY, "env.cfg": {"max_episode_steps": 5}})
    states = [init_state(cfg, key=torch.tensor(seed)) for seed in (1, 2)]
    stacked, _ = torch.vmap(make_iteration(cfg), randomness="error")(torch.stack([s.clone() for s in states]))
    for i, state in enumerate(states):
        single, _ = make_iteration(cfg)(state)
        for name, leaf in single["env"].flatten_keys("/").items():
            close(stacked["env"].flatten_keys("/")[name][i], leaf, tol=1e-4)


def test_the_members_of_a_grpo_group_share_their_events_and_keep_their_worlds():
    # Every rollout starts new episodes; values of startup events stay, and the steps since startup continue.
    world = event("angle", 0.0, 3.0, mode="startup", operation="set").model_dump()
    cfg = small(
        **{
            "algorithm": {"name": "grpo", "cfg": {"group_size": 2, "batch_size": 8}},
            "policy": {"name": "actor_only", "actor": NET},
            "env": {"name": "pendulum", "cfg": {"max_episode_steps": 9}},
            "trainer.events.train": {"world": world},
        }
    )
    first = init_state(cfg)
    after, _ = make_iteration(cfg)(first)
    again = restart(build(cfg).env, after["env"], torch.arange(4))
    for state in (first["env"], again):
        angle = state["angle"]
        assert angle[0] == angle[1] and angle[2] == angle[3] and angle[0] != angle[2]
    assert torch.equal(again["angle"], first["env", "angle"])
    assert after["env", "events", "count"].tolist() == [8] * 4
    assert last_state(cfg)["env", "events", "count"].tolist() == [32] * 4


CHANGES = {
    "func": "shove",
    "mode": "reset",
    "interval_step": 3,
    "params.field": "speed",
    "params.low": -0.4,
    "params.high": 0.4,
    "params.operation": "scale",
}


@pytest.mark.parametrize("key", CHANGES)
def test_every_key_of_an_event_changes_the_environments(restored_registry, key):
    @register_event("shove")
    def shove(cfg: NothingConfig):
        return lambda state, keys: state.copy().update({"angle": state["angle"] + 0.3})

    base = {"trainer.events.train": {"dr": event("angle", -0.2, 0.2, interval_step=2).model_dump()}}
    plain = small(**{"env": {"name": "pendulum", "cfg": {"max_episode_steps": 5}}}, **base)
    path = f"trainer.events.train.dr.{key}"
    other = plain.replace(**({path: CHANGES[key]} | ({"trainer.events.train.dr.params": {}} if key == "func" else {})))
    assert not torch.equal(last_state(plain)["env"]["angle"], last_state(other)["env"]["angle"])


def test_events_of_training_and_of_evaluation_are_apart():
    cfg = config("reset", low=[0.5] * 4, **{"trainer.events.eval": {"dr": {**MANY["b"]}}})
    keys = torch.arange(4)
    train, evaluation, none = (
        build(cfg).env,
        with_eval_events(build(cfg), cfg).env,
        build(cfg.replace(**{"trainer.events": {}})).env,
    )
    assert (train.reset(keys)["obs"] == 0.5).all() and not (evaluation.reset(keys)["obs"] == 0.5).any()
    assert not torch.equal(evaluation.reset(keys)["obs"], none.reset(keys)["obs"])
    assert "events" not in none.reset(keys)


@pytest.mark.usefixtures("restored_registry")
def test_an_event_that_shortens_a_limit_lowers_the_truncation_gap():
    class Shorter(ConfigModel):
        steps: int = Field(2, description="first step that may be truncated")

        @property
        def min_truncation_gap(self):
            return self.steps

    @register_event("shorter")
    def shorter(cfg: Shorter):
        return lambda state, keys: state

    limited = auto_reset(make_env({"name": "pendulum", "cfg": {"max_episode_steps": 10}}))
    assert with_events(limited, {"it": event("angle")}).min_truncation_gap == 10
    assert with_events(limited, {"it": event("angle"), "cut": custom("shorter")}).min_truncation_gap == 2
    assert with_events(limited, {"cut": custom("shorter", steps=30)}).min_truncation_gap == 10
