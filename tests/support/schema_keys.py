"""Keys of the schema, collected from the models: dotted names with the kind and the name of a part.

`trainer.seed`, `trainer.events.train.*.mode`, `env.cartpole.gravity`, `algorithm.ppo.lr_scheduler.kwargs.T_max`,
`policy.actor_critic.critic.type`, `network.mlp.activation`, `event.randomize_field.low`.

MuJoCo tasks share most of their keys, and so do their terms. A shared key has the name of the section that defines it
first: `SceneConfig.mjcf`, `AttrsConfig.mass`, `JointsConfig.part_name`. A key that leads to further sections also
counts, such as `ObjectsConfig.target_entity_cfg`.
"""

from collections.abc import Iterator
from typing import Any, get_args, get_origin

from pydantic import BaseModel

from ecrl.config import Config, PolicyConfig
from ecrl.config.json_schema import KINDS
from ecrl.policies import VLAConfig
from ecrl.registry import lookup, registered

_PARTS = (
    BaseModel,
    PolicyConfig,
    VLAConfig,
)  # as a field's type: the settings of a registered part, which are walked by name


def _models(annotation: Any, many: str = "") -> Iterator[tuple[type[BaseModel], str]]:
    """Yield the models in a type, each with the placeholder of its name if there are many."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation, many
    for inner in get_args(annotation):
        yield from _models(inner, ".*" if get_origin(annotation) is dict else many)


def _of_tasks(model: type) -> bool:
    return model.__module__.startswith("ecrl.envs.mujoco.")


def _first(model: type[BaseModel], name: str) -> str:
    """Return the first section of tasks with this key, among the base classes of a model."""
    return next(m.__name__ for m in reversed(model.__mro__) if _of_tasks(m) and name in getattr(m, "model_fields", ()))


def fields(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, type[BaseModel], str]]:
    """Yield (dotted key, model, field) of everything below a section that is not a section."""
    for name, field in model.model_fields.items():
        place, inner = _first(model, name) if _of_tasks(model) else prefix, list(_models(field.annotation))
        key, sections = f"{place}.{name}".removeprefix("."), [pair for pair in inner if pair[0] not in _PARTS]
        if not inner or (sections and _of_tasks(model)):
            yield key, model, name
        for section, many in sections:
            yield from fields(section, key + many)


def builtin_configs() -> dict[str, type[BaseModel]]:
    """Return the Config models of the built-in parts by `kind.name`; a part with two names appears once."""
    configs, makers = {}, set()
    for kind in KINDS:
        for name in sorted(registered(kind), key=str.lower):
            entry = lookup(kind, name)
            make = getattr(entry.make, "__wrapped__", entry.make)
            if make.__module__.startswith("ecrl.") and make not in makers:
                makers.add(make)
                configs[f"{kind}.{name}"] = entry.config
    return configs


def walked() -> list[tuple[str, type[BaseModel], str]]:
    """Return every key of the schema, of the sections and then of the parts; a key of tasks once per path."""
    parts = (field for part, config in builtin_configs().items() for field in fields(config, part))
    return [*fields(Config, ""), *parts]


def path_of(key: str) -> str:
    """Return the path at which a config sets a key of its part.

    >>> path_of("algorithm.ppo.gamma"), path_of("policy.actor_only.actor.type"), path_of("event.randomize_field.low")
    ('algorithm.cfg.gamma', 'policy.actor.type', 'trainer.events.train.push.params.low')
    """
    kind, _, rest = key.partition(".")
    below = rest.partition(".")[2]
    places = {
        "env": f"env.cfg.{below}",
        "algorithm": f"algorithm.cfg.{below}",
        "policy": f"policy.{below}",
        "network": f"policy.actor.network_cfg.{below}",
        "vla_backend": f"policy.vla.{below}",
        "event": f"trainer.events.train.push.params.{below}",
    }
    return places[kind] if kind in places and below else key.replace("*", "push")
