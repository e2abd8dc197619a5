"""Replace operations of a traced graph by cheaper operations with the same results.

A rewrite may move an operation or copy a part of a tensor. The rewrites therefore leave out operations on tensors that
the graph writes in place.
"""

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

import ecrl.compile.cpu_matmul  # noqa: F401  # registers the operators
from ecrl.compile.graph_nodes import storage_of, written_storages

_aten = torch.ops.aten
_VIEWS = {_aten.view.default, torch.ops.aten._unsafe_view.default, _aten.squeeze.dim, _aten.unsqueeze.default}
"""Operations that keep the order of the elements."""


def stack_only_parts(graph: GraphModule) -> None:
    """If a graph stacks tensors and reads only slices of the stack, replace each slice by a smaller stack.

    The smaller stack has only the tensors in the slice. Inductor computes all tensors of a stack, even if no slice
    contains them. For example, the gradient with respect to the inputs of a critic is a stack with one row per input.
    The gradient with respect to the action is a slice of this stack.
    """
    fixed = written_storages(graph) | {storage_of(n) for n in graph.graph.nodes if n.target is _aten.as_strided.default}
    for stack in graph.graph.find_nodes(op="call_function", target=_aten.stack.default):
        parts, *axis = cast(Any, stack.args)
        same_dtype = {part.meta["val"].dtype for part in parts} == {stack.meta["val"].dtype}
        if axis not in ([], [0]) or not same_dtype or not fixed.isdisjoint(map(storage_of, (stack, *parts))):
            continue
        slices = [*_readers(stack, transposed=False)]
        chosen = [_slice_of(node, parts, transposed) for node, transposed in slices]
        if all(chosen):
            for (node, transposed), some in zip(slices, chosen, strict=True):
                _replace_slice(node, some, transposed)


def _readers(tensor: Node, transposed: bool) -> Iterator[tuple[Node, bool]]:
    """Yield each operation that reads a tensor or its transpose, with True if the operation reads the transpose.

    The transpositions themselves are not yielded.
    """
    for user in tensor.users:
        if user.target is _aten.t.default:
            yield from _readers(user, not transposed)
        else:
            yield user, transposed


def _slice_of(node: Node, parts: list[Node], transposed: bool) -> list[Node]:
    """Return the stacked tensors that a slice along the stacked axis contains.

    If `node` is no such slice, or if the slice has a step other than 1, return an empty list.
    """
    if node.target is not _aten.slice.Tensor:
        return []
    defaults = (None, 0, None, None, 1)
    _, dim, start, end, step = cast(Any, (*node.args, *defaults[len(node.args) :]))
    return parts[start:end] if step == 1 and dim % node.meta["val"].ndim == transposed else []


def _replace_slice(node: Node, parts: list[Node], transposed: bool) -> None:
    graph = node.graph
    with graph.inserting_before(node):
        new = graph.call_function(_aten.stack.default, (parts,))
        new.meta = {"val": torch.stack([part.meta["val"] for part in parts])}
        if transposed:
            rows, new = new, graph.call_function(_aten.t.default, (new,))
            new.meta = {"val": rows.meta["val"].t()}
    node.replace_all_uses_with(new)
    graph.erase_node(node)


def fuse_relu(graph: GraphModule) -> None:
    """Replace `relu(a @ b + bias)`, and the gradient of a relu whose incoming gradient is `a @ b`, by fused operations.

    A fused product writes its final result directly. Without the fusion, separate loops would read and write the
    product again.
    """
    written = written_storages(graph)
    for relu in graph.graph.find_nodes(op="call_function", target=_aten.relu.default):
        _fuse_forward(relu, written)
    for gradient in graph.graph.find_nodes(op="call_function", target=_aten.threshold_backward.default):
        _fuse_backward(gradient, written)


def _fuse_forward(relu: Node, written: set[int | None]) -> None:
    total = relu.all_input_nodes[0]
    terms = total.all_input_nodes
    if total.target is not _aten.add.Tensor or total.kwargs or len(terms) < 2 or len(total.users) > 1:
        return
    for term, bias in (terms, terms[::-1]):
        product, shape = _product(term, written), bias.meta["val"].shape
        if product is None or bias.meta["val"].dtype != torch.float32 or storage_of(bias) in written:
            continue
        batch, m, n = product.meta["val"].shape
        keeps_shape = total.meta["val"].shape in ((batch, m, n), (m, n) if batch == 1 else ())
        if keeps_shape and (shape == (batch, 1, n) or (batch == 1 and shape == (n,))):
            _replace(relu, torch.ops.ecrl.bmm_relu.default, product, bias, [batch, 1, n])
            return


def _fuse_backward(gradient: Node, written: set[int | None]) -> None:
    incoming, relu, bound = cast(Any, gradient.args)
    product, value = _product(incoming, written), cast(Tensor, relu.meta["val"])
    same = value.dtype == torch.float32 and value.shape == incoming.meta["val"].shape and value.is_contiguous()
    if product is not None and bound == 0 and same and storage_of(relu) not in written:
        shape = [*product.meta["val"].shape]
        _replace(gradient, torch.ops.ecrl.bmm_relu_gradient.default, product, relu, shape)


def _product(node: Any, written: set[int | None]) -> Node | None:
    """Follow views back from `node` to a call of `ecrl::bmm`, and return the call.

    Return None if there is no such call, if it has other readers, or if its tensors are written in place.
    """
    while node.target in _VIEWS and len(node.users) == 1:
        node = node.all_input_nodes[0]
    if node.target is not torch.ops.ecrl.bmm.default or len(node.users) > 1:
        return None
    return node if written.isdisjoint(map(storage_of, (node, *node.all_input_nodes))) else None


def _replace(node: Node, operation: Any, product: Node, other: Node, shape: list[int]) -> None:
    """Replace `node` by `operation` on the factors of `product` and on `other`, which is viewed in `shape`.

    The result is viewed in the shape of `node`.
    """
    graph, value = node.graph, node.meta["val"]
    with graph.inserting_before(node):
        third = graph.call_function(_aten.view.default, (other, shape))
        third.meta = {"val": other.meta["val"].view(shape)}
        new = graph.call_function(operation, (*product.args, third))
        new.meta = {"val": torch.empty_like(product.meta["val"])}
        out = graph.call_function(_aten.view.default, (new, [*value.shape]))
        out.meta = {"val": new.meta["val"].view(value.shape)}
    node.replace_all_uses_with(out)
    graph.erase_node(node)
