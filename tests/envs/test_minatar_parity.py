"""The games of MinAtar equal the package MinAtar, step by step, with the same random draws."""

import pytest
import torch
from support.minatar_reference import GAMES, Reference, fields_of, image

from ecrl import rng
from ecrl.envs import auto_reset, make_env
from ecrl.envs.minatar.game import DOWN, FIRE, LEFT, NOOP, RIGHT, UP

pytest.importorskip("minatar")
pytestmark = pytest.mark.ref
N = 16
HAS_RAMP = ("asterix", "space_invaders", "seaquest")


def game(name, sticky=0.1, ramping=True):
    ramp = {"difficulty_ramping": ramping} if name in HAS_RAMP else {}
    six = {} if name == "seaquest" else {"use_minimal_action_set": False}
    return make_env({"name": f"minatar_{name}", "cfg": {"sticky_action_prob": sticky} | six | ramp})


def random_action(state, t, n=6):
    return rng.randint(rng.split(rng.fold_in(rng.key(5), t), N), low=0, high=n)


def towards(x, target):
    return torch.where(target < x, LEFT, torch.where(target > x, RIGHT, NOOP)).long()


def follow_ball(state, t):
    """Keep the paddle under the ball, so that walls are cleared."""
    return towards(state["paddle"], state["x"] + torch.where(state["y"] == 8, 0, state["dx"]))


def mostly_up(state, t):
    return torch.where(random_action(state, t) == DOWN, DOWN, UP)


def hunt(state, t):
    """Shoot all the time under the leftmost aliens, and sometimes move at random."""
    columns = torch.stack([(state["aliens"] >> x & 1).amax(-1) for x in range(10)], -1)
    action = towards(state["cannon"], columns.argmax(-1))
    action = torch.where((action == NOOP) | (state["reload"] == 0), FIRE, action)
    return torch.where(random_action(state, t + 9999, 4) == 0, random_action(state, t), action)


def dive(state, t):
    """Pick up divers, surface with six, and then, in every second environment, go up and down at the surface."""
    alive = state["diver_place"] != 0
    slot = torch.where(alive[:, 1], 1, 0).unsqueeze(-1)
    row, place = (state[name].gather(-1, slot)[:, 0] for name in ("diver_row", "diver_place"))
    x, y = (torch.log2(place.clamp(min=1).float()) / 2).int(), state["y"]
    action = torch.where(row < y, UP, torch.where(row > y, DOWN, towards(state["x"], x)))
    action = torch.where(alive.any(-1) & (random_action(state, t + 9999) != 0), action, random_action(state, t))
    action = torch.where((state["reload"] == 0) & (random_action(state, t + 999, 3) == 0), FIRE, action)
    action = torch.where((state["divers"] == 6) & (y > 0), UP, action)
    hops = (state["divers"] < 0) & (state["divers"] > -40) & (state["level"] < 19) & (torch.arange(N) % 2 == 0)
    return torch.where(hops, torch.where(y > 0, UP, DOWN), action)


SURVIVE = {"breakout": follow_ball, "freeway": mostly_up, "space_invaders": hunt, "seaquest": dive}


def check(name, state, references):
    """Compare the observations and all fields of the games."""
    for obs, mine, reference in zip(state["obs"], fields_of(name, state), references, strict=True):
        assert torch.equal(obs, image(reference))
        theirs = reference.fields()
        assert mine == theirs, {k: (mine[k], theirs[k]) for k in theirs if mine[k] != theirs[k]}


def compare(name, env, policy, steps, seed, ramping, endless):
    """Step ecrl's games and the package's, and return the rewards and the last state of each step.

    With `endless`, the games go on after their end, so that late situations occur.
    """
    env = env if endless else auto_reset(env)
    state, history, rewards = env.reset(rng.split(rng.key(seed), N)), [], []
    references = [Reference(name, one, ramping) for one in state.unbind(0)]
    check(name, state, references)
    for t in range(steps):
        action = policy(state, t)
        noise = env.draw(rng.split(rng.fold_in(rng.key(seed), t), N))
        after = env.step(state, action, noise)
        draws = (noise if endless else noise["step"]).unbind(0)
        results = [r.step(int(a), d) for r, a, d in zip(references, action, draws, strict=True)]
        assert after["reward"].tolist() == [reward for reward, _ in results]
        assert after["terminated"].tolist() == [terminal for _, terminal in results]
        for i, (reference, (_, terminal)) in enumerate(zip(references, results, strict=True)):
            if endless:
                reference.game.terminal = False
            elif terminal:
                assert torch.equal(after["final_obs"][i], image(reference))
                reference.reset(noise["start"][i])
        check(name, after, references)
        state = after
        history.append(state)
        rewards.append(after["reward"])
    return torch.stack(rewards), history


@pytest.mark.parametrize("sticky", [0.0, 0.1])
@pytest.mark.parametrize("name", GAMES)
def test_random_play(name, sticky):
    env = game(name, sticky)
    _, history = compare(name, env, random_action, 250, seed=1, ramping=True, endless=False)
    ended = torch.stack([state["terminated"] for state in history])
    assert ended.any() == (name != "freeway")


@pytest.mark.slow
@pytest.mark.parametrize("ramping", [True, False])
@pytest.mark.parametrize("name", GAMES)
def test_long_play(name, ramping):
    """Reach walls that are broken, waves that are cleared, six divers, and the highest level."""
    if name not in HAS_RAMP and not ramping:
        pytest.skip("the game has no ramp")
    env, policy = game(name, 0.1, ramping), SURVIVE.get(name, random_action)
    steps = {"freeway": 2520, "seaquest": 2500, "space_invaders": 2000}.get(name, 1500)
    endless = name in HAS_RAMP
    rewards, history = compare(name, env, policy, steps, seed=2, ramping=ramping, endless=endless)
    last = history[-1]
    match name:
        case "breakout":
            assert rewards.sum(0).max() > 60
        case "freeway":
            assert [state["terminated"].any() for state in history].index(True) == 2500 and rewards.sum() > 200
        case "asterix":
            assert (last["level"] == (9 if ramping else 0)).all() and rewards.sum() > 100
        case "space_invaders":
            assert rewards.sum(0).max() > 24 * 3 and last["level"].max() == (6 if ramping else 0)
        case "seaquest":
            enemies = torch.stack([(state["enemy_place"] != 0).sum(-1) for state in history])
            divers = torch.stack([state["divers"] for state in history])
            assert rewards.max() > 2 and last["level"].max() == (19 if ramping else 0)
            assert divers.max() == 6 and divers.min() < -1 and enemies.max() >= (20 if ramping else 3)
