"""Config blocks for optimisers and learning-rate schedules: `optimizer`, `lr_scheduler` and related keys."""

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, field_serializer, model_validator

from ecrl.config.model import ConfigModel, Count, Fraction, NonNegative, Positive, lower_case
from ecrl.registry import did_you_mean

USED = {
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
"""The keyword arguments that each optimiser and each schedule uses."""

DESIRED_DISTANCE = "desired_kl"
"""Config key for the target distance of an adaptive learning rate. Each algorithm defines its own distance."""

_Below1 = Annotated[float, Field(ge=0.0, lt=1.0)]


class OptimizerKwargs(ConfigModel):
    """Hyperparameters of an optimiser, named as in torch.optim."""

    betas: Annotated[tuple[_Below1, _Below1], Field(strict=False)] = Field(
        default=(0.9, 0.999), description="decay rates of the two moments (adam, adamw)"
    )
    eps: Positive = Field(
        default=1e-8, description="added to the square root of the second moment (adam, adamw, rmsprop)"
    )
    weight_decay: NonNegative = Field(default=0.01, description="weight decay per unit of learning rate (adamw)")
    momentum: Fraction = Field(
        default=0.0, description="share of the previous step that is added to the next step (sgd)"
    )
    alpha: Fraction = Field(default=0.99, description="decay rate of the second moment (rmsprop)")


class SchedulerKwargs(ConfigModel):
    """Hyperparameters of a schedule, named as in torch.optim.lr_scheduler. Lengths are in iterations."""

    start_factor: NonNegative = Field(default=1.0, description="factor at the start (linear)")
    end_factor: NonNegative = Field(default=0.0, description="factor at the end (linear)")
    total_iters: Count | None = Field(
        default=None, description="length in iterations; the whole run if absent (linear)"
    )
    eta_min: NonNegative = Field(default=0.0, description="lowest learning rate (cosine)")
    T_max: Count | None = Field(default=None, description="length in iterations; the whole run if absent (cosine)")
    step_size: Count = Field(default=1, description="iterations between two reductions (step)")
    gamma: Positive = Field(default=0.99, description="factor of each reduction (step, exponential)")
    desired_kl: Positive = Field(
        default=0.01, description="target KL from the policy that collected the rollout, in nats (adaptive)"
    )
    factor: float = Field(default=1.5, gt=1.0, description="factor by which the rate grows or shrinks (adaptive)")
    min_rate: Positive = Field(default=1e-5, description="lowest learning rate (adaptive)")
    max_rate: Positive = Field(default=1e-2, description="highest learning rate (adaptive)")


class _Named(ConfigModel):
    """Base class of the optimiser and schedule configs, with a name and keyword arguments.

    The config rejects keyword arguments that the named optimiser or schedule does not use, and `config.json` leaves
    them out.
    """

    name: str
    kwargs: Any

    @model_validator(mode="after")
    def _only_used(self) -> Self:
        used = USED[self.name]
        wrong = sorted(self.kwargs.model_fields_set - set(used))
        if wrong:
            raise ValueError(f"{self.name} does not use {wrong[0]!r}; {did_you_mean(wrong[0], used)}")
        return self

    @field_serializer("kwargs")
    def _used(self, kwargs: ConfigModel) -> dict[str, Any]:
        return kwargs.model_dump(mode="json", include=set(USED[self.name]))


class OptimizerConfig(_Named):
    """Name and hyperparameters of an optimiser."""

    name: Annotated[Literal["adam", "adamw", "sgd", "rmsprop"], BeforeValidator(lower_case)] = Field(
        default="adam", description="adam, adamw, sgd or rmsprop"
    )
    learning_rate: Positive = Field(default=3e-4, description="step size, before the schedule")
    kwargs: OptimizerKwargs = Field(default=OptimizerKwargs(), description="further hyperparameters, as in torch.optim")


class SchedulerConfig(_Named):
    """Name and hyperparameters of a learning-rate schedule.

    An adaptive schedule changes the rate once per gradient step. Other schedules change the rate once per iteration. If
    the algorithm has a replay buffer, they change the rate every `train_freq` steps. All lengths are in iterations.
    """

    name: Annotated[Literal["linear", "cosine", "step", "exponential", "adaptive"], BeforeValidator(lower_case)] = (
        Field(description="linear, cosine, step, exponential or adaptive")
    )
    kwargs: SchedulerKwargs = Field(
        default=SchedulerKwargs(), description="further hyperparameters, as in torch.optim.lr_scheduler"
    )


class LearningConfig(ConfigModel):
    """Optimiser, learning rate and clipping. Numeric settings are stored in the state and may change during a run.

    `default_policy` is the section `policy` that is used if the config has none.
    """

    default_policy: ClassVar[dict[str, str]] = {}

    learning_rate: Positive | None = Field(
        default=None, description="step size of Adam, 3e-4 if absent; cannot be combined with optimizer"
    )
    optimizer: OptimizerConfig | None = Field(
        default=None, description='optimiser, such as {"name": "adam", "learning_rate": 3e-4}'
    )
    lr_scheduler: SchedulerConfig | None = Field(
        default=None, description='schedule of the learning rate, such as {"name": "linear"}; constant if absent'
    )
    max_grad_norm: Positive = Field(
        default=0.5, description="largest global norm of the gradients; larger gradients are scaled down"
    )

    @model_validator(mode="after")
    def _one_learning_rate(self) -> "LearningConfig":
        if self.optimizer is not None and self.learning_rate is not None:
            raise ValueError("learning_rate and optimizer exclude each other; keep one")
        return self

    @model_validator(mode="after")
    def _rate_within_its_bounds(self) -> "LearningConfig":
        check_rate("learning_rate", optimizer_of(self).learning_rate, self.lr_scheduler)
        return self


def check_rate(key: str, rate: float, schedule: SchedulerConfig | None) -> None:
    """Raise ValueError if a learning rate is outside the bounds of an adaptive schedule.

    `key` is the config key of the learning rate, which the error names.

    >>> check_rate("learning_rate", 0.5, SchedulerConfig(name="adaptive"))
    Traceback (most recent call last):
    ValueError: learning_rate 0.5 is outside the min_rate 1e-05 to max_rate 0.01 of lr_scheduler; change one of them
    """
    if schedule is not None and schedule.name == "adaptive":
        k = schedule.kwargs
        if not k.min_rate <= rate <= k.max_rate:
            bounds = f"min_rate {k.min_rate:g} to max_rate {k.max_rate:g}"
            raise ValueError(f"{key} {rate:g} is outside the {bounds} of lr_scheduler; change one of them")


def optimizer_of(cfg: LearningConfig) -> OptimizerConfig:
    """Return the config's `optimizer` block. Without this block, return Adam with the config's `learning_rate`."""
    if cfg.optimizer is not None or cfg.learning_rate is None:
        return cfg.optimizer or OptimizerConfig()
    return OptimizerConfig(learning_rate=cfg.learning_rate)
