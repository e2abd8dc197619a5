"""Images as observations: uint8 from the environment to the network, in every part of a run."""

import json

import pytest
import torch
from support.checks import close
from support.image_probe import CONV, IMAGE, MLP, PARTS, TinyConv, image, seeing
from support.small_runs import last_state, same
from tensordict import TensorDict
from torch import nn

import ecrl
from ecrl import ConfigError, rng
from ecrl.envs import make_env
from ecrl.envs.validate import check_fields
from ecrl.loop.build import build
from ecrl.loop.iteration import init_state, make_iteration
from ecrl.policies import NetworkConfig, make_network, make_policy
from ecrl.policies.core import example, flatten, one_batch
from ecrl.policies.visible import visible_space
from ecrl.registry import register_network
from ecrl.run.export import export
from ecrl.spaces import Discrete, Space, box, dict_space

HOST = "gymnasium:ImageProbe-v0"
SHORT = {"trainer.num_envs": 8, "trainer.iterations": 2, "algorithm.cfg.batch_size": 8}


def _camera(tree, parts):
    return tree["camera"] if parts else tree


@pytest.mark.parametrize("parts", [False, True])
def test_ppo_solves_the_image_probe(parts):
    cfg = seeing(parts=parts)
    state = last_state(cfg)
    assert ecrl.evaluate(state, cfg, num_episodes=100)["eval/avg_reward"] >= 0.95
    assert _camera(state["env", "obs"], parts).dtype == torch.uint8


@pytest.mark.slow
@pytest.mark.parametrize(("env", "net"), [(HOST, CONV), ("image_probe", MLP)])
def test_gymnasium_and_the_mlp_learn_from_images(env, net):
    cfg = seeing(env, True, net)
    state = last_state(cfg)
    assert ecrl.evaluate(state, cfg, num_episodes=100)["eval/avg_reward"] >= 0.95
    ecrl.close(state, cfg)


@pytest.mark.parametrize("parts", [False, True])
@pytest.mark.parametrize("env", ["image_probe", HOST])
def test_state_and_rollout_hold_uint8(env, parts):
    cfg = seeing(env, parts, **SHORT)
    run, state = build(cfg), init_state(cfg)
    state, batch = run.algorithm.iterate.collect(run, state.copy())
    rollout = batch["steps"]
    images, final = _camera(rollout["obs"], parts), _camera(state["env", "final_obs"], parts)
    assert images.dtype == final.dtype == _camera(state["env", "obs"], parts).dtype == torch.uint8
    assert images.shape == (8, 3, 1, 8, 8) and images.flatten(2).sum(-1).tolist() == [[200] * 3] * 8
    if parts:
        assert rollout["obs", "state"].dtype == torch.float32
    ecrl.close(state, cfg)


@pytest.mark.slow
def test_workers_send_the_same_images():
    cfg = seeing(HOST, True, **SHORT)
    serial = last_state(cfg)
    parallel = last_state(cfg.replace(**{"env.cfg.asynchronous": True}))
    assert parallel["env", "obs", "camera"].dtype == torch.uint8
    assert same(*(state.exclude(("env", "token"), ("env", "info")) for state in (serial, parallel)))
    for state in (serial, parallel):
        ecrl.close(state, cfg)


@pytest.mark.slow
@pytest.mark.parametrize("parts", [False, True])
@pytest.mark.usefixtures("traced_or_compiled")
def test_compiled_is_eager(parts):
    cfg = seeing(parts=parts, **SHORT)
    eager, compiled = (last_state(cfg.replace(**{"trainer.compile": form})) for form in ("off", "on"))
    assert _camera(compiled["env", "obs"], parts).dtype == torch.uint8
    assert torch.equal(_camera(eager["env", "obs"], parts), _camera(compiled["env", "obs"], parts))
    for name, weight in eager["params"].flatten_keys("/").items():
        close(compiled["params"].flatten_keys("/")[name], weight, tol=1e-4)


def test_a_seed_axis_of_vmap_passes_through_convolutions():
    cfg = seeing(**SHORT)
    iteration, states = make_iteration(cfg), [init_state(cfg, rng.key(seed)) for seed in (0, 1)]
    both = torch.vmap(lambda state: iteration(state)[0]["params"])(torch.stack(states))
    for state, seed in zip(states, (0, 1), strict=True):
        for name, weight in iteration(state)[0]["params"].flatten_keys("/").items():
            close(both.flatten_keys("/")[name][seed], weight, tol=1e-4)


def test_checkpoints_and_resume_keep_images(tmp_path):
    cfg = seeing(parts=True, **SHORT)
    state = last_state(cfg)
    ecrl.save(tmp_path / "step", state, cfg)
    loaded, again = ecrl.load(tmp_path / "step")
    assert same(loaded, state) and again == cfg
    more = cfg.replace(**{"trainer.iterations": 4})
    assert same(last_state(more, loaded), last_state(more))


@pytest.mark.slow
@pytest.mark.parametrize("net", [CONV, MLP])
def test_the_exported_files_take_images(tmp_path, net):
    cfg = seeing(parts=True, net=net, **SHORT)
    state, policy = last_state(cfg), build(cfg).policy
    export(state, cfg, tmp_path)
    obs = {"camera": image(torch.tensor([0, 3, 1, 2, 2])), "state": torch.tensor([[1.0], [-1.0], [0.5], [1.0], [-1.0]])}
    expected = policy.act(state["params"], TensorDict({}, []), TensorDict(obs, [5]), None)[1]["action"]
    program = torch.export.load(tmp_path / "policy.pt2").module()
    assert torch.equal(program(**obs), expected)
    session = pytest.importorskip("onnxruntime").InferenceSession(tmp_path / "policy.onnx")
    (action,) = session.run(None, {name: part.numpy() for name, part in obs.items()})
    assert action.tolist() == expected.tolist()
    camera = json.loads((tmp_path / "policy.json").read_text())["inputs"][0]
    assert (camera["dtype"], camera["shape"]) == ("uint8", ["batch", 1, 8, 8])
    assert camera["space"] == {"type": "Box", "low": 0, "high": 255}


def test_check_env_finds_nothing_wrong_with_images(monkeypatch):
    monkeypatch.setattr("ecrl.env_check.check._steps_per_second", lambda env, keys: float(len(keys)))
    for parts in (False, True):
        assert ecrl.check_env({"name": "image_probe", "cfg": {"parts": parts}}, num_steps=16).findings == []


def test_an_environment_that_returns_floats_for_its_images_is_refused():
    env = make_env("image_probe")
    wrong = ecrl.Env(
        lambda keys: env.reset(keys).set("obs", torch.zeros(*keys.shape, 1, 8, 8)), env.step, IMAGE, Discrete(4)
    )
    message = r"^env e: reset returns field 'obs' as float32 \[2, 1, 8, 8\], expected uint8 \[2, 1, 8, 8\]"
    with pytest.raises(ConfigError, match=message):
        check_fields(wrong, "e")


# Networks


def test_flatten_scales_images_and_nothing_else(variant):
    space = dict_space({
        "a": box(0, 255, 1, 1, 2, dtype=torch.uint8),
        "b": box(0, 255, 2, dtype=torch.uint8),
        "c": box(-9, 9, 1, dtype=torch.int64),
        "d": box(0.0, 1.0, 1, dtype=torch.float64),
        "e": dict_space({"x": box(0.0, 9.0, 1)}),
    })  # fmt: skip
    obs = {
        "a": torch.tensor([[[[51, 255]]]], dtype=torch.uint8),
        "b": torch.tensor([[51, 255]], dtype=torch.uint8),
        "c": torch.tensor([[-3]]),
        "d": torch.tensor([[0.5]], dtype=torch.float64),
        "e": TensorDict({"x": torch.tensor([[7.0]])}, [1]),
    }
    close(variant(flatten)(TensorDict(obs, [1]), space), [[0.2, 1.0, 51.0, 255.0, -3.0, 0.5, 7.0]])


@pytest.mark.parametrize("space", [IMAGE, PARTS, dict_space({"in": PARTS, "gear": Discrete(3)})])
def test_the_mlp_takes_every_space(space):
    net = make_network(NetworkConfig.model_validate(MLP), space, 2, False)
    out = net.forward(net.init(), example(space))
    assert out.shape == (2, 2) and out.dtype == torch.float32


def test_a_network_gets_the_space_and_observations_in_its_dtypes():
    obs = TensorDict({"camera": torch.zeros(5, 6, 1, 8, 8, dtype=torch.uint8), "state": torch.zeros(5, 6, 1)}, [5, 6])
    net = make_network(NetworkConfig.model_validate(CONV), PARTS, 3, False)
    assert net.forward(net.init(), obs).shape == (5, 6, 3)
    assert one_batch(obs, PARTS)[0]["camera"].dtype == example(PARTS)["camera"].dtype == torch.uint8
    assert isinstance(net.module, TinyConv)


def test_a_network_does_not_get_the_action_mask(monkeypatch):
    from support.image_probe import TinyConvConfig

    spaces = []

    def make(cfg: TinyConvConfig, space: Space, outputs: int) -> nn.Module:
        spaces.append(space)
        return TinyConv(space, cfg.channels, outputs)

    register_network("mask_probe", override=True)(make)
    masked = dict_space(dict(PARTS.items) | {"action_mask": box(0, 1, 4, dtype=torch.uint8)})
    policy = make_policy({"name": "actor_only", "actor": {"type": "mask_probe"}}, masked, Discrete(4))
    assert {*spaces} == {PARTS}
    nested = dict_space({"parts": masked, "x": box(0.0, 1.0, 1)})
    assert visible_space(nested, ("parts",), "actor_obs") == dict_space({"parts": PARTS})
    obs = example(PARTS).set("action_mask", torch.tensor([[True, False, False, False]] * 2))
    action = policy.act(policy.init(rng.key(0)), TensorDict({}, []), obs, None)[1]["action"]
    assert action.tolist() == [0, 0]


def test_a_network_of_another_output_is_refused_with_its_key():
    from support.image_probe import TinyConvConfig

    def make(cfg: TinyConvConfig, space: Space, outputs: int) -> nn.Module:
        return TinyConv(space, cfg.channels, outputs + 1)

    register_network("wide_probe", override=True)(make)
    message = r"^policy\.actor \(wide_probe\): TinyConv returns \[2, 5\] for 2 observations, expected \[2, 4\]; return"
    with pytest.raises(ConfigError, match=message):
        make_policy({"name": "actor_only", "actor": {"type": "wide_probe"}}, IMAGE, Discrete(4))


def test_normalisation_does_not_change_images():
    cfg = seeing(parts=True, **SHORT, **{"policy.normalize_obs": True})
    state = last_state(cfg)
    assert [*state["norm", "obs"].keys()] == ["state"]
    with pytest.raises(ConfigError, match=r"policy\.normalize_obs: Box\(0, 255, \(1, 8, 8\), uint8\) has no float Box"):
        build(seeing(**{"policy.normalize_obs": True}))


def test_actions_of_another_dtype_are_refused():
    with pytest.raises(ConfigError, match=r"actions of Box\(0, 9, \(2,\), int64\) are not supported"):
        make_policy({"name": "actor_only", "actor": MLP}, IMAGE, box(0, 9, 2, dtype=torch.int64))
