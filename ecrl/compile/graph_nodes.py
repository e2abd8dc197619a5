"""Query the operations of a traced graph."""

import torch
from torch import Tensor
from torch.fx import GraphModule, Node


def writes(node: Node) -> bool:
    """Return True if an operation writes to a tensor in place."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def storage_of(node: Node) -> int | None:
    """Return an identifier of the storage of a node's tensor, or None if the node's value is not a tensor."""
    value = node.meta.get("val")
    return value.untyped_storage()._cdata if isinstance(value, Tensor) else None


def written_storages(graph: GraphModule) -> set[int | None]:
    """Return the identifiers of the storages of all tensors that an in-place operation reads or writes."""
    nodes = [node for node in graph.graph.nodes if writes(node)]
    return {storage_of(node) for write in nodes for node in (write, *write.all_input_nodes)} - {None}
