"""The public surface: names, docstring sections, lightness, and configs that run."""

import inspect
import os
import re
import subprocess
import sys

import pytest
import torch
from support.paths import ROOT

import ecrl
import ecrl.run.train
from ecrl import algorithms, kernels
from ecrl.config import load_config
from ecrl.loop.iteration import init_state, train_iter

CONFIGS = sorted((ROOT / "configs").glob("*.json"))

SURFACE = """
Algorithm Config ConfigError ConfigModel Env Policy PolicyConfig check_env check_policy close evaluate
exploit_and_explore init_state load load_config make_algorithm make_env make_iteration make_policy module_policy
record_demonstrations register_action register_algorithm register_env register_event register_expert register_network
register_observation register_policy register_reward register_robot register_vla_backend registered save summary train
train_from_config train_iter train_many
"""
KERNELS = """
GAE VTrace Squashed act_and_step adam adam_init adamw categorical_entropy categorical_kl categorical_log_prob
categorical_mode categorical_sample clip_by_global_norm clipped_surrogate clipped_value_loss collect_rollout
compute_gae compute_n_step_returns compute_returns compute_td_lambda_returns compute_vtrace cosine_schedule
discounted_returns episode_discounts episode_init episode_update explained_variance exponential_schedule
first_episode_mask gae upgo_returns compute_upgo_returns a2c_loss adaptive_kl_coef huber_value_loss
policy_gradient_loss ppo_loss_kl_penalty
global_norm group_advantages grpo_advantages grpo_loss kl_k1 kl_k2 kl_k3 linear_schedule loop mask_logits masked_mean
moments_init moments_merge moments_update moments_variance multi_discrete_entropy multi_discrete_kl
multi_discrete_log_prob multi_discrete_mode multi_discrete_sample n_step_returns normal_entropy normal_kl
normal_log_prob normal_mode normal_sample normalize perturbed place_at_truncations ppo_loss
ppo_loss_clipped_value restarted truncation_parents
push_frame random_shift stack_frames
rmsprop rmsprop_init Replay importance_weights replay_add replay_add_priority replay_count replay_cut
replay_index replay_init replay_prioritized_index replay_read replay_set_priority replay_stack replay_start
replay_writes
tree_find tree_init tree_set
running_returns scale scan sgd sgd_init standardize
step_schedule tanh_normal_entropy tanh_normal_kl tanh_normal_latent tanh_normal_log_prob tanh_normal_mode
tanh_normal_sample td_lambda_returns transitions value_loss vtrace
HeldNoise categorical_project categorical_q_target categorical_target categorical_td_loss discrete_soft_actor_loss
double_q_target dpg_loss epsilon_greedy expected_q_target gaussian_action held_noise hl_gauss huber min_q_target
munchausen_target noise_scales noisy_linear ou_noise periodic_update q_lambda q_target quantile_huber_loss
quantile_midpoints quantile_q_target retrace smoothed_action soft_actor_loss soft_min_q_target soft_q_target soft_update
td_loss temperature_loss min_categorical_target soft_categorical_target
cispo_loss clipped_surrogate_asymmetric fixed_length_mean group_centered gspo_loss informative_groups
kl_k3_with_k2_gradient leave_one_out masked_sequence_importance overlong_penalty sapo_loss sequence_log_ratio
sequence_mean token_mean truncated_importance truncated_sequence_importance vespo_loss whiten
FlowStep flow_entropy flow_interpolate flow_log_prob flow_matching_loss flow_ode_step flow_sde_step
amsgrad amsgrad_init centered_rmsprop centered_rmsprop_init decoupled_weight_decay l2_weight_decay nesterov_sgd
warmup_cosine_schedule warmup_linear_schedule
bernoulli_entropy bernoulli_kl bernoulli_log_prob bernoulli_mode bernoulli_sample beta_entropy beta_kl beta_log_prob
beta_mode beta_sample truncated_normal_entropy truncated_normal_kl truncated_normal_log_prob truncated_normal_mode
truncated_normal_sample ema ema_debiased ema_init masked_variance
"""


ALGORITHMS = """
Algorithm Group GroupSettings Interleaved Kind LEARNER_KINDS LearningConfig MinibatchConfig REPLAY_KINDS
REWARD_NORM_KINDS Run SGD Static check_log_prob collect collect_exploring from_reset gradient_steps groups_of
interleaved learn learning_state make_algorithm minibatch_epochs minibatch_sgd new_replay on_policy reward_norm_init
rows_of sample_keys sgd_choices standardize_over_ranks store take_steps with_scaled_rewards
"""


def test_the_names_for_an_algorithm_of_ones_own_are_in_one_place():
    assert sorted(algorithms.__all__) == sorted(ALGORITHMS.split())
    assert all(hasattr(algorithms, name) for name in ALGORITHMS.split())


def test_public_names_are_these():
    assert sorted(ecrl.__all__) == sorted(ecrl._HOME) == sorted(SURFACE.split())
    assert sorted(kernels.__all__) == sorted(KERNELS.split())
    for name in SURFACE.split():
        assert callable(getattr(ecrl, name)), "no module may shadow a public name"
        assert getattr(ecrl, name).__doc__
        assert name in dir(ecrl)
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = ecrl.trian


FUNCTIONS = [getattr(kernels, name) for name in KERNELS.split() if inspect.isfunction(getattr(kernels, name))]
# Variants of another kernel, or a constructor: their docstring names the kernel with arguments, errors and source.
BRIEF = {
    "normal_mode", "tanh_normal_mode", "tanh_normal_kl", "adam_init", "sgd_init", "rmsprop_init", "global_norm",
    "amsgrad_init", "ema_init", "centered_rmsprop_init",
    "moments_init", "moments_variance", "episode_init", "linear_schedule", "cosine_schedule", "step_schedule",
    "exponential_schedule", "multi_discrete_mode", "multi_discrete_entropy", "multi_discrete_kl", "compute_returns",
    "compute_n_step_returns", "compute_td_lambda_returns", "compute_gae", "compute_upgo_returns", "compute_vtrace",
    "grpo_advantages",
}  # fmt: skip


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_every_kernel_explains_itself(function):
    doc = inspect.getdoc(function)
    assert ">>> " in doc, "a doctest"
    if function.__name__ not in BRIEF:
        for section in ("Args:", "Returns:", "Gradient:"):
            assert section in doc, section
        named = [p for p in inspect.signature(function).parameters]
        assert all(re.search(rf"^\s*{p}: ", doc, re.MULTILINE) for p in named), f"Args must tell of {named}"


def test_importing_ecrl_and_its_config_is_light():
    code = "import sys, ecrl; print('torch' in sys.modules)\n"
    code += "import ecrl.kernels; print('gymnasium' in sys.modules, 'pydantic' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False", "False"]


@pytest.mark.parametrize(
    ("first", "variables", "spin"),
    [
        ("", {}, "4000"),
        ("", {"GOMP_SPINCOUNT": "7"}, "7"),
        ("", {"OMP_WAIT_POLICY": "active"}, "None"),
        ("import torch", {}, "None"),
    ],
)
def test_threads_of_openmp_wait_briefly_unless_the_user_sets_otherwise(first, variables, spin):
    code = f"{first}\nimport os, ecrl; print(os.environ.get('GOMP_SPINCOUNT'))"
    around = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=around | variables
    )
    assert done.stdout.strip() == spin


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_every_config_loads_and_runs_two_iterations(path, tmp_path, monkeypatch):
    changes = {"trainer.compile": "off", "trainer.iterations": 2}
    learns_from_replay = "learning_starts" in path.read_text()
    cfg = load_config(path)
    steps = min(
        cfg.trainer.buffer_size, 4 if learns_from_replay else 16
    )  # a short rollout in as many environments as in the config
    changes["trainer.buffer_size"] = steps
    if learns_from_replay:
        changes |= {"algorithm.cfg.learning_starts": 0, "algorithm.cfg.batch_size": 64}
    elif hasattr(cfg.algorithm.cfg, "batch_size"):
        rows = cfg.algorithm.cfg.batch_size * steps // cfg.trainer.buffer_size
        changes |= {"algorithm.cfg.batch_size": max(rows, steps), "algorithm.cfg.n_epochs": 1}
    if cfg.policy.name == "vla" or "pixels" in path.stem:  # images take long
        changes |= {"trainer.num_envs": 16, "algorithm.cfg.batch_size": 64}
    cfg = cfg.replace(**changes)
    monkeypatch.chdir(tmp_path)
    if cfg.algorithm.name == "bc":
        ecrl.record_demonstrations(cfg, cfg.algorithm.cfg.demos, 10)
    if cfg.trainer.init_from:
        ecrl.save(cfg.trainer.init_from, init_state(cfg.replace(**{"trainer.init_from": None})), cfg)
    records = [r for r in train_iter(init_state(cfg), cfg) if r["log_type"] == "train"]
    assert len(records) == 2
    assert all(torch.isfinite(log) for log in records[-1]["logs"].values())


def test_the_files_a_user_expects_are_there():
    assert (ROOT / "ecrl" / "py.typed").exists()
    assert "Apache License" in (ROOT / "LICENSE").read_text()
    readme = (ROOT / "README.md").read_text()
    assert readme.index("make train") < readme.index("make test") < 1500


def test_dotted_names_need_no_import_of_their_own():
    names = ["registry.lookup", "algorithms.learn", "envs.time_limit", "kernels.gae", "rng.key", "train", "loop.build"]
    code = f"import ecrl\nfor found in ({', '.join(f'ecrl.{name}' for name in names)}): print(type(found).__name__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    kinds = ["function", "function", "_lru_cache_wrapper", "function", "function", "function", "module"]
    assert done.stdout.split() == kinds, done.stderr


@pytest.mark.parametrize("name", ["kernel", "__main__", "kernels.gae", "_kernels", "__wrapped__"])
def test_other_names_are_no_attributes(name):
    with pytest.raises(AttributeError, match=f"^module 'ecrl' has no attribute {name!r}$"):
        ecrl.__getattr__(name)


@pytest.mark.parametrize("frozen", [False, True], ids=["unfrozen", "frozen"])
def test_an_import_leaves_the_garbage_collector_as_it_was(frozen):
    code = f"""
import gc, sys
{"gc.freeze()" if frozen else "gc.disable()"}
before = gc.isenabled(), gc.get_freeze_count() > 0
import ecrl
ecrl.train
print(before == (gc.isenabled(), gc.get_freeze_count() > 0), before)
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.split() == ["True", f"({frozen},", f"{frozen})"]
