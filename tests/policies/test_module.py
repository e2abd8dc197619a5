"""Modules as policies: what they must return, what they see, how they draw, that PPO trains them."""

import tempfile
from functools import partial

import pytest
import torch
from support.checks import assert_pure, close
from support.custom_modules import Acts, ActsOnNoise, OwnStd, Trunk
from support.small_runs import last_state, same, small, steps_of
from tensordict import TensorDict
from torch import nn
from torch.distributions import Distribution

from ecrl import rng
from ecrl.compile.jit import Form
from ecrl.config import PolicyConfig
from ecrl.errors import ConfigError
from ecrl.kernels import scan
from ecrl.loop.build import build, form_of
from ecrl.loop.iteration import init_state, make_iteration
from ecrl.policies import acting_params, make_policy, module_policy
from ecrl.run import checkpoint
from ecrl.run.export import export
from ecrl.spaces import Discrete, MultiDiscrete, box, dict_space

EMPTY = TensorDict({}, [])
OBS, BOX, CHOICE = box(-1.0, 1.0, 3), box(-2.0, 2.0, 2), Discrete(4)
NAMES = ["trunk", "acts", "acts_on_noise"]


def _cfg(**more):
    return PolicyConfig.model_construct(name="mine", **more)


def _policy(module, action_space=CHOICE, obs_space=OBS, bf16=False, **more):
    return module_policy(lambda: module(obs_space, action_space), _cfg(bf16=bf16), obs_space, action_space, **more)


def _config(name, **changes):
    return small(**{"policy": {"name": name}, **changes})


@pytest.mark.parametrize("name", NAMES)
def test_ppo_learns_the_probe_that_needs_actor_and_critic(name):
    """The action equal to the observation pays 1, the other -1: both are learnt, and V = 1."""
    learning = {"learning_rate": 0.02, "batch_size": 64, "n_epochs": 4, "ent_coef": 0.0}
    changes = {f"algorithm.cfg.{key}": value for key, value in learning.items()}
    changes |= {"env.name": "probe_match", "trainer.num_envs": 16, "trainer.buffer_size": 8, "trainer.iterations": 25}
    cfg = _config(name, **changes)
    policy, params, obs = build(cfg).policy, last_state(cfg)["params"], torch.tensor([[0.0], [1.0]])
    assert policy.act(params, EMPTY, obs, None)[1]["action"].tolist() == [0, 1]
    close(policy.value(params, EMPTY, obs), torch.ones(2), tol=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["trunk", "attends", "acts_on_noise"])
@pytest.mark.usefixtures("traced_or_compiled")
def test_compiled_and_eager_runs_agree(name, monkeypatch):
    monkeypatch.setattr(Distribution, "_validate_args", True)  # torch's default, which other libraries turn off
    first, second = (
        last_state(_config(name, **{"trainer.iterations": 2, "trainer.compile": mode}))["params"]
        for mode in ("on", "off")
    )
    for path, weight in first.items(True, True):
        close(weight, second[path], tol=1e-4)


def test_a_module_that_draws_random_numbers_is_eager_with_a_reason():
    with pytest.raises(ConfigError, match=r"trainer\.compile: on, but policy acts draws its own random num.*use auto"):
        init_state(_config("acts", **{"trainer.compile": "on"}))
    form = form_of(_config("acts", **{"trainer.compile": "auto"}))
    assert form.name == "eager" and "draws its own random numbers" in form.reason


@pytest.mark.parametrize("name", [*NAMES, "own_std", "trunk_squashed"])
def test_a_run_is_pure_seeded_and_round_trips(name, tmp_path):
    cfg = _config(name, **{"env.name": "pendulum", "trainer.iterations": 2, "policy.normalize_obs": True})
    before = torch.get_rng_state()
    state = init_state(cfg)
    after, _ = assert_pure(make_iteration(cfg), state)
    assert not same(after["params"], state["params"])
    assert same(make_iteration(cfg)(init_state(cfg))[0], after), "equal seeds, equal bits"
    checkpoint.save(tmp_path / "here", after.clone().lock_(), cfg)
    loaded, again = checkpoint.load(tmp_path / "here")
    assert again == cfg and same(loaded, after)
    assert same(last_state(cfg, loaded), last_state(cfg)), "resumed, equal bits"
    assert torch.equal(torch.get_rng_state(), before), "nothing of the caller's generator is used"


@pytest.mark.parametrize("name", NAMES)
def test_modules_can_be_exported(name):
    pytest.importorskip("onnx")
    cfg = _config(name, **{"policy.normalize_obs": True})
    state, obs = make_iteration(cfg)(init_state(cfg))[0], torch.linspace(-1.0, 1.0, 20).reshape(5, 4)
    with tempfile.TemporaryDirectory() as folder:
        export(state, cfg, folder)
        written = torch.export.load(f"{folder}/policy.pt2").module()(obs=obs)
    params = acting_params(state["params"], state["norm"])
    assert torch.equal(written, build(cfg).policy.act(params, EMPTY, obs, None)[1]["action"])


def test_weights_have_the_names_of_the_state_dict():
    params = _policy(Trunk, BOX).init(rng.key(0))
    module = Trunk(OBS, BOX)
    assert {*params["module"].keys(), "scale"} == {*module.state_dict()}
    module.load_state_dict(dict(params["module"].items()) | {"scale": module.scale})
    obs = torch.linspace(-1.0, 1.0, 12).reshape(4, 3)
    close(_policy(Trunk, BOX).value(params, EMPTY, obs), module(obs)[1].detach())


def test_a_log_std_that_depends_on_the_observation():
    policy = _policy(OwnStd, BOX)
    params = policy.init(rng.key(3))
    obs = torch.tensor([[-1.0, 0.3, 0.9], [1.0, 0.8, -0.5]])
    entropy = policy.evaluate(params, EMPTY, steps_of(obs, torch.zeros(2, 2)))[1]
    module = OwnStd(OBS, BOX)
    module.load_state_dict(dict(params["module"].items()), strict=False)
    expected = torch.distributions.Normal(torch.zeros(2, 2), module(obs)[2].exp()).entropy().sum(-1)
    close(entropy, expected.detach())
    assert (entropy[0] - entropy[1]).abs() > 0.01


def test_drawing_follows_the_keys_and_not_the_global_generator():
    policy = _policy(Acts, BOX)
    params, obs = policy.init(rng.key(0)), torch.zeros(5, 3)
    keys, others = (rng.split(rng.key(seed), 5) for seed in (1, 2))
    before = torch.get_rng_state()
    one, again, other = (policy.act(params, EMPTY, obs, k)[1]["action"] for k in (keys, keys, others))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(one, again) and not torch.equal(one, other)
    assert one.unique(dim=0).shape[0] == 5
    torch.manual_seed(3)
    assert torch.equal(policy.act(params, EMPTY, obs, keys)[1]["action"], one), "the caller's seed is not seen"


def test_modules_that_draw_run_eager_and_others_compiled(monkeypatch):
    monkeypatch.setattr("ecrl.loop.build.choose_form", lambda mode, device: Form("compiled", "as if", print, scan))
    assert [build(_config(name)).jit for name in NAMES] == [print, partial, print]
    assert [_policy(module).compiles for module in (Trunk, ActsOnNoise, Acts)] == [True, True, False]


def test_noise_is_that_of_the_keys_and_none_if_deterministic():
    calls = []

    class Listens(ActsOnNoise):
        def get_action(self, tensordict, deterministic=False, noise=None):
            calls.append((deterministic, noise))
            return super().get_action(tensordict, deterministic, noise)

    policy = _policy(Listens, CHOICE)
    params, keys = policy.init(rng.key(0)), rng.split(rng.key(1), 6)
    policy.act(params, EMPTY, torch.zeros(6, 3), policy.draw(keys))
    policy.act(params, EMPTY, torch.zeros(6, 3), None)
    (sampled, noise), (mode, none) = calls[-2:]
    assert (sampled, mode, none) == (False, True, None)
    assert torch.equal(noise, rng.gumbel(keys, (4,)))


class RecordsObservations(nn.Module):
    """A module that stores its last observation; its convolution accepts only one batch axis."""

    shown: list

    def __init__(self):
        super().__init__()
        self.conv, self.out = nn.Conv2d(3, 2, 4), nn.Linear(4, 4)

    def forward(self, obs):
        RecordsObservations.shown = [obs]
        picture = obs["picture"] if isinstance(obs, TensorDict) else obs
        features = self.conv(picture).flatten(1)
        return self.out(features), features.sum(-1)


def test_modules_see_observations_as_their_space_has_them():
    picture = box(0.0, 1.0, 3, 5, 4)
    space = dict_space({"picture": picture, "gear": Discrete(3), "action_mask": MultiDiscrete((2,) * 4)})
    images = torch.rand(7, 2, 3, 5, 4, generator=torch.Generator().manual_seed(0))
    mask = torch.tensor([True, False, True, False])
    obs = TensorDict(
        {
            "picture": images,
            "gear": torch.ones(7, 2, dtype=torch.int64),
            "action_mask": mask.expand(7, 2, 4),
        },
        [7, 2],
    )
    policy = module_policy(RecordsObservations, _cfg(), space, CHOICE)
    params = policy.init(rng.key(0))
    value = policy.value(params, EMPTY, obs)
    (shown,) = RecordsObservations.shown
    assert value.shape == (7, 2) and shown.batch_size == (14,)
    assert torch.equal(shown["picture"], images.flatten(0, 1)) and shown["gear"].dtype == torch.int64
    action = policy.act(params, EMPTY, obs, policy.draw(rng.split(rng.key(1), 14).reshape(7, 2)))[1]["action"]
    assert set(action.unique().tolist()) == {0, 2}, "choices that the mask hides are not made"
    plain = module_policy(RecordsObservations, _cfg(), picture, CHOICE)
    close(plain.value(params, EMPTY, images), value.detach())


@pytest.mark.parametrize("module", [Trunk, ActsOnNoise, Acts])
def test_bf16_differs_and_gives_float32(module):
    rough, exact = (_policy(module, BOX, bf16=bf16) for bf16 in (True, False))
    params, obs = exact.init(rng.key(0)), torch.linspace(-2.0, 2.0, 24).reshape(8, 3)
    for fn in ("value", "act"):
        more = (None,) if fn == "act" else ()
        a, b = (getattr(policy, fn)(params, EMPTY, obs, *more) for policy in (rough, exact))
        a, b = (a[1]["action"], b[1]["action"]) if fn == "act" else (a, b)
        assert a.dtype == torch.float32 and 1e-5 < (a - b).abs().max() < 0.02
    grads = torch.func.grad(lambda p: rough.evaluate(p, EMPTY, steps_of(obs, torch.ones(8, 2)))[0].sum())(params)
    assert all(grad.dtype == torch.float32 for grad in grads.values(True, True))


def test_without_a_critic_value_is_none_and_ppo_raises():
    class NoValue(Trunk):
        def forward(self, obs):
            return super().forward(obs)[0], None

    class OnlyActs(Acts):
        get_value = property()  # hides the method

    assert _policy(NoValue).value is None and _policy(OnlyActs).value is None
    assert _policy(Trunk).value is not None and _policy(Acts).value is not None


def _returning(change):
    class Changed(Trunk):
        def forward(self, obs):
            return change(*super().forward(obs))

    return Changed


def _writing(method, change, base=Acts):
    def changed(self, tensordict, *args, **kwargs):
        return change(getattr(base, method)(self, tensordict, *args, **kwargs))

    return type("Changed", (base,), {method: changed})


def _normed(layer):
    class Normed(Trunk):
        def __init__(self, *spaces):
            super().__init__(*spaces)
            self.body.append(layer)

    return Normed


FORWARD = "policy 'mine': Changed.forward"
FAULTS = [
    (_returning(lambda out, value: out), CHOICE, f"{FORWARD} returns Tensor, expected \\(output, value\\) or"),
    (_returning(lambda out, value: (out,)), CHOICE, f"{FORWARD} returns 1 values, expected"),
    (_returning(lambda o, v: (o[:, :3], v)), CHOICE, rf"{FORWARD}: output has shape \[2, 3\], expected \[2, 4\]"),
    (_returning(lambda o, v: (o, v[:, None])), CHOICE, rf"{FORWARD}: value has shape \[2, 1\], expected \[2\]"),
    (_returning(lambda o, v: (o, 0.0)), CHOICE, rf"{FORWARD}: value is a float, expected a tensor of shape \[2\]"),
    (_returning(lambda o, v: (o, v, o)), CHOICE, f"{FORWARD}: log_std is for Box actions, not Discrete"),
    (_returning(lambda o, v: (o, v, v[:1])), BOX, rf"{FORWARD}: log_std has shape \[1\], expected \[2\] or \[2, 2\]"),
    (
        _writing("get_action", lambda td: td.exclude("sample_log_prob")),
        CHOICE,
        "policy 'mine': Changed.get_action: did not write 'sample_log_prob', only action, obs, value",
    ),
    (
        _writing("evaluate_actions", lambda td: td["entropy"]),
        CHOICE,
        "policy 'mine': Changed.evaluate_actions returns a Tensor, expected a TensorDict with 'log_prob' and 'entropy'",
    ),
    (
        _writing("evaluate_actions", lambda td: td.set("entropy", td["entropy"][:, None])),
        CHOICE,
        r"policy 'mine': Changed.evaluate_actions: entropy has shape \[2, 1\], expected \[2\]",
    ),
    (
        _writing("get_action", lambda td: td.set("action", td["action"].float())),
        CHOICE,
        r"policy 'mine': Changed.get_action: action is torch.float32, expected int64",
    ),
    (_normed(nn.BatchNorm1d(8)), CHOICE, r"policy 'mine': layer body.2 \(BatchNorm1d\) is in training mode"),
    (_normed(nn.Dropout(0.1)), CHOICE, r"policy 'mine': layer body.2 \(Dropout\) is in training mode"),
]


@pytest.mark.parametrize(("module", "action_space", "message"), FAULTS)
def test_faults_are_named_when_the_policy_is_made(module, action_space, message):
    with pytest.raises(ConfigError, match=f"^{message}"):
        _policy(module, action_space)


@pytest.mark.parametrize("module", [_normed(nn.BatchNorm1d(8).eval()), _writing("get_action", lambda td: None)])
def test_a_sound_module_is_accepted(module):
    policy = _policy(module, CHOICE)
    obs = torch.linspace(-1.0, 1.0, 12).reshape(4, 3)
    assert policy.value(policy.init(rng.key(0)), EMPTY, obs).isfinite().all()


def test_a_box_needs_a_log_std_and_an_acting_module_no_squashing():
    class NoStd(Trunk):
        def __init__(self, *spaces):
            super().__init__(*spaces)
            del self.log_std

    advice = r"give the module `self.log_std = nn.Parameter\(torch.zeros\(2\)\)`, or return it as third output"
    with pytest.raises(ConfigError, match=f"policy 'mine': NoStd: no log_std for Box actions; {advice}"):
        _policy(NoStd, BOX)
    with pytest.raises(
        ConfigError,
        match=r"Acts.get_action chooses its own actions, which squash cannot change; leave squash out",
    ):
        _policy(Acts, BOX, squash=True)
    with pytest.raises(ConfigError, match=r"^policy\.squash: expected Box actions"):
        _policy(Trunk, CHOICE, squash=True)


def test_equal_configs_give_the_same_policy():
    assert make_policy({"name": "trunk"}, OBS, CHOICE) is make_policy({"name": "trunk"}, OBS, CHOICE)
    assert make_policy({"name": "trunk"}, OBS, CHOICE) is not make_policy({"name": "trunk", "bf16": True}, OBS, CHOICE)
