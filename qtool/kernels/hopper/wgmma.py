"""The wgmma wrappers, written out: inline PTX must name each of up to 128 accumulators.

``Wgmma<N>::rs`` multiplies a 64 x 32 u8 fragment in registers, ``Wgmma<N>::ss`` a s8 one in shared
memory, by N x 32 s8 in shared memory, and adds to 64 x N int32 accumulators (PTX ISA,
wgmma.mma_async). ``rs_s8`` takes an s8 fragment in registers; ``rs_f16`` and ``rs_bf16`` take
64 x 16 of 16 bits by N x 16 of the same, and add to float32. ``sparse_f16`` and ``sparse_bf16``
take the kept half of a 2:4 sparse 64 x 32 fragment, its positions, and N x 32
(wgmma.mma_async.sp); ``kSelector`` says which lanes hold the positions. Functions with ``_first``
in their names overwrite the accumulators instead of adding to them.
"""

FRAGMENT = ("const u32* a", '"r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3])', 4)
#: and of a 2:4 sparse one
KEPT = (f"{FRAGMENT[0]}, u32 positions", f'{FRAGMENT[1]}, "r"(positions), "n"(kSelector)', 6)


def _wrapper(
    name: str,
    types: str,
    n: int,
    a_operand: str,
    a_parameter: str,
    a_constraints: str,
    a_count: int,
    accumulate: bool = True,
    sparse: bool = False,
) -> str:
    """CUDA C++ text of one wrapper; ``types`` are those of the accumulators, of A and of B."""
    count, real = n // 2, types.startswith("f32")
    b = count + a_count
    accumulators = ", ".join(f"%{i}" for i in range(count))
    outputs = ", ".join(f'"+{"f" if real else "r"}"(d[{i}])' for i in range(count))
    parameters = f"{'float' if real else 'int'} (&d)[{count}], {a_parameter}, u64 b"
    k = (16 if real else 32) * (2 if sparse else 1)
    instruction = f"wgmma.mma_async{'.sp' if sparse else ''}.sync.aligned.m64n{n}k{k}.{types}"
    set_predicate = f"setp.ne.b32 accumulate, {int(accumulate)}, 0;"
    template = "template <int kSelector> " if sparse else ""
    positions = f"%{b - 2}, %{b - 1}, " if sparse else ""
    signs = ", 1, 1, 0" if real else ""  # of A and B, and B is K-major
    return f"""    {template}static __device__ __forceinline__ void {name}({parameters}) {{
        asm volatile("{{\\n.reg .pred accumulate;\\n{set_predicate}\\n"
            "{instruction} {{{accumulators}}}, {a_operand}, "
            "%{b}, {positions}accumulate{signs};\\n}}"
            : {outputs}
            : {a_constraints}, "l"(b));
    }}
"""


def wgmma_source(n: int) -> str:
    """CUDA C++ text of ``Wgmma<n>``."""
    c = n // 2
    registers = f"{{%{c}, %{c + 1}, %{c + 2}, %{c + 3}}}"
    wrappers = [
        _wrapper("rs", "s32.u8.s8", n, registers, *FRAGMENT),
        _wrapper("ss", "s32.s8.s8", n, f"%{c}", "u64 a", '"l"(a)', 1),
    ]
    for name, types in (("s8", "s32.s8.s8"), ("f16", "f32.f16.f16"), ("bf16", "f32.bf16.bf16")):
        for suffix, adds in (("", True), ("_first", False)):
            wrappers.append(_wrapper(f"rs_{name}{suffix}", types, n, registers, *FRAGMENT, adds))
            if name != "s8":
                kept = (f"sparse_{name}{suffix}", types, n, registers, *KEPT, adds, True)
                wrappers.append(_wrapper(*kept))
    return f"template <>\nstruct Wgmma<{n}> {{\n{''.join(wrappers)}}};\n"
