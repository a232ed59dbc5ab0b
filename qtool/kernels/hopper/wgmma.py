"""The wgmma wrappers, written out: inline PTX must name each of up to 128 accumulators.

``Wgmma<N>::rs`` multiplies a 64 x 32 u8 fragment in registers, ``Wgmma<N>::ss`` a s8 one in shared
memory, by N x 32 s8 in shared memory, and adds to 64 x N int32 accumulators (PTX ISA,
wgmma.mma_async). ``rs_s8`` takes an s8 fragment in registers, and ``rs_s8_first`` overwrites the
accumulators instead.
"""


def _wrapper(
    name: str,
    a_type: str,
    n: int,
    a_operand: str,
    a_parameter: str,
    a_constraints: str,
    a_count: int,
    accumulate: bool = True,
) -> str:
    count = n // 2
    accumulators = ", ".join(f"%{i}" for i in range(count))
    outputs = ", ".join(f'"+r"(d[{i}])' for i in range(count))
    parameters = f"int (&d)[{count}], {a_parameter}, u64 b"
    instruction = f"wgmma.mma_async.sync.aligned.m64n{n}k32.s32.{a_type}.s8"
    set_predicate = f"setp.ne.b32 accumulate, {int(accumulate)}, 0;"
    return f"""    static __device__ __forceinline__ void {name}({parameters}) {{
        asm volatile("{{\\n.reg .pred accumulate;\\n{set_predicate}\\n"
            "{instruction} {{{accumulators}}}, {a_operand}, "
            "%{count + a_count}, accumulate;\\n}}"
            : {outputs}
            : {a_constraints}, "l"(b));
    }}
"""


def wgmma_source(n: int) -> str:
    """CUDA C++ text of ``Wgmma<n>``."""
    c = n // 2
    registers = f"{{%{c}, %{c + 1}, %{c + 2}, %{c + 3}}}"
    fragment = (n, registers, "const u32* a", '"r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3])', 4)
    rs = _wrapper("rs", "u8", *fragment)
    signed = _wrapper("rs_s8", "s8", *fragment) + _wrapper(
        "rs_s8_first", "s8", *fragment, accumulate=False
    )
    ss = _wrapper("ss", "s8", n, f"%{c}", "u64 a", '"l"(a)', 1)
    return f"template <>\nstruct Wgmma<{n}> {{\n{rs}{signed}{ss}}};\n"
