"""Optimisers and learning-rate schedules by name, from the config blocks `optimizer` and `lr_scheduler`.

Numbers go into `hyper` as 0-d tensors; names choose functions.
"""

from collections.abc import Callable
from typing import Annotated, Any, Literal, NamedTuple, Self, cast

import torch
from pydantic import Field, field_serializer, model_validator
from tensordict import TensorDict
from torch import Tensor

from ecrl.config.model import ConfigModel, Count, Fraction, NonNegative, Positive
from ecrl.kernels import optim
from ecrl.registry import did_you_mean

_USED = {
    "adam": ("betas", "eps"),
    "adamw": ("betas", "eps", "weight_decay"),
    "sgd": ("momentum",),
    "rmsprop": ("alpha", "eps"),
    "linear": ("start_factor", "end_factor", "total_iters"),
    "cosine": ("eta_min", "T_max"),
    "step": ("step_size", "gamma"),
    "exponential": ("gamma",),
    "adaptive": ("desired_kl", "factor", "min_rate", "max_rate"),
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
    desired_kl: Positive = Field(default=0.01, description="how far one gradient step should move, nats (adaptive)")
    factor: float = Field(default=1.5, gt=1.0, description="the rate is multiplied or divided by it (adaptive)")
    min_rate: Positive = Field(default=1e-5, description="lowest learning rate (adaptive)")
    max_rate: Positive = Field(default=1e-2, description="highest learning rate (adaptive)")


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
    """A learning-rate schedule by name; it moves once per iteration, "adaptive" with every gradient step."""

    name: Literal["linear", "cosine", "step", "exponential", "adaptive"] = Field(
        description="linear, cosine, step, exponential or adaptive"
    )
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


class LearningConfig(ConfigModel):
    """How an algorithm moves its parameters; the numbers live in the state and may change during a run."""

    learning_rate: Positive | None = Field(
        default=None, description="step size of Adam, 3e-4; or give an optimizer block"
    )
    optimizer: OptimizerConfig | None = Field(
        default=None, description='such as {"name": "adam", "learning_rate": 3e-4}'
    )
    lr_scheduler: SchedulerConfig | None = Field(
        default=None, description='such as {"name": "linear"}; constant if absent'
    )
    max_grad_norm: Positive = Field(default=0.5, description="largest norm of all gradients together")

    @model_validator(mode="after")
    def _one_learning_rate(self) -> "LearningConfig":
        if self.optimizer is not None and self.learning_rate is not None:
            raise ValueError("learning_rate stands beside optimizer.learning_rate; keep one of them")
        return self

    @model_validator(mode="after")
    def _rate_within_its_bounds(self) -> "LearningConfig":
        if self.lr_scheduler is not None and self.lr_scheduler.name == "adaptive":
            k, rate = self.lr_scheduler.kwargs, optimizer_of(self).learning_rate
            if not k.min_rate <= rate <= k.max_rate:
                bounds = f"min_rate {k.min_rate:g} to max_rate {k.max_rate:g}"
                raise ValueError(f"learning_rate {rate:g} is outside the {bounds} of lr_scheduler; move one of them")
        return self


def optimizer_of(cfg: LearningConfig) -> OptimizerConfig:
    """The optimiser a config chooses: its block, or Adam with its `learning_rate`."""
    if cfg.optimizer is not None or cfg.learning_rate is None:
        return cfg.optimizer or OptimizerConfig()
    return OptimizerConfig(learning_rate=cfg.learning_rate)


def optimizer_name(cfg: LearningConfig) -> str:
    """That of the optimiser a config chooses."""
    return (cfg.optimizer or OptimizerConfig()).name


def optimizer_numbers(cfg: OptimizerConfig) -> dict[str, float]:
    """What the named optimiser takes beside the learning rate, for `hyper`."""
    numbers: dict[str, Any] = {name: getattr(cfg.kwargs, name) for name in _USED[cfg.name]}
    if "betas" in numbers:
        numbers["beta1"], numbers["beta2"] = numbers.pop("betas")
    return numbers


def learning_state(
    cfg: LearningConfig, params: TensorDict, numbers: dict[str, float | None], device: torch.device
) -> dict[str, Any]:
    """`params`, `opt` and `hyper` with the numbers that are not None.

    An adaptive rate is not a hyperparameter: it moves, as `learning_rate` of the state.
    """
    optimizer, schedule = optimizer_of(cfg), cfg.lr_scheduler
    hyper: dict[str, Any] = {name: number for name, number in numbers.items() if number is not None}
    hyper |= {"max_grad_norm": cfg.max_grad_norm, "optimizer": optimizer_numbers(optimizer)}
    adaptive = schedule.kwargs if schedule is not None and schedule.name == "adaptive" else None
    if adaptive is not None:
        hyper["adaptive"] = {name: getattr(adaptive, name) for name in _USED["adaptive"]}
    rate = hyper_tensors({"learning_rate": optimizer.learning_rate}, device)
    made = hyper_tensors(hyper, device)
    state = {"params": params, "opt": OPTIMIZERS[optimizer.name].init(params)}
    if adaptive is not None:
        return state | {"hyper": made, "learning_rate": rate["learning_rate"]}
    return state | {"hyper": made.update(rate)}


def adapted_rate(rate: Tensor, kl: Tensor, hyper: TensorDict) -> Tensor:
    """The learning rate after a step of size `kl`, by the numbers in `hyper["adaptive"]`.

        rate / factor where kl > 2 desired_kl, rate * factor where kl < desired_kl / 2; within [min_rate, max_rate]

    Source: Heess et al. 2017, arXiv:1707.02286, sec. 3, with the rate in place of the penalty.
    """
    h = cast(TensorDict, hyper["adaptive"])
    lower, higher = kl > 2.0 * h["desired_kl"], kl < h["desired_kl"] / 2.0
    moved = torch.where(lower, rate / h["factor"], torch.where(higher, rate * h["factor"], rate))
    return torch.minimum(torch.maximum(moved, h["min_rate"]), h["max_rate"])


def scheduled(cfg: SchedulerConfig | None, state: TensorDict, iterations: int) -> Tensor:
    """The learning rate at the start of an iteration, 0-d."""
    if cfg is not None and cfg.name == "adaptive":
        return state["learning_rate"]
    base, update_step = state["hyper", "learning_rate"], state["update_step"]
    if cfg is None:
        return base
    k = cfg.kwargs
    match cfg.name:
        case "linear":
            horizon = k.total_iters or iterations
            factor = optim.linear_schedule(update_step, start=k.start_factor, end=k.end_factor, horizon=horizon)
        case "cosine":
            fall = optim.cosine_schedule(update_step, end=0.0, horizon=k.T_max or iterations)
            return ((base - k.eta_min) * fall + k.eta_min).to(base.dtype)
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
