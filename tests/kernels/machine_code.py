"""What the machine code of a kernel and the compiler's report must be; which builds have passed.

To compile all of them takes minutes, and the same compiler makes the same code of the same input.
So ``machine_code.json`` holds a digest of each build's input, and the tests compile what is not in
it, or for another compiler. After a change of the kernels this checks the changed ones and stores
their digests::

    python -m tests.kernels.machine_code
"""

import hashlib
import json
import re
import subprocess
import tempfile
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from qtool.kernels import build
from qtool.kernels.build import Build
from qtool.kernels.compiled import builds

STORED = Path(__file__).with_suffix(".json")
REGISTERS_PER_SM = 65536
BUILDS = list(builds())
#: one of the builds of a source that differ in sizes alone: to disassemble takes longer than to
#: compile
DISASSEMBLED = {
    (case.definition[0], case.arch, case.instructions, case.calls): case for case in BUILDS
}
#: bytes of local memory that the compiler uses all the same, by build and architecture: for a soft
#: cap, where two blocks share a multiprocessor's registers
SPILLED = {
    ("kv_attention kv4 D=128 rows=4 paged capped", arch): 16 for arch in ("sm_100", "sm_120")
}


def check(case: Build, folder: Path) -> None:
    """Compile ``case`` and assert what its machine code must be; ``folder`` is for files."""
    compiled = build.compile_source(*case.definition, case.arch)
    spilled = SPILLED.get((case.name, case.arch), 0)
    assert compiled.local_bytes == spilled, compiled.log
    assert not compiled.serialized, compiled.log
    assert compiled.registers * case.threads <= REGISTERS_PER_SM, compiled.log
    if case not in DISASSEMBLED.values():
        return
    sass = disassemble(compiled.cubin, folder)
    missing = [i for i in case.instructions if i not in sass]
    assert not missing, missing
    local = re.search(r"\b(LDL|STL)\b.*", sass)
    assert spilled or not local, local
    called = re.search(r"\bRET\b.*", sass)  # CALL alone also stands for a jump out of a loop
    assert case.calls or not called, called
    # griddepcontrol: the next kernel may start, but only when all before this one are done
    if "PREEXIT" in sass:
        assert sass.index("ACQBULK") < sass.index("PREEXIT"), "PREEXIT before ACQBULK"


def disassemble(cubin: bytes, folder: Path) -> str:
    """SASS text."""
    import nvidia

    (folder / "k.cubin").write_bytes(cubin)
    tool = next(p for root in nvidia.__path__ for p in Path(root).glob("*/bin/nvdisasm"))
    return subprocess.run(
        [tool, "-c", folder / "k.cubin"], capture_output=True, text=True, check=True
    ).stdout


def compiler() -> str | None:
    """The version of the NVRTC package; None if it comes from elsewhere."""
    try:
        return metadata.version("nvidia-cuda-nvrtc")
    except metadata.PackageNotFoundError:
        return None


def digest(case: Build) -> str:
    """A hash of all that decides what ``case`` is compiled to, but for the compiler, and of what is
    asserted of it.
    """
    source = f"{case.definition[0]}.cu"
    texts = {name: (build.SOURCES / name).read_text() for name in sorted(included(source))}
    given = repr((case, case in DISASSEMBLED.values(), texts, sorted(build.FLAGS.items())))
    return hashlib.sha256(given.encode()).hexdigest()[:16]


def included(name: str) -> set[str]:
    """The sources that ``name`` includes, itself among them."""
    found = {name}
    for other in re.findall(r'#include "(.+)"', (build.SOURCES / name).read_text()):
        found |= included(other)
    return found


def digests() -> dict[str, str]:
    """The digest of each build, by its name and architecture."""
    return {f"{case.name} {case.arch}": digest(case) for case in BUILDS}


@cache
def stored() -> dict[str, Any]:
    """``compiler`` and ``passed``, the digests of the builds that passed with it."""
    return json.loads(STORED.read_text()) if STORED.exists() else {"compiler": "", "passed": {}}


def passed(case: Build) -> bool:
    """Whether ``case`` passed with this compiler."""
    record = stored()
    return record["compiler"] == compiler() and record["passed"].get(
        f"{case.name} {case.arch}"
    ) == digest(case)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for case in BUILDS:
            if not passed(case):
                print(case.name, case.arch)
                check(case, Path(folder))
    STORED.write_text(json.dumps({"compiler": compiler(), "passed": digests()}, indent=1) + "\n")


if __name__ == "__main__":
    main()
