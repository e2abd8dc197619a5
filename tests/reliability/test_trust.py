"""The scripts of this folder: small sizes in the ordinary suite, full sizes under the marker `long`."""

import subprocess
import sys
from pathlib import Path

import pytest
from support.long_cases import long_except

HERE = Path(__file__).parent


def run_script(script: str, *args: object) -> str:
    """Run a script, check that it succeeds, and return its output."""
    done = subprocess.run([sys.executable, HERE / script, *map(str, args)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("algorithm", "count"),
    [
        pytest.param("ppo", 2, marks=pytest.mark.slow),
        pytest.param("ppo", 100, marks=pytest.mark.long),
        pytest.param("dqn", 20, marks=pytest.mark.long),
    ],
)
def test_killed_runs_go_on_bit_for_bit(algorithm, count):
    out = run_script("kills.py", "--kills", count, "--algorithm", algorithm)
    assert f"{count} of {count} resumed bit for bit" in out


@pytest.mark.long
@pytest.mark.parametrize("count", [20])
def test_a_signal_saves_and_the_run_goes_on_bit_for_bit(count):
    *lines, compiling = run_script("signals.py", "--signals", count).splitlines()
    for line, status in zip(lines, (143, 130), strict=True):
        assert f"{count} of {count} saved, exit status {status}, resumed" in line
    assert "exit status 143" in compiling


@pytest.mark.parametrize(
    ("flips", "cuts"), [pytest.param(20, 8, marks=pytest.mark.slow), pytest.param(1000, 100, marks=pytest.mark.long)]
)
@pytest.mark.parametrize("algorithm", long_except(["ppo"], ["ppo", "dqn"]))
def test_damage_is_caught_and_the_checkpoint_before_is_used(flips, cuts, algorithm):
    lines = run_script("flips.py", "--flips", flips, "--cuts", cuts, "--algorithm", algorithm).splitlines()
    assert [line.split(" (")[0] for line in lines] == [f"flips: {flips} caught", f"truncations: {cuts} caught"]
    assert all("manifest.json" in line and line.endswith(", 0 not.") for line in lines)


CONFIGS = sorted(path.stem for path in (HERE.parents[1] / "configs").glob("*.json"))
SOME = ["cartpole_dqn", "push_cube_ppo", "reach_color_grpo", "t_maze_ppo"]


@pytest.mark.parametrize(
    ("configs", "count"),
    [pytest.param(SOME, 12, marks=pytest.mark.slow), pytest.param(CONFIGS, 10_000, marks=pytest.mark.long)],
    ids=["some", "all"],
)
def test_mutated_configs_are_refused_in_lines_or_accepted(configs, count):
    pytest.importorskip("mujoco")
    if "lunar_lander_ppo" in configs:
        pytest.importorskip("Box2D")
    lines = run_script("mutations.py", *configs, "--count", count).splitlines()
    assert [line.split(":")[0] for line in lines] == configs
    assert all(f"{count} mutations" in line and ", 0 defects" in line for line in lines)


@pytest.mark.parametrize(
    "size",
    [
        pytest.param(
            ("--hours", 0.004, "--every", 0.2, "--period", 20_000, "--memory", 5, "--speed", "inf"),
            marks=pytest.mark.long,
        ),
        pytest.param(("--hours", 2), marks=pytest.mark.long),
    ],
    ids=["short", "two hours"],
)
def test_memory_descriptors_and_speed_stay_as_they_are(size):
    # seconds are too short to judge a speed
    assert "NOT" not in run_script("soak.py", *size)


@pytest.mark.parametrize(
    "faults",
    [
        pytest.param(("worker_dies",), marks=pytest.mark.slow),
        pytest.param(("disk_full_for_a_while", "disk_full_to_the_end", "disk_of_a_few_pages"), marks=pytest.mark.long),
        pytest.param(("worker_raises", "worker_killed", "worker_hangs"), marks=pytest.mark.long),
        pytest.param(("video",), marks=pytest.mark.long),
        pytest.param(("tracker_killed",), marks=pytest.mark.long),
    ],
    ids=lambda faults: faults[0],
)
def test_each_fault_is_named_and_leaves_earlier_checkpoints(faults):
    if "video" in faults:
        pytest.importorskip("imageio_ffmpeg", reason="videos need the extra 'video'")
    if "tracker_killed" in faults:
        pytest.importorskip("wandb")
    assert run_script("faults.py", "--only", *faults).count("\n- ") == len(faults) - 1
