"""Optimise named groups of parameters.

Each group has its own optimiser, clipping norm, learning rate and schedule, and its own state with a step counter. The
small parameters of a group are packed into one vector per dtype, because few large tensors are faster to update than
many small tensors. Copying a large parameter would cost more than it saves, so each large parameter is a vector of its
own. The hyperparameters of a group are stored in `state["hyper"]` under the prefix of the group, such as
`critic_max_grad_norm`. A hyperparameter without a prefix is for all groups that have no value of their own.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import torch
from tensordict import TensorDict
from torch import Tensor

from ecrl.algorithms.optimizer_config import USED, LearningConfig, OptimizerConfig, SchedulerConfig, optimizer_of
from ecrl.algorithms.schedules import schedule_numbers, scheduled_rate
from ecrl.errors import ConfigError
from ecrl.kernels import clip_by_global_norm, optim
from ecrl.pytree import flatten, mapped, paths, unflatten
from ecrl.types import Logs

Path = tuple[str, ...]
Packed = dict[str, TensorDict]
"""Packed vectors of every group, as `{group: {name: vector}}`."""

_LARGE = 2**13
"""The minimum number of elements of a large parameter, which is a vector of its own."""


class Optimizer(NamedTuple):
    """The two functions of an optimiser.

    Attributes:
        init: `init(params) -> opt`.
        step: `step(params, grads, opt, learning_rate=, **numbers) -> (params, opt)`.
    """

    init: Callable[[TensorDict], TensorDict]
    step: Callable[..., tuple[TensorDict, TensorDict]]


def _with_l2(step: Callable[..., tuple[TensorDict, TensorDict]]) -> Callable[..., tuple[TensorDict, TensorDict]]:
    """Return `step` with an optional argument `weight_decay`, the factor of an L2 penalty on the parameters."""

    def decayed(
        params: TensorDict, grads: TensorDict, opt: TensorDict, *, weight_decay: Tensor | None = None, **numbers: Tensor
    ) -> tuple[TensorDict, TensorDict]:
        if weight_decay is not None:
            grads = optim.l2_weight_decay(grads, params, weight_decay=weight_decay)
        return step(params, grads, opt, **numbers)

    return decayed


def _amsgradw(
    params: TensorDict,
    grads: TensorDict,
    opt: TensorDict,
    *,
    learning_rate: Tensor,
    weight_decay: Tensor,
    **numbers: Any,
) -> tuple[TensorDict, TensorDict]:
    """Run one step of AMSGrad with decoupled weight decay."""
    params = optim.decoupled_weight_decay(params, learning_rate=learning_rate, weight_decay=weight_decay)
    return optim.amsgrad(params, grads, opt, learning_rate=learning_rate, **numbers)


OPTIMIZERS = {
    "adam": Optimizer(optim.adam_init, _with_l2(optim.adam)),
    "amsgrad": Optimizer(optim.amsgrad_init, _with_l2(optim.amsgrad)),
    "adamw": Optimizer(optim.adam_init, optim.adamw),
    "amsgradw": Optimizer(optim.amsgrad_init, _amsgradw),
    "sgd": Optimizer(optim.sgd_init, _with_l2(optim.sgd)),
    "nesterov_sgd": Optimizer(optim.sgd_init, _with_l2(optim.nesterov_sgd)),
    "rmsprop": Optimizer(optim.rmsprop_init, _with_l2(optim.rmsprop)),
    "centered_rmsprop": Optimizer(optim.centered_rmsprop_init, _with_l2(optim.centered_rmsprop)),
}
"""The optimisers by the names that `OptimizerConfig.kernel` returns."""


class Group(NamedTuple):
    """A group of parameters that one optimiser updates.

    Attributes:
        name: key of the group's state in `state["opt"]`. If there is a single group, `state["opt"]` is the group's
            state.
        paths: path prefixes of the group's parameters. If None, the group contains all parameters outside the other
            groups.
        optimizer: key of the optimiser in `OPTIMIZERS`.
        schedule: name of the learning-rate schedule; None for a constant rate.
        prefix: name prefix of the group's hyperparameters in `hyper` and of its logs.
    """

    name: str
    paths: tuple[Path, ...] | None
    optimizer: str
    schedule: str | None
    prefix: str = ""


class GroupSettings(NamedTuple):
    """Settings of one optimiser group. If a setting is None, the group uses the config's setting.

    Attributes:
        learning_rate: step size, before the schedule. If None, the group uses the step size in `optimizer`, if any.
        optimizer: optimiser and its hyperparameters.
        lr_scheduler: schedule of the learning rate.
        max_grad_norm: largest norm of the group's gradients.
    """

    learning_rate: float | None = None
    optimizer: OptimizerConfig | None = None
    lr_scheduler: SchedulerConfig | None = None
    max_grad_norm: float | None = None


_SHARED = GroupSettings()


def groups_of(
    cfg: LearningConfig,
    paths: Mapping[str, tuple[Path, ...] | None] | None = None,
    own: Mapping[str, GroupSettings] | None = None,
) -> tuple[Group, ...]:
    """Return the optimiser groups of a config: one for all parameters, or one for each name in `paths`.

    The first group has no prefix and uses the settings of the config. The prefix of every other group is the name of
    the group and an underscore. Such a group uses the optimiser and schedule in `own`. By default, the group uses the
    optimiser and schedule of the config. Also pass `own` to `learning_state`.

    >>> [(group.name, group.prefix) for group in groups_of(LearningConfig(), {"actor": None, "critic": (("critic",),)})]
    [('actor', ''), ('critic', 'critic_')]
    """
    named, own = {"all": None} if paths is None else dict(paths), own or {}
    _check_own(own, list(named))
    groups = []
    for i, (name, inside) in enumerate(named.items()):
        settings = own.get(name, _SHARED)
        optimizer = (settings.optimizer or optimizer_of(cfg)).kernel
        schedule = settings.lr_scheduler or cfg.lr_scheduler
        groups.append(Group(name, inside, optimizer, schedule and schedule.name, f"{name}_" if i else ""))
    return tuple(groups)


def _check_own(own: Mapping[str, GroupSettings], groups: Sequence[str]) -> None:
    """Raise ValueError for settings of an unknown group, or of the first group, which uses the shared settings."""
    for name in own:
        if name not in groups[1:]:
            known = ", ".join(groups[1:]) or "none"
            raise ValueError(f"optimiser group {name} cannot have its own settings; groups that can: {known}")


def number(tree: TensorDict, group: Group, name: str) -> Any:
    """Return a hyperparameter of a group: the group's own value, if any, or the shared value."""
    own = f"{group.prefix}{name}"
    return tree[own] if own in tree.keys() else tree[name]  # noqa: SIM118


class GroupLayout(NamedTuple):
    """Positions and shapes of the parameters of a group.

    Attributes:
        group: the group.
        index: positions of the group's parameters among the leaves of all parameters, in the order of the paths.
        shapes: shape of each parameter.
        networks: first key of each parameter's path.
        vectors: pairs of a vector's name and the positions, in `index`, of the parameters in this vector. The name is
            the dtype of the vector, followed by the position if the vector is one large parameter.
    """

    group: Group
    index: tuple[int, ...]
    shapes: tuple[torch.Size, ...]
    networks: tuple[str, ...]
    vectors: tuple[tuple[str, tuple[int, ...]], ...]


class Layout(NamedTuple):
    """Structure of all parameters, and layout of each group."""

    structure: Hashable
    groups: tuple[GroupLayout, ...]


def layout_of(params: TensorDict, groups: tuple[Group, ...]) -> Layout:
    """Assign each parameter to a group, and return the layout.

    Raises: ConfigError for a parameter that is in no group or in two groups, and for a path without parameters.
    """
    leaves, structure = flatten(params)
    owners: list[list[str]] = [[] for _ in leaves]
    for group in groups:
        for path in group.paths or ():
            inside = [i for i, leaf in enumerate(paths(structure)) if leaf[: len(path)] == path]
            if not inside:
                have = ", ".join(sorted(map(str, params.keys())))
                raise ConfigError(
                    f"optimiser group {group.name}: the policy has no parameters {'/'.join(path)!r}, only {have}; use "
                    "one of these names"
                )
            for i in inside:
                owners[i].append(group.name)
    rest = next((group.name for group in groups if group.paths is None), None)
    for path, names in zip(paths(structure), owners, strict=True):
        if not names and rest is not None:
            names.append(rest)
        if len(names) != 1:
            fault = f"is in the groups {' and '.join(names)}" if names else "is in no group"
            raise ConfigError(f"optimiser groups: the parameter {'/'.join(path)} {fault}; put it in exactly one")
    return Layout(structure, tuple(_group_layout(group, leaves, structure, owners) for group in groups))


def _group_layout(group: Group, leaves: list[Tensor], structure: Hashable, owners: list[list[str]]) -> GroupLayout:
    index = tuple(i for i, names in enumerate(owners) if names == [group.name])
    dtypes = [str(leaves[i].dtype).removeprefix("torch.") for i in index]
    is_large = [leaves[i].numel() >= _LARGE for i in index]
    names = [f"{d}_{p}" if large else d for p, (d, large) in enumerate(zip(dtypes, is_large, strict=True))]
    vectors = tuple((name, tuple(p for p, n in enumerate(names) if n == name)) for name in dict.fromkeys(names))
    networks = tuple(paths(structure)[i][0] for i in index)
    return GroupLayout(group, index, tuple(leaves[i].shape for i in index), networks, vectors)


def _pack(leaves: list[Tensor], layout: GroupLayout) -> TensorDict:
    vectors = {name: _joined([leaves[p].reshape(-1) for p in places]) for name, places in layout.vectors}
    return TensorDict(cast(Any, vectors), [])


def _joined(vectors: list[Tensor]) -> Tensor:
    """Concatenate vectors. A single vector is not copied."""
    return vectors[0] if len(vectors) == 1 else torch.cat(vectors)


def _unpack(vectors: TensorDict, layout: GroupLayout) -> list[Tensor]:
    leaves: list[Any] = [None] * len(layout.index)
    for name, places in layout.vectors:
        pieces = vectors[name].split([layout.shapes[p].numel() for p in places])
        for p, piece in zip(places, pieces, strict=True):
            leaves[p] = piece.reshape(layout.shapes[p])
    return leaves


def pack(params: TensorDict, layout: Layout) -> Packed:
    """Pack parameters or their gradients into the vectors of each group. A large parameter is not copied."""
    leaves = flatten(params)[0]
    return {group.group.name: _pack([leaves[i] for i in group.index], group) for group in layout.groups}


def unpack(packed: Packed, layout: Layout) -> TensorDict:
    """Undo `pack`. The returned tensors are views of the packed vectors."""
    leaves: list[Any] = [None] * sum(len(group.index) for group in layout.groups)
    for group in layout.groups:
        for i, leaf in zip(group.index, _unpack(packed[group.group.name], group), strict=True):
            leaves[i] = leaf
    return unflatten(layout.structure, leaves)


def network_vectors(vectors: TensorDict, layout: GroupLayout) -> dict[str, dict[str, Tensor]]:
    """Split the packed vectors of a group by network, as `{network: {name: part of the vector}}`, without a copy."""
    pieces: dict[str, dict[str, Tensor]] = {network: {} for network in layout.networks}
    for name, places in layout.vectors:
        sizes = {network: 0 for network in dict.fromkeys(layout.networks[p] for p in places)}
        for p in places:
            sizes[layout.networks[p]] += layout.shapes[p].numel()
        for network, piece in zip(sizes, vectors[name].split(list(sizes.values())), strict=True):
            pieces[network][name] = piece
    return pieces


def _state_of(opt: TensorDict, layout: Layout, name: str) -> TensorDict:
    return opt if len(layout.groups) == 1 else cast(TensorDict, opt[name])


def pack_opt(opt: TensorDict, layout: Layout) -> Packed:
    """Pack each group's optimiser state. Per-parameter tensors, such as Adam's moments, are packed as in `pack`."""
    packed = {}
    for group in layout.groups:
        state = _state_of(opt, layout, group.group.name)
        slots = {k: _pack(flatten(v)[0], group) if isinstance(v, TensorDict) else v for k, v in state.items()}
        packed[group.group.name] = TensorDict(cast(Any, slots), [])
    return packed


def unpack_opt(packed: Packed, opt: TensorDict, layout: Layout) -> TensorDict:
    """Undo `pack_opt` by copying to new memory. The result has the structure of `opt`."""
    states = {}
    for group in layout.groups:
        old, new = _state_of(opt, layout, group.group.name), packed[group.group.name]
        states[group.group.name] = TensorDict(
            {
                k: unflatten(flatten(v)[1], [leaf.clone() for leaf in _unpack(cast(TensorDict, new[k]), group)])
                if isinstance(v, TensorDict)
                else new[k]
                for k, v in cast(Any, old.items())
            },
            [],
        )
    return states[layout.groups[0].group.name] if len(states) == 1 else TensorDict(states, [])


def optimizer_init(params: TensorDict, groups: tuple[Group, ...]) -> TensorDict:
    """Return the initial optimiser state, for the field `opt` of the state.

    With one group, the result is the state of the group's optimiser. With several groups, the result is
    `{group: state}`.

    >>> params = TensorDict({"actor": {"w": torch.zeros(2)}, "critic": {"w": torch.zeros(2)}}, [])
    >>> list(optimizer_init(params, groups_of(LearningConfig(), {"actor": None, "critic": (("critic",),)})).keys())
    ['actor', 'critic']
    """
    layout, (leaves, structure) = layout_of(params, groups), flatten(params)
    if len(groups) == 1:
        return OPTIMIZERS[groups[0].optimizer].init(params)
    every, states = paths(structure), {}
    for part in layout.groups:
        own = TensorDict({}, [])
        for i in part.index:
            own[every[i]] = leaves[i]
        states[part.group.name] = OPTIMIZERS[part.group.optimizer].init(own)
    return TensorDict(states, [])


def clip_gradients(grads: Packed, hyper: TensorDict, layout: Layout) -> tuple[Packed, Logs]:
    """Clip the gradient norm of each group to its `max_grad_norm`, and log the norms before clipping."""
    clipped, norms = {}, {}
    for part in layout.groups:
        pieces = TensorDict(cast(Any, network_vectors(grads[part.group.name], part)), [])
        pieces, norm = clip_by_global_norm(pieces, max_norm=number(hyper, part.group, "max_grad_norm"))
        norms[f"{part.group.prefix}grad_norm"] = norm
        of_networks = [cast(TensorDict, pieces[network]) for network in dict.fromkeys(part.networks)]
        vectors = {name: _joined([x[name] for x in of_networks if name in x]) for name, _ in part.vectors}  # pyright: ignore
        clipped[part.group.name] = TensorDict(cast(Any, vectors), [])
    return clipped, norms


def optimizer_step(
    params: Packed,
    grads: Packed,
    opts: Packed,
    rates: dict[str, Tensor],
    hyper: TensorDict,
    layout: Layout,
    moves: Mapping[str, Tensor] = MappingProxyType({}),
) -> tuple[Packed, Packed]:
    """Take one step of every group's optimiser on packed parameters.

    Args:
        params: parameters, from `pack`.
        grads: gradients of the parameters, from `pack`.
        opts: optimiser states, from `pack_opt`.
        rates: learning rate of each group, 0-d.
        hyper: the hyperparameters of the state.
        layout: the layout of the groups.
        moves: 0-d bool flags by group name. If the flag of a group is False, its parameters and its optimiser state do
            not change, including the step counter. A group without a flag is updated.

    Returns: the new parameters and optimiser states.
    Raises: ValueError if `moves` names a group that does not exist.
    """
    new_params, new_opts = {}, {}
    if unknown := sorted(moves.keys() - {part.group.name for part in layout.groups}):
        known = ", ".join(part.group.name for part in layout.groups)
        raise ValueError(f"moves names the optimiser group {unknown[0]}, which does not exist; groups: {known}")
    for name, group in ((part.group.name, part.group) for part in layout.groups):
        numbers = dict(number(hyper, group, "optimizer").items())
        step = OPTIMIZERS[group.optimizer].step
        new_params[name], new_opts[name] = step(
            params[name], grads[name], opts[name], learning_rate=rates[name], **numbers
        )
        if name in moves:
            keep = partial(torch.where, moves[name])
            new_params[name] = mapped(keep, new_params[name], params[name])
            new_opts[name] = mapped(keep, new_opts[name], opts[name])
    return new_params, new_opts


def learning_rates(state: TensorDict, groups: tuple[Group, ...], turns: int = 1) -> dict[str, Tensor]:
    """Return the 0-d learning rate of each group at the start of an iteration, or of one of its `turns` turns.

    An adaptive rate is the value that the state stores. Other schedules read the state's `update_step`. A schedule
    without a configured length also reads `iterations`. In the state of a turn, `update_step` and `iterations` count
    turns instead of iterations (see `interleaved`).
    """
    hyper, rates = cast(TensorDict, state["hyper"]), {}
    for group in groups:
        if group.schedule == "adaptive":
            rates[group.name] = number(state, group, "learning_rate")
        else:
            rate = number(hyper, group, "learning_rate")
            if group.schedule is not None:
                numbers = number(hyper, group, "schedule")
                rate = scheduled_rate(group.schedule, rate, numbers, state["update_step"], state["iterations"], turns)
            rates[group.name] = rate
    return rates


def rate_logs(rates: dict[str, Tensor], groups: tuple[Group, ...], state: TensorDict) -> Logs:
    """Return one log for each learning rate.

    The log `<prefix>learning_rate` is for a group with its own rate. The log `learning_rate` is for all other groups.
    """
    logs = {}
    for group in groups:
        own = f"{group.prefix}learning_rate"
        has_own = own in state or own in cast(TensorDict, state["hyper"])
        logs.setdefault(own if has_own else "learning_rate", rates[group.name])
    return logs


def optimizer_numbers(cfg: OptimizerConfig) -> dict[str, float]:
    """Return an optimiser's entries for `hyper`: all numbers that the optimiser uses except the learning rate."""
    values: dict[str, Any] = {name: getattr(cfg.kwargs, name) for name in USED[cfg.name]}
    numbers = {name: value for name, value in values.items() if value is not None and not isinstance(value, bool)}
    if "betas" in numbers:
        numbers["beta1"], numbers["beta2"] = numbers.pop("betas")
    return numbers


def learning_state(
    cfg: LearningConfig,
    params: TensorDict,
    numbers: Mapping[str, float | None],
    device: torch.device,
    groups: tuple[Group, ...] | None = None,
    own: Mapping[str, GroupSettings] | None = None,
) -> dict[str, Any]:
    """Return the fields `params`, `opt` and `hyper` of a state.

    An adaptive learning rate is not in `hyper`, because the update changes the rate. An adaptive rate is stored in the
    state field `learning_rate`, or in `<prefix>learning_rate` for a group with its own rate. The algorithm's `kinds`
    must declare these fields as counters.

    Args:
        cfg: optimiser, schedule and clipping that groups share.
        params: the parameters.
        numbers: mapping from the names of further hyperparameters to their values. None values are left out.
        device: device of the hyperparameters.
        groups: the optimiser groups. If None, one group has all parameters.
        own: settings of individual groups, the same as for `groups_of`.
    """
    groups, own = groups_of(cfg) if groups is None else groups, own or {}
    _check_own(own, [group.name for group in groups])
    optimizer, schedule = optimizer_of(cfg), cfg.lr_scheduler
    hyper = hyper_tensors({name: value for name, value in numbers.items() if value is not None}, device)
    shared = GroupSettings(optimizer.learning_rate, optimizer, schedule, cfg.max_grad_norm)
    rates = _write_settings(hyper, shared, schedule, "", device)
    for group in groups:
        if group.name in own:
            settings = own[group.name]
            if settings.learning_rate is None and (settings.optimizer or settings.lr_scheduler):
                settings = settings._replace(learning_rate=(settings.optimizer or optimizer).learning_rate)
            rates |= _write_settings(hyper, settings, settings.lr_scheduler or schedule, group.prefix, device)
    return {"params": params, "opt": optimizer_init(params, groups), "hyper": hyper, **rates}


def _write_settings(
    hyper: TensorDict, settings: GroupSettings, schedule: SchedulerConfig | None, prefix: str, device: torch.device
) -> dict[str, Tensor]:
    """Write the settings that are not None into `hyper`, under the prefix, and return any adaptive learning rate.

    `schedule` is the schedule of the group, either its own or the shared schedule.
    """
    numbers: dict[str, Any] = {}
    if settings.max_grad_norm is not None:
        numbers["max_grad_norm"] = settings.max_grad_norm
    if settings.optimizer is not None:
        numbers["optimizer"] = optimizer_numbers(settings.optimizer)
    if settings.lr_scheduler is not None and settings.lr_scheduler.name == "adaptive":
        numbers["adaptive"] = {name: getattr(settings.lr_scheduler.kwargs, name) for name in USED["adaptive"]}
    tensors, of_schedule = hyper_tensors(numbers, device), schedule_numbers(settings.lr_scheduler, device)
    if not of_schedule.is_empty():
        tensors["schedule"] = of_schedule
    rates = {}
    if settings.learning_rate is not None:
        rate = torch.tensor(settings.learning_rate, dtype=torch.float32, device=device)
        is_adaptive = schedule is not None and schedule.name == "adaptive"
        (rates if is_adaptive else tensors)["learning_rate"] = rate
    hyper.update({f"{prefix}{name}": number for name, number in tensors.items()})
    return {f"{prefix}{name}": rate for name, rate in rates.items()}


def hyper_tensors(numbers: Mapping[str, Any], device: torch.device) -> TensorDict:
    """Convert hyperparameters to 0-d float32 tensors, with the same nesting."""
    tensors = {
        name: hyper_tensors(value, device)
        if isinstance(value, dict)
        else torch.tensor(value, dtype=torch.float32, device=device)
        for name, value in numbers.items()
    }
    return TensorDict(tensors, [])
