"""Prioritised replay: equal to a buffer of plain lists step by step, and drawn in proportion to the priorities."""

import re
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare
from support.checks import close
from support.plain_tree import PlainTree
from support.replay_history import History, stored
from tensordict import TensorDict

from ecrl import rng
from ecrl.kernels import (
    Replay,
    importance_weights,
    replay_add,
    replay_add_priority,
    replay_index,
    replay_init,
    replay_prioritized_index,
    replay_read,
    replay_set_priority,
    replay_start,
    tree_init,
    tree_set,
)

ONE = torch.ones((), dtype=torch.float64)


def start_of(history: History, steps: int) -> TensorDict:
    return replay_init(history.take(1)[0].exclude("final_obs"), steps=steps, min_truncation_gap=history.gap)


class PlainPrioritizedReplay:
    """Prioritised replay of single steps in NumPy, one environment step at a time.

    A row `(t, e)` has the place `(t % steps) * num_envs + e`. The newest step has priority 0 until its successor is
    there, and then the largest priority so far. Alpha is 1, because libraries round powers differently.
    """

    def __init__(self, steps: int, num_envs: int, eps: float):
        self.steps, self.num_envs, self.eps = steps, num_envs, eps
        self.tree, self.largest, self.now = PlainTree(64), 1.0, 0
        self.obs = np.zeros(steps * num_envs)

    def add(self, obs):
        for e, x in enumerate(obs):
            place = self.now % self.steps * self.num_envs + e
            self.obs[place] = x
            self.tree.set(place, 0.0)
            if self.now:
                self.tree.set((self.now - 1) % self.steps * self.num_envs + e, self.largest)
        self.now += 1

    def draw(self, uniform):
        total = self.tree.nodes[1]
        index = [self.tree.find((i + u) / len(uniform) * total) for i, u in enumerate(uniform)]
        return index, np.array([self.tree.nodes[64 + i] for i in index]) / total

    def weights(self, probability, beta):
        count = (min(self.now, self.steps) - 1) * self.num_envs
        weight = (count * probability) ** -beta
        return weight / weight.max()

    def update(self, index, td_error):
        for i, error in zip(index, td_error, strict=True):
            priority = abs(error) + self.eps
            self.tree.set(i, priority)
            self.largest = max(self.largest, priority)


@pytest.mark.parametrize("turns", [1, 3])
def test_every_step_equals_a_numpy_reference(turns):
    """Ten times around the ring, with a draw and an update in each step. The sums are equal to the last bit."""
    steps, eps = 13, 0.25
    history, ring = History(3, 4, 0), start_of(History(3, 4, 0), steps)
    plain, tree, largest = PlainPrioritizedReplay(steps, 3, eps), tree_init(39), ONE
    for start in range(0, 130, turns):
        replay = replay_start(ring, torch.tensor(start), steps=turns)
        for now in range(start, start + turns):
            rows = history.take(1)
            replay = replay_add(replay, rows)
            tree = replay_add_priority(replay, tree, largest, steps=1, n=1, stack=1)
            plain.add(rows["obs"][0].tolist())
            if not now:
                continue
            keys = torch.arange(8) + 1000 * now
            index, probability = replay_prioritized_index(tree, keys)
            places, expected = plain.draw(rng.uniform(keys, dtype=torch.float64).tolist())
            assert index.tolist() == places and probability.tolist() == expected.tolist()
            batch = replay_read(replay, index, gamma=0.9, n=1)
            assert batch["obs"].tolist() == plain.obs[places].tolist()
            close(importance_weights(probability, beta=0.4), plain.weights(expected, 0.4), tol=1e-12)
            error = (batch["obs"] * 7.0).sin() * (index + 1)
            tree, largest = replay_set_priority(tree, largest, index, error, index >= 0, alpha=1.0, eps=eps)
            plain.update(places, error.double().tolist())
            assert tree.tolist() == plain.tree.nodes
            assert float(largest) == plain.largest
        ring = stored(replay)


@given(
    length=st.integers(1, 4),
    n=st.integers(1, 4),
    stack=st.integers(1, 4),
    more=st.integers(0, 9),
    seed=st.integers(0, 2**20),
)
def test_the_rows_with_a_priority_are_those_that_can_be_drawn(length, n, stack, more, seed):
    """Every row that can be drawn has a priority. The others have none, from the first step on."""
    steps = length + n + stack + more
    history = History(2, 5, seed)
    ring, tree = start_of(history, steps), tree_init(2 * steps)
    for start in range(0, 3 * steps, length):
        largest = torch.tensor(1.0 + start).double()
        replay = replay_add(replay_start(ring, torch.tensor(start), steps=length), history.take(length))
        before, now = tree, start + length
        tree = replay_add_priority(replay, tree, largest, steps=length, n=n, stack=stack)
        oldest = 0 if now <= steps else now - steps + stack - 1
        places = {t % steps * 2 + e: t for t in range(oldest, now - n) for e in range(2)}
        leaves = tree[len(tree) // 2 :]
        assert {i for i, x in enumerate(leaves.tolist()) if x > 0.0} == set(places)
        for place, t in places.items():
            expected = largest if t >= now - length - n and t < now - n and t >= start - n else None
            assert leaves[place] == (before[len(tree) // 2 + place] if expected is None else expected)
        ring = stored(replay)


def test_adding_by_hand(variant):
    """A ring of 6 steps after step 8. The last 2 steps are new. The steps 3 to 8 are there, at 3, 4, 5, 0, 1, 2."""
    history = History(1, 3, 0)
    replay = Replay(start_of(history, 6), start_of(history, 2), torch.tensor(7), torch.tensor(2))
    before = tree_set(tree_init(6), torch.arange(6), torch.full((6,), 9.0))
    tree = variant(replay_add_priority)(replay, before, torch.tensor(5.0), steps=2, n=1, stack=2)
    # 3 lacks its frame before, 4 and 5 keep their priority, 6 and 7 are drawn from now on, 8 is the newest step.
    assert tree[8:].tolist() == [5.0, 5.0, 0.0, 0.0, 9.0, 9.0, 0.0, 0.0]


def test_drawing_by_hand(variant):
    tree = tree_set(tree_init(4), torch.arange(4), torch.tensor([1.0, 0.0, 2.0, 5.0]))
    index, probability = variant(replay_prioritized_index)(tree, torch.arange(4))  # masses in 0-2, 2-4, 4-6 and 6-8
    mass = (torch.arange(4) + rng.uniform(torch.arange(4), dtype=torch.float64)) * 2
    expected = [0 if x < 1 else 2 if x < 3 else 3 for x in mass.tolist()]
    assert index.tolist() == expected
    close(probability, [[1 / 8, 0.0, 2 / 8, 5 / 8][i] for i in expected])


def test_each_batch_of_keys_has_a_draw_from_each_part():
    tree = tree_set(tree_init(8), torch.arange(8), torch.ones(8))
    index, probability = replay_prioritized_index(tree, torch.arange(24).reshape(3, 8))
    assert index.tolist() == [[*range(8)]] * 3 and probability.tolist() == [[1 / 8] * 8] * 3


def test_priorities_by_hand(variant):
    tree, error = tree_init(4), torch.tensor([-3.0, 0.0, 15.0])
    new, largest = variant(replay_set_priority)(
        tree, 2.0 * ONE, torch.tensor([0, 1, 3]), error, error > -9.0, alpha=0.5, eps=torch.tensor(1.0)
    )
    assert new[4:].tolist() == [2.0, 1.0, 0.0, 4.0] and float(largest) == 4.0
    bad = torch.tensor([torch.nan, torch.inf, 0.0])
    args = tree, 2.0 * ONE, torch.tensor([0, 1, 3]), bad
    new, largest = variant(replay_set_priority)(*args, torch.ones(3) > 0, alpha=0.5, eps=1.0)
    assert new[4:].tolist() == [2.0, 2.0, 0.0, 1.0] and float(largest) == 2.0


def test_a_row_that_is_no_transition_is_not_drawn_again(variant):
    tree, mask = tree_set(tree_init(4), torch.arange(4), torch.ones(4)), torch.tensor([True, False])
    args = tree, ONE, torch.tensor([1, 2]), torch.tensor([0.5, torch.nan])
    new, largest = variant(replay_set_priority)(*args, mask, alpha=1.0, eps=0.0)
    assert new[4:].tolist() == [1.0, 0.5, 0.0, 1.0] and float(largest) == 1.0


def test_weights_by_hand(variant):
    probability = torch.tensor([[0.5, 0.125], [0.25, 0.125]])
    close(variant(importance_weights)(probability, beta=0.5), [[0.5, 1.0], [0.5**0.5, 1.0]])
    close(variant(importance_weights)(probability, beta=torch.tensor(0.0)), torch.ones(2, 2))
    p = probability.double().requires_grad_()
    beta = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    p = (p * torch.tensor([[1.0, 1.1], [1.2, 1.3]])).detach().requires_grad_()  # one smallest entry
    assert torch.autograd.gradcheck(lambda p, b: importance_weights(p, beta=b), [p, beta])


@pytest.mark.parametrize("size", [100, pytest.param(1_000_000, marks=pytest.mark.long)])
def test_frequencies_match_priorities(size):
    """Draws in equal parts of the sum vary less than independent ones, so the statistic is compared with both tails."""
    g = torch.Generator().manual_seed(3)
    priority = (0.2 + torch.rand(size, generator=g)) ** 0.6
    tree = tree_set(tree_init(size), torch.arange(size), priority)
    parts = [replay_prioritized_index(tree, torch.arange(size // 5) + i * size)[0] for i in range(100)]
    counts = torch.bincount(torch.cat(parts), minlength=size)
    expected = priority.double() / priority.double().sum() * size * 20
    assert chisquare(counts, expected).pvalue > 0.001
    assert (counts - expected).abs().max() < 6 * expected.max().sqrt() + 1


def test_without_errors_priorities_draw_as_uniform_indices_do():
    """With equal priorities every row that can be drawn has the same probability."""
    history = History(2, 5, 0)
    replay = replay_add(replay_start(start_of(history, 20), torch.tensor(0), steps=10), history.take(10))
    tree = replay_add_priority(replay, tree_init(40), ONE, steps=10, n=3, stack=1)
    index, probability = replay_prioritized_index(tree, torch.arange(500))
    assert set(index.tolist()) == set(replay_index(replay, torch.arange(500), n=3, stack=1).tolist()) == {*range(14)}
    close(probability, torch.full((500,), 1 / 14))
    close(importance_weights(probability, beta=1.0), torch.ones(500))


def test_no_rows_change_no_priority():
    tree, index = tree_set(tree_init(4), torch.tensor([1]), ONE[None]), torch.tensor([], dtype=torch.int64)
    new, largest = replay_set_priority(tree, 2.0 * ONE, index, index.float(), index > 0, alpha=0.5, eps=1.0)
    assert torch.equal(new, tree) and float(largest) == 2.0
    assert len(importance_weights(replay_prioritized_index(tree, index)[1], beta=0.5)) == 0


def message(text: str) -> Any:
    return pytest.raises(ValueError, match=f"^{re.escape(text)}")


def test_bad_arguments_are_named():
    history = History(2, 3, 0)
    replay = replay_start(start_of(history, 6), torch.tensor(0), steps=2)
    index, error = torch.tensor([0, 1]), torch.ones(2)
    with message("tree has 8 leaves, expected at least 12, one per row"):
        replay_add_priority(replay, tree_init(8), ONE, steps=1, n=1, stack=1)
    with message("steps=3, n=2 and stack=2 need a ring of at least 7 steps, but it has 6"):
        replay_add_priority(replay, tree_init(12), ONE, steps=3, n=2, stack=2)
    with message("steps is 0, expected at least 1"):
        replay_add_priority(replay, tree_init(12), ONE, steps=0, n=1, stack=1)
    with message("n is 0, expected at least 1"):
        replay_add_priority(replay, tree_init(12), ONE, steps=1, n=0, stack=1)
    with message("keys has shape [], expected [*, B]"):
        replay_prioritized_index(tree_init(4), index[0])
    with message("td_error has shape [1], expected [2], the shape of index"):
        replay_set_priority(tree_init(4), ONE, index, error[:1], error > 0, alpha=0.5, eps=0.1)
    with message("mask has shape [1], expected [2], the shape of index"):
        replay_set_priority(tree_init(4), ONE, index, error, error[:1] > 0, alpha=0.5, eps=0.1)
    with message("mask has dtype float32, expected bool"):
        replay_set_priority(tree_init(4), ONE, index, error, error, alpha=0.5, eps=0.1)
