"""The contract of every policy: actor_only, actor_critic, squashed policies, and modules of users."""

from math import log, pi

import pytest
import torch
from support import custom_modules  # noqa: F401  registers them
from support.checks import assert_no_retrace, close
from support.small_runs import steps_of
from tensordict import TensorDict

from ecrl import rng
from ecrl.errors import ConfigError
from ecrl.policies import flatten, make_policy, stacked_space, with_frame_stack
from ecrl.policies.core import example, one_batch
from ecrl.policies.heads import LOG_STD_MAX, LOG_STD_MIN
from ecrl.spaces import Discrete, MultiDiscrete, box, dict_space, flat_dim

EMPTY = TensorDict({}, [])
NET = {"type": "mlp", "network_cfg": {"hidden_sizes": [8], "activation": "tanh"}}
OBS = box(-1.0, 1.0, 3)
ACTIONS = {
    "box": box(-2.0, 2.0, 2),
    "matrix": box(-1.0, 1.0, 2, 3),
    "scalar": box(-1.0, 1.0),
    "discrete": Discrete(4),
    "multi": MultiDiscrete((2, 3)),
}
CHOICES = ["discrete", "multi"]
MASKED = dict_space({"x": box(-1.0, 1.0, 3), "pose": box(-1.0, 1.0, 2, 2), "action_mask": MultiDiscrete((2,) * 5)})


BLOCKS = {
    "actor_critic": {"name": "actor_critic", "actor": NET, "critic": NET},
    "actor_only": {"name": "actor_only", "actor": NET},
    "squashed": {"name": "actor_critic", "actor": NET, "critic": NET, "squash": True},
    **{name: {"name": name} for name in ("trunk", "trunk_squashed", "own_std", "acts", "acts_on_noise")},
}
SQUASHED = {"squashed", "trunk_squashed"}
COMPILED = [  # each with the actions that its code differs for
    *(("actor_critic", kind) for kind in ACTIONS),
    *(("actor_only", kind) for kind in ("box", "discrete")),
    *(("trunk", kind) for kind in ("matrix", "multi")),
    *(("acts_on_noise", kind) for kind in ("box", "discrete")),
    ("trunk_squashed", "matrix"),
    ("own_std", "matrix"),
]
DRAWING = [("acts", "box"), ("acts", "discrete")]
ALL = [*COMPILED, *DRAWING, ("squashed", "matrix")]


def _policy_of(name, action_space, obs_space=OBS, **settings):
    return make_policy(BLOCKS[name] | settings, obs_space, action_space)


def _policy(action_space, obs_space=OBS, **settings):
    return _policy_of("actor_critic", action_space, obs_space, **settings)


def _obs(n=6):
    return torch.linspace(-1.0, 1.0, 3 * n).reshape(n, 3)


def _masked_obs(mask):
    n = len(mask)
    return TensorDict({"x": _obs(n), "pose": torch.linspace(0, 1, 4 * n).reshape(n, 2, 2), "action_mask": mask}, [n])


def _noise(policy, n=6, seed=0):
    return policy.draw(rng.split(rng.key(seed), n))


def _as_action(action):
    """An action in the precision that an environment's rollout keeps."""
    return action.float() if action.is_floating_point() else action


def _assert_agree(call, name, kind):
    space, n = ACTIONS[kind], 8  # vectors of 8 floats: eager torch rounds what is left over differently
    policy = _policy_of(name, space)
    params = policy.init(rng.key(1))
    carry, out = call(policy.act)(params, EMPTY, _obs(n), _noise(policy, n))
    tail = getattr(space, "shape", (2,) if kind == "multi" else ())
    assert out["action"].shape == (n, *tail) and out["sample_log_prob"].shape == (n,)
    assert set(out.keys()) == {"action", "sample_log_prob"}
    assert out.batch_size == torch.Size([n]) and carry.is_empty()
    log_prob, entropy = call(policy.evaluate)(params, EMPTY, steps_of(_obs(n), _as_action(out["action"])))
    close(log_prob, out["sample_log_prob"].detach(), tol=1e-4)
    assert entropy.shape == (n,) and out["action"].reshape(n, -1).unique(dim=0).shape[0] > 1
    if kind in CHOICES:
        assert not out["action"].is_floating_point() and (entropy <= log(6) + 1e-6).all() and (entropy > 0).all()
    elif name in SQUASHED:  # a bounded density has less entropy than the uniform one over (-1, 1)^A
        assert (entropy < flat_dim(space) * log(2.0)).all()
    elif name != "own_std":  # log std -0.5 on every axis: entropy = A (log(2 pi e) / 2 - 1 / 2) = A log(2 pi) / 2
        start = 0.5 if name in BLOCKS.keys() - {"actor_critic", "actor_only"} else 0.0
        close(entropy, torch.full((n,), flat_dim(space) * (0.5 * log(2.0 * pi) + 0.5 - start)))


@pytest.mark.parametrize(("name", "kind"), COMPILED)
def test_act_and_evaluate_agree(variant, name, kind):
    _assert_agree(variant, name, kind)


@pytest.mark.parametrize(("name", "kind"), DRAWING)
def test_act_and_evaluate_agree_where_a_module_draws(name, kind):
    _assert_agree(lambda fn: fn, name, kind)


@pytest.mark.parametrize(("name", "kind"), ALL)
def test_deterministic_action_is_the_mode(name, kind):
    policy = _policy_of(name, ACTIONS[kind])
    params = policy.init(rng.key(1))
    _, out = policy.act(params, EMPTY, _obs(), None)
    mode, best = out["action"], out["sample_log_prob"]
    if name not in SQUASHED:  # where the density of the squashed action is highest, tanh(mean) is not
        for seed in range(20):  # no sample is more probable
            _, sampled = policy.act(params, EMPTY, _obs(), _noise(policy, seed=seed))
            assert (sampled["sample_log_prob"] <= best + 1e-5).all()
    close(policy.evaluate(params, EMPTY, steps_of(_obs(), mode))[0], best.detach(), tol=1e-4)
    assert torch.equal(policy.act(params, EMPTY, _obs(), None)[1]["action"], mode)


FOLLOWING = [*(("actor_critic", kind) for kind in ("box", "discrete", "multi")), *DRAWING[:2], *COMPILED[9:11]]


@pytest.mark.parametrize(("name", "kind"), [case for case in FOLLOWING if case[1] == "box"])
def test_box_actions_have_the_mean_and_std_of_the_distribution(name, kind):
    policy = _policy_of(name, ACTIONS[kind])
    params, obs = policy.init(rng.key(2)), torch.full((20_000, 3), 0.7)
    _, out = policy.act(params, EMPTY, obs, _noise(policy, 20_000))
    mean = policy.act(params, EMPTY, obs[:1], None)[1]["action"]
    std = torch.full((2,), 0.0 if name == "actor_critic" else -0.5).exp()
    close(out["action"].mean(0), mean[0].detach(), tol=0.06)
    close(out["action"].std(0, correction=0), std, tol=0.05)


@pytest.mark.parametrize(("name", "kind"), [case for case in FOLLOWING if case[1] != "box"])
def test_discrete_actions_follow_the_distribution(name, kind):
    # 20,000 samples of one state against exp(log_prob) of every choice.
    policy = _policy_of(name, ACTIONS[kind])
    params, obs = policy.init(rng.key(2)), torch.full((20_000, 3), 0.7)
    _, out = policy.act(params, EMPTY, obs, _noise(policy, 20_000))
    flat = out["action"] if kind == "discrete" else out["action"] @ torch.tensor([3, 1])
    choice = torch.arange(4 if kind == "discrete" else 6)
    action = choice if kind == "discrete" else torch.stack((choice // 3, choice % 3), -1)
    log_prob, _ = policy.evaluate(params, EMPTY, steps_of(obs[: len(choice)], action))
    close(log_prob.exp().sum(), 1.0)
    close(torch.bincount(flat, minlength=len(choice)) / 20_000, log_prob.exp().detach(), tol=0.02)


@pytest.mark.parametrize(("name", "kind"), [("actor_critic", "box"), ("trunk", "multi"), ("acts_on_noise", "box")])
def test_value_has_a_number_per_observation(variant, name, kind):
    policy = _policy_of(name, ACTIONS[kind])
    params = policy.init(rng.key(1))
    value = variant(policy.value)(params, EMPTY, _obs())
    assert value.shape == (6,) and value.unique().numel() == 6
    rows = torch.stack([policy.value(params, EMPTY, one) for one in _obs()])
    close(value, rows.detach())


@pytest.mark.parametrize("kind", ACTIONS)
def test_value_depends_only_on_the_critic(kind):
    policy = _policy(ACTIONS[kind])
    params, other = (policy.init(rng.key(seed)) for seed in (1, 2))
    value = policy.value(params, EMPTY, _obs())
    swapped = params.clone().update({"actor": other["actor"]})
    assert torch.equal(policy.value(swapped, EMPTY, _obs()), value)
    changed = params.clone().update({"critic": other["critic"]})
    assert (policy.value(changed, EMPTY, _obs()) - value).abs().max() > 1e-3


def test_actor_only_has_no_critic_and_the_actor_of_actor_critic():
    one, both = _policy_of("actor_only", ACTIONS["box"]), _policy(ACTIONS["box"])
    assert one.value is None and both.value is not None
    params, more = one.init(rng.key(1)), both.init(rng.key(1))
    assert sorted(params.keys()) == ["actor", "log_std"]
    noise = _noise(one)
    assert torch.equal(
        one.act(params, EMPTY, _obs(), noise)[1]["action"], both.act(more, EMPTY, _obs(), noise)[1]["action"]
    )


@pytest.mark.parametrize(("name", "kind"), ALL)
def test_batch_axes_are_free(name, kind):
    """Results of `[3, 2]` observations equal results of `[6]` and of single observations."""
    policy = _policy_of(name, ACTIONS[kind])
    params, noise = policy.init(rng.key(1)), _noise(policy)
    flat = policy.act(params, EMPTY, _obs(), noise)[1]
    square = policy.act(params, EMPTY, _obs().reshape(3, 2, 3), noise.reshape(3, 2, *noise.shape[1:]))[1]
    assert square.batch_size == (3, 2) and torch.equal(square["action"].reshape(flat["action"].shape), flat["action"])
    close(square["sample_log_prob"].reshape(6), flat["sample_log_prob"].detach())
    judged = policy.evaluate(params, EMPTY, steps_of(_obs().reshape(3, 2, 3), square["action"]))
    close(judged[0].reshape(6), flat["sample_log_prob"].detach(), tol=1e-4)
    assert judged[1].shape == (3, 2)
    if policy.value is not None:
        assert policy.value(params, EMPTY, _obs().reshape(3, 2, 3)).shape == (3, 2)
    if policy.compiles:
        single = policy.act(params, EMPTY, _obs()[4], noise[4])[1]
        close(single["action"], flat["action"][4].detach())


@pytest.mark.parametrize(("name", "kind"), ALL)
def test_gradients_reach_every_weight_and_are_those_of_autograd(name, kind):
    policy = _policy_of(name, ACTIONS[kind])
    params = policy.init(rng.key(1))
    action = policy.act(params, EMPTY, _obs(), _noise(policy))[1]["action"].detach()

    def total(params):
        log_prob, entropy = policy.evaluate(params, EMPTY, steps_of(_obs(), action))
        value = 0.0 if policy.value is None else policy.value(params, EMPTY, _obs()).sum()
        return log_prob.sum() + entropy.sum() + value

    grads = torch.func.grad(total)(params)
    leaves = params.clone().apply(lambda w: w.requires_grad_())
    total(leaves).backward()
    for path, grad in grads.items(True, True):
        close(grad, leaves[path].grad)
        assert grad.abs().sum() > 0, path


def test_actor_gradient_reaches_no_critic():
    policy = _policy(ACTIONS["box"])
    params = policy.init(rng.key(1)).apply(lambda w: w.requires_grad_())
    log_prob, entropy = policy.evaluate(params, EMPTY, steps_of(_obs(), torch.ones(6, 2)))
    (log_prob.sum() + entropy.sum()).backward()
    assert all(w.grad is not None for w in params["actor"].values()) and params["log_std"].grad is not None
    assert all(w.grad is None for w in params["critic"].values())


@pytest.mark.parametrize(("outside", "bound"), [(9.0, LOG_STD_MAX), (-9.0, LOG_STD_MIN)])
def test_log_std_is_bounded_and_comes_back(variant, outside, bound):
    policy, one = _policy(ACTIONS["box"]), torch.ones(2)
    params = policy.init(rng.key(1))
    params["log_std"] = torch.full((2,), outside)
    _, entropy = variant(policy.evaluate)(params, EMPTY, steps_of(_obs(), torch.zeros(6, 2)))
    close(entropy, torch.full((6,), 2 * bound + log(2.0 * pi) + 1.0))
    noise, mean = torch.ones(6, 2), policy.act(params, EMPTY, _obs(), None)[1]["action"]
    close(policy.act(params, EMPTY, _obs(), noise)[1]["action"] - mean, (bound * one).exp().expand(6, 2), tol=1e-4)
    # The entropy grows by one per unit of log std even out here, so a step against it leads back inside.
    params["log_std"].requires_grad_()
    policy.evaluate(params, EMPTY, steps_of(_obs(), torch.zeros(6, 2)))[1].mean().backward()
    close(params["log_std"].grad, one)


@pytest.mark.parametrize("start", [-1.5, 0.0, 2.0])
def test_initial_log_std(start):
    params = _policy(ACTIONS["matrix"], initial_log_std=start).init(rng.key(0))
    close(params["log_std"], torch.full((6,), start), tol=0.0)
    assert "log_std" not in _policy(ACTIONS["discrete"], initial_log_std=start).init(rng.key(0))


@pytest.mark.parametrize(
    ("name", "kind"), [("actor_critic", "discrete"), ("actor_critic", "multi"), ("trunk", "discrete")]
)
def test_masked_actions_are_never_chosen(variant, name, kind):
    mask = torch.tensor([[1, 0, 1, 0, 1], [0, 1, 0, 0, 1], [1, 0, 0, 1, 0]]).bool().repeat(100, 1)
    space = Discrete(5) if kind == "discrete" else MultiDiscrete((2, 3))
    policy = _policy_of(name, space, MASKED)
    params, obs = policy.init(rng.key(1)), _masked_obs(mask)
    _, out = variant(policy.act)(params, EMPTY, obs, _noise(policy, 300))
    action = out["action"] if kind == "discrete" else out["action"] + torch.tensor([0, 2])
    assert mask.gather(1, action.reshape(300, -1)).all()
    assert len(action[0::3].unique()) == 3  # every allowed one is
    _, best = variant(policy.act)(params, EMPTY, obs, None)
    index = best["action"] if kind == "discrete" else best["action"] + torch.tensor([0, 2])
    assert mask.gather(1, index.reshape(300, -1)).all()
    log_prob, entropy = variant(policy.evaluate)(params, EMPTY, steps_of(obs, out["action"]))
    close(log_prob, out["sample_log_prob"].detach(), tol=1e-4)
    assert entropy.isfinite().all()
    if kind == "multi":  # the second and third row leave one choice per part
        close(entropy[1::3], torch.zeros(100))


def test_the_mask_is_no_feature():
    policy = _policy(Discrete(5), MASKED)
    params = policy.init(rng.key(1))
    assert params["actor", "0.weight"].shape == (8, 7)  # 3 of x and 4 of pose
    ones, some = torch.ones(6, 5).bool(), torch.tensor([1, 0, 1, 1, 1]).bool().expand(6, 5)
    assert torch.equal(*(policy.value(params, EMPTY, _masked_obs(mask)) for mask in (some, ones)))


FLAT = [  # space, observation, features
    (box(-1.0, 1.0, 2, 2), torch.tensor([[[1.0, 2.0], [3.0, 4.0]]]), [[1.0, 2.0, 3.0, 4.0]]),
    (box(-1.0, 1.0), torch.tensor([5.0, 6.0]), [[5.0], [6.0]]),
    (Discrete(3), torch.tensor([2, 0]), [[0.0, 0.0, 1.0], [1.0, 0.0, 0.0]]),
    (MultiDiscrete((2, 3)), torch.tensor([[1, 2]]), [[0.0, 1.0, 0.0, 0.0, 1.0]]),
    (
        dict_space({"z": Discrete(2), "a": box(0.0, 1.0, 2), "action_mask": MultiDiscrete((2,))}),
        TensorDict(
            {"z": torch.tensor([1]), "a": torch.tensor([[7.0, 8.0]]), "action_mask": torch.tensor([[True]])}, [1]
        ),
        [[7.0, 8.0, 0.0, 1.0]],
    ),
]


@pytest.mark.parametrize(("space", "obs", "features"), FLAT)
def test_flatten_by_hand(variant, space, obs, features):
    close(variant(flatten)(obs, space), features)


@pytest.mark.parametrize(("space", "obs", "features"), FLAT)
def test_one_batch_keeps_every_element(space, obs, features):
    stacked = torch.stack([torch.stack([obs, obs])] * 3)
    rows, batch = one_batch(stacked, space)
    assert batch == (3, 2, len(features)) and rows.shape[0] == 6 * len(features)
    close(flatten(rows, space), torch.tensor(features * 6))
    assert flatten(example(space), space).shape == (2, flat_dim(space))


@pytest.mark.parametrize(("name", "kind"), ALL)
def test_init_is_a_function_of_the_key(name, kind):
    policy, before = _policy_of(name, ACTIONS[kind]), torch.get_rng_state()
    first, again, other = (policy.init(rng.key(seed)) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(a, b) for a, b in zip(first.values(True, True), again.values(True, True), strict=True))
    root, weight = ("actor", "0.weight") if "actor" in first else ("module", "body.0.weight")
    assert not torch.equal(first[root, weight], other[root, weight])
    if "critic" in first:
        assert not torch.equal(first["actor", "0.weight"], first["critic", "0.weight"])


@pytest.mark.parametrize(
    ("name", "kind"),
    [("actor_critic", "matrix"), ("actor_critic", "multi"), ("trunk", "box"), ("acts_on_noise", "box")],
)
def test_new_values_do_not_retrace(name, kind):
    policy = _policy_of(name, ACTIONS[kind])
    calls = [(policy.init(rng.key(s)), EMPTY, _obs() * s, _noise(policy, seed=s)) for s in (1, 2)]
    assert_no_retrace(policy.act, *calls)
    assert_no_retrace(policy.value, *[call[:3] for call in calls])
    actions = [policy.act(*call)[1]["action"] for call in calls]
    steps = [steps_of(call[2], action) for call, action in zip(calls, actions, strict=True)]
    assert_no_retrace(policy.evaluate, *[(*c[:2], s) for c, s in zip(calls, steps, strict=True)])


@pytest.mark.parametrize(("kind", "width"), [("box", 2), ("matrix", 6), ("scalar", 1), ("discrete", 4), ("multi", 5)])
def test_action_dim(kind, width):
    assert _policy(ACTIONS[kind], action_dim=width) is _policy(ACTIONS[kind], action_dim=width)
    own = "acts" if kind in ("box", "discrete") else "trunk"
    with pytest.raises(ConfigError, match=rf"^policy\.action_dim: {width + 1} does not match"):
        _policy_of(own, ACTIONS[kind], action_dim=width + 1)
    message = (
        rf"^policy\.action_dim: {width + 1} does not match the environment's {width} .*use {width} or leave it out"
    )
    with pytest.raises(ConfigError, match=message):
        _policy(ACTIONS[kind], action_dim=width + 1)


def test_equal_settings_give_equal_policies():
    assert _policy(Discrete(4)) == _policy(Discrete(4), initial_log_std=0.0)
    assert _policy(Discrete(4)) != _policy(Discrete(5))
    first, second = _policy(ACTIONS["box"]), _policy(ACTIONS["box"], initial_log_std=1.0)
    assert first == second and first.init is not second.init, "init alone reads this setting, and is not compared"


def test_refused_spaces_and_settings():
    for name in ("actor_critic", "trunk", "acts"):
        with pytest.raises(ConfigError, match=r"actions of Dict.* are not supported; use Box, Discrete"):
            _policy_of(name, MASKED)
    for name in ("actor_critic", "trunk"):
        with pytest.raises(ConfigError, match=r"action_mask.*needs Discrete or MultiDiscrete actions, got Box"):
            _policy_of(name, ACTIONS["box"], MASKED)
    with pytest.raises(ConfigError, match="policy: critic: expected an object, got null"):
        _policy(Discrete(2), critic=None)
    with pytest.raises(ConfigError, match=r"policy: name: missing; known: .*actor_critic, actor_only"):
        make_policy({"actor": NET}, OBS, Discrete(2))


def test_a_mask_of_the_wrong_width_is_named():
    policy = _policy(Discrete(4), MASKED)
    with pytest.raises(ValueError, match="action_mask has shape"):
        policy.act(policy.init(rng.key(0)), EMPTY, _masked_obs(torch.ones(6, 5).bool()), None)


def test_equal_policies_keep_their_own_initial_weights_with_a_frame_stack():
    space = box(-1.0, 1.0, 2)
    for std in (0.0, -2.0):
        cfg = {"name": "actor_only", "initial_log_std": std}
        policy = with_frame_stack(make_policy(cfg, stacked_space(space, 2), box(-1.0, 1.0, 1)), space, 2)
        assert policy == make_policy(cfg, space, box(-1.0, 1.0, 1), 2)
        close(policy.init(rng.key(0))["log_std"], [std])
