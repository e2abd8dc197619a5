"""Find the first NaN or infinity of an iteration, and create an error that describes the value in one line.

The search repeats the iteration eagerly, step by step. In the collected steps, the search reports the field, the
environment and the step of the first value that is not finite. In the update, the search follows the order of
computation. In each loop of the update, the search finds the first step after which a loss, a gradient norm or a
parameter is not finite. The search then also checks the other logs of this step. If a loop is differentiated, the
search checks the gradients of each step. The error contains the report and the state before the iteration.

The search cannot repeat the steps of environments that step in Python (host environments). For an on-policy algorithm
with host environments, the search repeats only the update. An off-policy iteration with host environments mixes steps
and updates, so the search checks only the results of the iteration.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from math import inf, isfinite
from typing import Any, NamedTuple, cast

import torch
from tensordict import TensorDict
from torch import Tensor

from ecrl.algorithms import Interleaved, Run
from ecrl.algorithms.core import OnPolicy, steps_taken
from ecrl.algorithms.minibatch_sgd import Objective
from ecrl.algorithms.optimizer import network_vectors
from ecrl.algorithms.state_kinds import environment_fields
from ecrl.distributed import rank
from ecrl.errors import NotFiniteError
from ecrl.kernels import scan
from ecrl.loop.buffers import borrowed_leaves, kinds_of
from ecrl.loop.finite_guard import FIELDS, KINDS
from ecrl.pytree import flatten, names, replaced, unflatten
from ecrl.tracing_state import transforms
from ecrl.types import Logs

_FIELDS = ("obs", "action", "sample_log_prob", "value", "reward", "final_value")  # fields in the order of computation
_SHOWN = 8


class Collected(NamedTuple):
    """State, batch and logs that an iteration with host environments returned.

    The report needs these results because host environments cannot repeat their steps. If the iteration returned no
    steps, the batch is empty.
    """

    state: TensorDict
    batch: TensorDict
    logs: Logs


class FirstNonfinite(NamedTuple):
    """First value of an iteration that is not finite.

    Attributes:
        what: kind of the value, one of `KINDS`.
        key: name of the value, such as `obs` or `params.actor`.
        place: position of the value, such as the environment and the step.
        value: the value, as a number or as a list of at most eight numbers.
        before: the previous value of the same name, in the form of `value`, or None if it is not known.
    """

    what: str
    key: str
    place: dict[str, int]
    value: Any
    before: Any


def _named(tree: Any) -> dict[str, Tensor]:
    leaves, structure = flatten(tree)
    return {name: x for name, x in zip(names(structure), leaves, strict=True) if x.is_floating_point()}


def _as_numbers(x: Tensor) -> Any:
    """Convert a 0-d tensor to a Python number, and any other tensor to a list of its first eight values."""
    return x.item() if x.ndim == 0 else x.flatten()[:_SHOWN].tolist()


def _nonfinite_steps(steps: TensorDict) -> dict[str, Tensor]:
    """Map each field to a bool tensor `[N, T + 1]`, which is True at unmasked steps where the field is not finite.

    If the steps have no mask, the last entries of `obs` and `value` also count, because they are not padding.
    """
    counted = torch.ones_like(steps["done"])
    counted[:, -1] = False
    counts = counted if "mask" not in steps else counted & steps["mask"]
    fields = steps.select(*_FIELDS, strict=False)
    ordered = {name: x for field in _FIELDS if field in fields for name, x in _named({field: fields[field]}).items()}
    with_last = ("obs", "value") if "mask" not in steps else ()  # fields whose last entry is not padding
    wrong = {name: ~x.isfinite().flatten(2).all(-1) if x.ndim > 2 else ~x.isfinite() for name, x in ordered.items()}
    return {name: x & (counts | (~counted if name.startswith(with_last) else False)) for name, x in wrong.items()}


def first_in_steps(run: Run, state: TensorDict, steps: TensorDict) -> FirstNonfinite | None:
    """Return the first value in unmasked steps that is not finite, or None if all values are finite.

    The values are ordered by step, then by field, then by environment.

    Args:
        run: the run.
        state: the state before the steps, which contains the reward before the first step.
        steps: the collected steps, `[N, T + 1]`.
    """
    first = {name: int(x.any(0).int().argmax()) for name, x in _nonfinite_steps(steps).items() if x.any()}
    if not first:
        return None
    name = min(first, key=lambda name: first[name])
    t, x = first[name], cast(Tensor, steps[tuple(name.split("."))])
    env = int(_nonfinite_steps(steps)[name][:, t].int().argmax())
    before = x[env, t - 1] if t else cast(TensorDict, state["env"])["reward"][env] if name == "reward" else None
    before = None if name == "final_value" else before  # only steps at time limits have a `final_value`
    count = "env_action" if "decision_step" in state else "env_step"  # an action may take several environment steps
    place = {"env": env + rank() * len(x), "step": t, count: int(steps_taken(run, state)) + t}
    what = FIELDS.get(name.partition(".")[0], "loss")
    return FirstNonfinite(what, name, place, _as_numbers(x[env, t]), None if before is None else _as_numbers(before))


class Finding(NamedTuple):
    """Value that is not finite in an update, with the fields of `FirstNonfinite`.

    The field `place` is the position of the value in the loops of the update.
    """

    what: str
    key: str
    place: dict[str, int]
    value: Any
    before: Any


def _first_of(numbers: dict[str, Tensor], last: dict[str, Tensor]) -> tuple[str, Any, Any] | None:
    """Return the name of the first value that is not finite, the value, and the corresponding value in `last`.

    If all values are finite, return None.
    """
    for name, x in numbers.items():
        if x.is_floating_point() and not x.isfinite().all():
            at = int((~x.isfinite()).flatten().int().argmax())
            return name, x.flatten()[at].item(), last[name].flatten()[at].item() if name in last else None
    return None


def _logs_of(output: Any) -> dict[str, Tensor]:
    """Return the logs in the output of a loop's step: the 0-d tensors in its dicts, in the order of computation."""
    if isinstance(output, dict):
        return {name: x for name, x in output.items() if isinstance(x, Tensor) and x.ndim == 0}
    parts = output if isinstance(output, tuple | list) else ()
    return {name: x for part in parts for name, x in _logs_of(part).items()}


def _parameters(objective: Objective, packed: Any) -> dict[str, Tensor]:
    """Return the parameters after a gradient step as a dict with one vector for each network."""
    vectors: dict[str, list[Tensor]] = {}
    for part in objective.layout.groups:
        for network, pieces in network_vectors(packed[part.group.name], part).items():
            vectors.setdefault(f"params.{network}", []).extend(pieces.values())
    return {name: torch.cat(pieces) for name, pieces in vectors.items()}


def _gradient_step(
    objective: Objective, number: int, length: int, carry: Any, output: Any
) -> tuple[dict[str, int], dict[str, Tensor], dict[str, Tensor], set[str], bool]:
    """Describe a gradient step of `minibatch_sgd` by its position, logs, parameters and names of gradient norms.

    The last result is True if the minibatch has unmasked steps, and the loss, a gradient norm or a parameter is not
    finite. The search reads other logs only in this case, because other logs may overflow in a run without an error.
    """
    each = length // objective.n_epochs
    logs, after = _logs_of(output), _parameters(objective, carry[0])
    norms = {f"{part.group.prefix}grad_norm" for part in objective.layout.groups}
    judged = {name: logs[name] for name in ("loss", *norms)} | after
    is_bad = float(output[0]) > 0.0 and _first_of(judged, {}) is not None
    return {"epoch": number // each, "minibatch": number % each}, logs, after, norms, is_bad


def _losses_of(logs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Select the losses, and then the gradient norms, from the logs by the names that the finite guard recognises."""
    losses = {name: x for name, x in logs.items() if name == "loss" or name.endswith("_loss")}
    return losses | {name: x for name, x in logs.items() if name.endswith("grad_norm")}


def _learned_in(carry: Any, has_logs: bool) -> dict[str, Tensor]:
    """Return the parameters in a loop's carry: the leaves under a key such as `params` or `target_params`.

    If the carry has no such key but the steps of the loop have logs, return all floating-point leaves of the carry. If
    the steps have no logs either, return an empty dict.
    """
    leaves, learned = _named(carry), {}
    for name, x in leaves.items():
        parts = name.split(".")
        at = next((i for i, part in enumerate(parts) if part == "params" or part.endswith("_params")), None)
        if at is not None:
            learned[".".join(parts[at:])] = x
    if learned or not has_logs:
        return learned
    return {f"carry.{name}".rstrip("."): x for name, x in leaves.items()}


def _is_finite(x: Tensor) -> bool:
    return bool(x.isfinite().all())


class _Watched(torch.autograd.Function):
    """Identity function that passes its gradient to `read` in the backward pass."""

    @staticmethod
    def forward(x: Tensor, read: Callable[[Tensor], None]) -> Tensor:  # pyright: ignore
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.read = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore
        ctx.read(grad)
        return grad, None


def _watched_steps(run: Run, body: Any, length: int, findings: list[Finding]) -> Callable[..., Any]:
    """Wrap a loop's body so that the backward pass searches the gradients for NaN and infinity, last step first.

    The gradient with respect to the carry at step t is called the costate of step t. The gradient with respect to a
    constant, such as a parameter, contains only the contribution of step t.
    """
    steps, last, num_envs = iter(range(length)), {}, run.static.num_envs

    def read(name: str, step: int, grad: Tensor) -> None:
        first = None if findings else _first_of({name: grad}, last)
        if first is not None:
            at = int((~grad.isfinite()).flatten().int().argmax())
            is_of_env = name.startswith("costate.") and grad.shape[:1] == (num_envs,)
            env = {"env": at // grad[0].numel() + rank() * num_envs} if is_of_env else {}
            findings.append(Finding("gradient", name, {"step": step} | env, *first[1:]))
        last[name] = grad

    def watched(tree: Any, prefix: str, step: int) -> Any:
        leaves, structure = flatten(tree)
        for i, name in enumerate(names(structure)):
            if leaves[i].is_floating_point():
                key = ".".join((prefix, *(part for part in name.split(".") if not part.isdecimal())))
                leaves[i] = cast(Any, _Watched.apply(leaves[i], partial(read, key, step)))
        return unflatten(structure, leaves)

    def step(carry: Any, x: Any, *constants: Any) -> tuple[Any, Any]:
        t = next(steps)
        # Wrap the constants before the carry, because the backward pass reads the carry's gradient first.
        constants = watched(constants, "gradient", t)
        return body(watched(carry, "costate", t), x, *constants)

    return step


def _searching_scan(run: Run, findings: list[Finding]) -> Callable[..., Any]:
    """Return a scan that runs a loop and appends the first value that is not finite to `findings`.

    The scan looks for a step after which a loss, a gradient norm or a parameter is not finite. In this step, the scan
    searches the logs and the new parameters. The scan ignores a log that was not finite in an earlier step. In a loop
    other than `minibatch_sgd`, the scan also ignores a log without an earlier value, which may be NaN in a run without
    an error. A loss or a gradient norm needs no earlier value. If a loop is differentiated, the scan searches the
    gradients of the loop. The scan continues after the first finding, because the other ranks continue, too.
    """
    is_interleaved = isinstance(run.algorithm.iterate, Interleaved)
    around: list[int | None] = []  # the step index of each enclosing loop, or None for a loop of `minibatch_sgd`

    def searching(body: Any, carry: Any, xs: Any, *constants: Any) -> Any:
        length = len(flatten(xs)[0][0])
        if None in around:
            return scan(body, carry, xs, *constants)
        if transforms():
            return scan(_watched_steps(run, body, length, findings), carry, xs, *constants)
        bound = body.args[0] if isinstance(body, partial) and body.args else None
        objective, numbers, last = bound if isinstance(bound, Objective) else None, iter(range(length)), {}
        outside = {"turn": around[0]} if is_interleaved and around else {}
        harmless: set[str] = set()  # names of values that were not finite before the first bad step

        def step(carry: Any, x: Any, *constants: Any) -> tuple[Any, Any]:
            nonlocal last
            number, before = next(numbers), carry
            around.append(number if objective is None else None)
            carry, y = body(carry, x, *constants)
            around.pop()
            if objective is not None:
                place, logs, after, norms, is_bad = _gradient_step(objective, number, length, carry, y)
                searched = logs | after
            else:
                logs = {name: log for name, log in _logs_of(y).items() if name not in run.algorithm.delayed}
                place = {"turn": number} if is_interleaved and not around else {"loop_step": number}
                if number == 0:
                    last = _learned_in(before, bool(logs))
                    harmless.update(name for name, old in last.items() if not _is_finite(old))
                after, losses = _learned_in(carry, bool(logs)), _losses_of(logs)
                norms = {name for name in losses if name.endswith("grad_norm")}
                judged = {name: new for name, new in (losses | after).items() if name not in harmless}
                is_bad = _first_of(judged, {}) is not None
                searched = {name: log for name, log in logs.items() if name in losses or name in last} | after
            searched = {name: new for name, new in searched.items() if name not in harmless}
            first = _first_of(searched, last) if is_bad and not findings else None
            if not is_bad and (objective is None or float(y[0]) > 0.0):  # ignore minibatches without unmasked steps
                harmless.update(name for name, log in logs.items() if not _is_finite(log))
            if first is not None:
                what = "gradient" if first[0] in norms else "parameters" if first[0] in after else "loss"
                findings.append(Finding(what, first[0], cast(dict[str, int], outside | place), *first[1:]))
            last = logs | after
            return carry, y

        return scan(step, carry, xs, *constants)

    return searching


def _can_repeat(run: Run) -> bool:
    """Return True if the update of an iteration can be repeated without stepping host environments."""
    return run.env.is_pure or isinstance(run.algorithm.iterate, OnPolicy)


def _in_results(run: Run, start: TensorDict, collected: Collected) -> FirstNonfinite | None:
    """Return the first value that is not finite in the results of an iteration, or None if all values are finite.

    The function checks the steps, then the losses and the gradient norms in the logs, then the parameters.
    """
    state, batch, logs = collected
    first = first_in_steps(run, start, cast(TensorDict, batch["steps"])) if "steps" in batch else None
    return _at_the_end(run, state, logs) if first is None else first


def _at_the_end(run: Run, state: TensorDict, logs: Logs) -> FirstNonfinite | None:
    """Return the first loss, gradient norm or parameter that is not finite after an iteration, or None."""
    after = {f"params.{name}": x for name, x in _named(state["params"]).items()}
    losses = _losses_of(_logs_of(dict(logs)))
    numbers = {name: x for name, x in losses.items() if name not in run.algorithm.delayed} | after
    end = _first_of(numbers, {})
    if end is None:
        return None
    what = "parameters" if end[0] in after else "gradient" if end[0].endswith("grad_norm") else "loss"
    return FirstNonfinite(what, end[0], {}, _as_numbers(numbers[end[0]]), None)


def search(run: Run, start: TensorDict, in_steps: bool, collected: Collected | None) -> FirstNonfinite | None:
    """Repeat an iteration eagerly and return the first value that is not finite, or None if all values are finite.

    If the iteration cannot be repeated, return the first value in its results that is not finite.

    Args:
        run: the run.
        start: the state before the iteration.
        in_steps: if True, some rank has NaN or infinity in the collected steps. For an on-policy algorithm, the search
            then covers only these steps.
        collected: the results of the iteration, or None to collect the steps again.
    """
    if collected is not None and not _can_repeat(run):
        return _in_results(run, start, collected)
    eager, iterate = run._replace(jit=partial, scan=scan), run.algorithm.iterate
    findings: list[Finding] = []
    kinds = kinds_of(run)
    searching = run._replace(jit=partial, scan=_searching_scan(run, findings))
    if isinstance(iterate, OnPolicy):
        if collected is None:
            state, batch = iterate.collect(eager, start)
        else:
            moved = {name: collected.state[name] for name in environment_fields(start, kinds)}
            state, batch = replaced(start, moved), collected.batch
        first = first_in_steps(run, start, cast(TensorDict, batch["steps"]))
        if in_steps:
            return first
        state, logs = iterate.update(searching, state, batch)
    else:
        own, borrowed = borrowed_leaves(start, kinds)
        state, writes, logs = iterate(searching, own, borrowed)
        batch = cast(TensorDict, writes.get("batch", TensorDict({}, [])))
        first = first_in_steps(run, start, cast(TensorDict, batch["steps"])) if "steps" in batch else None
    end = None if findings else _at_the_end(run, state, logs)
    if end is not None:
        findings.append(Finding(*end))
    if not findings:
        return first
    if first is not None and not (
        isinstance(iterate, Interleaved) and findings[0].place.get("turn", inf) < first.place["step"] // iterate.steps
    ):
        return first
    return FirstNonfinite(*findings[0])


_ADVICE = {
    "observation": "mend the environment",
    "reward": "mend the environment",
    "action": "actions and their log-probabilities come from the policy: lower the learning rate",
}
_FINAL = (
    "final_value is the value of the observation at a time limit: mend the environment if the observation is not "
    "finite, else "
)
_LEARNING = "lower the learning rate or max_grad_norm"


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_shown, value))}]"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


_PLACES = {
    "env": "env {}",
    "step": "step {} of the rollout",
    "env_step": "step {} of that env",
    "env_action": "action {} of that env",
    "turn": "turn {}",
    "loop_step": "step {} of a loop",
    "epoch": "epoch {}",
    "minibatch": "minibatch {}",
}


def explained(report: dict[str, Any]) -> str:
    """Describe the report of a NotFiniteError in one line.

    The line contains the first value that is not finite, its position, the last finite value and advice.
    """
    begin = f"iteration {report['update_step']} (after {report['sample_step']} env steps)"
    problem = f"{begin}: NaN or infinity in {', '.join(report['met'])}"
    first, guard = report["found"], 'or set trainer.finite_guard to "skip" to leave such updates out'
    if first is None:
        advice = _ADVICE.get(report["met"][0], _LEARNING)
        repeated = "repeated eagerly, the iteration has only finite values"
        result = repeated if report["repeated"] else "the results of the iteration are finite"
        return f"{problem}; {result} on this rank; {advice}, {guard}"
    where = ", ".join(_PLACES[name].format(number) for name, number in first["place"].items())
    last = "no value before it" if first["before"] is None else f"last finite value {_shown(first['before'])}"
    advice = (_FINAL if first["key"] == "final_value" else "") + _ADVICE.get(first["what"], _LEARNING)
    number = f"first {first['key']} = {_shown(first['value'])}{f' in {where}' if where else ''}"
    return f"{problem}; {number}, {last}; {advice}, {guard}"


class NonfiniteAction(Exception):
    """Exception for an action with NaN or infinity, raised after `taken` finite actions in the same iteration.

    The attribute `last` contains the last one or two states of the environment, each with its action.
    """

    def __init__(self, last: Sequence[tuple[TensorDict, Tensor]], taken: int) -> None:
        super().__init__()
        self.last, self.taken = tuple(last), taken


@dataclass(frozen=True)
class _CheckedStep:
    """Wrapper of an environment's `step` that rejects actions with NaN or infinity.

    Two wrappers of equal `step` functions are equal.
    """

    step: Callable[[TensorDict, Tensor, Any], TensorDict]
    last: deque[tuple[TensorDict, Tensor]] = field(default_factory=lambda: deque(maxlen=2), compare=False)
    taken: Iterator[int] = field(default_factory=count, compare=False)

    def __call__(self, env_state: TensorDict, action: Tensor, noise: Any) -> TensorDict:
        self.last.append((env_state, action))
        taken = next(self.taken)
        if not isfinite(sum(action.flatten().tolist())):  # for a few values, Python is faster than torch
            raise NonfiniteAction(self.last, taken)
        return self.step(env_state, action, noise)


def with_checked_actions(run: Run) -> Run:
    """Return a run, for one iteration, whose environment rejects actions with NaN or infinity.

    Actions are checked before each step because a robot may execute them. All other values are checked after the
    collection. For equal runs, the function returns equal runs, which share compiled functions.

    Raises: NonfiniteAction if the policy of the returned run chooses an action with NaN or infinity.
    """
    return run._replace(env=replace(run.env, step=_CheckedStep(run.env.step)))


def action_error(run: Run, state: TensorDict, refused: NonfiniteAction) -> NotFiniteError:
    """Create the error for an iteration that began at `state` and stopped at an action with NaN or infinity."""
    # The last pair is repeated, because the last entry of a rollout is padding.
    rows = [(env_state["obs"], action) for env_state, action in (*refused.last, refused.last[-1])]
    obs, action = (torch.stack(x, 1) for x in zip(*rows, strict=True))
    done = torch.zeros(action.shape[:2], dtype=torch.bool, device=action.device)
    first = cast(
        FirstNonfinite, first_in_steps(run, state, TensorDict({"obs": obs, "action": action, "done": done}, done.shape))
    )
    before = refused.taken + 1 - len(refused.last)
    place = {name: n + before * (name != "env") for name, n in first.place.items()}
    report = {**_steps(state), "met": [first.what], "found": first._replace(place=place)._asdict()}
    return NotFiniteError(explained(report), report, _without_data(state))


def _without_data(state: TensorDict) -> TensorDict:
    """Return the state without the algorithm's data set, which no checkpoint stores."""
    return cast(TensorDict, state.exclude("data")) if "data" in state else state


def _steps(state: TensorDict) -> dict[str, int]:
    return {name: int(state[name]) for name in ("update_step", "sample_step")}


def nonfinite_error(
    run: Run, state: TensorDict, nonfinite: Tensor, collected: Collected | None = None
) -> NotFiniteError:
    """Create the error for an iteration with NaN or infinity. If possible, repeat the iteration eagerly for the report.

    All ranks must call this function, because the ranks repeat the update together.

    Args:
        run: the run.
        state: the state before the iteration.
        nonfinite: the flags of the finite guard, `[2, 6]`.
        collected: the results of the iteration, or None to collect the steps again.
    """
    with torch.no_grad():
        first = search(run, state, bool(nonfinite[1, :3].any()), collected)
    kinds = [kind for kind, flag in zip(KINDS, nonfinite[1].tolist(), strict=True) if flag]
    found, repeated = None if first is None else first._asdict(), collected is None or _can_repeat(run)
    report = {**_steps(state), "met": kinds, "found": found, "repeated": repeated}
    return NotFiniteError(explained(report), report, _without_data(state))
