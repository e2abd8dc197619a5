"""The backend `openvla`: it computes what OpenVLA computes, acts as it evaluates, and refuses what does not fit."""

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.checks import assert_pure, close
from support.dots import scenes, space_of
from support.pretrained import ACTIONS, EMPTY, params_of, policy_of
from support.pretrained import acted as acted_on
from support.tiny_openvla import (
    BINS,
    FILL,
    MEANS,
    NAMES,
    ROWS,
    SIZE,
    STATISTICS,
    STDS,
    VISION,
    VOCABULARY,
    WIDTH,
    WORDS,
    checkpoint,
    text_config,
    write_checkpoint,
)

import ecrl.memory
from ecrl import rng
from ecrl.errors import ConfigError
from ecrl.loop.policy_check import check_policy
from ecrl.policies import encode_instructions
from ecrl.policies.vision_transformer import VisionTransformer, ViTSizes
from ecrl.spaces import MultiDiscrete, box, dict_space

DECODINGS = ["parallel", "autoregressive"]


def tiny(observations=None, actions=ACTIONS, path=None, section=None, **changes):
    space = space_of(SIZE) if observations is None else observations
    return policy_of("openvla", path or checkpoint(), space, actions, section, **changes)


def acted(policy, params, n=12, is_sampled=True):
    return acted_on(policy, params, SIZE, n, is_sampled)


def raw(path=None):
    files = sorted(Path(path or checkpoint()).glob("*.safetensors"))
    return {name: x for file in files for name, x in load_file(file).items()}


class Reference:
    """OpenVLA for one observation without padding, written anew with Llama of transformers and dense matrices.

    `cameras` are the names of the images in order. The vision models and the state are those of the weights.
    """

    def __init__(self, path=None, cameras=("camera",)):
        from transformers import LlamaConfig, LlamaForCausalLM

        self.weights, self.cameras = raw(path), cameras
        self.language = LlamaForCausalLM(LlamaConfig(**text_config())).eval()
        self.language.load_state_dict(self.below("language_model."))
        self.embedding = self.weights["language_model.model.embed_tokens.weight"]

    def below(self, prefix):
        return {name.removeprefix(prefix): x for name, x in self.weights.items() if name.startswith(prefix)}

    def dense(self, name, x):
        return x @ self.weights[f"{name}.weight"].T + self.weights[f"{name}.bias"]

    def see(self, image):
        seen = []
        for i, name in enumerate(VISION):
            if weights := self.below(f"vision_backbone.{name}."):
                sizes = ViTSizes.of(NAMES[i], SIZE, {key: tuple(x.shape) for key, x in weights.items()})
                model = VisionTransformer(sizes)
                model.load_state_dict(weights, strict=False)
                pixels = (image.double() / 255.0 - torch.tensor(MEANS[i])) / torch.tensor(STDS[i])
                seen.append(model(pixels.float().permute(2, 0, 1).unsqueeze(0))[0])
        x = self.dense("projector.fc1", torch.cat(seen, -1))
        for name in ("projector.fc2", "projector.fc3"):
            if f"{name}.weight" in self.weights:
                x = self.dense(name, torch.nn.functional.gelu(x))
        return x

    def prefix(self, obs):
        found = [self.see(obs[name]) for name in self.cameras]
        if "proprio_projector.fc1.weight" in self.weights:
            bounds = STATISTICS["proprio"]
            low, high = torch.tensor(bounds["q01"]), torch.tensor(bounds["q99"])
            state = (2.0 * (obs["proprio"] - low) / (high - low + 1e-8) - 1.0).clamp(-1.0, 1.0)
            state = torch.nn.functional.gelu(self.dense("proprio_projector.fc1", state))
            found.append(self.dense("proprio_projector.fc2", state).unsqueeze(0))
        ids = obs["instruction"][obs["instruction"] != 0]
        words = self.embedding[ids]
        return torch.cat((words[:1], *found, words[1:]))

    @torch.no_grad()
    def parallel(self, obs, count):
        """Return the logits of all rows of the vocabulary for each token. No token is hidden from another one."""
        x = self.prefix(obs)
        end = self.embedding[2:3]
        full = torch.cat((x, torch.zeros(count, WIDTH), end)).unsqueeze(0)
        mask = torch.zeros(1, 1, full.shape[1], full.shape[1])
        logits = self.language(inputs_embeds=full, attention_mask=mask).logits[0]
        return logits[len(x) - 1 : len(x) - 1 + count]

    @torch.no_grad()
    def after(self, obs, ids):
        """Return the logits of the next token after the given tokens, with plain causal attention."""
        x = torch.cat((self.prefix(obs), self.embedding[torch.tensor(ids, dtype=torch.int64)]))
        return self.language(inputs_embeds=x.unsqueeze(0)).logits[0, -1]


def numbers_of(ids):
    """Decode tokens as OpenVLA does."""
    edges = np.linspace(-1.0, 1.0, BINS)
    centres = (edges[:-1] + edges[1:]) / 2.0
    numbers = centres[np.clip(VOCABULARY - np.array(ids) - 1, 0, BINS - 2)].reshape(3, 2)
    low, high = (np.array(STATISTICS["action"][name]) for name in ("q01", "q99"))
    return torch.tensor(0.5 * (numbers + 1.0) * (high - low + 1e-8) + low)


@pytest.mark.parametrize("decoding", DECODINGS)
def test_deterministic_actions_are_those_of_openvla(decoding):
    """The tokens are the most probable of the last 16 tokens of the vocabulary, without the rows that fill it up."""
    policy = tiny(decoding=decoding)
    out, _ = acted(policy, params_of(policy), is_sampled=False)
    model = Reference()
    for i in range(12):
        obs, ids = out["obs"][i], []
        all_logits = model.parallel(obs, 6) if decoding == "parallel" else None
        for j in range(6):
            logits = all_logits[j] if decoding == "parallel" else model.after(obs, ids)
            legal = logits[VOCABULARY - BINS : VOCABULARY]
            ids.append(VOCABULARY - BINS + int(legal.argmax()))
            log_prob = legal.log_softmax(-1).max()
            close(out["sample_log_prob"][i].flatten()[j], log_prob, tol=2e-5)
        assert (VOCABULARY - 1 - torch.tensor(ids)).tolist() == out["action_tokens"][i].flatten().tolist()
        close(out["action"][i], numbers_of(ids), tol=1e-6)
    assert out["action_tokens"].flatten(1).unique(dim=0).shape[0] > 3, "actions depend on the observation"
    assert ROWS == VOCABULARY + FILL


@pytest.mark.parametrize("decoding", DECODINGS)
def test_acting_equals_evaluating(decoding):
    policy = tiny(decoding=decoding, critic="mlp", temperature=1.6)
    params = params_of(policy)
    out, _ = acted(policy, params)
    assert out["action"].shape == out["action_tokens"].shape == out["sample_log_prob"].shape == (12, 3, 2)
    log_prob, entropy = assert_pure(policy.evaluate, params, EMPTY, out)
    close(log_prob, out["sample_log_prob"], tol=1e-5)
    nested = out.reshape(3, 4)
    again, _, value = policy.evaluate_and_value(params, EMPTY, nested)
    close(again.flatten(0, 1), log_prob, tol=1e-5)
    assert entropy.shape == (12, 3, 2) and value.shape == (3, 4)
    close(policy.value(params, EMPTY, nested["obs"]), value, tol=1e-5)
    assert value.unique().numel() == 12


@pytest.mark.parametrize("decoding", DECODINGS)
def test_frequencies_are_the_probabilities(decoding):
    """Of 4,000 samples of one observation. The largest difference of 16 frequencies is below 0.04 (5 sigma)."""
    policy = tiny(decoding=decoding, actions=box(-1.0, 1.0, 2), temperature=3.0)
    params, n = params_of(policy), 4000
    obs = scenes(rng.key(3), 1, SIZE)[0].expand(n).clone()
    out = policy.act(params, EMPTY, obs, policy.draw(rng.split(rng.key(5), n)))[1]
    first = out["action_tokens"][:, 0, 0]
    expected = torch.zeros(BINS).scatter_(0, first, out["sample_log_prob"][:, 0, 0].exp())
    frequency = first.bincount(minlength=BINS) / n
    assert (frequency > 0.05).sum() > 2
    close(frequency, expected, tol=0.04)


@pytest.mark.parametrize("decoding", DECODINGS)
def test_padding_changes_nothing(decoding):
    """An instruction of two words and one of one word and padding: words after the end do not count."""
    policy = tiny(decoding=decoding)
    params = params_of(policy)
    out, _ = acted(policy, params, is_sampled=False)
    short = dict_space({"camera": box(0, 255, SIZE, SIZE, 3, dtype=torch.uint8), "proprio": box(-1.0, 1.0, 2)})
    two = dict_space({**dict(short.items), "instruction": MultiDiscrete((6, 6))})
    obs = out["obs"].copy()
    assert (obs["instruction"][:, 2] == 0).all()
    obs["instruction"] = obs["instruction"][:, :2]
    trimmed = tiny(two, decoding=decoding)
    again = trimmed.act(params, EMPTY, obs, None)[1]
    assert torch.equal(again["action_tokens"], out["action_tokens"])
    close(again["sample_log_prob"], out["sample_log_prob"], tol=1e-5)


def test_actions_are_read_back_as_tokens():
    policy = tiny()
    params = params_of(policy)
    out, _ = acted(policy, params, 200)
    assert out["action_tokens"].unique().numel() > 10
    last = out["action_tokens"] == BINS - 1
    again, _ = policy.evaluate(params, EMPTY, out.exclude("action_tokens"))
    close(again[~last], out["sample_log_prob"][~last], tol=1e-5)
    low, high = out["action"].flatten(0, -2).aminmax(dim=0)
    assert (low >= torch.tensor([-1.0, -0.5])).all() and (high <= torch.tensor([1.0, 0.5])).all() and high[0] > 0.6


def test_numbers_outside_the_mask_keep_their_size(tmp_path):
    statistics = {"dots": STATISTICS | {"action": STATISTICS["action"] | {"mask": [False, True]}}}
    path = str(write_checkpoint(tmp_path / "model", norm_stats=statistics))
    policy, plain = tiny(path=path), tiny(path=str(write_checkpoint(tmp_path / "plain")))
    params = params_of(policy)
    one, two = acted(policy, params)[0], acted(plain, params_of(plain))[0]
    assert torch.equal(one["action_tokens"], two["action_tokens"])
    close(one["action"][..., 1], two["action"][..., 1], tol=0.0)
    close(one["action"][..., 0], two["action"][..., 0], tol=1e-6)  # its bounds are -1 and 1
    again, _ = policy.evaluate(params, EMPTY, one.exclude("action_tokens"))
    is_last = one["action_tokens"] == BINS - 1
    close(again[~is_last], one["sample_log_prob"][~is_last], tol=1e-5)


def test_the_state_of_a_run_keeps_the_bounds(tmp_path):
    path = write_checkpoint(tmp_path / "model")
    policy = tiny(path=str(path))
    params = params_of(policy)
    assert params["statistics", "action", "low"].tolist() == [-1.0, -0.5]
    before = acted(policy, params)[0]
    params["statistics", "action", "high"] = torch.tensor([3.0, 0.5])
    assert acted(policy, params)[0]["action"][..., 0].max() > before["action"][..., 0].max()


CAMERA = box(0, 255, SIZE, SIZE, 3, dtype=torch.uint8)
TASK = MultiDiscrete((9,) * 2)
SPACES = {
    "two cameras": ({"front": CAMERA, "wrist": CAMERA}, {"state": 0}),
    "one vision model": ({"camera": CAMERA}, {"state": 0, "is_fused": False}),
    "one vision model and a state": ({"camera": CAMERA, "proprio": box(-1.0, 1.0, 2)}, {"is_fused": False}),
}


@pytest.mark.parametrize("decoding", DECODINGS)
@pytest.mark.parametrize("name", SPACES)
def test_models_and_observations_of_any_parts(name, decoding, tmp_path):
    parts, changes = SPACES[name]
    path = str(write_checkpoint(tmp_path / "model", **changes))
    policy = tiny(dict_space({**parts, "instruction": MultiDiscrete((6,) * 3)}), path=path, decoding=decoding)
    params, obs = params_of(policy), scenes(rng.key(3), 6, SIZE)[0]
    obs = obs.copy().update({"front": obs["camera"].flip(0), "wrist": obs["camera"]}).select(*parts, "instruction")
    out = policy.act(params, EMPTY, obs, policy.draw(rng.split(rng.key(4), 6)))[1].set("obs", obs)
    close(policy.evaluate(params, EMPTY, out)[0], out["sample_log_prob"], tol=1e-5)
    model = Reference(path, [part for part in parts if part != "proprio"])
    for i in range(6):
        ids = (VOCABULARY - 1 - out["action_tokens"][i].flatten()).tolist()
        for j in range(6):
            logits = model.parallel(obs[i], 6)[j] if decoding == "parallel" else model.after(obs[i], ids[:j])
            expected = logits[VOCABULARY - BINS : VOCABULARY].log_softmax(-1)[ids[j] - VOCABULARY]
            close(out["sample_log_prob"][i].flatten()[j], expected, tol=2e-5)


def test_images_with_the_channels_first(tmp_path):
    path = str(write_checkpoint(tmp_path / "model", state=0))
    last, first = CAMERA, box(0, 255, 3, SIZE, SIZE, dtype=torch.uint8)
    obs = scenes(rng.key(3), 4, SIZE)[0].select("camera", "instruction")
    other, words = obs.copy(), MultiDiscrete((6,) * 3)
    other["camera"] = obs["camera"].permute(0, 3, 1, 2).contiguous()
    actions = []
    for space, seen in ((last, obs), (first, other)):
        policy = tiny(dict_space({"camera": space, "instruction": words}), path=path)
        actions.append(policy.act(params_of(policy), EMPTY, seen, None)[1]["sample_log_prob"])
    assert torch.equal(*actions)


def test_float_images_are_not_standardised(tmp_path):
    path = str(write_checkpoint(tmp_path / "model", state=0))
    space = dict_space({"camera": box(0.0, 1.0, SIZE, SIZE, 3), "instruction": MultiDiscrete((6,) * 3)})
    tiny(space, path=path)
    message = r"^policy.normalize_obs: true, which would standardise the float image 'camera', but the checkpoint "
    with pytest.raises(ConfigError, match=message):
        tiny(space, path=path, section={"normalize_obs": True})


def test_bounds_of_fine_tuning_replace_those_of_the_pretrained_model(tmp_path):
    path = write_checkpoint(tmp_path / "model")
    tuned = {"mine": STATISTICS | {"action": {"q01": [0.0, 0.0], "q99": [3.0, 3.0]}}}
    (path / "dataset_statistics.json").write_text(json.dumps(tuned))
    assert params_of(tiny(path=str(path)))["statistics", "action", "high"].tolist() == [3.0, 3.0]
    with pytest.raises(ConfigError, match=r"^policy.vla.dataset: the checkpoint has no data set 'dots'; known: mine$"):
        tiny(path=str(path), dataset="dots")


def test_sizes_that_config_json_leaves_out_are_those_of_the_weights(tmp_path):
    """transformers saves only the settings of the language model that differ from its defaults."""
    text = text_config()
    text.pop("hidden_size")
    text.pop("vocab_size")
    path = str(write_checkpoint(tmp_path / "model", text_config=text))
    one, two = tiny(path=path), tiny()
    assert torch.equal(acted(one, params_of(one))[0]["action"], acted(two, params_of(two))[0]["action"])


@pytest.mark.parametrize("decoding", DECODINGS)
def test_bfloat16_is_near_and_its_logits_are_not_rounded(decoding):
    policy = tiny(decoding=decoding, section={"bf16": True}, temperature=1.6)
    params = params_of(policy)
    out, _ = acted(policy, params)
    log_prob, _ = policy.evaluate(params, EMPTY, out)
    assert log_prob.dtype == torch.float32
    close(log_prob, out["sample_log_prob"], tol=1e-5 if decoding == "parallel" else 0.2)
    probability = policy.evaluate(params, EMPTY, out)[0]
    assert not torch.equal(probability, probability.bfloat16().float())
    exact = tiny(decoding=decoding, temperature=1.6)
    close(exact.evaluate(params, EMPTY, out)[0], log_prob, tol=1.0)


SAME = ["init returns the same params for two keys; draw them from the key with ecrl.rng"]


@pytest.mark.slow
@pytest.mark.parametrize("decoding", DECODINGS)
@pytest.mark.parametrize("changes", [{}, {"critic": "mlp", "adapters": {"rank": 2}}], ids=["whole", "adapters"])
def test_the_functions_keep_the_contract(changes, decoding):
    """Pretrained weights do not depend on the key, as they should."""
    findings = check_policy(tiny(decoding=decoding, **changes), space_of(SIZE), ACTIONS).findings
    assert findings == ([] if changes else SAME)


def test_adapters_start_at_the_pretrained_model():
    plain, adapted = tiny(), tiny(adapters={"rank": 2, "layers": ["q_proj", "projector", "qkv"]})
    one, two = params_of(plain), params_of(adapted, seed=1)
    assert "model" not in two and all("adapter_" in name for name in two["adapters"].keys())  # noqa: SIM118
    actions = [acted(policy, params)[0]["action"] for policy, params in ((plain, one), (adapted, two))]
    assert torch.equal(*actions)
    moved = two.clone()
    moved["adapters"] = moved["adapters"].apply(lambda x: x + 0.3)
    assert not torch.equal(acted(adapted, moved)[0]["action"], actions[0])


def test_trained_chooses_the_parts_that_learn():
    params = tiny(trained=["projector", "lm_head"]).init(rng.key(0))
    assert len(params["model"].keys()) == 7 and "base" not in params


def test_weights_that_no_output_depends_on_are_left_out():
    params = params_of(tiny())
    mine = {name.removeprefix("openvla."): x for name, x in params["model"].items()}
    theirs = raw()
    left = {name for name in theirs if name not in mine}
    assert all(torch.equal(x, theirs[name]) for name, x in mine.items())
    starts = ("featurizer.blocks.2.", "featurizer.norm", "fused_featurizer.blocks.1.", "fused_featurizer.norm")
    starts += ("fused_featurizer.attn_pool",)
    assert left and all(name.startswith(tuple(f"vision_backbone.{x}" for x in starts)) for name in left)


def test_instructions_are_prompts_of_openvla():
    ids, space = encode_instructions(checkpoint(), ["Go red", "go go blue"])
    words = ["<s>", "In", ":", "What", "action", "should", "the", "robot", "take", "to", "go", "red", "?", "\n", "Out"]
    assert ids[0].tolist() == [WORDS[word] for word in (*words, ":", "\u2581")] + [0]
    assert ids.shape == (2, 18) and space.nvec == (int(ids.max()) + 1,) * 18
    with pytest.raises(
        ConfigError, match=r"^instruction 'paint it red': the tokenizer of .* does not know 'paint', 'i"
    ):
        encode_instructions(checkpoint(), ["paint it red"])


def _copy(tmp_path):
    shutil.copytree(checkpoint(), tmp_path / "model")
    return tmp_path / "model"


def _edit(path, **changes):
    data = json.loads((path / "config.json").read_text()) | changes
    (path / "config.json").write_text(json.dumps({key: x for key, x in data.items() if x is not None}))


def _drop(path, name, **changes):
    for file in path.glob("*.safetensors"):
        weights = {key: x for key, x in load_file(file).items() if key != name}
        save_file(weights | (changes if file.name.startswith("model-00001") else {}), file)


HEAD = "language_model.lm_head.weight"
DAMAGED = {
    "another model": (lambda p: _edit(p, model_type="pi0"), r"is a checkpoint of 'pi0', expected 'openvla'; give the "),
    "no model": (
        lambda p: _edit(p, model_type=None),
        r'has no "model_type" in its config.json, expected \'openvla\'; g',
    ),
    "no weights": (lambda p: [x.unlink() for x in p.glob("*.safetensors")], r"no file \*.safetensors; copy the check"),
    "a cut file": (lambda p: (p / "model-00001-of-00002.safetensors").write_bytes(b"12345678"), r"; copy it again$"),
    "a missing weight": (lambda p: _drop(p, HEAD), r"lacks the weight 'language_model.lm_head.weight'; copy the check"),
    "an unknown weight": (lambda p: _drop(p, "", extra=torch.zeros(1)), r"has an unknown weight 'extra'; copy the"),
    "another shape": (
        lambda p: _drop(p, HEAD, **{HEAD: torch.zeros(2, 2)}),
        r"language_model.lm_head.weight has the shape \[2, 2\], expected \[128, 32\]; copy the checkpoint again$",
    ),
    "another language model": (
        lambda p: _edit(p, text_config={"model_type": "gemma"}),
        r"the language model is not Llama 2, the only one that is supported; give another folder$",
    ),
    "vicuna": (lambda p: _edit(p, llm_backbone_id="vicuna-v15-7b"), r"the language model is not Llama 2, the only one"),
    "tied weights": (
        lambda p: _edit(p, text_config=text_config(tie_word_embeddings=True)),
        r"text_config has tie_word_embeddings, which is not supported; give another folder$",
    ),
    "a wrong setting of the language model": (
        lambda p: _edit(p, text_config=text_config(num_attention_heads=5)),
        r"text_config of config.json: .*; copy the file again$",
    ),
    "an unknown activation": (
        lambda p: _edit(p, text_config=text_config(hidden_act="nope")),
        r"text_config of config.json: KeyError: 'nope'; copy the file again$",
    ),
    "no embeddings": (
        lambda p: _drop(p, "language_model.model.embed_tokens.weight"),
        r"lacks the weight 'language_model.model.embed_tokens.weight'; copy the checkpoint again$",
    ),
    "a text for a number": (lambda p: _edit(p, pad_to_multiple_of="64"), r"config.json': pad_to_multiple_of: Input sh"),
    "too many bins": (
        lambda p: _edit(p, n_action_bins=1000),
        r"config.json has n_action_bins 1000, but the vocabulary has 120 tokens; copy the file again$",
    ),
    "sizes that are no numbers": (lambda p: _edit(p, image_sizes=["a", "b"]), r"config.json': image_sizes.0: Input "),
    "names that are no texts": (lambda p: _edit(p, timm_model_ids=[1, 2]), r"config.json': timm_model_ids.0: Input sh"),
    "one mean": (
        lambda p: (p / "preprocessor_config.json").write_text(json.dumps({"means": [[0.5]] * 2, "stds": STDS})),
        r"preprocessor_config.json': means.0: List should have at least 3 items",
    ),
    "a deviation of 0": (
        lambda p: (p / "preprocessor_config.json").write_text(json.dumps({"means": MEANS, "stds": [[0.0] * 3] * 2})),
        r"preprocessor_config.json': stds.0.0: Input should be greater than 0; copy the file again$",
    ),
    "another head": (
        lambda p: (p / "action_head--10_checkpoint.pt").write_bytes(b"x"),
        r"action_head--10_checkpoint.pt has weights that ecrl does not read; give a model whose actions are tokens ",
    ),
    "another activation": (
        lambda p: _edit(p, timm_override_act_layers=["quick_gelu", None]),
        r"timm_override_act_layers is set, but ecrl supports only GELU; give another folder$",
    ),
    "another vision model": (
        lambda p: _edit(p, timm_model_ids=["resnet50", "resnet50"]),
        r"unknown vision model 'resnet50'; known: vit_tiny",
    ),
    "one vision model": (
        lambda p: _edit(p, timm_model_ids=["vit_tiny"]),
        r"timm_model_ids has 1 entries, expected 2; copy the JSON files again$",
    ),
    "no statistics": (lambda p: _edit(p, norm_stats=None), r"config.json': no norm_stats, so the units of actions"),
    "short statistics": (
        lambda p: _edit(p, norm_stats={"dots": {"action": {"q01": [0.0], "q99": [1.0]}}}),
        r"action.q01 has 1 entries, but the environment has 2; use an environment with as many numbers",
    ),
    "a huge number": (
        lambda p: _edit(p, norm_stats={"dots": {"action": {"q01": [10**400, 0], "q99": [1.0, 1.0]}}}),
        r"action.q01 is not a list of finite numbers; correct the file$",
    ),
    "bounds in the wrong order": (
        lambda p: _edit(p, norm_stats={"dots": {"action": {"q01": [2.0, 0.0], "q99": [1.0, 1.0]}}}),
        r"action.q01 is above action.q99; correct the file$",
    ),
    "strings for statistics": (
        lambda p: _edit(p, norm_stats={"dots": {"action": {"q01": ["a", "b"], "q99": [1.0, 1.0]}}}),
        r"action.q01 is not a list of finite numbers; correct the file$",
    ),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_checkpoints_are_refused_in_one_line(case, tmp_path):
    damage, message = DAMAGED[case]
    damage(path := _copy(tmp_path))
    with pytest.raises(ConfigError, match=r"^policy.vla.model_path: .*" + message) as caught:
        params_of(tiny(path=str(path)))
    assert "\n" not in str(caught.value)


def test_weights_that_exceed_the_memory_are_refused_before_they_are_read(tmp_path, monkeypatch):
    weights = sum(x.numel() for x in raw().values())
    monkeypatch.setattr(ecrl.memory, "total_memory", lambda device: 4 * weights)
    params_of(tiny())
    monkeypatch.setattr(ecrl.memory, "total_memory", lambda device: 4 * weights - 1)
    message = rf"^policy.vla.model_path: the {weights:,} weights of '.*' take at least .* give a smaller checkpoint$"
    with pytest.raises(ConfigError, match=message):
        params_of(tiny(path=str(_copy(tmp_path))))


FITTING = {
    "no instruction": (
        {"observations": dict_space({"camera": CAMERA, "proprio": box(-1.0, 1.0, 2)})},
        r"^policy vla: backend openvla needs an instruction, but the observations have none; add one$",
    ),
    "no image": (
        {"observations": dict_space({"instruction": TASK, "proprio": box(-1.0, 1.0, 2)})},
        r"^policy vla: backend openvla needs an image, but the observations have none; add one$",
    ),
    "another size": (
        {"observations": dict_space({"a": box(0, 255, 8, 8, 3, dtype=torch.uint8), "instruction": TASK})},
        r"^policy vla: image 'a' is \[8, 8, 3\], but the checkpoint reads \[16, 16, 3\]; render it at this size$",
    ),
    "no state": (
        {"observations": dict_space({"a": CAMERA, "instruction": TASK})},
        r"^policy vla: the observations beside images and instruction have 0 numbers, but the checkpoint reads a state",
    ),
    "ids of another tokenizer": (
        {"observations": dict_space({"a": CAMERA, "instruction": MultiDiscrete((999,))})},
        r"^policy vla: 'instruction' has ids up to 998, but the checkpoint has 120 tokens; encode instructions with",
    ),
    "no path": ({"path": "/nowhere"}, r"^policy.vla.model_path: no such folder '/nowhere'; give the folder of an Open"),
    "no such data set": (
        {"dataset": "bridge"},
        r"^policy.vla.dataset: the checkpoint has no data set 'bridge'; known: dots$",
    ),
    "a scaled state": (
        {"section": {"normalize_obs": True}},
        r"^policy.normalize_obs: true, but the checkpoint has bounds of the state; set it to false$",
    ),
    "a wide action": (
        {"actions": box(-1.0, 1.0, 3, 4)},
        r"action.q01 has 2 entries, but the environment has 4; use an environment with as many numbers",
    ),
    "no bounds": (
        {"actions": box(-math.inf, math.inf, 3, 2)},
        r"^policy vla: not all bounds of the action space are finite; give each entry finite bounds$",
    ),
    "no such part": ({"trained": ["vision"]}, r"^policy.vla.trained: the model has no part 'vision'; "),
}


@pytest.mark.parametrize("case", FITTING)
def test_what_does_not_fit_is_refused_in_one_line(case):
    changes, message = FITTING[case]
    with pytest.raises(ConfigError, match=message) as caught:
        tiny(**changes)
    assert "\n" not in str(caught.value)


def test_one_of_several_data_sets_is_chosen(tmp_path):
    other = {"action": {"q01": [-2.0, -2.0], "q99": [2.0, 2.0]}, "proprio": STATISTICS["proprio"]}
    path = str(write_checkpoint(tmp_path / "model", norm_stats={"a": STATISTICS, "b": other}))
    message = r"^policy.vla.dataset: absent, but the checkpoint has several data sets; choose one: a, b$"
    with pytest.raises(ConfigError, match=message):
        tiny(path=path)
    assert params_of(tiny(path=path, dataset="b"))["statistics", "action", "high"].tolist() == [2.0, 2.0]
