"""OPT: LayerNorm and linears with biases, learned positions, an MLP of two linears.

ReLU stands between the two. A positive factor passes through a ReLU, so fc2's input may be scaled
in fc1's rows.
"""

from dataclasses import replace
from typing import Any

from qtool.errors import QtoolError
from qtool.models.family import Family
from qtool.models.parts import Attention, Fold, LinearGroup

Q, K, V, OUT = (f"self_attn.{x}_proj" for x in ("q", "k", "v", "out"))
FC1, FC2 = "fc1", "fc2"
ATTENTION_NORM, MLP_NORM = "self_attn_layer_norm", "final_layer_norm"
#: settings of the norms: the supported value, and what the other one means
NORMS = {
    "do_layer_norm_before": (True, "its norms come after what they would fold into"),
    "layer_norm_elementwise_affine": (True, "its norms have no weights to fold into"),
    "_remove_final_layer_norm": (False, "it has no norm before its head"),
}


def _choose(config: Any, block: int) -> Family:
    """The family of an OPT config: factors pass only through ReLU. Refuses other structures."""
    if getattr(config, "word_embed_proj_dim", None) not in (None, config.hidden_size):
        raise QtoolError(
            f"OPT with word_embed_proj_dim {config.word_embed_proj_dim} and hidden_size "
            f"{config.hidden_size} projects its embeddings (project_in, project_out); supported "
            "are OPT models whose two sizes are equal"
        )
    for key, (supported, reason) in NORMS.items():
        if bool(getattr(config, key, supported)) != supported:
            raise QtoolError(
                f"OPT with {key} {str(not supported).lower()} is not supported: {reason}"
            )
    return OPT_RELU if getattr(config, "activation_function", "relu") == "relu" else OPT_OTHER


OPT = Family(
    name="OPT",
    model_types=("opt",),
    groups=(
        LinearGroup((Q, K, V), ATTENTION_NORM, Fold.NORM),
        LinearGroup((OUT,), V, Fold.HEADS, writes_residual=True),
        LinearGroup((FC1,), MLP_NORM, Fold.NORM),
        LinearGroup((FC2,), FC1, Fold.PRODUCT, writes_residual=True),
    ),
    attention=Attention(q=Q, k=K, v=V, o=OUT, rotary=False),
    tensors={
        f"{ATTENTION_NORM}.weight": "hidden",
        f"{ATTENTION_NORM}.bias": "hidden",
        f"{Q}.weight": "hidden hidden",
        f"{K}.weight": "hidden hidden",
        f"{V}.weight": "hidden hidden",
        f"{OUT}.weight": "hidden hidden",
        f"{MLP_NORM}.weight": "hidden",
        f"{MLP_NORM}.bias": "hidden",
        f"{FC1}.weight": "inter hidden",
        f"{FC2}.weight": "hidden inter",
    },
    biased_if={"enable_bias": (Q, K, V, OUT, FC1, FC2)},
    layer_norm=True,
    embedding="model.decoder.embed_tokens",
    positions="model.decoder.embed_positions",
    blocks="model.decoder.layers",
    final_norm="model.decoder.final_layer_norm",
    sizes={
        "inter": lambda config: config.ffn_dim,
        "positions": lambda config: config.max_position_embeddings + 2,
    },
    defaults={"tie_word_embeddings": True, "enable_bias": True},
    choose=_choose,
)

OPT_RELU = replace(OPT, choose=None)
OPT_OTHER = replace(
    OPT_RELU,
    groups=(*OPT.groups[:3], LinearGroup((FC2,), FC1, Fold.ACTIVATION, writes_residual=True)),
)
