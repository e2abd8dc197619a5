"""The vision transformer computes what SigLIP and DINOv2 of transformers compute, whose weights have other names."""

import pytest
import torch
from support.checks import close
from support.tiny_openvla import NAMES, PATCH, SIZE, VISION, vision_weights

from ecrl.policies.vision_transformer import VisionTransformer, ViTSizes

transformers = pytest.importorskip("transformers")


def model_of(weights, name, image=SIZE):
    sizes = ViTSizes.of(name, image, {key: tuple(x.shape) for key, x in weights.items()})
    model = VisionTransformer(sizes)
    left = model.load_state_dict(weights, strict=False)
    assert not left.missing_keys
    unused = (f"blocks.{sizes.blocks}.", "norm.", "attn_pool")
    assert all(key.startswith(unused) for key in left.unexpected_keys)
    return model.eval()


def split(weights, prefix, width):
    for name, part in zip("qkv", weights.split(width), strict=True):
        yield f"{prefix}{name}", part


def images(n=3):
    return torch.randn(n, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(1))


def test_it_is_siglip():
    sizes = VISION["fused_featurizer"]
    torch.manual_seed(0)
    weights, width = vision_weights(**sizes), sizes["width"]
    config = transformers.SiglipVisionConfig(
        hidden_size=width,
        intermediate_size=sizes["hidden"],
        num_hidden_layers=sizes["blocks"],
        num_attention_heads=3,
        patch_size=PATCH,
        image_size=SIZE,
        hidden_act="gelu",
        vision_use_head=False,
    )
    theirs = transformers.SiglipVisionModel(config).eval()
    state = {
        "embeddings.patch_embedding.weight": weights["patch_embed.proj.weight"],
        "embeddings.patch_embedding.bias": weights["patch_embed.proj.bias"],
        "embeddings.position_embedding.weight": weights["pos_embed"][0],
        "post_layernorm.weight": weights["norm.weight"],
        "post_layernorm.bias": weights["norm.bias"],
    }
    names = {"norm1": "layer_norm1", "norm2": "layer_norm2", "mlp.fc1": "mlp.fc1", "mlp.fc2": "mlp.fc2"}
    names |= {"attn.proj": "self_attn.out_proj"}
    for i in range(sizes["blocks"]):
        for kind in ("weight", "bias"):
            for mine, other in names.items():
                state[f"encoder.layers.{i}.{other}.{kind}"] = weights[f"blocks.{i}.{mine}.{kind}"]
            for name, part in split(weights[f"blocks.{i}.attn.qkv.{kind}"], "", width):
                state[f"encoder.layers.{i}.self_attn.{name}_proj.{kind}"] = part
    known = theirs.state_dict()
    prefix = next(iter(known)).split("embeddings")[0]
    theirs.load_state_dict({f"{prefix}{name}": x for name, x in state.items()})
    with torch.no_grad():
        expected = theirs(images(), output_hidden_states=True).hidden_states[sizes["blocks"] - 1]
        close(model_of(weights, NAMES[1])(images()), expected, tol=1e-5)


def test_it_is_dinov2_with_registers():
    """In timm only the patches have positions, so the class token of transformers has the position 0."""
    sizes = VISION["featurizer"]
    torch.manual_seed(0)
    weights, width = vision_weights(**sizes), sizes["width"]
    config = transformers.Dinov2WithRegistersConfig(
        hidden_size=width,
        mlp_ratio=sizes["hidden"] // width,
        num_hidden_layers=sizes["blocks"],
        num_attention_heads=3,
        patch_size=PATCH,
        image_size=SIZE,
        num_register_tokens=sizes["registers"],
    )
    theirs = transformers.Dinov2WithRegistersModel(config).eval()
    position = torch.cat((torch.zeros(1, 1, width), weights["pos_embed"]), 1)
    state = {
        "embeddings.cls_token": weights["cls_token"],
        "embeddings.mask_token": torch.zeros(1, width),
        "embeddings.register_tokens": weights["reg_token"],
        "embeddings.position_embeddings": position,
        "embeddings.patch_embeddings.projection.weight": weights["patch_embed.proj.weight"],
        "embeddings.patch_embeddings.projection.bias": weights["patch_embed.proj.bias"],
        "layernorm.weight": weights["norm.weight"],
        "layernorm.bias": weights["norm.bias"],
    }
    names = {name: name for name in ("norm1", "norm2", "mlp.fc1", "mlp.fc2")}
    names |= {"attn.proj": "attention.o_proj"}
    for i in range(sizes["blocks"]):
        for kind in ("weight", "bias"):
            for mine, other in names.items():
                state[f"encoder.layer.{i}.{other}.{kind}"] = weights[f"blocks.{i}.{mine}.{kind}"]
            for name, part in split(weights[f"blocks.{i}.attn.qkv.{kind}"], "", width):
                state[f"encoder.layer.{i}.attention.{name}_proj.{kind}"] = part
        for j in (1, 2):
            state[f"encoder.layer.{i}.layer_scale{j}.lambda1"] = weights[f"blocks.{i}.ls{j}.scale_factor"]
    theirs.load_state_dict(state)
    with torch.no_grad():
        hidden = theirs(images(), output_hidden_states=True).hidden_states[sizes["blocks"] - 1]
        close(model_of(weights, NAMES[0])(images()), hidden[:, 1 + sizes["registers"] :], tol=1e-5)


def test_positions_of_all_tokens():
    """A model without `no_embed_class` adds its positions after the class token is there."""
    torch.manual_seed(0)
    weights = vision_weights(**VISION["featurizer"])
    plain = model_of(weights, NAMES[0])
    position = torch.cat((torch.zeros(1, 3, 24), weights["pos_embed"]), 1)
    close(model_of(weights | {"pos_embed": position}, NAMES[0])(images()), plain(images()), tol=1e-6)
    position[:, 0] = torch.randn(24)
    assert not torch.allclose(model_of(weights | {"pos_embed": position}, NAMES[0])(images()), plain(images()))


WRONG = {
    "another model": ("resnet50", {}, r"^unknown vision model 'resnet50'; known: vit_tiny, "),
    "no weight": ("vit_tiny", {"pos_embed": None}, r"^the vision model 'vit_tiny' has no weight 'pos_embed'; copy"),
    "another size": (
        "vit_tiny",
        {"pos_embed": torch.zeros(1, 9, 24)},
        r"^the vision model 'vit_tiny' has 3 blocks and 9 positions, expected 2 blocks or more and 4 or 7 positions",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_other_models_are_refused_in_one_line(case):
    name, changes, message = WRONG[case]
    weights = vision_weights(**VISION["featurizer"]) | changes
    with pytest.raises(ValueError, match=message):
        ViTSizes.of(name, SIZE, {key: tuple(x.shape) for key, x in weights.items() if x is not None})
