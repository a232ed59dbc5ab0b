"""Rounds linears of a float model in memory, each for the input that the float model gives it.

GPTQ (:func:`qtool.calibration.rounding.gptq.gptq.solve`) has H alone here: no linear makes up for
what others lost, so that each can be tried beside any others.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from qtool.calibration.forwards import AllSeen
from qtool.calibration.rounding.gptq.gptq import GptqOptions, Problem, solve
from qtool.calibration.rounding.gptq.hessian import Hessian
from qtool.calibration.rounding.gptq.memory import hessians_at_once, problems_at_once
from qtool.calibration.rounding.rounded import Rounded, arranged
from qtool.calibration.rounding.rtn import round_to_nearest
from qtool.calibration.stacking import in_turn
from qtool.calibration.statistics import LEAST_TOKENS
from qtool.format import LinearFormat
from qtool.models.auto import running, text_model
from qtool.schemes.arithmetic.online_hadamard import rotate

#: a linear, by its full name in the model, and a format for it
Trial = tuple[str, LinearFormat]
#: the first linear that reads an input, and how the input is rotated and quantized for it
Input = tuple[str, bool, object]


@torch.no_grad()
def rounded(
    model: PreTrainedModel,
    readers: Sequence[Sequence[str]],
    formats: Mapping[str, Collection[LinearFormat]],
    windows: Sequence[Tensor],
    options: GptqOptions | None,
) -> dict[Trial, Rounded]:
    """Each linear in each of its formats; codes and parameters are in host memory.

    Args:
        readers: full names of linears; those of one list read the same input.
        formats: the formats of each linear.
        windows: tokens ``[B, S]``. GPTQ looks at the inputs that they give; a linear that sees less
            than :data:`~qtool.calibration.statistics.LEAST_TOKENS` of them is rounded to nearest.
        options: those of GPTQ; None: all linears are rounded to nearest.
    """
    found: dict[Trial, Rounded] = {}
    widest = max(linear(model, names[0]).in_features for names in readers)
    for some in in_turn(readers, hessians_at_once(widest)):
        inputs: dict[Trial, Input] = {
            (name, of): (names[0], of.rotated, of.scheme_object.input_quantizer or of)
            for names in some
            for name in names
            for of in formats[name]
        }
        hessians = moments(model, inputs, windows) if options else {}
        found |= solved(model, inputs, hessians, options or GptqOptions())
    return found


def solved(
    model: PreTrainedModel,
    inputs: Mapping[Trial, Input],
    hessians: Mapping[Input, Hessian],
    options: GptqOptions,
) -> dict[Trial, Rounded]:
    """Each trial rounded by GPTQ with H of its input; to nearest if that is not there."""
    found: dict[Trial, Rounded] = {}
    alike: dict[tuple[object, torch.Size], list[Trial]] = {}
    for trial, seen in inputs.items():
        scheme, shape = trial[1].scheme_object, linear(model, trial[0]).weight.shape
        if seen in hessians:
            alike.setdefault((scheme.kind, shape), []).append(trial)
        else:
            found[trial] = moved(round_to_nearest(scheme, weight_of(model, trial)), "cpu")
    for (_, shape), trials in alike.items():
        for some in in_turn(trials, problems_at_once(*shape)):
            weights = [weight_of(model, trial).float() for trial in some]
            problems = [
                Problem(trial[1].scheme_object, weight, hessians[inputs[trial]])
                for trial, weight in zip(some, weights, strict=True)
            ]
            for trial, solution in zip(some, solve(problems, options), strict=True):
                found[trial] = moved(Rounded(solution.codes, solution.params), "cpu")
    return found


def moments(
    model: PreTrainedModel, inputs: Mapping[Trial, Input], windows: Sequence[Tensor]
) -> dict[Input, Hessian]:
    """H of each input, rotated and quantized as the linear sees it, if it has enough tokens."""
    hessians: dict[Input, Hessian] = {}
    left: set[Input] = set()  # inputs that a forward has not reached

    def look(seen: Input, add: Callable[..., None], *given: Any) -> None:
        add(*given)
        left.discard(seen)
        if not left:
            raise AllSeen

    with ExitStack() as hooks:
        for trial, seen in inputs.items():
            if seen not in hessians:
                weight = weight_of(model, trial)
                hessians[seen] = Hessian(weight.shape[1], weight.device)
                hook = partial(look, seen, adder(hessians[seen], trial[1], weight))
                hooks.enter_context(linear(model, seen[0]).register_forward_pre_hook(hook))
        for ids in windows:
            left |= hessians.keys()
            with running(), suppress(AllSeen):
                text_model(model)(ids.to(model.device), use_cache=False)
    complete = {seen: hessian.complete() for seen, hessian in hessians.items()}
    return {seen: found for seen, found in complete.items() if found.tokens >= LEAST_TOKENS}


def adder(hessian: Hessian, linear_format: LinearFormat, weight: Tensor) -> Callable[..., None]:
    """A forward pre-hook that adds a linear's inputs to ``hessian``."""
    scheme = linear_format.scheme_object
    params = scheme.fit(weight)

    def add(_: nn.Module, given: tuple[Tensor, ...]) -> None:
        x = arranged(given[0].flatten(0, -2), None, linear_format.rotated)
        hessian.add(scheme.fake_activation(x, params))

    return add


def weight_of(model: PreTrainedModel, trial: Trial) -> Tensor:
    """The weight ``[N, K]`` of a linear, with its columns rotated if the inputs are."""
    name, linear_format = trial
    weight = linear(model, name).weight
    return rotate(weight) if linear_format.rotated else weight


def linear(model: PreTrainedModel, name: str) -> nn.Linear:
    """The linear of this full name."""
    found = model.get_submodule(name)
    assert isinstance(found, nn.Linear)
    return found


def moved(one: Rounded, device: torch.device | str) -> Rounded:
    """``one`` with its tensors on ``device``."""
    params = {name: tensor.to(device) for name, tensor in one.params.items()}
    return Rounded(one.codes.to(device), params)
