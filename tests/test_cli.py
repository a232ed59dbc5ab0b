"""What the commands say: help, notes, results, progress and JSON."""

import io
import json
import math
import os
import re
import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from qtool import api, progress
from qtool.cli import cli, main
from qtool.distributed import watch
from qtool.errors import CheckFailed, QtoolError, expand_home, require_names
from qtool.exchange.import_formats import IMPORT_FORMATS
from qtool.io.integrity import CHANGED
from qtool.io.model_directory import DEMO
from qtool.io.run_record import record_path
from qtool.table import render
from tests.conftest import MakeModel


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli, [str(argument) for argument in arguments])


@pytest.fixture
def native(make_model: MakeModel, tmp_path: Path) -> Path:
    out = tmp_path / "native"
    assert run("quantize", make_model(), "--scheme", "w4a16", "--out", out, "-q").exit_code == 0
    return out


@pytest.mark.parametrize("group", [[], ["bench"]])
def test_no_summary_is_cut(group: list[str]) -> None:
    listed = run(*group, "-h").stdout.partition("Commands:")[2].splitlines()[1:]
    assert len(listed) > 4 and not any(line.endswith("...") for line in listed)


def test_help_names_what_a_command_has() -> None:
    assert "--resume" not in run("plan", "-h").stdout
    assert "Default: wikitext2" in " ".join(run("quantize", "-h").stdout.split())
    assert "_QTOOL_COMPLETE=bash_source qtool" in run("-h").stdout
    summary, *rest = run("import", "-h").stdout.split("\n\n")[1:]
    text = " ".join(" ".join(rest).lower().split()).replace("- ", "-")
    assert all(name in text.replace("autoround", "auto-round") for name in IMPORT_FORMATS)
    assert not any(name in summary.lower() for name in ("gptq", "awq"))  # all of them or none


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("qtool quantize demo --scheme w4a8-q", {"w4a8-qoq", "w4a8-qoq-g128"}),
        ("qtool quantize demo --recipe pa", {"paper", "pa"}),
        ("qtool export q --format gptq", {"gptq", "gptq-v2"}),
        ("qtool plan demo --kv kv4", {"kv4", "kv4-channel"}),
    ],
)
def test_a_shell_completes_names(
    words: str, expected: set[str], monkeypatch: pytest.MonkeyPatch, capsys
) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setenv("_QTOOL_COMPLETE", "bash_complete")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(len(words.split()) - 1))
    with pytest.raises(SystemExit):
        cli.main(prog_name="qtool")
    assert {line.partition(",")[2] for line in capsys.readouterr().out.split()} == expected


@pytest.mark.parametrize(
    "given",
    [
        "--calib nofile.txt, --samples 3, --seqlen 99",
        "--windows continued, --seed 5, --data-dir d, --activations disk",
    ],
)
def test_what_is_not_used_is_said(given: str, make_model: MakeModel, tmp_path: Path) -> None:
    asked = ["--recipe", "fast", "--keep-unknown", *given.replace(",", "").split()]
    done = run("quantize", make_model(), "--scheme", "w8a8", "--out", tmp_path / "out", *asked)
    assert done.exit_code == 0
    said = f"recipe w8a8/fast looks at no activations: {given} not used"
    assert [line for line in done.stderr.splitlines() if "not used" in line] == [said]


def test_windows_above_the_context_are_said(tmp_path: Path) -> None:
    asked = ["--recipe", "paper", "--samples", 1, "--seqlen", 4096, "--windows", "given"]
    done = run("quantize", "demo", "--scheme", "w8a8", "--out", tmp_path / "out", *asked)
    assert done.exit_code == 0, done.output
    assert done.stderr.count("calibration windows have 512 tokens, not 4096") == 1


def test_a_run_ends_with_two_lines(make_model: MakeModel, tmp_path: Path) -> None:
    source, out = make_model(), tmp_path / "out"
    done = run("quantize", source, "--scheme", "w4a16", "--out", out)
    first, second = done.stdout.splitlines()
    assert re.fullmatch(
        rf"{out}: \d+ kB, \d\.\d\d times smaller than \d\.\d\d MB, in [\d.]+ s; "
        r"largest relative error of a weight 0\.\d{4} \(model\.layers\.[01]\.\S+\)",
        first,
    )
    assert second == f"next: qtool verify {out}"  # without a tokenizer nothing can be evaluated
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, source)
    done = run("quantize", source, "--scheme", "w4a16", "--out", tmp_path / "b")
    evaluated = f"next: qtool eval wikitext2 --model {tmp_path / 'b'} --compare {source}"
    assert done.stdout.splitlines()[1] == evaluated
    assert run("export", out, "--format", "gptq").exit_code == 0
    back = run("import", f"{out}-gptq", "--out", tmp_path / "back")
    first, second = back.stdout.splitlines()
    assert first.startswith(f"{tmp_path / 'back'}: ") and second.startswith("next: qtool verify ")


def test_quiet_says_the_result_alone(make_model: MakeModel, native: Path, tmp_path: Path) -> None:
    asked = ("quantize", make_model(name="m"), "--scheme", "w8a8", "--out")
    assert "shard 1/4" in run(*asked, tmp_path / "a").stderr
    quiet = run(*asked, tmp_path / "b", "-q", "--calib", "x.txt", "--recipe", "fast")
    assert quiet.stderr == "" and len(quiet.stdout.splitlines()) == 2
    assert run("verify", native, "-q").stderr == ""
    assert "linear 14/14" in run("verify", native).stderr


def test_verbose_lists_every_linear(native: Path) -> None:
    for command in (("verify", native), ("export", native, "--format", "gptq")):
        listed = run(*command, "-v").stdout
        assert listed.count("model.layers.") >= 14


def test_verify_says_so_if_the_cache_alone_is_quantized(
    make_model: MakeModel, tmp_path: Path
) -> None:
    recipe = tmp_path / "kv.yaml"
    recipe.write_text("{scheme: kv, layers: [{match: .*, scheme: null}], rounding: rtn, kv: kv4}")
    native = tmp_path / "native"
    assert run("quantize", make_model(), "--recipe", recipe, "--out", native).exit_code == 0
    assert run("verify", native).stdout.startswith("no linear is packed; ")


def test_json_of_every_command_that_makes_something(
    make_model: MakeModel, native: Path, tmp_path: Path
) -> None:
    checks = json.loads(run("verify", native, "--json").stdout)
    assert checks["failed"] == 0 and len(checks["checks"]) == 14
    exported = json.loads(run("export", native, "--format", "gptq", "--json").stdout)
    assert len(exported["errors"]) == 14 and exported["format"] == "gptq"
    made = json.loads(
        run(
            "quantize", make_model(name="m"), "--scheme", "w8a8", "--out", tmp_path / "o", "--json"
        ).stdout
    )
    assert made["ratio"] > 1 and len(made["errors"]) == 14
    schemes = {row["scheme"]: row for row in json.loads(run("schemes", "--json").stdout)}
    assert "w8a8" in schemes
    for scheme, row in schemes.items():
        listed = {(scheme, d["recipe"], d["what"], d["effect"]) for d in row["departures"]}
        assert listed == {entry for entry in api.departures() if entry[0] == scheme}
    assert schemes["w4a8-lqq"]["departures"][0]["recipe"] == "paper"


def strict(text: str) -> Any:
    """What ``text`` says as JSON; NaN and Infinity are none."""

    def refuse(token: str) -> None:
        raise ValueError(token)

    return json.loads(text, parse_constant=refuse)


def test_json_of_numbers_that_are_not_finite_is_json(
    native: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qtool.pipeline.verify.relative_distance", lambda *given: math.nan)
    checks = strict(run("verify", native, "--json").stdout)
    assert checks["failed"] == 14 and {row["error"] for row in checks["checks"]} == {None}
    monkeypatch.setattr("qtool.exchange.export.weight_errors", lambda *given: {"up": math.inf})
    exported = strict(run("export", native, "--format", "gptq", "--json").stdout)
    assert exported["errors"] == {"up": None}


def test_a_failed_check_is_in_the_json_and_in_the_exit_code(native: Path) -> None:
    shard = next(native.glob("model-00002*"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    done = run("verify", native, "--json")
    assert done.exception is not None and json.loads(done.stdout)["failed"] >= 1


@pytest.mark.parametrize("content", [None, b"1234"])
def test_a_shard_that_cannot_be_read_is_in_the_json(native: Path, content: bytes | None) -> None:
    shard = next(native.glob("model-00002*"))
    shard.unlink()
    if content is not None:
        shard.write_bytes(content)
    done = run("verify", native, "--json")
    found = json.loads(done.stdout)
    problem = CHANGED if content else "the file is missing"
    assert [(row["name"], row["problem"]) for row in found["checks"]] == [(shard.name, problem)]
    assert found["failed"] == 1 and isinstance(done.exception, CheckFailed)
    (native / "qtool.json").unlink()
    unknown = run("verify", native, "--json")
    assert unknown.stdout == "" and shard.name in str(unknown.exception)
    assert not isinstance(unknown.exception, CheckFailed)


def test_tasks_with_commas_and_spaces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a,b.txt").write_text("text")
    asked = ("piqa, arc_easy", "demo", "a,b.txt", Path("c,d.txt"))
    names = ["piqa", "arc_easy", "demo", "a,b.txt", "c,d.txt"]
    assert require_names("tasks", asked) == names
    assert require_names("choices", "w4a16,w4a16:32,") == ["w4a16", "w4a16:32"]
    assert "no task: name one, or list them with" in str(run("eval", ",").exception)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert require_names("tasks", "~/a,b.txt") == ["~/a,b.txt"]


@pytest.mark.parametrize(
    ("command", "option"),
    [
        ("quantize demo", "--calib"),
        ("quantize demo", "--adapter"),
        ("sensitivity demo --budget-bits 5 --out a.yaml", "--choices"),
        ("eval demo", "--model"),
        ("eval demo", "--compare"),
        ("report demo", "--compare"),
        ("report demo", "--tasks"),
    ],
)
def test_one_of_two_values_is_not_dropped(command: str, option: str) -> None:
    """Of an option that is given twice click takes the last value."""
    done = run(*command.split(), option, "one", option, "two")
    assert done.exit_code == 2 and "one and two are given; one is expected" in done.stderr


def test_a_name_that_only_looks_like_a_home_directory(tmp_path: Path) -> None:
    nobody = "~nobody-of-that-name"
    assert expand_home(f"{nobody}/m") == Path(f"{nobody}/m")
    for arguments in (("inspect", nobody), ("eval", f"{nobody}/a.txt"), ("plan", f"{nobody}/m")):
        assert isinstance(run(*arguments).exception, QtoolError)


@pytest.mark.usefixtures("few_tasks")
def test_tasks_are_listed_and_suggested() -> None:
    listed = run("eval", "--list").stdout.split()
    assert listed[:4] == ["wikitext2", "c4", "pile", "demo"]
    assert json.loads(run("eval", "--list", "--json").stdout) == listed
    assert {"piqa", "arc_easy", "demo_choice"} <= set(listed)
    for word, meant in {"pica": "piqa", "arc-easy": "arc_easy", "hellaswga": "hellaswag"}.items():
        assert f"did you mean {meant}?" in str(run("eval", word).exception)


@pytest.mark.parametrize("command", ["verify", "inspect", "report"])
def test_a_plain_model_where_a_quantized_one_belongs(command: str) -> None:
    assert "make a quantized one first" in str(run(command, "demo").exception)


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["quantize", "demo", "--scheme", "w8a8"], "--resume continues"),
        (["eval", "demo"], "with --save each finished task is kept"),
        (["verify", "demo"], "interrupted\n"),
    ],
)
def test_ctrl_c_speaks_of_the_command_that_ran(
    command: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:  # type: ignore[no-untyped-def]
    def stopped(*args: object, **options: object) -> None:
        raise KeyboardInterrupt

    for name in ("quantize", "evaluate", "verify"):
        monkeypatch.setattr(f"qtool.api.{name}", stopped)
    monkeypatch.setattr(sys, "argv", ["qtool", *command])
    with pytest.raises(SystemExit) as stop:
        main()
    written = capsys.readouterr().err
    assert stop.value.code == 130 and said in written
    assert ("--resume" in written) == (command[0] == "quantize")


#: the command line, SIGINT while the module ``where`` is imported, and what an importer makes of it
AT_AN_IMPORT = """
import signal, sys
class Importer:
    def find_spec(self, name, *_):
        if name == where:
            try:
                signal.raise_signal(signal.SIGINT)
            except KeyboardInterrupt:
                raise made
where, made = sys.argv[1], eval(sys.argv[2])
sys.meta_path.insert(0, Importer())
sys.argv = ["qtool", "plan", "demo", "--scheme", "w4a16"]
from qtool.__main__ import main
main()
"""


@pytest.mark.parametrize("made", ["KeyboardInterrupt", "ModuleNotFoundError('PreTrainedModel')"])
@pytest.mark.parametrize(
    "where", ["ctypes", "qtool.cli", "click", "qtool.api", "torch", "transformers"]
)
def test_ctrl_c_ends_an_import_with_one_line(where: str, made: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", AT_AN_IMPORT, where, made], capture_output=True, text=True
    )
    assert done.returncode == 130 and done.stdout == ""
    assert done.stderr.strip() == "qtool: interrupted"


def test_threads_soon_sleep_while_they_wait_unless_the_environment_says_otherwise() -> None:
    """Those that spin keep the threads that they wait for from the cores, beside other work."""
    for name, chosen, shown in (
        ("GOMP_SPINCOUNT", "", "1000"),
        ("GOMP_SPINCOUNT", "7", "7"),
        ("OMP_WAIT_POLICY", "ACTIVE", "ACTIVE"),
    ):
        ours = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
        environment = {key: value for key, value in os.environ.items() if key not in ours}
        done = subprocess.run(
            [sys.executable, "-m", "qtool", "plan", "demo", "--scheme", "w8a8"],
            env=environment | {"OMP_DISPLAY_ENV": "verbose"} | ({name: chosen} if chosen else {}),
            capture_output=True,
            text=True,
        )
        assert not done.returncode
        if "GOMP_SPINCOUNT" in done.stderr:  # GNU's OpenMP
            assert re.search(rf"{name} *= *'{shown}'", done.stderr)


def test_closed_streams_are_no_mistake() -> None:
    shell = '"$0" -m qtool schemes <&- >&- 2>&-'
    assert subprocess.run(["sh", "-c", shell, sys.executable]).returncode == 0


def test_a_working_directory_that_was_removed_is_called_so(tmp_path: Path) -> None:
    ended = subprocess.run(
        ["sh", "-c", 'rmdir "$PWD" && exec "$0" -m qtool schemes', sys.executable],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(DEMO.parents[1])},
        capture_output=True,
        text=True,
    )
    said = "qtool: the working directory is gone: change to another one\n"
    assert (ended.returncode, ended.stderr) == (2, said)


def test_a_python_without_docstrings_is_refused() -> None:
    """transformers would end with an error that blames the model."""
    command = [sys.executable, "-OO", "-m", "qtool", "plan", "demo"]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 2 and ended.stderr.startswith("qtool: Python runs with -OO")


#: the command line in a process that goes on, and whether a bar of tqdm would then be shown
AFTER_A_COMMAND = """
import sys
from qtool.__main__ import main
from qtool.distributed import watch
watch.leave = lambda code: None
sys.argv = ["qtool", "schemes"]
main()
from tqdm import tqdm
print(tqdm(range(2)).disable)
"""


def test_other_libraries_draw_no_bars_in_a_log() -> None:
    done = subprocess.run(
        [sys.executable, "-c", AFTER_A_COMMAND], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "True" and done.stderr == ""


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_bar_names_the_work_and_is_gone_before_the_result(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with progress.Display("verify", "linear") as shown:
        shown(1, 2, {})
        shown(2, 2, {})
    drawn = terminal.getvalue()
    assert "verify" in drawn and "0/2" in drawn
    assert drawn.endswith("\r") and drawn.split("\r")[-2].strip() == ""  # wiped out


def test_a_log_has_few_lines_and_silence_none(capsys) -> None:  # type: ignore[no-untyped-def]
    with progress.Display("verify", "linear", lines=10) as shown:
        for done in range(1, 1001):
            shown(done, 1000, {})
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 10 and lines[-1].startswith("linear 1000/1000, ")
    progress.silence(True)
    with progress.Display("verify", "linear") as shown:
        shown(1, 1, {})
    progress.silence(False)
    assert capsys.readouterr().err == ""


def test_work_goes_on_without_its_lines_if_the_logs_disk_is_full() -> None:
    program = """
import sys
from qtool.progress import Display
with Display("quantize", "shard") as shown:
    for done in range(1, 4):
        shown(done, 3, {})
print("made")
"""
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-c", program]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=full, text=True)
    assert done.stdout == "made\n"


def test_units_that_end_at_once_say_nothing_of_the_time_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = iter([0.0, 10.0, 10.01, 10.02, 14.0, 18.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(now))
    with progress.Display("quantize", "shard") as shown:
        for done in range(1, 6):
            shown(done, 8, {})
    lines = capsys.readouterr().err.splitlines()
    assert [line.removeprefix("shard ") for line in lines] == [
        *("1/8, 10 s", "2/8, 10 s", "3/8, 10 s", "4/8, 14 s, 16 s left", "5/8, 18 s, 12 s left")
    ]


def test_the_lines_of_a_run_count_its_seconds(
    make_model: MakeModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As the summary does: from the start of the run, with those of the attempts before."""
    source, out = make_model(), tmp_path / "out"

    def stop(_: object) -> str:
        raise KeyboardInterrupt

    for facts in (stop, None):
        with progress.Display("quantize", "shard", facts) as shown:
            shown.restart(1000.0)  # torch was imported meanwhile
            with pytest.raises(KeyboardInterrupt) if facts else nullcontext():
                done = api.quantize(source, "w4a16", out=out, resume=facts is None, progress=shown)
        if facts:
            record = record_path(out)
            counted = json.loads(record.read_text())
            counted["attempts"][0]["seconds"] += 500
            record.write_text(json.dumps(counted))
    lines = re.findall("^shard ./., ([0-9]+) s", capsys.readouterr().err, re.MULTILINE)
    assert lines and all(500 <= int(seconds) <= done.seconds + 1 < 1000 for seconds in lines)


def test_a_bar_counts_from_where_the_lines_do(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with progress.Display("quantize", "shard") as shown:
        shown.restart(500.0)
        shown(1, 2, {})
        shown.bar.refresh()
    assert "[08:20<" in terminal.getvalue()


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        ({"RANK": "1"}, True),
        ({"RANK": "1", "WORLD_SIZE": "2"}, False),
        ({"RANK": "²", "WORLD_SIZE": "2"}, True),  # no rank
    ],
)
def test_only_the_first_of_several_ranks_speaks(
    ranks: dict[str, str], said: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in ranks.items():
        monkeypatch.setenv(name, value)
    assert watch.is_first_rank() is said


@pytest.mark.parametrize("command", sorted(cli.commands))
def test_only_quantize_runs_in_several_ranks(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A world size alone, as in a pod of a cluster, is of no launcher."""
    refusal = f"{command} runs in one process, and torchrun or another launcher started 2"
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert refusal not in str(run(command).exception)
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert (refusal in str(run(command).exception)) == (command != "quantize")


ROWS = [("model.layers.0.mlp.down_proj" * 8, "[red]x[/red]", "1.5"), ("short", "y", "12.25")]


def test_a_table_in_a_pipe_is_plain_and_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    lines = render(("name", "kind", "bits"), ROWS).splitlines()
    assert len(lines) == 4 and set(lines[1]) == {"-"}
    assert lines[2].split() == list(ROWS[0]) and "\x1b" not in "".join(lines)
    assert lines[2].endswith("  1.5") and lines[3].endswith(" 12.25")  # numbers to the right


def test_a_name_of_wide_characters_is_not_cut() -> None:
    lines = render(("task", "value"), [("困惑度" * 9 + ".txt", "6.25")]).splitlines()
    assert len(lines) == 3 and lines[2].split() == ["困惑度" * 9 + ".txt", "6.25"]


def test_a_table_on_a_terminal_has_its_width_and_colour_unless_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "stdout", Terminal())
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    coloured = render(("name", "kind", "bits"), ROWS)
    assert "\x1b[" in coloured and "…" not in coloured
    monkeypatch.setenv("NO_COLOR", "1")
    plain = re.sub(r"\x1b\[[01]m", "", render(("name", "kind", "bits"), ROWS))  # bold is no colour
    assert "\x1b" not in plain and max(map(len, plain.splitlines())) <= 60


def test_a_path_that_is_no_utf_8_is_printed_as_it_is(native: Path) -> None:
    named = native.rename(native.with_name(os.fsdecode(b"mod\xe9le")))
    command = [sys.executable, "-m", "qtool", "report", os.fsencode(named), "-q"]
    strict = os.environ | {"PYTHONIOENCODING": "utf-8:strict"}
    done = subprocess.run(command, capture_output=True, env=strict)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout == os.fsencode(named / "report.html") + b"\n"


def test_a_closed_pipe_is_no_failed_check() -> None:
    """Its code is that of a process that SIGPIPE ended."""
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "qtool", "schemes"]
    assert subprocess.run(command, stdout=write).returncode == 141
    os.close(write)
