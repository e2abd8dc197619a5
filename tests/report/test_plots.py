"""`ecrl plot`: runs and other libraries' files, bands over seeds, one line per fault, and both kinds of pictures."""

import json
import sys

import numpy as np
import pytest
from support.command_line import called
from support.log_records import RECORDS

from ecrl.errors import UserError
from ecrl.report.curves import _EXPECTED_FILES, Curve, choose_metric, curve, read_sources
from ecrl.report.plots import band, figure, group_curves, legend_label, plot, summary, threshold_point
from ecrl.run.loggers import with_jsonl

pytest.importorskip("matplotlib")
from matplotlib.colors import to_hex


def run(folder, seed=0, name="ppo", values=(1.0, 2.0, 3.0), metric="eval/avg_reward", seconds=60.0, **settings):
    """A run folder with a value of the metric every 10 steps and so many seconds."""
    folder.mkdir()
    config = {"trainer": {"seed": seed, "exp_name": name}, "algorithm": settings}
    (folder / "config.json").write_text(json.dumps(config))
    rows = [
        {"log_type": "evaluate", "sample_step": 10 * i, "seconds": seconds * i, metric: value}
        for i, value in enumerate(values, 1)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def curves(*paths, metric="eval/avg_reward"):
    return [curve(source, metric) for path in paths for source in read_sources(path)]


def test_a_real_runs_rows_are_a_curve(tmp_path):
    list(with_jsonl(iter(RECORDS), tmp_path / "metrics.jsonl"))
    (curve,) = curves(tmp_path, metric="charts/episode_reward_avg_100")
    assert (curve.steps.tolist(), curve.values.tolist()) == ([20.0], [7.0]), (
        "null, before any episode ended, is left out"
    )
    assert 0 <= curve.minutes[0] < 1
    assert curve.label == tmp_path.name, "without a config"


def test_rows_that_are_not_in_order_are_refused(tmp_path):
    (tmp_path / "p.csv").write_text("steps,seconds,return\n10,30,1\n30,60,2\n20,90,3\n")
    with pytest.raises(UserError, match=r"p.csv: steps decrease after 30; expected rows in order"):
        curves(tmp_path / "p.csv")
    with pytest.raises(UserError, match=r"a: seconds decrease after -1; expected rows in order"):
        curves(run(tmp_path / "a", seconds=-1.0))


def test_a_curve_that_becomes_nan_is_reported_and_does_not_stay_above(tmp_path):
    folder = run(tmp_path / "a", values=(None, 2.0, float("nan"), None))
    (curve,) = curves(folder)
    assert curve.steps.tolist() == [20.0, 30.0, 40.0], "what was before the first number is left out"
    assert np.isnan(curve.values).tolist() == [False, True, True]
    (line,) = summary([[curve]], 1.0)
    assert line == "a: nan after 40 env steps, 4.0 minutes; not a number at 30 env steps; does not stay at or above 1"


def test_an_unfinished_last_line_is_skipped_and_a_damaged_line_is_reported(tmp_path):
    folder = run(tmp_path / "a")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"log_type": "tra')
    assert len(curves(folder)[0].values) == 3
    with (folder / "metrics.jsonl").open("a") as file:
        file.write("\n")
    with pytest.raises(UserError, match=r"metrics.jsonl:4: not JSON: .*; remove that line"):
        curves(folder)


def test_runs_that_differ_only_in_seed_and_name_are_one_group(tmp_path):
    runs = [run(tmp_path / f"r{seed}", seed, gamma=0.9) for seed in range(3)]
    runs += [run(tmp_path / "other", 0, gamma=0.8), run(tmp_path / "named", 3, "ppo_again", gamma=0.9)]
    assert [len(group) for group in group_curves(curves(*runs))] == [4, 1]


def test_groups_with_the_same_name_are_labelled_with_their_folders(tmp_path):
    runs = [run(tmp_path / f"r{gamma}_{seed}", seed, gamma=gamma) for gamma in (0.9, 0.8) for seed in range(2)]
    _, groups, _ = plot(runs, tmp_path / "p.png")
    assert [legend_label(group) for group in groups] == ["ppo, r0.9_0 (2 seeds)", "ppo, r0.8_0 (2 seeds)"]


def test_files_of_one_name_and_results_of_other_settings_are_groups_of_their_own(tmp_path):
    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir()
    paths = [tmp_path / "a" / "sb3.csv", tmp_path / "b" / "sb3.csv"]
    for path in paths:
        path.write_text("steps,seconds,return\n10,30,1\n30,60,2\n")
    _, groups, _ = plot(paths, tmp_path / "p.svg")
    assert [legend_label(group) for group in groups] == [f"sb3, {path}" for path in paths]
    results = [tmp_path / f"{seed}.json" for seed in range(2)]
    for seed, path in enumerate(results):
        rows = [{"steps": 10, "seconds": 30, "return": 1}]
        path.write_text(json.dumps({"name": "ppo", "hash": str(seed), "seed": seed, "curve": rows}))
    assert [len(group) for group in group_curves(curves(*results))] == [1, 1]


def test_a_repeated_seed_is_reported(tmp_path):
    runs = [run(tmp_path / "a"), run(tmp_path / "b")]
    with pytest.warns(UserWarning, match="/a and .*/b have the same config and seed; both are counted"):
        plot(runs, tmp_path / "p.png")
    (tmp_path / "sb3.csv").write_text("steps,seconds,return\n10,30,1\n")
    with pytest.warns(UserWarning, match="sb3.csv and .*sb3.csv have the same config and seed; both are counted"):
        plot([tmp_path / "sb3.csv"] * 2, tmp_path / "p.png")


def test_a_band_is_of_what_all_seeds_reached_and_reads_between_points():
    x = np.array([0.0, 1.0, 2.0, 3.0])
    actual = band([(x, 2 * x), (x[:3], 4 * x[:3]), (np.array([0.5, 2.5]), np.array([3.0, 15.0]))])
    assert actual.x.tolist() == [0.5, 1.0, 2.0]
    assert actual.middle.tolist() == [2.0, 4.0, 8.0]  # (2 + 4 + 6) / 3 times x: three seeds have no outer quarters
    assert actual.low.tolist() == [1.0, 2.0, 4.0] and actual.high.tolist() == [3.0, 6.0, 12.0]  # 1 in 27 above 2.5 %


def test_many_points_become_an_even_grid():
    x = np.linspace(0.0, 1.0, 1001) ** 2
    actual = band([(x, x)] * 3)
    assert len(actual.x) == 200 and np.ptp(np.diff(actual.x)) < 1e-12
    np.testing.assert_allclose(actual.middle, actual.x, atol=1e-6)


def test_seeds_that_share_no_stretch_have_an_empty_band():
    assert len(band([(np.array([1.0]), np.array([1.0])), (np.array([2.0]), np.array([1.0]))]).middle) == 0


def apart(*steps):
    """Seeds with a single point each."""
    points = [(np.array([at]), np.array([float(i)])) for i, at in enumerate(steps, 1)]
    return [Curve(f"r{i}", "ppo", "ppo", at, i, i) for at, i in points]


def test_seeds_that_share_no_stretch_and_single_points_are_drawn_as_they_are():
    made = figure([apart(10.0, 20.0, 30.0)], "eval/avg_reward")
    for axes, at in zip(made.axes, ([[10.0], [20.0], [30.0]], [[1.0], [2.0], [3.0]]), strict=True):
        assert [line.get_xdata().tolist() for line in axes.lines] == at and not axes.collections
        assert {line.get_marker() for line in axes.lines} == {"."}
    (box,) = made.legends
    assert [text.get_text() for text in box.get_texts()] == ["ppo (3 seeds)"]
    assert box.get_title().get_text() == "", "there is no band to tell of"


def test_a_band_over_minutes_stands_where_the_median_seed_was_after_as_many_steps():
    steps, minutes = figure([apart(10.0, 10.0, 10.0, 10.0)], "eval/avg_reward").axes
    assert [line.get_xdata().tolist() for line in steps.lines] == [[10.0]]
    assert [line.get_xdata().tolist() for line in minutes.lines] == [[2.5]], "of 1, 2, 3 and 4"
    assert minutes.lines[0].get_ydata().tolist() == [2.5] and minutes.lines[0].get_marker() == "."


def test_names_too_wide_to_stand_beside_each_other_stand_below(tmp_path):
    for name, columns in (("a" * 45, 2), ("a" * 46, 1)):
        one = Curve("r", name, name, *(np.array([1.0, 2.0]) for _ in range(3)))
        made = figure([[one], [one]], "eval/avg_reward")
        (box,) = made.legends
        made.savefig(tmp_path / "p.png", dpi=120)
        shown = box.get_window_extent()
        assert box._ncols == columns and shown.x0 >= 0 and shown.x1 <= made.bbox.width


def test_a_picture_has_two_panels_lines_for_two_seeds_and_a_band_for_three(tmp_path):
    two = [run(tmp_path / f"two{s}", s, "two", gamma=0.8) for s in range(2)]
    three = [run(tmp_path / f"three{s}", s, "three", (1.0 + s, 2.0 + s, 3.0 + s)) for s in range(3)]
    made = figure(group_curves(curves(*two, *three)), "eval/avg_reward", threshold=2.5)
    steps, minutes = made.axes
    assert (steps.get_xlabel(), minutes.get_xlabel()) == ("environment steps", "minutes, including compilation")
    assert steps.get_ylabel() == "eval/avg_reward"
    for axes, at in ((steps, [10.0, 20.0, 30.0]), (minutes, [1.0, 2.0, 3.0])):
        *lines, middle, goal = axes.lines
        assert [line.get_xdata().tolist() for line in (*lines, middle)] == [at] * 3
        assert middle.get_ydata().tolist() == [2.0, 3.0, 4.0]
        assert list(goal.get_ydata()) == [2.5, 2.5]
        (shade,) = axes.collections
        assert shade.get_datalim(axes.transData).y0 == 1.0 and shade.get_datalim(axes.transData).y1 == 5.0
    (box,) = made.legends
    assert [text.get_text() for text in box.get_texts()] == ["two (2 seeds)", "three (3 seeds)"]
    assert box.get_title().get_text() == "three or more seeds: interquartile mean, 95 % bootstrap interval"


def single_lines(count):
    return [[Curve(f"r{i}", f"r{i}", f"r{i}", *(np.array([1.0, 2.0]) for _ in range(3)))] for i in range(count)]


def test_forty_groups_have_distinct_colours_and_dashes():
    for axes in figure(single_lines(40), "eval/avg_reward").axes:
        styles = {(to_hex(line.get_color()), line.get_linestyle()) for line in axes.lines}
        assert len(axes.lines) == len(styles) == 40
    *_, box = figure(single_lines(40), "eval/avg_reward").legends
    assert len({(to_hex(line.get_color()), line.get_linestyle()) for line in box.get_lines()}) == 40


def test_more_groups_than_styles_are_refused():
    message = (
        "^41 groups of runs with equal configs, but a picture has colours and dashes for at most 40; plot fewer runs$"
    )
    with pytest.raises(UserError, match=message):
        figure(single_lines(41), "eval/avg_reward")


def test_a_run_without_a_name_is_labelled_by_its_environment_and_algorithm(tmp_path):
    for name, label in (("generic_exp", "gymnasium:Acrobot-v1 ppo"), ("mine", "mine")):
        env = {"name": "gymnasium", "cfg": {"id": "Acrobot-v1"}}
        folder = run(tmp_path / name, name=name)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"env": env, "algorithm": {"name": "ppo"}}))
        assert curves(folder)[0].label == label


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("sb3.json", '[{"steps": 10, "seconds": 30, "return": 4.5}, {"steps": 20, "seconds": 60, "return": 5}]'),
        ("p.json", '{"name": "sb3", "seed": 1, "curve": [{"steps": 10, "seconds": 30, "return": 4.5}, '
         '{"steps": 20, "seconds": 60, "return": 5, "success": null}]}'),
        ("sb3.csv", "steps,seconds,return\n10,30,4.5\n20,60,5\n"),
        ("sb3.csv", "steps,seconds,return,seed,note\n5,9,nan,1,\n10,30,4.5,1,\n20,60,5,1,\n"),
    ],
)  # fmt: skip
def test_a_file_of_another_library_is_a_curve(name, text, tmp_path):
    (tmp_path / name).write_text(text)
    for metric in ("eval/avg_reward", "charts/episode_reward_avg_100", "return"):
        (curve,) = curves(tmp_path / name, metric=metric)
        assert (curve.label, curve.steps.tolist(), curve.values.tolist()) == ("sb3", [10.0, 20.0], [4.5, 5.0])
        assert curve.minutes.tolist() == [0.5, 1.0]


def test_seeds_of_another_library_are_one_group(tmp_path):
    (tmp_path / "sb3.csv").write_text("steps,seconds,success,seed\n" + "".join(f"1,1,0.5,{s}\n" for s in range(4)))
    ((*group,),) = group_curves(curves(tmp_path / "sb3.csv", metric="eval/success_rate"))
    assert len(group) == 4


def test_the_metric_is_the_first_usual_one_that_all_have(tmp_path):
    both = run(tmp_path / "a")
    with (both / "metrics.jsonl").open("a") as file:
        file.write('{"sample_step": 40, "seconds": 400, "eval/success_rate": 0.5, "train/entropy": 1.0}\n')
    plain = run(tmp_path / "b", metric="charts/episode_reward_avg_100")
    other_file = tmp_path / "c.csv"
    other_file.write_text("steps,seconds,return\n1,1,1\n")
    sources = {path: read_sources(path)[0] for path in (both, plain, other_file)}
    assert choose_metric([sources[both]]) == "eval/success_rate"
    assert choose_metric([sources[both], sources[other_file]]) == "eval/avg_reward"
    assert choose_metric([sources[plain], sources[other_file]]) == "charts/episode_reward_avg_100"
    with pytest.raises(
        UserError, match=r"^none of eval/success_rate, .* is in all runs and files; choose a metric with --metric$"
    ):
        choose_metric([sources[plain], sources[both]])


def test_a_folder_of_runs_and_the_label_of_their_seeds(tmp_path):
    (tmp_path / "sweep").mkdir()
    for rate in (0.1, 0.2):
        for seed in (0, 1):
            run(tmp_path / "sweep" / f"learning_rate_{rate}_seed_{seed}", seed, learning_rate=rate)
    (tmp_path / "sweep" / "summary.csv").write_text("name,mean\na,1\n")
    _, groups, _ = plot([tmp_path / "sweep"], tmp_path / "p.svg")
    assert [len(group) for group in groups] == [2, 2]
    assert [legend_label(group) for group in groups] == [f"ppo, learning_rate_{rate} (2 seeds)" for rate in (0.1, 0.2)]


def test_where_a_curve_stays_above_a_threshold(tmp_path):
    up, down = (curves(run(tmp_path / n, name=n, values=v))[0] for n, v in (("up", (1, 3, 4)), ("down", (3, 4, 1))))
    assert (threshold_point(up, 3.0), threshold_point(up, 0.0), threshold_point(down, 3.0)) == (
        (20.0, 2.0),
        (10.0, 1.0),
        None,
    )
    assert summary([[up], [down]], 3.0) == [
        "up: 4 after 30 env steps, 3.0 minutes; stays at or above 3 from 20 env steps, 2.0 minutes on",
        "down: 1 after 30 env steps, 3.0 minutes; does not stay at or above 3",
    ]
    assert summary([[up]], None) == ["up: 4 after 30 env steps, 3.0 minutes"]


def test_the_command_writes_both_pictures_and_prints_the_ends_of_the_curves(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for seed in range(3):
        run(tmp_path / f"r{seed}", seed)
    (tmp_path / "sb3.csv").write_text("steps,seconds,return\n10,30,1\n30,60,2\n")
    assert called(monkeypatch, "plot", "r0", "r1", "r2", "sb3.csv", "--threshold", "-2") == 0
    assert capsys.readouterr().out.splitlines() == [
        "eval/avg_reward",
        *(
            f"  r{s}: 3 after 30 env steps, 3.0 minutes; stays at or above -2 from 10 env steps, 1.0 minutes on"
            for s in range(3)
        ),
        "  sb3.csv: 2 after 30 env steps, 1.0 minutes; stays at or above -2 from 10 env steps, 0.5 minutes on",
        "curves.png",
        "curves.svg",
    ]
    assert (tmp_path / "curves.png").read_bytes()[:4] == b"\x89PNG"
    first = (tmp_path / "curves.svg").read_text()
    assert called(monkeypatch, "plot", "r0", "r1", "r2", "sb3.csv", "--threshold", "-2", "--out", "deep/b.svg") == 0
    assert (tmp_path / "deep" / "b.svg").read_text() == first, "the same curves give the same file"
    assert sorted(path.name for path in (tmp_path / "deep").iterdir()) == ["b.svg"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((), "ecrl plot needs run folders, such as: ecrl plot outputs/cartpole_ppo_*"),
        (("none",), f"none: does not exist; {_EXPECTED_FILES}"),
        (("empty",), "empty: has no metrics.jsonl; expected a run folder, such as outputs/<exp_name>_<time>"),
        (("a.txt",), f"a.txt: {_EXPECTED_FILES}"),
        (("r", "--metric", "eval/avg_rewa"), "r: no finite value of 'eval/avg_rewa'; did you mean 'eval/avg_reward'?"),
        (("r", "--metric", "x"), "r: no finite value of 'x'; known: eval/avg_reward"),
        (("odd.json",), 'odd.json: expected a list of rows, or an object with a list of rows under the key "curve"'),
        (("half.csv",), "half.csv:2: no seconds; expected steps, seconds and return or success"),
        (("nan.csv",), "nan.csv:2: no steps; expected steps, seconds and return or success"),
        (("seed.csv",), "seed.csv:2: seed '1.5'; expected a whole number"),
        (("head.csv",), "head.csv: no rows; expected steps, seconds and return or success"),
        (("latin.csv",), "latin.csv: not CSV: 'utf-8' codec can't decode byte 0xff in position 0: invalid start byte"),
        (("rows",), "rows/metrics.jsonl:2: expected numbers for sample_step and seconds; remove that line"),
        (("new",), "new: has no logs yet; train for longer, or leave out this folder"),
        (("listed",), "listed/config.json: expected the config of a run"),
        (("r", "--threshold", "nan"), "--threshold nan: expected a finite number"),
        (("r", "--out", "a.txt/x.png"), "--out a.txt/x.png: File exists; choose another path"),
        (("r", "--out", "."), "--out .: expected the suffix .png or .svg, or no suffix for both"),
        (("text.csv",), "text.csv:3: could not convert string to float: 'many'; expected numbers"),
        (("r", "--out", "a.gif"), "--out a.gif: expected the suffix .png or .svg, or no suffix for both"),
    ],
)  # fmt: skip
def test_faults_are_one_line(args, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run(tmp_path / "r")
    (tmp_path / "empty").mkdir()
    (tmp_path / "a.txt").touch()
    (tmp_path / "odd.json").write_text('{"rows": []}')
    (tmp_path / "half.csv").write_text("steps,return\n1,2\n")
    (tmp_path / "nan.csv").write_text("\ufeffsteps,seconds,return\nnan,1,2\n")
    (tmp_path / "seed.csv").write_text("\ufeffsteps,seconds,return,seed\n1,1,2,1.5\n")
    (tmp_path / "head.csv").write_text("steps,seconds,return\n")
    (tmp_path / "latin.csv").write_bytes(b"\xff")
    row = '{"sample_step": 1, "seconds": 1.0}\n'
    for name, text in (("rows", row + "5\n"), ("new", ""), ("listed", row)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text(text)
    (tmp_path / "listed" / "config.json").write_text("[]")
    (tmp_path / "text.csv").write_text("steps,seconds,return\n1,2,3\n2,3,many\n")
    assert called(monkeypatch, "plot", *args) == 2
    assert capsys.readouterr().err == message + "\n"


def test_without_matplotlib_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UserError, match=r"pip install 'ecrl\[plot\]'"):
        plot([run(tmp_path / "a")], tmp_path / "p.png")
