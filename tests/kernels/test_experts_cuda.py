"""The experts' kernels against the CPU references, on a Hopper GPU, to the bit."""

from typing import Any

import pytest
import torch
from torch import Tensor

from qtool.kernels.experts.combine import combine_experts
from qtool.kernels.experts.quantize import quantize_expert_rows
from qtool.kernels.experts.route import route_experts
from qtool.kernels.experts.tiles import TABLE
from tests.kernels.experts_cases import COUNTS, SCHEMES, grouped, poisoned

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 9,
        reason="needs a Hopper GPU (sm_90)",
    ),
]


def on_gpu(given: dict[str, Any]) -> dict[str, Any]:
    return {name: v.cuda() if isinstance(v, Tensor) else v for name, v in given.items()}


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS.keys())
@pytest.mark.parametrize(("scheme", "group"), SCHEMES)
@pytest.mark.parametrize(("n", "k"), [(192, 384), (448, 256)])
def test_equals_the_cpu_reference(
    scheme: str, group: int | None, counts: list[int], n: int, k: int
) -> None:
    op, given = grouped(scheme, group, counts, beyond=3, n=n, k=k)
    there, rows = on_gpu(given), sum(counts)
    for dtype in (torch.int32, torch.bfloat16):
        want = op(**given | {"out_dtype": dtype})
        got = poisoned(op, there | {"out_dtype": dtype}).cpu()
        assert torch.equal(got[:rows], want[:rows])
        assert (got[rows:].contiguous().view(torch.uint8) == 0xA5).all()


@pytest.mark.parametrize("tile", TABLE, ids=str)
@pytest.mark.parametrize("scheme", ["w4a8-lqq", "w8a8"])
def test_every_tile_is_right(scheme: str, tile: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many tiles a block, and fewer than blocks; splits of three and more have one each."""
    group = None if scheme == "w8a8" else 64
    generator = torch.Generator().manual_seed(3)
    few = tile.split > 2
    sizes = [(1, 256)] if few else [(6, 256), (60, 128)]
    for experts, n in sizes:
        counts = torch.randint(0, 200, (experts,), generator=generator).tolist()
        counts = [min(count, tile.tokens) for count in counts] if few else counts
        op, given = grouped(scheme, group, counts, beyond=1, n=n, k=1152)
        module = op_module(op)
        monkeypatch.setattr(module, "choose_experts", lambda *_: tile)
        want = given | {"out_dtype": torch.int32}
        got = poisoned(op, on_gpu(want))
        assert torch.equal(got[: sum(counts)], gpu_reference(scheme, on_gpu(given), counts))


def op_module(op: Any) -> Any:
    import sys

    from qtool.kernels.op import OPERATORS

    return sys.modules[OPERATORS[op].__module__]  # type: ignore[attr-defined]


def gpu_reference(scheme: str, given: dict[str, Any], counts: list[int]) -> Tensor:
    """The dense kernel, expert by expert, bare sums."""
    from qtool.kernels.hopper.w4a8 import w4a8_gemm
    from qtool.kernels.hopper.w8a8 import w8a8_gemm

    parts, first = [], 0
    for expert, count in enumerate(counts):
        own = {
            name: value
            if not isinstance(value, Tensor)
            else value[first : first + count].clone()
            if name in ("x", "sx", "token_sum")
            else value[expert]
            for name, value in given.items()
            if name != "expert_offsets"
        }
        dense: Any = w8a8_gemm if scheme == "w8a8" else w4a8_gemm
        parts.append(dense(**own | {"bias": None, "out_dtype": torch.int32}))
        first += count
    return torch.cat(parts)


@pytest.mark.parametrize("tokens", [0, 1, 5, 64, 1000, 8192])
@pytest.mark.parametrize(("top", "experts"), [(1, 1), (2, 8), (8, 128), (10, 512)])
def test_routes_as_on_the_cpu(tokens: int, top: int, experts: int) -> None:
    ids = torch.randint(-1, experts + 1, (tokens, top), dtype=torch.int32)
    expert_map = torch.where(torch.rand(experts) < 0.5, torch.randperm(experts), -1).int()
    for mapped in (None, expert_map):
        want = route_experts(ids, mapped, experts)
        there = None if mapped is None else mapped.cuda()
        got = route_experts(ids.cuda(), there, experts)
        assert all(torch.equal(a.cpu(), b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("columns", [64, 2048, 4104])
def test_adds_as_on_the_cpu(dtype: torch.dtype, columns: int) -> None:
    z = torch.randn(50, columns).to(dtype)
    for top in (1, 8, 10):
        place = torch.randint(-1, 50, (33, top), dtype=torch.int32)
        given = (z, place, torch.rand(33, top))
        got = combine_experts(*(tensor.cuda() for tensor in given))
        assert torch.equal(got.cpu(), combine_experts(*given))


def test_quantizes_as_on_the_cpu() -> None:
    x = torch.randn(40, 768).bfloat16()
    offsets, place = route_experts(torch.randint(-1, 7, (40, 3), dtype=torch.int32), None, 7)
    for fusion, rows, end in (("none", place, int(offsets[-1])), ("silu-up", None, 33)):
        offsets[-1] = end
        given = (x, rows, offsets)
        want = quantize_expert_rows(*given, fusion)
        got = quantize_expert_rows(*(None if t is None else t.cuda() for t in given), fusion)
        if fusion == "none":
            assert all(torch.equal(a[:end].cpu(), b[:end]) for a, b in zip(got, want, strict=True))
        else:  # another exponential
            assert (got[0][:end].cpu().int() - want[0][:end].int()).abs().max() <= 1


@pytest.mark.parametrize("scheme", ["w4a8-lqq", "w8a8"])
def test_a_graph_follows_the_ids(scheme: str) -> None:
    """Replays with other ids give what calls give, and the same in each run."""
    experts, top, n, k = 16, 4, 256, 256
    group = None if scheme == "w8a8" else 64
    op, given = grouped(scheme, group, [0] * experts, n=n, k=k)
    there = on_gpu(given) | {"out_dtype": torch.bfloat16}
    x, weights = torch.randn(48, k).bfloat16().cuda(), torch.rand(48, top).cuda()
    ids = torch.zeros(48, top, dtype=torch.int32, device="cuda")

    def layer() -> Tensor:
        offsets, place = route_experts(ids, None, experts)
        codes, scale, total = quantize_expert_rows(x, place, offsets, "none")
        more = {} if scheme == "w8a8" else {"token_sum": total}
        z = op(**there | {"x": codes, "sx": scale, "expert_offsets": offsets} | more)
        return combine_experts(z, place, weights)

    layer()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = layer()
    for kind in range(4):
        high = (1, 2, experts, experts)[kind]
        ids.copy_(torch.randint(0, high, ids.shape, dtype=torch.int32))
        if kind == 3:
            ids[::3] = -1
        captured.view(torch.int16).fill_(0x7FC1)
        graph.replay()
        first = captured.clone()
        graph.replay()
        assert torch.equal(first, captured) and torch.equal(first, layer())
