"""A trained policy as files that run without ecrl: `policy.pt2` (torch.export), `policy.onnx`, and `policy.json`.

What is written maps raw observations to the action that the environment sees in evaluation: deterministic, with the
normaliser's statistics inside, Box actions held in their space. The first dimension of every input is any batch size.
"""

import json
import logging
import re
import warnings
from collections.abc import Callable, Iterator
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
from ecrl.policies import acting_params, make_policy
from ecrl.spaces import Box, Dict, Space

_FORMAT, _OPSET = 1, 18
_ROWS = 3  # of the example batch; torch.export takes 0 and 1 for constants


def _leaves(space: Space, path: tuple[str, ...] = ()) -> dict[tuple[str, ...], Space]:
    """The spaces of an observation's parts by their place in it, `()` for one without parts."""
    if not isinstance(space, Dict):
        return {path: space}
    inner = (_leaves(part, (*path, name)) for name, part in space.items)
    return {place: part for parts in inner for place, part in parts.items()}


def _name(path: tuple[str, ...]) -> str:
    """What an input is called: a name that can be a keyword argument.

    >>> _name(()), _name(("arm", "joints")), _name(("0",))
    ('obs', 'arm_joints', 'obs_0')
    """
    name = re.sub(r"\W", "_", "_".join(path)) or "obs"
    return name if name.isidentifier() and not iskeyword(name) else f"obs_{name}"


class _Acting(nn.Module):
    """`action(params, obs)` of tensors by name; parameters are constants, so that only those it needs are written."""

    def __init__(self, action: Callable[[TensorDict, Any], Tensor], params: TensorDict, paths: dict[str, tuple]):
        super().__init__()

        def forward(**inputs: Tensor) -> Tensor:
            if paths == {"obs": ()}:
                return action(params, inputs["obs"])
            # no batch dimensions: the TensorDict would take the size of the example for the only one
            return action(params, TensorDict({path: inputs[name] for name, path in paths.items()}, []))

        # torch.export names inputs by the signature, and gives **inputs no dynamic shape
        named = [Parameter(name, Parameter.KEYWORD_ONLY) for name in paths]
        forward.__signature__ = Signature(named)  # pyright: ignore
        self.forward = forward


def _acting(state: TensorDict, cfg: Config, env: Env, paths: dict[str, tuple]) -> _Acting:
    """The policy in float32 on the CPU, its actions held in their space if `policy.clip_actions` says so."""
    policy = make_policy(cfg.policy.model_copy(update={"bf16": False}), env.observation_space, env.action_space)
    space = env.action_space if cfg.policy.clip_actions else None

    def action(params: TensorDict, obs: Any) -> Tensor:
        chosen = policy.act(params, TensorDict({}, []), obs, None)[1]["action"]
        if not isinstance(space, Box):
            return chosen
        low, high = (chosen.new_tensor(bound).reshape(space.shape) for bound in (space.low, space.high))
        return chosen.clamp(low, high)

    return _Acting(action, acting_params(state["params"].detach(), state["norm"]).cpu(), paths)


def _described(name: str, tensor: Tensor, space: Space) -> dict[str, Any]:
    """An input or output for policy.json, which has no infinity: null is an infinite bound."""
    kind: dict[str, Any] = {"type": type(space).__name__}
    for key, value in asdict(space).items():
        if key != "shape":
            kind[key] = [x if isfinite(x) else None for x in value] if isinstance(value, tuple) else value
    return {
        "name": name,
        "dtype": str(tensor.dtype).split(".")[1],
        "shape": ["batch", *tensor.shape[1:]],
        "space": kind,
    }


@contextmanager
def _told(cfg: Config, file: str) -> Iterator[None]:
    """Around converting somebody's module, which can fail in any way: one line for people, the rest as its cause."""
    try:
        yield
    except Exception as error:
        why = " ".join(str(error).split())[:300]
        raise UserError(
            f"{file}: policy {cfg.policy.name!r} cannot be written as a graph of tensor operations "
            f"for any batch size: {type(error).__name__}: {why}"
        ) from error


@contextmanager
def _calm() -> Iterator[None]:
    """Without what torch.onnx says of packages and types of its own."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _zeros(part: Tensor) -> Tensor:
    """An example batch of an observation's part."""
    return torch.zeros((_ROWS, *part.shape[1:]), dtype=part.dtype)


def _program(module: _Acting, example: dict[str, Tensor]) -> ExportedProgram:
    shapes = {name: {0: Dim("batch")} for name in example}
    with torch.no_grad():
        program = torch.export.export(module, (), example, dynamic_shapes=shapes)
    program.graph.eliminate_dead_code()  # what `act` computes beside the action
    program.graph_module.recompile()
    return program


def _write_onnx(program: ExportedProgram, example: dict[str, Tensor], cfg: Config, path: Path) -> None:
    with extra("export"):
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401
    shapes = {name: {0: "batch"} for name in example}
    named: dict[str, Any] = {"input_names": list(example), "output_names": ["action"], "dynamic_shapes": shapes}
    with _told(cfg, path.name), _calm():
        made = torch.onnx.export(program, (), kwargs=example, dynamo=True, verbose=False, opset_version=_OPSET, **named)
        cast(Any, made).save(path)


def export(state: TensorDict, cfg: Config, folder: str | Path) -> list[Path]:
    """Write the deterministic policy of a run, normaliser included, to be run without ecrl.

    Inputs are called "obs", or by the parts of Dict observations, "arm_joints" for joints in arm; the output "action".
    `torch.export.load("policy.pt2").module()(obs=obs)` acts on a batch of observations `[N, ...]`, and so does an
    onnxruntime session on `policy.onnx`. `policy.json` has names, dtypes, shapes and spaces. Integers count from 0, as
    `ecrl.spaces.from_gymnasium` says.

    A policy with `bf16` is written in float32, which its weights are: its actions differ from those in bfloat16 by that
    rounding.

    Args:
        state: of a run; `params`, `norm` and the last observation are read.
        cfg: of the run.
        folder: made if it is not there; files of these names are replaced.

    Returns: the files.
    Raises: UserError for a policy that torch.export or torch.onnx cannot trace; and without the extra `export`, when
        policy.pt2 and policy.json are written already.
    """
    env, folder = make_env(cfg.env), Path(folder)
    spaces = _leaves(env.observation_space)
    paths = {_name(path): path for path in spaces}
    example = {name: _zeros(state["env", "obs", *path]) for name, path in paths.items()}
    module = _acting(state, cfg, env, paths)
    with _told(cfg, "policy.pt2"):
        program, action = _program(module, example), module(**example)
    about = {
        "format": _FORMAT,
        "env": cfg.env.model_dump(mode="json"),
        "policy": cfg.policy.name,
        "algorithm": cfg.algorithm.name,
        "sample_step": int(state["sample_step"]),
        "inputs": [_described(name, example[name], spaces[path]) for name, path in paths.items()],
        "outputs": [_described("action", action, env.action_space)],
    }
    folder.mkdir(parents=True, exist_ok=True)
    torch.export.save(program, folder / "policy.pt2")
    (folder / "policy.json").write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
    _write_onnx(program, example, cfg, folder / "policy.onnx")
    return [folder / name for name in ("policy.pt2", "policy.onnx", "policy.json")]
