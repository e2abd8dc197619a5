"""Define `ecrl.check_policy`, which checks that the functions of a policy agree with each other.

The check lets the policy act on random observations and ends episodes at random steps. The check then compares the
log-probabilities that `act` and `evaluate` return for the same actions. The check also calls `value` once for all steps
and once for each step alone, and compares the results.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, cast

import torch
from tensordict import TensorDict
from torch import Tensor

from ecrl import rng
from ecrl.config import Config, load_config
from ecrl.envs import make_env
from ecrl.errors import ConfigError, UserError
from ecrl.kernels.rollout import restarted_carry
from ecrl.policies import Policy, make_policy, policy_params
from ecrl.policies.contract import check_frozen_names, check_functions, checked_policy, checking, policy_label
from ecrl.pytree import flatten, mapped, names, unflatten
from ecrl.spaces import Box, Dict, Discrete, MultiDiscrete, Space
from ecrl.tracing_state import version_of

_NUM_ENVS, _TOLERANCE, _BF16_TOLERANCE = 4, 1e-4, 0.05
_SPREAD, _WIDE, _WARM_UP = 0.1, 1e6, 2


class PolicyCheck(NamedTuple):
    """Result of `check_policy`.

    Attributes:
        findings: one line for each fault, so the list is empty for a correct policy.
        notes: other results, such as the number of compared steps.
    """

    findings: list[str]
    notes: list[str]


class _Record(NamedTuple):
    """Record of a policy that acts on random observations.

    Attributes:
        params: the parameters that the policy's functions take as an argument.
        steps: the observations, `done` and the fields that `act` returned, `[N, T]`.
        noise: the noise of each step, `[N, T]`.
        before: the policy's memory before each step, `[N, T]`.
        after: the policy's memory after each step and before any restart, `[N, T]`.
    """

    params: TensorDict
    steps: TensorDict
    noise: Any
    before: TensorDict
    after: TensorDict


def random_observations(space: Space, keys: Tensor, others: tuple[int, ...] = ()) -> Any:
    """Draw one observation per key from the uniform distribution on a space.

    If the bounds of a float Box are infinite or far apart, the observation has standard normal values, clamped to the
    bounds. An `action_mask` has one group of entries for each number of a discrete action, and allows at least one
    entry of every group. The argument `others` contains the sizes of these groups, such as `nvec` of a MultiDiscrete
    action space. A mask in a nested Dict does not mask actions, and is drawn like any other observation.

    >>> random_observations(Discrete(3), rng.key(0).expand(2)).shape
    torch.Size([2])
    """
    match space:
        case Dict():
            parts = {}
            for i, (name, part) in enumerate(space.items):
                own = rng.fold_in(keys, i)
                is_mask = name == "action_mask" and bool(others)
                parts[name] = _random_mask(own, others) if is_mask else random_observations(part, own)
            return TensorDict(parts, keys.shape)
        case Discrete():
            return rng.randint(keys, low=0, high=space.n)
        case MultiDiscrete():
            each = [rng.randint(rng.fold_in(keys, i), low=0, high=n) for i, n in enumerate(space.nvec)]
            return torch.stack(each, -1)
    low, high = (torch.tensor(bound).clamp(-1e30, 1e30) for bound in (space.low, space.high))
    number = rng.uniform(keys, low.shape)
    if space.dtype.is_floating_point:
        within = torch.where(
            high - low > _WIDE, rng.normal(keys, low.shape).clamp(low, high), low + (high - low) * number
        )
    else:
        within = (low + ((high - low) + 1.0) * number).floor().clamp(low, high)
    return within.reshape(*keys.shape, *space.shape).to(space.dtype)


def _random_mask(keys: Tensor, groups: tuple[int, ...]) -> Tensor:
    """Draw random action masks, bool `[*B, sum(groups)]`, that allow at least one choice in every group."""
    score = rng.uniform(keys, (sum(groups),))
    allowed = [part >= part.amax(-1, keepdim=True).clamp(max=0.5) for part in score.split(groups, -1)]
    return torch.cat(allowed, -1)


def _fields(tree: Any) -> dict[str, Tensor]:
    leaves, structure = flatten(tree)
    return dict(zip(names(structure), leaves, strict=True))


def _is_same(one: Any, other: Any) -> bool:
    """Return True if two trees have the same structure and equal values. NaN counts as equal to NaN."""
    (a, structure), (b, structure_of_b) = flatten(one), flatten(other)
    return structure == structure_of_b and all(
        x.shape == y.shape and x.dtype == y.dtype and torch.allclose(x, y, rtol=0.0, atol=0.0, equal_nan=True)
        for x, y in zip(a, b, strict=True)
    )


def _called(findings: list[str], name: str, fn: Callable[..., Any], *args: Any) -> Any:
    """Call `fn` twice and return its result. Add a finding if `fn` writes to an argument or the two results differ."""
    before = {key: (x, version_of(x)) for key, x in _fields(args).items()}
    out = fn(*args)
    after = _fields(args)
    if after.keys() != before.keys() or any(after[k] is not x or version_of(x) != n for k, (x, n) in before.items()):
        findings.append(f"{name} writes to its arguments; return new tensors instead")
        return out
    if not _is_same(out, fn(*args)):
        advice = "let it depend on its arguments alone, and draw random numbers in `draw`, from its keys"
        findings.append(f"{name} returns other values when it is called again with the same arguments; {advice}")
    return out


def _at(tree: Any, *index: Any) -> Any:
    """Apply `index` to every tensor of a tree with batch shape `[N, T]`."""
    return mapped(lambda x: x[index], tree, batch=lambda size: torch.empty(size)[index[: len(size)]].shape)


def _step(tree: Any, t: int) -> Any:
    """Select step `t` of a tree with batch shape `[N, T]`. The result has batch shape `[N]`."""
    return _at(tree, slice(None), t)


def _stacked(rows: list[Any]) -> Any:
    """Stack the trees of T steps, each with batch shape `[N]`, into one tree with batch shape `[N, T]`."""
    return mapped(
        lambda *x: torch.stack(x, 1),
        *rows,
        batch=lambda size: (*size[:1], len(rows), *size[1:]) if size else (),
    )


def _check_init(policy: Policy, key: Tensor) -> Iterator[str]:
    """Yield a finding if the policy's `init` ignores its key, or depends on more than its key."""
    first, again, other = policy.init(key), policy.init(key), policy.init(rng.fold_in(key, 1))
    if not _is_same(first, again):
        yield "init returns other params for the same key; draw all numbers from the key with ecrl.rng"
    elif flatten(first)[0] and _is_same(first, other):
        yield "init returns the same params for two keys; draw them from the key with ecrl.rng"


def _params(policy: Policy, key: Tensor, obs: Any) -> tuple[TensorDict, TensorDict]:
    """Return initial parameters with noise, and the argument `params` of the policy's functions.

    The argument `params` has these parameters, the observation statistics and the frozen parameters. The noise ensures
    that a parameter with the initial value zero, such as a bias, affects the results. The function computes the
    observation statistics from `obs`, `[N, T]`.
    """
    leaves, structure = flatten(policy.init(key))
    noise = [rng.normal(rng.fold_in(key, i), x.shape).to(x.device) for i, x in enumerate(leaves)]
    moved = [x + _SPREAD * y.to(x.dtype) if x.is_floating_point() else x for x, y in zip(leaves, noise, strict=True)]
    params = unflatten(structure, moved)
    state = TensorDict({"params": params, "norm": {}}, [])
    if policy.norm_init is not None:
        counted = torch.ones(flatten(obs)[0][0].shape[:2], dtype=torch.bool)
        norm = cast(Any, policy.norm_update)(policy.norm_init(key.device), obs, counted)
        state["norm"] = TensorDict({"obs": norm}, [])
    if policy.init_frozen is not None:
        state["frozen_params"] = frozen = policy.init_frozen(key.device)
        check_frozen_names(policy, frozen, cast(TensorDict, params))
    return params, policy_params(state)


def _ends(key: Tensor, num_steps: int) -> Tensor:
    """Draw the steps where episodes end, as bool `[N, T]`. All episodes end at step 2, and none at step 0, 1 or 3."""
    done = rng.uniform(rng.split(key, _NUM_ENVS * num_steps)).reshape(_NUM_ENVS, num_steps) < 0.2
    done[:, :2], done[:, 2], done[:, 3] = False, True, False
    return done


def _act(findings: list[str], policy: Policy, params: TensorDict, obs: Any, keys: Tensor) -> _Record:
    """Let a policy act on observations, `[N, T]`, and reset the policy's memory after each episode.

    The record begins after two steps of an episode, so the first recorded memory is not the initial memory.
    """
    noise = _called(findings, "draw", policy.draw, keys)
    first = carry = policy.init_carry(params, _NUM_ENVS)
    _called(findings, "act without noise", policy.act, params, first, _step(obs, 0), None)
    _called(findings, "act", policy.act, params, first, _step(obs, 0), _step(noise, 0))
    for t in range(_WARM_UP):
        carry, _ = policy.act(params, carry, _step(obs, t), _step(noise, t))
    num_steps = keys.shape[1] - _WARM_UP
    done, rows, before, after = _ends(keys[0, 0], num_steps), [], [], []
    no = torch.zeros_like(done[:, 0])
    for t in range(num_steps):
        now = _step(obs, t + _WARM_UP)
        acted, out = policy.act(params, carry, now, _step(noise, t + _WARM_UP))
        rows.append(TensorDict({**dict(out.items()), "obs": now, "done": done[:, t]}, [_NUM_ENVS]))
        before.append(carry)
        after.append(acted)
        ended = TensorDict({"terminated": done[:, t], "truncated": no}, [_NUM_ENVS])
        carry = restarted_carry(acted, first, ended)
    used = _at(noise, slice(None), slice(_WARM_UP, None))
    return _Record(params, _stacked(rows), used, _stacked(before), _stacked(after))


def _explore(findings: list[str], notes: list[str], policy: Policy, record: _Record) -> None:
    """Check `init_exploration` and `explore` on the first step of the record.

    The exploration state here has only the fields that `init_exploration` returns. All other fields come from the
    algorithm. If `explore` reads such a field, the function records the KeyError as a note.
    """
    if policy.explore is None:
        return
    first = _called(findings, "init_exploration", policy.init_exploration, record.params, _NUM_ENVS)
    _, out = policy.act(record.params, _step(record.before, 0), _step(record.steps["obs"], 0), _step(record.noise, 0))
    try:
        _called(findings, "explore", policy.explore, record.params, first, out, _step(record.noise, 0))
    except KeyError as error:
        notes.append(
            f"explore is not checked, because it raised {error!r:.80} for an exploration state with only the fields "
            "of init_exploration; the algorithm adds the other fields"
        )


def _first_difference(one: Tensor, other: Tensor, tolerance: float, counted: Tensor | None = None) -> list[int] | None:
    """Return the index [env, step, ...] of the first step where two tensors differ beyond `tolerance`, or None."""
    same = torch.isclose(one.double(), other.double(), rtol=tolerance, atol=tolerance, equal_nan=True)
    wrong = ~same if counted is None else ~same & counted
    if not wrong.any():
        return None
    places = wrong.nonzero()
    return places[int(places[:, 1].argmin())].tolist()


def _advice(policy: Policy, record: _Record, place: list[int], otherwise: str) -> str:
    """Return advice for the end of an error message about a policy with two different results for one step.

    Args:
        policy: the policy.
        record: the recorded steps.
        place: indices of the first entry that differs. The first two are the environment and the step.
        otherwise: advice for a policy of unit "step".
    """
    env, step = place[:2]
    if policy.unit == "step":
        return f"; {otherwise}"
    if record.steps["done"][env, :step].any():
        advice = "restart the memory from init_carry after each step with `done`"
        return f"; this step comes after the end of an episode: {advice}"
    return "; start from the given carry, and advance it as `act` does" if step else "; start from the given carry"


def _place(place: list[int]) -> str:
    return f"in env {place[0]} at step {place[1]}"


def _check_evaluate(findings: list[str], policy: Policy, record: _Record, tolerance: float) -> None:
    """Compare the log-probabilities from `evaluate` with the log-probabilities from `act`."""
    evaluate, steps = cast(Any, policy.evaluate), record.steps
    log_prob, entropy = _called(findings, "evaluate", evaluate, record.params, _step(record.before, 0), steps)
    expected, mask = cast(Tensor, steps["sample_log_prob"]), steps.get("token_mask", None)
    if log_prob.shape != expected.shape:
        findings.append(
            f"evaluate returns log_prob {list(log_prob.shape)} for steps {list(steps['done'].shape)}, but act returned "
            f"sample_log_prob {list(expected.shape)}; return one entry per token from both, or sum in both"
        )
    elif (place := _first_difference(log_prob, expected, tolerance, mask)) is not None:
        given = f"{log_prob[tuple(place)]:.6g} {_place(place)}, but act returned {expected[tuple(place)]:.6g}"
        advice = _advice(policy, record, place, "compute both from the same distribution")
        findings.append(f"evaluate returns log_prob {given}{advice}")
    if not entropy.isfinite().all():
        findings.append("evaluate returns an entropy of NaN or infinity; mend its computation")


def _check_value(findings: list[str], policy: Policy, record: _Record, tolerance: float) -> None:
    """Compare the results of `value` for all steps in one call with the results of `value` for single steps."""
    value, params, steps = cast(Any, policy.value), record.params, record.steps
    first, every = _step(record.before, 0), range(steps["done"].shape[1])
    if policy.unit == "step":
        values = _called(findings, "value", value, params, first, steps["obs"])
        single = [value(params, first, _step(steps["obs"], t)) for t in every]
    else:
        values = _called(findings, "value", value, params, first, steps, None)[0]
        parts = [(_step(record.before, t), _at(steps, slice(None), slice(t, t + 1))) for t in every]
        single = [value(params, carry, part, None)[0][:, 0] for carry, part in parts]
    if (place := _first_difference(values, torch.stack(single, 1), tolerance)) is not None:
        given = f"{values[tuple(place)]:.6g} {_place(place)} if called with steps of shape {list(values.shape)}"
        by_itself = f"but {single[place[1]][place[0]]:.6g} if called with that step alone"
        advice = _advice(policy, record, place, "compute each row independently")
        findings.append(f"value returns {given}, {by_itself}{advice}")
    elif policy.unit == "sequence":
        _check_final_value(findings, policy, record, tolerance, values)


def _check_final_value(findings: list[str], policy: Policy, record: _Record, tolerance: float, values: Tensor) -> None:
    """Compare V_final, computed from the memory after a step, with the value of the next step in the same episode."""
    steps, later = record.steps, slice(1, None)
    final = TensorDict(
        {"obs": _at(steps["obs"], slice(None), later), "carry": _at(record.after, slice(None), slice(None, -1))},
        [_NUM_ENVS, values.shape[1] - 1],
    )
    first = _step(record.before, 0)
    final_values = _called(findings, "value", policy.value, record.params, first, steps, final)[1]  # pyright: ignore
    inside = ~steps["done"][:, :-1]
    if (place := _first_difference(final_values, values[:, later], tolerance, inside)) is not None:
        at = place[0], place[1] + 1
        given = f"V_final {final_values[tuple(place)]:.6g}, but V {values[at]:.6g}, for the observation {_place([*at])}"
        findings.append(f"value returns {given}; compute V_final from final['carry'], the memory after `act`")


def _check_evaluate_and_value(findings: list[str], policy: Policy, record: _Record, tolerance: float) -> None:
    """Compare the results of `evaluate_and_value` with the results of `evaluate` and `value`."""
    params, steps, first = record.params, record.steps, _step(record.before, 0)
    results = _called(findings, "evaluate_and_value", policy.evaluate_and_value, params, first, steps)  # pyright: ignore
    value: Any = policy.value
    values = value(params, first, steps["obs"]) if policy.unit == "step" else value(params, first, steps, None)[0]
    expected = (*cast(Any, policy.evaluate)(params, first, steps), values)
    sources = ("evaluate", "evaluate", "value")
    for name, source, x, y in zip(("log_prob", "entropy", "V"), sources, results, expected, strict=True):
        if x.shape != y.shape:
            shapes = f"{list(x.shape)}, but {source} returns {list(y.shape)}"
            findings.append(f"evaluate_and_value returns {name} {shapes}; return the same from both")
        elif (place := _first_difference(x, y, tolerance)) is not None:
            given = f"{x[tuple(place)]:.6g} {_place(place)}, but {source} returns {y[tuple(place)]:.6g}"
            findings.append(f"evaluate_and_value returns {name} {given}; return the same from both")


def _check_imitation_loss(findings: list[str], policy: Policy, record: _Record, tolerance: float) -> None:
    """Check that `draw_imitation` and `imitation_loss` are pure functions, and that the loss is finite."""
    imitation_loss: Any = policy.imitation_loss
    steps = record.steps
    if policy.draw_imitation is not None:
        keys = rng.split(rng.key(0), steps["done"].numel()).reshape(steps["done"].shape)
        steps = steps.copy().set("imitation_noise", _called(findings, "draw_imitation", policy.draw_imitation, keys))
    loss = _called(findings, "imitation_loss", imitation_loss, record.params, _step(record.before, 0), steps)
    if not loss.isfinite().all():
        findings.append("imitation_loss returns NaN or infinity; mend its computation")


def _stacks(policy: Policy, obs: Any, batch_axes: int) -> Any:
    """Return the observations that `q` takes. For a policy that sees stacks, return stacks of equal frames."""
    if policy.frame_stack == 1:
        return obs
    if isinstance(obs, TensorDict):
        masked = {name: part for name, part in obs.items() if name == "action_mask"}
        return TensorDict(
            {name: _stacks(policy, part, batch_axes) for name, part in obs.items()} | masked, obs.batch_size
        )
    shape = [*obs.shape[:batch_axes], policy.frame_stack, *obs.shape[batch_axes:]]
    return obs.unsqueeze(batch_axes).expand(shape)


def _values_of_actions(policy: Policy, params: TensorDict, record: _Record) -> Tensor:
    """Return a loss whose gradient flows through `q` into the actions of `act`, as in DDPG."""
    total = torch.zeros(())
    for t in range(record.steps["done"].shape[1]):
        obs, carry, noise = (_step(tree, t) for tree in (record.steps["obs"], record.before, record.noise))
        _, out = policy.act(params, carry, obs, noise)
        total = total + cast(Any, policy.q)(params, _stacks(policy, obs, 1), out["action"], None).square().sum()
    return total


def _requiring_gradients(params: TensorDict, record: _Record) -> tuple[TensorDict, list[Tensor]]:
    """Return the record's parameters, with the fields of `params` in place of the fields of the same names.

    The float leaves of `params` require gradients. The second result is the list of these leaves.
    """
    moving = mapped(lambda x: x.detach().requires_grad_(x.is_floating_point()), params)
    others = {name: x for name, x in cast(Any, record.params.items()) if name not in params}
    leaves = [x for x in flatten(moving)[0] if x.requires_grad]
    return TensorDict({**dict(moving.items()), **others}, []), leaves


def _loss(policy: Policy, params: TensorDict, record: _Record) -> Tensor:
    """Return a loss that depends on all results of `evaluate` and `value`."""
    steps, total, carry = record.steps, torch.zeros(()), policy.init_carry(params, _NUM_ENVS)
    if policy.evaluate is not None:
        log_prob, entropy = policy.evaluate(params, carry, steps)
        total = total + log_prob.sum() + 0.3 * entropy.sum()
    if policy.value is not None:
        is_step = policy.unit == "step"
        values = policy.value(params, carry, steps["obs"]) if is_step else policy.value(params, carry, steps, None)[0]
        total = total + values.square().sum()
    return total


def _check_shared_gradients(policy: Policy, params: TensorDict, record: _Record, tolerance: float) -> Iterator[str]:
    """Yield a finding for each parameter whose gradients from `evaluate_and_value` and from separate calls differ."""
    if policy.evaluate_and_value is None:
        return
    names = [name for name, x in _fields(params).items() if x.is_floating_point()]
    with torch.enable_grad():
        whole, inputs = _requiring_gradients(params, record)
        carry = policy.init_carry(whole, _NUM_ENVS)
        log_prob, entropy, values = policy.evaluate_and_value(whole, carry, record.steps)
        together = log_prob.sum() + 0.3 * entropy.sum() + values.square().sum()
        if not together.requires_grad:
            yield "no gradient reaches the params from evaluate_and_value; leave out detach and torch.no_grad"
            return
        losses = together, _loss(policy, whole, record)
        grads = [torch.autograd.grad(x, inputs, allow_unused=True, materialize_grads=True) for x in losses]
    for name, one, other in zip(names, *grads, strict=True):
        if (one - other).norm() > 10.0 * tolerance * (1.0 + other.norm()):
            yield (
                f"evaluate_and_value gives the parameter {name} another gradient than evaluate and value; leave out "
                "detach, and compute the same results"
            )


def _check_gradients(policy: Policy, action_space: Space, params: TensorDict, record: _Record) -> Iterator[str]:
    """Yield a finding for each parameter without a gradient, or with NaN or infinity in its gradient."""
    leaves = {name: x for name, x in _fields(params).items() if x.is_floating_point()}
    if not leaves or (policy.evaluate is None and policy.value is None and policy.q is None):
        return
    sources = "evaluate and value" if policy.q is None else "evaluate, value and q"
    with torch.enable_grad():
        whole, inputs = _requiring_gradients(params, record)
        steps, total = record.steps, _loss(policy, whole, record)
        if policy.q is not None:
            stacks = _stacks(policy, steps["obs"], 2)
            for noise in (None, record.noise):
                total = total + policy.q(whole, stacks, steps["action"], noise).square().sum()
            if isinstance(action_space, Box):
                total = total + _values_of_actions(policy, whole, record)
        if not total.requires_grad:
            yield f"no gradient reaches the params from {sources}; leave out detach and torch.no_grad"
            return
        grads = torch.autograd.grad(total, inputs, allow_unused=True)
    for name, grad in zip(leaves, grads, strict=True):
        if grad is None or not grad.any():
            yield (
                f"no gradient reaches the parameter {name} from {sources}; use it there without detach, or "
                "return it from init_frozen"
            )
        elif not grad.isfinite().all():
            yield f"the gradient of the parameter {name} holds NaN or infinity; mend {sources.replace(' and ', ' or ')}"


def _findings(
    policy: Policy, spaces: tuple[Space, Space], num_steps: int, seed: int, tolerance: float, notes: list[str]
) -> Iterator[str]:
    check_functions(policy)
    policy, key = checked_policy(policy, *spaces), rng.key(seed)
    yield from _check_init(policy, key)
    keys = rng.split(rng.fold_in(key, 2), _NUM_ENVS * num_steps).reshape(_NUM_ENVS, num_steps)
    space, action_space = spaces
    choices = action_space.nvec if isinstance(action_space, MultiDiscrete) else ()
    choices = (action_space.n,) if isinstance(action_space, Discrete) else choices
    obs = random_observations(space, rng.fold_in(keys, 0), choices)
    params, whole = _params(policy, key, obs)
    lines: list[str] = []
    record = _act(lines, policy, whole, obs, rng.fold_in(keys, 1))
    _explore(lines, notes, policy, record)
    yield from lines
    functions_agree = not lines
    checks = {
        "evaluate": _check_evaluate,
        "value": _check_value,
        "evaluate_and_value": _check_evaluate_and_value,
        "imitation_loss": _check_imitation_loss,
    }
    for function, check in checks.items():
        if getattr(policy, function) is not None:
            lines = []
            check(lines, policy, record, tolerance)
            yield from lines
            functions_agree = functions_agree and not lines
    if functions_agree:  # a function that writes to its arguments in place has no gradient
        yield from _check_gradients(policy, action_space, params, record)
        yield from _check_shared_gradients(policy, params, record, tolerance)


def check_policy(
    policy: Policy | Config | Mapping[str, Any] | str,
    observation_space: Space | None = None,
    action_space: Space | None = None,
    *,
    num_steps: int = 16,
    seed: int = 0,
    tolerance: float = _TOLERANCE,
) -> PolicyCheck:
    """Let a policy act on random observations, and report the faults of the policy.

    A policy without faults has the following properties:

    - Every function takes the arguments and returns the shapes and dtypes that `ecrl.Policy` describes.
    - The function `init` depends only on its key.
    - The functions `draw`, `act`, `explore`, `init_exploration`, `evaluate`, `value`, `evaluate_and_value`,
      `draw_imitation` and `imitation_loss` depend only on their arguments, draw from no global generator and write to
      no argument.
    - The policy's memory keeps its fields, shapes and dtypes.
    - The function `evaluate` returns the log-probabilities that `act` returned, even after the end of an episode.
    - The function `value` returns the same values for many steps in one call as for each step alone.
    - The function `evaluate_and_value`, if any, returns the results of `evaluate` and `value`.
    - The function `imitation_loss`, if any, returns finite numbers.
    - For a policy with memory, `value` also returns values V_final for the observations and memories in its argument
      `final`. With the memory after `act`, V_final equals the value of the next observation in the same episode.
    - Gradients reach every parameter, and `evaluate_and_value` has the gradients of `evaluate` and `value`. Gradients
      are not checked if a function other than `init` has a fault. For a policy with `q` and Box actions, the check
      includes the gradient of `q` with respect to the actions of `act`.

    The policy acts in four environments on the CPU. `check_policy` adds noise to the parameters that `init` returns,
    because parameters equal to zero may hide a fault. Errors raised by the policy's own code are not caught, except
    ConfigError and a KeyError of `explore`.

    Args:
        policy: a policy, a `Config`, or any other argument that `load_config` accepts.
        observation_space: the policy's space of observations, or None if `policy` is a config.
        action_space: the policy's space of actions, or None if `policy` is a config.
        num_steps: the number of steps in each environment, at least 8.
        seed: the seed of the parameters, the observations and the noise.
        tolerance: the largest absolute and relative difference that is accepted as rounding. If a config sets
            `policy.bf16`, the tolerance is at least 0.05.

    Raises: ConfigError if the config is wrong. UserError if `num_steps` is less than 8, if a policy is given without
        spaces, or if a config is given with spaces.

    >>> check_policy("cartpole_ppo").findings
    []
    """
    if num_steps < 8:
        raise UserError(
            f"num_steps: {num_steps}, expected at least 8, so that an episode ends between the checked steps"
        )
    if isinstance(policy, Policy):
        if observation_space is None or action_space is None:
            raise UserError("check_policy: got a policy without its spaces; pass observation_space and action_space")
    else:
        if observation_space is not None or action_space is not None:
            raise UserError(
                "check_policy: got spaces and a config, which has its own; pass a policy, or the config alone"
            )
        cfg = policy if isinstance(policy, Config) else load_config(cast(Any, policy))
        env = make_env(cfg.env)
        observation_space, action_space = env.observation_space, env.action_space
        tolerance = max(tolerance, _BF16_TOLERANCE) if cfg.policy.bf16 else tolerance
        policy = make_policy(cfg.policy, observation_space, action_space, env.frame_stack)
    findings, notes, label = [], [], f"{policy_label(policy)}: "
    with torch.no_grad(), checking():
        try:
            for line in _findings(policy, (observation_space, action_space), num_steps, seed, tolerance, notes):
                findings.append(line)
        except ConfigError as error:
            findings.append(str(error).removeprefix(label))
    compared = f"{_NUM_ENVS * (num_steps - _WARM_UP)} steps compared, to a tolerance of {tolerance:g}"
    return PolicyCheck(list(dict.fromkeys(findings)), [compared, *notes])
