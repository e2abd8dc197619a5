"""The replay buffer: n-step transitions, frame stacks and time limits equal a plain loop over the episodes."""

import re
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare
from support.checks import close
from support.graphs import traced_only
from support.kernel_calls import floats
from support.replay_history import History, stored
from tensordict import TensorDict

from ecrl.compile.jit import choose_form
from ecrl.kernels import (
    Replay,
    n_step_returns,
    replay_add,
    replay_count,
    replay_cut,
    replay_index,
    replay_init,
    replay_read,
    replay_stack,
    replay_start,
    replay_writes,
    scan,
)
from ecrl.pytree import flatten, mapped

T, F = True, False
NAN = torch.nan
GAMMA = 0.5


def empty(history: History, steps: int) -> TensorDict:
    return replay_init(history.take(1)[0].exclude("final_obs"), steps=steps, min_truncation_gap=history.gap)


def fresh(num_envs: int, gap: int, seed: int, steps: int, masks: bool = False) -> tuple[History, TensorDict]:
    """Episodes before the first step, and an empty ring for them."""
    return History(num_envs, gap, seed, masks), empty(History(num_envs, gap, seed, masks), steps)


def valid(history: History, steps: int, n: int, stack: int) -> list[tuple[int, int]]:
    """Steps and environments that can be drawn."""
    now = len(history.steps[0])
    oldest = 0 if now <= steps else now - steps + stack - 1
    return [(t, e) for t in range(oldest, now - n) for e in range(history.num_envs)]


def check(replay: Replay, history: History, n: int, stack: int) -> None:
    """Compare everything that can be drawn with the plain loop."""
    steps, num_envs = replay.ring["steps"].shape
    rows = valid(history, steps, n, stack)
    assert int(replay_count(replay, n=n, stack=stack)) == len(rows)
    if not rows:
        return
    if history.masks:
        every = torch.tensor([(t % steps) * num_envs + e for t, e in rows])
        mask = [history.steps[e][t].mask for t, e in rows]
        assert replay_read(replay, every, gamma=GAMMA, n=n)["mask"].tolist() == mask
        rows = [row for row, counts in zip(rows, mask, strict=True) if counts]
    index = torch.tensor([(t % steps) * num_envs + e for t, e in rows], dtype=torch.int64)
    batch, frames = replay_read(replay, index, gamma=GAMMA, n=n), None
    expected = [history.transition(e, t, n, GAMMA) for t, e in rows]
    assert batch["obs"].tolist() == [history.steps[e][t].obs for t, e in rows]
    assert torch.equal(batch["action"], 2 * batch["obs"].long())
    for i, name in enumerate(("reward", "discount", "next_obs", "terminated")):
        actual = [x for x, row in zip(batch[name].tolist(), expected, strict=True) if row[i] is not None]
        assert actual == [row[i] for row in expected if row[i] is not None], name
    if stack > 1:
        frames = replay_stack(replay, index, gamma=GAMMA, n=n, stack=stack)
        assert frames["obs"].tolist() == [history.frames(e, t, stack) for t, e in rows]
        following = [row for row, (*_, ended) in enumerate(expected) if not ended]
        assert torch.equal(frames["next_obs"][following, -1], batch["next_obs"][following])
        for row in following:
            t, e = rows[row]
            last = t
            while last < t + n - 1 and not history.steps[e][last].truncated and history.steps[e][last + 1].mask:
                last += 1
            assert frames["next_obs"][row, :-1].tolist() == history.frames(e, last, stack)[1:]


def run_and_check(sizes: dict[str, int], wraps: int, seed: int, masks: bool = False) -> None:
    """Fill a ring several times, in iterations of several turns. Check it after each turn."""
    steps, turns, length = sizes["steps"], sizes["turns"], sizes["length"]
    history, ring = fresh(sizes["num_envs"], sizes["gap"], seed, steps, masks)
    while (now := len(history.steps[0])) < wraps * steps:
        replay = replay_start(ring, torch.tensor(now), steps=turns * length)
        for _ in range(turns):
            replay = replay_add(replay, history.take(length))
            check(replay, history, sizes["n"], sizes["stack"])
        ring = stored(replay)


@st.composite
def all_sizes(draw):
    turns, length, n, stack = (draw(st.integers(1, 4)) for _ in range(4))
    steps = draw(st.integers(max(turns * length, n + stack), 20))
    return {
        "steps": steps,
        "turns": turns,
        "length": length,
        "n": n,
        "stack": stack,
        "num_envs": draw(st.integers(1, 3)),
        "gap": draw(st.integers(1, 25)),
    }


@given(sizes=all_sizes(), seed=st.integers(0, 2**20), masks=st.booleans())
def test_transitions_equal_a_plain_loop(sizes, seed, masks):
    run_and_check(sizes, 3, seed, masks)


@given(sizes=all_sizes(), seed=st.integers(0, 2**20))
def test_after_a_cut_no_transition_leads_to_an_unrelated_step(sizes, seed):
    """Steps that the buffer does not get are taken in between. The history marks the step before them."""
    steps, length = sizes["steps"], sizes["length"]
    history, ring = fresh(sizes["num_envs"], sizes["gap"], seed, steps, masks=True)
    while (now := len(history.steps[0])) < 3 * steps:
        replay = replay_start(ring, torch.tensor(now), steps=length)
        replay = replay_add(replay, history.take(length))
        check(replay, history, sizes["n"], sizes["stack"])
        ring = replay_cut(stored(replay), torch.tensor(now + length))
        history.skip(3, -(-steps // -(-steps // sizes["gap"])))


SIZES = {"steps": 7, "turns": 3, "length": 1, "n": 3, "stack": 2, "num_envs": 3, "gap": 2}


@pytest.mark.parametrize("wraps", [50, pytest.param(10_000, marks=pytest.mark.long)])
def test_transitions_equal_a_plain_loop_through_many_wrap_arounds(wraps):
    run_and_check(SIZES, wraps, 0)


# One environment, ring of 5 steps. A time limit ends the first episode at step 2, the second ends at step 4.
#   step        0   1   2   3   4   5   6
#   obs         0   1   2  10  11  20  21      final_obs of step 2: 3
#   reward      1   2   4   8  16  32  64
HAND = {
    "obs": [0.0, 1.0, 2.0, 10.0, 11.0, 20.0, 21.0],
    "reward": [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0],
    "terminated": [F, F, F, F, T, F, F],
    "truncated": [F, F, T, F, F, F, F],
    "final_obs": [NAN, NAN, 3.0, NAN, NAN, NAN, NAN],
}


def by_hand() -> Replay:
    """The buffer after step 6: steps 2 to 4 are in the ring, 5 and 6 in the block."""
    rows = TensorDict({name: torch.tensor(x).unsqueeze(1) for name, x in HAND.items()}, [7, 1])
    ring = replay_init(rows[0].exclude("final_obs"), steps=5, min_truncation_gap=3)
    ring = stored(replay_add(replay_start(ring, torch.tensor(0), steps=5), rows[:5]))
    return replay_add(replay_start(ring, torch.tensor(5), steps=2), rows[5:])


def test_by_hand(variant):
    batch = variant(replay_read)(by_hand(), torch.tensor([2, 3, 4]), gamma=0.5, n=2)
    # Step 2: 4, cut, bootstraps from 3. Step 3: 8 + 16 / 2, the end. Step 4: 16, the end.
    close(batch["reward"], [4.0, 16.0, 16.0])
    close(batch["discount"], [0.5, 0.0, 0.0])
    assert batch["terminated"].tolist() == [F, T, T]
    assert batch["next_obs"][0] == 3.0 and batch["obs"].tolist() == [2.0, 10.0, 11.0]
    assert batch.shape == (3,) and "truncated" not in batch
    new = variant(replay_read)(by_hand(), torch.tensor([[0]]), gamma=torch.tensor(0.5), n=1)
    close(new["reward"], [[32.0]])
    close(new["next_obs"], [[21.0]])


def test_stacks_by_hand(variant):
    batch = variant(replay_stack)(by_hand(), torch.tensor([4, 3]), gamma=0.5, n=1, stack=2)
    close(batch["obs"], [[10.0, 11.0], [10.0, 10.0]])
    close(batch["next_obs"][1], [10.0, 11.0])
    assert int(replay_count(by_hand(), n=1, stack=2)) == 3  # steps 3 to 5: step 2 lacks its frame before
    close(replay_stack(by_hand(), torch.tensor([2]), gamma=0.5, n=1, stack=1)["next_obs"], [[3.0]])


def test_the_places_of_new_rows_by_hand(variant):
    writes = variant(replay_writes)(by_hand())
    assert writes["steps", "index"].tolist() == [0, 1]
    close(writes["steps", "rows", "obs"], [[20.0], [21.0]])
    # Slots of 3 steps: steps 5 and 6 have the slots 1 and 2 of 3. No time limit fills them. Step 2 has slot 0.
    assert writes["final", "index"].tolist() == [1, 2] and writes["final", "rows", "step"].tolist() == [[-1], [-1]]
    assert by_hand().ring["final", "step"].tolist() == [[2], [-1], [-1]]


def turn(carry: Any, x: Any, ring: TensorDict, start: torch.Tensor) -> Any:
    """A turn of a loop: the ring is constant, and the block is in the carry."""
    (block, added), (rows, keys) = carry, x
    replay = replay_add(Replay(ring, block, start, added), rows)
    index = replay_index(replay, keys, n=2, stack=2)
    return (replay.block, replay.added), (index, replay_stack(replay, index, gamma=GAMMA, n=2, stack=2))


def iteration(scan: Any, ring: TensorDict, start: torch.Tensor, rows: TensorDict, keys: torch.Tensor) -> Any:
    """Run the turns of an iteration. Return the full buffer and the results of the turns."""
    turns, length = rows.shape[:2]
    replay = replay_start(ring, start, steps=turns * length)
    (block, added), out = scan(turn, (replay.block, replay.added), (rows, keys), ring, start)
    return replay_writes(Replay(ring, block, start, added)), out


def written(ring: TensorDict, writes: TensorDict) -> TensorDict:
    ring = ring.clone()
    for part, write in writes.items():
        for name, rows in write["rows"].items():
            ring[part, name].index_copy_(0, write["index"], rows)
    return ring


def in_iterations(run: Any, turns: int) -> tuple[TensorDict, list[torch.Tensor]]:
    """Store 24 turns of 2 steps in a ring of 16 steps, in iterations of so many turns."""
    history, ring = fresh(3, 4, 1, 16)
    every, results = history.take(48 + 4).unflatten(0, (26, 2)), []
    keys = torch.arange(26 * 8).reshape(26, 8)
    ring = written(ring, iteration(scan, ring, torch.tensor(0), every[:2], keys[:2])[0])
    for first in range(2, 26, turns):
        these = slice(first, first + turns)
        writes, out = run(ring, torch.tensor(2 * first), every[these], keys[these])
        ring = written(ring, writes)
        results.append(out)
    flat = [torch.cat(parts) for parts in zip(*([index, *out.values(True, True)] for index, out in results))]  # noqa: B905
    return ring, flat


def test_the_number_of_turns_in_an_iteration_changes_no_bit():
    first, *others = (in_iterations(lambda *args: iteration(scan, *args), turns) for turns in (1, 4, 8))
    for other in others:
        assert all(map(torch.equal, other[1], first[1]))
        assert all(map(torch.equal, flatten(other[0])[0], flatten(first[0])[0]))


def test_compiled_turns_equal_eager_ones():
    """The ring is a constant of the loop of the graph."""
    eager = in_iterations(lambda *args: iteration(scan, *args), 8)
    with traced_only() as graphs:
        form = choose_form("on", "cpu")
        jitted = form.jit(iteration, form.scan)
        compiled = in_iterations(jitted, 8)
    assert graphs == ["iteration"]
    assert all(map(torch.equal, compiled[1], eager[1]))


def test_draws_are_uniform_over_the_rows_that_can_be_drawn(variant):
    history, ring = fresh(2, 3, 0, 9)
    ring = stored(replay_add(replay_start(ring, torch.tensor(0), steps=9), history.take(9)))
    replay = replay_add(replay_start(ring, torch.tensor(9), steps=4), history.take(4))
    rows = valid(history, 9, 2, 3)  # steps 6 to 10
    index = variant(replay_index)(replay, torch.arange(20_000), n=2, stack=3)
    places = [(t % 9) * 2 + e for t, e in rows]
    counts = torch.bincount(index, minlength=18)
    assert counts.sum() == counts[places].sum() == 20_000
    assert chisquare(counts[places]).pvalue > 0.001
    assert torch.equal(replay_index(replay, torch.arange(6).reshape(2, 3), n=2, stack=3).flatten(), index[:6])


@pytest.mark.long
def test_draws_from_a_million_rows_are_uniform():
    flag = torch.zeros(10, dtype=torch.bool)
    rows = TensorDict({"obs": flag, "reward": flag, "terminated": flag, "truncated": flag}, [10])
    ring = replay_init(rows, steps=100_000, min_truncation_gap=1000)
    index = replay_index(replay_start(ring, torch.tensor(250_000), steps=1), torch.arange(10_000_000), n=1, stack=1)
    counts = torch.bincount(index, minlength=1_000_000)
    newest = (250_000 - 1) % 100_000
    assert counts[10 * newest : 10 * newest + 10].sum() == 0
    others = torch.cat((counts[: 10 * newest], counts[10 * newest + 10 :]))
    assert chisquare(others).pvalue > 0.001


def test_targets_equal_those_of_a_rollout():
    """A target from the buffer equals the result of `n_step_returns` along the steps."""
    history, ring = fresh(3, 2, 5, 24)
    rows = history.take(20)
    replay = replay_add(replay_start(ring, torch.tensor(0), steps=20), rows)
    value = lambda obs: (0.3 * obs).sin()  # noqa: E731
    fields = {name: rows[name].t()[:, :-1] for name in ("reward", "terminated", "truncated")}
    following = torch.where(fields["truncated"], rows["final_obs"].t()[:, :-1], rows["obs"].t()[:, 1:])
    done = fields["terminated"] | fields["truncated"]
    expected = n_step_returns(fields["reward"], value(following), fields["terminated"], done, gamma=0.9, n=4)
    index = torch.arange(16 * 3)
    batch = replay_read(replay, index, gamma=0.9, n=4)
    target = batch["reward"] + batch["discount"] * value(batch["next_obs"])
    close(target.reshape(16, 3), expected[:, :16].t())


def test_a_lost_final_observation_makes_the_discount_nan():
    """The environment truncates at the steps 3 and 4, although it declares a gap of 4. Both have one slot."""
    x, no = torch.arange(8.0).reshape(8, 1), torch.zeros(8, 1, dtype=torch.bool)
    cut = (x == 5) | (x == 4)
    rows = TensorDict({"obs": x, "reward": x, "terminated": no, "truncated": cut, "final_obs": 10 * x}, [8, 1])
    ring = replay_init(rows[0].exclude("final_obs"), steps=8, min_truncation_gap=4)
    for parts in ((8,), (5, 3)):  # both in one call, and in two calls
        replay = replay_start(ring, torch.tensor(0), steps=8)
        for part in rows.split(list(parts)):
            replay = replay_add(replay, part)
        for buffer in (replay, replay_start(stored(replay), torch.tensor(8), steps=1)):
            batch = replay_read(buffer, torch.tensor([2, 3, 4, 5]), gamma=0.5, n=2)
            close(batch["discount"], [0.25, NAN, NAN, 0.5])
            assert batch["next_obs"][3] == 50.0


def test_observations_keep_their_dtypes_and_may_be_a_tensordict(variant):
    images = (torch.arange(6 * 2 * 12) % 251).to(torch.uint8).reshape(6, 2, 3, 4)
    obs = TensorDict({"image": images, "deep": TensorDict({"x": floats(0, 6, 2)}, [6, 2])}, [6, 2])
    no = torch.zeros(6, 2, dtype=torch.bool)
    cut = no.clone()
    cut[1, 0] = True
    final = obs.clone()
    final["image"] = 255 - images
    rows = TensorDict({"obs": obs, "reward": floats(1, 6, 2), "terminated": no, "truncated": cut, "final_obs": final})
    rows.batch_size = [6, 2]
    ring = replay_init(rows[0].exclude("final_obs"), steps=6, min_truncation_gap=2)
    replay = replay_add(replay_start(ring, torch.tensor(0), steps=6), rows)
    batch = variant(replay_stack)(replay, torch.tensor([4, 2, 5]), gamma=0.5, n=1, stack=2)  # steps 2, 1 and 2
    assert batch["obs", "image"].dtype == batch["next_obs", "image"].dtype == torch.uint8
    assert torch.equal(
        batch["obs", "image"], torch.stack((images[[2, 0, 1], [0, 0, 1]], images[[2, 1, 2], [0, 0, 1]]), 1)
    )
    newest = torch.stack((images[3, 0], 255 - images[1, 0], images[3, 1]))
    assert torch.equal(batch["next_obs", "image"][:, 1], newest)
    assert batch["next_obs", "deep", "x"].shape == (3, 2)


def test_a_discount_per_environment_step(variant):
    """Each step is a chunk of `executed` steps of the environment."""
    x, no = torch.ones(5, 1), torch.zeros(5, 1, dtype=torch.bool)
    executed = torch.tensor([1, 3, 2, 1, 1]).unsqueeze(1)
    fields = {"obs": x, "reward": x, "terminated": no, "truncated": no, "executed": executed, "final_obs": x}
    rows = TensorDict(fields, [5, 1])
    ring = replay_init(rows[0].exclude("final_obs"), steps=5, min_truncation_gap=9)
    replay = replay_add(replay_start(ring, torch.tensor(0), steps=5), rows)
    batch = variant(replay_read)(replay, torch.tensor([0, 1]), gamma=0.5, n=3)
    close(batch["reward"], [1 + 0.5 + 0.5**4, 1 + 0.5**3 + 0.5**5])
    close(batch["discount"], [0.5**6, 0.5**6])


def test_rewards_beyond_the_end_or_with_weight_zero_are_not_read():
    rows = TensorDict({name: torch.tensor(x).unsqueeze(1) for name, x in HAND.items()}, [7, 1])
    rows["reward"][3:] = NAN
    ring = replay_init(rows[0].exclude("final_obs"), steps=9, min_truncation_gap=3)
    replay = replay_add(replay_start(ring, torch.tensor(0), steps=7), rows)
    close(replay_read(replay, torch.tensor([1, 2]), gamma=0.5, n=3)["reward"], [4.0, 4.0])
    rows["reward"][1:] = NAN
    replay = replay_add(replay_start(ring, torch.tensor(0), steps=7), rows)
    close(replay_read(replay, torch.tensor([0]), gamma=0.0, n=3)["reward"], [1.0])


@pytest.mark.parametrize(
    ("added", "values", "of_rows", "of_block"),
    [
        (0, [1.0, 2.0], [1.0, 1.0, 0.0], [0.0, 0.0]),
        (1, [7.0, 1.0], [1.0, 0.0, 0.0], [1.0, 0.0]),
        (2, [7.0, 8.0], [0.0, 0.0, 0.0], [1.0, 1.0]),
    ],
)
def test_rows_that_do_not_fit_are_not_stored_and_have_no_gradient(added, values, of_rows, of_block):
    flag, x = torch.zeros(1, dtype=torch.bool), torch.tensor([[1.0], [2.0], [3.0]], requires_grad=True)
    ring = replay_init(
        TensorDict({"obs": x[0], "reward": x[0], "terminated": flag, "truncated": flag}, [1]).detach(),
        steps=4,
        min_truncation_gap=9,
    )
    replay = replay_start(ring, torch.tensor(0), steps=2)
    old = torch.tensor([[7.0], [8.0]], requires_grad=True)
    block = replay.block.copy()
    block["steps"] = block["steps"].copy().set("reward", old)
    flags = torch.zeros(3, 1, dtype=torch.bool)
    rows = {"obs": x.detach(), "final_obs": x.detach(), "reward": x, "terminated": flags, "truncated": flags}
    after = replay_add(replay._replace(block=block, added=torch.tensor(added)), TensorDict(rows, [3, 1]))
    reward = after.block["steps", "reward"]
    assert reward.flatten().tolist() == values
    of = torch.autograd.grad(reward.sum(), (x, old))
    assert [g.flatten().tolist() for g in of] == [of_rows, of_block]


def test_gradcheck():
    replay = mapped(lambda x: x.double() if x.is_floating_point() else x, by_hand())

    def read(reward, gamma):
        ring = replay.ring.copy()
        ring["steps"] = ring["steps"].copy().set("reward", reward)
        batch = replay_read(replay._replace(ring=ring), torch.tensor([2, 3, 4]), gamma=gamma, n=2)
        return batch["reward"], batch["discount"]

    reward, gamma = replay.ring["steps", "reward"].clone(), torch.tensor(0.7, dtype=torch.float64)
    assert torch.autograd.gradcheck(read, [reward.requires_grad_(), gamma.requires_grad_()])


SPACES = {  # an image of Atari with a discrete action, HalfCheetah, CartPole
    "atari": ((84, 84), torch.uint8, (), torch.int64),
    "half_cheetah": ((17,), torch.float32, (6,), torch.float32),
    "cartpole": ((4,), torch.float32, (), torch.int64),
}


@pytest.mark.parametrize("name", SPACES)
def test_the_ring_takes_the_memory_of_one_copy_of_every_field(name):
    shape, dtype, action, action_dtype = SPACES[name]
    flag = torch.zeros(1, dtype=torch.bool)
    fields = {"obs": torch.zeros(1, *shape, dtype=dtype), "action": torch.zeros(1, *action, dtype=action_dtype)}
    rows = TensorDict(fields | {"reward": torch.zeros(1), "terminated": flag, "truncated": flag}, [1])
    ring = replay_init(rows, steps=500, min_truncation_gap=100)
    size = lambda tree: sum(x.untyped_storage().nbytes() for x in tree.values(True, True))  # noqa: E731
    one = sum(x.element_size() * x[0].numel() for x in rows.values(True, True))
    assert one * 500 <= size(ring["steps"]) <= 1.05 * one * 500
    assert ring["final", "obs"].shape == (6, 1, *shape) and size(ring["final"]) <= 6 * (one + 8)


@pytest.mark.parametrize("steps", [1, 2, 3, 7])
@pytest.mark.parametrize("gap", [1, 2, 3, 50])
def test_a_block_has_a_slot_for_every_truncation(steps, gap):
    flag = torch.ones(1, dtype=torch.bool)
    rows = TensorDict({"obs": flag, "reward": flag.float(), "terminated": ~flag, "truncated": flag}, [1])
    ring = replay_init(rows, steps=7, min_truncation_gap=gap)
    slots = len(ring["final"])
    assert slots == -(-7 // gap) + 1
    width = -(-7 // (slots - 1))
    for start in range(20):
        replay = replay_start(ring, torch.tensor(start), steps=steps)
        used = {t // width for t in range(start, start + steps)}
        places = replay_writes(replay)["final", "index"].tolist()
        assert len(set(places)) == len(places) and {slot % slots for slot in used} <= set(places)
        window = [t // width for t in range(start, start + 7)]
        assert all(later >= now for now, later in pairwise(window)) and max(window) - min(window) < slots


def message(text: str) -> Any:
    return pytest.raises(ValueError, match=f"^{re.escape(text)}")


def test_bad_arguments_are_named():
    history, ring = fresh(2, 3, 0, 6)
    example, rows = history.take(1)[0].exclude("final_obs"), history.take(2)
    replay = replay_start(ring, torch.tensor(0), steps=4)
    with message("rows lacks obs, truncated; it has action, reward, terminated"):
        replay_init(example.exclude("obs", "truncated"), steps=3, min_truncation_gap=1)
    with message("rows['truncated'] has dtype float32, expected bool"):
        replay_init(example.clone().set("truncated", example["truncated"].float()), steps=3, min_truncation_gap=1)
    with message("rows has batch shape [2, 2], expected [num_envs]"):
        replay_init(rows, steps=3, min_truncation_gap=1)
    with message("replay_init needs steps >= 2, got 1"):
        replay_init(example, steps=1, min_truncation_gap=1)
    with message("replay_init needs min_truncation_gap >= 1, got 0"):
        replay_init(example, steps=2, min_truncation_gap=0)
    with message("replay_start needs 1 <= steps <= 6, the length of the ring, got 7"):
        replay_start(ring, torch.tensor(0), steps=7)
    with message("start is torch.float32 [1], expected torch.int64 []"):
        replay_start(ring, torch.zeros(1), steps=2)
    with message("rows lacks final_obs"):
        replay_add(replay, rows.exclude("final_obs"))
    with message("rows has the fields ['obs', 'reward', 'terminated', 'truncated'], but the ring has ['action', 'obs'"):
        replay_add(replay, rows.exclude("action"))
    with message("rows has action torch.float32 [2, 2], expected torch.int64 [S, 2]"):
        replay_add(replay, rows.clone().set("action", rows["reward"]))
    with message("rows['final_obs'] has torch.float32 [2, 2, 1], expected torch.float32 [S, 2]"):
        replay_add(replay, rows.clone().set("final_obs", rows["obs"].unsqueeze(-1)))
    index = torch.tensor([0])
    for name, numbers in (("n", {"n": 0, "stack": 1}), ("stack", {"n": 1, "stack": 0})):
        with message(f"{name} is 0, expected at least 1"):
            replay_index(replay, index, **numbers)
    with message("n=3 and stack=4 need a ring of at least 7 steps, but it has 6"):
        replay_count(replay, n=3, stack=4)
    with message("n=6 and stack=1 need a ring of at least 7 steps"):
        replay_read(replay, index, gamma=0.5, n=6)
    with message("n=1 and stack=6 need a ring of at least 7 steps"):
        replay_stack(replay, index, gamma=0.5, n=1, stack=6)
    with message("index has dtype torch.float32, expected torch.int64"):
        replay_read(replay, index.float(), gamma=0.5, n=1)
