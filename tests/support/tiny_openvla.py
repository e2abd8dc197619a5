"""Tiny random OpenVLA checkpoints with a tokenizer of a few words, and runs of the backend `openvla` on `dots`."""

import json
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
from safetensors.torch import save_file

from ecrl.config import Config
from support.pretrained import run_of

SIZE, PATCH, WIDTH, STATE = 16, 8, 32, 2
BINS, ROWS, FILL = 16, 128, 8
"""Action tokens, rows of the table of embeddings, and the rows at its end that fill it up."""

VOCABULARY = ROWS - FILL
MEANS, STDS = [[0.4, 0.5, 0.6], [0.5, 0.5, 0.5]], [[0.2, 0.3, 0.4], [0.5, 0.5, 0.5]]
VISION = {
    "featurizer": {"width": 24, "hidden": 48, "blocks": 3, "registers": 2, "is_scaled": True},
    "fused_featurizer": {"width": 18, "hidden": 20, "blocks": 2, "registers": 0, "is_scaled": False},
}
NAMES = ["vit_tiny_patch8_reg2_dinov2", "vit_tiny_patch8_siglip_16"]
STATISTICS = {
    "action": {"q01": [-1.0, -0.5], "q99": [1.0, 0.5], "mask": [True, True]},
    "proprio": {"q01": [-2.0, -1.0], "q99": [2.0, 1.0]},
}
PROMPT = ["in", ":", "what", "action", "should", "the", "robot", "take", "to", "?", "\n", "out"]
SPECIAL = ("<unk>", "<s>", "</s>", "\u2581", "In", "What", "Out")
WORDS = {word: i for i, word in enumerate((*SPECIAL, *PROMPT, "go", "red", "green", "blue"))}


def vision_weights(width: int, hidden: int, blocks: int, registers: int, is_scaled: bool) -> dict[str, torch.Tensor]:
    """Return random weights of a vision model, in the format of timm. A model with registers has a class token."""
    patches = (SIZE // PATCH) ** 2
    shapes = {"pos_embed": (1, patches, width), "patch_embed.proj.weight": (width, 3, PATCH, PATCH)}
    shapes |= {"patch_embed.proj.bias": (width,)}
    if registers:
        shapes |= {"cls_token": (1, 1, width), "reg_token": (1, registers, width)}
    layers = {"attn.qkv": (3 * width, width), "attn.proj": (width, width), "mlp.fc1": (hidden, width)}
    layers |= {"mlp.fc2": (width, hidden)}
    for i in range(blocks):
        for name, shape in layers.items():
            shapes |= {f"blocks.{i}.{name}.weight": shape, f"blocks.{i}.{name}.bias": shape[:1]}
        for norm in ("norm1", "norm2"):
            shapes |= {f"blocks.{i}.{norm}.weight": (width,), f"blocks.{i}.{norm}.bias": (width,)}
        if is_scaled:
            shapes |= {f"blocks.{i}.ls1.scale_factor": (width,), f"blocks.{i}.ls2.scale_factor": (width,)}
    shapes |= {"norm.weight": (width,), "norm.bias": (width,)}
    if not registers:
        shapes |= {"attn_pool.latent": (1, 1, width)}
    return {name: 0.3 * torch.randn(shape) + 1.0 * name.endswith("norm1.weight") for name, shape in shapes.items()}


def text_config(**changes: Any) -> dict[str, Any]:
    """Return settings of a small Llama. The size of the vocabulary is that of the weights."""
    sizes = {"hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 2, "max_position_embeddings": 128}
    return {"model_type": "llama", "vocab_size": ROWS, "pad_token_id": 0, **sizes, **changes}


def random_weights(is_fused: bool = True, state: int = STATE) -> dict[str, torch.Tensor]:
    """Return random weights of a checkpoint."""
    from transformers import LlamaConfig, LlamaForCausalLM

    names = list(VISION) if is_fused else ["featurizer"]
    weights = {}
    for name in names:
        own = vision_weights(**VISION[name])
        weights |= {f"vision_backbone.{name}.{key}": weight for key, weight in own.items()}
    seen = sum(VISION[name]["width"] for name in names)
    widths = [seen, *([4 * seen] if is_fused else []), WIDTH, WIDTH]
    projectors = {"projector": widths} | ({"proprio_projector": [state, WIDTH, WIDTH]} if state else {})
    for name, sizes in projectors.items():
        for i in range(len(sizes) - 1):
            weights[f"{name}.fc{i + 1}.weight"] = 0.3 * torch.randn(sizes[i + 1], sizes[i])
            weights[f"{name}.fc{i + 1}.bias"] = 0.3 * torch.randn(sizes[i + 1])
    language = LlamaForCausalLM(LlamaConfig(**text_config()))
    for name, weight in language.state_dict().items():
        weights[f"language_model.{name}"] = weight + 0.2 * torch.randn_like(weight)
    return weights


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer of transformers whose tokens are `WORDS`."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel(WORDS, unk_token="<unk>"))
    words = pre_tokenizers.Split(Regex(r"\n|:|\?|[^ \n:?]+"), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(" ", "removed"), words])
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)


def write_checkpoint(
    folder: Path, seed: int = 0, is_fused: bool = True, state: int = STATE, files: int = 2, **changes: Any
) -> Path:
    """Write a checkpoint with random weights in several files, and a tokenizer. `changes` are keys of config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        weights = random_weights(is_fused, state)
    names = sorted(weights)
    for i in range(files):
        part = {name: weights[name].contiguous() for name in names[i::files]}
        save_file(part, folder / f"model-{i + 1:05}-of-{files:05}.safetensors", {"format": "pt"})
    count = 2 if is_fused else 1
    config = {
        "model_type": "openvla",
        "use_fused_vision_backbone": is_fused,
        "timm_model_ids": NAMES[:count],
        "image_sizes": [SIZE] * count,
        "timm_override_act_layers": [None] * count,
        "text_config": text_config(),
        "n_action_bins": BINS,
        "pad_to_multiple_of": FILL,
        "norm_stats": {"dots": STATISTICS},
    }
    (folder / "config.json").write_text(json.dumps(config | changes))
    pixels = {"means": MEANS[:count], "stds": STDS[:count]}
    (folder / "preprocessor_config.json").write_text(json.dumps(pixels))
    write_tokenizer(folder)
    return folder


@cache
def checkpoint(seed: int = 0) -> str:
    """Return the folder of a checkpoint, which all tests of a process share. Copy it before you change it."""
    return str(write_checkpoint(Path(mkdtemp(prefix="tiny_openvla_")), seed))


@cache
def checkpoint_of_two_data_sets() -> str:
    """Return the folder of a checkpoint with the data sets `small` and `large`."""
    large = STATISTICS | {"action": {"q01": [-1.0, -1.0], "q99": [1.0, 1.0]}}
    folder = Path(mkdtemp(prefix="tiny_openvla_"))
    return str(write_checkpoint(folder, norm_stats={"small": STATISTICS, "large": large}))


def choosing(algorithm: str, /, **changes: Any) -> Config:
    """Return a short run of a tiny OpenVLA on `dots` with chunks of 3 actions, with changes by dotted key."""
    return run_of("openvla", checkpoint(), algorithm, changes)
