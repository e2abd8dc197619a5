"""Store earlier policy parameters as a reference policy. A loss can penalise deviations from the reference."""

from collections.abc import Callable
from functools import partial
from typing import cast

import torch
from tensordict import TensorDict
from torch import Tensor

from ecrl.algorithms.core import Run
from ecrl.algorithms.rows import rows_of
from ecrl.kernels.scan_loop import in_chunks
from ecrl.policies import Policy, acting_params
from ecrl.pytree import replaced

Evaluate = Callable[[Policy, TensorDict, TensorDict], tuple[Tensor, Tensor]]


def _log_prob(run: Run, evaluate: Evaluate, _: None, rows: TensorDict, params: TensorDict) -> tuple[None, Tensor]:
    with torch.no_grad():
        return None, evaluate(run.policy, params, rows)[0]


def reference_log_prob(
    run: Run, state: TensorDict, batch: TensorDict, evaluate: Evaluate = Policy.evaluate_rows
) -> Tensor:
    """Return the log-probabilities `[N, T]`, in nats, of a batch's actions under the state's `ref_params`.

    If `evaluate` is `Policy.evaluate_tokens`, the result has the policy's token axes, `[N, T, ...]`. A reference with
    memory starts each sequence from the memory of the policy that acted.

    Gradient: none.
    """
    rows = rows_of(run, batch)
    chunks = in_chunks(rows.exclude("mask", "sample_log_prob"))
    frozen = state.select("frozen_params", strict=False)
    reference = acting_params(cast(TensorDict, state["ref_params"]), cast(TensorDict, frozen))
    _, log_prob = run.scan(partial(_log_prob, run, evaluate), None, chunks, reference)
    tokens = log_prob.shape[1 + rows["done"].ndim :]
    return log_prob.flatten(0, 1)[: len(rows)].reshape(*batch["steps", "done"][:, :-1].shape, *tokens)


def refreshed_reference(state: TensorDict, freq: Tensor) -> TensorDict:
    """Refresh the reference policy every `freq` iterations, and return the state. `freq` is a 0-d int64 tensor.

    In a refresh, `ref_params` becomes a copy of the current parameters of the policy and of the current observation
    statistics. Later changes of the statistics therefore do not change the reference policy.
    """
    due = (state["update_step"] + 1) % freq == 0
    params, norm, reference = (cast(TensorDict, state[key]) for key in ("params", "norm", "ref_params"))
    after = acting_params(params, norm).apply(lambda new, old: torch.where(due, new, old), reference)
    return replaced(state, {"ref_params": after})
