"""Optimisers and learning-rate schedules by name, from the config blocks `optimizer` and `lr_scheduler`.

Numbers go into `hyper` as 0-d tensors; names choose functions.
"""

from collections.abc import Callable
from typing import Annotated, Any, Literal, NamedTuple, Self

import torch
from pydantic import Field, field_serializer, model_validator
from tensordict import TensorDict
from torch import Tensor

from ecrl.kernels import optim
from ecrl.registry import did_you_mean
from ecrl.strict import ConfigModel, Count, Fraction, NonNegative, Positive

_USED = {
    "adam": ("betas", "eps"),
    "adamw": ("betas", "eps", "weight_decay"),
    "sgd": ("momentum",),
    "rmsprop": ("alpha", "eps"),
    "linear": ("start_factor", "end_factor", "total_iters"),
    "cosine": ("eta_min", "T_max"),
    "step": ("step_size", "gamma"),
    "exponential": ("gamma",),
}


_Below1 = Annotated[float, Field(ge=0.0, lt=1.0)]


class OptimizerKwargs(ConfigModel):
    """Numbers of an optimiser, named as in torch.optim."""

    betas: Annotated[tuple[_Below1, _Below1], Field(strict=False)] = Field(
        default=(0.9, 0.999), description="decay of the two moments (adam, adamw)"
    )
    eps: Positive = Field(default=1e-8, description="added to the root of the second moment (adam, adamw, rmsprop)")
    weight_decay: NonNegative = Field(default=0.01, description="decay per unit of learning rate (adamw)")
    momentum: Fraction = Field(default=0.0, description="share of the last move that is kept (sgd)")
    alpha: Fraction = Field(default=0.99, description="decay of the second moment (rmsprop)")


class SchedulerKwargs(ConfigModel):
    """Numbers of a schedule, named as in torch.optim.lr_scheduler; counted in iterations."""

    start_factor: NonNegative = Field(default=1.0, description="factor at the start (linear)")
    end_factor: NonNegative = Field(default=0.0, description="factor at the end (linear)")
    total_iters: Count | None = Field(default=None, description="length; the whole run if absent (linear)")
    eta_min: NonNegative = Field(default=0.0, description="lowest learning rate (cosine)")
    T_max: Count | None = Field(default=None, description="length; the whole run if absent (cosine)")
    step_size: Count = Field(default=1, description="iterations between two falls (step)")
    gamma: Positive = Field(default=0.99, description="factor of each fall (step, exponential)")


class _Named(ConfigModel):
    """A choice by name with `kwargs` of which it uses some; only those may be given, and only those are written."""

    name: str
    kwargs: Any

    @model_validator(mode="after")
    def _only_used(self) -> Self:
        used = _USED[self.name]
        wrong = sorted(self.kwargs.model_fields_set - set(used))
        if wrong:
            raise ValueError(f"{self.name} does not use {wrong[0]!r}; {did_you_mean(wrong[0], used)}")
        return self

    @field_serializer("kwargs")
    def _used(self, kwargs: ConfigModel) -> dict[str, Any]:
        return kwargs.model_dump(mode="json", include=set(_USED[self.name]))


class OptimizerConfig(_Named):
    """An optimiser by name."""

    name: Literal["adam", "adamw", "sgd", "rmsprop"] = Field(default="adam", description="adam, adamw, sgd or rmsprop")
    learning_rate: Positive = Field(default=3e-4, description="step size, before the schedule")
    kwargs: OptimizerKwargs = Field(default=OptimizerKwargs(), description="further numbers, as in torch.optim")


class SchedulerConfig(_Named):
    """A learning-rate schedule by name; it moves once per iteration."""

    name: Literal["linear", "cosine", "step", "exponential"] = Field(description="linear, cosine, step or exponential")
    kwargs: SchedulerKwargs = Field(
        default=SchedulerKwargs(), description="further numbers, as in torch.optim.lr_scheduler"
    )


class Optimizer(NamedTuple):
    """`init(params) -> opt` and `step(params, grads, opt, learning_rate=, **numbers) -> (params, opt)`."""

    init: Callable[[TensorDict], TensorDict]
    step: Callable[..., tuple[TensorDict, TensorDict]]


OPTIMIZERS = {
    "adam": Optimizer(optim.adam_init, optim.adam),
    "adamw": Optimizer(optim.adam_init, optim.adamw),
    "sgd": Optimizer(optim.sgd_init, optim.sgd),
    "rmsprop": Optimizer(optim.rmsprop_init, optim.rmsprop),
}


def optimizer_numbers(cfg: OptimizerConfig) -> dict[str, float]:
    """What the named optimiser takes beside the learning rate, for `hyper`."""
    numbers: dict[str, Any] = {name: getattr(cfg.kwargs, name) for name in _USED[cfg.name]}
    if "betas" in numbers:
        numbers["beta1"], numbers["beta2"] = numbers.pop("betas")
    return numbers


def scheduled(cfg: SchedulerConfig | None, base: Tensor, update_step: Tensor, iterations: int) -> Tensor:
    """The learning rate of an iteration, 0-d in the dtype of `base`."""
    if cfg is None:
        return base
    k = cfg.kwargs
    match cfg.name:
        case "linear":
            horizon = k.total_iters or iterations
            factor = optim.linear_schedule(update_step, start=k.start_factor, end=k.end_factor, horizon=horizon)
        case "cosine":
            factor = optim.cosine_schedule(update_step, end=k.eta_min / base, horizon=k.T_max or iterations)
        case "step":
            factor = optim.step_schedule(update_step, every=k.step_size, gamma=k.gamma)
        case "exponential":
            factor = optim.exponential_schedule(update_step, gamma=k.gamma)
    return (base * factor).to(base.dtype)


def hyper_tensors(numbers: dict[str, Any], device: torch.device) -> TensorDict:
    """Numbers as 0-d float32 tensors, nested as given."""
    made = {
        name: hyper_tensors(value, device)
        if isinstance(value, dict)
        else torch.tensor(value, dtype=torch.float32, device=device)
        for name, value in numbers.items()
    }
    return TensorDict(made, [])
