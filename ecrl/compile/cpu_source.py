"""Let a graph for a CPU call handwritten C++ functions instead of code that inductor generates."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch._inductor import ir, lowering  # import `lowering` before `codegen`, which imports `lowering`
from torch._inductor.codegen.cpp_template_kernel import CppTemplateKernel
from torch._inductor.select_algorithm import PartialRender
from torch._inductor.utils import Placeholder, parallel_num_threads

NAME = str(Placeholder.KERNEL_NAME)
"""Placeholder for the name of the function in the C++ code, until inductor has chosen the name."""


def register(operator: Any, lower: Callable[..., Any]) -> None:
    """Register `lower` as the implementation of an operator. `lower` takes and returns tensors of inductor."""
    lowering.register_lowering(operator.default, type_promotion_kind=None)(lower)


def stored(x: Any) -> Any:
    """Store a tensor of inductor in memory at a constant offset, and return the stored tensor.

    In a loop over time, each iteration reads a different row of the tensors to loop over. A view of such a row, or of a
    part of such a row, has no constant offset, so this function copies the view.
    """
    x = ir.ExternKernel.realize_input(x)
    _, layout = ir.as_storage_and_layout(x, freeze=True)
    if not (isinstance(layout.offset, int) or layout.offset.is_number):
        x = ir.ExternKernel.copy_input(x)
        ir.as_storage_and_layout(x, freeze=True)
    return x


def pointers(inputs: Sequence[Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the tensors that a C++ function takes, by name, and C++ code for the address of each input.

    Inputs in the same buffer share one argument.
    """
    names: dict[str, str] = {}
    buffers: dict[str, Any] = {}
    for number, x in enumerate(inputs):
        name = names.setdefault(x.get_name(), f"input_{number}")
        buffers.setdefault(name, x)
    return buffers, [f"({names[x.get_name()]} + {x.get_layout().offset})" for x in inputs]


def call(write: Callable[..., str], inputs: list[Any], shape: Sequence[Any], dtype: torch.dtype) -> Any:
    """Add a call of a handwritten C++ function to the graph, and return the result as a tensor of inductor.

    Args:
        write: `write(declare, inputs, result)` returns the C++ code. `declare(names, result_name)` returns the
            declaration of a function that takes pointers to the tensors of the dict `names`, and to the result.
        inputs: tensors from `stored`.
        shape: shape of the result, which is contiguous.
        dtype: dtype of the result.
    """
    layout = ir.FixedLayout(inputs[0].get_device(), dtype, [*shape])
    result = ir.CppTemplateBuffer(layout, inputs, partial(_kernel, write), cast(Any, None), None)
    cast(Any, result).allow_epilogue_fusion = False  # torch before 2.13 reads `epilogue_fusion` instead
    return ir.TensorBox.create(result)


def _kernel(write: Callable[..., str], result: Any, **options: Any) -> tuple[CppTemplateKernel, Callable[[], str]]:
    """Return inductor's kernel object for a result, and a function that returns the C++ code of the kernel."""
    kernel = CppTemplateKernel(NAME, parallel_num_threads())

    def declare(names: dict[str, Any], result_name: str) -> str:
        return kernel.def_kernel(names, {result_name: result})

    def code() -> str:
        return PartialRender(write(declare, result.inputs, result), kernel.render_hooks).finalize_all()

    return kernel, code
