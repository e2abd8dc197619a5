"""Fuse relu, and the gradient of relu, into the matrix products of a graph for a CPU.

A fused product writes its final result at once. Otherwise, separate loops would read and write the product once more.
"""

from typing import Any, cast

import torch
from torch.fx import GraphModule, Node

import ecrl.compile.cpu_matmul  # noqa: F401  # registers the operators

_VIEWS = {
    torch.ops.aten.view.default,
    torch.ops.aten._unsafe_view.default,
    torch.ops.aten.squeeze.dim,
    torch.ops.aten.unsqueeze.default,
}
"""Operations that keep the order of the elements."""


def fuse_relu(graph: GraphModule) -> None:
    """Replace `relu(a @ b + bias)` and the gradient of a relu with respect to `a @ b` by fused operations."""
    for relu in graph.graph.find_nodes(op="call_function", target=torch.ops.aten.relu.default):
        _fuse_forward(relu)
    for gradient in graph.graph.find_nodes(op="call_function", target=torch.ops.aten.threshold_backward.default):
        _fuse_backward(gradient)


def _fuse_forward(relu: Node) -> None:
    total = relu.all_input_nodes[0]
    terms = total.all_input_nodes
    if total.target is not torch.ops.aten.add.Tensor or total.kwargs or len(terms) < 2 or len(total.users) > 1:
        return
    for term, bias in (terms, terms[::-1]):
        product, shape = _product(term), bias.meta["val"].shape
        if product is None or product.meta["val"].numel() != relu.meta["val"].numel():
            continue
        batch, _, n = product.meta["val"].shape
        if shape == (batch, 1, n) or (batch == 1 and shape == (n,)):
            _replace(relu, torch.ops.ecrl.bmm_relu.default, product, bias, [batch, 1, n])
            return


def _fuse_backward(gradient: Node) -> None:
    incoming, relu, bound = cast(Any, gradient.args)
    product = _product(incoming)
    if product is not None and bound == 0 and relu.meta["val"].is_contiguous():
        shape = [*product.meta["val"].shape]
        _replace(gradient, torch.ops.ecrl.bmm_relu_gradient.default, product, relu, shape)


def _product(node: Any) -> Node | None:
    """Return the matrix product that `node` is or views, if nothing else reads this product."""
    while node.target in _VIEWS and len(node.users) == 1:
        node = node.all_input_nodes[0]
    return node if node.target is torch.ops.ecrl.bmm.default and len(node.users) == 1 else None


def _replace(node: Node, operation: Any, product: Node, other: Node, shape: list[int]) -> None:
    """Replace a node by an operation on the factors of a product and on another tensor, viewed in the given shape."""
    graph, value = node.graph, node.meta["val"]
    with graph.inserting_before(node):
        third = graph.call_function(torch.ops.aten.view.default, (other, shape))
        third.meta = {"val": other.meta["val"].view(shape)}
        new = graph.call_function(operation, (*product.args, third))
        new.meta = {"val": torch.empty_like(product.meta["val"])}
        out = graph.call_function(torch.ops.aten.view.default, (new, [*value.shape]))
        out.meta = {"val": new.meta["val"].view(value.shape)}
    node.replace_all_uses_with(out)
    graph.erase_node(node)
