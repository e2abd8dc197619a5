"""Every table of docs/speed.md shows the figures of the benchmarks' files, and names the faster library."""

import pytest
from support.published import rows_of, table

PAGE = "docs/speed.md"
RATIO = ("ratio", "minimum", "maximum")
PEERS = ("rejax", "SB3", "TorchRL", "LeanRL-style", "CleanRL-style")
LIBRARIES = {"rejax": "rejax 0.1.3, jitted", "LeanRL-style": "LeanRL-style loop", "CleanRL-style": "CleanRL-style loop"}
ALGORITHMS = {"fast_td3": "FastTD3", "fast_sac": "FastSAC"}


def ratios(row, digits=2):
    return [f"{row[key]:.{digits}f}" for key in ("ratio", "ratio_min", "ratio_max")]


def faster(row, other):
    """Name the library that is faster in every round."""
    if row["ratio_min"] > 1:
        return "ecrl"
    return other if row["ratio_max"] < 1 else "unclear"


def test_a_library_is_faster_only_if_it_is_in_every_round():
    rows = [{"ratio_min": low, "ratio_max": high} for low, high in ((1.01, 2.0), (0.5, 0.99), (0.9, 1.1))]
    assert [faster(row, "rejax") for row in rows] == ["ecrl", "rejax", "unclear"]


def end_to_end():
    for row in sorted(rows_of("end_to_end"), key=lambda row: (PEERS.index(row["peer"]), row["cores"], row["num_envs"])):
        peer, digits = row["peer"], 2 if row["peer"] == "rejax" else 1
        size = (str(row["cores"]), f"{row['num_envs']:,}")
        yield [LIBRARIES.get(peer, peer), *size, *ratios(row, digits), faster(row, peer)]


def off_policy():
    for row in rows_of("off_policy"):
        peer, name = row["peer"], ALGORITHMS.get(row["algorithm"], row["algorithm"].upper())
        if not peer.startswith("ecrl"):
            name = "Double DQN" if (name, row["ours"]) == ("DQN", "ecrl") else name
            digits = 1 if peer == "SB3" else 2
            yield [name, str(row["units"]), peer, *ratios(row, digits), faster(row, peer.split(",")[0])]


def own_variants():
    names = {
        "ecrl, 1,000,000 steps": ("SAC, buffer of 1,000,000 steps", "SAC, buffer of 10,000 steps"),
        "ecrl, prioritised": ("DQN, prioritised replay", "DQN, uniform replay"),
    }
    for row in rows_of("off_policy"):
        if row["peer"].startswith("ecrl"):
            yield [*names[row["ours"]], *ratios(row)]


def solved():
    solved = {row["ours"]: row for row in rows_of("solved") if row["what"] == "solved"}
    budget = {row["ours"]: row["ours_s"] for row in rows_of("solved") if row["what"] == "budget"}
    budget |= {row["peer"]: row["peer_s"] for row in rows_of("solved") if row["what"] == "budget"}
    names = {"ecrl cold": "compiled, empty cache", "ecrl warm": "compiled, warm cache", "ecrl off": "not compiled"}
    for key, name in names.items():
        row, compiled = solved[key], key != "ecrl off"  # rejax is always compiled
        other = [f"{row['peer_s']:.1f}", faster(row, "rejax")] if compiled else ["", ""]
        yield [name, f"{row['ours_s']:.1f}", *other, f"{budget[key]:.1f}"]


def solved_on_two_cores():
    (row,) = [row for row in rows_of("solved") if row["ours"] == "ecrl background"]
    yield ["ecrl compiled in the background", f"{row['ours_s']:.1f}", f"{row['peer_s']:.1f}", faster(row, "rejax")]


def gae():
    forms = {
        "ecrl eager": "eager",
        "ecrl torch.compile": "in your own `torch.compile`",
        "ecrl compiled": "compiled in a run of ecrl",
    }
    by_peer = {
        peer: [row for row in rows_of("kernels") if row["peer"] == peer] for peer in ("rlax jitted", "sb3 numpy")
    }
    for peer, name, short, ours in (
        *(("rlax jitted", "rlax", "rlax", form) for form in forms),
        ("sb3 numpy", "SB3's NumPy loop", "SB3", "ecrl eager"),
    ):
        for row in (row for row in by_peer[peer] if (row["kernel"], row["ours"]) == ("gae", ours)):
            envs, steps = row["size"].split("x")
            yield [forms[ours], name, f"{int(envs):,}", f"{int(steps):,}", *ratios(row), faster(row, short)]


def seeds():
    for key, name in (("in_turn", "64 compiled runs, one after the other"), ("rejax", "rejax under `jax.vmap`")):
        for row in sorted(rows_of("seeds"), key=lambda row: (-row["cores"], row["num_envs"])):
            time = row[f"time_by_{key}"]
            size = [name, str(row["cores"]), str(row["num_envs"])]
            best = "`train_many`" if time < 1 else "alternative"
            yield [*size, f"{time:.2f}", f"{row[f'time_by_{key}_max']:.2f}", best]


def memory():
    names = {"sb3": "SB3"}
    for row in rows_of("memory"):
        if row["bytes_per_step"] is not None:
            name = names.get(row["contestant"], row["contestant"])
            yield [name, f"{row['num_envs']:,}", f"{row['bytes_per_step']:,.0f}"]


def width():
    for row in rows_of("scaling"):
        if row["by"] == "width":
            yield [str(row["num_envs"]), str(row["width"]), *ratios(row), faster(row, "rejax")]


def guard():
    for row in rows_of("guard"):
        times = [f"{row[key]:.3f}" for key in ("times", "low", "high")]
        yield [row["env"], f"{row['num_envs']:,}", f"`{row['guard']}`", *times]


def physics():
    names = {
        "environment": "environment without the policy",
        "iteration": "whole iteration",
        "meshes": "environment of a robot with meshes, without the policy",
    }
    for row in rows_of("physics"):
        yield [names[row["what"]], *(f"{row[key]:.2f}" for key in ("times_bare", "times_min", "times_max"))]


def cameras():
    for row in rows_of("cameras"):
        rates = [f"{row[key]:,.0f}" for key in ("fast_frames_per_s", "full_frames_per_s", "camera_steps_per_s")]
        yield [f"`{row['task']}`", str(row["cores"]), *rates]


def gpu():
    names = {
        ("gae", "4096x128", "rlax jitted"): "`gae`, 4,096 x 128 steps",
        ("ppo_loss", "2048 rows", "rlax jitted"): "`ppo_loss`, 2,048 rows",
        ("adam", "two MLP-64", "torch fused"): "`adam`, two MLPs",
        ("rng normal", "2^20", "jax jitted"): "`rng.normal`, 2^20 numbers",
    }
    rows = {(row["kernel"], row["size"], row["peer"], row["ours"]): row for row in rows_of("gpu") if "kernel" in row}
    for key, name in names.items():
        row = rows[*key, "ecrl compiled"]
        yield [name, key[2], *ratios(row), faster(row, key[2].split()[0])]


TABLES = {
    end_to_end: ("library", "cores", "environments", *RATIO, "faster"),
    off_policy: ("algorithm", "units per layer", "other library", *RATIO, "faster"),
    own_variants: ("setting", "compared with", *RATIO),
    solved: ("run", "ecrl, s", "rejax, s", "faster", "all steps of the config with ecrl, s"),
    solved_on_two_cores: ("run on two cores", "ecrl, s", "rejax, s", "faster"),
    gae: ("`gae` of ecrl", "other library", "environments", "steps", *RATIO, "faster"),
    seeds: ("alternative", "cores", "environments per seed", "time ratio", "maximum", "faster"),
    memory: ("library", "environments", "bytes per environment step"),
    width: ("environments", "units per layer", *RATIO, "faster"),
    guard: ("task", "environments", "`finite_guard`", "time ratio", "95 % low", "95 % high"),
    physics: ("part", "time ratio", "minimum", "maximum"),
    cameras: ("task", "cores", "frames/s, `fast`", "frames/s, `full`", "env steps/s with a fast camera"),
    gpu: ("kernel", "other library", *RATIO, "faster"),
}


@pytest.mark.parametrize("rows", TABLES, ids=lambda rows: rows.__name__)
def test_a_table_has_the_figures_of_its_file(rows):
    expected = list(rows())
    assert expected and table(PAGE, *TABLES[rows]) == expected


def test_the_share_of_bandwidth_is_that_of_the_file():
    rows = [row for row in rows_of("gpu") if row.get("size") == "4096x128" and row["ours"] == "ecrl compiled"]
    row = next(row for row in rows if row["peer"] == "rlax jitted")
    shares = [line for line in table(PAGE, "measurement on a GPU", "unit", "goal", "result") if "bandwidth" in line[0]]
    assert [line[1:] for line in shares] == [
        ["%", f"{100 * row['must_roof_share']:.0f}", f"{100 * row['roof_share']:.0f}"]
    ]
