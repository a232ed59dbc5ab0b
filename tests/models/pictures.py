"""A forward of a tiny multimodal model over a picture or sound."""

import inspect
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

#: id of the tokens whose embeddings are replaced
PLACE = 300
#: patches of a picture, as rows and columns
GRID = 4, 4
#: models that take a picture's patches in one dimension, as ``[patches, channels, size, size]`` or
#: flat
PATCHES = ("kimi_k25", "paddleocr_vl")
FLAT = ("glm4v_moe", "qwen2_5_vl", "qwen2_vl", "qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe")
#: models that cut a picture into parts
PARTS = ("llava_next", "llava_next_video", "llava_onevision")
#: models that take several pictures for each text
SEVERAL = ("idefics3", "smolvlm")
SOUND = ("qwen2_audio", "voxtral")


@torch.no_grad()
def logits(model: PreTrainedModel) -> Tensor:
    """Of six tokens of text and a picture (or sound) between them, ``[1, T, V]``."""
    given, rows = _given(model), 0
    of_picture: Any = getattr(model.model, "get_image_features", None)
    if model.config.model_type == "qwen2_audio":
        rows = given["feature_attention_mask"].shape[1] // 4
    else:
        found = (of_picture or model.model.get_audio_features)(**given).pooler_output
        rows = sum(part.numel() for part in found) // model.config.get_text_config().hidden_size
    ids = torch.tensor([[3, 4, 5, *[PLACE] * rows, 6, 7, 8]])
    if "mm_token_type_ids" in inspect.signature(model.forward).parameters:
        given["mm_token_type_ids"] = (ids == PLACE).int()
    logits: Tensor = model(input_ids=ids, use_cache=False, **given).logits
    return logits.float()


def _given(model: PreTrainedModel) -> dict[str, Any]:
    """The arguments that are a random picture or sound; sizes that it decides are set."""
    config, kind = model.config, model.config.model_type
    for name in ("image_token_id", "image_token_index", "audio_token_id", "audio_token_index"):
        if hasattr(config, name):
            setattr(config, name, PLACE)
    if kind in SOUND:
        audio = config.audio_config
        frames = 2 * audio.max_source_positions
        sound = {"input_features": _random(1, audio.num_mel_bins, frames)}
        mask = {"feature_attention_mask": torch.ones(1, frames, dtype=torch.long)}
        return sound | (mask if kind == "qwen2_audio" else {})
    vision = config.vision_config
    patch: int = vision.patch_size
    (rows, columns), grid = GRID, torch.tensor([[1, *GRID]])
    if kind in PATCHES:
        pixels = _random(rows * columns, 3, patch, patch)
        return {"pixel_values": pixels, "image_grid_thw": grid}
    if kind in FLAT:
        pixels = _random(rows * columns, 3 * vision.temporal_patch_size * patch**2)
        return {"pixel_values": pixels, "image_grid_thw": grid}
    if kind == "video_llama_3":
        pixels = _random(rows * columns, 3 * patch**2)
        merged = {"image_merge_sizes": torch.tensor([2])}
        return {"pixel_values": pixels, "image_grid_thw": grid} | merged
    if kind == "lfm2_vl":
        pixels = _random(1, rows * columns, 3 * patch**2)
        mask = torch.ones(1, rows * columns, dtype=torch.long)
        shapes = {"spatial_shapes": grid[:, 1:], "pixel_attention_mask": mask}
        return {"pixel_values": pixels} | shapes
    if kind == "mistral3":
        height, width = rows * patch, columns * patch
        sizes = torch.tensor([[height, width]])
        return {"pixel_values": _random(1, 3, height, width), "image_sizes": sizes}
    size: int = vision.image_size if isinstance(vision.image_size, int) else vision.image_size[0]
    if kind in PARTS:
        config.image_grid_pinpoints = [[2 * size, 2 * size]]
        sizes = torch.tensor([[2 * size, 2 * size]])
        return {"pixel_values": _random(1, 5, 3, size, size), "image_sizes": sizes}
    if kind == "vipllava":
        config.vision_feature_layers = [0, 1, 1, 1, 1]
    several = (1,) if kind in SEVERAL else ()
    return {"pixel_values": _random(1, *several, 3, size, size)}


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))
