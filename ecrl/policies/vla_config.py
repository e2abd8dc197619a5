"""Settings of the policy `vla`, and the settings that all backends share."""

from typing import Any, ClassVar

from pydantic import Field, SerializeAsAny, ValidatorFunctionWrapHandler, model_validator

from ecrl.config import PolicyConfig
from ecrl.config.config import validate_as_named
from ecrl.config.model import ConfigModel, Count


class VLAConfig(ConfigModel):
    """Settings that all backends share. The Config of the named backend validates the whole section."""

    whole_part: ClassVar = ("vla_backend", "backend")

    backend: str = Field("builtin", description='registered name of the backend, such as "builtin"')
    model_path: str | None = Field(
        None, description="path of the pretrained weights, for backends that read a checkpoint"
    )
    action_horizon: Count | None = Field(
        None, description="number of steps in an action; must equal env.action_chunk, which is also the default"
    )

    @model_validator(mode="wrap")
    @classmethod
    def _registered(cls, data: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        if cls is not VLAConfig or not isinstance(data, dict):
            return handler(data)
        return validate_as_named("vla_backend", {"backend": "builtin"} | data, "backend", cls, handler)


class VLAPolicyConfig(PolicyConfig):
    """Settings of a policy that sees images, reads an instruction and chooses chunks of actions."""

    vla: SerializeAsAny[VLAConfig] = Field(
        default_factory=lambda: VLAConfig.model_validate({}),
        description='the backend and its settings, such as {"backend": "builtin", "decoding": "parallel"}',
    )
