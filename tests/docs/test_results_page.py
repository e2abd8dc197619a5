"""Every table of docs/results.md shows the figures of the leaderboard, and names the better library."""

import json

import pytest
from support.paths import ROOT
from support.published import RESULTS, lines_by_entry, table

from benchmarks.tasks import TASKS

pytest.importorskip("matplotlib")

PAGE = "docs/results.md"
NONE = "*not measured*"


@pytest.fixture(scope="module")
def lines():
    return lines_by_entry()


def better(ours, theirs, less):
    """Name the library with the better of two figures; blank if a figure is missing."""
    if not (ours and theirs):
        return ""
    ours, theirs = (float(text.replace(",", "")) for text in (ours, theirs))
    if ours == theirs:
        return "equal"
    return "ecrl" if (ours < theirs) == less else "SB3"


def test_the_better_library_by_hand():
    assert [better(*pair, less=True) for pair in (("1,000", "2,000"), ("0.5", "0.2"), ("2", "2"), ("2", ""))] == [
        "ecrl", "SB3", "equal", "",
    ]  # fmt: skip
    assert better("-80.2", "-83.1", less=False) == "ecrl"


def pairs(lines):
    """Yield each config that Stable-Baselines3 has settings for, and the lines of both libraries."""
    for config in TASKS:
        if (config, "sb3") in lines:
            yield config, lines[config, "ecrl"], lines[config, "sb3"]


def test_steps_and_minutes_stand_beside_those_of_stable_baselines3(lines):
    expected = []
    for config, ecrl, sb3 in pairs(lines):
        row = [f"`{config}`", ecrl.get("threshold", "")]
        for column in ("env steps to it", "minutes to it"):
            ours, theirs = ecrl.get(column, ""), sb3.get(column, "")
            row += [ours, NONE if NONE in sb3["env steps"] else theirs, better(ours, theirs, less=True)]
        expected.append(row)
    assert len(expected) > 10 and sum(NONE not in row for row in expected) > 5
    columns = ("env steps, ecrl", "env steps, SB3", "fewer steps", "minutes, ecrl", "minutes, SB3", "fewer minutes")
    assert table(PAGE, "config", "threshold", *columns) == expected
    first = [row[0] for row in expected if row[4] == "SB3"]
    listed = " and ".join(filter(None, (", ".join(first[:-1]), first[-1])))
    assert f"fewer steps than ecrl: {listed}." in " ".join((ROOT / PAGE).read_text().split())


def test_scores_stand_beside_those_of_stable_baselines3(lines):
    expected = []
    for config, ecrl, sb3 in pairs(lines):
        ours, theirs = ecrl.get("interquartile mean", ""), sb3.get("interquartile mean", "")
        seeds = [ecrl.get("seeds", ""), sb3.get("seeds", "") or NONE]
        expected.append([f"`{config}`", *seeds, ours, theirs or NONE, better(ours, theirs, less=False)])
    columns = ("seeds, ecrl", "seeds, SB3", "score, ecrl", "score, SB3", "higher score")
    assert table(PAGE, "config", *columns) == expected


@pytest.mark.parametrize(
    "columns",
    [
        ("config", "env steps", "seeds", "score", "interquartile mean", "95 % interval"),
        ("config", "threshold", "reached by", "env steps to it", "minutes to it"),
    ],
)
def test_every_config_has_the_figures_of_the_leaderboard(columns, lines):
    shown = [lines[config, "ecrl"] for config, task in TASKS.items() if "threshold" not in columns or task.threshold]
    expected = [[line.get(name, "") for name in columns] for line in shown]
    assert table(PAGE, *columns) == expected


def test_the_seeds_of_push_cube_have_the_figures_of_their_files():
    expected = []
    for seed in range(10):
        curve = json.loads((RESULTS / "runs" / "push_cube_ppo" / "ecrl" / f"{seed}.json").read_text())["curve"]
        below = [i for i, row in enumerate(curve) if row["success"] < 0.95]
        above = curve[below[-1] + 1 :] if below else curve
        expected.append([str(seed), f"{curve[-1]['success']:g}", f"{above[0]['steps']:,}" if above else ""])
    assert table(PAGE, "seed", "success at the end", "env steps until it stays above 0.95") == expected
