"""Tiny random pi0 checkpoints with a tokenizer of a few words, and runs of the backend `pi0` on `dots`."""

import json
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch

from ecrl.config import Config
from support.pretrained import run_of

SIZE = 16
CHUNK, STATE, NUMBERS = 4, 5, 3
"""Sizes of the model. A step of an action on `dots` has 2 numbers, and its state has 2."""

WORDS = {"<pad>": 0, "<unk>": 1, "<bos>": 2, "go": 3, "red": 4, "green": 5, "blue": 6, "\n": 7}


def tiny_config(**changes: Any) -> Any:
    """Return a config of transformers for a model of 40,000 weights."""
    from transformers import PI0Config

    text = {"hidden_size": 32, "intermediate_size": 48, "vocab_size": 64}
    expert = {"hidden_size": 24, "intermediate_size": 32}
    shared = {
        "model_type": "gemma",
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
    }
    vision = {
        "model_type": "siglip_vision_model",
        "hidden_size": 24,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "patch_size": 8,
        "image_size": SIZE,
        "vision_use_head": False,
    }
    vlm = {"model_type": "paligemma", "text_config": shared | text, "vision_config": vision}
    vlm |= {"projection_dim": 32, "image_token_id": 64}
    sizes = {"chunk_size": CHUNK, "max_state_dim": STATE, "max_action_dim": NUMBERS, "num_inference_steps": 3}
    return PI0Config(vlm_config=vlm, dit_config=shared | expert, **sizes | changes)


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer of transformers whose tokens are `WORDS`."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel(WORDS, unk_token="<unk>"))
    words = pre_tokenizers.Split(Regex(r"<bos>|\n|[^ \n]+"), "isolated")
    spaces = pre_tokenizers.Split(" ", "removed")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([spaces, words])
    special = {"bos_token": "<bos>", "unk_token": "<unk>", "pad_token": "<pad>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)


def write_checkpoint(folder: Path, seed: int = 0, **changes: Any) -> Path:
    """Write a checkpoint with random weights, all of which matter, and a tokenizer."""
    from transformers import PI0ForConditionalGeneration
    from transformers.utils import logging

    logging.disable_progress_bar()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = PI0ForConditionalGeneration(tiny_config(**changes))
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(0.1 * torch.randn_like(weight))
        model.save_pretrained(folder)
    write_tokenizer(folder)
    return folder


@cache
def checkpoint(seed: int = 0) -> str:
    """Return the folder of a checkpoint, which all tests of a process share. Copy it before you change it."""
    return str(write_checkpoint(Path(mkdtemp(prefix="tiny_pi0_")), seed))


def write_statistics(folder: Path, **numbers: Any) -> None:
    """Write the means and standard deviations of the state and of the actions, as the processor of pi0 saves them."""
    (folder / "processor_config.json").write_text(json.dumps({"processor_class": "PI0Processor", **numbers}))


def flowing(algorithm: str, /, **changes: Any) -> Config:
    """Return a short run of a tiny pi0 on `dots` with chunks of 3 actions, with changes by dotted key."""
    return run_of("pi0", checkpoint(), algorithm, changes)
