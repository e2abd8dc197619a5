"""Settings of critics that predict the distribution of the return instead of the mean."""

from typing import Literal, Self

from pydantic import Field, model_validator

from ecrl.config import PolicyConfig
from ecrl.config.model import Count
from ecrl.policies.core import ReturnDistribution


class ReturnDistributionConfig(PolicyConfig):
    """Settings of the return distribution that a Q-function predicts."""

    distribution: Literal["categorical", "quantile"] | None = Field(
        default=None,
        description=(
            "kind of return distribution to predict: categorical (C51) or quantile (QR-DQN); if absent, predict the "
            "mean return"
        ),
    )
    num_atoms: Count | None = Field(
        default=None,
        description="number of atoms of a distribution; if absent, 51 for categorical and 200 for quantile",
    )
    v_min: float | None = Field(default=None, description="lowest return of a categorical distribution")
    v_max: float | None = Field(default=None, description="highest return of a categorical distribution")

    @model_validator(mode="after")
    def _distribution_settings(self) -> Self:
        is_categorical, bounds = self.distribution == "categorical", (self.v_min, self.v_max)
        if is_categorical and None in bounds:
            raise ValueError("distribution categorical needs v_min and v_max, the bounds of the returns; give both")
        if is_categorical and not self.v_min < self.v_max:  # pyright: ignore
            raise ValueError(f"v_min {self.v_min:g} is not below v_max {self.v_max:g}; change one of them")
        if not is_categorical and bounds != (None, None):
            raise ValueError("v_min and v_max are bounds of a categorical distribution; leave them out")
        if self.distribution is None and self.num_atoms is not None:
            raise ValueError("num_atoms has no effect, because distribution is absent; leave it out")
        if self.num_atoms == 1:
            raise ValueError("num_atoms is 1, but a distribution needs at least 2; use more")
        return self


def return_distribution(cfg: ReturnDistributionConfig) -> ReturnDistribution | None:
    """Return the `ReturnDistribution` of a config, or None for critics that predict values."""
    match cfg.distribution:
        case "categorical":
            return ReturnDistribution("categorical", cfg.num_atoms or 51, float(cfg.v_min or 0), float(cfg.v_max or 0))
        case "quantile":
            return ReturnDistribution("quantile", cfg.num_atoms or 200)
    return None
