"""The experts' kernels against the CPU references, on a Hopper GPU, to the bit."""

from typing import Any

import pytest
import torch
from torch import Tensor

from qtool.kernels.experts.combine import combine_experts
from qtool.kernels.experts.gather import gather_expert_rows
from qtool.kernels.experts.quantize import quantize_expert_rows
from qtool.kernels.experts.route import route_experts
from qtool.kernels.experts.tiles import TABLE, TABLE_HALF, TABLE_HALF_SUMS
from qtool.kernels.hopper.tiles import Tile
from tests.conftest import on_hopper
from tests.kernels.experts_cases import COUNTS, SCHEMES, by_experts, exact, grouped, poisoned

pytestmark = [pytest.mark.cuda, on_hopper]


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
    for dtype in (exact(scheme), torch.bfloat16):
        want = op(**given | {"out_dtype": dtype})
        got = poisoned(op, there | {"out_dtype": dtype}).cpu()
        assert torch.equal(got[:rows], want[:rows])
        assert (got[rows:].contiguous().view(torch.uint8) == 0xA5).all()


#: scheme, group and scales' dtype, and every tile
TILES = [
    *(("w4a8-lqq", 64, torch.float32, tile) for tile in TABLE),
    *(("w8a8", None, torch.float32, tile) for tile in TABLE),
    *(("w4a16", 128, torch.bfloat16, tile) for tile in TABLE_HALF),
    *(("w4a16", 32, torch.float32, tile) for tile in TABLE_HALF_SUMS),
]


@pytest.mark.parametrize(("scheme", "group", "scale", "tile"), TILES, ids=str)
def test_every_tile_is_right(
    scheme: str,
    group: int | None,
    scale: torch.dtype,
    tile: Tile,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Many tiles a block, and fewer than blocks; splits of three and more have one each."""
    generator = torch.Generator().manual_seed(3)
    few = tile.split > 2
    sizes = [(1, 256)] if few else [(6, 256), (60, 128)]
    for experts, n in sizes:
        counts = torch.randint(0, 200, (experts,), generator=generator).tolist()
        counts = [min(count, tile.tokens) for count in counts] if few else counts
        op, given = grouped(scheme, group, counts, beyond=1, n=n, k=1152, scale=scale)
        chooses = "choose" if scheme == "w4a16" else "choose_experts"
        monkeypatch.setattr(op_module(op), chooses, lambda *_: tile)
        there = on_gpu(given | {"out_dtype": exact(scheme)})
        got = poisoned(op, there)
        assert torch.equal(got[: sum(counts)], by_experts(scheme, there, counts))


def op_module(op: Any) -> Any:
    import sys

    from qtool.kernels.op import OPERATORS

    return sys.modules[OPERATORS[op].__module__]  # type: ignore[attr-defined]


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


@pytest.mark.parametrize("rotated", [False, True])
def test_quantizes_as_on_the_cpu(rotated: bool) -> None:
    x = torch.randn(40, 768).bfloat16()
    offsets, place = route_experts(torch.randint(-1, 7, (40, 3), dtype=torch.int32), None, 7)
    for fusion, rows, end in (("none", place, int(offsets[-1])), ("silu-up", None, 33)):
        offsets[-1] = end
        given, how = (x, rows, offsets), (fusion, rotated)
        want = quantize_expert_rows(*given, *how)
        got = quantize_expert_rows(*(None if t is None else t.cuda() for t in given), *how)
        if fusion == "none":
            assert all(torch.equal(a[:end].cpu(), b[:end]) for a, b in zip(got, want, strict=True))
        else:  # another exponential
            assert (got[0][:end].cpu().int() - want[0][:end].int()).abs().max() <= 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("columns", "rotated"),
    [(64, False), (1032, False), (4096, False), (64, True), (1088, True), (4096, True)],
)
def test_gathers_as_on_the_cpu(dtype: torch.dtype, columns: int, rotated: bool) -> None:
    """And leaves the rows as they are that no expert has."""
    offsets, place = route_experts(torch.randint(-1, 7, (40, 3), dtype=torch.int32), None, 7)
    for fusion, rows, end in (("none", place, int(offsets[-1])), ("silu-up", None, 33)):
        x = torch.randn(40, columns * (2 if rows is None else 1)).to(dtype)
        offsets[-1] = end
        given = {"x": x, "place": rows, "expert_offsets": offsets, "fusion": fusion}
        given["rotated"] = rotated
        want, got = gather_expert_rows(**given)[:end], poisoned(gather_expert_rows, on_gpu(given))
        assert (got[end:].contiguous().view(torch.uint8) == 0xA5).all()
        if fusion == "none":
            assert torch.equal(got[:end].cpu(), want)
        else:  # another exponential, in the last place of SiLU and so of the product
            eps = torch.finfo(dtype).eps
            atol = 4 * eps if rotated else 1e-6  # sums of 64 products of other sizes
            assert torch.allclose(got[:end].cpu(), want, rtol=2 * eps, atol=atol)


@pytest.mark.parametrize("scheme", ["w4a8-lqq", "w8a8", "w4a16"])
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
        if scheme == "w4a16":
            rows = {"x": gather_expert_rows(x, place, offsets, "none")}
        else:
            codes, scale, total = quantize_expert_rows(x, place, offsets, "none")
            rows = {"x": codes, "sx": scale, "token_sum": total}
            rows = {name: rows[name] for name in rows.keys() & there.keys()}
        z = op(**there | rows | {"expert_offsets": offsets})
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
