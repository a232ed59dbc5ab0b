"""The main job: what is written loads, runs, is resumable to the same bytes, and is what the plan
said.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from qtool import recipes
from qtool.calibration.batch import Batches
from qtool.calibration.block import Block
from qtool.calibration.method import LEARNING_SEQUENCES
from qtool.calibration.transforms.norm_fusion import NormFusion
from qtool.calibration.transforms.online_hadamard import OnlineHadamard
from qtool.calibration.transforms.rotate import Rotate
from qtool.errors import QtoolError
from qtool.io import output
from qtool.io.integrity import read_record
from qtool.io.source import Checkpoint
from qtool.models import family_of
from qtool.pipeline.job import Job
from qtool.pipeline.planning.plan import plan
from qtool.pipeline.quantize import Calibration, quantize
from qtool.pipeline.streaming.shards import Shards
from qtool.pipeline.verify import verify
from qtool.runtime.huggingface import dequantized, quantized_linears
from qtool.runtime.load import load
from tests import forks
from tests.conftest import VARIANTS, MakeModel

IDENTITY = {"scheme": "identity", "layers": [{"match": ".*", "scheme": None}]}
IDS = torch.arange(48).reshape(2, 24) * 5 % 320


def run(source: Path, scheme: str, out: Path, **options: object) -> Path:
    return quantize(Checkpoint(source), recipes.load(scheme), out, **options)  # type: ignore[arg-type]


def files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_identity_recipe_leaves_logits_unchanged(
    variant: str, make_model: MakeModel, tmp_path: Path
) -> None:
    source = make_model(variant)
    out = quantize(Checkpoint(source), recipes.parse(IDENTITY, "identity"), tmp_path / "out")
    found, expected = load(out)(IDS).logits, load(source)(IDS).logits
    if family_of(Checkpoint(source).config).experts:  # transformers adds up the stacks otherwise
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    else:
        assert torch.equal(found, expected)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("scheme", ["w4a8-lqq", "w4a8-qoq-g128", "w4a4-g128", "w8a8", "w4a16"])
def test_every_family_is_quantized_verified_and_runs(
    variant: str, scheme: str, make_model: MakeModel, tmp_path: Path
) -> None:
    source = make_model(variant)
    config = json.loads((source / "config.json").read_text())
    job = Job.of(config, recipes.load(scheme))
    linears = [job.full(block, name) for block in range(job.blocks) for name in job.linears(block)]
    planned = plan(job).output_bytes
    out = run(source, scheme, tmp_path / "out")
    assert planned == sum(entry.nbytes for entry in Checkpoint(out).entries.values())
    assert [(row.name, row.problem) for row in sorted(verify(out), key=lambda row: row.name)] == [
        (name, "") for name in sorted(linears)
    ]
    model = load(out)
    assert sorted(quantized_linears(model)) == sorted(linears)
    exact, found = load(source)(IDS).logits, model(IDS).logits
    margin = 0.5 if scheme == "w4a4-g128" else 0.3
    if (
        job.family.post_norms
    ):  # they bring an output, and its error, to the size of the residual stream
        margin *= 1.5
    assert (found - exact).norm() < margin * exact.norm()
    assert model.generate(IDS[:1], max_new_tokens=4, do_sample=False).shape == (1, 28)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_shards_and_dtypes(dtype: torch.dtype, make_model: MakeModel, tmp_path: Path) -> None:
    one = make_model(dtype=dtype, name="one")
    many = make_model(dtype=dtype, name="many", max_shard_size="200KB")
    assert len(list(many.glob("*.safetensors"))) > 3
    a, b = (run(source, "w4a8-lqq", tmp_path / f"{source.name}-q") for source in (one, many))
    weights = [{k: v for k, v in files(d).items() if k.endswith(".safetensors")} for d in (a, b)]
    assert weights[0] == weights[1]
    assert load(a).dtype == dtype


def test_a_tied_head_saved_under_its_other_name(make_model: MakeModel, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    source = make_model("llama-tied")
    tensors = load_file(source / "model.safetensors")
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    out = run(source, "w4a16", tmp_path / "out")
    assert torch.equal(load(out).get_input_embeddings().weight, tensors["lm_head.weight"])
    tensors["model.embed_tokens.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    assert [*Checkpoint(run(source, "w4a16", tmp_path / "both")).entries] == [
        *Checkpoint(out).entries
    ]


def test_code_of_the_model_is_no_part_of_the_result(make_model: MakeModel, tmp_path: Path) -> None:
    source = make_model()
    config = json.loads((source / "config.json").read_text()) | {
        "auto_map": {"AutoModelForCausalLM": "own.Model"}
    }
    (source / "config.json").write_text(json.dumps(config))
    out = run(source, "w4a16", tmp_path / "out")
    assert "auto_map" not in json.loads((out / "config.json").read_text())
    assert AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True).dtype == torch.float32


def test_integer_arithmetic_not_simulation(make_model: MakeModel, tmp_path: Path) -> None:
    """The quantized model is not its dequantized self: activations really have 8 bits."""
    out = run(make_model(), "w4a8-lqq", tmp_path / "out")
    packed, plain = load(out)(IDS).logits, dequantized(load(out))(IDS).logits
    assert not torch.equal(packed, plain)
    assert (packed - plain).norm() < 0.05 * plain.norm()


@pytest.mark.parametrize("scheme", ["w4a8-lqq", "w8a8", "w4a16"])
@pytest.mark.parametrize("variant", ["llama", "llama-tied", "qwen2", "qwen3"])
def test_plan_predicts_the_bytes(
    scheme: str, variant: str, make_model: MakeModel, tmp_path: Path
) -> None:
    source = make_model(variant, dtype=torch.bfloat16)
    config = json.loads((source / "config.json").read_text())
    planned = plan(Job.of(config, recipes.load(scheme)))
    out = Checkpoint(run(source, scheme, tmp_path / "out"))
    assert planned.output_bytes == sum(entry.nbytes for entry in out.entries.values())
    declared = Job.of(config, recipes.load(scheme)).shards()
    assert planned.output_bytes == sum(t.nbytes for shard in declared for t in shard.values())


def test_transformers_loads_it_after_one_import(make_model: MakeModel, tmp_path: Path) -> None:
    out = run(make_model(), "w4a8-lqq", tmp_path / "out")
    code = (
        "import qtool.transformers\nfrom transformers import AutoModelForCausalLM\n"
        f"model = AutoModelForCausalLM.from_pretrained({str(out)!r})\n"
        "print(type(model.model.layers[0].mlp.up_proj).__name__)"
    )
    assert (
        subprocess.check_output([sys.executable, "-c", code], text=True).split()[-1]
        == "QuantLinear"
    )


CALIBRATED = {
    "scheme": "calibrated",
    "layers": [{"match": ".*", "scheme": "w4a8-lqq", "group_size": 64, "layout": "dual-mma"}],
    "transforms": [
        "norm-fusion",
        {"rotate": {"learn_steps": 5}},
        {"smooth": {"steps": 2}},
        "online-hadamard",
    ],
    "rounding": "rtn",
}


def _calibrated(source: Path, out: Path, **options: object) -> Path:
    torch.manual_seed(3)
    tokens = list(torch.randint(0, 320, (4, 32)).split(2))
    recipe = recipes.parse(CALIBRATED, "calibrated")
    return quantize(
        Checkpoint(source),
        recipe,
        out,
        calibration=Calibration(tokens, {"text": "random"}),
        **options,
    )  # type: ignore[arg-type]


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_family_is_calibrated_and_runs(
    variant: str, make_model: MakeModel, tmp_path: Path
) -> None:
    """All of it at once: each block computes the next one's inputs from what was written."""
    source = make_model(variant)
    family = family_of(Checkpoint(source).config)
    rotate = {"rotate": {"residual": not family.post_norms, "learn_steps": 5}}
    recipe = CALIBRATED | {
        "transforms": ["norm-fusion", rotate, {"smooth": {"steps": 2}}, "online-hadamard"],
        "rounding": "gptq",
    }
    tokens = list(
        torch.randint(0, 320, (4, 32), generator=torch.Generator().manual_seed(3)).split(2)
    )
    out = quantize(Checkpoint(source), recipes.parse(recipe, "calibrated"), tmp_path / "out",
                   calibration=Calibration(tokens, {"text": "random"}))  # fmt: skip
    assert not [row for row in verify(out) if row.problem]
    exact, found = load(source)(IDS).logits, load(out)(IDS).logits
    assert (found - exact).norm() < (0.45 if family.post_norms else 0.25) * exact.norm()


class Killed(BaseException):
    """What ends a run in a test, as a signal would."""


def kill(*_: object) -> None:
    raise Killed


def kill_at(stop: int) -> Callable[..., None]:
    """A ``progress`` that ends the run when it has written ``stop`` shards."""

    def progress(done: int, *_: object) -> None:
        if done == stop:
            raise Killed

    return progress


@pytest.mark.parametrize("stop", [1, 2, 3, 4])
@pytest.mark.parametrize(
    "make", [_calibrated, lambda s, o, **k: run(s, "w4a8-lqq", o, **k)], ids=["built", "streamed"]
)
def test_resumed_equals_uninterrupted(
    stop: int, make: object, make_model: MakeModel, tmp_path: Path
) -> None:
    source = make_model("llama", dtype=torch.bfloat16, num_hidden_layers=3)
    whole = files(make(source, tmp_path / "whole"))  # type: ignore[operator]
    rotated = Checkpoint(tmp_path / "whole").config["quantization_config"].get("rotated")
    assert rotated == (["mlp.down_proj"] if make is _calibrated else None)

    with pytest.raises(Killed):
        make(source, tmp_path / "cut", progress=kill_at(stop))  # type: ignore[operator]
    assert not (tmp_path / "cut").exists()
    assert not (tmp_path / "cut.partial" / "config.json").exists()
    with pytest.raises(QtoolError, match="--resume"):
        make(source, tmp_path / "cut")  # type: ignore[operator]
    assert files(make(source, tmp_path / "cut", resume=True)) == whole  # type: ignore[operator]


def test_a_resumed_mixture_equals_an_uninterrupted_one(
    make_model: MakeModel, tmp_path: Path
) -> None:
    """Blocks that were written are run again, with experts whose inputs are rotated."""
    source = make_model("mixtral", dtype=torch.bfloat16, num_hidden_layers=3)
    whole = files(_calibrated(source, tmp_path / "whole"))
    stored = Checkpoint(tmp_path / "whole").config["quantization_config"]
    assert stored["rotated"] == ["block_sparse_moe.experts.*.w2"]

    with pytest.raises(Killed):
        _calibrated(source, tmp_path / "cut", progress=kill_at(2))
    assert files(_calibrated(source, tmp_path / "cut", resume=True)) == whole


@pytest.mark.parametrize("variant", ["mixtral", "qwen3_moe"])
def test_experts_get_the_tokens_of_the_unrotated_router(
    variant: str, make_model: MakeModel, tmp_path: Path
) -> None:
    """The batches are rotated from the start, and a router that is not would send them anywhere."""
    tokens = torch.randint(0, 320, (4, 32), generator=torch.Generator().manual_seed(1))
    source, calibration = Checkpoint(make_model(variant)), Calibration([tokens])
    found = []
    for number, transforms in enumerate(([], ["norm-fusion", "rotate"])):
        steps = {"transforms": transforms, "rounding": "gptq", "min_expert_tokens": 60}
        recipe = recipes.parse({"layers": [{"match": ".*", "scheme": "w4a16"}], **steps}, "own")
        out = quantize(source, recipe, tmp_path / str(number), calibration=calibration)
        found.append([block["expert tokens"] for block in read_record(out)["blocks"]])
    assert found[0] == found[1]
    assert any(of["added"] for block in found[0] for of in block.values())


def test_a_resumed_run_has_the_rotation_that_was_learned(
    make_model: MakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Learned again, on another number of threads, it would be another one."""
    source = make_model("llama", dtype=torch.bfloat16, num_hidden_layers=3)

    with pytest.raises(Killed):
        _calibrated(source, tmp_path / "cut", progress=kill)
    monkeypatch.setattr("qtool.calibration.transforms.rotate.learn", None)
    _calibrated(source, tmp_path / "cut", resume=True)


@pytest.mark.parametrize("batch", [1, 3, 12])
def test_a_transform_learns_of_as_many_sequences_whatever_the_batches(
    batch: int, make_model: MakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, seen = make_model("llama", num_hidden_layers=3), []
    tokens = list(torch.randint(0, 320, (12, 32)).split(batch))

    def learn(blocks: object, batches: Batches) -> dict[str, torch.Tensor]:
        seen.extend(batch.shape[0] for batch in batches)
        raise Killed

    monkeypatch.setattr(Rotate, "learn", lambda self, *given: learn(*given))
    with pytest.raises(Killed):
        quantize(
            Checkpoint(source),
            recipes.parse(CALIBRATED, "calibrated"),
            tmp_path / "out",
            calibration=Calibration(tokens, {"text": "random"}),
        )
    assert sum(seen) == LEARNING_SEQUENCES == 8


def test_a_transform_that_learns_knows_what_later_ones_announce(
    make_model: MakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, seen = make_model("llama", num_hidden_layers=3), []

    def learn(self: Rotate, blocks: Iterator[Block], batches: Batches) -> None:
        seen.extend(block.to_rotate for block in blocks)
        raise Killed

    monkeypatch.setattr(Rotate, "learn", learn)
    with pytest.raises(Killed):
        _calibrated(source, tmp_path / "out")
    assert seen == [{"mlp.down_proj"}] * 3


def test_the_last_transform_announces_before_the_first_rewrites(
    make_model: MakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, seen, fuse = make_model("llama", num_hidden_layers=3), [], NormFusion.apply

    def apply(self: NormFusion, block: Block, batches: Batches) -> None:
        seen.append(("rewrites", block.index))
        fuse(self, block, batches)

    monkeypatch.setattr(NormFusion, "apply", apply)
    monkeypatch.setattr(
        OnlineHadamard, "announce", lambda self, block: seen.append(("announces", block.index))
    )
    _calibrated(source, tmp_path / "out")
    for number in range(3):
        own = [what for what, index in seen if index == number]
        assert own[-2:] == ["announces", "rewrites"]


def test_a_resumed_run_says_where_it_goes_on(
    make_model: MakeModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source, out = make_model(num_hidden_layers=3), tmp_path / "out"

    with pytest.raises(Killed):
        run(source, "w8a8", out, progress=kill_at(3))
    records = tmp_path / "out.partial" / ".run"
    for shard in (3, 4):  # the writer may have been ahead
        (records / f"shard-0000{shard}.json").unlink(missing_ok=True)
    kept = len(list(records.glob("shard-*.json")))
    caplog.clear()
    run(source, "w8a8", out, resume=True)
    assert (
        f"resuming {out}.partial: {kept} of 5 shards are whole, "
        "continues with shard " in caplog.text
    )
    caplog.clear()
    before = files(out)
    assert run(source, "w8a8", out, resume=True) == out and files(out) == before
    assert caplog.messages == [f"{out} is complete; nothing is left to do"]
    with pytest.raises(QtoolError, match="exists already"):
        run(source, "w4a16", out, resume=True)


def test_a_truncated_shard_is_made_again(make_model: MakeModel, tmp_path: Path) -> None:
    source = make_model(dtype=torch.bfloat16)
    whole = files(_calibrated(source, tmp_path / "whole"))

    with pytest.raises(Killed):
        _calibrated(source, tmp_path / "cut", progress=kill_at(3))
    shard = next((tmp_path / "cut.partial").glob("model-00002*"))
    shard.write_bytes(shard.read_bytes()[:-100])
    (tmp_path / "cut.partial" / ".run" / "shard-00001.json").write_text("{")
    assert files(_calibrated(source, tmp_path / "cut", resume=True)) == whole


def test_no_file_of_a_run_is_open_when_its_directory_is_removed(
    make_model: MakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS renames an open file that is removed, and its directory cannot be removed then."""
    own, out, removed = output.shutil.rmtree, tmp_path / "out", []

    def rmtree(path: Path) -> None:
        opened = {os.path.realpath(link) for link in Path("/proc/self/fd").iterdir()}
        removed.append((path, [name for name in opened if name.startswith(str(path))]))
        own(path)

    with monkeypatch.context() as patch:
        patch.setattr(output.shutil, "rmtree", rmtree)
        run(make_model(dtype=torch.bfloat16), "w8a8", out)
    assert removed == [(out / ".run", [])]


def test_two_runs_may_remove_the_directory_of_one_that_is_complete(
    make_model: MakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out, own = make_model(dtype=torch.bfloat16), tmp_path / "out", output.shutil.rmtree

    def second(path: Path) -> None:
        monkeypatch.setattr(output.shutil, "rmtree", own)
        run(source, "w8a8", out, resume=True)
        own(path)

    monkeypatch.setattr(output.shutil, "rmtree", second)
    run(source, "w8a8", out)
    assert out.is_dir() and not (out / ".run").exists()


def test_a_run_killed_when_its_directory_has_its_name(
    make_model: MakeModel, tmp_path: Path, monkeypatch
) -> None:  # type: ignore[no-untyped-def]
    source, out = make_model(dtype=torch.bfloat16), tmp_path / "out"

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(output.shutil, "rmtree", kill)
        run(source, "w8a8", out)
    assert (out / ".run").exists()
    assert run(source, "w8a8", out, resume=True) == out and not (out / ".run").exists()


@pytest.mark.parametrize(
    ("calibrated", "more", "says"),
    [
        (True, 1, True),
        (True, 0, False),
        (False, 1, False),  # weights that are rounded one by one are summed over no threads
    ],
)
def test_a_run_resumed_with_other_threads_says_so(
    calibrated: bool,
    more: int,
    says: bool,
    make_model: MakeModel,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    source, out, own = make_model(), tmp_path / "out", torch.get_num_threads()
    make = _calibrated if calibrated else partial(run, scheme="w8a8")
    with pytest.raises(Killed):
        make(source, out=out, progress=kill_at(2))
    assert "threads" not in caplog.text
    torch.set_num_threads(own + more)
    try:
        make(source, out=out, resume=True)
    finally:
        torch.set_num_threads(own)
    said = f"the run began with {own} threads (OMP_NUM_THREADS) and continues with {own + more}: "
    assert (said in caplog.text) == says


def test_another_job_does_not_resume(make_model: MakeModel, tmp_path: Path) -> None:
    source, other = make_model(name="a"), make_model(name="b", seed=1)

    with pytest.raises(Killed):
        run(source, "w4a16", tmp_path / "out", progress=kill)
    with pytest.raises(QtoolError, match="another recipe"):
        run(source, "w8a8", tmp_path / "out", resume=True)
    with pytest.raises(QtoolError, match="another source model"):
        run(other, "w4a16", tmp_path / "out", resume=True)


def test_another_kind_of_device_does_not_resume(make_model: MakeModel, tmp_path: Path) -> None:
    """It computes in other dtypes and orders."""
    source = make_model()

    with pytest.raises(Killed):
        _calibrated(source, tmp_path / "calibrated", progress=kill)
    with pytest.raises(QtoolError, match=r"started with another device .*cpu.*, now .*cuda"):
        _calibrated(source, tmp_path / "calibrated", resume=True, device="cuda:0")


@pytest.mark.cuda
@pytest.mark.parametrize("scheme", ["w8a8", "w4a16", "w4a8-lqq", "w4a8-qoq", "w4a4-mix"])
def test_rounding_to_nearest_gives_the_same_bytes_on_a_gpu(
    make_model: MakeModel, tmp_path: Path, scheme: str
) -> None:
    source = make_model(dtype=torch.bfloat16)
    cpu, gpu = (
        files(run(source, scheme, tmp_path / device, device=device)) for device in ("cpu", "cuda")
    )
    tensors = [name for name in cpu if name.endswith(".safetensors")]
    assert tensors and all(cpu[name] == gpu[name] for name in tensors)


def test_sigkill_at_any_moment(make_model: MakeModel, tmp_path: Path) -> None:
    source = make_model(num_hidden_layers=4, dtype=torch.bfloat16)
    whole = files(run(source, "w4a8-lqq", tmp_path / "whole"))
    out = tmp_path / "cut"

    def resume() -> None:
        run(source, "w4a8-lqq", out, resume=True)

    for delay in (0.02, 0.05, 0.1, 0.15, 0.2):
        process = forks.start(resume, tmp_path / "printed")
        time.sleep(delay)
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
    resume()
    assert files(out) == whole


@pytest.mark.parametrize("resume", [True, False])
def test_two_runs_on_one_directory(resume: bool, make_model: MakeModel, tmp_path: Path) -> None:
    source, out = make_model(), tmp_path / "out"
    refusals = []

    def second(*_: object) -> None:
        if not refusals:
            with pytest.raises(QtoolError, match="another run") as caught:
                run(source, "w4a8-lqq", out, resume=resume)
            refusals.append(caught)

    run(source, "w4a8-lqq", out, progress=second)
    assert refusals


@pytest.mark.parametrize(
    ("iteration", "sequences", "expected"),
    [(8, 2, [8, 8, 4]), (8, 10, [16, 4]), (1, 10, [10, 10]), (3, 2, [3] * 6 + [2])],
)
def test_batches_hold_whole_iterations(iteration: int, sequences: int, expected: list[int]) -> None:
    tokens, rounding = torch.arange(320).view(20, 16), SimpleNamespace(iteration=iteration)
    run = SimpleNamespace(device=torch.device("cpu"), job=SimpleNamespace(rounding=rounding))
    batches = Shards._batches(run, tokens.split(sequences))  # type: ignore[arg-type]
    assert [len(batch) for batch in batches] == expected
    assert torch.equal(torch.cat(list(batches)), tokens)
