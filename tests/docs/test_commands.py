"""Every command and Python block of README and docs runs, on a model of one tiny block.

What needs vLLM, a GPU or the network is parsed as far as that: options, choices and names of files
must exist. One command after substitution runs once, however many pages show it.
"""

import json
import os
import re
import tomllib
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import click
import pytest
import yaml
from click.testing import CliRunner

import qtool
from qtool import recipes
from qtool.calibration import ROUNDINGS
from qtool.cli import cli
from qtool.exchange.export_formats import EXPORT_FORMATS
from qtool.format import CheckpointFormat
from qtool.layouts import LAYOUTS
from tests.docs.pages import PAGES, ROOT, Command, blocks, commands, name_of

#: what a page's model is here; names of native checkpoints end in -lqq or are DIR and OUT
MODELS = ("demo", "MODEL", "meta-llama/Llama-3.1-8B", "./Llama-3.1-8B")
NATIVE = ("demo-lqq", "llama-lqq", "./llama-lqq", "DIR", "OUT")
#: small values of options
TINY = {"--samples": "2", "--seqlen": "16", "--calib": "demo", "--device": "cpu"}
#: why a command is only parsed here
ONLY_PARSED = {
    ("verify", "--engine"): "vLLM runs on a GPU; tests/serving has it without one",
    ("eval", "--engine"): "vLLM runs on a GPU",
    ("bench", "serve"): "vLLM runs on a GPU",
    ("bench", "gemm"): "times kernels on a GPU",
    ("bench", "kv"): "times kernels on a GPU",
    ("bench", "quantize"): "makes a checkpoint of a large shape; tests/pipeline runs a tiny one",
}
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
COMMANDS = list(commands())
QTOOL = [c for c in COMMANDS if c.words[0] == "qtool" or "-m qtool " in c.text]
OTHERS = [c for c in COMMANDS if c not in QTOOL]
_done: set[tuple[str, ...]] = set()


def test_pages_show_commands() -> None:
    assert len(QTOOL) > 20 and len(OTHERS) > 10


@pytest.mark.parametrize("command", QTOOL, ids=str)
def test_command_of_qtool(command: Command, tiny: SimpleNamespace, tmp_path: Path) -> None:
    arguments = command.words[command.words.index("qtool") + 1 :]
    parsed = any(set(key) <= set(arguments) for key in ONLY_PARSED)
    if not command.whole or parsed:
        require_parsed(arguments)
        return
    arguments = tiny_arguments(arguments, tiny)
    if (key := tuple(sorted(arguments))) not in _done:
        _done.add(key)
        filled = [a.replace("{tmp}", str(tmp_path)) for a in arguments]
        result = CliRunner().invoke(cli, filled)
        assert result.exit_code == 0, (filled, result.output, result.exception)


def require_parsed(arguments: list[str]) -> None:
    """Let click parse ``arguments``, of which required ones may be missing."""
    group: click.Command = cli
    context = click.Context(cli)
    while isinstance(group, click.Group) and arguments:
        found = group.get_command(context, arguments[0])
        assert found is not None, f"qtool has no command {arguments[0]!r}"
        group, arguments = found, arguments[1:]
    named = {option for parameter in group.params for option in parameter.opts}
    assert {word for word in arguments if word.startswith("--")} <= named
    values = {"--device": "cpu", "--as-export": "gptq"}
    words = [values.get(a, b) for a, b in zip(["", *arguments], arguments, strict=False)]
    try:
        if words:
            group.make_context(group.name, words)
    except (click.MissingParameter, click.BadOptionUsage):
        pass  # a sentence leaves out what does not matter there


def tiny_arguments(arguments: list[str], tiny: SimpleNamespace) -> list[str]:
    """The same command on the tiny model; ``{tmp}`` is a directory to write to."""
    name = arguments[0]
    found, before = [], ""
    for word in arguments:
        if before == "--out":
            word = "{tmp}/out"
        elif before in TINY:
            word = TINY[before]
        elif word == "GPTQ-OR-AWQ-MODEL":
            word = str(tiny.gptq)
        elif word in NATIVE:
            word = str(tiny.w4a16 if (name, word) == ("export", "DIR") else tiny.native)
        elif word in MODELS and (name != "eval" or before == "--compare"):
            word = str(tiny.model)
        elif name == "eval" and word in ("wikitext2", "piqa", "arc_easy"):
            word = "demo"
        found.append(word)
        before = word if word.startswith("-") else ""
    if name == "eval":
        found += ["--limit", "2", "--seqlen", "16"]
    if name in ("quantize", "sensitivity"):
        needed = {"--samples": "2", "--seqlen": "16", "--calib": "demo", "--out": "{tmp}/out"}
        found += [w for option in needed if option not in found for w in (option, needed[option])]
    return found


@pytest.mark.parametrize("command", OTHERS, ids=str)
def test_other_command(command: Command) -> None:
    program, *rest = command.words
    if program == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert rest and set(rest) <= set(targets)
    elif program == "pip":
        (wanted,) = rest[2:]
        assert rest[:2] == ["install", "-e"]
        assert set(re.findall(r"[a-z]+", wanted)) <= set(EXTRAS)
    elif program in ("python", "sh", "bash", "torchrun"):
        if rest[0] == "-m":
            assert rest[1] == "sglang.launch_server" or find_spec(rest[1])  # not installed here
            return
        script = next(word for word in rest if (ROOT / word).is_file())
        text = (ROOT / script).read_text()
        after = rest[rest.index(script) + 1 :]
        assert all(word in text for word in after if word.startswith("--"))
    elif program == "vllm":  # runs on a GPU; the plugin's tests load what is served
        assert rest[0] == "serve"
        for option, value in zip(rest[2::2], rest[3::2], strict=True):
            assert option == "--compilation-config" and isinstance(json.loads(value), dict)
    else:
        pytest.fail(f"{command}: no test knows the program {program!r}")


PYTHON = [page for page in PAGES if blocks(page, "python")]


@pytest.mark.parametrize("page", PYTHON, ids=name_of)
def test_python_blocks(
    page: Path, tiny: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The blocks of a page, one after another in one namespace."""
    monkeypatch.chdir(tmp_path)
    code = "\n".join(blocks(page, "python"))
    for name in NATIVE:
        if name not in code or f'out="{name}"' in code or "/" in name:
            continue
        os.symlink(tiny.native, name)
    for name in MODELS:
        code = code.replace(f'quantize("{name}"', f'quantize("{tiny.model}"')
        code = code.replace(f'    "{name}"', f'    "{tiny.model}"')
    code = code.replace('"wikitext2"', '"demo"').replace('device="cuda"', 'device="cpu"')
    code = code.replace(", samples=32", "")
    code = code.replace('recipe="best"', 'recipe="best", samples=2, seqlen=16')
    namespace: dict[str, Any] = {}
    # pages register some, until then
    with patch.dict(ROUNDINGS), patch.dict(EXPORT_FORMATS), patch.dict(LAYOUTS):
        exec(code, namespace)
    assert namespace.get("qtool", qtool) is qtool  # a page may import of it alone


def test_the_recipe_of_the_reference() -> None:
    (text,) = blocks(ROOT / "docs/reference/recipes.md", "yaml")
    recipe = recipes.parse(yaml.safe_load(text), "my-mix")
    assert recipe.scheme == "my-mix"
    assert qtool.plan("demo", recipe=recipe).output_bytes > 0


def test_the_configuration_of_the_reference() -> None:
    (text,) = blocks(ROOT / "docs/reference/native.md", "json")
    assert CheckpointFormat.from_dict(json.loads(text)).scheme == "w4a8-lqq"


def test_the_entry_point_of_extend() -> None:
    from qtool.plugins import GROUP

    (text,) = blocks(ROOT / "docs/extend/index.md", "toml")
    assert GROUP in tomllib.loads(text)["project"]["entry-points"]
