"""Small models for every room's tests: random weights, real transformers architectures."""

import logging
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import HealthCheck, settings
from packaging.version import Version
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from qtool.io.model_directory import DEMO

torch.set_num_threads(1)
os.fsync = lambda _: None  # what tests write need not survive a power cut
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# a machine that is busy with something else is no failure
settings.register_profile(
    "busy", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("busy")

#: mark of a test whose kernels only a Hopper GPU runs
on_hopper = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 9,
    reason="needs a Hopper GPU (sm_90)",
)


def needs_class(model_type: str) -> pytest.MarkDecorator:
    """Mark of a test of a model that not every supported release of transformers has."""
    missing = model_type not in CONFIG_MAPPING_NAMES
    return pytest.mark.skipif(missing, reason=f"this transformers has no {model_type}")


def needs_transformers(release: str) -> pytest.MarkDecorator:
    """Mark of a test of a config that transformers reads from ``release`` on."""
    older = Version(transformers.__version__) < Version(release)
    return pytest.mark.skipif(older, reason=f"needs transformers {release}")


@pytest.fixture(autouse=True)
def log_is_new() -> None:
    """A command sets qtool's log up; the next test finds it as a process has it at its start."""
    log = logging.getLogger("qtool")
    log.handlers, log.propagate = [], True
    log.setLevel(logging.NOTSET)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test with the mark ``cuda`` where there is no GPU."""
    if item.get_closest_marker("cuda") and not torch.cuda.is_available():
        pytest.skip("no CUDA device")


SMALL: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 320,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
MOE: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
FALCON: dict[str, Any] = {
    "num_key_value_heads": None,
    "head_dim": None,
    "tie_word_embeddings": True,
}
#: every model type and the variants that change how a block looks
VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-tied": {"tie_word_embeddings": True},
    "llama-mha": {"num_key_value_heads": 4},
    "llama-biases": {"attention_bias": True, "mlp_bias": True},
    "llama-rope-scaling": {"rope_parameters": LLAMA3_ROPE},
    "mistral": {"sliding_window": 16},
    "qwen2": {},
    "qwen2-mha": {"num_key_value_heads": 4},  # Qwen 1.5
    "qwen3": {},
    "phi3": {"pad_token_id": 0, "tie_word_embeddings": False},
    "gemma": {"tie_word_embeddings": True},
    "gemma2": {"tie_word_embeddings": True, "sliding_window": 16},
    "gemma3_text": {"tie_word_embeddings": True, "sliding_window": 16},
    "opt": {
        "ffn_dim": 512,
        "word_embed_proj_dim": 128,
        "tie_word_embeddings": True,
        "num_key_value_heads": None,
    },
    "falcon": FALCON,  # 7B
    "falcon-new": FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2},  # 40B, 180B
    "falcon-11b": FALCON
    | {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
    "falcon-rw": FALCON
    | {"multi_query": False, "parallel_attn": False, "alibi": True, "bias": True},
    "mixtral": {"num_local_experts": 4},
    "qwen2_moe": MOE | {"shared_expert_intermediate_size": 384},
    "qwen3_moe": MOE,
    "qwen3_moe-some-dense": MOE | {"mlp_only_layers": [1]},
}

#: lm-eval's folders of tasks that tests name, and those of names that are close to them
TASKS = ("arc", "gsm8k", "hellaswag", "mmlu/default", "piqa", "pisa", "wikitext", "winogrande")

MakeModel = Callable[..., Path]


def save_model(
    directory: Path,
    variant: str = "llama",
    *,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "5GB",
    seed: int = 0,
    **config: Any,
) -> Path:
    """Save a random model of ``variant`` with ``config`` changed in ``directory``."""
    torch.manual_seed(seed)
    settings = {
        key: value
        for key, value in (SMALL | VARIANTS[variant] | config).items()
        if value is not None
    }
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(variant.split("-")[0], **settings)
    )
    for (
        parameter
    ) in model.parameters():  # random norms and biases too, or half the folds go untested
        if parameter.dim() == 1:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    model.to(dtype).save_pretrained(directory, max_shard_size=max_shard_size)
    return directory


def copy_tokenizer(directory: Path) -> None:
    """Give the model in ``directory`` the demo's tokenizer, of 4096 ids."""
    for file in DEMO.glob("tokenizer*"):
        shutil.copy(file, directory)


@pytest.fixture(scope="session")
def saved_model(tmp_path_factory: pytest.TempPathFactory) -> MakeModel:
    """``saved_model("qwen2", dtype=..., max_shard_size=..., **config)`` saves a random model once;
    returns its directory, which no test changes.
    """
    made: dict[str, Path] = {}

    def make(variant: str = "llama", **options: Any) -> Path:
        key = repr((variant, sorted(options.items())))
        if key not in made:
            made[key] = save_model(tmp_path_factory.mktemp("saved") / variant, variant, **options)
        return made[key]

    return make


@pytest.fixture
def make_model(saved_model: MakeModel, tmp_path: Path) -> MakeModel:
    """The same as :func:`saved_model`, but the test's own, as ``name``."""

    def make(variant: str = "llama", *, name: str | None = None, **options: Any) -> Path:
        saved = saved_model(variant, **options)
        return shutil.copytree(
            saved, tmp_path / (name or variant), copy_function=shutil.copyfile, dirs_exist_ok=True
        )

    return make


@pytest.fixture(scope="session")
def few_tasks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with few of lm-eval's 14,000 files of tasks, the only ones that it finds: to read
    them all takes seconds.
    """
    from lm_eval.tasks import manager

    from qtool.eval import zero_shot

    assert manager.__file__
    own, few = Path(manager.__file__).parent, tmp_path_factory.mktemp("tasks")
    for name in TASKS:
        shutil.copytree(own / name, few / name, ignore=shutil.ignore_patterns("__pycache__"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manager, "__file__", str(few / "manager.py"))
        zero_shot._index.cache_clear()
        yield few
    zero_shot._index.cache_clear()


@pytest.fixture
def current_gpus(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Those of two GPUs, which are not there, that were made the current one and still are."""
    current: list[object] = []

    class Device:  # torch asks whether a device is one
        def __init__(self, given: object) -> None:
            self.given = given

        def __enter__(self) -> None:
            current.append(self.given)

        def __exit__(self, *_: object) -> None:
            current.pop()

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "device", Device)
    return current
