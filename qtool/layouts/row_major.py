"""row-major: the reference layout. Two codes a byte along K, the even column in the low nibble.

Examples:
    >>> import torch
    >>> byte, nibble = ROW_MAJOR.address(torch.tensor(1), torch.tensor(5), (2, 8))
    >>> int(byte), int(nibble)
    (6, 1)
"""

from qtool.layouts.digit_layout import DigitLayout

ROW_MAJOR = DigitLayout(name="row-major", n="n", k="kt half:2", order="n, kt", nibble="half")
#: one code a byte, for 8-bit weights
ROW_MAJOR_8 = DigitLayout(name="row-major-8", n="n", k="k", order="n, k")
#: the layout that takes any shape, by the bits of a code
BY_BITS = {4: ROW_MAJOR, 8: ROW_MAJOR_8}
