"""Log the largest difference between the log-probabilities from `act` and from `evaluate`, before an update."""

from typing import Any

import torch
from tensordict import TensorDict

from ecrl.algorithms.core import Run
from ecrl.algorithms.rows import rows_of
from ecrl.distributed import all_max
from ecrl.policies import counted_tokens, policy_params
from ecrl.types import Logs

_STEPS = 128  # enough to find a difference between two distributions, and cheap compared with an update


def logprob_gap(run: Run, state: TensorDict, batch: TensorDict) -> Logs:
    """Return the log `logprob_gap` of a policy whose log-probabilities have token axes, and no log for other policies.

        max |log_prob(token) - sample_log_prob(token)|        over the tokens that count, in nats

    `sample_log_prob` is from `act`, and `log_prob` is from `evaluate` with the same parameters. Except for rounding,
    the two must be equal. The maximum is over at most 128 steps or, if a row has more steps, over one row. The rows are
    spread evenly over the batch. Steps whose `mask` is False are left out, because the memory of a policy restarts
    after them. The maximum is also over all ranks.

    Args:
        run: the run.
        state: state before the update.
        batch: the batch of `collect`.

    Gradient: none.
    """
    stored: Any = batch["steps"].get("sample_log_prob", None)  # pyright: ignore
    if stored is None or stored.ndim == batch["steps", "done"].ndim:
        return {}
    rows = rows_of(run, batch, token_log_prob=stored[:, :-1])
    count = min(len(rows), max(1, _STEPS // run.static.row_steps))
    chosen: Any = rows[torch.arange(count, device=stored.device) * len(rows) // count]
    with torch.no_grad():
        log_prob, _ = run.policy.evaluate_tokens(policy_params(state), chosen)
    gap, counts = (log_prob - chosen["token_log_prob"]).abs(), counted_tokens(log_prob, chosen)
    gap = gap if counts is None else gap.masked_fill(~counts, 0.0)
    if "mask" in chosen:
        mask = chosen["mask"]
        gap = gap.masked_fill(~mask.reshape(*mask.shape, *[1] * (gap.ndim - mask.ndim)), 0.0)
    return {"logprob_gap": all_max(gap.amax())}
