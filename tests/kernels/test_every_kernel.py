"""Every public kernel, none forgotten: equal results in every variant, pure, and no retrace on new values.

Other files test the numbers of each kernel; here a table of example calls shows that the whole
surface traces, vmaps, takes strided memory and float64, and recompiles for shapes only.
"""

import inspect
import re
from typing import Any

import pytest
import torch
from support.checks import SHORT_VARIANTS, assert_pure
from support.kernel_calls import CALLS, NO_FLOATS, NO_TENSORS, N, T, floats, kernel
from torch import Tensor
from torch.utils import _pytree as pytree

from ecrl import kernels


def test_the_table_is_complete():
    functions = {name for name in kernels.__all__ if inspect.isfunction(getattr(kernels, name))}
    assert set(CALLS) | set(NO_TENSORS) == functions


def assert_equal_results(actual: Any, expected: Any) -> None:
    """Check that two results of a kernel are equal to the rounding of float32."""
    for a, e in zip(pytree.tree_leaves(actual), pytree.tree_leaves(expected), strict=True):
        a, e = (x.double().clamp(min=-1e30) for x in (a, e))  # mask_logits: the lowest float depends on the dtype
        torch.testing.assert_close(a, e, rtol=2e-5, atol=2e-5)


OTHERS = [pytest.param(x, marks=pytest.mark.long) if x == "compiled" else x for x in SHORT_VARIANTS if x != "eager"]


@pytest.mark.parametrize("variant", [*OTHERS, pytest.param("inductor", marks=pytest.mark.long)], indirect=True)
@pytest.mark.parametrize("name", CALLS)
def test_every_variant_agrees_with_eager(name, variant):
    args, kwargs = CALLS[name](3)
    assert_equal_results(variant(kernel(name))(*args, **kwargs), kernel(name)(*args, **kwargs))


@pytest.mark.parametrize("name", CALLS)
def test_compiled_it_agrees_with_eager_and_new_values_do_not_retrace(name):
    (first, first_kw), (second, second_kw) = CALLS[name](3), CALLS[name](4)
    names = [key for key, value in first_kw.items() if isinstance(value, Tensor)]
    static = {key: value for key, value in first_kw.items() if key not in names}

    def call(args: tuple, numbers: tuple) -> Any:
        return kernel(name)(*args, **dict(zip(names, numbers, strict=True)), **static)

    torch._dynamo.reset()
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    numbers = tuple(first_kw[n] for n in names)
    assert_equal_results(assert_pure(compiled, first, numbers), call(first, numbers))
    with torch.compiler.set_stance("fail_on_recompile"):
        compiled(second, tuple(second_kw[n] for n in names))


@pytest.mark.parametrize("name", CALLS)
def test_double_in_double_out(name):
    double = [
        pytree.tree_map(lambda x: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x, part)
        for part in CALLS[name](3)
    ]
    out = pytree.tree_leaves(kernel(name)(*double[0], **double[1]))
    dtypes = {t.dtype for t in out if isinstance(t, Tensor) and t.is_floating_point()}
    assert dtypes == (set() if name in NO_FLOATS else {torch.float64})


def arguments(name: str) -> dict[str, Any]:
    """Return the arguments of a kernel's example call by name."""
    args, kwargs = CALLS[name](3)
    return dict(zip(inspect.signature(kernel(name)).parameters, args, strict=False)) | kwargs


def flags_of(name: str) -> list[str]:
    """Return the names of the bool arguments of a kernel's example call."""
    return [flag for flag, x in arguments(name).items() if isinstance(x, Tensor) and x.dtype == torch.bool]


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8], ids=str)
@pytest.mark.parametrize("name", [name for name in CALLS if flags_of(name)])
def test_flags_of_a_wrong_dtype_are_named(name, dtype):
    for flag in flags_of(name):
        with pytest.raises(ValueError, match=rf"^{flag} has dtype {str(dtype)[6:]}, expected bool$"):
            kernel(name)(**arguments(name) | {flag: arguments(name)[flag].to(dtype)})


CHECKED = {"returns", "rollout_estimators", "losses", "sequence_losses", "sequences", "q_losses", "q_targets"}
CHECKED |= {"masked_stats", "groups", "distributional"}
"""Files whose kernels check that arguments are tensors."""


def tensors_of(name: str) -> list[str]:
    """Return the arguments of a kernel that must be tensors. Hyperparameters and bounds may be numbers."""
    given = arguments(name).items()
    return [key for key, x in given if isinstance(x, Tensor) and x.ndim and (name, key) != ("smoothed_action", "low")]


@pytest.mark.parametrize(
    "name", [name for name in CALLS if kernel(name).__module__.rpartition(".")[2] in CHECKED and tensors_of(name)]
)
def test_numbers_and_arrays_in_place_of_tensors_are_named(name):
    for wrong in tensors_of(name):
        for value, kind in ((0.5, "a float"), (3, "an int"), (arguments(name)[wrong].numpy(), "a ndarray")):
            with pytest.raises(TypeError, match=rf"^{wrong} is {kind}, expected a tensor; pass torch.as_tensor"):
                kernel(name)(**arguments(name) | {wrong: value})


MASKED = [name for name in CALLS if "mask" in inspect.signature(kernel(name)).parameters]


def test_a_mask_is_optional_in_every_kernel_that_has_one():
    assert {"ppo_loss", "td_loss", "gspo_loss", "standardize", "group_advantages", "moments_update"} < set(MASKED)
    assert all(inspect.signature(kernel(name)).parameters["mask"].default is None for name in MASKED)


@pytest.mark.parametrize("name", MASKED)
def test_without_a_mask_every_entry_counts(variant, name):
    given = arguments(name)
    every = torch.ones_like(given.pop("mask"))
    if name == "whiten":  # takes one advantage per sequence only with a mask
        given["advantage"] = floats(3, *every.shape)
    call = variant(kernel(name))
    without, whole, none = (
        pytree.tree_leaves(call(**given, **masks)) for masks in ({}, {"mask": every}, {"mask": ~every})
    )
    assert all(torch.equal(a, b) for a, b in zip(without, whole, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(without, none, strict=True))


STEP_DISCOUNTS = {
    "compute_vtrace",
    "discounted_returns",
    "episode_discounts",
    "gae",
    "grpo_advantages",
    "n_step_returns",
    "running_returns",
    "td_lambda_returns",
    "upgo_returns",
    "vtrace",
    "categorical_q_target", "categorical_target", "double_q_target", "expected_q_target", "min_q_target",
    "munchausen_target", "q_lambda", "q_target", "quantile_q_target", "retrace", "soft_min_q_target", "soft_q_target",
    "min_categorical_target", "soft_categorical_target",
}  # fmt: skip
"""Kernels whose `gamma` may have the shape of the rewards."""


def hyperparameters_of(name: str) -> list[str]:
    """Return the names of the hyperparameters that are 0-d tensors in a kernel's example call."""
    return [key for key, value in CALLS[name](3)[1].items() if isinstance(value, Tensor) and not value.ndim]


@pytest.mark.parametrize("name", [name for name in CALLS if hyperparameters_of(name)])
def test_hyperparameters_of_a_wrong_shape_are_named(name):
    args, kwargs = CALLS[name](3)
    for wrong in hyperparameters_of(name):
        per_step = wrong == "gamma" and name in STEP_DISCOUNTS  # then `[N, T]` is right
        for shape in ((1,), (N, T + 1) if per_step else (N, T), (N, 1)):
            with pytest.raises(
                ValueError, match=rf"^{wrong} has shape {re.escape(str(list(shape)))}, expected a number"
            ):
                kernel(name)(*args, **kwargs | {wrong: kwargs[wrong].expand(shape)})


@pytest.mark.parametrize(
    "name",
    ["compute_returns", "compute_n_step_returns", "compute_td_lambda_returns", "compute_gae", "compute_upgo_returns"],
)
def test_a_gamma_of_a_wrong_shape_is_named_on_rollouts(name):
    (fields, gamma, *rest), _ = CALLS[name](3)
    with pytest.raises(ValueError, match=r"^gamma has shape \[4, 1\], expected a number, a 0-d tensor or \[4, 5\]"):
        kernel(name)(fields, gamma.expand(N, 1), *rest)
