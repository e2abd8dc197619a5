"""Read and write OpenVLA checkpoints, from local folders only. OpenVLA-OFT has the same files.

A checkpoint has `config.json`, `preprocessor_config.json` and one or several safetensors files. ecrl runs no code of
the folder. The extra `vla` is required, for the language model.
"""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from ecrl.errors import ConfigError, extra
from ecrl.policies.checkpoint_folder import KEY, is_finite, one_line, quiet, read_json
from ecrl.policies.vision_transformer import VisionTransformer, ViTSizes
from ecrl.storage.atomic_files import write_folder

BACKBONES = "featurizer", "fused_featurizer"
"""Names of the vision models in `vision_backbone`."""

_UNUSED = "norm", "attn_pool", "fc_norm", "head"
"""Parts of a vision model after its last block, which OpenVLA does not use."""


class Shape(NamedTuple):
    """Sizes and settings of the model in a checkpoint.

    Attributes:
        vision: sizes of each vision model.
        means, stds: mean and standard deviation of the pixels of each vision model, for red, green and blue.
        text: settings of the language model.
        bins: number of action tokens, the last tokens of the vocabulary.
        vocabulary: size of the vocabulary, without the rows that fill up the table of embeddings.
        state: numbers of a state, or 0 if the model reads no state.
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
        """Return the numbers of a token of the language model."""
        return self.text["hidden_size"]


def _fault(folder: Path, problem: str) -> ConfigError:
    return ConfigError(f"{KEY}: {str(folder)!r}: {problem}")


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a checkpoint, in the order of their names."""
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


def read_shape(folder: Path) -> Shape:
    """Read what a checkpoint contains from its JSON files and the shapes of its weights.

    Raises: ConfigError if a file is damaged, or if the model has another vision model or language model.
    """
    config, pixels = read_json(folder / "config.json"), read_json(folder / "preprocessor_config.json")
    shapes = {name: tuple(f.get_slice(name).get_shape()) for f in _opened(folder) for name in f.keys()}  # noqa: SIM118
    names: Any = config.get("timm_model_ids")
    images: Any = config.get("image_sizes")
    means: Any = pixels.get("means")
    stds: Any = pixels.get("stds")
    count = 2 if config.get("use_fused_vision_backbone") else 1
    for key, found in (("timm_model_ids", names), ("image_sizes", images), ("means", means), ("stds", stds)):
        if not isinstance(found, list) or len(found) != count:
            where = "config.json" if key in config else "preprocessor_config.json"
            raise _fault(folder, f"{where} has {key} {found!r}, expected a list of {count}; copy the file again")
    if any(config.get("timm_override_act_layers") or ()):
        raise _fault(folder, "timm_override_act_layers is set, but only models with GELU are supported")
    text = config.get("text_config")
    if not isinstance(text, dict) or text.get("model_type") != "llama":
        raise _fault(folder, "config.json has no text_config of a Llama model, the only language model that is known")
    try:
        vision = tuple(
            ViTSizes.of(name, size, _below(f"vision_backbone.{backbone}.", shapes))
            for backbone, name, size in zip(BACKBONES, names, images, strict=False)
        )
    except ValueError as error:
        raise _fault(folder, str(error)) from None
    rows = shapes.get("language_model.model.embed_tokens.weight", (0,))[0]
    return Shape(
        vision,
        tuple(tuple(x) for x in means),
        tuple(tuple(x) for x in stds),
        text | {"vocab_size": rows},
        config.get("n_action_bins", 256),
        rows - config.get("pad_to_multiple_of", 64),
        shapes.get("proprio_projector.fc1.weight", (0, 0))[1],
    )


def _below(prefix: str, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    return {name.removeprefix(prefix): shape for name, shape in shapes.items() if name.startswith(prefix)}


def _is_unused(shape: Shape, name: str) -> bool:
    """Return True for a weight of a vision model that no output depends on: its last block and what follows."""
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
    """The parts of an OpenVLA model, under the names of its checkpoints."""

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
        """Map images `[n, cameras, 3, size, size]` from 0 to 1 to tokens `[n, cameras * patches, width]`."""
        pixels, found = images.flatten(0, 1), []
        for name, mean, std in zip(BACKBONES, self.shape.means, self.shape.stds, strict=False):
            shift, scale = (pixels.new_tensor(x).reshape(-1, 1, 1) for x in (mean, std))
            found.append(self.vision_backbone[name]((pixels - shift) / scale))
        return self.projector(torch.cat(found, -1)).unflatten(0, images.shape[:2]).flatten(1, 2)


def read_model(folder: Path, shape: Shape) -> OpenVLAModel:
    """Return the model of a checkpoint in float32 and in evaluation mode.

    Raises: ConfigError if a weight is missing, unknown or of another shape, or if a file is damaged. MissingExtraError
        if transformers is not installed.
    """
    with extra("vla"):
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
    weights = {
        name: file.get_tensor(name).float()
        for file in _opened(folder)
        for name in file.keys()  # noqa: SIM118
        if not _is_unused(shape, name) and not name.endswith("rotary_emb.inv_freq")
    }
    with torch.device("meta"), quiet():
        model = OpenVLAModel(shape)
    own = dict(model.named_parameters())
    for problem, names in (("lacks the weight", own.keys() - weights), ("has an unknown weight", weights.keys() - own)):
        if names:
            raise _fault(folder, f"{problem} {min(names)!r}; copy the checkpoint again")
    for name, weight in own.items():
        if weight.shape != weights[name].shape:
            problem = f"{name} has the shape {list(weights[name].shape)}, expected {list(weight.shape)}"
            raise _fault(folder, f"{problem}; copy the checkpoint again")
    model.load_state_dict(weights, assign=True)
    language: Any = model.language_model
    language.model.rotary_emb = LlamaRotaryEmbedding(language.config)  # its buffers are not in the checkpoint
    return model.eval()


def _is_flag(x: Any) -> bool:
    """Return True for True and False."""
    return isinstance(x, bool)


class Statistics(NamedTuple):
    """Bounds of the data that a checkpoint was trained on. Model numbers from -1 to 1 are numbers from low to high.

    Attributes:
        low, high: bounds of each number.
        is_scaled: False for numbers that are not converted.
    """

    low: tuple[float, ...]
    high: tuple[float, ...]
    is_scaled: tuple[bool, ...]


def read_statistics(folder: Path, dataset: str | None, kind: str, size: int) -> Statistics:
    """Return the 1 % and 99 % quantiles of a data set in `norm_stats` of `config.json`.

    Args:
        folder: the checkpoint.
        dataset: name of the data set, or None if there is only one.
        kind: "action" or "proprio".
        size: expected number of numbers.
    Raises: ConfigError if the data set is unknown, if several exist and none is named, or if the numbers do not fit.
    """
    all_sets = read_json(folder / "config.json").get("norm_stats") or {}
    if not isinstance(all_sets, dict) or not all_sets:
        raise _fault(folder, "config.json has no norm_stats, so that actions have no units; copy the file again")
    known = ", ".join(sorted(all_sets))
    if dataset is None and len(all_sets) > 1:
        raise ConfigError(f"policy.vla.dataset: absent, but the checkpoint has several data sets; choose one: {known}")
    if dataset is not None and dataset not in all_sets:
        raise ConfigError(f"policy.vla.dataset: the checkpoint has no data set {dataset!r}; known: {known}")
    found: Any = all_sets[dataset or next(iter(all_sets))]
    found = found.get(kind) if isinstance(found, dict) else None
    found = {"mask": [True] * size} | (found if isinstance(found, dict) else {})
    for name, is_valid in (("q01", is_finite), ("q99", is_finite), ("mask", _is_flag)):
        where, numbers = f"norm_stats.{kind}.{name}", found.get(name)
        if not isinstance(numbers, list) or not all(map(is_valid, numbers)):
            what = "true and false" if is_valid is _is_flag else "finite numbers"
            raise _fault(folder, f"{where} is not a list of {what}; correct config.json")
        if len(numbers) != size:
            problem = f"{where} has {len(numbers)} numbers, but the environment has {size}"
            raise _fault(folder, f"{problem}; use an environment with as many, or another dataset")
    low, high = (tuple(map(float, found[name])) for name in ("q01", "q99"))
    return Statistics(low, high, tuple(map(bool, found["mask"])))


def write_model(folder: Path, source: Path, weights: Mapping[str, Tensor]) -> None:
    """Write a checkpoint with new weights. All other weights and files are copied from the checkpoint `source`.

    A weight keeps its dtype in `source`. The folder appears complete or not at all.

    Raises: ConfigError if the folder exists or cannot be made, or if `source` does not have one of the weights.
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
                tensors[name] = left.pop(name).to(tensors[name].dtype).contiguous()
            files[path.name] = Path(temporary) / path.name
            save_file(tensors, files[path.name], file.metadata())
        if left:
            problem = f"no weight {min(left)!r}, which the run has"
            raise _fault(source, f"{problem}; use the checkpoint that the run began with")
        write_folder(folder, files)
