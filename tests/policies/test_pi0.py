"""The backend `pi0`: it computes what transformers computes, acts as it evaluates, and refuses what does not fit."""

import json
import math
import shutil
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from support.checks import assert_pure, close
from support.dots import space_of
from support.pretrained import ACTIONS, EMPTY, params_of, policy_of
from support.pretrained import acted as acted_on
from support.tiny_pi0 import CHUNK, NUMBERS, SIZE, STATE, checkpoint, write_checkpoint, write_statistics

import ecrl.memory
from ecrl import rng
from ecrl.errors import ConfigError, MissingExtraError
from ecrl.loop.policy_check import check_policy
from ecrl.policies import encode_instructions, make_policy
from ecrl.policies.core import example, sum_tokens
from ecrl.spaces import Box, MultiDiscrete, box, dict_space

NOISES = {"sde": {}, "head": {"noise_head": {"type": "mlp", "network_cfg": {"hidden_sizes": [8]}}}}
CAMERA = box(0, 255, SIZE, SIZE, 3, dtype=torch.uint8)


def tiny(observations=None, actions=ACTIONS, path=None, section=None, **changes):
    space = space_of(SIZE) if observations is None else observations
    return policy_of("pi0", path or checkpoint(), space, actions, section, **changes)


def acted(policy, params, n=12, is_sampled=True):
    return acted_on(policy, params, SIZE, n, is_sampled)


def loaded(path=None):
    from transformers import PI0ForConditionalGeneration

    return PI0ForConditionalGeneration.from_pretrained(path or checkpoint(), local_files_only=True).eval()


def inputs_of(obs, model):
    """What the processor of pi0 gives to the model, written anew: four image tokens, the ids, and padding."""
    n = len(obs["instruction"])
    ids = torch.cat((torch.full((n, 4), model.config.vlm_config.image_token_id), obs["instruction"]), 1)
    return {
        "state": F.pad(obs["proprio"], (0, STATE - 2)),
        "input_ids": ids,
        "attention_mask": (ids != 0).long(),
        "pixel_values": (obs["camera"].permute(0, 3, 1, 2).unsqueeze(1) / 255.0 * 2.0 - 1.0).contiguous(),
        "pixel_attention_mask": torch.ones(n, 1, dtype=torch.bool),
    }


def test_the_weights_are_those_of_transformers():
    params = params_of(tiny())
    mine = {name: x for part in ("model", "base") for name, x in params[part].items()}
    theirs = dict(loaded().named_parameters())
    assert sorted(mine) == sorted(f"pi0.{name}" for name in theirs)
    assert all(torch.equal(mine[f"pi0.{name}"], weight) for name, weight in theirs.items())


@pytest.mark.parametrize("steps", [None, 1, 4])
@pytest.mark.parametrize("name", NOISES)
def test_deterministic_actions_are_those_of_transformers(name, steps):
    """Both begin at the same start. The sums of matrix products are rounded in another order."""
    policy = tiny(denoising_steps=steps, **NOISES[name])
    out, _ = acted(policy, params_of(policy), is_sampled=False)
    model = loaded()
    start = rng.normal(rng.key(0), (CHUNK, NUMBERS)).expand(12, -1, -1)
    expected = model.sample_actions(noise=start, num_steps=steps, **inputs_of(out["obs"], model))
    close(out["action"], expected[:, :3, :2], tol=2e-6)
    assert out["action"].std(0).min() > 1e-3, "actions depend on the observation"


def test_the_start_is_drawn_and_only_one_step_has_noise():
    policy = tiny()
    params = params_of(policy)
    out, noise = acted(policy, params, 200)
    assert out["flow_sample"].shape == (200, CHUNK, NUMBERS) and out["flow_next"].shape == (200, 3, 2)
    assert out["action"].shape == (200, 3, 2) and out["flow_step"].shape == (200,)
    assert out["sample_log_prob"].shape == (200, 6), "one axis, since no number is independent of the others"
    assert torch.equal(out["flow_step"], noise["step"]) and out["flow_step"].bincount().min() > 40
    first = out["flow_step"] == 0
    assert torch.equal(out["flow_sample"][first], noise["start"][first])
    assert not torch.allclose(out["flow_sample"][~first], noise["start"][~first])
    last = out["flow_step"] == 2
    assert torch.equal(out["action"][last], out["flow_next"][last])


def test_flow_sde_log_probabilities_are_the_closed_form():
    """The velocity is from one call of transformers without a cache, and the density is computed in Python floats."""
    policy = tiny(noise_level=0.8)
    out, noise = acted(policy, params_of(policy))
    model, steps = loaded(), 3
    t = 1.0 - out["flow_step"] / steps
    with torch.no_grad():
        v = model(noise=out["flow_sample"], timestep=t, **inputs_of(out["obs"], model)).logits
    for i in range(12):
        time, delta = 1.0 - int(out["flow_step"][i]) / steps, 1.0 / steps
        sigma = 0.8 * math.sqrt(time / (delta if time == 1.0 else 1.0 - time))
        for j in range(3):
            for a in range(2):
                x, velocity, after = (float(y[i, j, a]) for y in (out["flow_sample"], v, out["flow_next"]))
                drift = velocity + sigma**2 / (2.0 * time) * (x + (1.0 - time) * velocity)
                mean, std = x - delta * drift, sigma * math.sqrt(delta)
                z = (after - mean) / std
                close(torch.tensor(z), float(noise["noise"][i, j, a]), tol=1e-4)
                expected = -0.5 * z * z - math.log(std * math.sqrt(2.0 * math.pi))
                close(out["sample_log_prob"][i, 2 * j + a], expected, tol=1e-4)


def test_the_imitation_loss_is_that_of_transformers():
    """The model predicts all of its numbers here, so none is filled up with zeros."""
    policy = tiny(actions=box(-1.0, 1.0, CHUNK, NUMBERS))
    params = params_of(policy)
    out, _ = acted(policy, params)
    noise = assert_pure(policy.draw_imitation, rng.split(rng.key(5), 12))
    rows = out.copy().set("imitation_noise", noise)
    loss, model = assert_pure(policy.imitation_loss, params, EMPTY, rows), loaded()
    model.config.loss_reduction = "none"
    inputs = inputs_of(out["obs"], model)
    with torch.no_grad():
        theirs = model(actions=out["action"], noise=noise["start"], timestep=noise["t"], **inputs).loss
    assert loss.shape == (12,)
    close(loss, theirs.mean((1, 2)), tol=2e-5)
    close(policy.imitation_rows(params, rows.reshape(3, 4)), loss.reshape(3, 4), tol=1e-5)


def test_only_actions_that_were_taken_are_imitated(tmp_path):
    path = tmp_path / "pi0"
    shutil.copytree(checkpoint(), path)
    write_statistics(path, actions_mean=[0.1, 0.2], actions_std=[2.0, 3.0])
    policy = tiny(path=str(path))
    params = params_of(policy)
    out, _ = acted(policy, params)
    noise = policy.draw_imitation(rng.split(rng.key(5), 12))
    rows = out.copy().set("imitation_noise", noise)
    with torch.no_grad():
        numbers = (out["action"] - torch.tensor([0.1, 0.2])) / torch.tensor([2.0, 3.0])
        x = F.pad(numbers, (0, NUMBERS - 2, 0, CHUNK - 3))
        x = (1.0 - noise["t"][:, None, None]) * x + noise["t"][:, None, None] * noise["start"]
        model = loaded()
        velocity = model(noise=x, timestep=noise["t"], **inputs_of(out["obs"], model)).logits[:, :3, :2]
    errors = (velocity - (noise["start"][:, :3, :2] - numbers)).square().mean(-1)
    close(policy.imitation_loss(params, EMPTY, rows), errors.mean(-1), tol=1e-4)
    for executed in (1, 2, 3):
        rows["executed"] = torch.full((12,), executed)
        close(policy.imitation_loss(params, EMPTY, rows), errors[:, :executed].mean(-1), tol=1e-4)


def test_times_of_imitation_have_the_distribution_of_the_checkpoint(tmp_path):
    path = write_checkpoint(tmp_path / "pi0", time_sampling_beta_alpha=3.0, time_sampling_scale=0.5)
    for policy, alpha, scale in ((tiny(), 1.5, 0.999), (tiny(path=str(path)), 3.0, 0.5)):
        noise = policy.draw_imitation(rng.split(rng.key(6), 20_000))
        share = (noise["t"] - 0.001) / scale
        for x in (0.25, 0.5, 0.75):
            assert abs(float((share < x).float().mean()) - x**alpha) < 0.01
        assert abs(float(noise["start"].mean())) < 0.01 and abs(float(noise["start"].std()) - 1.0) < 0.01
    path = write_checkpoint(tmp_path / "other", time_sampling_beta_beta=2.0)
    message = r"^policy vla: config.json: time_sampling_beta_beta is 2, expected 1, as in all released checkpoints"
    with pytest.raises(ConfigError, match=message):
        tiny(path=str(path))


def test_flow_noise_averages_over_the_steps():
    policy = tiny(noise_range=[0.1, 0.3], **NOISES["head"])
    params = params_of(policy)
    out, noise = acted(policy, params)
    chain = out["flow_chain"]
    assert chain.shape == (12, 4, CHUNK, NUMBERS) and torch.equal(chain[:, 0], noise["start"])
    assert torch.equal(chain[:, -1, :3, :2], out["action"])
    model, log_probs = loaded(), []
    for i in range(3):
        with torch.no_grad():
            v = model(noise=chain[:, i], timestep=torch.full((12,), 1.0 - i / 3), **inputs_of(out["obs"], model)).logits
        plain = chain[:, i] - v / 3
        close(chain[:, i + 1, 3:], plain[:, 3:], tol=1e-5)
        close(chain[:, i + 1, :, 2:], plain[..., 2:], tol=1e-5)
        difference = (chain[:, i + 1] - plain)[:, :3, :2].double()
        std = difference / noise["noise"][:, i].double()
        near = noise["noise"][:, i].abs() > 0.05
        assert std[near].min() > 0.1 - 1e-3 and std[near].max() < 0.3 + 1e-3 and std[near].std() > 1e-4
        z = noise["noise"][:, i].double()
        log_probs.append(-0.5 * z**2 - std.abs().log() - 0.5 * math.log(2.0 * math.pi))
    expected = torch.stack(log_probs).mean(0)
    expected, rounded = expected.flatten(1), (noise["noise"].abs() < 0.05).any(1).flatten(1)
    close(out["sample_log_prob"][~rounded], expected[~rounded], tol=1e-3)
    other = params.clone()
    other["noise_head"] = other["noise_head"].apply(lambda x: x + 1.0)
    assert not torch.allclose(policy.evaluate(other, EMPTY, out)[0], out["sample_log_prob"])


@pytest.mark.parametrize("is_sampled", [True, False])
@pytest.mark.parametrize("name", NOISES)
def test_acting_equals_evaluating(name, is_sampled):
    policy = tiny(critic="mlp", **NOISES[name])
    params = params_of(policy)
    out, _ = acted(policy, params, is_sampled=is_sampled)
    log_prob, entropy = assert_pure(policy.evaluate, params, EMPTY, out)
    close(log_prob, out["sample_log_prob"], tol=1e-5)
    nested = out.reshape(3, 4)
    again, _, value = policy.evaluate_and_value(params, EMPTY, nested)
    close(again.flatten(0, 1), log_prob, tol=1e-5)
    assert entropy.shape == (12, 6) and value.shape == (3, 4)
    close(policy.value(params, EMPTY, nested["obs"]), value, tol=1e-5)
    assert value.unique().numel() == 12


@pytest.mark.parametrize("name", NOISES)
def test_all_numbers_count_if_an_episode_ends_inside_a_chunk(name):
    """The noise of steps that are not taken changes the steps that are taken, since denoising mixes the chunk."""
    policy = tiny(**NOISES[name])
    params = params_of(policy)
    out, noise = acted(policy, params)
    changed = noise.clone()
    changed["noise"][..., 2, :] += 1.0
    other = policy.act(params, EMPTY, out["obs"], changed)[1]
    is_mixed = noise["step"] < 2 if "step" in noise.keys() else torch.ones(12, dtype=torch.bool)  # noqa: SIM118
    assert is_mixed.any() and not torch.isclose(other["action"], out["action"])[is_mixed, 0].any()
    rows = out.copy().set("executed", torch.ones(12, dtype=torch.int64))
    log_prob, entropy = policy.evaluate_rows(params, rows)
    close(log_prob, out["sample_log_prob"].sum(-1), tol=1e-5)
    close(sum_tokens(out["sample_log_prob"], rows), log_prob, tol=1e-5)
    close(entropy, policy.evaluate(params, EMPTY, rows)[1].sum(-1), tol=1e-5)


PLAIN = box(0, 255, 3, SIZE, SIZE, dtype=torch.uint8)
TASK = MultiDiscrete((9,) * 2)
SPACES = {
    "without an instruction": (dict_space({"camera": CAMERA, "proprio": box(-1.0, 1.0, 2)}), {}),
    "without a state": (dict_space({"camera": CAMERA, "instruction": TASK}), {}),
    "two cameras": (dict_space({"a": CAMERA, "b": CAMERA, "task": TASK}), {"instruction": "task"}),
    "an image with the channels first": (PLAIN, {}),
}


@pytest.mark.parametrize("name", SPACES)
def test_observations_of_any_parts(name):
    observations, changes = SPACES[name]
    policy = tiny(observations, **changes)
    params, obs = params_of(policy), example(observations)
    out = policy.act(params, EMPTY, obs, policy.draw(rng.split(rng.key(4), 2)))[1]
    log_prob, _ = policy.evaluate(params, EMPTY, out.copy().set("obs", obs))
    close(log_prob, out["sample_log_prob"], tol=1e-5)


SAME = ["init returns the same params for two keys; draw them from the key with ecrl.rng"]
CONTRACT = {
    "all weights": ({"section": {"normalize_obs": True}}, SAME),
    "a noise head, a critic and adapters": (NOISES["head"] | {"critic": "mlp", "adapters": {"rank": 2}}, []),
    "parts and adapters": ({"trained": ["dit"], "adapters": {"layers": ["language_model"]}}, []),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CONTRACT)
def test_the_functions_keep_the_contract(name):
    """Pretrained weights do not depend on the key, as they should."""
    changes, findings = CONTRACT[name]
    assert check_policy(tiny(**changes), space_of(SIZE), ACTIONS).findings == findings


def test_single_actions():
    policy = tiny(actions=box(-1.0, 1.0, 2))
    out, _ = acted(policy, params_of(policy))
    assert out["action"].shape == (12, 2) and out["sample_log_prob"].shape == (12, 2)


def test_bfloat16_is_near():
    one, other = tiny(), tiny(section={"bf16": True})
    actions = [acted(policy, params_of(policy), is_sampled=False)[0]["action"] for policy in (one, other)]
    assert actions[1].dtype == torch.float32 and not torch.equal(*actions)
    close(*actions, tol=0.1)


def test_statistics_of_the_checkpoint_scale_states_and_actions(tmp_path):
    path = tmp_path / "pi0"
    shutil.copytree(checkpoint(), path)
    write_statistics(path, state_mean=[1.0, 2.0], state_std=[0.5, 4.0], actions_mean=[0.1, 0.2], actions_std=[2.0, 3.0])
    plain, scaled = tiny(), tiny(path=str(path))
    out, _ = acted(scaled, params_of(scaled), is_sampled=False)
    obs = out["obs"].copy()
    obs["proprio"] = (obs["proprio"] - torch.tensor([1.0, 2.0])) / torch.tensor([0.5, 4.0])
    raw = plain.act(params_of(plain), EMPTY, obs, None)[1]["action"]
    close(out["action"], raw * torch.tensor([2.0, 3.0]) + torch.tensor([0.1, 0.2]), tol=1e-4)


STATISTICS = {
    "too short": (
        {"state_mean": [1.0], "state_std": [0.5]},
        r"state_mean has the length 1, but the environment has 2 numbers; correct the file$",
    ),
    "a number": ({"state_mean": 0.0, "state_std": [1.0, 1.0]}, r"state_mean is not a list of finite numbers; correct"),
    "strings": (
        {"actions_mean": [0.0, 0.0], "actions_std": ["a", "b"]},
        r"actions_std is not a list of finite numbers",
    ),
    "not a number": ({"state_mean": [0.0, math.nan], "state_std": [1.0, 1.0]}, r"state_mean is not a list of finite"),
    "a flag": ({"state_mean": [0.0, True], "state_std": [1.0, 1.0]}, r"state_mean is not a list of finite"),
    "no deviation": (
        {"state_mean": [0.0, 0.0]},
        r"processor_config.json' has state_mean, but no state_std; add it, or delete state_mean$",
    ),
    "no mean": ({"actions_std": [1.0, 1.0]}, r"has actions_std, but no actions_mean; add it, or delete actions_std$"),
    "a deviation of 0": (
        {"state_mean": [0.0, 0.0], "state_std": [1.0, 0.0]},
        r"state_std has 0.0, which is not above 0; correct the file$",
    ),
}


@pytest.mark.parametrize("case", STATISTICS)
def test_wrong_statistics_are_refused_in_one_line(case, tmp_path):
    numbers, message = STATISTICS[case]
    write_statistics(path := _copy(tmp_path), **numbers)
    with pytest.raises(ConfigError, match=r"^policy.vla.model_path: .*" + message) as caught:
        tiny(path=str(path))
    assert "\n" not in str(caught.value)


def test_states_are_standardised_once(tmp_path):
    write_statistics(path := _copy(tmp_path), state_mean=[1.0, 2.0], state_std=[0.5, 4.0])
    message = (
        r"^policy.normalize_obs: true, but processor_config.json of the checkpoint already standardises the state; set "
    )
    with pytest.raises(ConfigError, match=message):
        tiny(path=str(path), section={"normalize_obs": True})
    write_statistics(path, actions_mean=[0.1, 0.2], actions_std=[2.0, 3.0])
    tiny(path=str(path), section={"normalize_obs": True}, noise_level=0.4)


def test_trained_chooses_the_parts_that_learn():
    policy = tiny(trained=["dit", "action_out_proj"])
    params = policy.init(rng.key(0))
    names, frozen = set(params["model"].keys()), set(policy.init_frozen(torch.device("cpu"))["base"].keys())
    assert all(".dit." in name or "action_out_proj" in name for name in names) and len(names) == 21
    assert not names & frozen and "pi0.model.dit.embed_tokens.weight" in frozen


def test_with_a_critic_the_end_of_the_language_model_is_trained():
    policy = tiny(trained=["language_model.norm"], critic="mlp", adapters={"layers": ["language_model.layers.1.mlp"]})
    params = policy.init(rng.key(0))
    assert list(params["model"].keys()) == ["pi0.model.vlm.language_model.norm.weight"]
    assert len(params["adapters"].keys()) == 6


def test_adapters_start_at_the_pretrained_model():
    plain, adapted = tiny(), tiny(adapters={"rank": 2, "layers": ["q_proj", "dit"], "scale": 2.0})
    one, two = params_of(plain), params_of(adapted, seed=1)
    assert "model" not in two and all("adapter_" in name for name in two["adapters"].keys())  # noqa: SIM118
    actions = [acted(policy, params)[0]["action"] for policy, params in ((plain, one), (adapted, two))]
    assert torch.equal(*actions)
    moved = two.clone()
    moved["adapters"] = moved["adapters"].apply(lambda x: x + 0.1)
    assert not torch.allclose(acted(adapted, moved)[0]["action"], actions[0])
    keys = [
        adapted.init(rng.key(seed))["adapters", "pi0.model.dit.layers.0.mlp.up_proj.adapter_down"] for seed in (0, 1)
    ]
    assert keys[0].shape == (2, 24) and not torch.equal(*keys)


def test_instructions_are_tokens_of_the_checkpoint():
    ids, space = encode_instructions(checkpoint(), ["go red", "go go blue"])
    assert ids.tolist() == [[2, 3, 4, 7, 0], [2, 3, 3, 6, 7]] and space == MultiDiscrete((8,) * 5)
    assert ids.dtype == torch.int64
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(checkpoint(), local_files_only=True)
    assert tokenizer("<bos>go red\n", add_special_tokens=False)["input_ids"] == ids[0, :4].tolist()


def test_unknown_words_are_named(tmp_path):
    with pytest.raises(
        ConfigError, match=r"^encode_instructions: texts is empty; give the instructions of the environ"
    ):
        encode_instructions(checkpoint(), [])
    with pytest.raises(ConfigError) as caught:
        encode_instructions(checkpoint(), ["go red", "paint it red"])
    line = f"instruction 'paint it red': the tokenizer of {checkpoint()!r} does not know 'paint', 'it'; reword it"
    assert str(caught.value) == line
    path = tmp_path / "pi0"
    shutil.copytree(checkpoint(), path, ignore=shutil.ignore_patterns("token*", "special*"))
    with pytest.raises(ConfigError, match=r"^policy.vla.model_path: the tokenizer in .* cannot be loaded: ") as caught:
        encode_instructions(str(path), ["go red"])
    assert "\n" not in str(caught.value)


def test_without_transformers_the_line_names_the_extra(monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "transformers"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingExtraError, match=r"install it with: pip install 'ecrl\[vla\]'$"):
        tiny(noise_level=0.123)


FITTING = {
    "another size": (
        {"observations": dict_space({"camera": box(0, 255, 8, 8, 3, dtype=torch.uint8)})},
        r"^policy vla: image 'camera' is \[8, 8, 3\], but the checkpoint reads \[16, 16, 3\]; render it at this size$",
    ),
    "no image": (
        {"observations": dict_space({"instruction": MultiDiscrete((9,)), "x": box(-1.0, 1.0, 2)})},
        r"^policy vla: backend pi0 needs an image, but the observations have none; add a camera$",
    ),
    "ids of another tokenizer": (
        {"observations": dict_space({"camera": CAMERA, "instruction": MultiDiscrete((99, 3))})},
        r"^policy vla: 'instruction' has ids up to 98, but the checkpoint has 64 tokens; encode instructions with",
    ),
    "a long state": (
        {"observations": dict_space({"camera": CAMERA, "x": box(-1.0, 1.0, 6)})},
        r"^policy vla: a state has 6, but the checkpoint has room for 5 numbers; leave some observations out$",
    ),
    "no bounds": (
        {"actions": box(-math.inf, math.inf, 3, 2)},
        r"^policy vla: not all bounds of the action space are finite; give each entry finite bounds$",
    ),
    "a wide action": (
        {"actions": box(-1.0, 1.0, 3, 4)},
        r"^policy vla: a step of an action has 4, but the checkpoint has room for 3 numbers; use an action space with",
    ),
    "a long chunk": (
        {"actions": box(-1.0, 1.0, 5, 2)},
        r"^policy vla: a chunk of actions has 5, but the checkpoint has room for 4 steps; lower env.action_chunk$",
    ),
    "no such part": (
        {"trained": ["ditt"]},
        r"^policy.vla.trained: the model has no part 'ditt'; did you mean 'dit'\?$",
    ),
    "no such layer": (
        {"adapters": {"layers": ["qproj"]}},
        r"^policy.vla.adapters.layers: the model has no linear layer 'qproj'; did you mean 'q_proj'\?$",
    ),
    "a part that trains nothing": (
        {"trained": ["dit", "language_model.norm"]},
        r"^policy.vla.trained: 'language_model.norm' has no weights that change the actions; name another part, or, "
        r"if only a critic reads this part, set policy.vla.critic$",
    ),
    "a part that trains nothing with a critic": (
        {"trained": ["dit.embed_tokens"], "critic": "mlp"},
        r"^policy.vla.trained: 'dit.embed_tokens' has no weights that change the actions or the values; name another",
    ),
    "adapters that train nothing": (
        {"adapters": {"layers": ["language_model.layers.1.mlp"]}},
        r"^policy.vla.adapters.layers: 'language_model.layers.1.mlp' has no weights that change the actions; name",
    ),
    "a standardised image": (
        {"observations": dict_space({"camera": box(0.0, 1.0, SIZE, SIZE, 3)}), "section": {"normalize_obs": True}},
        r"^policy.normalize_obs: true, which would standardise the float image 'camera', but the checkpoint ",
    ),
    "no such instruction": (
        {"instruction": "text"},
        r"^policy.vla.instruction: the observations have no 'text'",
    ),
    "a range": (
        {"noise_head": "mlp", "noise_range": [0.2, 0.1]},
        r"^policy: vla: noise_range begins with 0.2, which is",
    ),
    "a range of nothing": ({"noise_range": [0.1, 0.2]}, r"^policy: vla: noise_range limits the output of noise_head"),
    "two noises": (
        {"noise_head": "mlp", "noise_level": 0.3},
        r"^policy: vla: noise_level is for Flow-SDE, but noise_hea",
    ),
}


@pytest.mark.parametrize("case", FITTING)
def test_one_clear_line(case):
    changes, message = FITTING[case]
    with pytest.raises(ConfigError, match=message) as caught:
        tiny(**changes)
    assert "\n" not in str(caught.value)


def _copy(tmp_path):
    path = tmp_path / "pi0"
    shutil.copytree(checkpoint(), path)
    return path


def _of_another_kind(path: Path):
    data = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(data | {"model_type": "llama"}))


def _without_a_weight(path: Path):
    weights = load_file(path / "model.safetensors")
    del weights["action_out_proj.bias"]
    save_file(weights, path / "model.safetensors", {"format": "pt"})


def _of_another_shape(path: Path):
    weights = load_file(path / "model.safetensors")
    weights["action_out_proj.bias"] = torch.zeros(7)
    save_file(weights, path / "model.safetensors", {"format": "pt"})


def _with_another_weight(path: Path):
    weights = load_file(path / "model.safetensors")
    weights["second_head.bias"] = torch.zeros(7)
    save_file(weights, path / "model.safetensors", {"format": "pt"})


def _with_a_wrong_size(path: Path):
    data = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(data | {"chunk_size": "a"}))


def _cut(path: Path):
    data = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(data[: len(data) // 2])


FAULTS = {
    "no folder": (shutil.rmtree, r"no such folder '.*pi0'; give the folder that save_pretrained of a pi0 model wrote$"),
    "no config": (lambda path: (path / "config.json").unlink(), r"has no config.json; give the folder that"),
    "no JSON": (lambda path: (path / "config.json").write_text("{"), r"config.json' cannot be read: JSONDecodeError"),
    "another kind": (_of_another_kind, r"is a checkpoint of 'llama', expected 'pi0'; give the folder"),
    "no weights": (lambda path: (path / "model.safetensors").unlink(), r"cannot be loaded by transformers: OSError"),
    "a weight less": (_without_a_weight, r"lacks weights: action_out_proj.bias; copy the checkpoint again$"),
    "another shape": (
        _of_another_shape,
        r"has weights of another shape: action_out_proj.bias \[7\], expected \[3\] by config.json; copy the checkpoint",
    ),
    "a weight more": (
        _with_another_weight,
        r"has weights that pi0 lacks: second_head.bias; remove them, or copy the checkpoint again$",
    ),
    "a wrong size": (_with_a_wrong_size, r"cannot be loaded by transformers: \w+: .*; copy the checkpoint again$"),
    "a damaged file": (_cut, r"cannot be loaded by transformers: SafetensorError: "),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_checkpoint_is_refused_in_one_line(fault, tmp_path, capfd):
    """Transformers prints nothing about the fault, and its settings stay as they were."""
    from transformers.utils import logging

    damage, message = FAULTS[fault]
    damage(path := _copy(tmp_path))
    settings, _ = (logging.get_verbosity(), logging.is_progress_bar_enabled()), capfd.readouterr()
    with pytest.raises(ConfigError, match=r"^policy.vla.model_path: .*" + message) as caught:
        tiny(path=str(path))
    assert "\n" not in str(caught.value)
    assert capfd.readouterr() == ("", "")
    assert settings == (logging.get_verbosity(), logging.is_progress_bar_enabled())


def test_weights_that_exceed_the_memory_are_refused_before_they_are_read(tmp_path, monkeypatch):
    weights = sum(x.numel() for x in load_file(Path(checkpoint()) / "model.safetensors").values())
    monkeypatch.setattr(ecrl.memory, "total_memory", lambda device: 4 * weights)
    params_of(tiny())
    monkeypatch.setattr(ecrl.memory, "total_memory", lambda device: 4 * weights - 1)
    message = rf"^policy.vla.model_path: the {weights:,} weights of '.*' take at least .* give a smaller checkpoint$"
    with pytest.raises(ConfigError, match=message):
        params_of(tiny(path=str(_copy(tmp_path))))


def test_a_path_is_needed():
    with pytest.raises(ConfigError, match=r"^policy.vla.model_path: absent, but backend pi0 reads a checkpoint; give"):
        make_policy({"name": "vla", "vla": {"backend": "pi0"}}, space_of(SIZE), ACTIONS)


def test_steps_of_other_policies_are_refused():
    policy = tiny()
    params = params_of(policy)
    out, _ = acted(policy, params)
    with pytest.raises(
        ConfigError, match=r"^policy vla: the steps have no flow_step, which act of backend pi0 returns"
    ):
        policy.evaluate(params, EMPTY, out.exclude("flow_step", "flow_sample", "flow_next"))


def test_other_checkpoints_give_other_policies(tmp_path):
    """Two checkpoints of different sizes can be used in one process."""
    path = write_checkpoint(tmp_path / "large", 1, chunk_size=6)
    policy = tiny(path=str(path), actions=Box((-1.0,) * 10, (1.0,) * 10, (5, 2)))
    out, _ = acted(policy, params_of(policy))
    assert out["action"].shape == (12, 5, 2) and out["flow_sample"].shape == (12, 6, NUMBERS)
