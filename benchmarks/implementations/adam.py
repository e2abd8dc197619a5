"""Steps of Adam on two perceptrons, whose weights change with every call."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.alternating_calls import Call
from benchmarks.implementations.common import Cost, Inputs, Make, awaited, compiled, tensors

RATE, BETA1, BETA2, EPS = 1e-3, 0.9, 0.999, 1e-8


def inputs(width: int) -> Inputs:
    """Return weights and gradients of an actor and a critic with four inputs and two hidden layers of `width`."""
    draw = np.random.default_rng(0)
    sizes = [(width, 4), (width,), (width, width), (width,)]
    shapes = {
        f"{net}{i}": size
        for net, outs in (("a", 2), ("c", 1))
        for i, size in enumerate([*sizes, (outs, width), (outs,)])
    }
    return {
        f"{kind}_{name}": draw.standard_normal(shape, dtype=np.float32)
        for kind in ("p", "g")
        for name, shape in shapes.items()
    }


def cost(width: int) -> Cost:
    """Return the cost: per weight, four numbers are read and three are written, in a dozen operations."""
    size = sum(array.size for name, array in inputs(width).items() if name.startswith("p_"))
    return Cost(size * 4 * 7, size * 12)


def _both(arrays: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    params, grads = ({name[2:]: x for name, x in arrays.items() if name.startswith(kind)} for kind in ("p_", "g_"))
    return params, grads


def _ecrl(params: Any, grads: Any, opt: Any) -> Any:
    from ecrl.kernels import adam

    return adam(params, grads, opt, learning_rate=RATE, beta1=BETA1, beta2=BETA2, eps=EPS)


def _moving(fn: Any, arrays: Inputs, device: str) -> Call:
    from tensordict import TensorDict

    from ecrl.kernels import adam_init

    params, grads = (TensorDict(part, []) for part in _both(tensors(arrays, device)))
    now = [params, adam_init(params)]

    def call() -> list[Tensor]:
        now[:] = fn(now[0], grads, now[1])
        return [now[0][name] for name in sorted(now[0].keys())]

    return call


def ecrl_compiled(arrays: Inputs, device: str) -> Call:
    """Return a call of ecrl's kernel, compiled."""
    return _moving(compiled(_ecrl, device), arrays, device)


def ecrl_eager(arrays: Inputs, device: str) -> Call:
    """Return a call of ecrl's kernel, eager."""
    return _moving(awaited(_ecrl, device), arrays, device)


def _torch(arrays: Inputs, device: str, **how: bool) -> Call:
    params, grads = _both(tensors(arrays, device))
    for name, param in params.items():
        param.requires_grad_().grad = grads[name]
    step = torch.optim.Adam(list(params.values()), lr=RATE, betas=(BETA1, BETA2), eps=EPS, **how).step

    def call() -> list[Tensor]:
        step()
        return [params[name].detach() for name in sorted(params)]

    return awaited(call, device)


def torch_foreach(arrays: Inputs, device: str) -> Call:
    """Return a call of torch.optim.Adam with lists of tensors (foreach)."""
    return _torch(arrays, device, foreach=True)


def torch_fused(arrays: Inputs, device: str) -> Call:
    """Return a call of torch.optim.Adam, fused into one kernel."""
    return _torch(arrays, device, fused=True)


def optax_jitted(arrays: Inputs, device: str) -> Call:
    """Return a call of optax's Adam, jitted."""
    import jax
    import optax  # pyright: ignore[reportMissingImports]

    params, grads = jax.device_put(_both(arrays))
    adam = optax.adam(RATE, BETA1, BETA2, EPS)

    @jax.jit
    def fn(params: Any, grads: Any, opt: Any) -> Any:
        moves, opt = adam.update(grads, opt, params)
        return optax.apply_updates(params, moves), opt

    now = [params, adam.init(params)]

    def call() -> list[Any]:
        now[:] = jax.block_until_ready(fn(now[0], grads, now[1]))
        return [now[0][name] for name in sorted(now[0])]

    return call


ECRL: dict[str, Make] = {"ecrl compiled": ecrl_compiled, "ecrl eager": ecrl_eager}
OTHERS: dict[str, Make] = {"torch foreach": torch_foreach, "torch fused": torch_fused, "optax jitted": optax_jitted}
