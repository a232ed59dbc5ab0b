"""How the input of an expert's last linear depends on its first ones."""

from typing import Any

import torch
from torch import nn

from qtool.models.derived.facts import Facts, Kind, in_order
from qtool.models.derived.recorder import Recorder
from qtool.models.experts import Form, gated


def gate_facts(stacked: Any) -> tuple[Kind | None, Kind | None]:
    """How the input of down depends on up, and on gate if any; None: on no single channel."""
    recorder, has_gate = Recorder(nn.Module()), Form.of(stacked).gate
    up, gate = (torch.empty(2, 8, device="meta") for _ in range(2))
    recorder.produce("up", up)
    recorder.produce("gate", gate)
    with torch.no_grad(), recorder:
        out = gated(stacked, gate if has_gate else None, up)
    facts = recorder.of(out)
    expected = {"up", "gate"} if has_gate else {"up"}
    if facts.keys() != expected or recorder.trace.escapes:
        return None, None
    return _kind(facts, "up"), _kind(facts, "gate")


def _kind(facts: Facts, name: str) -> Kind | None:
    fact = facts.get(name)
    if fact is None or fact.channels is None:
        return None
    return fact.kind if in_order(fact) else Kind.MIXED
