"""Instructions in words: an event that draws an instruction, and an observation term with the ids of its words."""

from typing import Annotated, cast

import torch
from pydantic import Field
from tensordict import TensorDict
from torch import Tensor

from ecrl import rng
from ecrl.config.model import ConfigModel, Count
from ecrl.envs.events import Apply
from ecrl.envs.mujoco.physics.simulation import Simulation
from ecrl.envs.mujoco.terms.term import IntegerTerm, new_entry
from ecrl.envs.vocabulary import encode, read_vocabulary, vocabulary_size
from ecrl.errors import ConfigError
from ecrl.registry import register_event, register_observation

GOAL = "{goal}"
"""Placeholder in a phrasing. The word of the goal replaces the placeholder."""

Phrasings = Annotated[tuple[str, ...], Field(strict=False, min_length=1)]


class RandomizeInstructionConfig(ConfigModel):
    """Settings of `randomize_instruction`: the name under which the event stores its draws."""

    store_key: str = Field("instruction", pattern=r"^[\w-]+$", description="name by which terms refer to the draws")

    @property
    def stores(self) -> dict[str, tuple[float, ...]]:
        """Dictionary that maps the name of the draws to their initial values."""
        return {self.store_key: (0.0, 0.0)}


@register_event("randomize_instruction")
def randomize_instruction(cfg: RandomizeInstructionConfig, sim: Simulation) -> Apply:
    """Draw a goal and a phrasing, and store the two draws, `[*B, 2]`, in the state.

        draws = u, v;  goal = floor(u n);  phrasing = floor(v m);    u, v uniform in [0, 1)

    The task has n goals and m phrasings. Environments with equal keys, as in a GRPO group, get equal instructions.
    """

    def apply(state: TensorDict, keys: Tensor) -> TensorDict:
        if "targets" not in state or cfg.store_key not in cast(TensorDict, state["targets"]):
            fault = f"params.store_key: the task has no instruction {cfg.store_key!r}"
            raise ConfigError(f"{fault}; an event randomize_instruction under env.cfg.events adds one")
        targets = cast(TensorDict, state["targets"]).copy()
        return state.copy().set("targets", targets.set(cfg.store_key, rng.uniform(keys, (2,))))

    return apply


class InstructionConfig(ConfigModel):
    """Settings of `instruction`: the texts, and the vocabulary that converts words to ids."""

    phrasings: Phrasings = Field(
        description=f'texts, such as "reach the {GOAL} block"; the word of the goal replaces {GOAL}'
    )
    goals: Annotated[tuple[str, ...], Field(strict=False)] = Field(
        (), description=f"words of the goals; empty if no phrasing has {GOAL}"
    )
    tokenizer: str | None = Field(
        None, description="JSON file that maps words to ids; by default, the vocabulary of ecrl's own tasks"
    )
    max_words: Count = Field(6, description="number of observed ids; shorter instructions end with zeros")
    swap: bool = Field(
        False, description="if true, the instruction names the next goal of the list instead of the task's goal"
    )
    instruction_key: str = Field("instruction", description="store_key of the event that draws the instruction")


def _drawn(state: TensorDict, key: str, position: int, count: int) -> Tensor:
    """Convert a draw of `randomize_instruction` to an index from 0 to count - 1, int64 `[*B]`.

    `position` selects the draw: 0 for the draw of the goal, 1 for the draw of the phrasing.
    """
    if "targets" not in state or key not in cast(TensorDict, state["targets"]):
        raise ConfigError(f"no instruction {key!r}; add an event randomize_instruction with this store_key")
    draws = cast(Tensor, state["targets", key])
    return (draws[..., position] * count).floor().clamp(0, count - 1).to(torch.int64)


def goal_index(state: TensorDict, key: str, count: int) -> Tensor:
    """Return the index of the goal in each environment, int64 `[*B]`.

    Args:
        state: the state of a task.
        key: the `store_key` of the event `randomize_instruction`.
        count: number of goals.
    Raises: ConfigError if no event stores the instruction.
    """
    return _drawn(state, key, 0, count)


def instruction_table(cfg: InstructionConfig) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Return the ids of every instruction as nested tuples `[phrasings, goals, max_words]`.

    If there are no goals, the second axis has size 1.

    Raises: ConfigError if a word is unknown, or if an instruction is too long. ConfigError is also raised if there are
        goals but a phrasing lacks `GOAL`, or if a phrasing contains `GOAL` but there are no goals.
    """
    words = read_vocabulary(cfg.tokenizer)
    for phrasing in cfg.phrasings:
        if cfg.goals and GOAL not in phrasing:
            raise ConfigError(f"phrasings: {phrasing!r} does not name the goal; add {GOAL}")
        if not cfg.goals and GOAL in phrasing:
            raise ConfigError(f"phrasings: {phrasing!r} has {GOAL}, but there are no goals; give goals")
    return tuple(
        tuple(encode(phrasing.replace(GOAL, goal), words, cfg.max_words) for goal in cfg.goals or ("",))
        for phrasing in cfg.phrasings
    )


def instruction_term(cfg: InstructionConfig) -> IntegerTerm:
    """Return the observation term `instruction`, which observes the word ids of the drawn instruction.

    Raises: ConfigError if the settings are invalid, or if `swap` is set and there are fewer than two goals.
    """
    table, count = torch.tensor(instruction_table(cfg)), max(1, len(cfg.goals))
    if cfg.swap and count == 1:
        raise ConfigError("swap: there is no other goal; give two goals or more")

    def observe(state: TensorDict, value: Tensor | None) -> Tensor:
        goal = (goal_index(state, cfg.instruction_key, count) + cfg.swap) % count
        phrasing = _drawn(state, cfg.instruction_key, 1, len(cfg.phrasings))
        return new_entry(value, table.to(goal.device)[phrasing, goal])

    return IntegerTerm(observe, (vocabulary_size(read_vocabulary(cfg.tokenizer)),) * cfg.max_words)


@register_observation("instruction")
def instruction(cfg: InstructionConfig, sim: Simulation) -> IntegerTerm:
    """Observe the instruction as the ids of its words, int64 `[*B, max_words]`. Use this term in mode add.

    An event `randomize_instruction` draws the goal and the phrasing of each episode. With this term, the observation of
    the environment is a Dict, because ids cannot be part of a float vector.

    Raises: ConfigError if a word is not in the vocabulary, or if no event draws the instruction.
    """
    return instruction_term(cfg)
