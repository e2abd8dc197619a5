"""Exported policies act as the environment sees them act, in a process that has neither ecrl nor tensordict."""

import json
import subprocess
import sys

import pytest
import torch
from support.checks import close
from support.recurrent_agent import remembering
from support.small_runs import NET, last_state, small
from tensordict import TensorDict
from torch import Tensor

from ecrl import rng
from ecrl.config import PolicyConfig, config_from_dict
from ecrl.config.model import ConfigModel
from ecrl.envs import Env, state_of
from ecrl.errors import UserError
from ecrl.loop.build import build
from ecrl.loop.iteration import init_state
from ecrl.policies import acting_params, module_policy
from ecrl.policies.actor_critic import ActorCriticConfig, actor_critic
from ecrl.registry import register_env, register_policy
from ecrl.run.export import export
from ecrl.spaces import Box, Discrete, MultiDiscrete, box, dict_space

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
PENDULUM = {"env": {"name": "pendulum"}, "policy.normalize_obs": True}
GRPO = {
    "algorithm": {"name": "grpo", "cfg": {"group_size": 4, "batch_size": 10, "n_epochs": 1}},
    "policy": {"name": "actor_only", "actor": NET},
}
NORMED = {"type": "mlp", "network_cfg": {"hidden_sizes": [8], "use_layernorm": True}}
PQN = {"algorithm": {"name": "pqn", "cfg": {"batch_size": 16}}, "policy": {"name": "q_network", "critic": NORMED}}
REPLAY = {"batch_size": 4, "learning_starts": 8}
TD3 = {
    "policy": {"name": "deterministic_actor_critic", "actor": NET, "critic": NET},
    "algorithm": {"name": "td3", "cfg": REPLAY},
}
SAC = {
    "policy": {"name": "squashed_actor_critic", "actor": NET, "critic": NET},
    "algorithm": {"name": "sac", "cfg": REPLAY},
}
RUNS = {
    "cartpole, normalised": {"policy.normalize_obs": True},
    "pendulum, squashed": PENDULUM | {"policy.squash": True},
    "pendulum, clipped": PENDULUM,
    "pendulum, free": PENDULUM | {"policy.clip_actions": False},
    "pendulum, chunks": PENDULUM | {"env.action_chunk": 3},
    "grpo, actor only": GRPO,
    "pqn, layer norm": PQN,
    "dqn": {"policy": {"name": "q_network", "critic": NET}, "algorithm": {"name": "dqn", "cfg": REPLAY}},
    "pendulum, td3": TD3 | PENDULUM,
    "pendulum, sac": SAC | PENDULUM,
}
WITHOUT_ECRL = """
import json, sys
sys.modules["ecrl"] = sys.modules["tensordict"] = None  # as if not installed
try:
    import ecrl
except ImportError:
    pass
else:
    raise SystemExit("ecrl is there")
import torch
try:
    import onnxruntime
except ImportError:
    onnxruntime = None
apart = {}
for folder in sys.argv[1:]:
    case = torch.load(f"{folder}/case.pt")
    obs, expected = case["obs"], case["action"]
    actual = {"pt2": torch.export.load(f"{folder}/policy.pt2").module()(obs=obs)}
    one = torch.export.load(f"{folder}/policy.pt2").module()(obs=obs[:1])
    assert one.shape == expected[:1].shape and (one - expected[:1]).abs().max() <= 1e-5
    if onnxruntime:
        session = onnxruntime.InferenceSession(f"{folder}/policy.onnx")
        actual["onnx"] = torch.as_tensor(session.run(["action"], {"obs": obs.numpy()})[0])
    assert all(a.shape == expected.shape and a.dtype == expected.dtype for a in actual.values())
    apart[folder] = {name: (a - expected).abs().max().item() for name, a in actual.items()}
print("OUT" + json.dumps(apart))
"""


def action_of_the_env(cfg, state, obs):
    """The deterministic actions for `obs` at the door of the environment, from its own records."""
    parts = build(cfg)
    params = acting_params(state["params"], state["norm"])
    action = parts.policy.act(params, TensorDict({}, []), obs, None)[1]["action"]
    space = parts.env.action_space
    if isinstance(space, Box) and cfg.policy.clip_actions:
        low, high = (torch.tensor(bound).reshape(space.shape) for bound in (space.low, space.high))
        return torch.minimum(torch.maximum(action, low), high)
    return action


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    pytest.importorskip("onnxscript")
    runs = {}
    for name, changes in RUNS.items():
        cfg, folder = small(**changes), tmp_path_factory.mktemp("export")
        state = last_state(cfg)
        if "pendulum" in name:  # let actions leave their space of -2 to 2, which they do not so early
            state = state.clone()
            state["params", "actor", "2.weight"] = 8.0 * state["params", "actor", "2.weight"]
        assert sorted(p.name for p in export(state, cfg, folder)) == ["policy.json", "policy.onnx", "policy.pt2"]
        size = len(state["env", "obs"][0])
        obs = rng.normal(rng.split(rng.key(0), 100), (size,)) * torch.tensor([2.0, 1.0, 0.2, 3.0])[:size]
        torch.save({"obs": obs, "action": action_of_the_env(cfg, state, obs)}, folder / "case.pt")
        runs[name] = folder
    return runs


def test_without_ecrl_the_files_reproduce_a_hundred_actions(written, tmp_path):
    pytest.importorskip("onnxruntime")
    run = [sys.executable, "-I", "-c", WITHOUT_ECRL, *map(str, written.values())]
    done = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr
    apart = json.loads(done.stdout.split("OUT")[1])
    assert len(apart) == len(RUNS)
    for folder, by_file in apart.items():
        assert by_file.keys() == {"pt2", "onnx"}, folder
        assert max(by_file.values()) <= 1e-5, folder


def test_the_actions_compared_are_of_every_kind(written):
    """Guards the test above: clipped actions reach their bounds, free ones leave them, choices are not all one."""
    action = {name: torch.load(folder / "case.pt")["action"] for name, folder in written.items()}
    assert (action["pendulum, clipped"].abs() == 2.0).float().mean() > 0.1
    assert (action["pendulum, clipped"].abs() < 2.0).float().mean() > 0.1
    assert action["pendulum, free"].abs().max() > 2.0
    assert action["pendulum, squashed"].abs().max() < 2.0
    assert action["cartpole, normalised"].unique().tolist() == [0, 1]


def test_the_normaliser_is_inside(written):
    """The program of a normalised policy moves with its statistics, which two iterations have moved from 0 and 1."""
    cfg = small(**RUNS["pendulum, free"])
    state, obs = last_state(cfg), torch.tensor([[0.5, -0.5, 3.0]])
    assert float(state["norm", "obs", "count"]) == 4 * 8 * 4
    raw = acting_params(state["params"], TensorDict({"obs": init_state(cfg)["norm", "obs"]}, []))
    parts = build(cfg)
    unmoved = parts.policy.act(raw, TensorDict({}, []), obs, None)[1]["action"]
    assert (unmoved - action_of_the_env(cfg, state, obs)).abs().max() > 1e-3


def test_the_description_names_inputs_outputs_and_where_it_is_from(written):
    about = json.loads((written["pendulum, squashed"] / "policy.json").read_text())
    assert about["env"]["name"] == "pendulum"
    assert (about["policy"], about["algorithm"], about["sample_step"]) == ("actor_critic", "ppo", 128)
    assert [x["shape"] for x in about["inputs"] + about["outputs"]] == [["batch", 3], ["batch", 1]]
    assert about["outputs"][0]["space"] == {"type": "Box", "low": [-2.0], "high": [2.0]}
    chunks = json.loads((written["pendulum, chunks"] / "policy.json").read_text())
    assert chunks["outputs"][0]["shape"] == ["batch", 3, 1] and chunks["env"]["action_chunk"] == 3
    cartpole = json.loads((written["grpo, actor only"] / "policy.json").read_text())
    assert cartpole["outputs"][0] == {
        "name": "action", "dtype": "int64", "shape": ["batch"], "space": {"type": "Discrete", "n": 2},
    }  # fmt: skip
    assert None in cartpole["inputs"][0]["space"]["high"]  # no Infinity, which is not JSON


def test_only_what_acts_is_written(written):
    """The critic is as large as the actor, and not in the file."""
    program = torch.export.load(written["cartpole, normalised"] / "policy.pt2")
    assert sum(t.numel() for t in program.constants.values()) == (4 * 8 + 8) + (8 * 2 + 2) + (4 + 4 + 1)


class NoSettings(ConfigModel):
    """None."""


PARTS = {
    "pose": box(-1.0, 1.0, 2, 2),
    "inner": dict_space({"deep": box(-1.0, 1.0, 3)}),
    "gear": Discrete(3),
    "wheels": MultiDiscrete((2, 3)),
}
ACTIONS = {"discrete": Discrete(5), "multi": MultiDiscrete((2, 3)), "box": box(-0.1, 0.1, 2, 2)}


def some_obs(keys: Tensor, masked: bool) -> TensorDict:
    n = keys.shape
    parts = {
        "pose": rng.normal(keys, (2, 2)),
        "inner": TensorDict({"deep": rng.normal(keys + 1, (3,))}, n),
        "gear": keys.abs() % 3,
        "wheels": torch.stack((keys.abs() % 2, keys.abs() % 3), -1),
    }
    mask = rng.uniform(keys + 2, (5,)) < 0.5
    mask[..., [1, 4]] = True  # a choice is left in each part
    return TensorDict(parts | ({"action_mask": mask} if masked else {}), n)


@pytest.fixture(params=list(ACTIONS))
def odd_observations_run(request):
    """An environment with named, nested, whole-number and masked observations, and a policy that has not learnt."""
    masked, name = request.param != "box", f"odd_{request.param}"
    parts = PARTS | ({"action_mask": MultiDiscrete((2,) * 5)} if masked else {})

    @register_env(name, override=True)
    def env_with_parts(cfg: NoSettings) -> Env:
        def reset(keys: Tensor) -> TensorDict:
            return state_of(torch.zeros(keys.shape), keys.shape).set("obs", some_obs(keys, masked))

        return Env(reset, lambda s, a, noise: s, dict_space(parts), ACTIONS[request.param])

    policy = {"name": "actor_critic", "actor": NET, "critic": NET, "normalize_obs": True}
    cfg = config_from_dict(
        {
            "trainer": {"num_envs": 4, "buffer_size": 8, "compile": "off"},
            "env": name,
            "policy": policy,
            "algorithm": {"name": "ppo"},
        }
    )
    return cfg, init_state(cfg), masked


def test_named_nested_whole_and_masked_observations(odd_observations_run, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    cfg, state, masked = odd_observations_run
    export(state, cfg, tmp_path)
    obs = some_obs(rng.split(rng.key(1), 50), masked)
    expected = action_of_the_env(cfg, state, obs)
    about = json.loads((tmp_path / "policy.json").read_text())
    names = [x["name"] for x in about["inputs"]]
    assert names == [*(["action_mask"] if masked else []), "gear", "inner_deep", "pose", "wheels"]
    assert len(expected.unique()) > 1
    flat = obs.flatten_keys("_")
    close(torch.export.load(tmp_path / "policy.pt2").module()(**dict(flat.items())), expected)
    session = onnxruntime.InferenceSession(tmp_path / "policy.onnx")
    close(torch.as_tensor(session.run(None, {name: flat[name].numpy() for name in names})[0]), expected)
    if expected.ndim == 1:  # one choice of five
        assert obs["action_mask"].gather(1, expected.unsqueeze(1)).all()


def test_bf16_is_written_in_float32(tmp_path):
    cfg = small(**{"policy.bf16": True})
    state = init_state(cfg)
    export(state, cfg, tmp_path)
    obs = rng.normal(rng.split(rng.key(0), 50), (4,))
    expected = action_of_the_env(cfg.replace(**{"policy.bf16": False}), state, obs)
    assert torch.equal(torch.export.load(tmp_path / "policy.pt2").module()(obs=obs), expected)
    program = torch.export.load(tmp_path / "policy.pt2")
    assert "bfloat16" not in str(program.graph)


def test_without_the_extra_the_torch_file_is_written_and_one_line_names_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(UserError, match=r"onnxscript.*pip install 'ecrl\[export\]'$"):
        export(init_state(small()), small(), tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["policy.json", "policy.pt2"]


class Net(torch.nn.Module):
    """A module of a user's own on the parts of a Dict observation."""

    def __init__(self, width):
        super().__init__()
        self.body, self.head = torch.nn.Linear(8, 8), torch.nn.Linear(8, width + 1)
        self.log_std = torch.nn.Parameter(torch.zeros(width))
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, obs):
        flat = torch.cat((obs["pose"].flatten(1), obs["inner"]["deep"], obs["gear"].unsqueeze(-1).float()), -1)
        out = self.head(self.body(flat).tanh()) * self.scale
        return out[:, :-1], out[:, -1]


class Acts(Net):
    """The same with upstream's interface."""

    def get_action(self, tensordict, deterministic=False):
        chosen = torch.distributions.Categorical(logits=self(tensordict["obs"])[0])
        tensordict["action"] = chosen.mode if deterministic else chosen.sample()
        tensordict["sample_log_prob"] = chosen.log_prob(tensordict["action"])
        return tensordict

    def evaluate_actions(self, tensordict):
        chosen = torch.distributions.Categorical(logits=self(tensordict["obs"])[0])
        log_prob, entropy = chosen.log_prob(tensordict["action"]), chosen.entropy()
        return tensordict.empty().update({"log_prob": log_prob, "entropy": entropy})

    def get_value(self, tensordict):
        tensordict["value"] = self(tensordict["obs"])[1]
        return tensordict


@pytest.mark.parametrize("make", [Net, Acts])
@pytest.mark.parametrize("odd_observations_run", ["discrete"], indirect=True)
def test_a_users_module_is_exported_with_its_buffers(make, odd_observations_run, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")

    @register_policy("own_net", override=True)
    def own_net(cfg: PolicyConfig, observation_space, action_space):
        return module_policy(lambda: make(5), cfg, observation_space, action_space)

    cfg = config_from_dict(
        odd_observations_run[0].model_dump(mode="json") | {"policy": {"name": "own_net", "normalize_obs": True}}
    )
    state = init_state(cfg)
    export(state, cfg, tmp_path)
    obs = some_obs(rng.split(rng.key(1), 50), True)
    expected, flat = action_of_the_env(cfg, state, obs), obs.flatten_keys("_")
    assert len(expected.unique()) > 1
    close(torch.export.load(tmp_path / "policy.pt2").module()(**dict(flat.items())), expected)
    session = onnxruntime.InferenceSession(tmp_path / "policy.onnx")
    every = {name: part.numpy() for name, part in flat.items()}  # also parts that the module ignores
    close(torch.as_tensor(session.run(None, every)[0]), expected)


def test_a_policy_that_cannot_be_traced_is_refused_in_one_line(tmp_path):
    @register_policy("on_the_host", override=True)
    def on_the_host(cfg: ActorCriticConfig, observation_space, action_space):
        from dataclasses import replace

        policy = actor_critic(cfg, observation_space, action_space)

        def act(params, carry, obs, noise):
            return policy.act(params, carry, obs * float(obs.sum()), noise)

        return replace(policy, act=act)

    cfg = small(**{"policy.name": "on_the_host"})
    with pytest.raises(UserError, match=r"^policy\.pt2: policy 'on_the_host' cannot be exported") as error:
        export(init_state(cfg), cfg, tmp_path / "out")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["inner_deep", "carry_shared_h", "is_first"])
def test_leaves_with_the_same_input_name_are_refused(tmp_path, name):
    space = dict_space({"inner": dict_space({"deep": box(-1.0, 1.0, 2)}), name: box(-1.0, 1.0, 2)})

    @register_env("same_names", override=True)
    def same_names(cfg: NoSettings) -> Env:
        def reset(keys: Tensor) -> TensorDict:
            deep = TensorDict({"deep": torch.zeros(*keys.shape, 2)}, keys.shape)
            obs = TensorDict({"inner": deep, name: torch.zeros(*keys.shape, 2)}, keys.shape)
            return state_of(torch.zeros(keys.shape), keys.shape).set("obs", obs)

        return Env(reset, lambda s, a, noise: s, space, box(-1.0, 1.0, 1))

    cfg = small(**{"env.name": "same_names", "policy": {"name": "recurrent", "actor": NET, "critic": NET}})
    other = {
        "inner_deep": "inner.deep",
        "carry_shared_h": "the memory of the policy",
        "is_first": 'the flag "is_first" of the policy',
    }[name]
    message = rf"^{name} and {other} would both be the input '{name}'; rename one of them$"
    with pytest.raises(UserError, match=message):
        export(init_state(cfg), cfg, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be_created_is_refused_in_one_line(tmp_path):
    cfg = small()
    (tmp_path / "file").write_text("mine")
    for folder, reason in (
        (tmp_path / "file" / "out", "Not a directory"),
        ("/proc/absent", "No such file or directory"),
    ):
        with pytest.raises(UserError, match=rf"^{folder}: cannot be created: {reason}; choose another folder$"):
            export(init_state(cfg), cfg, folder)


def test_a_recurrent_policy_takes_and_gives_its_memory(tmp_path):
    cfg = remembering(**{"trainer.iterations": 2})
    state = last_state(cfg)
    with torch.no_grad():
        export(state, cfg, tmp_path)
        about = json.loads((tmp_path / "policy.json").read_text())
        assert [entry["name"] for entry in about["inputs"]] == ["obs", "is_first", "carry_h"]
        assert [entry["name"] for entry in about["outputs"]] == ["action", "next_carry_h"]
        module, policy = torch.export.load(tmp_path / "policy.pt2").module(), build(cfg).policy
        h, carry = torch.full((5, 8), 9.0), policy.init_carry(state["params"], 5)
        for step in range(3):
            obs = torch.randn(5, 2, generator=torch.Generator().manual_seed(step))
            is_first = torch.tensor([step == 0] * 5)
            action, h = module(obs=obs, is_first=is_first, carry_h=h)
            carry, out = policy.act(state["params"], carry, obs, None)
            assert torch.equal(action, out["action"])
            close(h, carry["h"])
        session = pytest.importorskip("onnxruntime").InferenceSession(str(tmp_path / "policy.onnx"))
        inputs = {"obs": obs.numpy(), "is_first": ~is_first.numpy(), "carry_h": h.numpy()}
        first = policy.act(state["params"], policy.init_carry(state["params"], 5), obs, None)[0]["h"]
        close(torch.as_tensor(session.run(["next_carry_h"], inputs)[0]), first)
