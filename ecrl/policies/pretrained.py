"""Parameters of a policy with a pretrained model, divided into trained and frozen parts.

Each weight belongs to one of three parts. `model` is trained, `adapters` are trained changes of linear layers, and
`base` is frozen. If the setting `trained` is given, the weights that it names belong to `model`, and the other weights
of the pretrained model belong to `base`. If `trained` is absent, all weights of the pretrained model belong to `model`,
or all belong to `base` if there are adapters. Weights without an effect on actions and values always belong to `base`.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, cast

import torch
from pydantic import Field
from tensordict import TensorDict
from torch import Tensor

from ecrl.errors import ConfigError
from ecrl.policies.low_rank import AdaptersConfig, Names, check_names, is_adapter, is_in
from ecrl.policies.networks import NetworkConfig, Pure, seeded
from ecrl.policies.vla_config import VLAConfig

_TRAINED = ("model", "adapters")


class PretrainedConfig(VLAConfig):
    """Settings that all backends with a pretrained model have."""

    trained: Names | None = Field(
        None,
        description=(
            "names of the parts of the model that are trained; if absent, all parts, or only the adapters if there are "
            "any"
        ),
    )
    adapters: AdaptersConfig | None = Field(
        None,
        description=(
            "low-rank adapters, which are trained; the pretrained weights are then frozen, except the parts listed in "
            "policy.vla.trained; no adapters if absent"
        ),
    )
    critic: NetworkConfig | None = Field(
        None, description="value network on features that the language model computes; no critic if absent"
    )
    instruction: str | None = Field(
        None,
        description=(
            'name of the observation with the token ids of the instruction; by default, the observation "instruction", '
            "if any"
        ),
    )


class PretrainedModel(NamedTuple):
    """The model as pure functions, the part that each weight belongs to, and further trained networks.

    Attributes:
        net: the model.
        parts: map from the name of each weight of the model to "model", "adapters" or "base".
        networks: networks that are not pretrained, such as a critic.
    """

    net: Pure
    parts: dict[str, str]
    networks: dict[str, Pure]

    def init(self, key: Tensor) -> TensorDict:
        """Return the trained parameters: `model`, `adapters` and the networks. Empty parts are left out."""
        with seeded(key):
            weights = self.net.init()
            result = {name: network.init() for name, network in self.networks.items()}
        for part in _TRAINED:
            if own := self._of(part, weights):
                result[part] = TensorDict(own, [])
        return TensorDict(cast(Any, result), []).to(key.device)

    def init_frozen(self, statistics: Mapping[str, TensorDict], device: torch.device) -> TensorDict:
        """Return the frozen parameters: `base`, and `statistics` if the checkpoint has any."""
        with seeded(torch.zeros((), dtype=torch.int64)):  # also draws weights of adapters, which are not used here
            weights = self.net.init()
        result: dict[str, Any] = {"base": TensorDict(self._of("base", weights), [])}
        if statistics:
            result["statistics"] = TensorDict(cast(Any, dict(statistics)), [])
        return TensorDict(result, []).to(device)

    def _of(self, part: str, weights: TensorDict) -> dict[str, Any]:
        return {name: weights[name] for name, own in self.parts.items() if own == part}


def weights_of(params: TensorDict) -> TensorDict:
    """Return all weights of the model, trained or frozen."""
    parts = (cast(TensorDict, params[part]) for part in (*_TRAINED, "base") if part in params)
    return TensorDict({name: weight for part in parts for name, weight in part.items()}, [])


def pretrained_model(
    net: Pure, cfg: PretrainedConfig, is_unused: Callable[[str], bool], networks: dict[str, Pure]
) -> PretrainedModel:
    """Assign each weight of a model to its part.

    Args:
        net: the model, with adapters if the config has any.
        cfg: settings that choose what is trained.
        is_unused: function that returns True for the name of a weight that has no effect on actions and values.
        networks: networks that are not pretrained.

    Raises: ConfigError if an entry of `trained` or of `adapters.layers` selects no weights of the model, or only
        weights without an effect on actions and values.
    """
    names = [name for name, _ in net.module.named_parameters()]
    if cfg.trained is not None:
        check_names("policy.vla.trained", cfg.trained, names, "part")
        _check_effect("policy.vla.trained", cfg.trained, names, is_unused, cfg)
    if cfg.adapters is not None:
        adapters = [name for name in names if is_adapter(name)]
        _check_effect("policy.vla.adapters.layers", cfg.adapters.layers, adapters, is_unused, cfg)
    return PretrainedModel(net, {name: "base" if is_unused(name) else _part(name, cfg) for name in names}, networks)


def _part(name: str, cfg: PretrainedConfig) -> str:
    if is_adapter(name):
        return "adapters"
    is_trained = cfg.adapters is None if cfg.trained is None else is_in(name, cfg.trained)
    return "model" if is_trained else "base"


def _check_effect(
    key: str, parts: Iterable[str], names: Iterable[str], is_unused: Callable[[str], bool], cfg: PretrainedConfig
) -> None:
    """Raise ConfigError for a part whose weights change neither the actions nor the values.

    `names` are the names of the weights that the config entry `key` chooses from.
    """
    known = list(names)
    for part in parts:
        if all(is_unused(name) for name in known if is_in(name, [part])):
            problem = "no weights that change the actions" + (" or the values" if cfg.critic is not None else "")
            advice = "name another part"
            advice += ", or, if only a critic reads this part, set policy.vla.critic" if cfg.critic is None else ""
            raise ConfigError(f"{key}: {part!r} has {problem}; {advice}")
