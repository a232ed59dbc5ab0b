"""What enters the residual stream of a multimodal model beside the embedding of text.

A forward of text runs no tower, so it does not show by which modules pictures and sound enter. The
table names them: the last linear of each projector, whose output transformers puts among the
embeddings, or adds to the residual stream after a block, as it is. If the stream is rotated, their
output channels are rotated with it. The residual stream of a class that is not listed stays as it
is.
"""

import re
from collections.abc import Mapping

from torch import nn

LINEAR_2 = ("model.multi_modal_projector.linear_2",)
LINEAR_2_AND_NEWLINE = (*LINEAR_2, "model.image_newline")
LINEAR = ("model.multi_modal_projector.linear",)
CONNECTOR = ("model.connector.modality_projection.proj",)
MERGER = ("model.visual.merger.mlp.2",)
MERGER_OF_QWEN3 = ("model.visual.merger.linear_fc2",)
DEEPSTACK = (*MERGER_OF_QWEN3, "model.visual.deepstack_merger_list.*.linear_fc2")
#: by ``model_type``: all linears, tables and vectors that enter; a number, as ``*``, may be absent
ENTERING: dict[str, tuple[str, ...]] = {
    "aya_vision": LINEAR_2,
    "chameleon": (),  # pictures are tokens of the vocabulary
    "cohere2_vision": LINEAR_2,
    "deepseek_vl": ("model.aligner.linear2",),
    "glm4v_moe": ("model.visual.merger.down_proj",),
    "got_ocr2": ("model.multi_modal_projector.multimodal_projector",),
    "idefics3": CONNECTOR,
    "internvl": LINEAR_2,
    "kimi_k25": ("model.mm_projector.out_proj",),
    "lfm2_vl": LINEAR_2,
    "llava": LINEAR_2,
    "llava_next": LINEAR_2_AND_NEWLINE,
    "llava_next_video": LINEAR_2_AND_NEWLINE,
    "llava_onevision": LINEAR_2_AND_NEWLINE,
    "mistral3": LINEAR_2,
    "ovis2": ("model.visual_embeddings_table",),
    "paddleocr_vl": ("model.projector.linear_2",),
    "paligemma": LINEAR,
    "qianfan_ocr": LINEAR_2,
    "qwen2_5_vl": MERGER,
    "qwen2_audio": LINEAR,
    "qwen2_vl": MERGER,
    "qwen3_5": MERGER_OF_QWEN3,
    "qwen3_5_moe": MERGER_OF_QWEN3,
    "qwen3_vl": DEEPSTACK,
    "qwen3_vl_moe": DEEPSTACK,
    "smolvlm": CONNECTOR,
    "step3p7": ("model.multi_modal_projector",),
    "video_llama_3": ("model.projector.readout.2",),
    "vipllava": LINEAR_2,
    "voxtral": LINEAR_2,
}


def entering(
    model_type: str,
    modules: Mapping[str, nn.Module],
    shapes: Mapping[str, tuple[int, ...]],
    hidden: int,
) -> dict[str, int] | None:
    """The tensors that enter, each with the dimension of its ``hidden`` channels of the stream.

    None if it is not known what enters.

    Args:
        shapes: the shapes of the tensors beside blocks, tables, final norm and head.
    """
    if model_type not in ENTERING:
        return None
    found: dict[str, int] = {}
    for owner in ENTERING[model_type]:
        pattern = re.compile(re.escape(owner).replace(r"\*", r"\d+") + r"(\.weight|\.bias)?")
        names = [name for name in shapes if pattern.fullmatch(name)]
        if not names and "*" not in owner:
            return None
        for name in names:
            is_table = isinstance(modules.get(name.removesuffix(".weight")), nn.Embedding)
            found[name] = int(is_table)
    alike = all(shapes[name][dim] == hidden for name, dim in found.items())
    return found if alike else None
