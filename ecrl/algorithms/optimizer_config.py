"""Config blocks for optimisers and learning-rate schedules: `optimizer`, `lr_scheduler` and related keys."""

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, field_serializer, model_validator

from ecrl.config.model import ConfigModel, Count, Fraction, NonNegative, Positive, lower_case
from ecrl.registry import did_you_mean

USED = {
    "adam": ("betas", "eps", "weight_decay", "amsgrad"),
    "adamw": ("betas", "eps", "weight_decay", "amsgrad"),
    "sgd": ("momentum", "nesterov", "weight_decay"),
    "rmsprop": ("alpha", "eps", "centered", "weight_decay"),
    "linear": ("start_factor", "end_factor", "total_iters"),
    "cosine": ("eta_min", "T_max"),
    "step": ("step_size", "gamma"),
    "exponential": ("gamma",),
    "warmup_constant": ("warmup_factor", "warmup_iters"),
    "warmup_linear": ("warmup_factor", "warmup_iters", "end_factor", "total_iters"),
    "warmup_cosine": ("warmup_factor", "warmup_iters", "eta_min", "T_max"),
    "adaptive": ("desired_kl", "factor", "min_rate", "max_rate"),
}
"""The keyword arguments that each optimiser and each schedule uses."""

VARIANTS = {
    ("adam", "amsgrad"): "amsgrad",
    ("adamw", "amsgrad"): "amsgradw",
    ("sgd", "nesterov"): "nesterov_sgd",
    ("rmsprop", "centered"): "centered_rmsprop",
}
"""Map an optimiser and a keyword argument to the key in `OPTIMIZERS` that is used if the argument is true."""

ADAMW_WEIGHT_DECAY = 0.01
"""The weight decay of AdamW if the config has none, as in torch.optim."""

DESIRED_DISTANCE = "desired_kl"
"""Config key for the target distance of an adaptive learning rate. Each algorithm defines its own distance."""

_Below1 = Annotated[float, Field(ge=0.0, lt=1.0)]


class OptimizerKwargs(ConfigModel):
    """Hyperparameters of an optimiser, named as in torch.optim."""

    betas: Annotated[tuple[_Below1, _Below1], Field(strict=False)] = Field(
        default=(0.9, 0.999), description="decay rates of the two moments (adam, adamw)"
    )
    eps: Positive = Field(
        default=1e-8, description="number added to the square root of the second moment (adam, adamw, rmsprop)"
    )
    weight_decay: NonNegative | None = Field(
        default=None,
        description="decay per unit of learning rate, 0.01 if absent (adamw); "
        "or factor of an L2 penalty, none if absent (adam, sgd, rmsprop)",
    )
    amsgrad: bool = Field(default=False, description="divide by the largest second moment so far (adam, adamw)")
    momentum: Fraction = Field(
        default=0.0, description="share of the previous step that is added to the next step (sgd)"
    )
    nesterov: bool = Field(default=False, description="Nesterov momentum, which needs a momentum above 0 (sgd)")
    alpha: Fraction = Field(default=0.99, description="decay rate of the moments (rmsprop)")
    centered: bool = Field(
        default=False,
        description="divide by the standard deviation of the gradients, not their root mean square (rmsprop)",
    )


class SchedulerKwargs(ConfigModel):
    """Hyperparameters of a schedule. Lengths are in iterations.

    For the schedules linear, cosine, step and exponential, the names are those of torch.optim.lr_scheduler. Some of the
    defaults differ.
    """

    start_factor: NonNegative = Field(default=1.0, description="factor of the learning rate at the start (linear)")
    end_factor: NonNegative = Field(
        default=0.0, description="factor of the learning rate at the end (linear, warmup_linear)"
    )
    total_iters: Count | None = Field(
        default=None,
        description="length in iterations, including any warm-up; the whole run if absent (linear, warmup_linear)",
    )
    eta_min: NonNegative = Field(default=0.0, description="learning rate at the end (cosine, warmup_cosine)")
    T_max: Count | None = Field(
        default=None,
        description="length in iterations, including any warm-up; the whole run if absent (cosine, warmup_cosine)",
    )
    warmup_factor: NonNegative = Field(
        default=0.1, description="factor at the start of the warm-up (warmup_constant, warmup_linear, warmup_cosine)"
    )
    warmup_iters: Count = Field(
        default=10,
        description="length of the warm-up in iterations, at the end of which the factor is 1 "
        "(warmup_constant, warmup_linear, warmup_cosine)",
    )
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

    The config rejects keyword arguments that the named optimiser or schedule does not use. `config.json` contains
    neither these arguments nor options that are off, such as `nesterov: false`.
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
        numbers = kwargs.model_dump(mode="json", include=set(USED[self.name]))
        off = {"amsgrad": False, "nesterov": False, "centered": False, "weight_decay": None}
        return {name: number for name, number in numbers.items() if name not in off or number != off[name]}


class OptimizerConfig(_Named):
    """Name and hyperparameters of an optimiser."""

    name: Annotated[Literal["adam", "adamw", "sgd", "rmsprop"], BeforeValidator(lower_case)] = Field(
        default="adam", description="adam, adamw, sgd or rmsprop"
    )
    learning_rate: Positive = Field(default=3e-4, description="step size, before the schedule")
    kwargs: OptimizerKwargs = Field(default=OptimizerKwargs(), description="further hyperparameters, as in torch.optim")

    @model_validator(mode="before")
    @classmethod
    def _weight_decay_of_adamw(cls, data: Any) -> Any:
        if not isinstance(data, dict) or lower_case(data.get("name")) != "adamw":
            return data
        match data.get("kwargs", {}):
            case dict() as kwargs if kwargs.get("weight_decay") is None:
                return data | {"kwargs": kwargs | {"weight_decay": ADAMW_WEIGHT_DECAY}}
            case OptimizerKwargs(weight_decay=None) as kwargs:
                return data | {"kwargs": kwargs.model_copy(update={"weight_decay": ADAMW_WEIGHT_DECAY})}
        return data

    @model_validator(mode="after")
    def _nesterov_needs_momentum(self) -> Self:
        if self.kwargs.nesterov and self.kwargs.momentum == 0.0:
            raise ValueError("nesterov needs a momentum above 0; set kwargs.momentum, such as 0.9")
        return self

    @property
    def kernel(self) -> str:
        """The key of the optimiser in `ecrl.algorithms.optimizer.OPTIMIZERS`.

        >>> OptimizerConfig(name="sgd", kwargs=OptimizerKwargs(momentum=0.9, nesterov=True)).kernel
        'nesterov_sgd'
        """
        variants = [
            kernel for (name, flag), kernel in VARIANTS.items() if name == self.name and getattr(self.kwargs, flag)
        ]
        return variants[0] if variants else self.name


def _not_constant(value: Any) -> Any:
    """Return the name of a schedule. Raise ValueError for a constant rate, which has no schedule."""
    if isinstance(value, str) and value.lower() in ("constant", "none"):
        raise ValueError("for a constant learning rate, set lr_scheduler to null or leave it out")
    return value


class SchedulerConfig(_Named):
    """Name and hyperparameters of a learning-rate schedule.

    An adaptive schedule changes the rate once per gradient step. Other schedules change the rate once per iteration or,
    if the algorithm has a replay buffer, every `train_freq` steps of each environment. All lengths are in iterations.
    """

    name: Annotated[
        Literal[
            "linear",
            "cosine",
            "step",
            "exponential",
            "warmup_constant",
            "warmup_linear",
            "warmup_cosine",
            "adaptive",
        ],
        BeforeValidator(_not_constant),
        BeforeValidator(lower_case),
    ] = Field(
        description="linear, cosine, step, exponential, warmup_constant, warmup_linear, warmup_cosine or adaptive"
    )
    kwargs: SchedulerKwargs = Field(default=SchedulerKwargs(), description="further hyperparameters of the schedule")

    @model_validator(mode="after")
    def _warmup_within_the_length(self) -> Self:
        length = {"warmup_linear": "total_iters", "warmup_cosine": "T_max"}.get(self.name)
        if length is not None:
            total, warmup = getattr(self.kwargs, length), self.kwargs.warmup_iters
            if total is not None and total <= warmup:
                raise ValueError(f"{length} {total} must be above warmup_iters {warmup}; change one of them")
        return self


class LearningConfig(ConfigModel):
    """Settings of optimiser, learning rate and clipping. Floats are stored in the state and may change during a run.

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
