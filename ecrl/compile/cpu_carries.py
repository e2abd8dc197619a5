"""Let a compiled loop write a few entries of a large carry in place, instead of copying the carry in each iteration.

A carry is a tensor that each iteration of a loop passes to the next. For example, the carry may be the sum tree of a
prioritised replay buffer, and the loop body returns `tree.index_put((node,), value)`. As a pure function, `index_put`
copies the whole tree. This module moves each operation that reads the old tree to a place before the write, and
replaces `index_put` by `index_put_`. The initial carry is copied once, before the loop. If an operation needs both the
old and the new tree, the loop body still copies the tree.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor
from torch._higher_order_ops import utils
from torch._higher_order_ops.scan import scan_op
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph, GraphModule, Node

from ecrl.compile.cache import sources_hash
from ecrl.compile.graph_nodes import storage_of

_LARGE = 4096
"""The number of elements above which a carry is written in place.

`ecrl.compile.scan` packs smaller carries into shared buffers.
"""

_WRITES = (torch.ops.aten.index_put.default, torch.ops.aten.index_put_.default)


class _WriteCarriesInPlace(CustomGraphPass):
    """Pass of inductor that makes loops write large carries in place, as the module docstring describes."""

    def uuid(self) -> str:
        """Return an identifier for the key of inductor's cache."""
        return sources_hash()

    def __call__(self, graph: Graph) -> None:
        """Make the loops of a graph write large carries in place. Copy each such carry once, before its loop."""
        for loop in graph.find_nodes(op="call_function", target=scan_op):
            body = cast(GraphModule, getattr(graph.owning_module, str(cast(Node, loop.args[0]).target)))
            carries = [*cast(list[Node], loop.args[1])]
            for number in _write_in_place(body, len(carries)):
                with graph.inserting_before(loop):
                    copy = graph.call_function(torch.ops.aten.maximum.default, (carries[number], carries[number]))
                copy.meta = {"val": torch.empty_like(carries[number].meta["val"])}  # inductor would remove a clone
                carries[number] = copy
            loop.args = (loop.args[0], carries, *loop.args[2:])


def _write_in_place(body: GraphModule, number: int) -> list[int]:
    """Make a loop body with `number` carries write large carries in place, and return the indices of these carries."""
    results, carries = cast(list[Node], body.graph.output_node().args[0]), body.graph.find_nodes(op="placeholder")
    nodes, earlier, changed = [*body.graph.nodes], dict[Node, set[Node]](), dict[int, list[Node]]()
    for i in range(number):
        writes, value = _writes_of(carries[i], results[i]), cast(Tensor, carries[i].meta["val"])
        if writes and value.numel() > _LARGE and value.dtype != torch.bool:
            also_earlier = earlier | _readers(carries[i], writes)
            if (ordered := _ordered(nodes, also_earlier)) is not None:
                nodes, earlier, changed[i] = ordered, also_earlier, writes
    for before, node in pairwise(nodes):
        before.append(node)
    for i, writes in changed.items():
        for write in writes:
            with body.graph.inserting_before(write):
                new = body.graph.call_function(torch.ops.aten.index_put_.default, (carries[i], *write.args[1:]))
            new.meta = {"val": carries[i].meta["val"]}
            write.replace_all_uses_with(carries[i])
            body.graph.erase_node(write)
    if changed:
        body.recompile()
    return [*changed]


def _writes_of(carry: Node, result: Node) -> list[Node]:
    """Return the chain of `index_put` operations that turns a carry into the next carry, in order.

    Return an empty list if other operations take part, or if an `index_put` accumulates.
    """
    writes: list[Node] = []
    while result.op == "call_function" and result.target in _WRITES and not any(result.args[3:]):
        writes.insert(0, result)
        result = cast(Node, result.args[0])
    return writes if result is carry else []


def _readers(carry: Node, writes: list[Node]) -> dict[Node, set[Node]]:
    """For each write, return the operations that read the carry as it was before this write.

    Operations that read the carry through views are included.
    """
    readers_by_write = {}
    for old, write in zip((carry, *writes[:-1]), writes, strict=True):
        readers, todo = set[Node](), [old]
        while todo:
            for user in todo.pop().users.keys() - readers - {write}:
                readers.add(user)
                if storage_of(user) == storage_of(old):  # `user` is a view
                    todo.append(user)
        readers_by_write[write] = readers
    return readers_by_write


def _ordered(nodes: list[Node], earlier: dict[Node, set[Node]]) -> list[Node] | None:
    """Sort nodes such that each node follows its inputs and its nodes in `earlier`. If this is impossible, return None.

    The order of nodes changes as little as possible.
    """
    position, done = {node: i for i, node in enumerate(nodes)}, dict[Node, None]()
    todo, waiting = nodes[::-1], set[Node]()
    while todo:
        node = todo[-1]
        needed = {*node.all_input_nodes, *earlier.get(node, ())} - done.keys()
        if node in done or not needed:
            done[todo.pop()] = None
        elif node in waiting and needed & waiting:
            return None
        else:
            waiting.add(node)
            todo += sorted(needed, key=position.__getitem__, reverse=True)
    return [*done]


@contextmanager
def writing_carries_in_place() -> Iterator[None]:
    """Make inductor write large carries in place inside this context."""
    find = utils.check_input_alias_and_mutation

    def find_in_order(*args: Any) -> Any:  # inductor assigns the written inputs in the order of the carries
        *aliases, written = find(*args)
        return *aliases, sorted({*written})

    utils.check_input_alias_and_mutation = find_in_order
    try:
        with config.patch({"post_grad_custom_pre_pass": _WriteCarriesInPlace()}):
            yield
    finally:
        utils.check_input_alias_and_mutation = find
