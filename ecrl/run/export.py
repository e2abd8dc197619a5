"""Export a trained policy to `policy.pt2` (torch.export), `policy.onnx` and `policy.json`, which work without ecrl.

The exported function maps raw observations to the actions that the environment receives in an evaluation. The exported
function is deterministic, and includes the observation normaliser's statistics. If `policy.clip_actions` is set, the
function clips Box actions to the action space. The first axis of every input is the batch axis, which can have any
size. The memory of a recurrent policy is both an input and an output.

A policy with a format of its own, such as a pretrained checkpoint, is written in that format instead.
"""

import json
import logging
import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from inspect import Parameter, Signature
from keyword import iskeyword
from math import isfinite
from pathlib import Path
from typing import Any, cast

import torch
from tensordict import TensorDict
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from ecrl.config import Config
from ecrl.envs import Env, make_env
from ecrl.errors import UserError, extra
from ecrl.loop.iteration import explaining_other_networks
from ecrl.loop.state_argument import check_state_argument
from ecrl.policies import make_policy, policy_params
from ecrl.pytree import flatten
from ecrl.pytree import paths as tree_paths
from ecrl.spaces import Box, Dict, Space, is_image

_FORMAT, _OPSET = 1, 18
_ROWS = 3  # size of the example batch; torch.export would treat a size of 0 or 1 as a constant


def _leaves(space: Space, path: tuple[str, ...] = ()) -> dict[tuple[str, ...], Space]:
    """Map the path of each observation leaf to its space. If the observation is a single tensor, its path is `()`."""
    if not isinstance(space, Dict):
        return {path: space}
    inner = (_leaves(part, (*path, name)) for name, part in space.items)
    return {place: part for parts in inner for place, part in parts.items()}


def _input_name(path: tuple[str, ...]) -> str:
    """Return the name of the exported input for the leaf at `path`. The name is a valid keyword argument.

    >>> _input_name(()), _input_name(("arm", "joints")), _input_name(("0",))
    ('obs', 'arm_joints', 'obs_0')
    """
    name = re.sub(r"\W", "_", "_".join(path)) or "obs"
    return name if name.isidentifier() and not iskeyword(name) else f"obs_{name}"


def _paths_by_name(paths: Iterable[tuple[str, ...]], taken: Iterable[str] = ()) -> dict[str, tuple[str, ...]]:
    """Map the input name of each leaf to the leaf's path. Raise UserError if the name is in `taken` or not unique."""
    named: dict[str, tuple[str, ...]] = {}
    for path in paths:
        name = _input_name(path)
        if name in named or name in taken:
            other = ".".join(named[name]) if name in named else "the memory of the policy"
            other = 'the flag "is_first" of the policy' if name == "is_first" and name in taken else other
            raise UserError(f"{'.'.join(path)} and {other} would both be the input {name!r}; rename one of them")
        named[name] = path
    return named


class _ActingModule(nn.Module):
    """Module that calls `act(params, inputs)` with named inputs.

    torch.export treats `params` as constants, and saves only the parameters that `act` uses.
    """

    def __init__(self, act: Callable[[TensorDict, dict[str, Tensor]], Any], params: TensorDict, names: list[str]):
        super().__init__()

        def forward(**inputs: Tensor) -> Any:
            return act(params, inputs)

        # torch.export takes input names from the signature, and does not support dynamic shapes of **inputs
        options = [Parameter(name, Parameter.KEYWORD_ONLY) for name in names]
        forward.__signature__ = Signature(options)  # pyright: ignore
        self.forward = forward


def _observation(inputs: dict[str, Tensor], paths: dict[str, tuple]) -> Any:
    """Assemble an observation from its named inputs."""
    if paths == {"obs": ()}:
        return inputs["obs"]
    # leave out the batch dimensions, because they would fix the batch size to the size of the example
    return TensorDict({path: inputs[name] for name, path in paths.items()}, [])


def _acting_module(
    state: TensorDict, cfg: Config, env: Env, paths: dict[str, tuple]
) -> tuple[_ActingModule, dict[str, Tensor]]:
    """Return a module that computes actions in float32 on the CPU, and example inputs for `is_first` and the memory.

    The module clips actions to the action space if `policy.clip_actions` is set. If the policy has memory, the module
    returns the action and the new memory. If the policy has no memory, there are no example inputs.
    """
    policy = make_policy(
        cfg.policy.model_copy(update={"bf16": False}),
        env.observation_space,
        env.action_space,
        env.frame_stack,
    )
    space = env.action_space if cfg.policy.clip_actions else None
    params = policy_params(state).detach().cpu()
    first = policy.init_carry(params, 1).detach()
    names = _paths_by_name(("carry", *path) for path in tree_paths(flatten(first)[1]))
    _paths_by_name(paths.values(), taken=["is_first", *names] if names else [])  # raises if a name is not unique
    places = {name: path[1:] for name, path in names.items()}

    def act(params: TensorDict, inputs: dict[str, Tensor]) -> Any:
        memory = {path: _reset_memory(inputs[name], first[path], inputs["is_first"]) for name, path in places.items()}
        carry, out = policy.act(params, TensorDict(memory, []), _observation(inputs, paths), None)
        action = out["action"]
        if isinstance(space, Box):
            low, high = (action.new_tensor(bound).reshape(space.shape) for bound in (space.low, space.high))
            action = action.clamp(low, high)
        return (action, *(carry[path] for path in places.values())) if places else action

    memory = {name: _zeros(first[path]) for name, path in places.items()}
    is_first = {"is_first": torch.ones(_ROWS, dtype=torch.bool)} if places else {}
    return _ActingModule(act, params, [*paths, *is_first, *memory]), is_first | memory


def _reset_memory(carry: Tensor, first: Tensor, is_first: Tensor) -> Tensor:
    """Replace `carry` by the initial memory `first`, of shape `[1, ...]`, where `is_first` is True."""
    resets = is_first.reshape(-1, *[1] * (carry.ndim - 1))
    if carry.dtype == torch.bool:  # onnxruntime cannot run `where` of bools
        return (resets & first) | (~resets & carry)
    return torch.where(resets, first, carry)


def _describe(name: str, tensor: Tensor, space: Space | None = None) -> dict[str, Any]:
    """Describe an input or output of the exported policy for policy.json.

    JSON has no infinity, so an infinite bound becomes null. If all pixels of an image share a bound, the bound is
    written as one number.
    """
    about = {"name": name, "dtype": str(tensor.dtype).split(".")[1], "shape": ["batch", *tensor.shape[1:]]}
    if space is None:
        return about
    kind: dict[str, Any] = {"type": type(space).__name__}
    for key, value in asdict(space).items():
        if key not in ("shape", "dtype", "frames", "is_image"):
            kind[key] = [x if isfinite(x) else None for x in value] if isinstance(value, tuple) else value
            if is_image(space) and len({*value}) == 1:
                kind[key] = value[0]
    return about | {"space": kind}


@contextmanager
def _export_errors(cfg: Config, file: str) -> Iterator[None]:
    """Convert any error in the block to a one-line UserError, because a user's module may raise any error."""
    try:
        yield
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(
            f"{file}: policy {cfg.policy.name!r} cannot be exported as a graph that accepts any batch size: "
            f"{type(error).__name__}: {reason}"
        ) from error


@contextmanager
def _silence_warnings() -> Iterator[None]:
    """Silence all warnings, and logs up to the level WARNING. torch.onnx warns about its own packages and types."""
    previous_level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(previous_level)


def _zeros(part: Tensor) -> Tensor:
    """Return an example batch of zeros with the dtype and the trailing axes of `part`."""
    return torch.zeros((_ROWS, *part.shape[1:]), dtype=part.dtype)


def _program(module: _ActingModule, example: dict[str, Tensor]) -> ExportedProgram:
    shapes = {name: {0: Dim("batch")} for name in example}
    with torch.no_grad():
        program = torch.export.export(module, (), example, dynamic_shapes=shapes)
    program.graph.eliminate_dead_code()  # remove outputs of `act` that are not exported
    program.graph_module.recompile()
    return program


def _write_onnx(
    program: ExportedProgram, example: dict[str, Tensor], outputs: list[str], cfg: Config, path: Path
) -> None:
    with extra("export"):
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401
    shapes = {name: {0: "batch"} for name in example}
    options: dict[str, Any] = {"input_names": list(example), "output_names": outputs, "dynamic_shapes": shapes}
    with _export_errors(cfg, path.name), _silence_warnings():
        exported = torch.onnx.export(
            program, (), kwargs=example, dynamo=True, verbose=False, opset_version=_OPSET, **options
        )
        cast(Any, exported).save(path)


def _make_folder(folder: Path) -> None:
    """Create a folder if it is missing. Raise UserError if it cannot be created."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder}: cannot be created: {error.strerror}; choose another folder") from None


def export(state: TensorDict, cfg: Config, folder: str | Path) -> list[Path]:
    """Export the deterministic policy of a run, with its observation normaliser, to files that work without ecrl.

    The input of the exported policy is named "obs". If the observation is a Dict, each leaf of the Dict is an input
    instead. For example, the leaf `joints` of `arm` is the input "arm_joints". The output of the exported policy is
    named "action". `torch.export.load("policy.pt2").module()(obs=obs)` returns the actions for a batch of observations
    `[N, ...]`. `policy.onnx` has the same inputs and outputs as `policy.pt2`. `policy.json` lists the name, dtype and
    shape of each input and output, and the spaces of the observations and of the action. Discrete observations and
    actions start at 0, as in `ecrl.spaces.from_gymnasium`.

    A recurrent policy also has an input and an output for each tensor of its memory, such as "carry_h" and
    "next_carry_h". Pass the memory outputs of one step as the memory inputs of the next step. The input "is_first" is
    bool `[N]`, and must be True at the first step of an episode. At this step, the policy ignores the memory inputs.

    A policy with the field `export` is written in a format of its own instead. For example, the backends `pi0` and
    `openvla` write a checkpoint in the format of the checkpoint that the run began with. `folder` must then be new.

    If `policy.bf16` is set, the policy is exported in float32, which is the dtype of its weights. The exported policy's
    actions differ from the run's bfloat16 actions by rounding.

    Args:
        state: state of a run; its policy parameters, `norm`, `sample_step` and last observation are read.
        cfg: config of the run.
        folder: output folder, which is created if missing. Existing files are replaced.

    Returns: paths of the written files.
    Raises: UserError if torch.export or torch.onnx cannot trace the policy, if the extra `export` is missing, if two
        leaves of the observation have the same input name, if `folder` cannot be created, or if `state` is not the
        state of a run. ConfigError if `state` has networks of another config. ConfigError if the policy has a format of
        its own, and `folder` exists, or the original checkpoint does not match the run. If the extra is missing, or if
        only torch.onnx fails, policy.pt2 and policy.json are still written.
    """
    check_state_argument(state, "params", "norm", "env", "sample_step")
    env, folder = make_env(cfg.env), Path(folder)
    policy = make_policy(cfg.policy, env.observation_space, env.action_space, env.frame_stack)
    if policy.export is not None:
        policy.export(folder, state, cfg)
        return sorted(path for path in folder.rglob("*") if path.is_file())
    spaces = _leaves(env.observation_space)
    paths = _paths_by_name(spaces)
    example = {name: _zeros(state["env", "obs", *path]) for name, path in paths.items()}
    with explaining_other_networks(state, cfg):
        module, memory = _acting_module(state, cfg, env, paths)
        with _export_errors(cfg, "policy.pt2"):
            program, out = _program(module, example | memory), module(**example, **memory)
    action, *carry = out if memory else (out,)
    outputs = dict(zip([f"next_{name}" for name in memory if name != "is_first"], carry, strict=True))
    about = {
        "format": _FORMAT,
        "env": cfg.env.model_dump(mode="json"),
        "policy": cfg.policy.name,
        "algorithm": cfg.algorithm.name,
        "sample_step": int(state["sample_step"]),
        "inputs": [
            *(_describe(name, example[name], spaces[path]) for name, path in paths.items()),
            *(_describe(name, x) for name, x in memory.items()),
        ],
        "outputs": [
            _describe("action", action, env.action_space),
            *(_describe(name, x) for name, x in outputs.items()),
        ],
    }
    _make_folder(folder)
    torch.export.save(program, folder / "policy.pt2")
    (folder / "policy.json").write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
    _write_onnx(program, example | memory, ["action", *outputs], cfg, folder / "policy.onnx")
    return [folder / name for name in ("policy.pt2", "policy.onnx", "policy.json")]
