"""How Triton kernels round float32 to the nearest integer, half to even: ``(x + MAGIC) - MAGIC``.

A float32 of that size has no fraction bits, so the sum is rounded, for ``|x| < 2**22``.
"""

from importlib.util import find_spec

if find_spec("triton"):
    import triton.language as tl

    #: 1.5 * 2**23
    MAGIC = tl.constexpr(12582912.0)
