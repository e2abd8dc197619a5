"""Rewrite the loops in the C++ that inductor writes around kernels: allocate their own memory once, not in each turn.

A turn of a loop over small tensors mostly allocates memory, makes views and handles, and checks if it was the last one.
With four environments this takes more than a third of a rollout. The text changes only if it matches the expected
patterns. If a version of inductor writes other text, the loop stays as it is.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch._inductor.graph import GraphLowering

_LOOP = re.compile(r"^( *)while \(1\) \{\n(?:(?!.*while \(1\)).*\n)*?\1\}\n", re.M)  # without others inside of it
_ALLOCATED = re.compile(
    r"^( *)AtenTensorHandle (\w+)_handle;\n"
    r" *AOTI_TORCH_ERROR_CODE_CHECK\((aoti_torch_empty_strided\(.*), &\2_handle\)\);\n"
    r" *RAIIAtenTensorHandle \2\(\2_handle\);\n",
    re.M,
)
_GIVEN = re.compile(
    r"^( *)AtenTensorHandle (\w+)_handle;\n"
    r" *AOTI_TORCH_ERROR_CODE_CHECK\(aoti_torch_assign_tensors_out\((\w+), &\2_handle\)\);\n"
    r" *RAIIAtenTensorHandle \2\(\2_handle\);\n",
    re.M,
)
_VIEW = re.compile(
    r"^( *)auto (\w+) = wrap_with_raii_handle_if_needed\((reinterpret_tensor_wrapper\((\w+), .*)\);  // alias\n", re.M
)
_MOVED = re.compile(r"^ *auto (\w+) = std::move\((\w+)\);  // reuse\n", re.M)
_READ = re.compile(r"^ *(?:cpp_fused_\w+|AOTI_TORCH_ERROR_CODE_CHECK\(aoti_torch_cpu_(?:add|b)?mm_out)\(.*\n", re.M)
_ITEM = re.compile(r"AOTI_TORCH_ERROR_CODE_CHECK\(aoti_torch_item_int64\((\w+), &(\w+)_raw\)\);")
_BOUND = re.compile(r"if \(!\((u\d+) < (\d+)L\)\)")
_QUESTION = re.compile(  # of one kernel, that compares a number
    r"^ *// subgraph: while_loop_cond_graph\w*\n"
    r"(?P<before>(?:(?!.*cpp_fused).*\n)*)"
    r" *cpp_fused_\w+\(\(const int64_t\*\)\((?P<counter>\w+)\.data_ptr\(\)\), \(bool\*\)\(\w+\.data_ptr\(\)\)\);\n"
    r"(?:(?!.*cpp_fused).*\n)*?"
    r"(?P<pad> *)if \(!\w+_scalar\) break;\n",
    re.M,
)


def _lines(names: set[str], body: str) -> str:
    """Return the lines that contain one of the names, except lines that only free it."""
    word, freed = re.compile(rf"\b({'|'.join(names)})\b"), re.compile(rf" *({'|'.join(names)})\.reset\(\);\n")
    return "".join(x for x in body.splitlines(keepends=True) if word.search(x) and not freed.fullmatch(x))


def _names_of(name: str, body: str) -> set[str]:
    """Return every C++ variable that refers to the memory of `name`, as a view or after a move."""
    names, known = {name}, 0
    pairs = [(m[2], m[4]) for m in _VIEW.finditer(body)] + [m.groups() for m in _MOVED.finditer(body)]
    while known < len(names):
        known = len(names)
        names |= {new for new, old in pairs if old in names}
    return names


def _stays(name: str, body: str) -> bool:
    """Return True if only kernels and matrix products use this memory."""
    seen = _lines(_names_of(name, body), body)
    return not _READ.sub("", _MOVED.sub("", _VIEW.sub("", seen)))


def _kept(pad: str, name: str, made: str) -> str:
    """Lines that make a tensor in the first turn and take it up again in every other."""
    return (
        f"{pad}if (!{name}_kept.get()) {{\n{made}{pad}}}\n{pad}AtenTensorHandle {name}_handle;\n"
        f"{pad}AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_assign_tensors_out({name}_kept, &{name}_handle));\n"
        f"{pad}RAIIAtenTensorHandle {name}({name}_handle);\n"
    )


def _allocated_once(loop: str) -> str:
    bare = _ALLOCATED.sub("", loop)
    kept = [m[2] for m in _ALLOCATED.finditer(loop) if _stays(m[2], bare)]

    def allocated(match: re.Match[str]) -> str:
        pad, name, call = match.groups()
        if name not in kept:
            return match[0]
        new = f"{pad}    AtenTensorHandle {name}_new;\n{pad}    AOTI_TORCH_ERROR_CODE_CHECK({call}, &{name}_new));\n"
        return _kept(pad, name, f"{new}{pad}    {name}_kept = RAIIAtenTensorHandle({name}_new);\n")

    def viewed(match: re.Match[str]) -> str:
        pad, name, call, of = match.groups()
        if of not in kept:
            return match[0]
        kept.append(name)
        call = call.replace(f"({of},", f"({of}_kept,", 1)
        return _kept(pad, name, f"{pad}    {name}_kept = wrap_with_raii_handle_if_needed({call});\n")

    loop = _VIEW.sub(viewed, _ALLOCATED.sub(allocated, loop))
    return "".join(("{\n", *(f"RAIIAtenTensorHandle {name}_kept;\n" for name in kept), loop, "}\n"))


def _given_by_reference(loop: str) -> str:
    """Let a turn read an input in place if it only reads it."""
    for match in reversed([*_GIVEN.finditer(loop)]):
        pad, name, outer = match.groups()
        rest = loop[: match.start()] + loop[match.end() :]
        if not _READ.sub("", _lines({name}, rest)):
            rest = re.sub(rf"^ *{name}\.reset\(\);\n", "", loop[match.end() :], flags=re.M)
            loop = f"{loop[: match.start()]}{pad}auto& {name} = {outer};\n{rest}"
    return loop


def _counted(loop: str) -> str:
    """Compare the counter with the length of the loop without a kernel, and read the counter without torch."""
    question, item, bound = (pattern.search(loop) for pattern in (_QUESTION, _ITEM, _BOUND))
    if not (question and item and bound and item[2] == bound[1]):
        return loop
    outer = {m[2]: m[3] for m in _GIVEN.finditer(loop)}
    counter = outer.get(item[1])
    if counter is None or counter != outer.get(question["counter"]):
        return loop
    asked = f"{question['pad']}if (*(const int64_t*)({counter}.data_ptr()) >= {bound[2]}L) break;\n"
    read = f"{item[2]}_raw = *(const int64_t*)({counter}.data_ptr());"
    return loop.replace(question[0], asked).replace(item[0], read)


def rewritten(code: str) -> str:
    """The C++ with its innermost loops rewritten.

    >>> rewritten("int x;")
    'int x;'
    """
    return _LOOP.sub(lambda match: _allocated_once(_given_by_reference(_counted(match[0]))), code)


@contextmanager
def lean_loops() -> Iterator[None]:
    """Inductor writes its loops so while this lasts."""
    write = GraphLowering._compile_to_module_lines

    def rewriting(self: GraphLowering, wrapper_code: Any) -> Any:
        wrapper_code.value = rewritten(wrapper_code.value)
        return write(self, wrapper_code)

    GraphLowering._compile_to_module_lines = rewriting
    try:
        yield
    finally:
        GraphLowering._compile_to_module_lines = write
