"""Check which arguments the functions of a policy take, and check the results of these functions.

An error message names the policy, the function and the wrong value.

`make_policy` checks the arguments. `ecrl.loop` checks the results when it creates the state of a run, and in the first
iteration of each phase of the algorithm (see `Algorithm.phase`). In compiled code, the checks of results run while the
code is traced. These checks compare shapes and dtypes, and reject random numbers that are not drawn from a key.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from inspect import signature
from typing import Any, cast

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from ecrl.errors import ConfigError
from ecrl.policies.core import Policy, no_carry
from ecrl.policies.frame_stack import stacked_space
from ecrl.pytree import flatten, paths
from ecrl.spaces import Box, Dict, Discrete, Space, element_dtype, element_shape
from ecrl.tracing_state import ignoring_draws, in_graph, noting_draws, transforms

_ARGUMENTS = {
    "init": ("key",),
    "draw": ("keys",),
    "act": ("params", "carry", "obs", "noise"),
    "evaluate": ("params", "carry", "steps"),
    "value": ("params", "carry", "obs"),
    "evaluate_and_value": ("params", "carry", "steps"),
    "imitation_loss": ("params", "carry", "steps"),
    "draw_imitation": ("keys",),
    "norm_init": ("device",),
    "norm_update": ("norm", "obs", "mask"),
    "init_carry": ("params", "num_envs"),
    "init_frozen": ("device",),
    "init_exploration": ("params", "num_envs"),
    "explore": ("params", "exploration", "out", "noise"),
    "q": ("params", "obs", "action", "noise"),
}
_SEQUENCE_VALUE = ("params", "carry", "steps", "final")
_RESERVED = {
    *("obs", "final_obs", "reward", "terminated", "truncated", "done", "info", "mask", "executed"),
    *("value", "final_value", "next_value", "carry", "final_carry", "imitation_noise"),
}
"""Fields of a rollout that the collector, the estimators and behaviour cloning set."""

_CHECKING = ContextVar("_CHECKING", default=False)


def described(x: Any) -> str:
    """Describe a value for an error message.

    The description has the dtype and shape of a tensor, the type of a dict, or the type and value of anything else.
    """
    if isinstance(x, TensorDictBase | dict):
        return f"a {type(x).__name__}"
    if not isinstance(x, Tensor):
        return f"{type(x).__name__} {x!r:.40}"
    return f"{x.dtype} {list(x.shape)}".removeprefix("torch.")


@contextmanager
def checking() -> Iterator[None]:
    """Inside the block, enable the checks of every `Checked` function. Outside the block, nothing is checked."""
    token = _CHECKING.set(True)
    try:
        yield
    finally:
        _CHECKING.reset(token)


def _generator_states() -> list[bytes]:
    """Return the states of torch's global random number generators."""
    states = [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [])]
    # inside a transform of torch.func, a new tensor has no memory that NumPy can read
    return [bytes(state.tolist()) if transforms() else state.numpy().tobytes() for state in states]


@contextmanager
def _refusing_draws(label: str, keys: str) -> Iterator[None]:
    """Raise ConfigError at the end of the block if the block drew from torch's global generators.

    Eager code inside the block may draw if it restores the state of the generator. While a graph is traced, every draw
    causes the error, even a draw from a generator that is not global. Draws inside `ignoring_draws` and draws of other
    threads are allowed.
    """
    before = [] if in_graph() else _generator_states()
    with noting_draws() as noted:
        yield
    if noted.traced or (noted.run and before != _generator_states()):
        problem = f"{label} draws random numbers from a generator of torch, so equal states give unequal results"
        raise ConfigError(f"{problem}; draw them from {keys} with ecrl.rng")


@dataclass(frozen=True)
class Unchecked:
    """A function whose random draws are not checked, such as the step of an environment.

    A `Checked` function may call an `Unchecked` function.
    """

    fn: Callable[..., Any]

    def __call__(self, *args: Any) -> Any:
        """Call `fn` and return its result. The checks of an enclosing `Checked` function ignore the random draws."""
        if not _CHECKING.get():
            return self.fn(*args)
        with ignoring_draws():
            return self.fn(*args)


@dataclass(frozen=True)
class Checked:
    """A function whose results and random draws are checked inside a `checking` block.

    The function must not draw from torch's global generators.

    Attributes:
        label: name of the policy or algorithm, followed by the name of the function.
        fn: the function.
        check: `check(label, args, out, *options)` raises ConfigError if `out` is not a valid result for `args`.
        options: further arguments of `check`.
        keys: name of the keys that the function should draw its random numbers from, for error messages.
    """

    label: str
    fn: Callable[..., Any]
    check: Callable[..., None] = field(compare=False)
    options: tuple[Any, ...] = field(default=(), compare=False)
    keys: str = field(default="the keys of `draw`", compare=False)

    @property
    def __name__(self) -> str:
        """Name of the function, which appears in reports of its compilation."""
        return getattr(self.fn, "__name__", type(self.fn).__name__)

    def __call__(self, *args: Any) -> Any:
        """Call `fn` and return its result. Inside a `checking` block, check the result and the random draws."""
        if not _CHECKING.get():
            return self.fn(*args)
        with _refusing_draws(self.label, self.keys):
            out = self.fn(*args)
        self.check(self.label, args, out, *self.options)
        return out


def check_arguments(label: str, fn: Any, *names: str, note: str = "") -> None:
    """Raise ConfigError if a function does not accept the expected positional arguments.

    Args:
        label: name of the policy or algorithm, followed by the name of the function.
        fn: the function.
        names: names of the expected arguments.
        note: text appended to the list of expected arguments in the error.
    """
    if not callable(fn):
        raise ConfigError(f"{label} is {described(fn)}, expected a function ({', '.join(names)}); pass one")
    try:
        parameters = signature(fn)
    except (TypeError, ValueError):  # some C callables have no signature
        return
    try:
        parameters.bind(*names)
    except TypeError:
        taken = ", ".join(parameters.parameters)
        expected = f"({', '.join(names)}){note}"
        raise ConfigError(f"{label} takes ({taken}), expected {expected}; take these arguments by position") from None


def check_functions(policy: Policy) -> None:
    """Raise ConfigError if a function of a policy takes the wrong arguments, or needs another function that is missing.

    A policy of unit "sequence" needs `init_carry`.
    """
    is_sequence, label = policy.unit == "sequence", policy_label(policy)
    if policy.evaluate_and_value is not None and (policy.evaluate is None or policy.value is None):
        lacks = "evaluate" if policy.evaluate is None else "value"
        raise ConfigError(f"{label}: has evaluate_and_value, but no {lacks}; pass {lacks} too")
    if policy.draw_imitation is not None and policy.imitation_loss is None:
        raise ConfigError(f"{label}: has draw_imitation, but no imitation_loss; pass imitation_loss too")
    if is_sequence and policy.init_carry is no_carry:
        raise ConfigError(
            f"{label}: unit is 'sequence', but there is no init_carry, expected (params, num_envs) -> carry; "
            "pass init_carry, or set unit to 'step' for a policy without memory"
        )
    for name, arguments in _ARGUMENTS.items():
        fn, note = getattr(policy, name), ""
        if name == "value" and is_sequence:
            arguments, note = _SEQUENCE_VALUE, " for unit 'sequence'"
        if fn is not None:
            check_arguments(f"{label}: {name}", fn, *arguments, note=note)


def policy_label(policy: Policy) -> str:
    """Return the name of a policy for error messages."""
    return f"policy {policy.name}" if policy.name else "the policy"


def returned(label: str, out: Any, *names: str) -> Any:
    """Return the result `out` of a function. Raise ConfigError unless the result has one value per name."""
    if not isinstance(out, tuple | list) or len(out) != len(names):
        values = f"{len(out)} values" if isinstance(out, tuple | list) else described(out)
        raise ConfigError(f"{label} returns {values}, expected {len(names)}: ({', '.join(names)}); return these values")
    return out


def _check_leaf(label: str, what: str, name: str, before: Any, after: Any) -> None:
    """Raise ConfigError if a function changed the shape or dtype of a leaf. `what` names the tree of the leaf."""
    if before.shape != after.shape or before.dtype != after.dtype:
        change = f"changes the {what}'s {name} from {described(before)} to {described(after)}"
        raise ConfigError(f"{label} {change}; keep its shape and dtype")


def check_fields(label: str, before: TensorDict, after: Any, what: str = "state", source: str = "init") -> None:
    """Raise ConfigError if a function does not keep the structure of a tree, such as the memory of a policy.

    The function must neither drop nor add leaves, and must keep the shape and dtype of each leaf, and the batch size of
    each TensorDict.

    Args:
        label: name of the policy or algorithm, followed by the name of the function.
        before: the tree passed to the function.
        after: the tree that the function returned.
        what: name of the tree.
        source: name of the function that creates the tree.
    """
    if not isinstance(after, TensorDictBase):
        raise ConfigError(f"{label} returns {type(after).__name__} as the {what}, expected a TensorDict; return one")
    (old, structure), (new, structure_after) = flatten(before), flatten(after)
    if structure == structure_after:
        for i, (x, y) in enumerate(zip(old, new, strict=True)):
            if x is not y:
                _check_leaf(label, what, "/".join(paths(structure)[i]), x, y)
        return
    named, named_after = ({"/".join(path) for path in paths(s)} for s in (structure, structure_after))
    for change, fields in (("drops", named - named_after), ("adds", named_after - named)):
        if fields:
            listed = ", ".join(sorted(fields))
            advice = f"return the fields that `{source}` returns"
            raise ConfigError(f"{label} {change} fields of the {what}: {listed}; {advice}")
    if old:  # the batch size of an empty tree does not matter
        sizes, sizes_after = _batch_sizes(before), _batch_sizes(after)
        for path in sizes:
            if sizes[path] != sizes_after.get(path, sizes[path]):
                name = f"{'/'.join(path)} in the {what}" if path else f"the {what}"
                change = f"from {sizes[path]} to {sizes_after[path]}"
                raise ConfigError(f"{label} changes the batch size of {name} {change}; keep it")
        raise ConfigError(f"{label} changes empty TensorDicts or values that are not tensors in the {what}; keep them")


def _batch_sizes(tree: TensorDictBase) -> dict[tuple[str, ...], list[int]]:
    """Return a dict from the path of each TensorDict in `tree` to its batch size. The path of `tree` itself is `()`."""
    inner = {name: part for name, part in tree.items() if isinstance(part, TensorDictBase)}
    sizes = {(name, *path): size for name, part in inner.items() for path, size in _batch_sizes(part).items()}
    return {(): list(tree.batch_size), **sizes}


def _batch_of(obs: Any, space: Space) -> list[int]:
    """Return the sizes of the batch axes of observations or actions. These axes come before the axes of `space`."""
    while isinstance(space, Dict):
        name, space = space.items[0]
        obs = obs[name]
    return list(obs.shape[: obs.ndim - len(element_shape(space))])


def named_leaves(tree: Any) -> dict[str, Any]:
    """Return a dict from the path of each leaf in a tree, such as `noise/x`, to the leaf."""
    leaves, structure = flatten(tree)
    return {"/".join(path): leaf for path, leaf in zip(paths(structure), leaves, strict=True)}


def _check_rows(label: str, what: str, leaves: dict[str, Any], batch: Sequence[int]) -> None:
    """Raise ConfigError for a leaf whose leading axes differ from `batch`.

    If the tree is a single tensor, the name of its leaf is empty, and the error calls it `what`.
    """
    for name, leaf in leaves.items():
        if list(leaf.shape[: len(batch)]) != [*batch]:
            expected = f"[{', '.join(map(str, batch))}, ...]"
            problem = f"{label} returns {name or what} as {described(leaf)}, expected {expected}"
            raise ConfigError(f"{problem}; return one entry per environment")


def _check_names(label: str, out: TensorDictBase) -> None:
    """Raise ConfigError for an output field whose name is reserved for the rollout."""
    for name in sorted(_RESERVED.intersection(map(str, out.keys()))):
        raise ConfigError(f"{label} returns the field {name}, which is reserved for the rollout; give it another name")


def _check_tree(label: str, args: tuple[Any, ...], out: Any, what: str) -> None:
    """Raise ConfigError unless a function returned a TensorDict. `what` names the checked tree."""
    if not isinstance(out, TensorDictBase):
        raise ConfigError(f"{label} returns {described(out)}, expected the {what} as a TensorDict; return one")


def check_frozen_names(policy: Policy, frozen: TensorDict, params: TensorDict) -> None:
    """Raise ConfigError if a frozen parameter has the name of a trained parameter or of the observation statistics.

    Args:
        policy: the policy, which error messages name.
        frozen: the result of `init_frozen`.
        params: the result of `init`.
    """
    label, shared = policy_label(policy), ", ".join(sorted(map(str, {*frozen.keys()} & {*params.keys()})))
    if shared:
        raise ConfigError(f"{label}: init and init_frozen both return {shared}; give them different names")
    if "norm" in frozen:
        problem = "init_frozen returns norm, which is reserved for observation statistics"
        raise ConfigError(f"{label}: {problem}; give it another name")


def _check_norm_update(label: str, args: tuple[Any, ...], out: Any) -> None:
    check_fields(label, args[0], out, "norm", "norm_init")


def _check_first(label: str, args: tuple[Any, ...], out: Any, what: str) -> None:
    """Check the initial memory or exploration state of an episode. `what` names the checked tree."""
    _check_tree(label, args, out, what)
    _check_rows(label, what, named_leaves(out), [args[1]])


def check_restart(policy: Policy, exploration: TensorDict, initial: TensorDict) -> None:
    """Raise ConfigError unless the exploration state has each field that `init_exploration` returns.

    The shape and dtype of each field must be the same in the exploration state and in the result of `init_exploration`.

    Args:
        policy: the policy, which error messages name.
        exploration: the exploration state.
        initial: the result of `init_exploration`.
    """
    label, chosen = f"{policy_label(policy)}: init_exploration", exploration.select(*initial.keys(), strict=False)
    old, new = named_leaves(chosen), named_leaves(initial)
    for name in sorted(new.keys() - old.keys()):
        advice = "add it in the `init` of the algorithm"
        raise ConfigError(f"{label} returns the field {name}, which state['exploration'] lacks; {advice}")
    for name in sorted(old.keys() - new.keys()):
        raise ConfigError(f"{label} does not return the field {name}, which state['exploration'] has; add it")
    for name, x in old.items():
        if x.shape != new[name].shape or x.dtype != new[name].dtype:
            problem = f"{label} returns {name} as {described(new[name])}, expected {described(x)}"
            raise ConfigError(f"{problem}, as in state['exploration']; return such a tensor")


def _check_draw(label: str, args: tuple[Any, ...], out: Any) -> None:
    shape = list(args[0].shape)
    for leaf in flatten(out)[0]:
        if list(leaf.shape[: len(shape)]) != shape:
            expected = f"[{', '.join(map(str, shape))}, ...]"
            raise ConfigError(f"{label} returns noise {described(leaf)}, expected {expected}; return one entry per key")


def _check_action(label: str, action: Any, batch: list[int], space: Space) -> None:
    """Raise ConfigError if the shape or dtype of an action does not match its space."""
    if isinstance(space, Dict):
        return
    dtype, shape = element_dtype(space), [*batch, *element_shape(space)]
    is_right = isinstance(action, Tensor) and list(action.shape) == shape
    # a Box action may have the dtype of the network, such as float64
    if not is_right or not (action.is_floating_point() if isinstance(space, Box) else action.dtype == dtype):
        expected = f"{dtype} {shape} for a {type(space).__name__} action space".removeprefix("torch.")
        raise ConfigError(f"{label} returns action as {described(action)}, expected {expected}; return such a tensor")


def _check_act(
    label: str,
    args: tuple[Any, ...],
    result: Any,
    space: Space,
    stacks: Space,
    action_space: Space,
    required: Sequence[str],
) -> None:
    """Raise ConfigError if `act` leaves out a required field, or if the shape or dtype of a result is wrong."""
    carry, out = returned(label, result, "carry", "out")
    if not isinstance(out, TensorDictBase):
        raise ConfigError(f"{label} returns {type(out).__name__} as its output, expected a TensorDict; return one")
    known = ", ".join(map(str, out.keys())) or "an empty TensorDict"
    for name in required:
        if name not in out:
            raise ConfigError(f"{label} returns no {name}, only {known}; add the field")
    _check_names(label, out)
    batch = _batch_of(args[2], stacks if args[1].is_empty() else space)
    _check_action(label, out["action"], batch, action_space)
    _check_rows(label, "out", named_leaves(out), batch)
    if "token_mask" in out and "sample_log_prob" in out:
        mask, log_prob = cast(Tensor, out["token_mask"]), cast(Tensor, out["sample_log_prob"])
        if mask.dtype != torch.bool or mask.shape != log_prob.shape:
            expected = f"bool {list(log_prob.shape)}, the shape of sample_log_prob"
            raise ConfigError(
                f"{label} returns token_mask as {described(mask)}, expected {expected}; return such a tensor"
            )
    check_fields(label, args[1], carry, "carry", "init_carry")


def _check_floats(label: str, what: str, x: Any, shape: Sequence[int], more: str = "") -> None:
    """Raise ConfigError unless `x` is a float tensor of shape `shape`. If `more` is set, further axes may follow."""
    if (
        not isinstance(x, Tensor)
        or not x.is_floating_point()
        or list(x.shape[: len(shape)] if more else x.shape) != [*shape]
    ):
        raise ConfigError(
            f"{label} returns {what} as {described(x)}, expected float {[*shape]}{more}; return such a tensor"
        )


def _check_evaluate(label: str, args: tuple[Any, ...], out: Any, space: Space) -> None:
    steps, tokens = args[2], " with optional token axes"
    shape, more = _batch_of(steps["obs"], space), tokens
    if "token_mask" in steps:
        shape, more = list(steps["token_mask"].shape), ""
    for name, x in zip(("log_prob", "entropy"), returned(label, out, "log_prob", "entropy"), strict=True):
        _check_floats(label, name, x, shape, more)
        _check_chunk_axis(label, name, x, steps, len(_batch_of(steps["obs"], space)))


def _check_chunk_axis(label: str, name: str, x: Tensor, steps: TensorDict, ndim: int) -> None:
    """Raise ConfigError if there are several token axes, and the first one is not the axis of the steps of a chunk."""
    action = steps["action"]
    if "executed" not in steps or x.ndim < ndim + 2 or action.ndim < ndim + 2:
        return
    if x.shape[ndim] != action.shape[ndim]:
        problem = f"{label} returns {name} as {described(x)} for actions {list(action.shape)}"
        raise ConfigError(f"{problem}; make the first token axis the axis of the {action.shape[ndim]} steps of a chunk")


def _check_imitation_loss(label: str, args: tuple[Any, ...], out: Any, space: Space) -> None:
    _check_floats(label, "the loss", out, _batch_of(args[2]["obs"], space))


def _check_evaluate_and_value(label: str, args: tuple[Any, ...], out: Any, space: Space) -> None:
    log_prob, entropy, value = returned(label, out, "log_prob", "entropy", "V")
    _check_evaluate(label, args, (log_prob, entropy), space)
    _check_floats(label, "V", value, _batch_of(args[2]["obs"], space))


def _check_value(label: str, args: tuple[Any, ...], out: Any, space: Space) -> None:
    _check_floats(label, "V", out, _batch_of(args[2], space))


def _check_sequence_value(label: str, args: tuple[Any, ...], out: Any, space: Space) -> None:
    steps, final = args[2:]
    value, final_value = returned(label, out, "V", "V_final")
    _check_floats(label, "V", value, _batch_of(steps["obs"], space))
    if final is not None:
        _check_floats(label, "V_final", final_value, _batch_of(final["obs"], space))
    elif final_value is not None:
        raise ConfigError(f"{label} returns V_final as {described(final_value)} without `final`; return None instead")


def _check_explore(label: str, args: tuple[Any, ...], out: Any, action_space: Space) -> None:
    """Raise ConfigError if `explore` drops a field that `act` returned, or changes the shape or dtype of such a field.

    A field that `explore` adds must have one entry per environment, and its name must not be reserved. `explore` must
    also keep the fields of the exploration state.
    """
    exploration, after = returned(label, out, "exploration", "out")
    check_fields(label, args[1], exploration, "exploration", "algorithm.init")
    if not isinstance(after, TensorDictBase):
        raise ConfigError(f"{label} returns {type(after).__name__} as the output, expected a TensorDict; return one")
    old, new = named_leaves(args[2]), named_leaves(after)
    if dropped := ", ".join(sorted(old.keys() - new.keys())):
        raise ConfigError(f"{label} drops fields of the output: {dropped}; return the fields that `act` returns")
    for name, x in old.items():
        _check_leaf(label, "output", name, x, new[name])
    _check_names(label, after)
    added = {name: x for name, x in new.items() if name not in old}
    _check_rows(label, "out", added, _batch_of(args[2]["action"], action_space))


def _check_q(label: str, args: tuple[Any, ...], out: Any, space: Space, action_space: Space) -> None:
    """Raise ConfigError if the result of `q` has a wrong shape or is not float.

    The expected shape is `[critics, *B]`, or `[critics, *B, actions]` if `action` is None. A last axis of atoms may
    follow.
    """
    axes, more = _batch_of(args[1], space), 1
    if args[2] is None and isinstance(action_space, Discrete):
        axes = [*axes, action_space.n]
    elif args[2] is None:  # for other spaces, the size of the action axis is not checked
        more = 2
    shape = list(out.shape) if isinstance(out, Tensor) and out.is_floating_point() else []
    if not shape or shape[1 : 1 + len(axes)] != axes or len(shape) > 1 + len(axes) + more:
        expected = f"float [{', '.join(map(str, ('critics', *axes)))}] with an optional last axis of atoms"
        raise ConfigError(f"{label} returns {described(out)}, expected {expected}; return such a tensor")


def checked_policy(policy: Policy, observation_space: Space, action_space: Space) -> Policy:
    """Return a copy of a policy whose functions are checked inside a `checking` block."""
    label, required = policy_label(policy), ("action",)
    required = required if policy.evaluate is None else (*required, "sample_log_prob")
    value = _check_sequence_value if policy.unit == "sequence" else _check_value
    stacks = observation_space  # with frame stacking, `q` takes stacks, and so does `act` if its carry is empty
    if policy.frame_stack > 1:
        stacks = stacked_space(observation_space, policy.frame_stack)
    checks: dict[str, tuple[Any, ...]] = {
        "init": (_check_tree, ("params",), "its key"),
        "draw": (_check_draw, (), "its keys"),
        "act": (_check_act, (observation_space, stacks, action_space, required)),
        "evaluate": (_check_evaluate, (observation_space,)),
        "value": (value, (observation_space,)),
        "evaluate_and_value": (_check_evaluate_and_value, (observation_space,)),
        "imitation_loss": (_check_imitation_loss, (observation_space,)),
        "draw_imitation": (_check_draw, (), "its keys"),
        "explore": (_check_explore, (action_space,)),
        "q": (_check_q, (stacks, action_space)),
        "norm_init": (_check_tree, ("norm",), "a fixed key"),
        "norm_update": (_check_norm_update, (), "a fixed key"),
        "init_frozen": (_check_tree, ("frozen params",)),
    }
    for name, what in (("init_carry", "carry"), ("init_exploration", "exploration")):
        if getattr(policy, name) is not no_carry:
            checks[name] = (_check_first, (what,), "a fixed key")
    functions = {name: getattr(policy, name) for name in checks if getattr(policy, name) is not None}
    if policy.init_frozen is not None:  # it draws weights, which the pretrained weights then replace
        functions["init_frozen"] = Unchecked(policy.init_frozen)
    checked = {name: Checked(f"{label}: {name}", fn, *checks[name]) for name, fn in functions.items()}
    return replace(policy, **checked)
