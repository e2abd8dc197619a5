"""An example call of every public kernel."""

from types import SimpleNamespace
from typing import Any, cast

import torch
from tensordict import TensorDict
from torch import Tensor

from ecrl import kernels
from support.replay_history import stored

N, T, A, K = 4, 5, 3, 6


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def floats(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator(seed))


def bools(seed: int, *shape: int, share: float = 0.3) -> Tensor:
    return torch.rand(shape, generator=generator(seed)) < share


def steps(seed: int, *names: str) -> tuple[Tensor, ...]:
    """`[N, T]` fields by name: floats, or bools for the flags."""
    flags = ("terminated", "done", "mask")
    return tuple(bools(seed + i, N, T) if name in flags else floats(seed + i, N, T) for i, name in enumerate(names))


def fields(seed: int, *names: str) -> dict[str, Tensor]:
    """`steps` by name, for kernels that take tensors by keyword."""
    return dict(zip(names, steps(seed, *names), strict=True))


def rollout(seed: int) -> TensorDict:
    fields: dict[str, Tensor] = {
        name: floats(seed + i, N, T + 1) for i, name in enumerate(("reward", "value", "final_value", "sample_log_prob"))
    }
    fields |= {"terminated": bools(seed + 8, N, T + 1), "truncated": bools(seed + 9, N, T + 1)}
    return TensorDict(fields | {"done": fields["terminated"] | fields["truncated"]}, [N, T + 1])


def truncated(seed: int) -> Tensor:
    """Flags `[N, T + 1]` with at most two truncations in each row. The last column is padding."""
    flags = bools(seed, N, T + 1)
    flags[:, -1] = False
    return flags & (flags.cumsum(1) <= 2)


def params(seed: int) -> TensorDict:
    return TensorDict({"net": {"w": floats(seed, 3, 2), "b": floats(seed + 1, 3)}, "log_std": floats(seed + 2, 1)}, [])


def scalar(seed: int, low: float = 0.1, high: float = 0.9) -> Tensor:
    return low + (high - low) * floats(seed).sigmoid()


def trained(seed: int, init: Any) -> TensorDict:
    return init(params(seed)).apply(lambda t: t + 1 if t.dtype == torch.int64 else t + scalar(seed))


def moments(seed: int) -> TensorDict:
    return kernels.moments_update(kernels.moments_init((A,)), floats(seed, 9, A), torch.ones(9, dtype=torch.bool))


def episode(seed: int) -> TensorDict:
    return kernels.episode_update(kernels.episode_init(N, 3), floats(seed, N, T), bools(seed + 1, N, T))


def policy_and_env() -> tuple[Any, Any]:
    def act(params, carry, obs, noise):
        return carry, TensorDict({"action": obs * params["log_std"], "sample_log_prob": obs}, obs.shape)

    def step(state, action, noise):
        after = state["obs"] + action + 0.1 * noise
        no = torch.zeros_like(after, dtype=torch.bool)
        fields = {"obs": after, "reward": -after, "terminated": after > 9, "truncated": no, "final_obs": after}
        return TensorDict(fields, after.shape)

    policy = SimpleNamespace(act=act, draw=lambda keys: keys / 8, value=lambda p, c, obs: obs * p["log_std"])
    return policy, SimpleNamespace(step=step, draw=lambda keys: keys / 4, is_pure=True)


POLICY, ENV = policy_and_env()
EMPTY = TensorDict({}, [])


def act_and_step(params: TensorDict, state: TensorDict, noise: Tensor) -> Any:
    return kernels.act_and_step(POLICY.act, ENV.step, params, EMPTY, state, noise, noise)[1:]


def collect_rollout(params: TensorDict, state: TensorDict, keys: Tensor) -> Any:
    return kernels.collect_rollout(POLICY, ENV, params, EMPTY, state, keys, keys)[1:]


def _step(carry: Tensor, x: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
    return carry * factor + x, (carry - x).sin()


def scan(carry: Tensor, xs: Tensor, factor: Tensor) -> Any:
    return kernels.scan(_step, carry, xs, factor)


def loop(carry: Tensor, xs: Tensor, factor: Tensor) -> Any:
    return kernels.loop(_step, carry, xs, factor)


def start(seed: int) -> TensorDict:
    zero = torch.zeros(N)
    no = zero > 0
    fields = {
        "obs": floats(seed, N),
        "reward": zero,
        "terminated": no,
        "truncated": no.clone(),
        "final_obs": zero.clone(),
    }
    return TensorDict(fields, [N])


def replay_rows(seed: int, length: int) -> TensorDict:
    """Steps `[length, N]` for a replay buffer."""
    fields = {
        "obs": floats(seed, length, N, A),
        "final_obs": floats(seed + 1, length, N, A),
        "action": (8 * floats(seed + 2, length, N)).to(torch.int64),
        "reward": floats(seed + 3, length, N),
        "terminated": bools(seed + 4, length, N, share=0.1),
        "truncated": bools(seed + 5, length, N, share=0.2),
    }
    return TensorDict(fields, [length, N])


def example_rows(seed: int) -> TensorDict:
    return cast(TensorDict, replay_rows(seed, 1).exclude("final_obs")[0])


def replay(seed: int) -> kernels.Replay:
    """A buffer of 12 steps after 18 steps, of which the last 6 are in the block."""
    ring = kernels.replay_init(example_rows(seed), steps=12, min_truncation_gap=1)
    for start in (0, 6):
        now = kernels.replay_start(ring, torch.tensor(start), steps=6)
        ring = stored(kernels.replay_add(now, replay_rows(seed + start, 6)))
    return kernels.replay_add(kernels.replay_start(ring, torch.tensor(12), steps=6), replay_rows(seed + 12, 6))


def with_mask(ring: TensorDict) -> TensorDict:
    """A ring with the field `mask`."""
    return ring.clone().set(("steps", "mask"), ring["steps", "reward"] > 0.0)


def drawn(seed: int) -> Tensor:
    return kernels.replay_index(replay(seed), torch.arange(7) + seed, n=3, stack=2)


def tree(seed: int) -> Tensor:
    index = torch.arange(12 * N)
    return kernels.tree_set(kernels.tree_init(12 * N), index, floats(seed, 12 * N).double().exp())


def priorities(seed: int) -> tuple[Tensor, Tensor]:
    """Leaves, one of them twice, and their priorities."""
    return torch.tensor([5, 4 + seed, 5, 30, 31]), floats(seed, 5).exp()


ESTIMATOR = ("reward", "value", "next_value", "terminated", "done")
TARGETS = ("reward", "next_value", "terminated", "done")


def hyper(seed: int, *names: str, **static: Any) -> dict[str, Any]:
    return {name: scalar(seed + i) for i, name in enumerate(names)} | static


def transition(seed: int, *next_fields: Tensor) -> tuple[Tensor, ...]:
    """Reward, the fields of the next state, and `terminated`."""
    return (floats(seed, N, T), *next_fields, bools(seed + 1, N, T))


def sequences(seed: int) -> tuple[Tensor, ...]:
    """Log-probabilities of two policies, an advantage per sequence and a mask, with masked tokens in each row."""
    return floats(seed, N, T), floats(seed + 1, N, T), floats(seed + 2, N), bools(seed + 3, N, T, share=0.8)


CLIPS = ("clip_low", "clip_high")
GATES = ("k_positive", "lambda_positive", "k_negative", "lambda_negative")


def dists(seed: int, *shape: int) -> Tensor:
    return floats(seed, *shape).softmax(-1)


def support() -> Tensor:
    return torch.linspace(-2.0, 2.0, K)


def opt_call(seed: int, init: Any, *names: str) -> tuple[tuple, dict]:
    return (params(seed), params(seed + 5), trained(seed + 9, init)), hyper(seed, "learning_rate", *names)


def normal_pair(seed: int) -> tuple[Tensor, ...]:
    return floats(seed, N, A), floats(seed + 1, A), floats(seed + 2, N, A), floats(seed + 3, A)


def flow_times(seed: int) -> tuple[Tensor, Tensor]:
    """Times with both ends of the interval, and lengths of steps."""
    t = torch.tensor([1.0, 0.75, 0.5, 0.25]).reshape(N, 1, 1)
    return t, 0.25 * scalar(seed)


def concentrations(seed: int) -> tuple[Tensor, Tensor]:
    return floats(seed, N, A).exp(), floats(seed + 1, N, A).exp()


BOUNDS = (torch.tensor([-1.0, -0.5, -2.0]), 1.0)
NVEC = {"nvec": (2, 4)}
# name -> seed -> (positional arguments, keyword arguments): 0-d tensors for hyperparameters that may change in mid-run
CALLS: dict[str, Any] = {
    "episode_discounts": lambda s: ((bools(s, N, T),), hyper(s, "gamma")),
    "discounted_returns": lambda s: (steps(s, *TARGETS), hyper(s, "gamma")),
    "n_step_returns": lambda s: (steps(s, *TARGETS), hyper(s, "gamma", n=3)),
    "td_lambda_returns": lambda s: (steps(s, *TARGETS), hyper(s, "gamma", "gae_lambda")),
    "gae": lambda s: (steps(s, *ESTIMATOR), hyper(s, "gamma", "gae_lambda")),
    "upgo_returns": lambda s: (steps(s, *ESTIMATOR), hyper(s, "gamma")),
    "vtrace": lambda s: (
        steps(s, "log_prob", "old_log_prob", *ESTIMATOR),
        hyper(s, "gamma", "gae_lambda", "clip_rho", "clip_c", "clip_pg_rho"),
    ),
    "compute_returns": lambda s: ((rollout(s), scalar(s)), {}),
    "compute_n_step_returns": lambda s: ((rollout(s), scalar(s), 3), {}),
    "compute_td_lambda_returns": lambda s: ((rollout(s), scalar(s), scalar(s + 1)), {}),
    "compute_gae": lambda s: ((rollout(s), scalar(s), scalar(s + 1)), {}),
    "compute_upgo_returns": lambda s: ((rollout(s), scalar(s)), {}),
    "compute_vtrace": lambda s: (
        (rollout(s), floats(s, N, T)),
        hyper(s, "gamma", "gae_lambda", "clip_rho", "clip_c", "clip_pg_rho"),
    ),
    "transitions": lambda s: ((rollout(s),), {}),
    "group_advantages": lambda s: ((floats(s, N, T), bools(s, N, T, share=0.8)), hyper(s, "eps", group_size=2)),
    "grpo_advantages": lambda s: ((rollout(s),), hyper(s, "gamma", "eps", group_size=2)),
    "first_episode_mask": lambda s: ((bools(s, N, T),), {}),
    "masked_variance": lambda s: (steps(s, "x", "mask"), {}),
    "masked_mean": lambda s: (steps(s, "x", "mask"), {}),
    "standardize": lambda s: (steps(s, "x", "mask"), hyper(s, "eps")),
    "clipped_surrogate": lambda s: (
        steps(s, "log_prob", "old_log_prob", "advantage", "mask"),
        hyper(s, "clip_coef"),
    ),
    "policy_gradient_loss": lambda s: (steps(s, "log_prob", "advantage", "mask"), {}),
    "a2c_loss": lambda s: (
        (),
        fields(s, "log_prob", "advantage", "entropy", "value", "value_target", "mask")
        | hyper(s, "vf_coef", "ent_coef"),
    ),
    "value_loss": lambda s: (steps(s, "value", "value_target", "mask"), {}),
    "huber_value_loss": lambda s: (steps(s, "value", "value_target", "mask"), hyper(s, "delta")),
    "clipped_value_loss": lambda s: (steps(s, "value", "old_value", "value_target", "mask"), hyper(s, "clip_coef")),
    "kl_k1": lambda s: (steps(s, "log_prob", "ref_log_prob"), {}),
    "kl_k2": lambda s: (steps(s, "log_prob", "ref_log_prob"), {}),
    "kl_k3": lambda s: (steps(s, "log_prob", "ref_log_prob"), {}),
    "explained_variance": lambda s: (steps(s, "value", "value_target", "mask"), {}),
    "ppo_loss": lambda s: (
        (),
        fields(s, "log_prob", "old_log_prob", "advantage", "entropy", "value", "value_target", "mask")
        | hyper(s, "clip_coef", "vf_coef", "ent_coef"),
    ),
    "ppo_loss_clipped_value": lambda s: (
        (),
        fields(s, "log_prob", "old_log_prob", "advantage", "entropy", "value", "old_value", "value_target", "mask")
        | hyper(s, "clip_coef", "vf_coef", "ent_coef"),
    ),
    "ppo_loss_kl_penalty": lambda s: (
        (),
        fields(s, "log_prob", "old_log_prob", "advantage", "kl", "entropy", "value", "value_target", "mask")
        | hyper(s, "kl_coef", "vf_coef", "ent_coef"),
    ),
    "adaptive_kl_coef": lambda s: (
        (scalar(s), scalar(s + 1)),
        hyper(s, "target_kl", "tolerance", "factor"),
    ),
    "grpo_loss": lambda s: (
        (),
        fields(s, "log_prob", "old_log_prob", "ref_log_prob", "advantage", "entropy", "mask")
        | hyper(s, "clip_coef", "kl_coef", "ent_coef"),
    ),
    "kl_k3_with_k2_gradient": lambda s: (steps(s, "log_prob", "ref_log_prob"), {}),
    "group_centered": lambda s: ((floats(s, N, T), bools(s, N, T, share=0.8)), {"group_size": 2}),
    "leave_one_out": lambda s: ((floats(s, N, T), bools(s, N, T, share=0.8)), {"group_size": 2}),
    "informative_groups": lambda s: (
        (floats(s, N, T), bools(s, N, T, share=0.8)),
        hyper(s, "high", group_size=2) | {"low": -scalar(s + 1)},
    ),
    "clipped_surrogate_asymmetric": lambda s: (sequences(s), hyper(s, *CLIPS) | {"dual_clip": 2.0 + scalar(s + 2)}),
    "gspo_loss": lambda s: (sequences(s), hyper(s, *CLIPS)),
    "cispo_loss": lambda s: (sequences(s), hyper(s, *CLIPS)),
    "sapo_loss": lambda s: (sequences(s), hyper(s, "tau_positive", "tau_negative")),
    "vespo_loss": lambda s: (sequences(s), hyper(s, *GATES)),
    "sequence_log_ratio": lambda s: (steps(s, "log_prob", "old_log_prob", "mask"), {}),
    "token_mean": lambda s: (steps(s, "x", "mask"), {}),
    "sequence_mean": lambda s: (steps(s, "x", "mask"), {}),
    "fixed_length_mean": lambda s: (steps(s, "x", "mask"), {"length": 4.0 + scalar(s)}),
    "whiten": lambda s: ((floats(s, N), bools(s, N, T)), hyper(s, "eps")),
    "overlong_penalty": lambda s: (
        ((8.0 * floats(s, N, T)).abs().round(),),
        {"max_length": 9.0 + scalar(s), "buffer_length": 5.0 + scalar(s + 1)},
    ),
    "truncated_importance": lambda s: (steps(s, "log_prob", "sampler_log_prob", "mask"), {"cap": 1.0 + scalar(s)}),
    "truncated_sequence_importance": lambda s: (
        steps(s, "log_prob", "sampler_log_prob", "mask"),
        {"cap": 1.0 + scalar(s)},
    ),
    "masked_sequence_importance": lambda s: (
        steps(s, "log_prob", "sampler_log_prob", "mask"),
        {"cap": 1.0 + scalar(s)},
    ),
    "mask_logits": lambda s: ((floats(s, N, K), bools(s, N, K)), {}),
    "categorical_sample": lambda s: ((floats(s, N, K), floats(s + 1, N, K)), {}),
    "categorical_mode": lambda s: ((floats(s, N, K),), {}),
    "categorical_log_prob": lambda s: ((floats(s, N, K), torch.arange(N)), {}),
    "categorical_entropy": lambda s: ((floats(s, N, K),), {}),
    "categorical_kl": lambda s: ((floats(s, N, K), floats(s + 1, N, K)), {}),
    "multi_discrete_sample": lambda s: ((floats(s, N, K), floats(s + 1, N, K)), NVEC),
    "multi_discrete_mode": lambda s: ((floats(s, N, K),), NVEC),
    "multi_discrete_log_prob": lambda s: ((floats(s, N, K), torch.tensor([[0, 3]] * N)), NVEC),
    "multi_discrete_entropy": lambda s: ((floats(s, N, K),), NVEC),
    "multi_discrete_kl": lambda s: ((floats(s, N, K), floats(s + 1, N, K)), NVEC),
    "normal_sample": lambda s: (normal_pair(s)[:3], {}),
    "normal_mode": lambda s: ((floats(s, N, A),), {}),
    "normal_log_prob": lambda s: (normal_pair(s)[:3], {}),
    "normal_entropy": lambda s: (normal_pair(s)[:2], {}),
    "normal_kl": lambda s: (normal_pair(s), {}),
    "tanh_normal_sample": lambda s: (normal_pair(s)[:3], {}),
    "tanh_normal_mode": lambda s: ((floats(s, N, A),), {}),
    "tanh_normal_latent": lambda s: ((floats(s, N, A).tanh(),), {}),
    "tanh_normal_log_prob": lambda s: (normal_pair(s)[:3], {}),
    "tanh_normal_entropy": lambda s: (normal_pair(s)[:2], {}),
    "tanh_normal_kl": lambda s: (normal_pair(s), {}),
    "bernoulli_sample": lambda s: ((floats(s, N, A), floats(s + 1, N, A).sigmoid()), {}),
    "bernoulli_mode": lambda s: ((floats(s, N, A),), {}),
    "bernoulli_log_prob": lambda s: ((floats(s, N, A), torch.arange(N * A).reshape(N, A) % 2), {}),
    "bernoulli_entropy": lambda s: ((floats(s, N, A),), {}),
    "bernoulli_kl": lambda s: ((floats(s, N, A), floats(s + 1, N, A)), {}),
    "beta_sample": lambda s: ((*concentrations(s), torch.arange(N) + s), {}),
    "beta_mode": lambda s: (concentrations(s), {}),
    "beta_log_prob": lambda s: ((*concentrations(s), floats(s + 2, N, A).sigmoid()), {}),
    "beta_entropy": lambda s: (concentrations(s), {}),
    "beta_kl": lambda s: ((*concentrations(s), *concentrations(s + 2)), {}),
    "truncated_normal_sample": lambda s: (
        (*normal_pair(s)[:2], *BOUNDS, floats(s + 2, N, A).sigmoid()),
        {},
    ),
    "truncated_normal_mode": lambda s: ((floats(s, N, A), *BOUNDS), {}),
    "truncated_normal_log_prob": lambda s: ((*normal_pair(s)[:2], *BOUNDS, 0.5 * floats(s + 2, N, A).tanh()), {}),
    "truncated_normal_entropy": lambda s: ((*normal_pair(s)[:2], *BOUNDS), {}),
    "truncated_normal_kl": lambda s: ((*normal_pair(s), *BOUNDS), {}),
    "flow_interpolate": lambda s: ((floats(s, N, T, A), floats(s + 1, N, T, A), flow_times(s)[0]), {}),
    "flow_matching_loss": lambda s: (tuple(floats(s + i, N, A) for i in range(3)), {}),
    "flow_ode_step": lambda s: ((floats(s, N, T, A), floats(s + 1, N, T, A), scalar(s)), {}),
    "flow_sde_step": lambda s: ((floats(s, N, T, A), floats(s + 1, N, T, A), *flow_times(s)), hyper(s, "noise_level")),
    "flow_log_prob": lambda s: ((floats(s, N, A), floats(s + 1, A).exp(), floats(s + 2, N, A)), {}),
    "flow_entropy": lambda s: ((floats(s, N, A).exp(),), {}),
    "moments_merge": lambda s: ((moments(s), moments(s + 1)), {}),
    "moments_update": lambda s: ((moments(s), floats(s, N, A), bools(s, N)), {}),
    "moments_variance": lambda s: ((moments(s),), {}),
    "normalize": lambda s: ((floats(s, N, A), moments(s)), hyper(s, "eps", "clip")),
    "scale": lambda s: ((floats(s, N, A), moments(s)), hyper(s, "eps", "clip")),
    "adam_init": lambda s: ((params(s),), {}),
    "adam": lambda s: opt_call(s, kernels.adam_init, "beta1", "beta2", "eps"),
    "adamw": lambda s: opt_call(s, kernels.adam_init, "beta1", "beta2", "eps", "weight_decay"),
    "amsgrad_init": lambda s: ((params(s),), {}),
    "amsgrad": lambda s: opt_call(s, kernels.amsgrad_init, "beta1", "beta2", "eps"),
    "sgd_init": lambda s: ((params(s),), {}),
    "nesterov_sgd": lambda s: opt_call(s, kernels.sgd_init, "momentum"),
    "centered_rmsprop_init": lambda s: ((params(s),), {}),
    "centered_rmsprop": lambda s: opt_call(s, kernels.centered_rmsprop_init, "alpha", "eps"),
    "l2_weight_decay": lambda s: ((params(s), params(s + 5)), hyper(s, "weight_decay")),
    "decoupled_weight_decay": lambda s: ((params(s),), hyper(s, "learning_rate", "weight_decay")),
    "sgd": lambda s: opt_call(s, kernels.sgd_init, "momentum"),
    "rmsprop_init": lambda s: ((params(s),), {}),
    "rmsprop": lambda s: opt_call(s, kernels.rmsprop_init, "alpha", "eps"),
    "global_norm": lambda s: ((params(s),), {}),
    "clip_by_global_norm": lambda s: ((params(s),), hyper(s, "max_norm")),
    "linear_schedule": lambda s: ((torch.tensor(s),), hyper(s, "start", "end", horizon=20)),
    "cosine_schedule": lambda s: ((torch.tensor(s),), hyper(s, "end", horizon=20)),
    "warmup_linear_schedule": lambda s: ((torch.tensor(s),), hyper(s, "start", "end", warmup=4, horizon=20)),
    "warmup_cosine_schedule": lambda s: ((torch.tensor(s),), hyper(s, "start", "end", warmup=4, horizon=20)),
    "step_schedule": lambda s: ((torch.tensor(s),), hyper(s, "gamma", every=2)),
    "exponential_schedule": lambda s: ((torch.tensor(s),), hyper(s, "gamma")),
    "act_and_step": lambda s: ((params(s), start(s), floats(s, N)), {}),
    "collect_rollout": lambda s: ((params(s), start(s), torch.arange(T * N).reshape(T, N) + s), {}),
    "place_at_truncations": lambda s: ((floats(s, N, 2), truncated(s)), {}),
    "replay_init": lambda s: ((example_rows(s),), {"steps": 5, "min_truncation_gap": 2}),
    "replay_start": lambda s: ((replay(s).ring, torch.tensor(18 + s)), {"steps": 4}),
    "replay_add": lambda s: (
        (kernels.replay_start(replay(s).ring, torch.tensor(s), steps=4), replay_rows(s + 9, 2)),
        {},
    ),
    "replay_cut": lambda s: ((with_mask(replay(s).ring), torch.tensor(18 + s)), {}),
    "replay_writes": lambda s: ((replay(s),), {}),
    "replay_count": lambda s: ((replay(s),), {"n": 3, "stack": 2}),
    "replay_index": lambda s: ((replay(s), torch.arange(7) + s), {"n": 3, "stack": 2}),
    "replay_read": lambda s: ((replay(s), drawn(s)), hyper(s, "gamma", n=3)),
    "replay_stack": lambda s: ((replay(s), drawn(s)), hyper(s, "gamma", n=3, stack=2)),
    "replay_add_priority": lambda s: ((replay(s), tree(s), scalar(s).double()), {"steps": 6, "n": 3, "stack": 2}),
    "replay_prioritized_index": lambda s: ((tree(s), torch.arange(7) + s), {}),
    "replay_set_priority": lambda s: (
        (tree(s), scalar(s).double(), *priorities(s), priorities(s)[1] > 0.3),
        hyper(s, "alpha", "eps"),
    ),
    "importance_weights": lambda s: ((floats(s, N).exp(),), hyper(s, "beta")),
    "tree_find": lambda s: ((tree(s), floats(s, 7).sigmoid().double() * tree(s)[1]), {}),
    "tree_set": lambda s: ((tree(s), *priorities(s)), {}),
    "push_frame": lambda s: ((floats(s, N, 2, A), bools(s + 1, N), floats(s + 2, N, A)), {}),
    "stack_frames": lambda s: ((floats(s, N, 2, A), bools(s + 1, N), floats(s + 2, N, T, A), bools(s + 3, N, T)), {}),
    "random_shift": lambda s: ((floats(s, N, 6, 5, A), torch.randint(-2, 3, (N, 2), generator=generator(s))), {}),
    "scan": lambda s: ((floats(s, N), floats(s + 1, T, N), floats(s + 2, N)), {}),
    "loop": lambda s: ((floats(s, N), floats(s + 1, T, N), floats(s + 2, N)), {}),
    "episode_update": lambda s: ((episode(s), *steps(s, "reward", "done", "mask")), {}),
    "restarted": lambda s: ((episode(s),), {}),
    "running_returns": lambda s: ((*steps(s, "reward", "done"), floats(s + 5, N)), hyper(s, "gamma")),
    "q_target": lambda s: (transition(s, floats(s + 5, N, T, K)), hyper(s, "gamma")),
    "double_q_target": lambda s: (transition(s, floats(s + 5, N, T, K), floats(s + 6, N, T, K)), hyper(s, "gamma")),
    "expected_q_target": lambda s: (transition(s, floats(s + 5, N, T, K), dists(s + 6, N, T, K)), hyper(s, "gamma")),
    "munchausen_target": lambda s: (
        (
            floats(s, N, T),
            floats(s + 1, N, T, K),
            torch.arange(T).expand(N, T),
            *transition(s, floats(s + 5, N, T, K))[1:],
        ),
        hyper(s, "gamma", "temperature", "munchausen_coef") | {"clip_value_min": -scalar(s + 9)},
    ),
    "min_q_target": lambda s: (transition(s, floats(s + 5, 2, N, T)), hyper(s, "gamma")),
    "soft_min_q_target": lambda s: (
        transition(s, floats(s + 5, 2, N, T), floats(s + 6, N, T)),
        hyper(s, "gamma", "temperature"),
    ),
    "soft_q_target": lambda s: (
        transition(s, floats(s + 5, 2, N, T, K), floats(s + 6, N, T, K)),
        hyper(s, "gamma", "temperature"),
    ),
    "smoothed_action": lambda s: (
        (floats(s, N, A), floats(s + 1, N, A), torch.tensor([-1.0, -0.5, -2.0]), 1.0),
        hyper(s, "policy_noise", "noise_clip"),
    ),
    "q_lambda": lambda s: ((*transition(s, floats(s + 5, N, T, K)), bools(s + 7, N, T)), hyper(s, "gamma", "trace")),
    "retrace": lambda s: (
        steps(s, "reward", "next_q_taken", "next_v", "log_rho", "terminated", "done"),
        hyper(s, "gamma", "trace"),
    ),
    "categorical_project": lambda s: ((dists(s, N, K), floats(s + 1, N, K), torch.linspace(-1.0, 1.0, 4)), {}),
    "categorical_target": lambda s: ((*transition(s, dists(s + 5, N, T, K)), support()), hyper(s, "gamma")),
    "categorical_q_target": lambda s: (
        (*transition(s, floats(s + 5, N, T, A, K), floats(s + 6, N, T, A)), support()),
        hyper(s, "gamma"),
    ),
    "min_categorical_target": lambda s: (
        (*transition(s, floats(s + 5, 2, N, T, K)), support()),
        hyper(s, "gamma"),
    ),
    "soft_categorical_target": lambda s: (
        (*transition(s, floats(s + 5, 2, N, T, K), floats(s + 6, N, T)), support()),
        hyper(s, "gamma", "temperature"),
    ),
    "categorical_td_loss": lambda s: (
        (floats(s, 2, N, T, K), dists(s + 1, N, T, K), *steps(s, "weight", "mask")),
        {},
    ),
    "quantile_q_target": lambda s: (
        transition(s, floats(s + 5, N, T, A, K), floats(s + 6, N, T, A)),
        hyper(s, "gamma"),
    ),
    "quantile_huber_loss": lambda s: ((floats(s, N, K), dists(s + 1, K), floats(s + 2, N, A)), hyper(s, "delta")),
    "hl_gauss": lambda s: ((floats(s, N, T), support()), hyper(s, "sigma")),
    "huber": lambda s: ((floats(s, N, T),), hyper(s, "delta")),
    "td_loss": lambda s: ((floats(s + 5, 2, N, T), *steps(s, "target", "weight", "mask")), hyper(s, "delta")),
    "dpg_loss": lambda s: (steps(s, "q", "mask"), {}),
    "soft_actor_loss": lambda s: ((floats(s, N, T), floats(s + 1, 2, N, T), bools(s, N, T)), hyper(s, "temperature")),
    "discrete_soft_actor_loss": lambda s: (
        (floats(s, N, T, K), floats(s + 1, 2, N, T, K), bools(s, N, T)),
        hyper(s, "temperature"),
    ),
    "temperature_loss": lambda s: ((scalar(s), *steps(s, "log_prob", "mask")), hyper(s, "target_entropy")),
    "truncation_parents": lambda s: ((floats(s, N, T), floats(s + 1, N, T).sigmoid()), {"count": 2}),
    "perturbed": lambda s: (
        (floats(s, N), bools(s + 1, N), floats(s + 2, N).sigmoid()),
        hyper(s, "factor", "low", "high"),
    ),
    "soft_update": lambda s: ((params(s), params(s + 5)), hyper(s, "tau")),
    "ema_init": lambda s: ((params(s),), {}),
    "ema": lambda s: ((params(s), trained(s + 5, kernels.ema_init)), hyper(s, "decay")),
    "ema_debiased": lambda s: ((trained(s + 5, kernels.ema_init),), hyper(s, "decay")),
    "periodic_update": lambda s: ((params(s), params(s + 5), torch.tensor(s)), {"period": 2}),
    "epsilon_greedy": lambda s: ((floats(s, N, K), floats(s + 1, N, K)), hyper(s, "epsilon")),
    "gaussian_action": lambda s: (
        (floats(s, N, A), floats(s + 1, N, A), torch.tensor([-1.0, -0.5, -2.0]), 1.0),
        hyper(s, "std"),
    ),
    "ou_noise": lambda s: ((floats(s, N, A), floats(s + 1, N, A)), hyper(s, "theta", "sigma", "dt")),
    "held_noise": lambda s: ((floats(s, N, A), torch.arange(N) % 2, floats(s + 1, N, A), 3), {}),
    "noise_scales": lambda s: ((*steps(s, "scale", "uniform"), bools(s, N, T)), hyper(s, "low", "high")),
    "noisy_linear": lambda s: (
        (floats(s, N, A), *(floats(s + i, *size) for i, size in enumerate(((T, A), (T,), (T, A), (T,), (N, A), (T,))))),
        {},
    ),
}
# Their functions are bound: no tensors.
WRAPPED = {"act_and_step": act_and_step, "collect_rollout": collect_rollout, "scan": scan, "loop": loop}
NO_FLOATS = {  # flags and actions
    "truncation_parents",
    "epsilon_greedy", "bernoulli_sample", "bernoulli_mode",
    "first_episode_mask", "categorical_sample", "categorical_mode", "multi_discrete_sample", "multi_discrete_mode",
    "replay_count", "replay_index", "tree_find", "informative_groups",
}  # fmt: skip
NO_TENSORS = {
    "moments_init": "takes a shape",
    "tree_init": "takes a number",
    "episode_init": "takes numbers",
    "quantile_midpoints": "takes a number",
}


def kernel(name: str) -> Any:
    return WRAPPED.get(name) or getattr(kernels, name)
