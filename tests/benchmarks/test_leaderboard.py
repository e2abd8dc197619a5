"""The leaderboard: statistics over seeds by hand, lines and page from files, and the tables that it reads."""

from itertools import product
from math import inf

import pytest
from support.published import lines_by_entry

from benchmarks import clones, leaderboard
from benchmarks.leaderboard import cells, summary, text
from benchmarks.other_libraries.zoo import ZOO
from benchmarks.pairs import ROOT
from benchmarks.records import Entry, Standing, entries, standing
from benchmarks.tasks import CONFIGS, EPISODES, MEMORY, MINATAR_PPO, TASKS, without_memory
from ecrl import init_state
from ecrl.config import load_config

pytest.importorskip("matplotlib")


def record(scores, minutes=(1.0, 2.0), score="return", **more):
    """Two evaluations, after 1000 and 2000 env steps."""
    rows = [
        {"steps": 1000 * i, "seconds": 60.0 * at, "episodes": 20, score: value}
        for i, (at, value) in enumerate(zip(minutes, scores, strict=True), 1)
    ]
    about = {"machine": {"cpu": "a CPU"}, "versions": {"torch": "2.13.0"}, "commit": "0123456789+"}
    return {"curve": rows, "train_s": 60.0, **about, **more}


def entry(config="cartpole_ppo", library="ecrl"):
    return Entry(TASKS[config], library, CONFIGS / f"{config}.json", {}, "hash")


FIVE = {
    0: record((475.0, 500.0)),
    1: record((480.0, 450.0)),
    2: record((100.0, 490.0), (1.0, 3.0)),
    3: record((100.0, 480.0), (1.0, 4.0)),
    4: record((100.0, 200.0)),
}


def test_a_summary_by_hand():
    actual = summary(entry(), FIVE)
    assert actual["mean"] == 424.0  # (500 + 450 + 490 + 480 + 200) / 5
    assert actual["iqm"] == pytest.approx((450 + 480 + 490) / 3)
    assert actual["reached"] == 4  # seed 1 came there and fell back
    assert actual["steps"] == 2000 and actual["minutes"] == 3.0  # medians of 1000 1000 2000 2000 inf and 1 1 3 4 inf
    # All 5 ** 5 resamples of the last scores, each without its least and its greatest; 2.5 % of them at each end.
    last = [500.0, 450.0, 490.0, 480.0, 200.0]
    means = sorted(sum(sorted(resample)[1:4]) / 3 for resample in product(last, repeat=5))
    assert actual["low"] == pytest.approx(means[78]) == pytest.approx((200 + 200 + 450) / 3)
    assert actual["high"] == pytest.approx(means[-79]) == pytest.approx((490 + 500 + 500) / 3)


def test_a_threshold_that_most_seeds_miss_has_no_median_and_too_few_seeds_no_interval():
    actual = summary(entry(), {0: record((1.0, 2.0)), 1: record((1.0, 480.0))})
    assert (actual["reached"], actual["steps"], actual["minutes"], actual["low"]) == (1, inf, inf, None)
    actual = summary(entry("push_cube_grpo"), {0: record((0.5, 0.9), score="success")})
    assert actual == {"mean": 0.9, "iqm": 0.9, "low": None, "high": None}


def test_a_line_of_the_table():
    head = ["`cartpole_ppo`", "ecrl", "2,000"]
    assert cells(entry(), Standing(FIVE, 0)) == [
        *head, "5 of 10", "return", "424", "473", "283 to 497", "475", "4 of 5", "2,000", "3.0",
    ]  # fmt: skip
    one = {0: record((1.0, 2.0))}
    assert cells(entry(), Standing(one, 2)) == [
        *head,
        "1 of 10, 2 stale",
        "return",
        "2",
        "2",
        "",
        "475",
        "0 of 1",
        "",
        "",
    ]
    assert cells(entry(), Standing(one, 0))[3] == "1 of 10" and cells(entry(), Standing({}, 0))[2] == "*not measured*"
    line = cells(entry("push_cube_grpo"), Standing({0: record((0.5, 0.92), score="success")}, 0))
    assert line == ["`push_cube_grpo`", "ecrl", "2,000", "1 of 10", "success", "0.92", "0.92", *[""] * 5]


def test_a_failed_seed_is_listed_and_did_not_reach_the_threshold():
    three = {seed: FIVE[seed] for seed in (0, 2, 3)}  # there after 1000, 2000 and 2000 steps
    line = cells(entry(), Standing(three, 2, (1, 4)))
    assert line[3] == "3 of 10, 2 failed, 2 stale" and line[5] == "490"  # (500 + 490 + 480) / 3
    assert line[9:] == ["3 of 5", "2,000", "4.0"]  # the medians of 1000 2000 2000 inf inf and 1 3 4 inf inf
    assert cells(entry(), Standing({}, 2, (1,)))[2] == "*failed*"


def test_what_is_missing_or_stale_has_no_numbers():
    line = ["`cartpole_ppo`", "Stable-Baselines3"]
    assert cells(entry(library="sb3"), Standing({}, 0)) == [*line, "*not measured*", *[""] * 9]
    assert cells(entry(library="sb3"), Standing({}, 3)) == [*line, "*not measured*, 3 stale", *[""] * 9]


def test_the_page_is_its_table_machines_and_pictures():
    page = text([(entry(), Standing(FIVE, 0)), (entry(library="sb3"), Standing({}, 0))])
    assert page.startswith("# Leaderboard\n")
    table = [line for line in page.splitlines() if line.startswith("|")]
    assert table[0].split(" | ")[:3] == ["| config", "library", "env steps"] and set(table[1]) == set("|- ")
    assert all(line.count("|") == len(leaderboard.COLUMNS) + 1 for line in table) and len(table) == 4
    measured = "Measured on: a CPU, torch 2.13.0, of commits 01234567+."
    assert page.endswith(f"{measured}\n\n![cartpole_ppo](cartpole_ppo.png)\n")
    assert "Measured on" not in text([(entry(), Standing({}, 1))])


def test_the_table_names_every_shipped_config_and_the_zoo_its_environment():
    measured = {*TASKS, *(arm.config for task in clones.TASKS.values() for arm in task.arms.values())}
    assert measured == {path.stem for path in CONFIGS.glob("*.json")}, "add new configs to benchmarks/tasks.py"
    assert [e.task.config for e in entries(CONFIGS) if e.library == "sb3"] == [c for c in TASKS if c in ZOO]
    for config, settings in ZOO.items():
        cfg = load_config(CONFIGS / f"{config}.json")
        own = getattr(cfg.env.cfg, "id", None)
        assert f"gymnasium:{settings.env}" == (TASKS[config].env or f"gymnasium:{own}")


def test_the_leaderboard_of_the_checkout_is_that_of_its_files(tmp_path):
    """After a change of configs or files: `ecrl bench results --minutes 0`."""
    out = ROOT / "benchmarks" / "results"
    known = [(one, standing(one, out)) for one in entries(CONFIGS)]
    assert (out / "README.md").read_text() == text(known)
    for one, state in known:
        if state.fresh:
            seeds = f" ({len(state.fresh)} seeds" if len(state.fresh) > 1 else " -->"  # text is in comments of an SVG
            assert f"<!-- {one.name}{seeds}" in (out / f"{one.task.config}.svg").read_text(), one.name


@pytest.mark.parametrize("config", MEMORY)
def test_the_comparison_without_memory_has_the_same_run_and_no_memory(config):
    cfg = load_config(CONFIGS / f"{config}.json")
    other = without_memory(cfg)
    assert other.replace(policy=cfg.policy) == cfg
    assert other.policy.normalize_obs == cfg.policy.normalize_obs
    assert "carry" in init_state(cfg) and "carry" not in init_state(other)


def test_the_page_on_memory_has_the_scores_with_and_without_memory():
    page, lines = (ROOT / "docs" / "memory.md").read_text(), lines_by_entry()
    for config in MEMORY:
        own, other = lines[config, "ecrl"], lines[config, "without_memory"]
        scores = " | ".join(f"{line['interquartile mean']} ({line['95 % interval']})" for line in (own, other))
        row = f"| `{config}` | {own['score']} | {scores} | {own['env steps to it']} |"
        assert f"\n{row}\n" in page, f"docs/memory.md has no line {row}"


def test_the_page_on_images_has_the_scores_on_minatar():
    page, lines = (ROOT / "docs" / "images.md").read_text(), lines_by_entry()
    for config in MINATAR_PPO:
        found = [lines.get((config, library), {}) for library in ("ecrl", "rejax", "sb3_minatar")]
        row = f"| `{config}` | {' | '.join(score_with_interval_or_seeds(line) for line in found)} |"
        assert f"\n{row}\n" in page, f"docs/images.md has no line {row}"


def score_with_interval(line):
    score, interval = line.get("interquartile mean", ""), line.get("95 % interval", "")
    return f"{score} ({interval})" if interval else score


def score_with_interval_or_seeds(line):
    seeds = line.get("seeds", "").split(" ")[0]
    with_interval = score_with_interval(line)
    if not with_interval or line["95 % interval"]:
        return with_interval
    return f"{with_interval} ({seeds} {'seed' if seeds == '1' else 'seeds'})"


def test_the_hash_is_of_what_is_learnt_and_how_it_is_scored(monkeypatch):
    before = {e.name: e.hash for e in entries(CONFIGS)}
    assert len(set(before.values())) == len(before)
    monkeypatch.setitem(EPISODES, "return", (20, 200))
    after = {e.name: e.hash for e in entries(CONFIGS)}
    assert {n for n in before if before[n] != after[n]} == {
        e.name for e in entries(CONFIGS) if e.task.score == "return"
    }
