"""An algorithm reads top to bottom: its iteration uses few names from other files of ecrl.

The names are counted in the functions of one iteration. The Config, `init`, checks and the registration do not count.
What the registration binds for a run does: the function that collects, and a loss among the choices.
"""

import ast
import inspect
from importlib import import_module
from typing import Any

import pytest

from ecrl.algorithms import make_algorithm
from ecrl.algorithms.core import OnPolicy

NOT_IN_AN_ITERATION = ("init", "check_", "groups")


def imported(tree: ast.Module) -> set[str]:
    """Return the names that a module imports from ecrl."""
    from_ecrl = [node for node in tree.body if isinstance(node, ast.ImportFrom) and str(node.module).startswith("ecrl")]
    return {alias.asname or alias.name for node in from_ecrl for alias in node.names}


def of_an_iteration(tree: ast.Module) -> list[ast.FunctionDef]:
    """Return the functions of one iteration: all but `init`, checks and those that are registered."""
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef) and not node.decorator_list]
    return [node for node in functions if not node.name.startswith(NOT_IN_AN_ITERATION)]


def looked_up(name: str, **cfg: Any) -> set[str]:
    """Return the names of ecrl that a reader looks up to follow one iteration of an algorithm."""
    module = import_module(f"ecrl.algorithms.{name}")
    tree = ast.parse(inspect.getsource(module))
    bodies = [node for function in of_an_iteration(tree) for line in function.body for node in ast.walk(line)]
    names = {node.id for node in bodies if isinstance(node, ast.Name)} & imported(tree)
    algorithm = make_algorithm({"name": name, "cfg": cfg})
    iterate: Any = algorithm.iterate
    assert isinstance(iterate, OnPolicy)
    bound = [iterate.collect, iterate.update, *algorithm.choices]
    return names | {x.__name__ for x in bound if inspect.isfunction(x) and x.__module__ != module.__name__}


@pytest.mark.parametrize("cfg", [{}, {"clip_vloss": True, "normalize_advantage": "minibatch"}])
def test_an_iteration_of_ppo_uses_five_names(cfg):
    loss = "ppo_loss_clipped_value" if cfg else "ppo_loss"
    assert looked_up("ppo", **cfg) == {"collect", "compute_gae", "standardize_over_ranks", loss, "minibatch_epochs"}


def test_an_iteration_of_grpo_uses_seven_names():
    collecting = {"collect", "first_episode_mask"}
    learning = {"grpo_advantages", "grpo_loss", "minibatch_epochs", "reference_log_prob", "refreshed_reference"}
    assert looked_up("grpo") == collecting | learning
