"""Events that move objects to random poses, or draw random targets."""

from typing import Annotated, Any

import torch
from pydantic import Field, model_validator
from torch import Tensor

from ecrl import rng
from ecrl.config.model import ConfigModel, Count, NonNegative
from ecrl.envs.events import Apply
from ecrl.envs.mujoco import world
from ecrl.envs.mujoco.physics.simulation import Simulation, start
from ecrl.envs.mujoco.scene.config import Real
from ecrl.envs.mujoco.scene.models import id_of
from ecrl.envs.mujoco.terms.ranges import (
    Box,
    Rectangle,
    Rows,
    ScenePoseConfig,
    draw,
    draw_scene_pose,
    look_up,
    numbers,
    pose_of,
)
from ecrl.envs.mujoco.terms.term import Entities, EntityConfig, object_of, tcp_of
from ecrl.envs.scaling import LENGTH
from ecrl.errors import ConfigError
from ecrl.registry import did_you_mean, register_event


class RandomizeRigidObjectPoseConfig(ScenePoseConfig):
    """Settings of `randomize_rigid_object_pose`: an object, and the ranges of its random pose."""

    entity_cfg: EntityConfig = Field(description="the object, which must be dynamic or kinematic")


def _has_velocity(sim: Simulation, uid: str) -> bool:
    return int(sim.model.body_mocapid[id_of(sim.model, "body", uid)]) < 0


@register_event("randomize_rigid_object_pose")
def randomize_rigid_object_pose(cfg: RandomizeRigidObjectPoseConfig, sim: Simulation) -> Apply:
    """Move an object to a random pose, and set the velocities of the object to 0.

        position' = home + draw,  or draw if relative_position is false
        rotation' = R(draw),  or home R(draw) if relative_rotation is true

    `home` is the object's pose in the scene config, with the position in m. `R(a) = Rx Ry Rz` is the rotation by the
    three angles a in degrees. Without `position_range`, the position does not change. Without `rotation_range`, the
    rotation does not change.
    """
    uid, initial = cfg.entity_cfg.uid, start(sim, ())
    look_up("entity_cfg.uid", lambda: world.with_body_pose(sim, initial, uid))
    home, has_velocity = pose_of(world.body_pose(sim, initial, uid)), _has_velocity(sim, uid)

    def apply(state: Any, keys: Tensor) -> Any:
        worlds = world.with_body_pose(sim, state["world"], uid, *draw_scene_pose(cfg, keys, home))
        if has_velocity:
            worlds = world.with_body_at_rest(sim, worlds, uid)
        return state.copy().set("world", worlds)

    return apply


_PLACES = 32  # number of random positions that are tried for each object
_CHECKED_DRAWS = 256


class ScatterConfig(ConfigModel):
    """Settings of `scatter_rigid_objects`: the objects, the range of their positions, and the smallest distances."""

    entity_cfgs: Entities = Field(description="the objects, dynamic or kinematic")
    position_range: Annotated[Box, LENGTH] = Field(description="[lowest, highest] x y z, m")
    min_distance: Annotated[NonNegative, LENGTH] = Field(
        0.0, description="smallest horizontal distance between the centres of two objects, m"
    )
    min_tool_distance: Annotated[NonNegative, LENGTH] = Field(
        0.0,
        description="smallest horizontal distance from an object's centre to the end effector, m; 0: any distance",
    )
    part_name: str = Field("arm", description="part of the robot that has the end effector")


@register_event("scatter_rigid_objects")
def scatter_rigid_objects(cfg: ScatterConfig, sim: Simulation) -> Apply:
    """Move objects to random positions that are apart from each other and from the end effector.

    The objects are placed one after the other. A position is acceptable if it is at least `min_distance` from the
    objects that are already placed, and at least `min_tool_distance` from the end effector. Only horizontal distances
    count. Each object gets the first acceptable of 32 random positions. If none of the positions is acceptable, the
    object gets the position that violates these distances the least. The velocities of dynamic objects become 0.

    Raises: ConfigError if, in any of 256 test draws, an object finds no acceptable position.
    """
    uids = [object_of(sim, entity, "entity_cfgs") for entity in cfg.entity_cfgs]
    site = tcp_of(sim, cfg.part_name) if cfg.min_tool_distance else None
    for uid in uids:
        look_up("entity_cfgs", lambda uid=uid: world.with_body_pose(sim, start(sim, ()), uid))
    has_velocity = {uid: _has_velocity(sim, uid) for uid in uids}

    def place(worlds: Any, keys: Tensor) -> tuple[Any, Tensor]:
        """Return the worlds with the objects placed, and the smallest min(0, actual - required distance), m, `[*B]`.

        The smallest value is taken over all distances between placed objects, and from objects to the end effector.
        """
        tool = [] if site is None else [(world.site_pose(sim, worlds, site)[..., :2, 3], cfg.min_tool_distance)]
        obstacles, slacks = tool, []  # an obstacle is a position [*B, 2] and the smallest distance to it
        for i, uid in enumerate(uids):
            draws = draw(rng.fold_in(keys, i), cfg.position_range, 3, _PLACES)
            slack = torch.zeros_like(draws[..., 0])
            for position, distance in obstacles:
                apart = torch.linalg.vector_norm(draws[..., :2] - position.unsqueeze(-2), dim=-1)
                slack = torch.minimum(slack, apart - distance)
            order = torch.arange(_PLACES, 0, -1, device=draws.device).to(slack)
            chosen = torch.where(slack >= 0.0, order, slack).argmax(-1, keepdim=True)
            position = draws.gather(-2, chosen.unsqueeze(-1).expand(*chosen.shape, 3)).squeeze(-2)
            slacks.append(slack.gather(-1, chosen).squeeze(-1))
            worlds = world.with_body_pose(sim, worlds, uid, position)
            worlds = world.with_body_at_rest(sim, worlds, uid) if has_velocity[uid] else worlds
            obstacles.append((position[..., :2], cfg.min_distance))
        return worlds, torch.stack(slacks).amin(0)

    def apply(state: Any, keys: Tensor) -> Any:
        return state.copy().set("world", place(state["world"], keys)[0])

    keys = rng.split(rng.key(0), _CHECKED_DRAWS)
    with torch.no_grad():
        failed = int((place(start(sim, keys.shape), keys)[1] < 0.0).sum())
    if failed:
        fault = f"in {failed} of {_CHECKED_DRAWS} tests, an object found no place in {_PLACES} draws"
        raise ConfigError(f"params: {fault}; widen position_range, or reduce min_distance or min_tool_distance")
    return apply


_Cells = Annotated[Count, Field(le=100)]


class GridConfig(ConfigModel):
    """Settings of `planner_grid_cell_sampler`: the objects, and the grid of their places."""

    object_uid_list: Annotated[tuple[str, ...], Field(strict=False, min_length=1)] = Field(
        description="names of the objects, dynamic or kinematic"
    )
    position_range: Annotated[Rectangle, LENGTH] = Field(description="[lowest x y, highest x y] of the grid, m")
    reference_height: Annotated[Real, LENGTH] = Field(description="height of the objects' centres, m")
    grid_size: Annotated[tuple[_Cells, _Cells], Field(strict=False)] = Field(
        description="number of cells along x and along y"
    )


@register_event("planner_grid_cell_sampler")
def planner_grid_cell_sampler(cfg: GridConfig, sim: Simulation) -> Apply:
    """Move objects to the centres of random cells of a grid, at most one object in a cell.

        x', y' = lowest + (cell + 1/2) (highest - lowest) / grid_size;    z' = reference_height

    Positions are in m. `cell` consists of the index of the cell along x and the index along y, from 0 to grid_size - 1.
    The velocities of dynamic objects become 0.
    """
    uids, (columns, rows) = cfg.object_uid_list, cfg.grid_size
    for uid in uids:
        look_up("object_uid_list", lambda uid=uid: world.with_body_pose(sim, start(sim, ()), uid))
    if len(set(uids)) < len(uids):
        raise ConfigError(f"params.object_uid_list: {list(uids)} names an object twice; name each object once")
    if columns * rows < len(uids):
        fault = f"{columns * rows} cells for {len(uids)} objects"
        raise ConfigError(f"params.grid_size: {fault}; give at least one cell per object")
    (x, y), (x_end, y_end) = cfg.position_range

    def apply(state: Any, keys: Tensor) -> Any:
        cells = rng.uniform(keys, (columns * rows,)).argsort(-1)[..., : len(uids)]
        along_x, along_y = cells % columns + 0.5, cells // columns + 0.5
        places = x + along_x * ((x_end - x) / columns), y + along_y * ((y_end - y) / rows)
        positions = torch.stack((*places, torch.full_like(places[0], cfg.reference_height)), -1)
        worlds = state["world"]
        for i, uid in enumerate(uids):
            worlds = world.with_body_pose(sim, worlds, uid, positions[..., i, :])
            worlds = world.with_body_at_rest(sim, worlds, uid) if _has_velocity(sim, uid) else worlds
        return state.copy().set("world", worlds)

    return apply


class AnchorHeightConfig(ConfigModel):
    """Settings of `randomize_anchor_height`: an object such as a table, and the range of its random height."""

    anchor_uid: str = Field(min_length=1, description="name of the object, kinematic or dynamic")
    height_delta_range: Annotated[Rows | None, LENGTH] = Field(
        None, description="[lowest, highest] difference between the random height and the height in the scene config, m"
    )
    height_delta_candidates: Annotated[
        Annotated[tuple[Real, ...], Field(strict=False, min_length=1)] | None, LENGTH
    ] = Field(
        None,
        description="list of differences, m; each draw is one of these differences; an alternative to "
        "height_delta_range",
    )
    exclude_uids: Annotated[tuple[str, ...], Field(strict=False)] = Field(
        (), description="objects that do not move together with the anchor"
    )

    @model_validator(mode="after")
    def _one_choice(self) -> "AnchorHeightConfig":
        if (self.height_delta_range is None) == (self.height_delta_candidates is None):
            raise ValueError("give height_delta_range or height_delta_candidates, not both")
        if self.height_delta_range is not None and {len(numbers(x)) for x in self.height_delta_range} != {1}:
            raise ValueError("height_delta_range: give one lowest and one highest value")
        return self


@register_event("randomize_anchor_height")
def randomize_anchor_height(cfg: AnchorHeightConfig, sim: Simulation) -> Apply:
    """Move an object (the anchor), such as a table, to a random height. Move all other objects by the same distance.

        anchor: z' = home z + draw
        others: z' = z + (change of the anchor's z)

    All heights are in m. `home z` is the height of the anchor in the scene config. The other objects are all dynamic
    and kinematic objects except the objects in `exclude_uids`. The robot does not move. The velocities of the moved
    dynamic objects become 0.
    """
    anchor, initial = cfg.anchor_uid, start(sim, ())
    look_up("anchor_uid", lambda: world.with_body_pose(sim, initial, anchor))
    home = float(world.body_position(sim, initial, anchor)[2])
    movable = world.movable_bodies(sim)
    for uid in cfg.exclude_uids:
        if uid not in movable:
            raise ConfigError(f"params.exclude_uids: no movable object {uid!r}; {did_you_mean(uid, movable)}")
    moved = [uid for uid in movable if uid not in cfg.exclude_uids or uid == anchor]

    def apply(state: Any, keys: Tensor) -> Any:
        if cfg.height_delta_range is not None:
            delta = draw(keys, cfg.height_delta_range, 1)[..., 0]
        else:
            choices = torch.tensor(cfg.height_delta_candidates, device=keys.device)
            delta = choices[(rng.uniform(keys) * len(choices)).long()]
        worlds = state["world"]
        change = home + delta - world.body_position(sim, worlds, anchor)[..., 2]
        for uid in moved:
            position = world.body_position(sim, worlds, uid)
            position = torch.cat((position[..., :2], position[..., 2:] + change.unsqueeze(-1)), -1)
            worlds = world.with_body_pose(sim, worlds, uid, position)
            worlds = world.with_body_at_rest(sim, worlds, uid) if _has_velocity(sim, uid) else worlds
        return state.copy().set("world", worlds)

    return apply


class RandomizeTargetPoseConfig(ConfigModel):
    """Settings of `randomize_target_pose`: the range of the target position, and the name of the target."""

    position_range: Annotated[Box, LENGTH] = Field(description="[lowest, highest] x y z, m")
    relative_position: bool = Field(False, description="add the draw to the position of reference_entity_cfg")
    reference_entity_cfg: EntityConfig | None = Field(None, description="reference object of relative_position")
    store_key: str = Field("goal_pose", pattern=r"^[\w-]+$", description="name by which terms refer to the target")

    @model_validator(mode="after")
    def _both(self) -> "RandomizeTargetPoseConfig":
        if self.relative_position != (self.reference_entity_cfg is not None):
            raise ValueError("relative_position and reference_entity_cfg go together; give both or neither")
        return self

    @property
    def stores(self) -> dict[str, tuple[float, ...]]:
        """Dictionary that maps the name of the target to the target's initial value."""
        return {self.store_key: (0.0, 0.0, 0.0)}


@register_event("randomize_target_pose")
def randomize_target_pose(cfg: RandomizeTargetPoseConfig, sim: Simulation) -> Apply:
    """Draw a random target position `[*B, 3]` (m), and store the position in the state.

    target' = draw,  or draw + the current position of the reference object if relative_position is true
    """
    entity = cfg.reference_entity_cfg
    if entity is not None:
        look_up("reference_entity_cfg.uid", lambda: world.body_pose(sim, start(sim, ()), entity.uid))

    def apply(state: Any, keys: Tensor) -> Any:
        known = state["targets"].keys() if "targets" in state else ()
        if cfg.store_key not in known:
            fault = f"params.store_key: no target {cfg.store_key!r} in the task; {did_you_mean(cfg.store_key, known)}"
            raise ConfigError(f"{fault}; an event under env.cfg.events adds one")
        position = draw(keys, cfg.position_range, 3)
        if entity is not None:
            position = position + world.body_pose(sim, state["world"], entity.uid)[..., :3, 3]
        return state.copy().set("targets", state["targets"].copy().set(cfg.store_key, position))

    return apply
