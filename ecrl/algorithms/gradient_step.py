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

from ecrl.algorithms.core import SKIPPED_STEPS, Run, loss_and_logs, over_steps
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
from ecrl.kernels.scan_loop import step_if
from ecrl.policies import acting_params, fixed_params
from ecrl.pytree import flatten, mapped, replaced
from ecrl.types import Logs

_READ = ("params", "hyper", "norm", "frozen_params")

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
        group: the optimiser group, whose paths are names of networks. A group without paths contains all parameters.
        loss: (run, params, *args) -> 0-d loss and logs. `params` are the parameters for the policy's functions. The log
            `count` is the number of elements over which the loss is a mean. The gradients of the ranks are averaged
            with this weight.
        args: further arguments of `loss`.
        moves: 0-d bool, or None for True. If False, the parameters and the optimiser state of the group do not change.
            The logs are then NaN, except for the learning rate and `skipped_steps`, and a compiled graph for the CPU
            does not compute the loss.

    Returns: the state with new `params` and `opt`, and the logs of the loss with the gradient norm and the learning
        rate. If `count` is 0 on all ranks, nothing changes. If `trainer.finite_guard` is "skip", a step whose gradients
        or new parameters hold NaN or infinity changes nothing. The logs of such a step are NaN, except for the learning
        rate and `skipped_steps`, which is 1.
    """
    params, opt = (cast(TensorDict, state[name]) for name in ("params", "opt"))
    own = params if group.paths is None else cast(TensorDict, params.select(*(path[0] for path in group.paths)))
    before = own, opt if group.paths is None else cast(TensorDict, opt[group.name])
    rates = learning_rates(state, (group,), run.static.turns)
    body, constants = partial(_step_of_group, run, group, loss), (state.select(*_READ, strict=False), rates, *args)
    (own, own_opt), logs = body(before, *constants) if moves is None else step_if(moves, body, before, *constants)
    if SKIPPED_STEPS in logs:
        logs[SKIPPED_STEPS] = logs[SKIPPED_STEPS].nan_to_num()
    fields = {
        "params": replaced(params, own),
        "opt": own_opt if group.paths is None else replaced(opt, {group.name: own_opt}),
    }
    return replaced(state, fields), logs | rate_logs(rates, (group,), state)


def _step_of_group(
    run: Run,
    group: Group,
    loss: GroupLoss,
    before: tuple[TensorDict, TensorDict],
    state: TensorDict,
    rates: dict[str, Tensor],
    *args: Any,
) -> tuple[tuple[TensorDict, TensorDict], Logs]:
    """Take the step of `gradient_step`. Return the group's parameters and optimiser state, and the logs."""
    (own, opt), hyper, layout = before, cast(TensorDict, state["hyper"]), layout_of(before[0], (group,))

    def loss_of(own: TensorDict) -> tuple[Tensor, Logs]:
        params = replaced(cast(TensorDict, state["params"]), own)
        return loss_and_logs(run, loss(run, acting_params(params, fixed_params(state)), *args))

    grads, (value, logs) = torch.func.grad_and_value(loss_of, has_aux=True)(own)
    count = logs.get("count", torch.ones_like(value))
    logs = {name: log.to(torch.promote_types(log.dtype, value.dtype)) for name, log in logs.items() if name != "count"}
    old, old_opt = pack(own, layout), pack_opt(opt, layout)
    grads, norms = clip_gradients(all_mean(pack(grads, layout), weight=count), hyper, layout)
    new, new_opt = optimizer_step(old, grads, old_opt, rates, hyper, layout)
    logs |= norms
    moves = all_sum(count) > 0.0
    if run.static.skips_nonfinite:
        finite = torch.stack([leaf.isfinite().all() for leaf in flatten((grads, norms, new))[0]]).all()
        moves = moves & finite
        logs = {name: torch.where(finite, log, torch.nan) for name, log in logs.items()}
        logs |= {SKIPPED_STEPS: (~finite).to(value.dtype)}
    keep = partial(torch.where, moves)
    new, new_opt = mapped(keep, new, old), mapped(keep, new_opt, old_opt)
    return (unpack(new, layout).clone(), unpack_opt(new_opt, opt, layout)), logs


def each_minibatch(run: Run, state: TensorDict, batch: TensorDict, number: int, step: Step) -> tuple[TensorDict, Logs]:
    """Split a batch into equal parts, and call `step` on each part, one after the other.

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
