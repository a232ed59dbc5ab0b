"""The glossary of a report: a sentence for each word that occurs in it."""

from qtool import recipes
from qtool.report.data import Report

METHODS = {
    "norm-fusion": "a norm's weight is multiplied into the linears that read it",
    "rotate": "channels are mixed by a Hadamard matrix and mixed back later, so that none stands "
    "out; the float model computes the same",
    "smooth": "channels of a linear's input are divided by a factor that its weight is multiplied "
    "by: the same product of easier activations",
    "smooth-attention": "the same between keys and queries, for a KV cache of few bits",
    "value-basis": "the value heads turned into a basis that a KV cache of few bits holds better",
    "reorder": "input channels are sorted by size, so that a group holds similar sizes",
    "gather-outliers": "the largest input channels are brought together in few blocks, which keep "
    "8-bit activations",
    "online-hadamard": "what down projections read is mixed by a Hadamard matrix while the model "
    "runs, and their weights alike: the same product of activations without large values",
    "clip": "a weight's range is cut where that lowers the error of the layer's output",
    "rtn": "each weight is rounded to the nearest code",
    "gptq": "a weight is rounded column by column; the columns to come make up for the error so "
    "far",
    "distill": "weights and scales of a block are trained towards the full-precision block's "
    "output",
}
KV = {
    "kv8": "keys and values in 8 bits, one calibrated scale a channel",
    "kv4": "keys and values in 4 bits, a scale and a zero point for each token and head",
    "kv4-channel": "keys and values in 4 bits, a scale and a zero point for each channel and "
    "group of tokens",
}
STORED = {
    "k_scale": "kv8's scale of each key channel",
    "v_scale": "kv8's scale of each value channel",
    "k_offset": "the calibrated mean of each key channel, which kv4 takes away before it rounds",
    "k_importance": "how much queries read of each key channel, for kv4's choice of scale and "
    "zero point",
}
METRICS = {
    "perplexity": "among how many equally likely tokens the model hesitates, on average; less is "
    "better. It is 1 % more where its logarithm rises by 0.01 nats",
    "acc": "the share of questions whose right answer is the most probable",
    "acc_norm": "the same with an answer's log-probability divided by its length",
}
ALWAYS = {
    "linear": "a weight matrix, and its multiplication with activations",
    "bits a weight": "stored bits over the number of weights, scales and zero points included",
    "stored as": "the scheme, which says what the codes mean, and the layout, the order they lie "
    "in",
}


def entries(report: Report) -> list[tuple[str, str]]:
    """The words of ``report`` (scheme, methods, KV cache, metrics), each with its sentence."""
    scheme, kv = report.quantization.get("scheme"), report.quantization.get("kv")
    found = [(name, about) for name, _, about in recipes.overview() if name == scheme]
    found += [(name, METHODS[name]) for name, _ in report.methods if name in METHODS]
    found += [(kv, KV[kv])] if kv in KV else []
    roles = {size.role.rpartition(".")[2] for size in report.sizes}
    found += [(name, about) for name, about in STORED.items() if name in roles]
    metrics = dict.fromkeys(q.metric for q in report.quality)
    found += [(name, METRICS[name]) for name in metrics if name in METRICS]
    return [*found, *ALWAYS.items()]
