"""Records as the training loop yields them, with logs and with empty states."""

import torch
from tensordict import TensorDict

from ecrl.types import LogData


def record(kind="train", step=10, **logs) -> LogData:
    numbers = {k: torch.tensor(v) for k, v in logs.items()}
    return LogData(log_type=kind, sample_step=step, logs=numbers, state=TensorDict({}, []))


RECORDS = [
    record("collect", 10, episode_reward_avg_100=float("nan")),
    record("train", 10, policy_loss=0.5, entropy=2.0),
    record("evaluate", 10, **{"eval/avg_reward": 3.0}),
    record("collect", 20, episode_reward_avg_100=7.0, **{"rewards/reach": 0.5, "metrics/distance": 0.125}),
    record("train", 20, policy_loss=0.25, entropy=1.0),
]
NAMES = {
    "charts/episode_reward_avg_100", "charts/SPS", "train/policy_loss", "train/entropy", "eval/avg_reward",
    "rewards/reach", "metrics/distance",
}  # fmt: skip
