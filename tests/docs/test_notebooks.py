"""The notebooks: committed with their outputs, and run by nbmake with small numbers; the long tests run them in full.

This command makes the outputs again:
`jupyter nbconvert --to notebook --execute --inplace --ExecutePreprocessor.record_timing=False notebooks/*.ipynb`.
"""

import json
import re
import shutil
import subprocess
import sys
from itertools import pairwise

import pytest
from support.notebook_files import NEEDED, NOTEBOOKS, PICTURES, VIDEOS, cells
from support.paths import ROOT

from ecrl import kernels

SMALL = {  # in place of the numbers in the cell that is tagged `parameters`
    "00_quickstart": "iterations, episodes = 2, 4",
    "02_add_an_algorithm": "iterations, episodes = 2, 4",
    "03_embed_a_kernel": "ppo_iterations, grpo_iterations, sb3_steps = 2, 2, 2_048",
    "04_many_seeds": 'seeds, iterations, repeats, grid_iterations, compiling = 4, 1, 1, 1, "off"',
    "05_push_cube": "iterations, episodes, filmed = 1, 2, 1",
    "06_off_policy": "iterations = 2",
    "07_memory_and_images": 'memory_iterations, image_iterations, compiling = 2, 1, "off"',
    "08_vla": "demonstrations, clone_iterations, iterations = 8, 1, 1\n"
    'num_envs, episodes, frames, compiling = 32, 4, 4, "off"',
}
CLAIMS = {  # claims of a notebook about its run
    "00_quickstart": 'assert min(here["eval/avg_reward"], gymnasium["eval/avg_reward"]) >= 475\n'
    'assert (same["params"] == state["params"]).all()',
    "02_add_an_algorithm": 'last = ecrl.evaluate(state, cfg, num_episodes=100, env="gymnasium:CartPole-v1")\n'
    'assert last["eval/avg_reward"] >= 400',
    "03_embed_a_kernel": "assert max(returns) > 400 and scores[-1] > 0.9 and ours.returns[-1] > 100",
    "04_many_seeds": "assert (finals >= 475).sum() >= 60",
    "05_push_cube": 'assert result["eval/success_rate"] >= 0.85',
    "06_off_policy": "assert curve[0] < 30 and max(curve[-5:]) > 100",
    "07_memory_and_images": "assert with_memory[-1] > 0.8 and without_memory[-1] < -0.3\n"
    "assert returns[-1] > 2 * returns[0]\n"
    'assert cfg.policy.encoder is None and cfg.policy.actor.type == cfg.policy.critic.type == "cnn"',
    "08_vla": 'rates = {name: result["eval/success_rate"] for name, result in rates.items()}\n'
    'assert rates["clone"] > 0.3 and rates["after GRPO"] > rates["clone"] + 0.1\n'
    'assert rates["swapped instructions"] < 0.1',
}
ELSEWHERE = {"GAE", "VTrace", "Squashed"} | {  # results of kernels, and output that other notebooks show during a run
    "act_and_step", "collect_rollout", "episode_init", "episode_update", "loop", "place_at_truncations",
    "restarted",
} | {  # learning from replay
    "HeldNoise",
    "categorical_project", "categorical_q_target", "categorical_target", "categorical_td_loss",
    "discrete_soft_actor_loss", "double_q_target", "dpg_loss", "epsilon_greedy", "expected_q_target",
    "gaussian_action", "held_noise", "hl_gauss", "huber", "min_q_target", "munchausen_target", "noise_scales",
    "noisy_linear", "ou_noise", "periodic_update", "perturbed", "q_lambda", "q_target", "quantile_huber_loss",
    "quantile_midpoints", "truncation_parents",
    "quantile_q_target", "retrace", "smoothed_action", "soft_actor_loss", "soft_min_q_target", "soft_q_target",
    "soft_update", "td_loss", "temperature_loss", "min_categorical_target", "soft_categorical_target",
} | {  # the replay buffer needs a run: `tests/kernels/test_replay.py` has numbers by hand
    "Replay", "importance_weights", "replay_add", "replay_add_priority", "replay_count", "replay_cut",
    "replay_index", "replay_init", "replay_prioritized_index", "replay_read", "replay_set_priority", "replay_stack",
    "replay_start", "replay_writes", "tree_find", "tree_init", "tree_set",
} | {  # sequences of tokens: `tests/kernels/test_sequences.py` and its neighbours have numbers by hand
    "cispo_loss", "clipped_surrogate_asymmetric", "fixed_length_mean", "group_centered", "gspo_loss",
    "informative_groups", "kl_k3_with_k2_gradient", "leave_one_out", "masked_sequence_importance", "overlong_penalty",
    "sapo_loss", "sequence_log_ratio", "sequence_mean", "token_mean", "truncated_importance",
    "truncated_sequence_importance", "vespo_loss", "whiten",
} | {  # `tests/kernels/test_returns.py` and `tests/kernels/test_losses.py` have numbers by hand
    "a2c_loss", "adaptive_kl_coef", "compute_upgo_returns", "huber_value_loss", "policy_gradient_loss",
    "ppo_loss_kl_penalty", "upgo_returns",
} | {  # flows: `tests/kernels/test_flow_matching.py` has numbers by hand
    "FlowStep", "flow_entropy", "flow_interpolate", "flow_log_prob", "flow_matching_loss", "flow_ode_step",
    "flow_sde_step",
} | {  # variants of optimisers and schedules: `test_optim.py` and `test_schedules.py` have numbers by hand
    "amsgrad", "amsgrad_init", "centered_rmsprop", "centered_rmsprop_init", "decoupled_weight_decay", "l2_weight_decay",
    "nesterov_sgd", "warmup_cosine_schedule", "warmup_linear_schedule",
} | {  # averages and further distributions: the test files of their modules have numbers by hand
    "bernoulli_entropy", "bernoulli_kl", "bernoulli_log_prob", "bernoulli_mode", "bernoulli_sample", "beta_entropy",
    "beta_kl", "beta_log_prob", "beta_mode", "beta_sample", "ema", "ema_debiased", "ema_init", "masked_variance",
    "truncated_normal_entropy", "truncated_normal_kl", "truncated_normal_log_prob", "truncated_normal_mode",
    "truncated_normal_sample",
}  # fmt: skip
CELL_S = 24 * 3600  # nbmake stops a cell after 300 s by default, which a loaded machine may need
_OF_A_MACHINE = re.compile(r"/(?:home|root|Users|usr|opt|tmp|work|venv)\b|0x[0-9a-f]{6}")


def outputs(notebook):
    """Return the outputs of all cells, in order."""
    return [output for cell in cells(notebook) for output in cell["outputs"]]


def shown(notebook, kind):
    """Texts of one MIME type."""
    return ["".join(o["data"][kind]) for o in outputs(notebook) if kind in o.get("data", {})]


def check(name, notebook):
    """Nothing failed or was warned of, every picture and video is there, and all cells ran in their order."""
    assert [o for o in outputs(notebook) if o["output_type"] == "error" or o.get("name") == "stderr"] == []
    assert [cell["execution_count"] for cell in cells(notebook)] == [*range(1, len(cells(notebook)) + 1)]
    assert len(shown(notebook, "image/png")) == PICTURES[name[:2]]
    assert sum("<video" in html for html in shown(notebook, "text/html")) == VIDEOS.get(name, 0)


def executed(name, folder, small="", claims=""):
    """A copy of the notebook in `folder` as nbmake leaves it, with other numbers or claims behind its last cell."""
    for package in ("nbmake", *NEEDED[name]):
        pytest.importorskip(package)
    notebook = json.loads(NOTEBOOKS[name].read_text())
    for i, cell in reversed([*enumerate(notebook["cells"])]):
        if "parameters" in cell["metadata"].get("tags", ()):
            notebook["cells"][i] = cell | {"source": small or cell["source"]}
    if claims:
        notebook["cells"].append(cells(notebook)[-1] | {"source": claims, "id": "claims", "outputs": []})
    shutil.copytree(ROOT / "configs", folder / "configs")
    path = folder / "notebooks" / f"{name}.ipynb"
    path.parent.mkdir()
    path.write_text(json.dumps(notebook))
    command = [sys.executable, "-m", "pytest", "--nbmake", f"--nbmake-timeout={CELL_S}", "--overwrite"]
    command += ["-q", "-p", "no:cacheprovider", str(path)]
    run = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
    return json.loads(path.read_text())


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in NOTEBOOKS if name[:2] not in ("04", "05", "08")])  # these are long
def test_it_runs_with_smaller_numbers(name, tmp_path):
    check(name, executed(name, tmp_path, SMALL.get(name, "")))


@pytest.mark.long
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_it_runs_and_shows_the_expected_numbers(name, tmp_path):
    check(name, executed(name, tmp_path, claims=CLAIMS.get(name, "")))


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_what_is_committed_is_of_a_whole_run_small_and_of_no_machine_in_particular(name):
    text = NOTEBOOKS[name].read_text()
    notebook = json.loads(text)
    check(name, notebook)
    assert len(text) < 500_000
    lines = [line for cell in notebook["cells"] for line in _words(cell)]
    assert [line for line in lines if _OF_A_MACHINE.search(line)] == []
    assert [cell["metadata"] for cell in notebook["cells"] if "execution" in cell["metadata"]] == [], "no times of day"


def _words(cell):
    """Return the text lines of a cell and its outputs, without pictures and videos."""
    yield "".join(cell["source"])
    for output in cell.get("outputs", ()):
        yield "".join(output.get("text", ""))
        yield from ("".join(data) for kind, data in output.get("data", {}).items() if kind.startswith("text/plain"))


def test_every_notebook_is_run_and_leads_to_the_next():
    assert NOTEBOOKS.keys() == NEEDED.keys()
    for name, following in pairwise(NOTEBOOKS):
        *_, last = json.loads(NOTEBOOKS[name].read_text())["cells"]
        assert f"[{following}]({following}.ipynb)" in "".join(last["source"])


def test_double_dqn_from_kernels_is_short():
    code = cells(json.loads(NOTEBOOKS["06_off_policy"].read_text()))
    assert sum(bool(line.strip()) for cell in code for line in cell["source"]) < 60
    assert "ecrl.algorithms" not in "".join(line for cell in code for line in cell["source"])


def test_every_kernel_is_worked_out_by_hand():
    code = "\n".join("".join(cell["source"]) for cell in cells(json.loads(NOTEBOOKS["01_kernels_by_hand"].read_text())))
    used = set(re.findall(r"\bk\.(\w+)", code)) | set(re.findall(r'"(kl_k\d)"', code))
    assert used == set(kernels.__all__) - ELSEWHERE
