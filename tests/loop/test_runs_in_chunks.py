"""Runs with `env.action_chunk`: equal to chunks written by hand, with returns, logs and evaluations of single steps."""

import pytest
import torch
from support.checks import close
from support.chunks import chunked as by_hand
from support.long_cases import long_except
from support.off_policy_agents import agent
from support.small_runs import NET, PUSH, TILT, last_state, same, small

import ecrl
from ecrl import rng
from ecrl.algorithms.core import collect
from ecrl.envs import auto_reset, chunked, clip_action, make_env
from ecrl.envs.point_mass import PointMassConfig
from ecrl.errors import ConfigError
from ecrl.kernels import compute_gae, compute_n_step_returns, compute_td_lambda_returns, compute_vtrace
from ecrl.loop.build import build, with_eval_events
from ecrl.loop.iteration import init_state, make_iteration, train_iter
from ecrl.policies import policy_params
from ecrl.registry import register_env
from ecrl.run.evaluation import _first_episodes, eval_steps, in_single_steps

ACTOR = {"policy": {"name": "actor_only", "actor": NET}}
GRPO = {"name": "grpo", "cfg": {"group_size": 2, "n_epochs": 1, "batch_size": 16, "gamma": 0.9, "kl_coef": 0.0}}
APG = {"name": "apg", "cfg": {"gamma": 0.9, "learning_rate": 0.01}}
REPLAY = {"capacity": 64, "batch_size": 16, "learning_starts": 8, "n_step": 2, "gamma": 0.9}
TD3 = {
    "policy": {"name": "deterministic_actor_critic", "actor": NET, "critic": NET},
    "algorithm": {"name": "td3", "cfg": REPLAY},
}
SAC = {
    "policy": {"name": "squashed_actor_critic", "actor": NET, "critic": NET},
    "algorithm": {"name": "sac", "cfg": REPLAY},
}
CHANGES = {"ppo": {}, "grpo": ACTOR | {"algorithm": GRPO}, "apg": ACTOR | {"algorithm": APG}, "td3": TD3, "sac": SAC}
ALGORITHMS = {name: {"trainer.iterations": 3} | changes for name, changes in CHANGES.items()}
STEPS = {"env": {"name": "chunks", "cfg": {"chunk": 1, "reports": False}, "action_chunk": 3}}


def chunks(**changes):
    """A small run on chunks of three actions on the pendulum, whose episodes have 7 steps."""
    env = {"name": "pendulum", "cfg": {"max_episode_steps": 7}, "action_chunk": 3}
    return small(**{"env": env, "algorithm.cfg.gamma": 0.9} | changes)


@pytest.mark.parametrize(
    ("name", "end"),
    [
        *((name, "terminated") for name in ALGORITHMS),
        *((name, "truncated") for name in ("ppo", "grpo", "apg")),
        *(pytest.param(name, "truncated", marks=pytest.mark.long) for name in ("td3", "sac")),
    ],
)
def test_a_run_equals_one_with_chunks_written_by_hand(name, end):
    """The environment `chunks` of the tests has its own loop over the steps of an action."""
    whole = by_hand(**ALGORITHMS[name], **{"env.cfg": {"gamma": 0.9, "end": end}})
    steps = by_hand(**ALGORITHMS[name] | STEPS, **{"env.cfg.end": end})
    one, other = last_state(whole), last_state(steps)
    assert int(one["sample_step"]) == int(other["sample_step"]) < 3 * int(one["decision_step"])
    for path, leaf in one["params"].items(True, True):
        close(other["params"][path], leaf, tol=1e-5)
    assert one["episode", "finished_length"].tolist() == other["episode", "finished_length"].tolist()


def _single_steps(rollout, env, step_rewards, gamma, last):
    """Returns of the decisions of one environment, in float64, from the rewards of its single steps."""
    rewards, starts = [], []
    for t in range(rollout.shape[1] - 1):
        starts.append(len(rewards))
        for i in range(int(rollout["executed"][env, t])):
            ends = i == int(rollout["executed"][env, t]) - 1
            rewards.append((step_rewards[env][t][i], t if ends else None))
    after, returns = last, [0.0] * len(rewards)
    for j in reversed(range(len(rewards))):
        reward, t = rewards[j]
        if t is not None and rollout["truncated"][env, t]:
            after = float(rollout["final_value"][env, t])
        elif t is not None and rollout["terminated"][env, t]:
            after = 0.0
        after = returns[j] = reward + gamma * after
    return [returns[j] for j in starts]


def _step_rewards(rollout):
    """Rewards of the single steps of a rollout on the pendulum, in Python floats: `rewards[env][t]` is a list."""
    rewards = [[[] for _ in range(rollout.shape[1] - 1)] for _ in range(len(rollout))]
    for env in range(len(rollout)):
        for t in range(rollout.shape[1] - 1):
            obs = rollout["obs"][env, t]
            angle = torch.atan2(obs[1], obs[0])
            for action in rollout["action"][env, t][: int(rollout["executed"][env, t])]:
                force = float(action.clamp(-2.0, 2.0))
                angle_now = float(torch.remainder(angle + torch.pi, 2 * torch.pi) - torch.pi)
                rewards[env][t].append(-(angle_now**2 + 0.1 * float(obs[2]) ** 2 + 0.001 * force**2))
                speed = float((obs[2] + 0.05 * (15.0 * torch.sin(angle) + 3.0 * force)).clamp(-8.0, 8.0))
                angle = angle + 0.05 * speed
                obs = torch.tensor([torch.cos(angle), torch.sin(angle), speed])
    return rewards


def test_returns_are_those_of_the_single_steps():
    """The steps of the pendulum are computed here again, in Python, from its equations."""
    cfg = chunks(**{"trainer.buffer_size": 12})
    rollout = collect(build(cfg), last_state(cfg))[1]["steps"]
    assert rollout["action"].shape == (4, 13, 3, 1) and set(rollout["executed"][:, :-1].unique().tolist()) == {1, 3}
    rewards = _step_rewards(rollout)
    for env in range(4):
        for t in range(12):
            parts = rewards[env][t]
            close(rollout["info", "reward_sum"][env, t], sum(parts), tol=1e-4)
            close(rollout["reward"][env, t], sum(0.9**i * r for i, r in enumerate(parts)), tol=1e-4)
    lambda_1 = compute_gae(rollout, 0.9, 1.0).value_target
    free = {"clip_rho": 1.0, "clip_c": 1.0, "clip_pg_rho": 1.0}
    on_policy = compute_vtrace(
        rollout, rollout["sample_log_prob"][:, :-1], gamma=0.9, gae_lambda=1.0, **free
    ).value_target
    targets = (lambda_1, on_policy, compute_td_lambda_returns(rollout, 0.9, 1.0))
    targets += (compute_n_step_returns(rollout, 0.9, 12),)
    for env in range(4):
        expected = _single_steps(rollout, env, rewards, 0.9, float(rollout["value"][env, -1]))
        for target in targets:
            close(target[env], expected, tol=1e-3)


@pytest.mark.parametrize("trace", [0.0, 0.5, 0.95])
def test_gae_of_chunks_equals_a_loop_in_float64(trace):
    cfg = chunks(**{"trainer.buffer_size": 12})
    rollout = collect(build(cfg), last_state(cfg))[1]["steps"]
    x = {name: rollout[name].double().tolist() for name in ("reward", "value", "final_value", "executed")}
    for env in range(4):
        after, advantage = 0.0, [0.0] * 12
        for t in reversed(range(12)):
            discount, cut = 0.9 ** x["executed"][env][t], bool(rollout["done"][env, t])
            reached = x["final_value"][env][t] if cut else x["value"][env][t + 1]  # the pendulum never terminates
            delta = x["reward"][env][t] + discount * reached - x["value"][env][t]
            after = advantage[t] = delta + (0.0 if cut else discount * trace * after)
        close(compute_gae(rollout, 0.9, trace).advantage[env], advantage, tol=1e-4)


def test_logs_and_evaluations_have_rewards_without_discounts():
    """Every step of CartPole pays 1, so that the return of an episode is its length."""
    cfg = small(**{"env.action_chunk": 3, "algorithm.cfg.gamma": 0.5})
    *_, record, last = train_iter(init_state(cfg), cfg)
    logs = {name: float(value) for name, value in record["logs"].items()}
    assert logs["episode_reward_avg_100"] == logs["episode_length_avg_100"] > 4.0
    evaluated = ecrl.evaluate(last["state"], cfg, num_episodes=4)
    assert evaluated["eval/avg_reward"] == evaluated["eval/avg_length"] > 4.0
    assert last["state"]["env", "reward"].max() == 1.75


def test_logs_of_a_replay_have_rewards_without_discounts():
    """With a discount of 0, learning uses only the first of the three rewards of a chunk."""
    returns = []
    for gamma in (0.0, 1.0):
        cfg = agent("td3", **{"env.action_chunk": 3, "algorithm.cfg.gamma": gamma})
        record = next(iter(train_iter(init_state(cfg), cfg)))  # in the first iteration, the policy is the initial one
        returns.append(float(record["logs"]["episode_reward_avg_100"]))
    assert returns[0] == returns[1] < -1.0


def test_the_discount_is_that_of_the_algorithm():
    envs = {gamma: build(chunks(**{"algorithm.cfg.gamma": gamma})).env for gamma in (0.5, 0.9)}
    keys, action = torch.arange(2), torch.ones(2, 3, 1)
    for gamma, env in envs.items():
        base = make_env({"name": "pendulum", "cfg": {"max_episode_steps": 7}})
        own = auto_reset(clip_action(chunked(base, 3, gamma=gamma)))
        one, other = (e.step(e.reset(keys), action, e.draw(keys)) for e in (env, own))
        assert same(one, other)
    assert build(chunks()) == build(chunks(**{"trainer.seed": 9}))
    one = build(small(**{"env.action_chunk": 1}))
    assert one == build(small()) and one == build(small(**{"algorithm.cfg.gamma": 0.5}))


def test_another_gamma_than_that_of_the_state_is_refused():
    cfg = small(**{"env.action_chunk": 3, "algorithm.cfg.gamma": 0.9})
    state = init_state(cfg)
    with pytest.raises(ConfigError, match=r"^algorithm.cfg.gamma: 0.5, but the state has 0.9, and steps inside"):
        next(iter(train_iter(state, cfg.replace(**{"algorithm.cfg.gamma": 0.5}))))
    next(iter(train_iter(state, cfg)))


def test_learning_starts_is_compared_with_the_most_environment_steps():
    cfg = agent("td3", **{"env.action_chunk": 3})
    actions = cfg.trainer.iterations * cfg.trainer.buffer_size * cfg.trainer.num_envs
    before_last = 3 * actions - 3 * actions // cfg.trainer.iterations
    build(cfg.replace(**{"algorithm.cfg.learning_starts": before_last}))
    with pytest.raises(ConfigError, match=r"^algorithm.cfg.learning_starts: "):
        build(cfg.replace(**{"algorithm.cfg.learning_starts": before_last + 1}))


@pytest.mark.parametrize("name", ["ppo", "grpo", "apg"])
@pytest.mark.usefixtures("restored_registry")
def test_chunks_of_one_action_learn_the_same(name):
    @register_env("single_points")
    def points(cfg: PointMassConfig):
        """Points whose actions are chunks of one action."""
        return chunked(make_env({"name": "point_mass", "cfg": cfg.model_dump()}), 1, gamma=0.9)

    envs = ({"name": env, "cfg": {"max_episode_steps": 5}} for env in ("point_mass", "single_points"))
    one, other = (last_state(small(**ALGORITHMS[name] | {"env": env})) for env in envs)
    more = ("decision_step", ("env", "executed"), ("env", "info", "reward_sum"))
    assert same(other.exclude(*more), one) and int(one["sample_step"]) == int(other["decision_step"])


def test_a_resumed_run_has_the_same_bits(tmp_path):
    cfg = chunks()
    first = last_state(cfg.replace(**{"trainer.iterations": 2}))
    ecrl.save(tmp_path / "middle", first, cfg)
    state, loaded = ecrl.load(tmp_path / "middle")
    assert loaded.env.action_chunk == 3 and same(last_state(loaded, state), last_state(cfg))


@pytest.mark.parametrize("name", ["ppo", "td3"])
def test_vmapped_seeds_equal_single_ones(name):
    cfg = chunks() if name == "ppo" else agent("td3", **{"env.action_chunk": 3})
    iteration = make_iteration(cfg)
    states = [init_state(cfg.replace(**{"trainer.seed": seed})) for seed in range(2)]
    many = torch.stack([state.clone() for state in states])
    for _ in range(2):
        many, _ = torch.func.vmap(iteration, randomness="error")(many)
        states = [iteration(state)[0] for state in states]
    for seed, single in enumerate(states):
        for path, leaf in single.items(True, True):
            torch.testing.assert_close(many[seed][path], leaf, rtol=1e-5, atol=1e-5, equal_nan=True)


def test_algorithms_for_discrete_actions_refuse_chunks_of_them():
    cfg = agent("dqn", **{"env.action_chunk": 2})
    reason = r"needs Discrete actions, got .*; use another policy \(env\.action_chunk 2 makes each action a chunk of"
    with pytest.raises(ConfigError, match=f"^policy.name: q_network {reason}"):
        build(cfg)
    message = r"^env\.action_chunk: 2 for gymnasium, but the environment keeps part of its state .*; leave out"
    with pytest.raises(ConfigError, match=message):
        build(small(**{"env": {"name": "gymnasium:CartPole-v1", "action_chunk": 2}}))
    with pytest.raises(ConfigError, match=r"env\.action_chunk: must be at least 1, got 0"):
        small(**{"env.action_chunk": 0})


def test_a_policy_of_chunks_acts_in_single_steps():
    """CartPole draws only its starts, so the first episodes of both evaluations are the same."""
    cfg = small(**{"env.action_chunk": 3, "trainer.num_eval_envs": 8})
    state = last_state(cfg)
    run = with_eval_events(build(cfg), cfg)
    lengths = []
    for one in (run, in_single_steps(run, cfg)):
        rows = eval_steps(one, state, cfg, 8, [])
        lengths.append([length for _, length, *_ in _first_episodes((row for row, _ in rows), 8, 1)])
    assert lengths[0] == lengths[1] and len(set(lengths[0])) > 2
    assert in_single_steps(run, cfg.replace(**{"env.action_chunk": 1})) is run


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"policy": {"name": "recurrent", "actor": NET, "critic": NET, "cell": {"hidden_size": 4}}},
        {"env.frame_stack": 2},
    ],
)
def test_single_actions_are_those_of_the_chunk(changes):
    """The memory of the policy advances once per chunk, and a new episode starts with a new chunk."""
    cfg = chunks(**changes)
    run, state = build(cfg), init_state(cfg)
    single, params = in_single_steps(run, cfg).policy, policy_params(state)
    obs = rng.normal(rng.split(rng.key(0), 8 * 4).reshape(8, 4), (3,))
    carry, first = run.policy.init_carry(params, 4), single.init_carry(params, 4)
    memory = first
    for t in range(8):
        if t == 4:  # the episodes end after four steps, inside the second chunk
            carry, memory = run.policy.init_carry(params, 4), first
        if t in (0, 3, 4, 7):
            carry, chunk = run.policy.act(params, carry, obs[t], None)
            start = t
        memory, out = single.act(params, memory, obs[t], None)
        assert torch.equal(out["action"], chunk["action"][:, t - start])


@pytest.mark.slow
def test_a_policy_of_chunks_is_evaluated_on_gymnasium():
    cfg = small(**{"env.action_chunk": 3})
    logs = ecrl.evaluate(last_state(cfg), cfg, num_episodes=2, env="gymnasium:CartPole-v1")
    assert logs["eval/avg_reward"] == logs["eval/avg_length"] > 4.0


COMPILED = {
    "ppo": chunks(),
    "scaled rewards": chunks(**{"algorithm.cfg.normalize_reward": True}),
    "events": small(**{"env.action_chunk": 2, "trainer.events": {"train": {"push": PUSH, "tilt": TILT}}}),
    "apg": small(**ALGORITHMS["apg"] | {"env": {"name": "point_mass", "action_chunk": 3}}),
    "td3": agent("td3", **{"env.action_chunk": 3}),
    "discrete": small(**{"env.action_chunk": 2}),
    "task": small(**{"env": {"name": "ReachRL", "cfg": {"max_episode_steps": 7}, "action_chunk": 3}}),
}


@pytest.mark.slow
@pytest.mark.usefixtures("traced_or_compiled")
@pytest.mark.parametrize("name", long_except(("ppo", "discrete"), COMPILED))
def test_a_compiled_run_equals_an_eager_one(name):
    eager, compiled = (last_state(COMPILED[name].replace(**{"trainer.compile": form})) for form in ("off", "on"))
    assert int(eager["sample_step"]) == int(compiled["sample_step"]) > int(eager["decision_step"])
    for path, leaf in eager["params"].items(True, True):
        close(compiled["params"][path], leaf, tol=1e-4)
