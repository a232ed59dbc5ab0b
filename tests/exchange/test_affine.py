"""The three affine forms of foreign formats: their group sizes, and equal weights."""

import pytest
import torch

from qtool.exchange import export_formats
from qtool.exchange.formats.affine import (
    ASYMMETRIC_4,
    INT_8,
    SYMMETRIC_4,
    asymmetric_4,
    int_8,
    symmetric_4,
)
from qtool.format import LinearFormat
from qtool.schemes import SCHEMES

#: scheme -> the forms that hold its codes
FORMS = {
    "w8a8": (INT_8,),
    "w4a16": (SYMMETRIC_4, ASYMMETRIC_4),
    "w4a16-24": (SYMMETRIC_4, ASYMMETRIC_4),
    "w4a4": (SYMMETRIC_4, ASYMMETRIC_4),
    "w4ax-fmpq": (),  # its recipes gather inputs, in groups: no other loader does
    "w4a8-qoq": (ASYMMETRIC_4,),
    "w4a8-qoq-g128": (ASYMMETRIC_4, INT_8),
    "w4a8-lqq": (INT_8,),
}
MAKE = ((SYMMETRIC_4, symmetric_4), (ASYMMETRIC_4, asymmetric_4), (INT_8, int_8))
CASES = [
    (name, size)
    for name, kind in SCHEMES.items()
    for size in kind.group_sizes
    if size is None or size <= 128  # loaders know no larger groups
]


def test_the_forms_of_every_scheme_are_listed() -> None:
    assert FORMS.keys() == SCHEMES.keys()


@pytest.mark.parametrize(("scheme", "size"), CASES)
def test_a_form_takes_every_group_size_and_keeps_the_weight(scheme: str, size: int | None) -> None:
    found = LinearFormat(scheme, size, "row-major", "float32")
    kind = found.scheme_object
    weight = torch.randn(16, 256, generator=torch.Generator().manual_seed(0))
    params = kind.fit(weight)
    codes = kind.quantize(weight, params)
    for sizes, make in MAKE:
        assert (size in sizes.get(scheme, ())) == (sizes in FORMS[scheme])
        if sizes in FORMS[scheme]:
            held = make(found, codes, params).weight()
            torch.testing.assert_close(held, kind.dequantize(codes, params), rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("scheme", "size", "formats"),
    [
        ("w4a16-24", 64, {"gptq", "awq", "compressed-tensors"}),
        ("w4a4", 32, {"gptq", "awq", "compressed-tensors-w4a16"}),
        ("w4a8-qoq-g128", 64, {"awq", "compressed-tensors-w8a8"}),
        ("w4a8-qoq-g128", 32, {"awq", "compressed-tensors-w8a8"}),
    ],
)
def test_an_export_takes_what_its_form_takes(scheme: str, size: int, formats: set[str]) -> None:
    assert all(size in export_formats.get(name).expressible[scheme] for name in formats)
