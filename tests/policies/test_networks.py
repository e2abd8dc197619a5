import pytest
import torch
from conftest import assert_no_retrace, close
from pydantic import ValidationError
from tensordict import TensorDict
from torch import nn

from ecrl.policies.mlp import MLPConfig, NetworkConfig, build_mlp, init_mlp, mlp, seeded

ACTIVATIONS = {"relu": nn.ReLU, "elu": nn.ELU, "tanh": nn.Tanh, "gelu": nn.GELU, "silu": nn.SiLU}
SHAPES = [  # settings, and the layers they mean for 3 inputs and 2 outputs
    ({"hidden_sizes": []}, lambda: [nn.Linear(3, 2)]),
    ({"hidden_sizes": [5]}, lambda: [nn.Linear(3, 5), nn.ELU(), nn.Linear(5, 2)]),
    (
        {"hidden_sizes": [5, 4], "activation": "tanh", "use_layernorm": True, "last_activation": "silu"},
        lambda: [
            *(nn.Linear(3, 5), nn.LayerNorm(5), nn.Tanh()),
            *(nn.Linear(5, 4), nn.LayerNorm(4), nn.Tanh()),
            *(nn.Linear(4, 2), nn.SiLU()),
        ],
    ),
    *(
        ({"hidden_sizes": [5], "activation": name}, lambda made=made: [nn.Linear(3, 5), made(), nn.Linear(5, 2)])
        for name, made in ACTIVATIONS.items()
    ),
    *(
        ({"hidden_sizes": [], "last_activation": name}, lambda made=made: [nn.Linear(3, 2), made()])
        for name, made in ACTIVATIONS.items()
    ),
]


def _weights(cfg, seed=0, inputs=3, outputs=2):
    with seeded(torch.tensor(seed)):
        return init_mlp(cfg, inputs, outputs)


def _linear(weights, part):
    """Weights or biases of the linear layers, in order; a LayerNorm's are 1-d and left out of the weights."""
    return [w for name, w in weights.items() if name.endswith(part) and (part == "bias" or w.ndim == 2)]


@pytest.mark.parametrize(("settings", "layers"), SHAPES)
def test_output_is_that_of_the_layers_by_hand(variant, settings, layers):
    cfg = MLPConfig(**settings)
    weights, by_hand = _weights(cfg), nn.Sequential(*layers())
    by_hand.load_state_dict(dict(weights.items()))  # same names, same shapes
    x = torch.linspace(-2.0, 2.0, 12).reshape(2, 2, 3)
    expected = by_hand(x).detach()
    close(variant(mlp(cfg, 3, 2))(weights, x), expected)
    assert expected.shape == (2, 2, 2)


def test_every_setting_changes_the_output():
    settings = [{}, {"use_layernorm": True}, *({"activation": name} for name in ACTIVATIONS if name != "elu")]
    settings += [{"last_activation": name} for name in ACTIVATIONS]
    cfgs = [MLPConfig(hidden_sizes=[8], **more) for more in settings]
    x = torch.linspace(-2.0, 2.0, 6).reshape(2, 3)
    outputs = [mlp(cfg, 3, 2)(_weights(cfg), x) for cfg in cfgs]
    assert min(float((a - b).abs().max()) for i, a in enumerate(outputs) for b in outputs[:i]) > 1e-4


def test_default_is_elu_without_extras():
    assert [type(layer) for layer in build_mlp(MLPConfig(hidden_sizes=[4]), 3, 2)] == [nn.Linear, nn.ELU, nn.Linear]


@pytest.mark.parametrize("gains", [1.5, [1.5, 0.5, 0.01]])
def test_orthogonal_weights_and_zero_biases(gains):
    # 6 <- 3: W^T W = gain^2 I; 4 <- 6 and 2 <- 4: W W^T = gain^2 I.
    weights = _weights(MLPConfig(hidden_sizes=[6, 4], orthogonal_init=gains))
    per_layer = gains if isinstance(gains, list) else [gains] * 3
    for w, gain in zip(_linear(weights, "weight"), per_layer, strict=True):
        product = w @ w.T if w.shape[0] <= w.shape[1] else w.T @ w
        close(product, gain**2 * torch.eye(len(product)), tol=1e-5)
    assert all((b == 0.0).all() for b in _linear(weights, "bias"))


def test_plain_init_is_torchs_own():
    cfg = MLPConfig(hidden_sizes=[6])
    with torch.random.fork_rng():
        torch.manual_seed(7)
        expected = nn.Sequential(nn.Linear(3, 6), nn.ELU(), nn.Linear(6, 2)).state_dict()
    weights = _weights(cfg, seed=7)
    assert sorted(weights.keys()) == sorted(expected)
    for name, value in expected.items():
        assert torch.equal(weights[name], value)


def test_layernorm_weights_keep_their_start_with_orthogonal_init():
    weights = _weights(MLPConfig(hidden_sizes=[6], use_layernorm=True, orthogonal_init=2.0))
    assert (weights["1.weight"] == 1.0).all() and (weights["1.bias"] == 0.0).all()


@pytest.mark.parametrize("cfg", [{"hidden_sizes": [4]}, {"hidden_sizes": [4], "orthogonal_init": 1.0}])
def test_init_depends_on_the_key_alone(cfg):
    before = torch.get_rng_state()
    first, again, other = (_weights(MLPConfig(**cfg), seed) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(first[name], again[name]) for name in first.keys())  # noqa: SIM118
    assert not torch.equal(first["0.weight"], other["0.weight"])


def test_seeded_puts_the_generator_back_after_an_error():
    before = torch.get_rng_state()
    with pytest.raises(RuntimeError), seeded(torch.tensor(-3)):
        raise RuntimeError
    assert torch.equal(torch.get_rng_state(), before)


def test_the_function_holds_no_weights_and_passes_gradients():
    cfg = MLPConfig(hidden_sizes=[4])
    weights = _weights(cfg).apply(lambda w: w.requires_grad_())
    x = torch.ones(5, 3, requires_grad=True)
    mlp(cfg, 3, 2)(weights, x).sum().backward()
    assert all(w.grad is not None and w.grad.abs().sum() > 0 for w in [x, *weights.values()])


def test_new_values_do_not_retrace():
    cfg = MLPConfig(hidden_sizes=[4], use_layernorm=True)
    assert_no_retrace(mlp(cfg, 3, 2), (_weights(cfg, 1), torch.ones(5, 3)), (_weights(cfg, 2), torch.zeros(5, 3)))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dropout_p": 0.1}, "dropout_p=0.1 is refused: dropout makes the probability ratio of the same action random"),
        ({"orthogonal_init": [1.0, 1.0, 1.0]}, "has 3 gains for 2 layers; give one number or 2"),
        ({"orthogonal_init": []}, "has 0 gains for 2 layers"),
        ({"orthogonal_init": 0.0}, "expected a number above 0, or a list of such numbers, one per layer"),
        ({"orthogonal_init": "xavier"}, "expected a number above 0, or a list"),
        ({"hidden_sizes": [0]}, "must be at least 1, got 0"),
        ({"activation": "sigmoid"}, "expected 'relu', 'elu', 'tanh', 'gelu' or 'silu', got 'sigmoid'"),
    ],
)
def test_refused_settings(settings, message):
    with pytest.raises(ValidationError) as error:
        MLPConfig(**{"hidden_sizes": [4], **settings})
    assert message in str(error.value)


def test_configs_are_hashable_and_equal_by_value():
    block = {"type": "mlp", "network_cfg": {"hidden_sizes": [4, 4], "orthogonal_init": [1, 1.0, 2.0]}}
    first, again = NetworkConfig(**block), NetworkConfig(**block)
    assert first == again and hash(first) == hash(again)
    assert NetworkConfig(**first.model_dump(mode="json")) == first


def test_wrong_width_is_an_error():
    cfg = MLPConfig(hidden_sizes=[4])
    with pytest.raises(RuntimeError, match="shape"):
        mlp(cfg, 3, 2)(TensorDict(dict(_weights(cfg).items()), []), torch.ones(5, 7))
