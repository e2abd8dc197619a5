"""Read and write OpenVLA checkpoints in local folders. OpenVLA-OFT uses the same files.

A checkpoint has `config.json`, `preprocessor_config.json` and one or several safetensors files. ecrl runs no code from
the folder. The language model requires the extra `vla`.
"""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from ecrl.errors import ConfigError, extra
from ecrl.policies.checkpoint_folder import KEY, check_weights_fit, is_finite, one_line, quiet, read_json
from ecrl.policies.vision_transformer import VisionTransformer, ViTSizes
from ecrl.storage.atomic_files import write_folder

BACKBONES = "featurizer", "fused_featurizer"
"""Names of the first and second vision model in `vision_backbone`, as in the names of the weights."""

_EMBEDDINGS = "language_model.model.embed_tokens.weight"
_OTHER_PARTS = "action_head", "noise_predictor", "noisy_action_projector", "proprio_projector", "vision_backbone"
"""Parts of the names of files `*.pt` with weights that ecrl does not read.

OpenVLA-OFT writes these files for a head for continuous actions, for FiLM, and for a projector of the state that is not
part of the safetensors files.
"""

_UNUSED = "norm", "attn_pool", "fc_norm", "head"
"""Parts of a vision model after its last block. OpenVLA does not use these parts."""


class Shape(NamedTuple):
    """Sizes and settings of the model in a checkpoint.

    Attributes:
        vision: sizes of each vision model.
        means, stds: mean and standard deviation of red, green and blue, for each vision model.
        text: settings of the language model.
        bins: number of action tokens, the last tokens of the vocabulary.
        vocabulary: size of the vocabulary, without the padding rows of the embedding table.
        state: size of the robot's state vector, or 0 if the model reads no state.
    """

    vision: tuple[ViTSizes, ...]
    means: tuple[tuple[float, ...], ...]
    stds: tuple[tuple[float, ...], ...]
    text: dict[str, Any]
    bins: int
    vocabulary: int
    state: int

    @property
    def width(self) -> int:
        """Return the width of a token of the language model."""
        return self.text["hidden_size"]


def _fault(folder: Path, problem: str) -> ConfigError:
    return ConfigError(f"{KEY}: {str(folder)!r}: {problem}")


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a checkpoint, sorted by name. Raise ConfigError if there are none."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise _fault(folder, "no file *.safetensors; copy the checkpoint again, or convert it to safetensors")
    return files


def _opened(folder: Path) -> Iterator[Any]:
    for path in weight_files(folder):
        try:
            with safe_open(path, "pt") as file:
                yield file
        except (SafetensorError, OSError) as error:
            raise _fault(path, f"{one_line(error)}; copy it again") from None


class _ConfigFile(BaseModel):
    """The entries of `config.json` that `read_shape` reads. `read_statistics` reads the entry `norm_stats`."""

    model_config = ConfigDict(strict=True)

    use_fused_vision_backbone: bool
    timm_model_ids: list[str]
    image_sizes: list[Annotated[int, Field(ge=1)]]
    timm_override_act_layers: list[str | None] = []
    text_config: dict[str, Any]
    n_action_bins: Annotated[int, Field(ge=2)] = 256
    pad_to_multiple_of: Annotated[int, Field(ge=0)] = 64
    llm_backbone_id: str | None = None


_Real = Annotated[float, Field(allow_inf_nan=False)]
_Positive = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]


class _PixelsFile(BaseModel):
    """The entries of `preprocessor_config.json` that ecrl reads.

    For each vision model, these are the means and the standard deviations of red, green and blue.
    """

    model_config = ConfigDict(strict=True)

    means: list[Annotated[list[_Real], Field(min_length=3, max_length=3)]]
    stds: list[Annotated[list[_Positive], Field(min_length=3, max_length=3)]]


_File = TypeVar("_File", bound=BaseModel)


def _read(path: Path, model: type[_File]) -> _File:
    try:
        return model.model_validate(read_json(path))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise _fault(path, f"{where}: {first['msg']}; copy the file again") from None


def _refuse_other_heads(folder: Path) -> None:
    """Raise ConfigError if the folder has a weight file `*.pt` that ecrl does not read (see `_OTHER_PARTS`)."""
    for part in _OTHER_PARTS:
        if found := sorted(folder.glob(f"*{part}*.pt")):
            advice = "give a model whose actions are tokens and whose weights are all in safetensors files"
            raise _fault(folder, f"{found[0].name} has weights that ecrl does not read; {advice}")


def read_shape(folder: Path) -> Shape:
    """Read the sizes and settings of a checkpoint from its JSON files and the shapes of its weights.

    Raises: ConfigError if a file is damaged, or if ecrl does not support the vision model, language model or head.
    """
    _refuse_other_heads(folder)
    config = _read(folder / "config.json", _ConfigFile)
    pixels = _read(folder / "preprocessor_config.json", _PixelsFile)
    shapes = {name: tuple(f.get_slice(name).get_shape()) for f in _opened(folder) for name in f.keys()}  # noqa: SIM118
    count = 2 if config.use_fused_vision_backbone else 1
    lists = {"timm_model_ids": config.timm_model_ids, "image_sizes": config.image_sizes}
    for key, found in (lists | {"means": pixels.means, "stds": pixels.stds}).items():
        if len(found) != count:
            raise _fault(folder, f"{key} has {len(found)} entries, expected {count}; copy the JSON files again")
    if any(config.timm_override_act_layers):
        raise _fault(folder, "timm_override_act_layers is set, but ecrl supports only GELU; give another folder")
    text = config.text_config
    if text.get("model_type") != "llama" or (config.llm_backbone_id or "").startswith("vicuna"):
        raise _fault(folder, "the language model is not Llama 2, the only one that is supported; give another folder")
    if text.get("tie_word_embeddings"):
        raise _fault(folder, "text_config has tie_word_embeddings, which is not supported; give another folder")
    try:
        vision = tuple(
            ViTSizes.of(name, size, _below(f"vision_backbone.{backbone}.", shapes))
            for backbone, name, size in zip(BACKBONES, config.timm_model_ids, config.image_sizes, strict=False)
        )
    except ValueError as error:
        raise _fault(folder, str(error)) from None
    if len(shapes.get(_EMBEDDINGS, ())) != 2:
        raise _fault(folder, f"lacks the weight {_EMBEDDINGS!r}; copy the checkpoint again")
    rows, width = shapes[_EMBEDDINGS]
    vocabulary = rows - config.pad_to_multiple_of
    if vocabulary < config.n_action_bins:
        problem = f"config.json has n_action_bins {config.n_action_bins}, but the vocabulary has {vocabulary} tokens"
        raise _fault(folder, f"{problem}; copy the file again")
    return Shape(
        vision,
        tuple(tuple(x) for x in pixels.means),
        tuple(tuple(x) for x in pixels.stds),
        text | {"vocab_size": rows, "hidden_size": width},
        config.n_action_bins,
        vocabulary,
        shapes.get("proprio_projector.fc1.weight", (0, 0))[1],
    )


def _below(prefix: str, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    return {name.removeprefix(prefix): shape for name, shape in shapes.items() if name.startswith(prefix)}


def _is_unused(shape: Shape, name: str) -> bool:
    """Return True for an unused weight of a vision model: a weight of the last block or of a later layer."""
    for backbone, sizes in zip(BACKBONES, shape.vision, strict=False):
        prefix = f"vision_backbone.{backbone}."
        if name.startswith(prefix):
            rest = name.removeprefix(prefix).split(".")
            return rest[0] in _UNUSED or rest[:2] == ["blocks", str(sizes.blocks)]
    return False


class _Projector(nn.Module):
    """Linear layers with GELU between them."""

    def __init__(self, *widths: int):
        super().__init__()
        self.count = len(widths) - 1
        for i in range(self.count):
            setattr(self, f"fc{i + 1}", nn.Linear(widths[i], widths[i + 1]))

    def forward(self, x: Tensor) -> Tensor:
        for i in range(self.count):
            x = getattr(self, f"fc{i + 1}")(F.gelu(x) if i else x)
        return x


class OpenVLAModel(nn.Module):
    """The parts of an OpenVLA model. Each weight has the same name as in a checkpoint."""

    def __init__(self, shape: Shape):
        from transformers import LlamaConfig, LlamaForCausalLM

        super().__init__()
        self.shape, width = shape, shape.width
        models = zip(BACKBONES, shape.vision, strict=False)
        self.vision_backbone = nn.ModuleDict({name: VisionTransformer(sizes) for name, sizes in models})
        seen = sum(sizes.width for sizes in shape.vision)
        self.projector = _Projector(seen, *([4 * seen] if len(shape.vision) == 2 else []), width, width)
        if shape.state:
            self.proprio_projector = _Projector(shape.state, width, width)
        settings = shape.text | {"pad_token_id": None, "attn_implementation": "sdpa"}
        self.language_model = LlamaForCausalLM(LlamaConfig(**settings))

    def see(self, images: Tensor) -> Tensor:
        """Map images to tokens `[n, cameras * patches, width]`.

        The images have the shape `[n, cameras, 3, size, size]` and values in [0, 1].
        """
        pixels, found = images.flatten(0, 1), []
        for name, mean, std in zip(BACKBONES, self.shape.means, self.shape.stds, strict=False):
            shift, scale = (pixels.new_tensor(x).reshape(-1, 1, 1) for x in (mean, std))
            found.append(self.vision_backbone[name]((pixels - shift) / scale))
        return self.projector(torch.cat(found, -1)).unflatten(0, images.shape[:2]).flatten(1, 2)


def read_model(folder: Path, shape: Shape) -> OpenVLAModel:
    """Return the model of a checkpoint in float32 and in evaluation mode.

    Raises: ConfigError if the weights need more memory than the machine has, if a weight is missing, unknown or of
        another shape, or if a file is damaged. MissingExtraError if transformers is not installed.
    """
    with extra("vla"):
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
    check_weights_fit(folder)
    weights = {
        name: file.get_tensor(name).float()
        for file in _opened(folder)
        for name in file.keys()  # noqa: SIM118
        if not _is_unused(shape, name) and not name.endswith("rotary_emb.inv_freq")
    }
    try:
        with torch.device("meta"), quiet():
            model = OpenVLAModel(shape)
        language: Any = model.language_model
        rotary = LlamaRotaryEmbedding(language.config)  # checkpoints do not contain the buffers of these embeddings
    except Exception as error:  # invalid settings raise many types of errors
        raise _fault(folder, f"text_config of config.json: {one_line(error)}; copy the file again") from None
    own = dict(model.named_parameters())
    for problem, names in (("lacks the weight", own.keys() - weights), ("has an unknown weight", weights.keys() - own)):
        if names:
            raise _fault(folder, f"{problem} {min(names)!r}; copy the checkpoint again")
    for name, weight in own.items():
        if weight.shape != weights[name].shape:
            problem = f"{name} has the shape {list(weights[name].shape)}, expected {list(weight.shape)}"
            raise _fault(folder, f"{problem}; copy the checkpoint again")
    model.load_state_dict(weights, assign=True)
    language.model.rotary_emb = rotary
    return model.eval()


def _is_flag(x: Any) -> bool:
    """Return True if the value is a bool."""
    return isinstance(x, bool)


class Statistics(NamedTuple):
    """Bounds of the data that a checkpoint was trained on. The model scales numbers from [low, high] to [-1, 1].

    Attributes:
        low, high: bounds of each number.
        is_scaled: False for numbers that the model does not scale.
    """

    low: tuple[float, ...]
    high: tuple[float, ...]
    is_scaled: tuple[bool, ...]


def read_statistics(folder: Path, dataset: str | None, kind: str, size: int) -> Statistics:
    """Return the 1 % and 99 % quantiles of the actions or of the robot's state in a data set.

    The result also has flags, which are True for the numbers that the model scales. The function reads the quantiles
    from `dataset_statistics.json`, which fine-tuning writes. If the checkpoint does not have this file, the function
    reads the entry `norm_stats` of `config.json`.

    Args:
        folder: the checkpoint.
        dataset: name of the data set, or None if there is only one.
        kind: "action" or "proprio".
        size: size of one step of an action, or of the state.
    Raises: ConfigError if the data set is unknown, if several exist and none is named, or if the quantiles are missing
        or invalid.
    """
    own = folder / "dataset_statistics.json"
    path = own if own.is_file() else folder / "config.json"
    all_sets = read_json(path)
    all_sets = all_sets if path == own else all_sets.get("norm_stats")
    if not isinstance(all_sets, dict) or not all_sets:
        absent = "data sets" if path == own else "norm_stats"
        raise _fault(path, f"no {absent}, so the units of actions are not known; copy the file again")
    known = ", ".join(sorted(all_sets))
    if dataset is None and len(all_sets) > 1:
        raise ConfigError(f"policy.vla.dataset: absent, but the checkpoint has several data sets; choose one: {known}")
    if dataset is not None and dataset not in all_sets:
        raise ConfigError(f"policy.vla.dataset: the checkpoint has no data set {dataset!r}; known: {known}")
    found: Any = all_sets[dataset or next(iter(all_sets))]
    found = found.get(kind) if isinstance(found, dict) else None
    found = {"mask": [True] * size} | (found if isinstance(found, dict) else {})
    for name, is_valid in (("q01", is_finite), ("q99", is_finite), ("mask", _is_flag)):
        where, numbers = f"{kind}.{name}", found.get(name)
        if not isinstance(numbers, list) or not all(map(is_valid, numbers)):
            what = "true and false" if is_valid is _is_flag else "finite numbers"
            raise _fault(path, f"{where} is not a list of {what}; correct the file")
        if len(numbers) != size:
            problem = f"{where} has {len(numbers)} entries, but the environment has {size}"
            raise _fault(path, f"{problem}; use an environment with as many numbers, or another dataset")
    low, high = (tuple(map(float, found[name])) for name in ("q01", "q99"))
    if any(x > y for x, y, is_scaled in zip(low, high, found["mask"], strict=True) if is_scaled):
        raise _fault(path, f"{kind}.q01 is above {kind}.q99; correct the file")
    return Statistics(low, high, tuple(found["mask"]))


def write_model(folder: Path, source: Path, weights: Mapping[str, Tensor]) -> None:
    """Write a checkpoint with new weights. The other weights and files of the folder `source` are copied.

    Folders inside `source` are not copied. Each weight has the same dtype as in `source`. The new folder appears
    complete or not at all.

    Raises: ConfigError if the folder exists or cannot be made, or if a weight is missing in `source` or has another
        shape there.
    """
    if os.path.lexists(folder):
        raise ConfigError(f"{str(folder)!r} exists; give the path of a new folder")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{str(folder)!r} cannot be made: {one_line(error)}; give another path") from None
    left, paths = dict(weights), weight_files(source)
    others = [path for path in source.iterdir() if path.is_file() and path not in paths]
    files: dict[str, Any] = {path.name: path.read_bytes() for path in others}
    with TemporaryDirectory(dir=folder.parent) as temporary:
        for path, file in zip(paths, _opened(source), strict=True):
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            for name in tensors.keys() & left.keys():
                if tensors[name].shape != left[name].shape:
                    raise _fault(source, f"{name} has another shape than in the run; use the run's own checkpoint")
                tensors[name] = left.pop(name).to(tensors[name].dtype).contiguous()
            files[path.name] = Path(temporary) / path.name
            save_file(tensors, files[path.name], file.metadata())
        if left:
            problem = f"no weight {min(left)!r}, which the run has"
            raise _fault(source, f"{problem}; use the checkpoint that the run began with")
        write_folder(folder, files)
