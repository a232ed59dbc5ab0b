"""Every script under ``benchmarks`` runs once, at a tiny size, as far as it goes without a GPU.

A script that needs a GPU, or a package that is not here, says so in one sentence. A new script
without an entry in :data:`SCRIPTS` fails :func:`test_every_script_has_an_entry`.
"""

import contextlib
import hashlib
import io
import json
import math
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import qtool
from qtool.cli import cli
from qtool.io.model_directory import DEMO
from tests.conftest import copy_tokenizer, save_model

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
Places = SimpleNamespace


class Case:
    """One run of a script.

    Args:
        arguments: with ``{tmp}`` and ``{name}`` for each of :func:`places`.
        says: patterns; its output has each.
        code: the exit code.
        before: makes files in the folder that it runs in. check: looks at them afterwards.
    """

    def __init__(
        self,
        arguments: str = "",
        *says: str,
        code: int = 0,
        before: Callable[[Path], object] | None = None,
        check: Callable[[Path], object] | None = None,
    ) -> None:
        self.arguments, self.says, self.code = arguments, says, code
        self.before, self.check = before, check


def gpu(arguments: str = "") -> Case:
    """A script that does nothing without a GPU."""
    return Case(arguments, r"^\S+: a CUDA device is needed$", code=1)


def package(name: str, arguments: str = "") -> Case:
    """A script that does nothing without a package that is not installed here."""
    return Case(arguments, rf"{name} is not installed", code=1)


def refused_peers(tmp: Path) -> None:
    """An environment for a peer that pip refused, and a row that was measured."""
    (tmp / "venvs" / "gptqmodel").mkdir(parents=True)
    (tmp / "venvs" / "gptqmodel" / "refused.txt").write_text("no network")
    work = tmp / "work" / hashlib.sha256(b"").hexdigest()[:8]
    work.mkdir(parents=True)
    for row, kl in (("qtool-w8a8-best", 0.1), ("quark-w8a8", 0.2)):
        found = {"perplexity": 2.0, "window_kl": [kl, 2 * kl], "seconds": 1, "megabytes_peak": 1}
        found |= {"tasks": {"piqa": (0.5, 0.01)}} | ({"bits": 8.02} if "qtool" in row else {})
        (work / f"{row}.json").write_text(json.dumps(found))


def made(folder: str) -> Callable[[Path], object]:
    """A check that there is something in ``folder``."""

    def check(tmp: Path) -> None:
        assert list((tmp / folder).iterdir())

    return check


def loads(folder: str) -> Callable[[Path], object]:
    """A check that the model in ``folder`` can be loaded."""
    return lambda tmp: qtool.load(tmp / folder)


def books(tmp: Path) -> None:
    for name in ("train", "valid"):
        (tmp / f"{name}.txt").write_text((DEMO / "heldout.txt").read_text())


def random_tokens(tmp: Path) -> None:
    """What tokenize_corpus.py writes, of the demo's vocabulary."""
    for name in ("train", "valid"):
        torch.randint(4096, (5000,), dtype=torch.int16).numpy().tofile(tmp / f"{name}.bin")
    (tmp / "tokenizer").mkdir()
    copy_tokenizer(tmp / "tokenizer")


def two_evaluations(tmp: Path) -> None:
    """Two windows' scores in our runtime and in vLLM, 0.0001 nats apart."""
    for kind, perplexity in (("ours", 2.7183), ("vllm-two", 2.71855)):
        task = {
            "metrics": {"perplexity": {"value": perplexity}},
            "details": {"window_nll": [math.log(perplexity), 2.0 + math.log(perplexity)]},
            "engine": kind.partition("-")[0],
        }
        (tmp / f"w8a8-{kind}.json").write_text(json.dumps({"tasks": [task]}))


def speed(tmp: Path) -> None:
    found = json.loads((tmp / "speed.json").read_text())
    assert found["same"] == {"graphs": True, "dynamic up to": "3 of 3"}
    assert set(found["step B=1"]) == {"graphs", "dynamic, eager"} and "B=1" in found["bf16"]


TINY = "--shape llama-tiny --layers 1 --samples 1 --seqlen 16"
SCRIPTS: dict[str, Case] = {
    "accuracy/families.py": Case("smollm3 gpt_oss --steps plan fast", r"^2 of 2 passed$"),
    "accuracy/outliers.py": Case("{model} {tmp}/out --first-token 1", check=loads("out")),
    "accuracy/peer_run.py": Case(
        "full --samples 1 --seqlen 16 --limit 1 --tasks demo_choice --items 2 --work {tmp}",
        check=lambda tmp: json.loads((tmp / "full.json").read_text())["tasks"]["demo_choice"],
    ),
    "accuracy/peers.py": Case(
        "--venvs {tmp}/venvs --work {tmp}/work --rows gptqmodel-w4a16,qtool-w8a8-best,quark-w8a8 "
        "--jobs 2",
        r"\| GPTQModel.* \| does not install: no network",
        r"\| Quark.* 8\.020 / 8 .* 0\.30000 ± 0\.10000 \| \+100 ± 33 % \| 50\.0 ± 1\.0 \| 1 ",
        before=refused_peers,
    ),
    "accuracy/rare_experts.py": Case(
        "{mixture} {text} {text} --least 4,16 --samples 4 --seqlen 8 --seeds 1 --json {tmp}/out",
        "^0 16 ",
        check=lambda tmp: json.loads((tmp / "out").read_text())["rows"],
    ),
    "accuracy/sampled.py": Case(
        "demo --schemes w8a8 --recipes fast --windows 2 --calibration 1 --length 4",
        r"\| w8a8 \| fast \| none \|",
    ),
    "accuracy/schemes.py": Case(
        "--schemes w4a8-qoq --recipes best --hadamard --outputs-alike --windows given "
        "--samples 1 --seqlen 16 --limit 1 --work {tmp}/work",
        r"\| w4a8-qoq \| best \|",
    ),
    "accuracy/standin.py": gpu("{tmp}/out"),
    "accuracy/tied.py": Case("{tied} --schemes w4a16 --windows 2 --length 16", r"\| w4a16 \| "),
    "accuracy/train.py": Case(
        "tiny {tmp}/out --tokens {tmp} --minutes 0 --windows 2 --no-compile --device cpu",
        r"^\{'command'.* 'steps': 1,",
        before=random_tokens,
        check=loads("out"),
    ),
    "accuracy/trained_families.py": Case(
        "--tokens {tmp} --work {tmp}/work --families qwen3 --schemes w8a8 --minutes 0 --windows 2 "
        "--samples 1 --seqlen 16 --limit 1 --device cpu",
        r"^`qwen3` 5\.\d \S+ \S+ / \S+ \(",
        before=random_tokens,
    ),
    "accuracy/windows.py": Case(
        "{model} --calib demo --schemes w4a16 --recipe fast --samples 1 --windows given "
        "--length 16 --limit 1",
        r"\| model \| `w4a16` \| demo \| given \| 1 \|",
    ),
    "accuracy/with_outliers.py": Case(
        "{model} --first-token 1 --schemes w8a8 --recipes fast --samples 1 --limit 1 --length 4",
        r"^without outliers: KL -?\d\.\de-",
        r"\| `w8a8` \| fast \|",
    ),
    "demo/sample.py": Case(
        "--model {model} --windows 1 --tokens 4 --at-once 2 --seed 0 --out {tmp}/text "
        "--record {tmp}/record",
        "1 windows kept",
    ),
    "demo/tokenize_corpus.py": Case(
        "--train {tmp}/train.txt --valid {tmp}/valid.txt --out {tmp}/out",
        "valid: .* tokens",
        before=books,
    ),
    "demo/train.py": gpu("--tokens {tmp} --out {tmp}/out"),
    "kernels/alone.py": Case(),
    "kernels/bench.py": gpu(),
    "kernels/bench_experts.py": gpu(),
    "kernels/bench_kv.py": gpu(),
    "kernels/bench_kv_paged.py": gpu(),
    "kernels/chance.py": Case("{native} --draws 1 --limit 2", r"draw 1: .* by chance"),
    "kernels/check.py": gpu(),
    "kernels/check_kv.py": gpu(),
    "kernels/check_mma.py": gpu(),
    "kernels/check_w4a16.py": gpu(),
    "kernels/check_w4a4.py": gpu(),
    "kernels/end_to_end.py": gpu(),
    "kernels/eval_cost.py": Case("{native} --tokens 4 --batch 1 --runs 1", r"\d s plain"),
    "kernels/sweep.py": gpu(),
    "kernels/sweep_experts.py": gpu(),
    "kernels/sweep_half.py": gpu(),
    "layouts/pack.py": Case("--shape 128 128 --repeat 1", "^marlin-24 .*-$", "^apex4 "),
    "pictures.py": Case("--out {tmp}/images", check=made("images")),
    "quantize/detail.py": Case(
        "{tmp}/out --device cpu " + TINY.replace("layers 1", "layers 2"),
        "^1 ranks, 2 blocks: ",
        *(
            f"   {name} "
            for name in (
                r"gptq\.sweep",
                r"Factor\.__init__",
                r"Gptq\.moments",
                r"Hessian\.complete",
                r"clip\.search",
            )
        ),
    ),
    "quantize/distill.py": Case(
        "{tmp}/out --tools qtool auto-round --epochs 1 " + TINY.replace("samples 1", "samples 16"),
        "^auto-round failed, see .*ModuleNotFoundError",
        r"^qtool .*\d$",
    ),
    "quantize/experts.py": Case("--shape 2x64x128 --together 1,2", "1 together: ", "2 together: "),
    "quantize/mixture.py": Case(
        "--shape 64x64x4x2 --tokens 16", "forward, at once: ", "Hessians of down, by one observer: "
    ),
    "quantize/peers.py": Case(
        "{tmp}/out " + TINY, "^llm-compressor failed, see .*ModuleNotFoundError", r"^qtool .*\d$"
    ),
    "quantize/ranks.py": Case("make {tmp}/out " + TINY, check=made("out/source")),
    "quantize/ranks.sh": Case("1 --device cpu " + TINY, "^== 1 ranks", r'"ranks": 1, "blocks": 1'),
    "quantize/scale.sh": Case("{tmp}/out tiny", "^llama-tiny", '"seconds"'),
    "quantize/spill.py": gpu("{tmp}/out"),
    "quantize/stream.py": Case("{tmp}/out --tiny", '"ratio"'),
    "serving/check_vllm.py": package("vLLM", "{native}"),
    "serving/compare.py": Case(
        "{tmp} {tmp}/table.json --machine there",
        r"^`w8a8` 2 2\.7186 2\.7183 \+9\.2e-05 ± .* vllm $",
        "^RESULT 0 wrong",
        before=two_evaluations,
    ),
    "serving/fusion.py": gpu("kernels"),
    "serving/generate_vllm.py": Case(
        "{native} --prompts 1 --prompt-tokens 4 --tokens 1", "both ours: distance"
    ),
    "serving/memorize.py": Case(
        "{model} {tmp}/out --windows 2 --length 4 --steps 20",
        "^step ",
        check=loads("out"),
    ),
    "serving/on_gpu.sh": Case("check", r"^no archives in \.vllm: see ", code=1),
    "serving/random_packed.py": Case(
        "llama-tiny w4a8-lqq {tmp}/out --layers 1", check=loads("out")
    ),
    "serving/requests_vllm.py": package("vLLM", "{native}"),
    "serving/runtime_speed.py": Case(
        "--tiny --device cpu --batches 1 --out {tmp}/speed.json", "^batch", check=speed
    ),
    "serving/step_profile.py": Case(
        "{native} --batches 1", r"packed GEMMs .* \d", "RESULT 0 of 1 batch sizes measured"
    ),
    "serving/through_gptqmodel.py": package("GPTQModel"),
    "serving/through_llama_cpp.py": package("llama-cpp-python"),
    "serving/through_transformers.py": Case(
        "{native} {exported} --prompts 1 --length 4 --tokens 2",
        r"dequantize=True, torch\.float32: load: ",
    ),
    "serving/through_vllm.py": package("vLLM", "{native} {exported}"),
    "tables.py": Case("--check"),
}
#: what the sentences of :func:`package` name, by the module that is not there
NEEDED = {"vLLM": "vllm", "GPTQModel": "gptqmodel", "llama-cpp-python": "llama_cpp"}


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Places:
    """Models that scripts are run on, each made once."""
    root = tmp_path_factory.mktemp("places")
    model = save_model(root / "model", vocab_size=4096, num_hidden_layers=1)
    mixture = save_model(root / "mixture", "qwen2_moe", vocab_size=4096, num_hidden_layers=1)
    for file in DEMO.glob("*token*"):
        shutil.copy(file, model)
        shutil.copy(file, mixture)
    native, exported = root / "native", root / "exported"
    for arguments in (
        f"quantize {model} --scheme w8a8 --out {native} -q",
        f"export {native} --format compressed-tensors --out {exported} -q",
    ):
        assert CliRunner().invoke(cli, arguments.split()).exit_code == 0
    return Places(
        model=model,
        mixture=mixture,
        text=DEMO / "heldout.txt",
        tied=save_model(root / "tied", "llama-tied", num_hidden_layers=1),
        native=native,
        exported=exported,
    )


def scripts() -> list[str]:
    found = (path for kind in ("*.py", "*.sh") for path in BENCHMARKS.rglob(kind))
    return sorted(path.relative_to(BENCHMARKS).as_posix() for path in found)


def test_every_script_has_an_entry() -> None:
    assert scripts() == sorted(SCRIPTS)


def test_what_shell_scripts_import_is_there() -> None:
    """The Python within them runs only on a GPU."""
    found = [
        line
        for script in BENCHMARKS.rglob("*.sh")
        for line in re.findall(r"^from qtool.* import .*", script.read_text(), re.MULTILINE)
    ]
    assert found
    for line in found:
        exec(line, {})


@pytest.mark.parametrize("name", SCRIPTS)
def test_it_runs(
    name: str, places: Places, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = SCRIPTS[name]
    needed = [module for what, module in NEEDED.items() if any(what in line for line in case.says)]
    if any(find_spec(module) for module in needed):
        pytest.skip(f"{needed[0]} is here")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(subprocess, "run", in_this_process)
    if case.before:
        case.before(tmp_path)
    arguments = shlex.split(case.arguments.format(tmp=tmp_path, **vars(places)))
    if name.endswith(".sh"):
        code, output = run_shell(BENCHMARKS / name, arguments, tmp_path)
    else:
        code, output = run_here(BENCHMARKS / name, arguments)
    assert code == case.code, output
    assert "Traceback" not in output, output
    for pattern in case.says:
        assert re.search(pattern, output, re.M), output
    if case.code:
        assert len(output.strip().splitlines()) == 1, output
    if case.check:
        case.check(tmp_path)


RUN = subprocess.run


def run_apart(command: Sequence[str], **options: Any) -> tuple[int, str]:
    """Exit code and output of ``command`` in a process without a GPU."""
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    environment |= options.pop("env", {})
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    done = RUN(command, env=environment, check=False, **pipes, **options)
    return done.returncode, done.stdout


def run_here(script: Path, arguments: Sequence[str]) -> tuple[int, str]:
    """Exit code and output of a Python script, run in this process."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        code = exit_code(script, arguments)
    return code, output.getvalue()


def exit_code(script: Path, arguments: Sequence[str]) -> int:
    """Run ``script`` as ``python script ...`` does: sys.argv, its folder on sys.path, no modules
    of its neighbours left behind.
    """
    before, argv, path = set(sys.modules), sys.argv, sys.path
    sys.argv, sys.path = [str(script), *arguments], [str(script.parent), *path]
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except Exception:
        traceback.print_exc()
        return 1
    finally:
        sys.argv, sys.path = argv, path
        torch.set_num_threads(threads)
        torch.set_rng_state(state)
        for module in set(sys.modules) - before:
            file = getattr(sys.modules[module], "__file__", None)
            if file and BENCHMARKS in Path(file).parents:
                del sys.modules[module]
    return 0


def in_this_process(command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """``subprocess.run`` for what scripts start: Python's start takes longer than their work."""
    executable, *rest = map(str, command)
    assert executable == sys.executable, command
    output = options.get("stdout")
    log = output if hasattr(output, "write") else io.StringIO()
    with contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
        code = python(rest)
    if code and options.get("check"):
        raise subprocess.CalledProcessError(code, command)
    text = log.getvalue() if isinstance(log, io.StringIO) else ""
    return subprocess.CompletedProcess(command, code, text, "")


def python(arguments: Sequence[str]) -> int:
    """``python ARGUMENTS`` in this process: a script, qtool, or a script that torchrun starts."""
    if arguments[:2] == ["-m", "torch.distributed.run"]:
        script = next(i for i, part in enumerate(arguments) if part.endswith(".py"))
        return python(arguments[script:])
    if arguments[:2] == ["-m", "qtool"]:
        done = CliRunner().invoke(cli, arguments[2:])
        print(done.output, end="")
        return done.exit_code
    script = Path(arguments[0])
    return exit_code(script if script.is_absolute() else ROOT / script, arguments[1:])


#: a Python that writes its arguments to FILE, a line a call
STUB = r"""#!/bin/sh
for part; do printf '%s\0' "$part" >> FILE; done
echo >> FILE
"""


def run_shell(script: Path, arguments: Sequence[str], tmp: Path) -> tuple[int, str]:
    """Exit code and output of a shell script in which ``python3`` only writes down what it is
    asked, and of what it was asked, in this process.
    """
    copied, asked = tmp / "tree" / script.relative_to(ROOT), tmp / "asked"
    stub = tmp / "bin" / "python3"
    copied.parent.mkdir(parents=True)
    stub.parent.mkdir()
    shutil.copy(script, copied)
    stub.write_text(STUB.replace("FILE", str(asked)))
    stub.chmod(0o755)
    own = {name: str(tmp / name.lower()) for name in ("DIR", "OUT", "SITE", "DATA")}
    own |= {"PATH": f"{stub.parent}:{os.environ['PATH']}", "DEVICE": "cpu"}
    code, output = run_apart(["bash", str(copied), *arguments], env=own)
    commands = asked.read_text().splitlines() if asked.exists() else []
    for command in commands:
        parts = command.rstrip("\0").split("\0")
        parts = [part.replace(str(tmp / "tree"), str(ROOT)) for part in parts]
        done = in_this_process([sys.executable, *parts], stdout=(log := io.StringIO()))
        code, output = code or done.returncode, output + log.getvalue()
    return code, output
