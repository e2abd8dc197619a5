"""Behaviour cloning: supervised learning of the actions in a data set of demonstrations.

The algorithm takes no steps in the environment. An iteration draws `num_envs * buffer_size` demonstrated steps per
rank, and learns from these steps in minibatches. `sample_step` counts the drawn steps. Evaluations, checkpoints and the
length of a run therefore work as in other algorithms.

Source: Pomerleau 1989, "ALVINN: an autonomous land vehicle in a neural network"; Bain and Sammut 1995, "A framework for
    behavioural cloning".
"""

from functools import partial
from typing import Any, ClassVar, cast

import torch
from pydantic import Field, model_validator
from tensordict import TensorDict
from torch import Tensor

from ecrl import rng
from ecrl.algorithms.core import LEARNER_KINDS, Algorithm, Run
from ecrl.algorithms.demonstrations import Demonstrations, drawn_batch, rows_to_learn
from ecrl.algorithms.minibatch_sgd import (
    SGD,
    MinibatchConfig,
    check_batch_size,
    gradient_steps,
    minibatch_sgd,
    sgd_choices,
)
from ecrl.algorithms.optimizer import learning_state
from ecrl.algorithms.rows import check_log_prob
from ecrl.config.model import Count
from ecrl.distributed import all_mean
from ecrl.kernels import masked_mean
from ecrl.kernels.scan_loop import in_chunks
from ecrl.policies import policy_params
from ecrl.pytree import Borrowed, replaced
from ecrl.registry import register_algorithm
from ecrl.types import Logs


class BCConfig(MinibatchConfig):
    """Hyperparameters of behaviour cloning, and the data set."""

    default_policy: ClassVar = {"name": "actor_only"}

    demos: str = Field(min_length=1, description="path of a file of demonstrations from the command ecrl demo")
    holdout: float = Field(
        default=0.0,
        ge=0.0,
        lt=1.0,
        description="share of the episodes that is held out from training, for the log holdout_loss",
    )
    n_epochs: Count = Field(default=1, description="passes over the steps that an iteration draws from demos")

    @model_validator(mode="after")
    def _no_distance(self) -> "BCConfig":
        if self.lr_scheduler is not None and self.lr_scheduler.name == "adaptive":
            raise ValueError(
                "lr_scheduler adaptive needs the KL to the policy that collected the steps, which bc does not have; "
                "use another schedule"
            )
        return self


def init(cfg: BCConfig, run: Run, key: Tensor) -> dict[str, Any]:
    """Check the policy and the batch size, and return parameters, optimiser state and hyperparameters."""
    if run.policy.imitation_loss is None:
        check_log_prob(run.policy, "bc")
    check_batch_size(cfg, run.static.row_steps)
    params = run.policy.init(rng.fold_in(key, rng.INIT))
    return learning_state(cfg, params, {}, key.device, run.algorithm.choices.groups)


def loss(run: Run, params: TensorDict, minibatch: TensorDict, mask: Tensor, hyper: TensorDict) -> tuple[Tensor, Logs]:
    """Return the mean imitation loss over the unmasked actions of a minibatch (see `rows_to_learn`).

    loss = mean(imitation_loss(action)) if the policy has `imitation_loss`, else mean(-log_prob(action)), in nats
    """
    return masked_mean(run.policy.imitation_rows(params, minibatch), mask), {}


def _losses_of_chunk(run: Run, _: None, rows: TensorDict, params: TensorDict) -> tuple[None, Tensor]:
    return None, run.policy.imitation_rows(params, rows)


def holdout_loss(run: Run, state: TensorDict, part: TensorDict) -> Tensor:
    """Draw as many held-out steps as an iteration learns from, and return their mean imitation loss over all ranks.

    Gradient: none.
    """
    params = policy_params(state)
    rows = rows_to_learn(run, params, drawn_batch(run, state, part))
    with torch.no_grad():
        _, losses = run.scan(partial(_losses_of_chunk, run), None, in_chunks(rows, run.static.row_steps), params)
    mask = cast(Tensor, rows["mask"])
    mean = masked_mean(losses.flatten(0, 1)[: len(rows)], mask)
    return all_mean(mean, weight=mask.sum().to(mean.dtype))


def _iterate(run: Run, state: TensorDict, data: Borrowed) -> tuple[TensorDict, TensorDict, Logs]:
    """Draw a batch and learn from it. Return the new `params` and `opt`, the batch and the logs."""
    batch = drawn_batch(run, state, data.fields["train"])
    rows = rows_to_learn(run, policy_params(state), batch)
    learnt, logs = minibatch_sgd(run, state, rows, loss, run.algorithm.choices)
    if "holdout" in data.fields:
        logs["holdout_loss"] = holdout_loss(run, learnt, data.fields["holdout"])
    return cast(TensorDict, learnt.select("params", "opt")), batch, logs


def iterate(run: Run, state: TensorDict, borrowed: TensorDict) -> tuple[TensorDict, TensorDict, Logs]:
    """Draw demonstrated steps from `borrowed["data"]`, and learn in `n_epochs` passes over minibatches of these steps.

    Returns: the state after learning, the writes with the field `batch`, and the logs.
    """
    whole = replaced(state, borrowed.select("frozen_params", strict=False))
    fields = cast(TensorDict, whole.exclude("env", "episode", "carry"))
    changed, batch, logs = run.jit(_iterate, run)(fields, Borrowed(borrowed["data"]))
    return replaced(state, changed), TensorDict({"batch": batch}, []), logs


@register_algorithm("bc")
def bc(cfg: BCConfig) -> Algorithm:
    """Build the algorithm of behaviour cloning. The policy needs log-probabilities or its own `imitation_loss`."""
    choices: SGD = sgd_choices(cfg)
    return Algorithm(
        choices=choices,
        init=partial(init, cfg),
        iterate=iterate,
        kinds=LEARNER_KINDS,
        gradient_steps=partial(gradient_steps, cfg),
        as_one=True,
        data=Demonstrations(cfg.demos, cfg.holdout),
    )
