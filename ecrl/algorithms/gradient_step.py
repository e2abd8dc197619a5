"""Gradient steps of off-policy algorithms. Each network may have its own loss and its own optimiser.

    critic, actor = groups_of(cfg, {"critic": (("critic",),), "actor": (("actor",),)})
    state, logs = gradient_step(run, state, critic, critic_loss, batch, target)
    state, logs = gradient_step(run, state, actor, actor_loss, batch)

A loss is differentiated with respect to the parameters of one optimiser group only. The actor's loss therefore does not
change the critic.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from tensordict import TensorDict
from torch import Tensor

from ecrl.algorithms.core import SKIPPED_STEPS, Run, over_steps
from ecrl.algorithms.optimizer import (
    Group,
    clip_gradients,
    layout_of,
    learning_rates,
    optimizer_step,
    pack,
    pack_opt,
    rate_logs,
    unpack,
    unpack_opt,
)
from ecrl.distributed import all_mean, all_sum
from ecrl.policies import acting_params, fixed_params
from ecrl.pytree import flatten, mapped, replaced
from ecrl.types import Logs

GroupLoss = Callable[..., tuple[Tensor, Logs]]
Step = Callable[[Run, TensorDict, TensorDict, Tensor], tuple[TensorDict, Logs]]


def gradient_step(
    run: Run,
    state: TensorDict,
    group: Group,
    loss: GroupLoss,
    *args: Any,
    moves: Tensor | None = None,
) -> tuple[TensorDict, Logs]:
    """Take one step of the optimiser of a group.

        params[group] = optimizer(params[group], mean over ranks of the gradient of loss, clipped to max_grad_norm)

    Args:
        run: the run.
        state: state with `params`, `opt`, `hyper`, `norm`, `update_step` and `iterations`, and optionally with
            `frozen_params`.
        group: the group. Its paths are names of networks. A group without paths has all parameters.
        loss: (run, params, *args) -> 0-d loss and logs. `params` are the parameters for the policy's functions. The log
            `count` has the number of elements over which the loss is a mean, and weights the ranks.
        args: further arguments of `loss`.
        moves: 0-d bool; if False, the parameters and the optimiser state of the group do not change.

    Returns: the state with new `params` and `opt`, and the logs of the loss with the gradient norm and the learning
        rate. If `count` is 0 on all ranks, nothing changes. If `trainer.finite_guard` is "skip", a step whose gradients
        or new parameters hold NaN or infinity changes nothing. The logs of such a step are NaN, except that
        `skipped_steps` is 1.
    """
    params, opt, hyper = (cast(TensorDict, state[name]) for name in ("params", "opt", "hyper"))
    own = params if group.paths is None else cast(TensorDict, params.select(*(path[0] for path in group.paths)))
    own_opt, layout = opt if group.paths is None else cast(TensorDict, opt[group.name]), layout_of(own, (group,))

    def loss_of(own: TensorDict) -> tuple[Tensor, Logs]:
        return loss(run, acting_params(replaced(params, own), fixed_params(state)), *args)

    grads, (value, logs) = torch.func.grad_and_value(loss_of, has_aux=True)(own)
    count = logs.get("count", torch.ones_like(value))
    logs = {name: log for name, log in logs.items() if name != "count"}
    before, opt_before = pack(own, layout), pack_opt(own_opt, layout)
    grads, norms = clip_gradients(all_mean(pack(grads, layout), weight=count), hyper, layout)
    rates = learning_rates(state, (group,))
    after, opt_after = optimizer_step(before, grads, opt_before, rates, hyper, layout)
    logs |= norms
    has_rows = all_sum(count) > 0.0
    moves = has_rows if moves is None else moves & has_rows
    if run.static.skips_nonfinite:
        finite = torch.stack([leaf.isfinite().all() for leaf in flatten((grads, norms, after))[0]]).all()
        moves = moves & finite
        logs = {name: torch.where(finite, log, torch.nan) for name, log in logs.items()}
        logs |= {SKIPPED_STEPS: (~finite).to(value.dtype)}
    keep = partial(torch.where, moves)
    after, opt_after = mapped(keep, after, before), mapped(keep, opt_after, opt_before)
    new_opt = unpack_opt(opt_after, own_opt, layout)
    fields = {
        "params": replaced(params, unpack(after, layout).clone()),
        "opt": new_opt if group.paths is None else replaced(opt, {group.name: new_opt}),
    }
    return replaced(state, fields), logs | rate_logs(rates, (group,), state)


def each_minibatch(run: Run, state: TensorDict, batch: TensorDict, number: int, step: Step) -> tuple[TensorDict, Logs]:
    """Take gradient steps on the equal parts of a batch, one after the other.

    Args:
        run: the run.
        state: the state of a turn, in which `update_step` counts the turns.
        batch: TensorDict `[number * B]`.
        number: number of parts.
        step: (run, state, minibatch, count) -> (state, logs). `minibatch` has the shape `[B]`, and `count` is
            `update_step * number` plus the index of the part, 0-d int64. `step` may change `params`, `opt` and
            `target_params`. A log is 0-d, or has the shape `[B]` with a value for each row.

    Returns: the state after all steps, and the means of the logs, except that `skipped_steps` is a sum. A log with a
        value for each row becomes `[number * B]`.
    """
    first = state["update_step"] * number
    if number == 1:
        return step(run, state, batch, first)
    names = [name for name in ("params", "opt", "target_params") if name in state]
    moving, fixed = cast(TensorDict, state.select(*names)), cast(TensorDict, state.exclude(*names))
    parts = mapped(
        lambda x: x.unflatten(0, (number, -1)), batch, batch=lambda size: (number, size[0] // number, *size[1:])
    )
    counts = first + torch.arange(number, device=first.device)
    moving, logs = run.scan(partial(_step, step, run), moving, (parts, counts), fixed)
    of_rows = {name: log.flatten(0, 1) for name, log in logs.items() if log.ndim > 1}
    means = over_steps(run, {name: log for name, log in logs.items() if name not in of_rows})
    return replaced(state, moving), means | of_rows


def _step(
    step: Step, run: Run, moving: TensorDict, x: tuple[TensorDict, Tensor], fixed: TensorDict
) -> tuple[TensorDict, Logs]:
    """Call `step` as the body of a scan. Return the fields that may change, and the logs."""
    state, logs = step(run, replaced(fixed, moving), *x)
    return cast(TensorDict, state.select(*moving.keys())), logs
