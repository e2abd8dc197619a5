"""Implement two functions of `ecrl.kernels.sum_tree` in C++ for graphs on a CPU.

With tensor operations, each level of the tree needs a loop over all draws, with checks of each index. In C++, a draw
descends the whole tree in one loop. Several draws descend together, so the CPU waits less for memory. To find
duplicates, the C++ code sorts indices only if they are not sorted yet. The indices of a minibatch are usually sorted.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._inductor import ir

from ecrl.compile.cpu_source import call, pointers, register, stored
from ecrl.kernels.sum_tree import find_by_level, last_of_equal, use_functions
from ecrl.tracing_state import in_graph, transforms

_FIND = """
#include <torch/csrc/inductor/cpp_prefix.h>
extern "C" {kernel}
{{
    constexpr int64_t TOGETHER = 16;
    const double *tree = {first}, *mass = {second};
    for (int64_t i = 0; i < {count}; i += TOGETHER) {{
        const int64_t draws = std::min<int64_t>(TOGETHER, {count} - i);
        double rest[TOGETHER];
        int64_t node[TOGETHER];
        for (int64_t d = 0; d < TOGETHER; d++) {{
            rest[d] = d < draws ? mass[i + d] : 0.0;
            node[d] = 1;
        }}
        for (int64_t level = 0; level < {depth}; level++)
            #pragma GCC unroll 16
            for (int64_t d = 0; d < TOGETHER; d++) {{
                const double left = tree[2 * node[d]];
                const bool goes_right = (rest[d] >= left) & (tree[2 * node[d] + 1] > 0);
                rest[d] = goes_right ? rest[d] - left : rest[d];
                node[d] = 2 * node[d] + goes_right;
            }}
        for (int64_t d = 0; d < draws; d++) out[i + d] = node[d] - {leaves};
    }}
}}
"""
_LAST = """
#include <torch/csrc/inductor/cpp_prefix.h>
#include <algorithm>
#include <numeric>
#include <vector>
extern "C" {kernel}
{{
    constexpr int64_t COUNT = {count};
    const int64_t* index = {first};
    std::vector<int64_t> order;
    const bool sorted = std::is_sorted(index, index + COUNT);
    if (!sorted) {{
        order.resize(COUNT);
        std::iota(order.begin(), order.end(), 0);
        std::stable_sort(order.begin(), order.end(), [&](int64_t i, int64_t j) {{ return index[i] < index[j]; }});
    }}
    for (int64_t i = COUNT - 1, last = 0; i >= 0; i--) {{
        const int64_t at = sorted ? i : order[i], next = i + 1 == COUNT ? -1 : sorted ? i + 1 : order[i + 1];
        last = next >= 0 && index[next] == index[at] ? last : at;
        out[at] = last;
    }}
}}
"""


def _code(text: str, declare: Callable[..., str], inputs: list[Any], result: Any) -> str:
    """Fill in the declaration, the addresses and the sizes in the C++ template `text`."""
    size, count = inputs[0].get_size()[0], result.get_size()[0]
    buffers, addresses = pointers(inputs)
    numbers = {"count": count, "leaves": size // 2, "depth": int(size).bit_length() - 2}
    return text.format(kernel=declare(buffers, "out"), first=addresses[0], second=addresses[-1], **numbers)


@torch.library.custom_op("ecrl::tree_find", mutates_args=())
def _tree_find(tree: Tensor, mass: Tensor) -> Tensor:
    return find_by_level(tree, mass)


@torch.library.custom_op("ecrl::last_of_equal", mutates_args=())
def _last_of_equal(index: Tensor) -> Tensor:
    return last_of_equal(index)


@_tree_find.register_fake
def _(tree: Tensor, mass: Tensor) -> Tensor:
    return mass.new_empty(mass.shape, dtype=torch.int64)


@_last_of_equal.register_fake
def _(index: Tensor) -> Tensor:
    return index.new_empty(index.shape)


def _lower(text: str, *args: Any) -> Any:
    inputs = [stored(ir.ExternKernel.require_contiguous(x)) for x in args]
    return call(partial(_code, text), inputs, args[-1].get_size(), torch.int64)


for _operator, _text in ((torch.ops.ecrl.tree_find, _FIND), (torch.ops.ecrl.last_of_equal, _LAST)):
    register(_operator, partial(_lower, _text))


def _is_in_cpu_graph(x: Tensor) -> bool:
    """Return True if `x` is a non-empty CPU tensor in a graph that is being traced outside of torch.func transforms.

    The operators of this module do not support transforms, such as vmap.
    """
    return in_graph() and x.device.type == "cpu" and x.numel() > 0 and not transforms()


def _find(tree: Tensor, mass: Tensor) -> Tensor:
    is_float64 = tree.dtype == mass.dtype == torch.float64
    return torch.ops.ecrl.tree_find(tree, mass) if is_float64 and _is_in_cpu_graph(mass) else find_by_level(tree, mass)


def _last(index: Tensor) -> Tensor:
    is_int64 = index.dtype == torch.int64
    return torch.ops.ecrl.last_of_equal(index) if is_int64 and _is_in_cpu_graph(index) else last_of_equal(index)


use_functions(_find, _last)
