"""The history of a run in memory: a row per iteration, as a DataFrame, and as a plot."""

import math
import sys

import pytest
from support.log_records import RECORDS

from ecrl.errors import UserError
from ecrl.run.history import History


def test_history_has_a_row_per_iteration():
    history = History()
    for item in RECORDS:
        history.add(item)
    assert len(history) == 2
    terms = {"rewards/reach": 0.5, "metrics/distance": 0.125}
    rest = {"episode_reward_avg_100": 7.0, "policy_loss": 0.25, "entropy": 1.0}
    assert history[-1] == {"sample_step": 20} | terms | rest
    assert history[0]["eval/avg_reward"] == 3.0
    assert math.isnan(history[0]["episode_reward_avg_100"])
    assert [row["sample_step"] for row in history] == [10, 20]


def test_the_repr_of_a_history_is_one_line():
    history = History()
    assert repr(history) == "History of no rows"
    history.add(RECORDS[4])
    message = "{'sample_step': 20, 'policy_loss': 0.25, 'entropy': 1.0}"
    assert repr(history) == f"History of 1 rows, the last {message}"


def test_an_empty_history_is_an_empty_frame():
    pytest.importorskip("pandas")
    assert len(History().to_pandas()) == 0


def test_history_to_pandas_and_plot(monkeypatch):
    pytest.importorskip("pandas")
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    history = History()
    for item in RECORDS:
        history.add(item)
    frame = history.to_pandas()
    assert frame.index.name == "sample_step"
    assert frame.loc[20, "policy_loss"] == 0.25
    axes = history.plot("policy_loss")
    assert axes.get_ylabel() == "policy_loss"
    assert axes.lines[0].get_ydata().tolist() == [0.5, 0.25]
    with pytest.raises(UserError, match="no log 'policy_los'; did you mean 'policy_loss'"):
        history.plot("policy_los")


def test_what_has_no_number_yet_is_no_empty_picture():
    history = History()
    with pytest.raises(UserError, match="the history has no rows to plot; train first"):
        history.plot()
    history.add(RECORDS[0])
    assert math.isnan(history[0]["episode_reward_avg_100"])
    with pytest.raises(UserError, match="'episode_reward_avg_100' has no finite value in 1 rows; train for longer"):
        history.plot()


@pytest.mark.parametrize("kind", [UserError, ModuleNotFoundError])
def test_a_missing_extra_is_reported_with_its_install_command(kind, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(kind, match=r"pip install 'ecrl\[plot\]'"):
        History().to_pandas()
