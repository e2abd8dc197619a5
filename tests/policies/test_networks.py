"""Networks from a config, modules as pure functions, and which modules are refused."""

import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch
from pydantic import ValidationError
from support.checks import assert_no_retrace, close
from tensordict import TensorDict
from torch import nn

from ecrl.errors import ConfigError
from ecrl.policies import NetworkConfig, make_network
from ecrl.policies.mlp import MLPConfig, build_mlp
from ecrl.policies.networks import pure, seeded
from ecrl.spaces import box

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


def _net(cfg, inputs=3, outputs=2, bf16=False):
    return make_network(NetworkConfig(network_cfg=cfg.model_dump()), box(-9.0, 9.0, inputs), outputs, bf16)


def _weights(cfg, seed=0, inputs=3, outputs=2):
    with seeded(torch.tensor(seed)):
        return _net(cfg, inputs, outputs).init()


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
    close(variant(_net(cfg).forward)(weights, x), expected)
    assert expected.shape == (2, 2, 2)


def test_every_setting_changes_the_output():
    settings = [{}, {"use_layernorm": True}, *({"activation": name} for name in ACTIVATIONS if name != "elu")]
    settings += [{"last_activation": name} for name in ACTIVATIONS]
    cfgs = [MLPConfig(hidden_sizes=[8], **more) for more in settings]
    x = torch.linspace(-2.0, 2.0, 6).reshape(2, 3)
    outputs = [_net(cfg).forward(_weights(cfg), x) for cfg in cfgs]
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
def test_init_depends_only_on_the_key(cfg):
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
    _net(cfg).forward(weights, x).sum().backward()
    assert all(w.grad is not None and w.grad.abs().sum() > 0 for w in [x, *weights.values()])


def test_new_values_do_not_retrace():
    cfg = MLPConfig(hidden_sizes=[4], use_layernorm=True)
    assert_no_retrace(_net(cfg).forward, (_weights(cfg, 1), torch.ones(5, 3)), (_weights(cfg, 2), torch.zeros(5, 3)))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"dropout_p": 0.1},
            "dropout_p=0.1, expected 0: with dropout, the probability ratio is random",
        ),
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
    with pytest.raises(ConfigError, match=r"an observation has the shape \[5, 7\], but the networks were built for \["):
        _net(cfg).forward(TensorDict(dict(_weights(cfg).items()), []), torch.ones(5, 7))


class Buffered(nn.Module):
    """A weight, a frozen weight, a buffer, and one weight used in two places."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
        self.second.weight = self.first.weight
        self.frozen = nn.Parameter(torch.tensor([0.2, 0.5, 0.9]), requires_grad=False)
        self.register_buffer("shift", torch.tensor([1.0, 2.0, 3.0]))

    def forward(self, x):
        return self.second(self.first(x)) * self.frozen + self.shift


def test_buffers_frozen_and_tied_weights(variant):
    net = pure(Buffered, "buffered", False)
    with seeded(torch.tensor(4)):
        weights = net.init()
    assert list(weights.keys()) == ["first.weight"]
    with seeded(torch.tensor(0)):  # constants come from seed 0
        frozen = Buffered().frozen
    x, w = torch.linspace(-1.0, 1.0, 6).reshape(2, 3), weights["first.weight"]
    close(variant(net.forward)(weights, x), x @ w.T @ w.T * frozen + torch.tensor([1.0, 2.0, 3.0]))
    grads = torch.func.grad(lambda params: net.forward(params, x).sum())(weights)
    assert list(grads.keys()) == ["first.weight"]
    both = torch.autograd.grad((x @ (v := w.clone().requires_grad_()).T @ v.T * frozen).sum(), v)[0]
    close(grads["first.weight"], both)


def test_every_method_can_be_called_with_names():
    class Twice(nn.Linear):
        def twice(self, x, *, plus=0.0):
            return 2.0 * self(x) + plus

    net = pure(lambda: Twice(3, 2), "twice", False)
    weights = TensorDict({"weight": torch.ones(2, 3), "bias": torch.zeros(2)}, [])
    assert net.call(weights, "twice", torch.ones(1, 3), plus=1.0).tolist() == [[7.0, 7.0]]
    assert net.call(weights, "forward", torch.ones(1, 3)).tolist() == [[3.0, 3.0]]


REFUSED = [
    (nn.BatchNorm1d(3), r"layer 0 \(BatchNorm1d\) is in training mode.*call \.eval\(\) on it, or replace it"),
    (nn.BatchNorm1d(3, track_running_stats=False).eval(), r"layer 0 \(BatchNorm1d\) keeps no running statistics"),
    (nn.InstanceNorm1d(3, track_running_stats=True), r"layer 0 \(InstanceNorm1d\) is in training mode"),
    (nn.Dropout(0.1), r"layer 0 \(Dropout\) is in training mode"),
    (nn.AlphaDropout(0.1), r"layer 0 \(AlphaDropout\) is in training mode"),
    (nn.RReLU(), r"layer 0 \(RReLU\) is in training mode"),
    (nn.GRU(3, 3, num_layers=2, dropout=0.1), r"layer 0 \(GRU\) is in training mode"),
    (nn.TransformerEncoderLayer(3, 1), r"layer 0\.self_attn \(MultiheadAttention\) is in training mode"),
]


@pytest.mark.parametrize(("layer", "message"), REFUSED, ids=lambda x: type(x).__name__)
def test_layers_that_depend_on_the_batch_or_on_chance_are_refused_by_name(layer, message):
    with pytest.raises(ConfigError, match=f"^network 'mine': {message}"):
        pure(lambda: nn.Sequential(layer, nn.Linear(3, 2)), "network 'mine'", False)


@pytest.mark.parametrize("layer", [nn.BatchNorm1d(3).eval(), nn.Dropout(0.5).eval(), nn.Dropout(0.0), nn.LayerNorm(3)])
def test_the_same_layers_at_rest_are_not(layer):
    net = pure(lambda: nn.Sequential(nn.Linear(3, 3), layer), "network 'mine'", False)
    weights, x = net.init(), torch.linspace(-1.0, 1.0, 12).reshape(4, 3)
    close(net.forward(weights, x)[:2], net.forward(weights, x[:2]).detach())


def test_a_module_that_is_handed_out_again_and_again_keeps_its_weights():
    trained = nn.Linear(3, 2)
    net = pure(lambda: trained, "trained", False)
    weights = net.init()
    assert torch.equal(weights["weight"], trained.weight)
    weights["weight"].zero_()
    assert trained.weight.abs().sum() > 0 and trained.weight.device.type == "cpu"


def test_a_module_without_weights_is_refused():
    with pytest.raises(ConfigError, match="network 'mine': Tanh has no parameters to train"):
        pure(nn.Tanh, "network 'mine'", False)


def test_bf16_rounds_the_layers_and_nothing_else(variant):
    cfg = MLPConfig(hidden_sizes=[32, 32])
    weights, x = _weights(cfg), torch.linspace(-2.0, 2.0, 30).reshape(10, 3)
    exact = _net(cfg).forward(weights, x)
    out = variant(_net(cfg, bf16=True).forward)(weights, x)
    assert out.dtype == (torch.float64 if variant.name == "double" else torch.float32)
    error = (out.float() - exact).abs().max()
    assert error < 0.02, "bfloat16 keeps 8 bits"
    assert error > 1e-5 or variant.name == "double", "autocast leaves float64 alone"


def test_bf16_gradients_are_float32_and_close():
    cfg = MLPConfig(hidden_sizes=[32])
    weights, x = _weights(cfg), torch.linspace(-2.0, 2.0, 30).reshape(10, 3)
    rough, exact = (
        torch.func.grad(lambda w, net=_net(cfg, bf16=bf16): net.forward(w, x).square().mean())(weights)
        for bf16 in (True, False)
    )
    for name, grad in rough.items():
        assert grad.dtype == torch.float32
        close(grad, exact[name], tol=0.05)
    assert any(not torch.equal(grad, exact[name]) for name, grad in rough.items())


@contextmanager
def switching_often():
    """Let threads switch after 10 microseconds, so that races show."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        yield
    finally:
        sys.setswitchinterval(interval)


def test_threads_may_call_a_network_at_once_with_other_weights():
    """`ecrl.run` records videos in a thread of its own, with the policy that the main thread trains."""
    network = pure(lambda: nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)), "network", False)
    inputs, weights = (
        torch.ones(4, 3),
        [network.init().apply(lambda x, scale=scale: x * scale) for scale in (1.0, -3.0)],
    )
    expected = [network.forward(one, inputs) for one in weights]

    def all_equal(i: int) -> bool:
        return all(torch.equal(network.forward(weights[i], inputs), expected[i]) for _ in range(500))

    with switching_often(), ThreadPoolExecutor(2) as pool:
        assert list(pool.map(all_equal, (0, 1))) == [True, True]


def test_threads_may_draw_from_seeded_generators_at_once():
    keys = [torch.tensor(number) for number in range(3)]

    def draw(key: torch.Tensor) -> torch.Tensor:
        with seeded(key):
            return torch.stack([nn.Linear(2, 2).weight.detach() for _ in range(20)])

    expected = [draw(key) for key in keys]
    with switching_often(), ThreadPoolExecutor(3) as pool:
        actual = list(pool.map(draw, keys * 100))
    assert all(torch.equal(x, expected[i % 3]) for i, x in enumerate(actual))
