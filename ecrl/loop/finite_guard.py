"""Detect NaN and infinity in the results of an iteration. This check is called the finite guard.

The guard computes a few sums over the collected steps, the logs and the parameters. If the guard detects NaN or
infinity and `trainer.finite_guard` is "stop", `ecrl.loop.nonfinite_report` searches for the first value that is not
finite.
"""

from typing import cast

import torch
from tensordict import TensorDict
from torch import Tensor

from ecrl.algorithms import Run
from ecrl.algorithms.state_kinds import Kind, Kinds, kind_of
from ecrl.distributed import all_sum
from ecrl.kernels import restarted
from ecrl.policies import policy_params
from ecrl.pytree import flatten, mapped, paths, replaced, unflatten
from ecrl.types import Logs

KINDS = ("observation", "reward", "action", "loss", "gradient", "parameters")
"""The kinds of values that the guard checks, in the order of its flags."""

FIELDS = {"obs": "observation", "action": "action", "sample_log_prob": "action", "reward": "reward"}
"""Map each field that the guard checks in the collected steps to the kind of its values."""


def _has_nonfinite(tensors: list[Tensor], device: torch.device) -> Tensor:
    """Return a 0-d bool tensor, True if any tensor has NaN or infinity: in this case, `(0 * x).sum()` is NaN."""
    sums = [(x.detach() * 0.0).sum().to(torch.float32) for x in tensors if x.is_floating_point()]
    return torch.stack(sums).sum().isnan() if sums else torch.zeros((), dtype=torch.bool, device=device)


def _counted(steps: TensorDict, key: str) -> list[Tensor]:
    """Return the tensors of a field without padding, and with zeros at steps where the mask is False.

    If the steps have no mask, the result includes the last entry of `obs`, which is not padding.
    """
    leaves: list[Tensor] = flatten(steps[key])[0]
    if "mask" not in steps:
        return leaves if key == "obs" else [x[:, :-1] for x in leaves]
    mask, floats = steps["mask"][:, :-1], [x[:, :-1] for x in leaves if x.is_floating_point()]
    return [x.where(mask.reshape(*mask.shape, *[1] * (x.ndim - mask.ndim)), 0.0) for x in floats]


def flags(steps: TensorDict, logs: Logs, params: TensorDict) -> Tensor:
    """Return bool flags `[2, 6]`. A flag is True if the values of its kind in KINDS have NaN or infinity.

    Index 0 of the first axis is for the values on this rank, and index 1 is for the values on all ranks.

    Args:
        steps: the collected steps, `[N, T + 1]`. The function reads the fields in `FIELDS` and `mask`, if present.
        logs: the logs of the update. Losses are named `loss` or `*_loss`, and gradient norms are named `*grad_norm`.
        params: the parameters after the update.

    >>> steps, params = TensorDict({"reward": torch.tensor([[torch.inf, 0.0]])}, [1, 2]), TensorDict({"w": 1.0}, [])
    >>> flags(steps, {"loss": torch.tensor(0.0)}, params)[0].tolist()
    [False, True, False, False, False, False]
    """
    fields = [
        [x for key, of in FIELDS.items() if of == kind and key in steps for x in _counted(steps, key)]
        for kind in KINDS[:3]
    ]
    losses = [x for name, x in logs.items() if name == "loss" or name.endswith("_loss")]
    norms, leaves = [x for name, x in logs.items() if name.endswith("grad_norm")], flatten(params)[0]
    here = torch.stack([_has_nonfinite(group, leaves[0].device) for group in (*fields, losses, norms, leaves)])
    return torch.stack((here, all_sum(here.to(torch.int64)) > 0))


def restart_nonfinite(carry: TensorDict, first: TensorDict) -> TensorDict:
    """Reset `carry` to `first` in each environment where a field of `carry` has NaN or infinity.

    Both arguments have batch shape `[N]`.

    >>> carry, first = (TensorDict({"h": torch.tensor([[x], [2.0]])}, [2]) for x in (torch.nan, 0.0))
    >>> restart_nonfinite(carry, first)["h"].tolist()
    [[0.0], [2.0]]
    """
    leaves: list[Tensor] = flatten(carry)[0]
    bad = torch.stack([~x.isfinite().reshape(len(x), -1).all(1) for x in leaves]).any(0)
    return mapped(lambda old, new: torch.where(bad.reshape(-1, *[1] * (new.ndim - 1)), old, new), first, carry)


def restarted_exploration(run: Run, state: TensorDict) -> dict[str, TensorDict]:
    """Return the field `exploration` in a dict, reset in each environment where the field has NaN or infinity.

    The function checks and resets only the fields that `init_exploration` returns. If the state has no field
    `exploration`, or if `init_exploration` returns no fields, the result is an empty dict.
    """
    if "exploration" not in state:
        return {}
    first = run.policy.init_exploration(policy_params(state), run.static.num_envs)
    if first.is_empty():
        return {}
    exploration = cast(TensorDict, state["exploration"])
    before = TensorDict(dict(exploration.select(*first.keys()).items()), first.batch_size)
    restarted_fields = restart_nonfinite(before, first)
    return {"exploration": replaced(exploration, dict(restarted_fields.items()))}


def undo_update(nonfinite: Tensor, start: TensorDict, state: TensorDict, kinds: Kinds) -> TensorDict:
    """Return the state after an iteration, without the update if any flag in `nonfinite` is True.

    Without the update, leaves of kind environment have their new values, because the environments have already stepped.
    All other leaves are restored to their values before the iteration, so schedules do not advance. If a reward is not
    finite, the statistics of finished episodes are also restored. The returns and lengths of running episodes then
    restart at 0. In every case, the running discounted returns in `norm` restart at 0 in each environment where they
    are NaN or infinity.

    Args:
        nonfinite: the guard's flags for all ranks together, bool `[6]`.
        start: the state before the iteration.
        state: the state after the iteration.
        kinds: the kind of each leaf of the state.

    Raises: ValueError if the structures of `start` and `state` differ.
    """
    skipped, no_reward = nonfinite.any(), nonfinite[KINDS.index("reward")]
    (new, structure), (old, structure_before) = flatten(state), flatten(start)
    if structure != structure_before:
        raise ValueError(f"state has the structure {structure}, expected the structure of start, {structure_before}")
    moves_on = [kind_of(path, kinds) is Kind.ENVIRONMENT for path in paths(structure)]
    leaves = [
        y if moved or x is y else torch.where(skipped, x, y) for x, y, moved in zip(old, new, moves_on, strict=True)
    ]
    after = unflatten(structure, leaves)
    before = restarted(cast(TensorDict, start["episode"]))
    episode = mapped(lambda old, new: torch.where(no_reward, old, new), before, after["episode"])
    norm = cast(TensorDict, after["norm"])
    if "reward" in norm:
        running = norm["reward", "running"]
        returns = replaced(norm["reward"], {"running": running.where(running.isfinite(), 0.0)})
        norm = replaced(norm, {"reward": returns})
    return replaced(after, {"episode": episode, "norm": norm})
