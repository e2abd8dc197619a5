"""The policy `vla`: act and evaluate agree, the cache changes nothing, and the network finds what is named."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pydantic import Field
from support.checks import assert_pure, close
from support.dots import RED, SMALL, WORDS, picture, scenes, space_of
from tensordict import TensorDict
from torch.func import vmap

from ecrl import rng
from ecrl.config import PolicyConfig
from ecrl.errors import ConfigError
from ecrl.loop.policy_check import check_policy
from ecrl.policies import Policy, VLAConfig, make_policy
from ecrl.registry import register_vla_backend
from ecrl.spaces import Box, Discrete, MultiDiscrete, Space, box, dict_space

DECODINGS = ("parallel", "autoregressive")
CAMERA, VECTOR, TEXT = box(0, 255, 16, 16, 3, dtype=torch.uint8), box(-1.0, 1.0, 2), MultiDiscrete((WORDS,) * 3)
CHUNK = box(-1.0, 1.0, 3, 2)
EMPTY = TensorDict({}, [])


def small(decoding="parallel", actions=CHUNK, observations=None, section=None, **changes):
    settings = {"name": "vla", "vla": SMALL | {"decoding": decoding} | changes, **(section or {})}
    return make_policy(settings, space_of(16) if observations is None else observations, actions)


def moved(policy, seed=0):
    """Weights away from their initial values, among which are zeros."""
    params = policy.init(rng.key(seed))
    noise = iter(range(10_000))
    return params.apply(lambda x: x + 0.3 * rng.normal(rng.fold_in(rng.key(5), next(noise)), x.shape))


def acted(policy, params, n=16, size=16, is_sampled=True):
    """Return steps in which the policy acts in scenes."""
    obs, _, _ = scenes(rng.key(3), n, size)
    noise = policy.draw(rng.split(rng.key(4), n)) if is_sampled else None
    carry, out = assert_pure(policy.act, params, EMPTY, obs, noise)
    assert carry.is_empty()
    return out.copy().update({"obs": obs, "done": torch.zeros(n, dtype=torch.bool)})


@pytest.mark.parametrize("decoding", DECODINGS)
def test_fields_have_one_entry_per_token(decoding):
    policy = small(decoding, critic="mlp")
    params = policy.init(rng.key(0))
    steps = acted(policy, params)
    assert steps["action"].shape == steps["action_tokens"].shape == steps["sample_log_prob"].shape == (16, 3, 2)
    assert steps["action_tokens"].dtype == torch.int64 and steps["obs", "camera"].dtype == torch.uint8
    assert "token_mask" not in steps and set(steps["action_tokens"].unique().tolist()) == set(range(5))
    close(steps["action"], (steps["action_tokens"] + 0.5) / 5 * 2 - 1)
    nested = mapped_to(steps, (2, 8))
    for name, shape in (("evaluate", (2, 8, 3, 2)), ("imitation_loss", (2, 8))):
        out = getattr(policy, name)(params, EMPTY, nested)
        assert (out[0] if isinstance(out, tuple) else out).shape == shape
    assert policy.value(params, EMPTY, nested["obs"]).shape == (2, 8)


def mapped_to(steps, batch):
    return steps.reshape(*batch)


@pytest.mark.parametrize("decoding", DECODINGS)
@pytest.mark.parametrize("is_sampled", [True, False])
@pytest.mark.parametrize("temperature", [1.0, 0.5, 1.6])
def test_acting_equals_evaluating(decoding, is_sampled, temperature):
    """For autoregressive decoding, the cached loop equals teacher forcing in one pass."""
    policy = small(decoding, temperature=temperature, bins=[5, 3])
    params = moved(policy)
    steps = acted(policy, params, 64, is_sampled=is_sampled)
    log_prob, entropy = assert_pure(policy.evaluate, params, EMPTY, steps)
    close(log_prob, steps["sample_log_prob"], tol=1e-5)
    assert log_prob.std() > 0.1 and (entropy > 0.0).all()
    from_bins, _ = policy.evaluate(params, EMPTY, steps.exclude("action_tokens"))
    assert torch.equal(from_bins, log_prob)
    second = steps["action_tokens"][..., 1]
    assert second.max() == 2 if is_sampled else second.max() <= 2, "the second number has three bins"


@pytest.mark.parametrize("decoding", DECODINGS)
def test_no_noise_takes_the_most_probable_bins(decoding):
    """Each token has the largest probability given the tokens before it."""
    policy = small(decoding)
    params = moved(policy)
    steps = acted(policy, params, 8, is_sampled=False)
    best, _ = policy.evaluate(params, EMPTY, steps)
    for i in range(6):
        row, column = divmod(i, 2)
        for token in range(5):
            tokens = steps["action_tokens"].clone()
            tokens[:, row, column] = token
            log_prob, _ = policy.evaluate(params, EMPTY, steps.copy().set("action_tokens", tokens))
            assert (log_prob[:, row, column] <= best[:, row, column] + 1e-6).all()


@pytest.mark.parametrize("decoding", DECODINGS)
def test_probabilities_depend_on_the_tokens_before_only(decoding):
    policy = small(decoding)
    params = moved(policy)
    steps = acted(policy, params, 8)
    before, _ = policy.evaluate(params, EMPTY, steps)
    tokens = steps["action_tokens"].clone()
    tokens[:, 1, 0] = (tokens[:, 1, 0] + 1) % 5
    after, _ = policy.evaluate(params, EMPTY, steps.copy().set("action_tokens", tokens))
    changed = (before != after).flatten(1).any(0).tolist()
    assert changed == [False, False, True, *[decoding == "autoregressive"] * 3]


def test_sampled_frequencies_are_the_probabilities():
    policy = small("autoregressive", actions=box(-1.0, 1.0, 2), bins=3, temperature=0.7)
    params, n = moved(policy), 20_000
    obs = scenes(rng.key(3), 1, 16)[0].expand(n)
    out = policy.act(params, EMPTY, obs, policy.draw(rng.split(rng.key(4), n)))[1]
    assert out["action"].shape == (n, 2) and out["action_tokens"].shape == (n, 1, 2)
    pairs = torch.cartesian_prod(torch.arange(3), torch.arange(3)).unsqueeze(1)
    log_prob, _ = policy.evaluate(params, EMPTY, TensorDict({"obs": obs[:9], "action_tokens": pairs}, [9]))
    expected = log_prob.sum((1, 2)).exp()
    seen = (3 * out["action_tokens"][:, 0, 0] + out["action_tokens"][:, 0, 1]).bincount(minlength=9) / n
    close(expected.sum(), 1.0, tol=1e-5)
    assert (seen - expected).abs().max() < 4.0 * 0.5 / n**0.5


@pytest.mark.parametrize("decoding", DECODINGS)
def test_padding_does_not_change_the_policy(decoding):
    """An instruction of two words has the same meaning with room for three and for five."""
    short, long = small(decoding), small(decoding, observations=space_of(16) and _with_words(5))
    params = moved(short)
    weights = moved(long)
    for name in params.keys(True, True):
        if name != ("words", "position"):
            weights[name] = params[name]
    weights["words", "position"][:3] = params["words", "position"]
    steps = acted(short, params, 8)
    padded = F.pad(steps["obs", "instruction"], (0, 2))
    obs = steps["obs"].copy().set("instruction", padded)
    expected, _ = short.evaluate(params, EMPTY, steps)
    close(long.evaluate(weights, EMPTY, steps.copy().set("obs", obs))[0], expected, tol=1e-5)


def _with_words(length):
    return dict_space({"camera": CAMERA, "proprio": VECTOR, "instruction": MultiDiscrete((WORDS,) * length)})


OBSERVATIONS = {
    "an image": CAMERA,
    "a vector": VECTOR,
    "a Dict of an image": dict_space({"camera": CAMERA}),
    "text and a vector": dict_space({"instruction": TEXT, "proprio": VECTOR}),
    "two images and a choice": dict_space({"a": CAMERA, "b.c": CAMERA, "gear": Discrete(3), "instruction": TEXT}),
    "an instruction of numbers": dict_space({"camera": CAMERA, "instruction": VECTOR}),
}


@pytest.mark.parametrize("name", OBSERVATIONS)
@pytest.mark.parametrize("decoding", DECODINGS)
def test_observations_of_any_parts(name, decoding):
    observations = OBSERVATIONS[name]
    policy = small(decoding, observations=observations, critic="mlp")
    assert check_policy(policy, observations, CHUNK).findings == []


@pytest.mark.parametrize("decoding", DECODINGS)
def test_a_critic_does_not_change_the_actor(decoding):
    """The weights of a policy without a critic, such as a cloned one, act alike in a policy with a critic."""
    without, with_critic = small(decoding), small(decoding, critic="mlp")
    params = moved(without)
    more = with_critic.init(rng.key(9)).update(params)
    steps = acted(without, params)
    log_prob, entropy = without.evaluate(params, EMPTY, steps)
    same_log_prob, same_entropy = with_critic.evaluate(more, EMPTY, steps)
    close(same_log_prob, log_prob)
    close(same_entropy, entropy)
    value = with_critic.value(more, EMPTY, steps["obs"])
    assert value.unique().numel() == len(value)


def test_positions_are_not_copies_of_words():
    words = small().init(rng.key(0))["words"]
    n = min(len(words["position"]), len(words["embedding"]))
    assert not torch.allclose(words["position"][:n], 0.02 * words["embedding"][:n])


def test_the_name_of_the_instruction():
    observations = dict_space({"camera": CAMERA, "task": MultiDiscrete((7, 9))})
    assert "words" not in small(observations=observations).init(rng.key(0))
    policy = small(observations=observations, instruction="task")
    assert policy.init(rng.key(0))["words", "embedding"].shape == (9, 16)
    assert check_policy(policy, observations, CHUNK).findings == []


@pytest.mark.parametrize("decoding", DECODINGS)
def test_normalised_bf16_and_stacked(decoding):
    policy = small(decoding, section={"normalize_obs": True, "bf16": True}, critic="mlp")
    assert check_policy(policy, space_of(16), CHUNK, tolerance=0.05).findings == []
    settings, seen = {"name": "vla", "vla": SMALL | {"decoding": decoding}}, dict_space({"a": CAMERA, "b": VECTOR})
    stacked = make_policy(settings, seen, CHUNK, frame_stack=2)
    assert stacked.imitation_loss is not None and check_policy(stacked, seen, CHUNK).findings == []


@pytest.mark.parametrize("decoding", DECODINGS)
def test_gradients_reach_every_group(decoding):
    policy = small(decoding, critic="mlp")
    params = policy.init(rng.key(0))
    steps = acted(policy, params)

    def loss(params):
        log_prob, entropy, value = policy.evaluate_and_value(params, EMPTY, steps)
        return log_prob.sum() + entropy.sum() + value.sum()

    grads = torch.func.grad(loss)(params)
    groups = {"images", "words", "others", "layers", "actions", "critic"}
    assert set(grads.keys()) == groups
    zero = [name for name, grad in grads.items(True, True) if not (grad.isfinite().all() and grad.any())]
    assert zero == []


@pytest.mark.parametrize("decoding", DECODINGS)
def test_vmapped_seeds_equal_one_seed_at_a_time(decoding):
    policy = small(decoding)
    params = torch.stack([moved(policy, seed) for seed in range(3)])
    obs, noise = scenes(rng.key(3), 4, 16)[0], policy.draw(rng.split(rng.key(4), 4))
    out = vmap(lambda p: policy.act(p, EMPTY, obs, noise)[1])(params)
    steps = out.copy().set("obs", torch.stack([obs] * 3))
    log_prob = vmap(lambda p, s: policy.evaluate(p, EMPTY, s)[0])(params, steps)
    for i in range(3):
        single = policy.act(params[i], EMPTY, obs, noise)[1]
        assert torch.equal(out["action_tokens"][i], single["action_tokens"])
        close(out["sample_log_prob"][i], single["sample_log_prob"], tol=1e-5)
        close(log_prob[i], single["sample_log_prob"], tol=1e-5)


@pytest.mark.parametrize("decoding", DECODINGS)
def test_the_size_with_the_defaults(decoding):
    policy = make_policy({"name": "vla", "vla": {"decoding": decoding}}, space_of(64), box(-1.0, 1.0, 4, 2))
    count = sum(x.numel() for x in policy.init(rng.key(0)).values(True, True))
    assert 300_000 < count < 320_000


def test_a_new_policy_chooses_all_bins_with_similar_probability():
    policy = make_policy({"name": "vla"}, space_of(64), box(-1.0, 1.0, 4, 2))
    steps = acted(policy, policy.init(rng.key(0)), 8, 64)
    _, entropy = policy.evaluate(policy.init(rng.key(0)), EMPTY, steps)
    assert entropy.min() > 0.98 * torch.tensor(32.0).log()


def test_fixed_numbers_do_not_count():
    actions = Box((-1.0, 0.5) * 3, (1.0, 0.5) * 3, (3, 2))
    policy = small("autoregressive", actions=actions)
    params = moved(policy)
    steps = acted(policy, params)
    assert steps["token_mask"].tolist() == [[[True, False]] * 3] * 16
    assert (steps["action"][..., 1] == 0.5).all() and not steps["action_tokens"][..., 1].any()
    close(steps["sample_log_prob"][..., 1], torch.zeros(16, 3))
    assert check_policy(policy, space_of(16), actions).findings == []


def test_only_executed_steps_count():
    policy = small("autoregressive")
    params = moved(policy)
    steps = acted(policy, params, 4)
    rows = steps.copy().set("executed", torch.tensor([1, 2, 3, 0]))
    log_prob, _ = policy.evaluate(params, EMPTY, rows)
    summed, _ = policy.evaluate_rows(params, rows)
    close(summed, torch.stack([log_prob[i, :n].sum() for i, n in enumerate((1, 2, 3, 0))]), tol=1e-5)
    whole, cut = policy.imitation_rows(params, steps), policy.imitation_rows(params, rows)
    close(whole[2], cut[2], tol=1e-5)
    assert (cut[:2] < whole[:2]).all() and cut[3] == 0.0


def test_the_imitation_loss_by_hand():
    """Cross-entropy with a Gaussian target over the legal bins, without smoothing the negative log-probability."""
    for width in (0.0, 0.8):
        policy = small(label_smoothing=width, bins=[5, 3])
        params = moved(policy)
        steps = acted(policy, params, 6)
        per_bin = []
        for token in range(5):
            tokens = torch.full_like(steps["action_tokens"], token)
            per_bin.append(policy.evaluate(params, EMPTY, steps.copy().set("action_tokens", tokens))[0])
        log_p = torch.stack(per_bin, -1)
        expected = torch.zeros(6, dtype=torch.float64)
        for n in range(6):
            for i in range(3):
                for j, legal in enumerate((5, 3)):
                    own = int(steps["action_tokens"][n, i, j])
                    bins = torch.arange(legal, dtype=torch.float64)
                    target = torch.exp(-((bins - own) ** 2) / (2 * width**2)) if width else (bins == own).double()
                    expected[n] -= (target / target.sum() * log_p[n, i, j, :legal].double()).sum()
        close(policy.imitation_loss(params, EMPTY, steps), expected.float(), tol=1e-4)


def test_equal_configs_share_functions_and_others_do_not():
    assert small() == small() and small() != small("autoregressive")
    assert small(temperature=2.0) != small()


@pytest.mark.long
@pytest.mark.parametrize("decoding", DECODINGS)
def test_compiled_equals_eager(decoding):
    policy = small(decoding, critic="mlp")
    params = moved(policy)
    steps = acted(policy, params)
    noise = policy.draw(rng.split(rng.key(4), 16))
    act = torch.compile(lambda p, o, z: policy.act(p, EMPTY, o, z)[1], fullgraph=True)
    evaluate = torch.compile(lambda p, s: policy.evaluate_and_value(p, EMPTY, s), fullgraph=True)
    with torch.no_grad():
        out = act(params, steps["obs"], noise)
        assert torch.equal(out["action_tokens"], steps["action_tokens"])
        close(out["sample_log_prob"], steps["sample_log_prob"], tol=1e-4)
        for one, other in zip(evaluate(params, steps), policy.evaluate_and_value(params, EMPTY, steps), strict=True):
            close(one, other, tol=1e-4)


def localise(decoding, steps, size=32):
    """Clone "be where the named dot is" from random scenes, and return the policy and its parameters."""
    settings = {"name": "vla", "vla": {"decoding": decoding}}
    policy = make_policy(settings, space_of(size), box(-1.0, 1.0, 2, 2))
    params = policy.init(rng.key(0)).requires_grad_()
    leaves = list(params.values(True, True))
    optimizer = torch.optim.AdamW(leaves, 1e-3, weight_decay=1e-2)
    for i in range(steps):
        obs, xy, goal = scenes(rng.fold_in(rng.key(1), i), 64, size)
        action = xy[torch.arange(64), goal].unsqueeze(1).expand(64, 2, 2)
        rows = TensorDict({"obs": obs, "action": action, "done": torch.zeros(64, dtype=torch.bool)}, [64])
        optimizer.param_groups[0]["lr"] = 1e-3 * min(1.0, (i + 1) / 50) * (0.3 if i > 0.7 * steps else 1.0)
        optimizer.zero_grad()
        policy.imitation_rows(params, rows).mean().backward()
        torch.nn.utils.clip_grad_norm_(leaves, 1.0)
        optimizer.step()
    return policy, params.detach()


@pytest.mark.long
@pytest.mark.parametrize("decoding", ["parallel", "autoregressive"])
def test_the_network_finds_what_the_instruction_names(decoding):
    """New scenes; with another instruction, the policy goes to the other dot."""
    policy, params = localise(decoding, 450)
    obs, xy, goal = scenes(rng.key(99), 300, 32)
    for shift in range(3):
        named = (goal + shift) % 3
        words = obs["instruction"].clone()
        words[:, 1] = RED + named
        with torch.no_grad():
            action = policy.act(params, EMPTY, obs.copy().set("instruction", words), None)[1]["action"][:, 0]
        distance = (action.unsqueeze(1) - xy).norm(dim=-1)
        assert (distance.argmin(1) == named).float().mean() > 0.9
        assert distance[torch.arange(300), named].median() < 0.12


def test_pictures_have_dots_where_they_should_be():
    image = picture(torch.tensor([[[-0.5, 0.5], [0.5, 0.5], [0.0, -0.5]]]), 32)[0].double()
    assert image.shape == (32, 32, 3)
    line = torch.linspace(-1.0, 1.0, 32, dtype=torch.float64)
    for channel, (x, y) in enumerate(((-0.5, 0.5), (0.5, 0.5), (0.0, -0.5))):
        lit = (image[..., channel] > 150.0).double()
        close((lit.sum(0) * line).sum() / lit.sum(), x, tol=0.05)
        close((lit.sum(1) * line).sum() / lit.sum(), y, tol=0.05)


NESTED = dict_space({"arm": dict_space({"camera": CAMERA})})
INFINITE = box(-torch.inf, torch.inf, 2)
WRONG = {
    "discrete actions": ({"actions": Discrete(3)}, r"^policy vla: expected Box actions \[A\] or chunks \[k, A\], got"),
    "a number": ({"actions": box(-1.0, 1.0)}, r"^policy vla: expected Box actions .* got Box \[\]; use actor_critic$"),
    "no bounds": ({"actions": INFINITE}, r"^policy vla: not all bounds of the action space are finite"),
    "integers": ({"actions": box(0, 3, 2, dtype=torch.int64)}, r"^policy vla: actions of a Box \[2\] of int64"),
    "a float image": (
        {"observations": dict_space({"camera": CAMERA, "second": box(0.0, 255.0, 8, 8, 3)})},
        r"^policy vla: expected integers from 0 or floats from 0 to 1 for the image 'second', got a Box \[8, 8, 3\] of",
    ),
    "another horizon": (
        {"action_horizon": 8},
        r"^policy.vla.action_horizon: 8, but an action of the environment has 3 steps; set env.action_chunk to 8, or",
    ),
    "another size": ({"section": {"action_dim": 4}}, r"^policy.action_dim: 4 does not match the environment's 6"),
    "bins of another size": ({"bins": [4, 4, 4]}, r"^policy.vla.bins: has 3 entries for steps of 2 numbers; give 2$"),
    "no such instruction": (
        {"instruction": "instructoin"},
        r"^policy.vla.instruction: the observations have no 'instructoin'; did you mean 'instruction'\?$",
    ),
    "an instruction of pixels": (
        {"instruction": "camera"},
        r"^policy.vla.instruction: expected 'camera' as MultiDiscrete, the ids of words, got a Box \[16, 16, 3\]",
    ),
    "ids in a box": (
        {"observations": dict_space({"camera": CAMERA, "instruction": box(0, 9, 6, dtype=torch.int64)})},
        r"^policy vla: expected 'instruction' as MultiDiscrete, the ids of words, got a Box \[6\]",
    ),
    "an instruction beside nothing": (
        {"instruction": "text", "observations": CAMERA},
        r"^policy.vla.instruction: the observations have no 'text'; they are not a Dict$",
    ),
    "nothing to see": (
        {"observations": dict_space({"instruction": TEXT})},
        r"^policy vla: the observations have neither an image nor a vector; add one of them$",
    ),
    "an image inside": ({"observations": NESTED}, r"^policy vla: the image inside 'arm' is not at the top level"),
    "bfloat16 of nothing": (
        {"observations": VECTOR, "section": {"bf16": True}},
        r"^policy.bf16: only convolutions run in bfloat16, but there is no image; leave it out$",
    ),
    "no clipping": (
        {"section": {"clip_actions": False}},
        r"^policy.clip_actions: false, but bins are inside the action space; leave it out$",
    ),
    "too large": ({"width": 65536, "heads": 2}, r"^policy.vla.width: 51,539,607,552 weights and their gradients take"),
}


@pytest.mark.parametrize("case", WRONG)
def test_one_clear_line(case):
    changes, message = WRONG[case]
    with pytest.raises(ConfigError, match=message) as caught:
        small(**changes)
    assert "\n" not in str(caught.value)


SETTINGS = {
    "heads": ({"width": 16, "heads": 3}, "policy: vla: width=16 is not a multiple of heads=3; change one of them"),
    "path": ({"model_path": "x"}, "policy: vla: model_path is given, but backend builtin begins with new weights"),
    "bins": ({"bins": 1}, "policy: vla.bins: must be at least 2, got 1"),
    "bins by name": ({"bins": "many"}, "policy: vla.bins: expected a number, or a list of numbers, got 'many'"),
    "backend": ({"backend": "bultin"}, "policy: vla.backend: unknown vla_backend 'bultin'; did you mean 'builtin'?"),
    "key": ({"decodin": "parallel"}, "policy: vla.decodin: unknown key; did you mean 'decoding'?"),
}


@pytest.mark.parametrize("case", SETTINGS)
def test_settings_that_cannot_be(case):
    changes, start = SETTINGS[case]
    with pytest.raises(ConfigError) as caught:
        small(**changes)
    assert str(caught.value).startswith(start) and "\n" not in str(caught.value)


class MineConfig(VLAConfig):
    """One setting."""

    speed: float = Field(1.0, description="a number")


@pytest.mark.usefixtures("restored_registry")
def test_a_backend_of_ones_own():
    made = []

    @register_vla_backend("mine")
    def mine(cfg: MineConfig, observation_space: Space, action_space: Space, policy_cfg: PolicyConfig) -> Policy:
        made.append((cfg, policy_cfg))
        return replace(small(), imitation_loss=None)

    policy = small(section={"vla": {"backend": "mine", "speed": 2.0, "model_path": "here", "action_horizon": 3}})
    cfg, section = made[0]
    assert (cfg.speed, cfg.model_path, section.vla, policy.name) == (2.0, "here", cfg, "vla")
    steps = acted(policy, policy.init(rng.key(0)))
    params = policy.init(rng.key(0))
    close(policy.imitation_rows(params, steps), -policy.evaluate_rows(params, steps)[0])
    with pytest.raises(ConfigError, match=r"vla.speed: expected a number, got 'fast'; a number$"):
        small(section={"vla": {"backend": "mine", "speed": "fast"}})


def test_the_imitation_loss_is_checked():
    made = small()
    for change, message in (
        (lambda loss: loss * torch.nan, "imitation_loss returns NaN or infinity; mend its computation"),
        (
            lambda loss: loss.mean(),
            "imitation_loss returns the loss as float32 [], expected float [4, 14]",
        ),
    ):

        def imitation_loss(params, carry, steps, change=change):
            loss: Any = made.imitation_loss
            return change(loss(params, carry, steps))

        (finding,) = check_policy(replace(made, imitation_loss=imitation_loss), space_of(16), CHUNK).findings
        assert finding.startswith(message)


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (
            lambda keys: rng.uniform(keys)[:1],
            "draw_imitation returns noise float32 [1, 14], expected [4, 14, ...]; return",
        ),
        (lambda keys: torch.rand(keys.shape), "draw_imitation draws random numbers from a generator of torch, so"),
        (lambda: None, "draw_imitation takes (), expected (keys); take these arguments by position"),
    ],
)
def test_the_noise_of_imitation_is_checked(draw, message):
    made = small()

    def imitation_loss(params, carry, steps):
        loss: Any = made.imitation_loss
        return loss(params, carry, steps) + steps["imitation_noise"]

    noisy = replace(made, imitation_loss=imitation_loss, draw_imitation=rng.uniform)
    assert check_policy(noisy, space_of(16), CHUNK).findings == []
    (finding,) = check_policy(replace(noisy, draw_imitation=draw), space_of(16), CHUNK).findings
    assert message in finding
    (finding,) = check_policy(replace(noisy, imitation_loss=None), space_of(16), CHUNK).findings
    assert finding == "has draw_imitation, but no imitation_loss; pass imitation_loss too"
