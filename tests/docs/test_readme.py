"""The README is short, and has the figures of the files of the benchmarks."""

import pytest
from support.doc_pages import blocks
from support.paths import ROOT
from support.published import lines_by_entry, rows_of, table

from ecrl.registry import lookup, registered

README = (ROOT / "README.md").read_text()


def test_the_readme_is_short_and_has_an_example_of_eight_lines():
    assert len(README.splitlines()) <= 150
    (example,) = [block.text for block in blocks("README.md") if block.language == "python"]
    assert len([line for line in example.splitlines() if line]) == 8


def test_the_three_reasons_have_the_figures_of_their_files():
    pytest.importorskip("matplotlib")
    sizes = {"peer": "SB3", "cores": 1, "num_envs": 512}
    (speed,) = [row["ratio"] for row in rows_of("end_to_end") if sizes.items() <= row.items()]
    cube = lines_by_entry()["push_cube_ppo", "ecrl"]
    one, two = [r["time_by_in_turn"] for r in rows_of("seeds") if r["num_envs"] == 4]
    assert cube["seeds"] == "10"
    assert [row[1] for row in table("README.md", "reason", "number", "measured")] == [
        f"{speed:.1f} times as many env steps per second as Stable-Baselines3",
        f"{cube['minutes to it']} minutes to a success rate of {cube['threshold']}",
        f"{two:.2f} of the time of 64 separate runs",
    ]
    assert f"and {one:.2f} on one core |" in README


def test_the_readme_names_where_others_are_better():
    columns = ("env steps, ecrl", "env steps, SB3", "fewer steps", "minutes, ecrl", "minutes, SB3", "fewer minutes")
    steps = [row[4] for row in table("docs/results.md", "config", "threshold", *columns)]
    minutes = [row[7] for row in table("docs/results.md", "config", "threshold", *columns)]
    counts = {1: "one config", 2: "two configs", 3: "three configs", 4: "four configs"}
    text = " ".join(README.split())
    assert f"reaches the threshold of {counts[steps.count('SB3')]} [in fewer steps]" in text
    assert f", and of {counts[minutes.count('SB3')]} in fewer minutes, mostly because ecrl spends" in text
    assert not [row for row in rows_of("end_to_end") if row["peer"] == "rejax" and row["ratio_max"] < 1]
    cold = next(row for row in rows_of("solved") if (row["what"], row["ours"]) == ("solved", "ecrl cold"))
    assert cold["ratio_max"] < 1 and "rejax [compiles in less time](docs/speed.md#time-to-a-solved-cartpole)" in text


def test_the_table_names_every_algorithm_and_environment():
    elsewhere = ("probe_", "minatar_", "gymnasium", "PointMassRL")  # for tests, named together, or a second name
    for kind in ("algorithm", "env"):
        own = [name for name in registered(kind) if lookup(kind, name).make.__module__.startswith("ecrl.")]
        names = [name for name in own if not name.startswith(elsewhere)]
        assert len(names) > 10 and [name for name in names if f"`{name}`" not in README] == [], kind
