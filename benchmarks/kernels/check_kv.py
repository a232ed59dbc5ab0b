"""Is attention over the packed cache right? Part of ``check.py``; alone: ``python
benchmarks/kernels/check_kv.py``.

The kernel is compared with float64 attention over the dequantized cache, by the relative distance
(Frobenius) of all outputs, minus half a unit in the last place of each. Bytes to which no token was
written are poisoned; equal calls give equal bits; a CUDA graph runs with changing lengths; the
append writes the scheme's bytes and no others.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product

import torch
from alone import captured, main
from torch import Tensor

from qtool.kernels.attention.kv_append import definition as append_definition
from qtool.kernels.attention.kv_append import kv_append
from qtool.kernels.attention.kv_attention import kv_attention
from qtool.kernels.attention.kv_plan import Plan, definition
from qtool.kernels.attention.packed_cache import TOKENS
from qtool.kernels.build import compile_all
from qtool.schemes.kv import KV4, KV8, static_scale

Check = tuple[str, str | None]
DIMS = (16, 64, 80, 96, 112, 128, 192, 256)
#: largest distance of the output from float64, beyond its own rounding: weights are rounded to f16
TOLERANCE = 6e-4
#: additional tolerance for each unit of the scores' root mean square: kv8's queries are rounded to
#: f16 after the keys' scales are multiplied into them
SCORES = {"kv4": 0.0, "kv8": 1e-4}


@dataclass(frozen=True)
class Shape:
    """One call; ``ragged`` sequences differ in length. ``spread`` scales keys and values token by
    token, and kv4's channels then differ in importance.
    """

    kv: str
    batch: int
    heads: int
    group: int
    queries: int
    dim: int
    tokens: int
    dtype: torch.dtype
    ragged: bool = False
    masked: bool = False
    softcap: float = 0.0
    window: int = 0
    spread: bool = False

    @classmethod
    def draw(cls, rng: random.Random) -> "Shape":
        tokens = rng.choice([rng.randint(1, 40), rng.randint(1, 300), rng.randint(1, 2000)])
        return cls(
            rng.choice(["kv4", "kv8"]),
            rng.choice([1, 2, 5, 40]),
            rng.randint(1, 4),
            rng.choice([1, 2, 3, 4, 5, 7, 8, 16, 20]),
            rng.choice([1, 1, 1, 2, 3, 5, 8]),
            rng.choice(DIMS),
            tokens,
            rng.choice([torch.float16, torch.bfloat16]),
            rng.random() < 0.4,
            rng.random() < 0.3,
            rng.choice([0.0, 5.0]),
            rng.choice([0, 0, rng.randint(1, 500)]),
            rng.random() < 0.3,
        )

    def __str__(self) -> str:
        flags = [name for name in ("ragged", "masked", "spread") if getattr(self, name)]
        flags += [
            f"{name}={value}" for name in ("softcap", "window") if (value := getattr(self, name))
        ]
        size = (
            f"B={self.batch} H={self.heads}x{self.group} Tq={self.queries} D={self.dim} "
            f"T={self.tokens}"
        )
        return " ".join([self.kv, size, str(self.dtype).removeprefix("torch."), *flags])


class Case:
    """Random inputs of a shape, the packed cache poisoned where no token is."""

    def __init__(self, shape: Shape, seed: int) -> None:
        generator = torch.Generator("cuda").manual_seed(seed)

        def randn(*size: int) -> Tensor:
            return torch.randn(*size, generator=generator, device="cuda")

        self.shape = shape
        batch, heads, dim, tokens = shape.batch, shape.heads, shape.dim, shape.tokens
        self.capacity = -(-(tokens + int(randn(1).abs() * 40)) // TOKENS) * TOKENS
        self.query = randn(batch, heads * shape.group, shape.queries, dim).to(shape.dtype)
        self.lengths = None
        if shape.ragged:
            self.lengths = torch.randint(
                0, tokens + 1, (batch,), generator=generator, device="cuda", dtype=torch.int32
            )
        self.mask = None
        if shape.masked:
            width = max(1, tokens - int(randn(1).abs() * 5))
            self.mask = randn(batch, shape.queries, width) < 1.0
        self.importance = (
            torch.exp(2 * randn(heads, dim)) if shape.kv == "kv4" and shape.spread else None
        )
        self.x = []
        self.packed = []
        for part in range(2):
            x = randn(batch, heads, tokens, dim) + 2 * (1 - part) * randn(heads, 1, dim)
            if shape.spread:
                x *= torch.exp(2 * randn(batch, heads, tokens, 1))
            self.x.append(x.clamp(-6e4, 6e4).to(shape.dtype))  # float16 holds these values
            self.packed.append(self._pack(self.x[-1]))

    def _pack(self, x: Tensor) -> dict[str, Tensor]:
        kv4 = self.shape.kv == "kv4"
        scale = static_scale(x.float().abs().amax((0, 2)))
        quantizer = KV4(importance=self.importance) if kv4 else KV8(scale)
        room = {}
        for name, tensor in quantizer.quantize(x).items():
            size = (*tensor.shape[:2], self.capacity, tensor.shape[3])
            if tensor.is_floating_point():
                room[name] = torch.full(size, float("nan"), dtype=tensor.dtype, device="cuda")
            else:
                room[name] = torch.randint(0, 100, size, device="cuda").to(tensor.dtype)
            room[name][:, :, : x.shape[2]] = tensor
        return room if isinstance(quantizer, KV4) else room | {"scale": quantizer.scale}

    def run(self) -> Tensor:
        (k, v), shape = self.packed, self.shape
        return kv_attention(
            self.query,
            k["codes"],
            k["scale"],
            k.get("zero"),
            v["codes"],
            v["scale"],
            v.get("zero"),
            shape.tokens,
            self.lengths,
            self.mask,
            shape.dim**-0.5,
            shape.softcap,
            shape.window,
        )

    def reference(self) -> tuple[Tensor, float]:
        """Float64 attention over the dequantized cache, and the root mean square of its scores."""
        shape, tokens = self.shape, self.shape.tokens
        keys, values = (self._dequantize(packed)[:, :, :tokens] for packed in self.packed)
        query = self.query.double().unflatten(1, (shape.heads, -1))
        scores = torch.einsum("bhgqd,bhtd->bhgqt", query, keys) * shape.dim**-0.5
        magnitude = float(scores.square().mean().sqrt())
        if shape.softcap:
            scores = shape.softcap * torch.tanh(scores / shape.softcap)
        ends = (
            torch.full((shape.batch,), tokens, device="cuda")
            if self.lengths is None
            else self.lengths.long()
        )
        token = torch.arange(tokens, device="cuda")
        hidden = torch.ones(shape.batch, shape.queries, tokens, dtype=torch.bool, device="cuda")
        for b in range(shape.batch):
            for q in range(shape.queries):
                position = int(ends[b]) - shape.queries + q
                seen = (token <= position) & (token > position - (shape.window or tokens + 9))
                if self.mask is not None:
                    seen[self.mask.shape[2] :] = False
                    seen[: self.mask.shape[2]] &= self.mask[b, q]
                hidden[b, q] = ~seen
        hidden = hidden[:, None, None]
        weights = torch.softmax(scores.masked_fill(hidden, -1e300), -1).masked_fill(hidden, 0)
        return torch.einsum("bhgqt,bhtd->bhgqd", weights, values).reshape(
            self.query.shape
        ), magnitude

    def _dequantize(self, packed: dict[str, Tensor]) -> Tensor:
        if self.shape.kv == "kv8":
            return packed["codes"].double() * packed["scale"].double()[:, None]
        codes = torch.stack([packed["codes"] & 15, packed["codes"] >> 4], -1).flatten(-2).double()
        return (codes - packed["zero"].double()) * packed["scale"].double()

    def wrong(self) -> str | None:
        found, again, (expected, magnitude) = self.run(), self.run(), self.reference()
        if not torch.equal(found, again):
            return "two runs differ"
        # 0 where 0 is expected
        half_unit = torch.finfo(found.dtype).eps / 2 * torch.exp2(expected.abs().log2().floor())
        beyond = ((found.double() - expected).abs() - half_unit).clamp(min=0)
        error = float(beyond.norm() / expected.norm().clamp(min=1e-30))
        allowed = TOLERANCE + SCORES[self.shape.kv] * magnitude
        if error <= allowed:
            return None
        return f"differs from float64 by {error:.1e}; allowed are {allowed:.1e}"


def _prepare(shapes: list[Shape]) -> None:
    """Compile in parallel the kernels that the checks would compile one by one."""
    major, minor = torch.cuda.get_device_capability()
    sources = []
    for shape in shapes:
        bits = 4 if shape.kv == "kv4" else 8
        plan = Plan.of(bits, shape.dim, shape.group * shape.queries)
        sources.append(definition(plan, shape.dtype, shape.masked, shape.softcap > 0))
        sources.append(append_definition(bits, shape.dim, shape.dtype))
    compile_all(sources, f"sm_{major}{minor}")


def checks(fuzz: int, small: bool) -> Iterator[Check]:
    """The name of each check, and the error or None; ``small`` has a few tiny shapes, for
    compute-sanitizer.
    """
    shapes = {f"kv attention {shape}": shape for shape in (_tiny() if small else _chosen())}
    rng = random.Random(0)
    drawn = [Shape.draw(rng) for _ in range(fuzz)]
    appended = [Shape.draw(rng) for _ in range(2 if small else max(20, fuzz // 5))]
    if not small:
        _prepare([*shapes.values(), *drawn, *appended])
    for name, shape in shapes.items():
        yield name, Case(shape, 0).wrong()
    for kv in () if small else ("kv4", "kv8"):
        yield f"{kv} attention in a graph follows the lengths", _graph(kv)
    for i, shape in enumerate(drawn):
        yield f"fuzz {i} kv attention {shape}", Case(shape, i).wrong()
    for i, shape in enumerate(appended):
        yield f"fuzz {i} kv append {shape}", _append(shape, i)


def _tiny() -> Iterator[Shape]:
    for kv, dim in product(("kv4", "kv8"), (16, 80, 128, 256)):
        yield Shape(
            kv,
            2,
            1,
            4,
            3,
            dim,
            300,
            torch.float16,
            ragged=True,
            masked=dim == 80,
            softcap=5.0 * (dim == 16),
        )


def _chosen() -> Iterator[Shape]:
    make = partial(Shape, queries=1, dtype=torch.bfloat16)
    for kv in ("kv4", "kv8"):
        yield from (make(kv, 2, 2, 4, dim=dim, tokens=200) for dim in range(16, 257, 16))
        yield from (make(kv, 1, 1, 1, dim=64, tokens=n) for n in (1, 2, 31, 32, 33, 127, 128, 129))
        yield Shape(kv, 2, 2, 4, 8, 128, 300, torch.float16, masked=True, softcap=20.0, window=70)
        yield from (make(kv, 40, 4, 4, dim=dim, tokens=300) for dim in (16, 64, 80, 128, 256))
        yield Shape(
            kv, 70, 2, 3, 5, 128, 300, torch.float16, ragged=True, masked=True, softcap=20.0
        )
        yield make(kv, 64, 8, 4, dim=128, tokens=4096)
        yield make(kv, 1, 8, 4, dim=128, tokens=131072)


def _graph(kv: str) -> str | None:
    case = Case(Shape(kv, 3, 2, 4, 1, 128, 700, torch.float16, ragged=True), 7)
    assert case.lengths is not None
    graph, found = captured(case.run)
    for lengths in ([700, 1, 30], [3, 650, 129]):
        case.lengths.copy_(torch.tensor(lengths))
        graph.replay()
        if not torch.equal(found, case.run()):
            return f"the replayed graph differs at lengths {lengths}"
    return None


def _append(shape: Shape, seed: int) -> str | None:
    """Append a tensor chunk by chunk: the bytes equal those of the whole, with poison after it."""
    case, rng = Case(shape, seed), random.Random(seed)
    for x, packed in zip(case.x, case.packed, strict=True):
        written = {
            n: torch.full_like(t, 77)
            for n, t in packed.items()
            if n in ("codes", "zero") or shape.kv == "kv4"
        }
        channel = packed["scale"] if shape.kv == "kv8" else case.importance
        at = 0
        while at < shape.tokens:
            new = min(rng.choice([1, 1, 7, 64, 1000]), shape.tokens - at)
            part, at = x[:, :, at : at + new], at + new
            part = (
                part.transpose(1, 2).contiguous().transpose(1, 2)
                if rng.random() < 0.5
                else part.clone()
            )
            part = part.float() if rng.random() < 0.3 else part
            kv_append(
                part, written["codes"], written.get("scale"), written.get("zero"), channel, at, None
            )
        for n, t in written.items():
            if not torch.equal(t[:, :, : shape.tokens], packed[n][:, :, : shape.tokens]):
                different = (t != packed[n])[:, :, : shape.tokens].float().mean()
                return f"{n}: {different:.1%} differs from the scheme's"
            if not (t[:, :, shape.tokens :] == 77).all():
                return f"{n}: wrote beyond the tokens"
    return None


if __name__ == "__main__":
    main(checks)
