"""Draw random functions of nested tensors, and random environments, and compare compiled calls with eager ones.

`cd tests; python -m support.random_functions SEED` repeats one seed op by op, and with `--cpp` in C++. A function runs
a loop over time whose body applies random operations to random fields: aliased, overlapping and transposed ones, of any
dtype and size, tiny and huge. A case calls it with two sets of tensors that differ in values and memory layout only.

Floats never become integers, because a rounding error could change the integer. So integers and bools must be equal.
"""

import argparse
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict
from torch import Tensor

from ecrl import rng
from ecrl.compile.jit import _compiled, choose_form
from ecrl.envs import auto_reset
from ecrl.envs.core import Env, state_of, time_limit
from ecrl.kernels import collect_rollout, scan
from ecrl.policies.core import Policy
from ecrl.pytree import flatten, names, unflatten
from ecrl.spaces import box
from support.graphs import traced_only

FLOATS = torch.float32, torch.float64, torch.float16, torch.bfloat16
INTEGERS = torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Allowed error relative to the largest number of a tensor. Float64 fields may come from float32 ones."""
SCALES = 1.0, 1.0, 1.0, 1e-30, 1e-9, 1e3, 1e15


class Operation(NamedTuple):
    """An operation, the indices of its two tensors among the earlier ones, and a number."""

    name: str
    first: int
    second: int
    number: float


class Case(NamedTuple):
    """A function of tensors, its static arguments before and after the loop, and two sets of tensors."""

    fn: Callable[..., Any]
    static: tuple[Any, ...]
    calls: tuple[tuple[Any, ...], tuple[Any, ...]]


def rows_of(x: Tensor) -> Tensor:
    """One number for each row."""
    return x.sum(tuple(range(1, x.ndim))) if x.ndim > 1 else x


def by_row(x: Tensor, like: Tensor) -> Tensor:
    return x.reshape(len(x), *[1] * (like.ndim - 1))


def product(a: Tensor) -> Tensor:
    flat = a.clamp(-1e9, 1e9).flatten(1) if a.ndim > 1 else a.clamp(-1e9, 1e9).unsqueeze(1)
    return flat @ flat.T / (len(a) + 1.0)


FLOAT_OPERATIONS: dict[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    "sin": lambda a, b, c: torch.sin(a.clamp(-9.0, 9.0)) * c,
    "tanh": lambda a, b, c: torch.tanh(a * c),
    "erf": lambda a, b, c: torch.erf(a),
    "expm1": lambda a, b, c: torch.expm1(a.clamp(max=3.0)),
    "log1p": lambda a, b, c: torch.log1p(a.abs()),
    "atanh": lambda a, b, c: torch.atanh(a.clamp(-0.5, 0.5)),
    "elu": lambda a, b, c: torch.nn.functional.elu(a.clamp(max=9.0)),
    "sigmoid": lambda a, b, c: torch.sigmoid(a),
    "ratio": lambda a, b, c: a / (a.abs() + abs(c) + 0.1),
    "linear": lambda a, b, c: rows_of(a).clamp(-1e18, 1e18) * c + rows_of(b).clamp(-1e18, 1e18),
    "minimum": lambda a, b, c: torch.minimum(rows_of(a), rows_of(b)),
    "where": lambda a, b, c: torch.where(by_row(torch.arange(len(a)) % 2 == 0, a), a, torch.full_like(a, c)),
    "product": lambda a, b, c: product(a),
    "cumsum": lambda a, b, c: rows_of(a).clamp(-1e18, 1e18).cumsum(0),
    "flip": lambda a, b, c: a.flip(0),
    "roll": lambda a, b, c: a.roll(1, 0),
    "transpose": lambda a, b, c: a.mT if a.ndim > 1 and a.shape[-1] == a.shape[-2] else a,
    "softmax": lambda a, b, c: a.softmax(-1),
    "amax": lambda a, b, c: a.amax(0, keepdim=True).expand_as(a),
    "same": lambda a, b, c: a,
}
"""Continuous functions, so that a rounding error stays small."""
INTEGER_OPERATIONS: dict[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    "next": lambda a, b, c: a + 1 if a.dtype is not torch.bool else ~a,
    "triple": lambda a, b, c: a * 3,
    "quotient": lambda a, b, c: a // 3 if a.dtype is not torch.bool else a & True,
    "remainder": lambda a, b, c: a % 7 if a.dtype is not torch.bool else a | False,
    "positive": lambda a, b, c: a > 0,
    "cumsum": lambda a, b, c: rows_of(a).cumsum(0),
    "order": lambda a, b, c: rows_of(a).argsort(stable=True),
    "either": lambda a, b, c: rows_of(a) + rows_of(b),
    "flip": lambda a, b, c: a.flip(0),
    "narrow": lambda a, b, c: a.to(torch.uint8),
    "same": lambda a, b, c: a,
}


def applied(operations: tuple[Operation, ...], fields: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Floats and integers: the fields and the results of the operations."""
    floats = [x if x.dtype in (torch.float32, torch.float64) else x.float() for x in fields if x.is_floating_point()]
    integers = [x for x in fields if not x.is_floating_point()]
    floats += [x.float() for x in integers]
    for name, first, second, number in operations:
        known, table = (integers, INTEGER_OPERATIONS) if name.startswith("integer ") else (floats, FLOAT_OPERATIONS)
        if known:
            a, b = known[first % len(known)], known[second % len(known)]
            known.append(table[name.removeprefix("integer ")](a, b, number))
    return floats, integers


def successor(leaf: Tensor, leaves: list[Tensor], choice: int) -> Tensor:
    """Return a tensor with shape and dtype of the leaf from `leaves`; an integer never comes from a float."""
    fitting = [x for x in leaves if x.shape == leaf.shape]
    if not fitting:
        return leaf
    chosen = fitting[-1 - choice % len(fitting)]
    return chosen != 0 if leaf.dtype is torch.bool else chosen.to(leaf.dtype)


def successors(operations: tuple[Operation, ...], leaves: list[Tensor], others: list[Tensor]) -> list[Tensor]:
    """The leaves after one step."""
    floats, integers = applied(operations, [*leaves, *others])
    kinds = [floats if leaf.is_floating_point() else integers for leaf in leaves]
    return [successor(leaf, kind, i) for i, (leaf, kind) in enumerate(zip(leaves, kinds, strict=True))]


def looped(
    loop: Callable, operations: tuple[Operation, ...], twice: bool, state: Any, xs: Any, constant: Tensor
) -> Any:
    """Apply the operations at each step. Return the last state, outputs, the first state and a transposed one."""

    def body(carry: Any, x: Any, constant: Tensor) -> tuple[Any, Any]:
        leaves, structure = flatten(carry)
        others = [*flatten(x)[0], constant]
        floats, integers = applied(operations, [*leaves, *others])
        after = unflatten(structure, successors(operations, leaves, others))
        return after, {"float": floats[-1], "integer": integers[-1:], "before": leaves[0]}

    after, out = loop(body, state, xs, constant)
    if twice:
        after, out = loop(body, after, xs, constant)
    return after, out, state, [leaf.mT if leaf.ndim > 1 else leaf for leaf in flatten(after)[0]]


def drawn_tensor(r: random.Random, shape: tuple[int, ...], dtype: torch.dtype, scale: float) -> Tensor:
    """Numbers in a random memory layout."""
    generator = torch.Generator().manual_seed(r.randrange(2**31))
    if dtype in FLOATS:
        x = (torch.randn(shape, generator=generator, dtype=torch.float64) * scale).to(dtype)
    else:
        x = torch.randint(0 if dtype in (torch.bool, torch.uint8) else -9, 9, shape, generator=generator).to(dtype)
    match r.randrange(8):
        case 0 if x.ndim > 1:
            return x.transpose(0, 1).contiguous().transpose(0, 1)
        case 1:
            return torch.stack((x, x), -1)[..., 0]
        case 2:
            return torch.cat((x, x))[len(x) :]
        case 3:
            return x[:1].expand(shape)
        case 4 if x.ndim == 2 and x.numel():
            return torch.cat((x[:, 0], x[-1])).unfold(0, shape[1], 1)[: shape[0]]
    return x


def drawn_operations(r: random.Random) -> tuple[Operation, ...]:
    every = [*FLOAT_OPERATIONS, *(f"integer {name}" for name in INTEGER_OPERATIONS)]
    return tuple(
        Operation(r.choice(every), r.randrange(99), r.randrange(99), r.uniform(-2.0, 2.0))
        for _ in range(r.randint(2, 12))
    )


def function_case(r: random.Random) -> Case:
    """A loop over random operations on nested fields, called with two sets of tensors."""
    rows, length, operations = r.choice([1, 2, 3, 4, 17, 64]), r.choice([1, 2, 3, 7]), drawn_operations(r)
    shapes = [(rows, *r.choices([0, 1, 2, 3, 5, 17], k=r.randrange(3))) for _ in range(r.randint(1, 5))]
    dtypes = [r.choice([torch.float32, *FLOATS, *INTEGERS]) for _ in shapes]
    kinds, share, nested = r.choices([dict, TensorDict], k=2), r.random() < 0.4, r.random() < 0.5
    row_dtype = r.choice([torch.float32, *INTEGERS])

    def arguments() -> tuple[Any, ...]:
        scale = r.choice(SCALES)
        fields: dict[str, Any] = {
            f"field{i}": drawn_tensor(r, *one, scale) for i, one in enumerate(zip(shapes, dtypes, strict=True))
        }
        own = r.randrange(3)  # whether two names share a tensor, and how, differs between the calls
        if share:
            first = fields["field0"]
            fields["alias"] = [first, first[...], first.clone()][own]
        if nested:
            inner = {"deep": fields.pop("field0"), "nothing": {}}
            fields["inner"] = inner if kinds[1] is dict else TensorDict(inner, [rows])
        state = fields if kinds[0] is dict else TensorDict(fields, [rows])
        xs = {
            "float": drawn_tensor(r, (length, rows, 2), torch.float32, scale),
            "any": drawn_tensor(r, (length, rows), row_dtype, scale),
        }
        return state, xs, drawn_tensor(r, (rows, 3), torch.float32, scale)

    return Case(looped, (operations, r.random() < 0.3), (arguments(), arguments()))


def environment(r: random.Random) -> Env:
    """An environment with random fields and dynamics, whose episodes end after a number of steps."""
    operations, scale, width = drawn_operations(r), r.choice(SCALES[:5]), r.choice([1, 2, 5])
    extras = [(r.choice([0, 1, 2, 3]), r.choice([*FLOATS, *INTEGERS])) for _ in range(r.randrange(4))]
    shared, last, limit = r.random() < 0.5, r.choice([2, 3, 5]), r.choice([3, 4, 9])

    def reset(keys: Tensor) -> TensorDict:
        x = rng.normal(keys, (width,)) * scale
        extra = {
            f"extra{i}": (
                rng.uniform(keys, (size,)) if dtype in FLOATS else rng.randint(keys, (size,), low=0, high=9)
            ).to(dtype)
            for i, (size, dtype) in enumerate(extras)
        }
        place = {"place": x if shared else x.clone(), "count": torch.zeros_like(keys)}
        return state_of(x, keys.shape, **place, **extra)

    def step(state: TensorDict, action: Tensor, noise: Tensor) -> TensorDict:
        fields = ["place", *(f"extra{i}" for i in range(len(extras)))]
        after = successors(operations, [state[name] for name in fields], [action, rng.normal(noise, (width,))])
        new = dict(zip(fields, after, strict=True)) | {"count": state["count"] + 1, "obs": after[0] + 0.1 * action}
        new["reward"] = after[0].sum(-1)
        new["terminated"] = (new["count"] % (last + 1) == last) | (state["count"] < 0)
        return state.copy().update(new | {"truncated": torch.zeros_like(new["terminated"])})

    env = Env(reset, step, box(-1e9, 1e9, width), box(-1.0, 1.0, width))
    return auto_reset(time_limit(env, limit))


def collected(loop: Callable, policy: Any, env: Env, params: TensorDict, state: TensorDict, keys: Tensor) -> Any:
    """A rollout, and the state after it."""
    return collect_rollout(policy, env, params, TensorDict({}, []), state, keys, keys + 1, scan=loop)[1:]


def act(params: TensorDict, carry: TensorDict, obs: Tensor, noise: Tensor) -> tuple[TensorDict, TensorDict]:
    action = torch.tanh(obs * params["scale"] + noise.unsqueeze(-1))
    return carry, TensorDict({"action": action, "sample_log_prob": action.sum(-1)}, obs.shape[:-1])


def no_parameters(key: Tensor) -> TensorDict:
    return TensorDict({}, [])


def not_evaluated(params: TensorDict, carry: TensorDict, steps: TensorDict) -> tuple[Tensor, Tensor]:
    raise NotImplementedError("a rollout evaluates nothing")


def value(params: TensorDict, carry: TensorDict, obs: Tensor) -> Tensor:
    return (obs * params["scale"]).sum(-1)


POLICY = Policy(no_parameters, rng.normal, act, not_evaluated, value)


def rollout_case(r: random.Random) -> Case:
    """The rollouts of a random environment from two seeds."""
    env, num_envs, length = environment(r), r.choice([1, 2, 5, 16]), r.choice([1, 2, 6])

    def arguments() -> tuple[Any, ...]:
        keys = rng.split(rng.key(r.randrange(2**31)), (length + 1) * num_envs).reshape(length + 1, num_envs)
        return TensorDict({"scale": torch.tensor(r.uniform(0.1, 1.0))}), env.reset(keys[0]), keys[1:]

    return Case(collected, (POLICY, env), (arguments(), arguments()))


def drawn_case(seed: int) -> Case:
    """The case of a seed: three functions for each environment."""
    r = random.Random(seed)
    return rollout_case(r) if seed % 4 == 3 else function_case(r)


def differences(actual: Any, expected: Any) -> list[str]:
    """Describe the tensors that differ by more than their tolerance."""
    (actual_leaves, structure), (expected_leaves, same) = flatten(actual), flatten(expected)
    if structure != same:
        return [f"structure {structure}, expected {same}"]
    return [
        f"{name}: {a.tolist()} of {a.dtype}, expected {b.tolist()} of {b.dtype}"[:600]
        for name, a, b in zip(names(structure), actual_leaves, expected_leaves, strict=True)
        if not close(a, b)
    ]


def close(actual: Tensor, expected: Tensor) -> bool:
    if actual.dtype != expected.dtype or actual.shape != expected.shape:
        return False
    if not actual.is_floating_point() or not actual.numel():
        return torch.equal(actual, expected)
    tolerance, x = TOLERANCE[actual.dtype], expected.double()
    largest = float(x.abs().masked_fill(~x.isfinite(), 0.0).max())
    return torch.allclose(actual.double(), x, rtol=tolerance, atol=tolerance * largest, equal_nan=True)


def mistakes(seed: int) -> list[str]:
    """Compare the compiled function of a seed with the eager one: three calls with two sets of tensors."""
    fn, static, (first, second) = drawn_case(seed)
    _compiled.cache_clear()
    form, problems = choose_form("on", "cpu"), []
    jitted = form.jit(fn, form.scan, *static)
    for number, arguments in enumerate((first, second, first)):
        before = [leaf.clone() for leaf in flatten(arguments)[0]]
        for difference in differences(jitted(*arguments), fn(scan, *static, *arguments)):
            problems.append(f"seed {seed}, call {number}, {difference}")
        if not all(map(torch.equal, (x.nan_to_num() for x in flatten(arguments)[0]), (x.nan_to_num() for x in before))):
            problems.append(f"seed {seed}, call {number} changed an argument")
    _compiled.cache_clear()
    return problems


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Compare the compiled function of a seed with the eager one.")
    parser.add_argument("seed", type=int)
    parser.add_argument("--cpp", action="store_true", help="build C++ instead of running op by op")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.cpp:
        print(*mistakes(args.seed) or ["equal"], sep="\n")
    else:
        with traced_only():
            print(*mistakes(args.seed) or ["equal"], sep="\n")
