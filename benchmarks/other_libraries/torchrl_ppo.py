"""TorchRL's PPO with its usual parts: a collector, GAE, ClipPPOLoss and a replay buffer for minibatches.

It uses Gymnasium's SyncVectorEnv, as the other libraries do. The AsyncVectorEnv of `GymEnv(num_envs=...)` would start a
process per environment.
"""

from collections.abc import Callable, Iterator

import gymnasium as gym
import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torch import nn
from torch.distributions import Categorical
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, ReplayBuffer, SamplerWithoutReplacement
from torchrl.envs import GymWrapper, RewardSum, TransformedEnv
from torchrl.modules import MLP, ProbabilisticActor, ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE

from benchmarks.other_libraries import STEPS, as_work

EPOCHS, MINIBATCHES = 4, 4


def modules() -> tuple[ProbabilisticActor, ValueOperator]:
    """Return an actor and a critic with separate 64x64 tanh networks."""

    def network(out: int) -> MLP:
        return MLP(in_features=4, out_features=out, num_cells=[64, 64], activation_class=nn.Tanh)

    actor = ProbabilisticActor(
        TensorDictModule(network(2), in_keys=["observation"], out_keys=["logits"]),
        in_keys=["logits"],
        out_keys=["action"],
        distribution_class=Categorical,
        return_log_prob=True,
    )
    return actor, ValueOperator(network(1), in_keys=["observation"])


def environments(num_envs: int) -> TransformedEnv:
    """Return a vector of environments whose actions are integers."""
    by_torchrl = {"autoreset_mode": gym.vector.AutoresetMode.DISABLED}  # TorchRL resets by itself
    vector = gym.make_vec("CartPole-v1", num_envs, vectorization_mode="sync", vector_kwargs=by_torchrl)
    return TransformedEnv(GymWrapper(vector, categorical_action_encoding=True), RewardSum())


def iterations(num_envs: int, seed: int = 0) -> Iterator[float]:
    """Yield the mean return of the episodes that ended in each rollout, after its update."""
    torch.manual_seed(seed)
    actor, critic = modules()
    frames = num_envs * STEPS
    collector = Collector(
        environments(num_envs), actor, frames_per_batch=frames, total_frames=-1, device="cpu", max_frames_per_traj=-1
    )
    advantage = GAE(gamma=0.99, lmbda=0.95, value_network=critic, average_gae=False)
    loss = ClipPPOLoss(actor, critic, clip_epsilon=0.2, entropy_coeff=0.01, critic_coeff=0.5, normalize_advantage=True)
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(frames), sampler=SamplerWithoutReplacement(), batch_size=frames // MINIBATCHES
    )
    optimizer = torch.optim.Adam(loss.parameters(), lr=1e-3, eps=1e-5)
    for batch in collector:
        with torch.no_grad():
            batch = advantage(batch)
        update(batch, loss, buffer, optimizer)
        ended = batch["next", "episode_reward"][batch["next", "done"]]
        yield float(ended.mean())


def update(batch: TensorDictBase, loss: ClipPPOLoss, buffer: ReplayBuffer, optimizer: torch.optim.Optimizer) -> None:
    """Take one gradient step on each minibatch that the buffer draws, for all epochs."""
    for _ in range(EPOCHS):
        buffer.extend(batch.reshape(-1))
        for minibatch in buffer:
            losses = loss(minibatch)
            total = losses["loss_objective"] + losses["loss_entropy"] + losses["loss_critic"]
            optimizer.zero_grad()
            total.backward()
            nn.utils.clip_grad_norm_(loss.parameters(), 0.5)
            optimizer.step()


def make(num_envs: int) -> Callable[[], int]:
    """Return a function that runs one rollout and its update, and returns the number of environment steps."""
    return as_work(iterations(num_envs), num_envs * STEPS)
