"""Low-rank adapters: a new adapter changes nothing, merged weights act alike, and wrong names are named."""

import pytest
import torch
from support.checks import close
from torch import nn
from torch.func import functional_call

from ecrl.errors import ConfigError
from ecrl.policies.low_rank import AdaptersConfig, add_adapters, is_adapter, merged


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4, bias=False))
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.body(x).tanh())


def adapted(layers, rank=2, scale=0.5):
    torch.manual_seed(0)
    net = Net()
    x = torch.randn(6, 3)
    before, names = net(x), [name for name, _ in net.named_parameters()]
    add_adapters(net, AdaptersConfig(rank=rank, layers=layers, scale=scale), "adapters")
    return net, x, before, names


@pytest.mark.parametrize(
    ("layers", "places"),
    [(["head"], ["head"]), (["body"], ["body.0", "body.2"]), (["body.2", "head"], ["body.2", "head"])],
)
def test_a_new_adapter_changes_nothing_and_is_where_it_should_be(layers, places):
    net, x, before, names = adapted(layers)
    assert torch.equal(net(x), before)
    own = [name for name, _ in net.named_parameters() if is_adapter(name)]
    assert sorted({name.rpartition(".")[0] for name in own}) == places and len(own) == 2 * len(places)
    assert sorted(name for name, _ in net.named_parameters() if not is_adapter(name)) == sorted(names)


def test_the_change_by_hand():
    """y = W x + b + 1/2 U (D x), with D x = 1 * 1 + 2 * 2 = 5."""
    layer = nn.Sequential(nn.Linear(2, 1))
    add_adapters(layer, AdaptersConfig(rank=1, layers=["0"], scale=0.5), "adapters")
    weights = {"0.weight": [[1.0, 1.0]], "0.bias": [3.0], "0.adapter_down": [[1.0, 2.0]], "0.adapter_up": [[4.0]]}
    tensors = {name: torch.tensor(value) for name, value in weights.items()}
    close(functional_call(layer, tensors, torch.tensor([1.0, 2.0])), [3.0 + 3.0 + 0.5 * 4.0 * 5.0])
    close(merged(tensors, 0.5)["0.weight"], [[1.0 + 0.5 * 4.0, 1.0 + 0.5 * 8.0]])


def test_merged_weights_act_like_adapters():
    net, x, before, names = adapted(["body", "head"])
    weights = {n: w.detach() + 0.1 * torch.randn_like(w) for n, w in net.named_parameters()}
    one = functional_call(net, weights, x)
    plain = merged(weights, 0.5)
    assert sorted(plain) == sorted(names) and not torch.allclose(one, before)
    close(functional_call(Net(), plain, x), one, tol=1e-5)


def test_only_adapters_get_gradients_if_only_they_are_arguments():
    net, x, _, _ = adapted(["head"], rank=1)
    weights = {n: w.detach() for n, w in net.named_parameters()}
    own = {n: w for n, w in weights.items() if is_adapter(n)}
    grads = torch.func.grad(lambda own: functional_call(net, weights | own, x).square().sum())(own)
    assert grads["head.adapter_up"].any() and not grads["head.adapter_down"].any(), "U is 0 at first"


@pytest.mark.parametrize("name", ["haed", "bod", "body.1"])
def test_a_name_of_no_layer(name):
    with pytest.raises(ConfigError, match=rf"^adapters\.layers: the model has no linear layer '{name}'; ") as caught:
        adapted([name])
    assert "\n" not in str(caught.value) and ("did you mean 'head'?" in str(caught.value)) == (name == "haed")
