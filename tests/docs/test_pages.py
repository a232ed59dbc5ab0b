"""README and docs as texts: links, anchors, length, and what a reader should not meet."""

import importlib
import pkgutil
import re
from inspect import isfunction
from pathlib import Path
from typing import Any

import pytest
import torch

import qtool
from qtool import api, calibration, layouts, schemes
from tests.docs.pages import FENCE, PAGES, ROOT, name_of

LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
TABLE = re.compile(r"<!-- table (\S+) -->\n(.*?)<!-- /table -->", re.DOTALL)
#: history and placeholders
UNWANTED = re.compile(r"\bissue #?\d|\basked\b|\bso far\b|\bTODO\b|QUICKSTART")


def anchors(page: Path) -> set[str]:
    """The anchors that a page's headings make."""
    headings = HEADING.findall(FENCE.sub("", page.read_text()))
    plain = (re.sub(r"[^\w\s-]", "", heading.lower()) for heading in headings)
    return {re.sub(r"[\s]+", "-", heading.strip()) for heading in plain}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    """mkdocs checks the pages under docs/ too, but not README, CONTRIBUTING and CHANGELOG."""
    for link in LINK.findall(FENCE.sub("", page.read_text())):
        target, _, anchor = link.partition("#")
        if target.startswith(("http:", "https:")):
            continue
        file = (page.parent / target).resolve() if target else page
        assert file.exists(), link
        assert not anchor or anchor in anchors(file), link


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_files_that_are_named_exist(page: Path) -> None:
    text = FENCE.sub("", page.read_text())
    for name in re.findall(r"`((?:qtool|tests|benchmarks|docs|examples)/[\w./-]+)`", text):
        assert (ROOT / name).exists() or re.search("FLOOR|NAME", name), name


def test_the_reference_has_every_layout() -> None:
    assert all(layout in members_shown("layouts.md") for layout in layouts._ALL)


def test_the_reference_has_every_scheme() -> None:
    assert set(schemes.SCHEMES.values()) <= set(members_shown("schemes.md"))


def test_the_reference_has_every_method() -> None:
    page = (ROOT / "docs" / "reference" / "methods.md").read_text()
    methods = {**calibration.TRANSFORMS, **calibration.ROUNDINGS}
    own = {name for name, method in methods.items() if method.__module__.startswith("qtool.")}
    assert set(re.findall(r"^### `(.+)`$", page, re.MULTILINE)) == own


def members_shown(page: str) -> list[Any]:
    """The members that ``page`` of the reference lists below its modules."""
    text = (ROOT / "docs" / "reference" / page).read_text()
    blocks = re.findall(r"^::: (\S+)\n    options: {members: \[(.+?)\]", text, re.MULTILINE)
    return [
        getattr(importlib.import_module(module), name)
        for module, names in blocks
        for name in names.split(", ")
    ]


def test_the_reference_has_every_public_name() -> None:
    page = (ROOT / "docs" / "reference" / "api.md").read_text()
    shown = re.findall(r"^::: (\S+)", page, re.MULTILINE)
    for name in qtool.__all__:
        module = getattr(qtool, name).__module__
        assert module in shown or any(entry.endswith(f".{name}") for entry in shown), name


def test_the_reference_says_which_functions_qtool_itself_lacks() -> None:
    page = (ROOT / "docs" / "reference" / "api.md").read_text()
    named = re.findall(r"`(\w+)`", page[: page.index("can also be had")])
    functions = {name for name, one in vars(api).items() if isfunction(one) and name[0] != "_"}
    of_api = {name for name in functions if getattr(api, name).__module__ == api.__name__}
    assert set(named) == of_api - set(qtool.__all__)


def test_the_reference_has_what_a_protocol_declares() -> None:
    """Attributes are described by comments, which griffe alone does not read."""
    griffe = pytest.importorskip("griffe")
    extensions = griffe.load_extensions(str(ROOT / "docs" / "comments.py"))
    package = griffe.load("qtool", extensions=extensions, search_paths=[str(ROOT)])
    for protocol in (
        "schemes.base.Scheme",
        "layouts.base.Layout",
        "calibration.method.Transform",
        "exchange.export_format.ExportFormat",
    ):
        declared = [
            member
            for member in package[protocol].all_members.values()
            if member.is_attribute and member.annotation and "property" not in member.labels
        ]
        assert len(declared) > 5
        assert [member.path for member in declared if not member.docstring] == []


def test_ops_that_are_named_exist() -> None:
    from qtool.kernels import attention

    for module in pkgutil.iter_modules(attention.__path__):  # they register the ops
        importlib.import_module(f"{attention.__name__}.{module.name}")
    importlib.import_module("qtool.kernels.compiled")

    text = "".join(page.read_text() for page in PAGES)
    names = set(re.findall(r"`qtool::(\w+)`", text))
    assert len(names) > 5 and all(hasattr(torch.ops.qtool, name) for name in names)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_a_page_says_what_is_so(page: Path) -> None:
    assert not UNWANTED.search(page.read_text())


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_tables_are_filled(page: Path) -> None:
    """``benchmarks/tables.py --check`` compares them with the stored results."""
    for name, text in TABLE.findall(page.read_text()):
        assert text.strip(), f"{name}: run python benchmarks/tables.py"


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 110
