"""Load the initial policy of a run from the checkpoint in the setting `trainer.init_from`.

`initial_policy` returns the run's policy with new functions `init`, `norm_init` and `init_frozen`. These functions
return the tensors of the checkpoint, and random parameters for parts that the checkpoint lacks. An algorithm therefore
also derives other parameters from the checkpoint, such as the reference policy of GRPO and the target networks of SAC.
The state of the optimiser is new.
"""

import json
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from pydantic import BaseModel, ValidationError
from tensordict import TensorDict
from torch import Tensor

from ecrl.algorithms import Run
from ecrl.config import Config
from ecrl.config.config import PolicyConfig
from ecrl.config.input_files import check_inputs_in
from ecrl.distributed import rank
from ecrl.errors import CheckpointError, ConfigError
from ecrl.policies import Policy
from ecrl.pytree import flatten, paths, unflatten
from ecrl.registry import is_init_only
from ecrl.storage.atomic_files import complete_folder
from ecrl.storage.checkpoint_files import is_file, read_bytes, read_manifest, sha256_of_file, step_checkpoints
from ecrl.storage.tensor_files import read_tensors

_KEY = "trainer.init_from"
_NOT_IN_NETWORKS = {"name", "action_dim", "action_horizon", "label_smoothing"}
"""Policy settings that do not change the networks: the name, sizes that are only checked, and label smoothing."""
_OF_CRITICS = ("critic", "num_critics", "distribution", "num_atoms", "v_min", "v_max")
"""Prefixes of the names of critic settings."""
_PARTS = {"params": "params", "norm": "norm/obs", "frozen_params": "frozen_params"}


def initial_policy(run: Run, cfg: Config, device: torch.device) -> Policy:
    """Return the policy that initialises a run. Without `trainer.init_from`, return the policy of the run unchanged.

    A part is a first-level name of the parameters, such as `actor` or `critic`. If policy and checkpoint both have a
    part, its tensors must have equal names, shapes and dtypes. Parts that exist only in the policy keep their random
    initial values. Parts that exist only in the checkpoint are not used. A warning names the parts that exist only on
    one side. Another warning names the first policy setting that differs between the config of the run and the config
    of the checkpoint, even if the tensors fit.

    Raises: ConfigError if there is no checkpoint, if the checkpoint is damaged, or if policy and checkpoint do not fit
        together. Policy and checkpoint do not fit if they have no common part, if the tensors of a part differ, or if
        only one of them standardises observations.
    """
    if cfg.trainer.init_from is None:
        return run.policy
    path, policy = Path(cfg.trainer.init_from), run.policy
    check_inputs_in(path, _KEY)
    try:
        folder, tensors = _read(path)
    except CheckpointError as error:
        raise ConfigError(f"{_KEY}: {error}") from None
    saved = {part: _under(prefix, tensors) for part, prefix in _PARTS.items()}

    def init(key: Tensor) -> TensorDict:
        params = _with_parts(folder, policy.init(key), saved["params"])
        _warn_of_other_settings(folder, cfg.policy)
        return params

    changed: dict[str, Any] = {"init": init}
    if policy.norm_init is not None or saved["norm"]:
        norm_init = _same_normaliser(folder, policy, saved["norm"], device)
        changed["norm_init"] = lambda device: norm_init.apply(lambda x: x.to(device, copy=True))
    if policy.init_frozen is not None and saved["frozen_params"]:
        init_frozen = policy.init_frozen
        changed["init_frozen"] = lambda device: _filled(
            folder, "frozen_params", init_frozen(device), saved["frozen_params"]
        )
    return replace(policy, **changed)


def _warn_of_other_settings(folder: Path, own: PolicyConfig) -> None:
    """Warn if the policy section of the checkpoint's config differs from `own`, for example in an activation.

    Differences in critic settings cause no warning, unless the critic is the only network. Differences in settings of
    the initial weights never cause a warning. If this installation cannot read the checkpoint's config, the function
    does not compare settings.
    """
    try:
        saved = PolicyConfig.model_validate(json.loads(read_bytes(complete_folder(folder) / "config.json"))["policy"])
    except (CheckpointError, ValidationError, KeyError, TypeError, ValueError):
        return
    old, new = dict(_settings(saved)), dict(_settings(own))
    differing = [key for key in new | old if old.get(key, "null") != new.get(key, "null")]
    if differing and rank() == 0:
        key = differing[0]
        text = f"{key} is {old.get(key, 'absent')}, but {new.get(key, 'absent')} in this config"
        problem = "so the policy may choose other actions; use the policy of the checkpoint"
        warnings.warn(f"{_KEY}: {folder}: {text}, {problem}", stacklevel=3)


def _settings(cfg: BaseModel, path: str = "policy") -> Iterator[tuple[str, str]]:
    """Yield the dotted key and the JSON text of each setting that determines the actions of a policy.

    Critic settings are left out, unless the critic is the only network, as in DQN.
    """
    fields = type(cfg).model_fields
    has_critic_only = path == "policy" and not {"actor", "vla"} & fields.keys()
    for name, field in fields.items():
        is_critic = name.startswith(_OF_CRITICS) and not has_critic_only
        if is_critic or is_init_only(field) or name in _NOT_IN_NETWORKS:
            continue
        value = getattr(cfg, name)
        if isinstance(value, BaseModel):
            yield from _settings(value, f"{path}.{name}")
        else:
            yield f"{path}.{name}", json.dumps(value, default=str, sort_keys=True)


def _read(path: Path) -> tuple[Path, dict[str, Tensor]]:
    """Return the folder of a checkpoint, and the tensors of its policy. For a run folder, use the newest checkpoint.

    Raises: CheckpointError if there is no checkpoint, or if a file is damaged.
    """
    if not is_file(complete_folder(path) / "manifest.json"):
        folders = step_checkpoints(path)
        if not folders:
            raise CheckpointError(f"{path}: no checkpoint: expected a run folder with checkpoints, or a checkpoint")
        path = folders[-1]
    folder, tensors = complete_folder(path), {}
    for name, checksum in read_manifest(path)["sha256"].items():
        if name.endswith(".safetensors") and not name.startswith("rank_"):
            if name != Path(name).name:
                raise CheckpointError(
                    f"{path}/manifest.json: names the file {name!r} of another folder; use another checkpoint"
                )
            if not is_file(folder / name) or sha256_of_file(folder / name) != checksum:
                raise CheckpointError(f"{path}/{name}: missing or damaged; use another checkpoint")
            tensors |= read_tensors(folder / name, ["params", "norm", "frozen_params"])
    return path, tensors


def _under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors whose names start with `prefix`. The keys of the result are the names without the prefix."""
    start = f"{prefix}/"
    return {name.removeprefix(start): x for name, x in tensors.items() if name.startswith(start)}


def _with_parts(folder: Path, params: TensorDict, saved: Mapping[str, Tensor]) -> TensorDict:
    """Replace each part of `params` by the checkpoint's part, if any. Warn about parts that exist only on one side.

    Raises: ConfigError if there is no common part, or if the tensors of a part differ.
    """
    own, others = {str(name) for name in params.keys()}, {name.split("/")[0] for name in saved}  # noqa: SIM118
    if not own & others:
        raise ConfigError(
            f"{_KEY}: {folder}: has the parts {_listed(others)}, but the policy has {_listed(own)}; use a "
            "checkpoint of the same policy"
        )
    random = "the checkpoint lacks some parts of the policy, so their initial values are random"
    unused = "the policy lacks some parts of the checkpoint, so these parts are unused"
    for text, differing in ((random, own - others), (unused, others - own)):
        if differing and rank() == 0:
            warnings.warn(f"{_KEY}: {folder}: {text}: {_listed(differing)}", stacklevel=2)
    shared = cast(TensorDict, params.select(*(own & others)))
    known = {name: x for name, x in saved.items() if name.split("/")[0] in own}
    return params.copy().update(_filled(folder, "params", shared, known))


def _listed(names: set[str]) -> str:
    return ", ".join(sorted(names)) or "none"


def _filled(folder: Path, part: str, structure: TensorDict, saved: Mapping[str, Tensor]) -> TensorDict:
    """Return a tree like `structure` with the tensors of the checkpoint.

    Raises: ConfigError, which names the first tensor that is missing on one side, or that differs in shape or dtype.
    """
    leaves, tree = flatten(structure)
    expected = {"/".join(path): x for path, x in zip(paths(tree), leaves, strict=True)}
    for name in sorted(expected.keys() | saved.keys()):
        texts = [_described(tensors.get(name)) for tensors in (saved, expected)]
        if texts[0] != texts[1]:
            raise ConfigError(
                f"{_KEY}: {folder}: {part}/{name} is {texts[0]}, but {texts[1]} in this config; use the policy of the "
                "checkpoint"
            )
    return cast(TensorDict, unflatten(tree, [saved[name].to(x.device, copy=True) for name, x in expected.items()]))


def _described(x: Tensor | None) -> str:
    return "absent" if x is None else f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}"


def _same_normaliser(folder: Path, policy: Policy, saved: Mapping[str, Tensor], device: torch.device) -> TensorDict:
    """Return the observation statistics of the checkpoint.

    Raises: ConfigError unless the checkpoint and the policy both have statistics of the same observations.
    """
    if policy.norm_init is None or not saved:
        has, lacks = ("the checkpoint", "the policy") if saved else ("the policy", "the checkpoint")
        value = "true" if saved else "false"
        raise ConfigError(
            f"{_KEY}: {folder}: {has} standardises observations, but {lacks} does not; set policy.normalize_obs to "
            f"{value}"
        )
    return _filled(folder, "norm/obs", policy.norm_init(device), saved)
