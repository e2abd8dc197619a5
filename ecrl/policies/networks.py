"""Modules as pure functions, and networks from a config block, `{"type": "mlp", "network_cfg": {...}}`.

A type is a registered `make(cfg, inputs, outputs) -> nn.Module`; `make_network` turns the module into functions.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any, NamedTuple, cast

import torch
from pydantic import BaseModel, Field, SerializeAsAny, model_validator
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn
from torch.func import functional_call

from ecrl.config import resolved
from ecrl.config.model import ConfigModel
from ecrl.errors import ConfigError, enough_memory
from ecrl.registry import lookup


class NetworkConfig(ConfigModel):
    """A network by type."""

    type: str = Field(default="mlp", description='registered kind of network, such as "mlp"')
    network_cfg: SerializeAsAny[BaseModel] = Field(description='its layers, such as {"hidden_sizes": [64, 64]}')

    @model_validator(mode="before")
    @classmethod
    def _registered(cls, data: Any) -> Any:
        return resolved("network", {"type": "mlp"} | data, "type", "network_cfg") if isinstance(data, dict) else data


@contextmanager
def seeded(key: Tensor) -> Iterator[None]:
    """Torch's global generators seeded from a 0-d key, and put back afterwards.

    Module initialisation draws from them, and so do modules that sample for themselves.
    """
    cuda = [key.device] if key.device.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda):
        seed = int(key)
        torch.default_generator.manual_seed(seed)  # inside the fork: the caller's state comes back
        for device in cuda:
            torch.cuda.default_generators[device.index or 0].manual_seed(seed)  # inside the fork, too
        yield


def _varies(layer: nn.Module) -> bool:
    """Whether a layer's output depends on more than its weights and one row of input, as it is set."""
    norm = nn.modules.batchnorm
    if isinstance(layer, norm._BatchNorm):
        return layer.training or layer.running_mean is None
    if isinstance(layer, norm._NormBase):
        return layer.training and layer.running_mean is not None
    if isinstance(layer, nn.RNNBase | nn.MultiheadAttention):
        return layer.training and layer.dropout > 0.0
    random = isinstance(layer, nn.modules.dropout._DropoutNd) and layer.p > 0.0
    return layer.training and (random or isinstance(layer, nn.RReLU))


def check_module(module: nn.Module, name: str) -> None:
    """Refuse layers whose output depends on more than weights and input: they would make equal inputs differ."""
    for path, layer in module.named_modules():
        if _varies(layer):
            how = "is in training mode" if layer.training else "keeps no running statistics"
            advice = "call .eval() on it, or use LayerNorm" if layer.training else "use LayerNorm"
            raise ConfigError(
                f"{name}: layer {path or 'itself'} ({type(layer).__name__}) {how}: the same observation "
                f"would give another output in another batch or at another time; {advice}"
            )


class _Reached(nn.Module):
    """A module whose every method `functional_call` can reach, as it only calls `forward`."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def forward(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs) if method == "forward" else getattr(self.module, method)(*args, **kwargs)


def floats_as(dtype: torch.dtype, out: Any) -> Any:
    """Floating-point tensors in a dtype, anything else as it is."""
    if isinstance(out, tuple):
        return tuple(floats_as(dtype, part) for part in out)
    if isinstance(out, TensorDictBase):
        return out.apply(lambda part: floats_as(dtype, part))
    return out.to(dtype) if isinstance(out, Tensor) and out.is_floating_point() else out


class Pure(NamedTuple):
    """A module as functions.

    `init()`, to be called inside `seeded`, gives weights under the names of `state_dict`; `forward(weights, *inputs)`
    calls the module, `call(weights, method, *inputs, **named)` one of its methods. `module` is its structure alone.
    """

    init: Callable[[], TensorDict]
    forward: Callable[..., Any]
    call: Callable[..., Any]
    module: nn.Module


def _constants(module: nn.Module, trained: set[str]) -> dict[str, Tensor]:
    parts = dict(module.named_buffers()) | dict(module.named_parameters())
    return {name: part.detach().clone() for name, part in parts.items() if name not in trained}


def pure(make: Callable[[], nn.Module], name: str, bf16: bool) -> Pure:
    """The functions of the modules that `make` builds.

    Weights are the parameters that require a gradient; frozen ones and buffers are constants, as `make` gives them
    under seed 0. With `bf16` the module runs in bfloat16 under autocast, and what it gives is cast back.

    Raises: ConfigError naming a layer that makes outputs depend on the batch or on chance, or if there are no weights.
    """
    with seeded(torch.zeros((), dtype=torch.int64)):
        module = make()
    check_module(module, name)
    trained = {name for name, weight in module.named_parameters() if weight.requires_grad}
    if not trained:
        raise ConfigError(f"{name}: {type(module).__name__} has no parameters to train")
    constants, first = _constants(module, trained), {}
    tied = {n: first.setdefault(id(w), n) for n, w in module.named_parameters(remove_duplicate=False)}
    tied = {name: shared for name, shared in tied.items() if name != shared}
    module = deepcopy(module).to("meta")  # weights come with each call; `make` may hand out its own module
    reached = _Reached(module)

    def init() -> TensorDict:
        fresh = {name: weight.detach().clone() for name, weight in make().named_parameters() if name in trained}
        return TensorDict(fresh, []).to("cpu")

    def call(weights: TensorDict, method: str, *inputs: Any, **named: Any) -> Any:
        one = cast(Tensor, next(iter(weights.values())))
        given = dict(weights.items()) | {name: constant.to(one.device) for name, constant in constants.items()}
        given |= {name: given[shared] for name, shared in tied.items()}
        given = {f"module.{name}": tensor for name, tensor in given.items()}
        if not bf16:
            return functional_call(reached, given, (method, *inputs), named)
        with torch.autocast(one.device.type, torch.bfloat16):
            out = functional_call(reached, given, (method, *inputs), named)
        return floats_as(one.dtype, out)

    def forward(weights: TensorDict, *inputs: Any) -> Any:
        return call(weights, "forward", *inputs)

    return Pure(init, forward, call, module)


def make_network(cfg: NetworkConfig, inputs: int, outputs: int, bf16: bool, key: str = "network") -> Pure:
    """The functions of a configured network: `forward` takes features `[*B, inputs]` to `[*B, outputs]`.

    `key` is where it stands in the config, for messages.

    >>> net = make_network(NetworkConfig(network_cfg={"hidden_sizes": [8]}), 3, 2, False)
    >>> net.forward(net.init(), torch.zeros(5, 3)).shape
    torch.Size([5, 2])
    """
    make = lookup("network", cfg.type).make

    def made() -> nn.Module:
        try:
            with enough_memory(key, "make it smaller"):
                return make(cfg.network_cfg, inputs, outputs)
        except ConfigError as error:
            raise ConfigError(f"{key}.network_cfg.{error}") from None

    return pure(made, f"{key} ({cfg.type})", bf16)
