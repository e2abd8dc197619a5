"""Convert modules to pure functions, and build networks from a config block.

A block is `{"type": "mlp", "network_cfg": {...}}`, or a plain string such as `"cnn"` for default settings.

`type` is the name of a registered function `make(cfg, space, outputs) -> nn.Module`. `make_network` converts the
returned module to pure functions.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from threading import RLock
from typing import Any, ClassVar, NamedTuple, cast

import torch
from pydantic import BaseModel, Field, SerializeAsAny, ValidatorFunctionWrapHandler, model_validator
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn
from torch.func import functional_call

from ecrl.config import validate_settings
from ecrl.config.embodichain_releases import lower_name
from ecrl.config.model import ConfigModel
from ecrl.errors import ConfigError
from ecrl.memory import enough_memory
from ecrl.policies.core import example, one_batch
from ecrl.policies.images import SpaceError
from ecrl.registry import lookup
from ecrl.spaces import Dict, Space
from ecrl.tracing_state import ignoring_draws


class NetworkConfig(ConfigModel):
    """Registered type and settings of a network. A plain string is the type of a network with default settings."""

    part_kind: ClassVar = "network"

    type: str = Field(default="mlp", description='registered network type, such as "mlp"')
    network_cfg: SerializeAsAny[BaseModel] = Field(
        description='settings of the network, such as {"hidden_sizes": [64, 64]}; the defaults if absent'
    )

    @model_validator(mode="wrap")
    @classmethod
    def _registered(cls, data: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        data = {"type": data} if isinstance(data, str) else data
        if not isinstance(data, dict):
            return handler(data)
        return validate_settings("network", {"type": "mlp"} | data, "type", "network_cfg", handler)

    def _with_changes(self, changes: dict[str, Any]) -> dict[str, Any]:
        return super()._with_changes({key: lower_name(f"policy.actor.{key}", value) for key, value in changes.items()})


def default_network() -> NetworkConfig:
    """Return the default network, an MLP with two hidden layers of 64 units."""
    return NetworkConfig.model_validate("mlp")


_GENERATORS_LOCK = RLock()


@contextmanager
def seeded(key: Tensor) -> Iterator[None]:
    """Seed torch's global generators from a 0-d key at the start of a `with` block, and restore them at its end.

    The generators are the generator of the CPU and, for a key on a GPU, the generator of this GPU. Module
    initialisation draws from these generators, and so do modules that sample their own actions. All threads
    share the generators, so only one thread at a time can be inside a `seeded` block.
    """
    cuda = [key.device] if key.device.type == "cuda" else []
    with _GENERATORS_LOCK, ignoring_draws(), torch.random.fork_rng(devices=cuda):
        seed = int(key)  # the global generators, from which modules draw, take an int as their seed
        torch.default_generator.manual_seed(seed)  # `fork_rng` restores the caller's state
        for device in cuda:
            torch.cuda.default_generators[device.index or 0].manual_seed(seed)  # `fork_rng` also restores this state
        yield


_BATCH_NORMS = nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm
_INSTANCE_NORMS = nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d
_DROPOUTS = nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout


def _varies(layer: nn.Module) -> bool:
    """Return True if the layer, in its current mode, is random, mixes the rows of a batch or updates statistics."""
    if isinstance(layer, _BATCH_NORMS):
        return layer.training or layer.running_mean is None
    if isinstance(layer, _INSTANCE_NORMS):
        return layer.training and layer.running_mean is not None
    if isinstance(layer, nn.RNNBase | nn.MultiheadAttention):
        return layer.training and layer.dropout > 0.0
    random = isinstance(layer, _DROPOUTS) and layer.p > 0.0
    return layer.training and (random or isinstance(layer, nn.RReLU))


def check_module(module: nn.Module, name: str) -> None:
    """Raise ConfigError for layers that give unequal outputs for equal inputs, such as Dropout in training mode."""
    for path, layer in module.named_modules():
        if _varies(layer):
            how = "is in training mode" if layer.training else "keeps no running statistics"
            advice = "call .eval() on it, or replace it" if layer.training else "use LayerNorm"
            raise ConfigError(
                f"{name}: layer {path or 'itself'} ({type(layer).__name__}) {how}: the same observation "
                f"would give another output in another batch or at another time; {advice}"
            )


class _MethodCaller(nn.Module):
    """Wrapper whose `forward` calls a named method of a module. `functional_call` can only call `forward`."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def forward(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs) if method == "forward" else getattr(self.module, method)(*args, **kwargs)


def floats_as(dtype: torch.dtype, out: Any) -> Any:
    """Cast floating-point tensors to a dtype and return everything else unchanged."""
    if isinstance(out, tuple):
        return tuple(floats_as(dtype, part) for part in out)
    if isinstance(out, TensorDictBase):
        return out.apply(lambda part: floats_as(dtype, part))
    return out.to(dtype) if isinstance(out, Tensor) and out.is_floating_point() else out


class Pure(NamedTuple):
    """Pure functions of a module.

    Attributes:
        init: `init()` returns new weights under the names of `state_dict`. Call `init` inside `seeded`.
        forward: `forward(weights, *inputs)` calls the module.
        call: `call(weights, method, *inputs, **named)` calls the method of the module whose name is `method`.
        module: the structure of the module, without weights.
    """

    init: Callable[[], TensorDict]
    forward: Callable[..., Any]
    call: Callable[..., Any]
    module: nn.Module


def _constants(module: nn.Module, trained: set[str]) -> dict[str, Tensor]:
    parts = dict(module.named_buffers()) | dict(module.named_parameters())
    return {name: part.detach().clone() for name, part in parts.items() if name not in trained}


def pure(make: Callable[[], nn.Module], name: str, bf16: bool) -> Pure:
    """Convert the modules that `make` builds to pure functions.

    The weights are the parameters that require a gradient. Frozen parameters and buffers are constants. The values of
    these constants come from a call of `make` with seed 0. With `bf16`, the module runs in bfloat16 under autocast, and
    its outputs are cast to the dtype of the weights.

    Raises: ConfigError if a layer gives unequal outputs for equal inputs (see `check_module`), or if the module has no
        parameters to train.
    """
    with seeded(torch.zeros((), dtype=torch.int64)):
        module = make()
    check_module(module, name)
    trained = {name for name, weight in module.named_parameters() if weight.requires_grad}
    if not trained:
        raise ConfigError(f"{name}: {type(module).__name__} has no parameters to train; add some")
    constants, first = _constants(module, trained), {}
    tied = {n: first.setdefault(id(w), n) for n, w in module.named_parameters(remove_duplicate=False)}
    tied = {name: shared for name, shared in tied.items() if name != shared}
    # Copy the module, because `make` may keep a reference to it. The copy needs no values, because each call passes the
    # values of all weights and constants.
    module = deepcopy(module).to("meta")
    caller, lock = _MethodCaller(module), RLock()

    def init() -> TensorDict:
        fresh = {name: weight.detach().clone() for name, weight in make().named_parameters() if name in trained}
        return TensorDict(fresh, []).to("cpu")

    def call(weights: TensorDict, method: str, *inputs: Any, **named: Any) -> Any:
        sample_weight = cast(Tensor, next(iter(weights.values())))
        tensors = dict(weights.items()) | {
            name: constant.to(sample_weight.device) for name, constant in constants.items()
        }
        tensors |= {name: tensors[shared] for name, shared in tied.items()}
        tensors = {f"module.{name}": tensor for name, tensor in tensors.items()}
        # `functional_call` puts the weights into the shared module and removes them afterwards. The lock prevents other
        # threads, such as the thread that records videos, from using the module meanwhile. Compilers trace without
        # changing the module.
        with nullcontext() if torch.compiler.is_compiling() else lock:
            if not bf16:
                return functional_call(caller, tensors, (method, *inputs), named)
            with torch.autocast(sample_weight.device.type, torch.bfloat16):
                out = functional_call(caller, tensors, (method, *inputs), named)
        return floats_as(sample_weight.dtype, out)

    def forward(weights: TensorDict, *inputs: Any) -> Any:
        return call(weights, "forward", *inputs)

    return Pure(init, forward, call, module)


def build_network(cfg: NetworkConfig, space: Space, outputs: int, key: str) -> nn.Module:
    """Build a configured network as a module with new weights. `key` is the path of the network in the config.

    Raises: ConfigError for a wrong setting, or for a space that the network cannot read. The message begins with the
        path of the setting.
    """
    if space == Dict(()):
        raise ConfigError(f"{key}: the observations have nothing that a network reads; select other ones, or add some")
    try:
        return lookup("network", cfg.type).make(cfg.network_cfg, space, outputs)
    except SpaceError as error:
        raise ConfigError(f"{key}.type: {cfg.type} {error}") from None
    except ConfigError as error:
        raise ConfigError(f"{key}.network_cfg.{error}") from None


def make_network(
    cfg: NetworkConfig,
    space: Space,
    outputs: int,
    bf16: bool,
    key: str = "network",
    change: Callable[[nn.Module], nn.Module] = lambda module: module,
) -> Pure:
    """Build a configured network as pure functions. `forward` maps observations of a space to `[*B, outputs]`.

    The module receives observations with one batch axis, in the dtypes of the space, and must return `[B, outputs]`.
    `key` is the path of the network in the config, for error messages. `change`, if given, takes the configured module
    and returns the module to use, for example with other layers.

    Raises: ConfigError if the module returns another shape for two all-zero observations.

    >>> from ecrl.spaces import box
    >>> net = make_network(NetworkConfig(network_cfg={"hidden_sizes": [8]}), box(-1.0, 1.0, 3), 2, False)
    >>> net.forward(net.init(), torch.zeros(4, 5, 3)).shape
    torch.Size([4, 5, 2])
    """

    def make() -> nn.Module:
        with enough_memory(key, "make it smaller"):
            return change(build_network(cfg, space, outputs, key))

    name = f"{key} ({cfg.type})"
    net = pure(make, name, bf16)

    with torch.no_grad(), seeded(torch.zeros((), dtype=torch.int64)):
        out = net.forward(net.init(), example(space))
    if not isinstance(out, Tensor) or out.shape != (2, outputs):
        returned = list(out.shape) if isinstance(out, Tensor) else type(out).__name__
        raise ConfigError(
            f"{name}: {type(net.module).__name__} returns {returned} for 2 observations, expected {[2, outputs]}; "
            "return this shape"
        )

    def forward(weights: TensorDict, obs: Any) -> Tensor:
        rows, batch = one_batch(obs, space)
        return net.forward(weights, rows).reshape((*batch, outputs))

    return net._replace(forward=forward)
