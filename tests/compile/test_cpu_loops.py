"""Compiled loops allocate their inner buffers once, and return the numbers of a plain loop."""

import re

import pytest
import torch
from torch._inductor import config

from ecrl.compile import cpu_loops as cpp_loops
from ecrl.compile.cpu_loops import rewritten
from ecrl.compile.jit import choose_form
from ecrl.kernels import scan


def _handle(name, call):
    return (
        f"        AtenTensorHandle {name}_handle;\n"
        f"        AOTI_TORCH_ERROR_CODE_CHECK({call}, &{name}_handle));\n"
        f"        RAIIAtenTensorHandle {name}({name}_handle);\n"
    )


def allocated(name):
    return _handle(name, "aoti_torch_empty_strided(1, size, stride, dtype, device, 0")


def borrowed(name, outer):
    return _handle(name, f"aoti_torch_assign_tensors_out({outer}")


def viewed(name, of):
    view = f"wrap_with_raii_handle_if_needed(reinterpret_tensor_wrapper({of}, 1, a, b, 0L))"
    return f"        auto {name} = {view};  // alias\n"


def loop(*lines):
    return "".join(("    while (1) {\n", *(x if x.endswith("\n") else f"        {x}\n" for x in lines), "    }\n"))


COUNTED = (
    "// subgraph: while_loop_cond_graph_0",
    borrowed("cond_arg", "count"),
    allocated("cond_buf"),
    "cpp_fused_lt_0((const int64_t*)(cond_arg.data_ptr()), (bool*)(cond_buf.data_ptr()));",
    "cond_arg.reset();",
    "result = std::move(cond_buf);",
    "AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_item_bool(result, &result_scalar));",
    "if (!result_scalar) break;",
    "// subgraph: while_loop_body_graph_0",
    borrowed("arg", "count"),
    "AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_item_int64(arg, &u0_raw));",
    'if (!(u0 < 16L)) { throw std::runtime_error("..."); }',
)


def test_what_only_kernels_and_products_see_is_reused():
    text = rewritten(
        loop(
            allocated("x"),
            viewed("part", "x"),
            "cpp_fused_add_1((float*)(part.data_ptr()));",
            "auto y = std::move(x);  // reuse",
            "AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_cpu_mm_out(out, y, w));",
            "y.reset();",
        )
    )
    assert text.startswith("{\nRAIIAtenTensorHandle x_reused;\nRAIIAtenTensorHandle part_reused;\n    while (1) {\n")
    assert text.index("if (!x_reused.get())") < text.index("empty_strided") < text.index("x_reused = RAII")
    assert "reinterpret_tensor_wrapper(x_reused, 1, a, b, 0L)" in text


@pytest.mark.parametrize(
    "line",
    [
        "carry = std::move(x);",
        "carry = std::move(part);",
        "AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_assign_tensors_out(x, &inner_handle));",
        "AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_cpu_sort(x, 0, 0, &sorted));",
        "auto again = wrap_with_raii_handle_if_needed(reinterpret_tensor_wrapper(x, 1, a, b, 0L));",
    ],
)
def test_what_leaves_the_turn_is_not(line):
    text = loop(allocated("x"), viewed("part", "x"), "cpp_fused_add_1((float*)(x.data_ptr()));", line)
    assert "_reused" not in rewritten(text)


def test_what_is_only_read_is_read_in_place_and_what_is_handed_on_is_not():
    text = rewritten(
        loop(
            borrowed("read", "outer"),
            borrowed("passed", "other"),
            "cpp_fused_add_1((float*)(read.data_ptr()));",
            "read.reset();",
            "other.reset();",
            "other = std::move(passed);",
        )
    )
    assert "auto& read = outer;" in text and "read.reset" not in text
    assert "AtenTensorHandle passed_handle;" in text and "auto& passed" not in text


def test_a_loop_of_known_length_is_asked_for_its_counter():
    text = rewritten(loop(*COUNTED))
    assert "        if (*(const int64_t*)(count.data_ptr()) >= 16L) break;\n" in text
    assert "u0_raw = *(const int64_t*)(count.data_ptr());" in text
    assert "cond" not in text and "item" not in text


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("item_int64(arg,", "item_int64(other,"),  # another number is asked for
        ("u0 < 16L", "u1 < 16L"),  # the bound of another buffer
        ("cpp_fused_lt_0(", "cpp_fused_lt_0((float*)(x.data_ptr()), "),  # a question of more than the counter
        ("u0 < 16L", "u0 < length"),  # of unknown length
    ],
)
def test_other_questions_stay(old, new):
    text = loop(*COUNTED)
    assert old in text
    assert "result_scalar" in rewritten(text.replace(old, new))


def test_only_the_innermost_loop_changes_and_other_code_does_not():
    outer = loop(allocated("x"), "cpp_fused_add_1((float*)(x.data_ptr()));", "INNER\n")
    inner = loop(allocated("z"), "cpp_fused_add_2((float*)(z.data_ptr()));").replace("    ", "            ", 1)
    inner = re.sub(r"^    \}", "            }", inner, flags=re.M)
    text = rewritten(outer.replace("INNER\n", inner))
    assert "z_reused" in text and "x_reused" not in text
    assert rewritten(allocated("x") + "cpp_fused_add_1((float*)(x.data_ptr()));\n") == allocated("x") + (
        "cpp_fused_add_1((float*)(x.data_ptr()));\n"
    )


@pytest.fixture
def written(monkeypatch):
    """Collect the rewritten C++ code."""
    codes, rewrite = [], cpp_loops.rewritten
    monkeypatch.setattr(cpp_loops, "rewritten", lambda code: codes.append(rewrite(code)) or codes[-1])
    return codes


def _layers(carry, x, weight):
    hidden = torch.tanh(carry @ weight)
    after = hidden.cumsum(-1) @ weight + x
    return after, (hidden.sum(-1), after.amax(-1))


def _run(loop, start, xs, weight):
    return loop(_layers, start, xs, weight)


@pytest.mark.slow
def test_a_compiled_loop_keeps_nothing_that_it_hands_out(written):
    run = choose_form("on", "cpu").jit(_run, choose_form("on", "cpu").scan)
    weight = torch.linspace(-1.0, 1.0, 32 * 32).sin().reshape(32, 32)
    cases = [(torch.full((16, 32), shift), torch.arange(7.0).reshape(7, 1, 1) + shift, weight) for shift in (0.1, 0.7)]
    with config.patch(force_disable_caches=True):
        outs = [run(*case) for case in cases]  # the second call may not change results of the first
    for out, case in zip(outs, cases, strict=True):
        torch.testing.assert_close(out, _run(scan, *case), rtol=1e-5, atol=1e-5)
    (body,) = re.findall(r"^    while \(1\) \{\n.*?^    \}\n", written[0], re.M | re.S)
    assert body.count("_reused.get()") >= 3 and "item_" not in body and "cond_graph" not in body
    assert len(re.findall("empty_strided", body)) - body.count("_new;") <= 2  # the counter and the carry


def test_a_handle_is_freed_once():
    made = (
        "    AtenTensorHandle tmp_x_0;\n    AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_new_tensor_handle(x, &tmp_x_0));\n"
    )
    use = "        AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_assign_tensors_out(RAIIAtenTensorHandle(tmp_x_0), &y));\n"
    assert rewritten(made + use) == made + use
    text = rewritten(made + use + use)
    owner = "    RAIIAtenTensorHandle tmp_x_0_owner(tmp_x_0);\n"
    mended = made + owner + 2 * use.replace("RAIIAtenTensorHandle(tmp_x_0)", "tmp_x_0_owner")
    assert text == mended
    assert rewritten(made + use + use + made + use) == mended + made + use  # two functions with equal names
    assert rewritten(made + use + made + use + use) == made + use + mended


def _view(loop, start, xs, weight):
    """The view has the layout of `weight`, so inductor writes no view, but another handle."""
    return loop(_layers, start, xs, weight.unsqueeze(1).squeeze(1))


@pytest.mark.slow
def test_a_compiled_loop_frees_the_handle_of_a_view_once(written):
    """Otherwise the memory of `weight` is freed while it is in use, and a later call ends the process."""
    run = choose_form("on", "cpu").jit(_view, choose_form("on", "cpu").scan)
    weight = torch.linspace(-1.0, 1.0, 32 * 32).sin().reshape(32, 32)
    case = (torch.full((16, 32), 0.1), torch.arange(7.0).reshape(7, 1, 1), weight)
    with config.patch(force_disable_caches=True):
        outs = [run(*case)]
    temporary = set(re.findall(r"RAIIAtenTensorHandle(?: \w+)?\((tmp_\w+)\)", written[0]))
    assert len(temporary) == 1, "inductor makes no such handle, so this test needs another view"
    assert len(re.findall(rf"RAIIAtenTensorHandle(?: \w+)?\({temporary.pop()}\)", written[0])) == 1
    outs += [run(*case) for _ in range(20)]
    for out in outs:
        torch.testing.assert_close(out, _view(scan, *case), rtol=1e-5, atol=1e-5)
