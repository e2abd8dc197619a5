"""Rewrite the loops in inductor's C++: each loop then allocates its memory once instead of in each iteration.

The module also fixes a bug of inductor: a loop may free the handle of a view in each iteration. Later iterations then
use memory that is already freed. See `_free_handles_once`.

With small tensors, an iteration spends much of its time on allocations, tensor views, tensor handles and the loop's end
condition. With four environments, these operations take more than a third of the time of a rollout. This module
rewrites only loops that match the regular expressions below. If a version of inductor generates different C++, this
module leaves the loops unchanged.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch._inductor.graph import GraphLowering

_LOOP = re.compile(r"^( *)while \(1\) \{\n(?:(?!.*while \(1\)).*\n)*?\1\}\n", re.M)  # a loop without an inner loop
_ALLOCATION = re.compile(
    r"^( *)AtenTensorHandle (\w+)_handle;\n"
    r" *AOTI_TORCH_ERROR_CODE_CHECK\((aoti_torch_empty_strided\(.*), &\2_handle\)\);\n"
    r" *RAIIAtenTensorHandle \2\(\2_handle\);\n",
    re.M,
)
_INPUT = re.compile(
    r"^( *)AtenTensorHandle (\w+)_handle;\n"
    r" *AOTI_TORCH_ERROR_CODE_CHECK\(aoti_torch_assign_tensors_out\((\w+), &\2_handle\)\);\n"
    r" *RAIIAtenTensorHandle \2\(\2_handle\);\n",
    re.M,
)
_TEMPORARY = re.compile(
    r"^( *)AtenTensorHandle (tmp_\w+);\n *AOTI_TORCH_ERROR_CODE_CHECK\(aoti_torch_.*, &\2\)\);\n", re.M
)
_VIEW = re.compile(
    r"^( *)auto (\w+) = wrap_with_raii_handle_if_needed\((reinterpret_tensor_wrapper\((\w+), .*)\);  // alias\n", re.M
)
_MOVE = re.compile(r"^ *auto (\w+) = std::move\((\w+)\);  // reuse\n", re.M)
_KERNEL = re.compile(r"^ *(?:cpp_fused_\w+|AOTI_TORCH_ERROR_CODE_CHECK\(aoti_torch_cpu_(?:add|b)?mm_out)\(.*\n", re.M)
_COUNTER_READ = re.compile(r"AOTI_TORCH_ERROR_CODE_CHECK\(aoti_torch_item_int64\((\w+), &(\w+)_raw\)\);")
_BOUND = re.compile(r"if \(!\((u\d+) < (\d+)L\)\)")
_CONDITION = re.compile(  # the end condition of a loop: a kernel that compares the counter
    r"^ *// subgraph: while_loop_cond_graph\w*\n"
    r"(?P<before>(?:(?!.*cpp_fused).*\n)*)"
    r" *cpp_fused_\w+\(\(const int64_t\*\)\((?P<counter>\w+)\.data_ptr\(\)\), \(bool\*\)\(\w+\.data_ptr\(\)\)\);\n"
    r"(?:(?!.*cpp_fused).*\n)*?"
    r"(?P<pad> *)if \(!\w+_scalar\) break;\n",
    re.M,
)


def _lines(names: set[str], body: str) -> str:
    """Return the lines of C++ that use a variable in `names`, except lines that only free such a variable."""
    word, freed = re.compile(rf"\b({'|'.join(names)})\b"), re.compile(rf" *({'|'.join(names)})\.reset\(\);\n")
    return "".join(x for x in body.splitlines(keepends=True) if word.search(x) and not freed.fullmatch(x))


def _names_of(name: str, body: str) -> set[str]:
    """Return the C++ variables that share the memory of `name`: the variable itself, its views and moved copies."""
    names, known = {name}, 0
    pairs = [(m[2], m[4]) for m in _VIEW.finditer(body)] + [m.groups() for m in _MOVE.finditer(body)]
    while known < len(names):
        known = len(names)
        names |= {new for new, old in pairs if old in names}
    return names


def _is_used_by_kernels_only(name: str, body: str) -> bool:
    """Return True if only kernels and matrix products use the memory of the C++ variable `name`."""
    seen = _lines(_names_of(name, body), body)
    return not _KERNEL.sub("", _MOVE.sub("", _VIEW.sub("", seen)))


def _create_once(pad: str, name: str, creation: str) -> str:
    """Write C++ that creates a tensor in the first iteration of a loop and reuses the tensor in other iterations."""
    return (
        f"{pad}if (!{name}_reused.get()) {{\n{creation}{pad}}}\n{pad}AtenTensorHandle {name}_handle;\n"
        f"{pad}AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_assign_tensors_out({name}_reused, &{name}_handle));\n"
        f"{pad}RAIIAtenTensorHandle {name}({name}_handle);\n"
    )


def _allocate_once(loop: str) -> str:
    """Rewrite a loop to create each tensor that only kernels use, and each view of such a tensor, only once."""
    without_allocations = _ALLOCATION.sub("", loop)
    reused = [m[2] for m in _ALLOCATION.finditer(loop) if _is_used_by_kernels_only(m[2], without_allocations)]

    def allocate(match: re.Match[str]) -> str:
        pad, name, call = match.groups()
        if name not in reused:
            return match[0]
        new = f"{pad}    AtenTensorHandle {name}_new;\n{pad}    AOTI_TORCH_ERROR_CODE_CHECK({call}, &{name}_new));\n"
        return _create_once(pad, name, f"{new}{pad}    {name}_reused = RAIIAtenTensorHandle({name}_new);\n")

    def view(match: re.Match[str]) -> str:
        pad, name, call, base = match.groups()
        if base not in reused:
            return match[0]
        reused.append(name)
        call = call.replace(f"({base},", f"({base}_reused,", 1)
        return _create_once(pad, name, f"{pad}    {name}_reused = wrap_with_raii_handle_if_needed({call});\n")

    loop = _VIEW.sub(view, _ALLOCATION.sub(allocate, loop))
    return "".join(("{\n", *(f"RAIIAtenTensorHandle {name}_reused;\n" for name in reused), loop, "}\n"))


def _read_inputs_in_place(loop: str) -> str:
    """Rewrite a loop so that its iterations create no tensor handles for inputs that only kernels read."""
    for match in reversed([*_INPUT.finditer(loop)]):
        pad, name, outer = match.groups()
        rest = loop[: match.start()] + loop[match.end() :]
        if not _KERNEL.sub("", _lines({name}, rest)):
            rest = re.sub(rf"^ *{name}\.reset\(\);\n", "", loop[match.end() :], flags=re.M)
            loop = f"{loop[: match.start()]}{pad}auto& {name} = {outer};\n{rest}"
    return loop


def _compare_counter_directly(loop: str) -> str:
    """Rewrite a loop to compare its counter in plain C++ instead of with a kernel and a call of torch."""
    condition, item, bound = (pattern.search(loop) for pattern in (_CONDITION, _COUNTER_READ, _BOUND))
    if not (condition and item and bound and item[2] == bound[1]):
        return loop
    outer = {m[2]: m[3] for m in _INPUT.finditer(loop)}
    counter = outer.get(item[1])
    if counter is None or counter != outer.get(condition["counter"]):
        return loop
    comparison = f"{condition['pad']}if (*(const int64_t*)({counter}.data_ptr()) >= {bound[2]}L) break;\n"
    read = f"{item[2]}_raw = *(const int64_t*)({counter}.data_ptr());"
    return loop.replace(condition[0], comparison).replace(item[0], read)


def _free_handles_once(code: str) -> str:
    """Add an owner to each temporary handle with more than one use. The owner frees the handle when its scope ends.

    Inductor makes the handle of a view before a loop, and writes `RAIIAtenTensorHandle(handle)` in the condition and in
    the body of the loop. Each of these expressions frees the handle.
    """
    for match in reversed([*_TEMPORARY.finditer(code)]):
        pad, name = match.groups()
        use, rest = f"RAIIAtenTensorHandle({name})", code[match.end() :]
        here, again, other = rest.partition(f"AtenTensorHandle {name};\n")  # another function may reuse the name
        if here.count(use) > 1:
            owner = f"{pad}RAIIAtenTensorHandle {name}_owner({name});\n"
            code = code[: match.end()] + owner + here.replace(use, f"{name}_owner") + again + other
    return code


def rewritten(code: str) -> str:
    """Fix the handles of views, rewrite the innermost loops of C++ code, and return the code.

    >>> rewritten("int x;")
    'int x;'
    """
    code = _free_handles_once(code)
    return _LOOP.sub(lambda match: _allocate_once(_read_inputs_in_place(_compare_counter_directly(match[0]))), code)


@contextmanager
def rewriting_loops() -> Iterator[None]:
    """Make inductor apply `rewritten` to all C++ code that it generates inside this context."""
    write = GraphLowering._compile_to_module_lines

    def write_rewritten(self: GraphLowering, wrapper_code: Any) -> Any:
        wrapper_code.value = rewritten(wrapper_code.value)
        return write(self, wrapper_code)

    GraphLowering._compile_to_module_lines = write_rewritten
    try:
        yield
    finally:
        GraphLowering._compile_to_module_lines = write
