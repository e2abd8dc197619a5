"""Functions for independent Bernoulli variables with given logits: sample, mode, log_prob, entropy and kl.

Logits have the shape `[*B, A]`, with one logit for each variable. log_prob, entropy and kl are sums over the last axis.
The sampler takes uniform noise as an argument (see `ecrl.rng`). Half-precision inputs are converted to float32, and
results are converted back to half precision.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ecrl.kernels.dtypes import common_dtype, widened
from ecrl.types import same_shape


def bernoulli_sample(logits: Tensor, noise: Tensor) -> Tensor:
    """Sample 1 with probability sigmoid(logits), and 0 otherwise.

        1 if 1 - noise <= sigmoid(logits) else 0

    `noise` is below 1, so `1 - noise` is above 0. If sigmoid(logits) is 0, the sample is therefore never 1.

    Args:
        logits: `[*B, A]` float.
        noise: `[*B, A]` float, uniform on [0, 1).

    Returns: int64 `[*B, A]`.
    Gradient: none.
    Raises: ValueError naming the arguments whose shapes differ.

    >>> bernoulli_sample(torch.tensor([0.0, 0.0]), torch.tensor([0.25, 0.75]))
    tensor([0, 1])
    """
    same_shape(logits=logits, noise=noise)
    logits, noise = widened(logits, noise)
    return (1.0 - noise <= torch.sigmoid(logits)).to(torch.int64)


def bernoulli_mode(logits: Tensor) -> Tensor:
    """Return 1 where 1 is more probable than 0, and 0 elsewhere.

        1 if logits > 0 else 0

    Args:
        logits: `[*B, A]` float.

    Returns: int64 `[*B, A]`.
    Gradient: none.

    >>> bernoulli_mode(torch.tensor([-1.0, 2.0]))
    tensor([0, 1])
    """
    return (logits > 0.0).to(torch.int64)


def bernoulli_log_prob(logits: Tensor, action: Tensor) -> Tensor:
    """Return the log-probability of `action` in nats, summed over the last axis.

        sum_a(log(sigmoid(logits)) if action else log(sigmoid(-logits)))

    Args:
        logits: `[*B, A]` float.
        action: `[*B, A]` integer or bool. Any value except 0 counts as 1.

    Returns: `[*B]`.
    Gradient: flows through `logits`.
    Raises: ValueError naming the argument, if shapes differ or `action` holds floats.

    >>> bernoulli_log_prob(torch.tensor([0.0, 0.0]), torch.tensor([0, 1]))
    tensor(-1.3863)
    """
    same_shape(logits=logits, action=action)
    if action.is_floating_point():
        raise ValueError(f"action has dtype {str(action.dtype)[6:]}, expected an integer dtype or bool")
    dtype, (logits,) = common_dtype(logits), widened(logits)
    return F.logsigmoid(torch.where(action != 0, logits, -logits)).sum(-1).to(dtype)


def bernoulli_entropy(logits: Tensor) -> Tensor:
    """Return the entropy of the Bernoulli variables in nats, summed over the last axis.

        sum_a(-p log(p) - (1 - p) log(1 - p)) = sum_a(log(1 + exp(-x)) + x sigmoid(-x))
        p = sigmoid(logits),    x = |logits|

    The second form has no cancellation, even if `p` is near 0 or 1.

    Args:
        logits: `[*B, A]` float.

    Returns: `[*B]`.
    Gradient: flows through `logits`.

    >>> bernoulli_entropy(torch.tensor([0.0]))
    tensor(0.6931)
    """
    dtype, (logits,) = common_dtype(logits), widened(logits)
    x = logits.abs()
    return (x * torch.sigmoid(-x) - F.logsigmoid(x)).sum(-1).to(dtype)


def bernoulli_kl(logits: Tensor, other_logits: Tensor) -> Tensor:
    """Return the KL divergence KL(Bernoulli(p) | Bernoulli(q)) in nats, summed over the last axis.

        sum_a(p (log(p) - log(q)) + (1 - p) (log(1 - p) - log(1 - q)))
        p = sigmoid(logits),    q = sigmoid(other_logits)

    Outcomes of probability 0 under `logits` contribute 0 to the sum.

    Args:
        logits: `[*B, A]` float.
        other_logits: `[*B, A]` float.

    Returns: `[*B]`.
    Gradient: flows through both arguments.
    Raises: ValueError naming the arguments whose shapes differ.

    >>> bernoulli_kl(torch.tensor([0.0]), torch.tensor([0.0]))
    tensor(0.)
    """
    same_shape(logits=logits, other_logits=other_logits)
    dtype, (logits, other_logits) = common_dtype(logits, other_logits), widened(logits, other_logits)

    def term(x: Tensor, y: Tensor) -> Tensor:
        p = torch.sigmoid(x)
        return p * (F.logsigmoid(x) - F.logsigmoid(y)).masked_fill(p == 0.0, 0.0)

    return (term(logits, other_logits) + term(-logits, -other_logits)).sum(-1).to(dtype)
