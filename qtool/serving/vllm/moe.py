"""Packed experts in vLLM: each expert's tensors as they are stored, in stacks.

vLLM runs the experts of a layer as one opaque operation, and in a captured graph no launch may
depend on the router's choice. If a kernel has a grouped form, the tokens are sorted on the device
and each stack is one launch (:mod:`qtool.runtime.experts`). Otherwise a loop runs the experts: all
tokens of a small batch go through every expert, with a weight of zero if it was not chosen; a large
batch is never captured, and each expert gets its own tokens.
"""

from collections.abc import Iterable, Iterator
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import silu
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase

from qtool.errors import QtoolError
from qtool.format import LinearFormat
from qtool.io.finite import require_finite
from qtool.kernels.experts.route import MOST_EXPERTS
from qtool.runtime.dispatch import Call, Kernel
from qtool.runtime.experts import ExpertStack, grouped_experts
from qtool.runtime.packed_linears import require_computed
from qtool.serving.kernel import Gemm, compile_kernels, serving_kernel
from qtool.serving.partition import Axes, axes, require_shares

#: up to so many tokens every expert of a loop gets all of them; vLLM captures no more by default
CAPTURED = 512
#: the shards of each of the two stacks, in the order of their rows
STACKS = {"w13": ("w1", "w3"), "w2": ("w2",)}


class QtoolExpertsMethod(FusedMoEMethodBase):
    """All routed experts of a layer.

    Args:
        name: vLLM's name of the layer.
        formats: formats of gate and up (``w13``), and of down (``w2``).
        names: names of their linears in the checkpoint, by expert.

    Raises:
        QtoolError: the experts compute something else, or would get LoRA adapters.
    """

    def __init__(
        self,
        name: str,
        layer: RoutedExperts,
        formats: dict[str, LinearFormat],
        names: dict[str, list[str]],
    ) -> None:
        super().__init__(layer.moe_config)
        common = layer.activation == MoEActivation.SILU and not layer.apply_router_weight_on_input
        require_computed(name, self.moe.swiglu_limit, common=common)
        lora = get_current_vllm_config().lora_config
        if lora and (lora.target_modules is None or name.split(".")[-1] in lora.target_modules):
            raise QtoolError(
                f"{name}: packed experts take no LoRA adapter; name the linears that do, such as "
                "--lora-target-modules q_proj k_proj v_proj o_proj"
            )
        self.name, self.formats, self.names = name, formats, names

    def create_weights(
        self,
        layer: RoutedExperts,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra: Any,
    ) -> None:
        inter, ranks = intermediate_size_per_partition, self.moe.tp_size
        self.sizes = {"w13": (2 * inter, hidden_size), "w2": (hidden_size, inter)}
        self.dtype, self.experts = params_dtype, num_experts
        self.loaded: set[tuple[str, int, str]] = set()  # parameter, expert, shard
        self.kernels: dict[str, Kernel] = {}
        self.axes: dict[str, dict[str, Axes]] = {}
        for stack, shards in STACKS.items():
            linear_format, (n, k) = self.formats[stack], self.sizes[stack]
            with torch.device("cpu"):  # where a cut of the input channels is tried
                outputs = tuple(n // len(shards) for _ in shards)
                require_shares(
                    self.name,
                    linear_format,
                    outputs,
                    k,
                    ranks if stack == "w2" else 1,
                    permuted=False,
                )
                stored, found = linear_format.tensors(n, k), axes(linear_format, n, k)
            self.axes[stack] = found
            self.kernels[stack] = serving_kernel(self.name, linear_format, n, k, params_dtype)
            for part, spec in stored.items():
                each = spec.shape if found[part].output is not None else (len(shards), *spec.shape)
                parameter = nn.Parameter(
                    torch.empty(num_experts, *each, dtype=spec.dtype), requires_grad=False
                )
                layer.register_parameter(f"{stack}_{part}", parameter)
                parameter.weight_loader = partial(self.load, layer)  # type: ignore[attr-defined]
        layer.load_weights = partial(self.load_weights, layer)

    def load_weights(
        self, layer: RoutedExperts, weights: Iterable[tuple[str, Tensor]]
    ) -> Iterator[str]:
        """Load ``EXPERT.PROJECTION.TENSOR``.

        vLLM's own loader would take a tensor of three dimensions for the stacked tensors of all
        experts.
        """
        shards = {
            layer.ckpt_gate_proj_name: "w1",
            layer.ckpt_up_proj_name: "w3",
            layer.ckpt_down_proj_name: "w2",
        }
        for name, tensor in weights:
            expert, projection, part = name.split(".")
            shard = shards[projection]
            own = f"{'w2' if shard == 'w2' else 'w13'}_{part}"
            self.load(layer, getattr(layer, own), tensor, own, shard, int(expert))
            yield own

    def load(
        self,
        layer: RoutedExperts,
        param: Tensor,
        loaded_weight: Tensor,
        weight_name: str,
        shard_id: str,
        expert_id: int,
        return_success: bool = False,
    ) -> bool | None:
        """Copy this rank's share of one expert's tensor, if the expert is this rank's."""
        expert = expert_id if layer.expert_map is None else int(layer.expert_map[expert_id])
        if expert < 0:
            return False if return_success else None
        name = weight_name.rpartition(".")[2]
        stack, _, part = name.partition("_")
        axis, target = self.axes[stack][part], param.data[expert]
        shard = STACKS[stack].index(shard_id)
        if axis.output is None:
            target = target[shard]
        else:
            target = target.chunk(len(STACKS[stack]), axis.output)[shard]
        cut = axis.input if stack == "w2" else axis.output  # ranks share w2's inputs, w13's outputs
        if cut is not None:
            size = target.shape[cut]
            loaded_weight = loaded_weight.narrow(cut, self.moe.tp_rank * size, size)
        target.copy_(loaded_weight)
        self.loaded.add((name, expert, shard_id))
        return True if return_success else None

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Check that everything was loaded and fits together; compile the kernels.

        Raises:
            QtoolError: for a tensor that the checkpoint did not have, or a scale of NaN or Inf.
        """
        for stack, shards in STACKS.items():
            for part, axis in self.axes[stack].items():
                name = f"{stack}_{part}"
                self._require_loaded(name, shards)
                tensor = getattr(layer, name).data
                if tensor.is_floating_point():
                    require_finite(f"{self.name}.{name}", tensor)
                if axis.output is None:
                    tensor = self._of_one_input(part, tensor)
                setattr(layer, name, nn.Parameter(tensor, requires_grad=False))
        self._compile(layer, tensor.device)

    def _require_loaded(self, name: str, shards: Iterable[str]) -> None:
        """Refuse a parameter that was not loaded for every expert and shard."""
        wanted = {(name, expert, shard) for expert in range(self.experts) for shard in shards}
        if missing := wanted - self.loaded:
            raise QtoolError(
                f"{self.name}.{name}: tensors of its experts that were not loaded: {len(missing)}"
            )

    def _of_one_input(self, part: str, tensor: Tensor) -> Tensor:
        """``[E, ...]`` of ``[E, shards, ...]``: a tensor of the input that all shards read."""
        if not torch.equal(tensor, tensor[:, :1].expand_as(tensor)):
            raise QtoolError(
                f"{self.name}.{part}: gate and up of an expert differ, which share one input"
            )
        return tensor[:, 0].contiguous()

    def _compile(self, layer: Any, device: torch.device) -> None:
        """Run every batch size whose kernel may differ once; layers of the same shapes share it."""
        hidden, top = self.sizes["w13"][1], self.moe.experts_per_token
        formats, sizes = (tuple(each.values()) for each in (self.formats, self.sizes))
        key = (formats, sizes, self.experts, top)
        if self.grouped:
            compile_kernels(key, partial(self._to_first, layer), hidden, device, self.dtype)
            return
        for stack in STACKS:
            multiply, k = partial(self._multiply, layer, stack, 0), self.sizes[stack][1]
            compile_kernels((*key, stack), multiply, k, device, self.dtype)

    @property
    def grouped(self) -> bool:
        """Whether both stacks' kernels multiply all experts in one launch."""
        have = all(kernel.experts is not None for kernel in self.kernels.values())
        return have and self.experts <= MOST_EXPERTS

    def _stack(self, layer: Any, stack: str) -> ExpertStack:
        stored = {part: getattr(layer, f"{stack}_{part}")[:, None] for part in self.axes[stack]}
        return ExpertStack(self.kernels[stack], self.formats[stack], stored)

    def _grouped(self, layer: Any, x: Tensor, weights: Tensor, ids: Tensor, own: Any) -> Tensor:
        gate_up, down = (self._stack(layer, stack) for stack in STACKS)
        return grouped_experts(x, weights, ids, own, gate_up, down)

    def _to_first(self, layer: Any, x: Tensor) -> Tensor:
        """All tokens through the first expert."""
        ids = torch.zeros(len(x), self.moe.experts_per_token, dtype=torch.int32, device=x.device)
        return self._grouped(layer, x, ids.float(), ids, None)

    def gemms(self, layer: Any) -> Iterator[Gemm]:
        """The multiplications of each expert, for a check of them."""
        for expert, (stack, names) in product(range(self.experts), self.names.items()):
            each = names[expert * len(STACKS[stack]) :][: len(STACKS[stack])]
            how = self._multiply_grouped if self.grouped else self._multiply
            multiply = partial(how, layer, stack, expert)
            yield Gemm(
                f"{self.name}.{expert}.{stack}",
                each,
                self.sizes[stack][1],
                self.dtype,
                multiply,
                self.kernels[stack],
                int(expert == 0 or not self.grouped),
            )

    def get_fused_moe_quant_config(self, layer: RoutedExperts) -> None:
        return None

    def apply(
        self,
        layer: RoutedExperts,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        shared_experts: Any,
        shared_experts_input: Tensor | None,
    ) -> Tensor:
        """``[M, hidden]``: the chosen experts' outputs, weighted and summed in float32."""
        if self.grouped:
            return self._grouped(layer, x, topk_weights, topk_ids, layer.expert_map)
        ids = topk_ids if layer.expert_map is None else layer.expert_map[topk_ids]
        y = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        weights = topk_weights.float()
        for expert in range(self.experts):
            chosen = ids == expert  # [M, top]
            weight = torch.where(chosen, weights, 0.0).sum(1, keepdim=True)  # [M, 1]
            if len(x) <= CAPTURED:
                y += self._expert(layer, expert, x).float() * weight
                continue
            rows = chosen.any(1).nonzero()[:, 0]
            if len(rows):
                y.index_add_(0, rows, self._expert(layer, expert, x[rows]).float() * weight[rows])
        return y.to(x.dtype)

    def _expert(self, layer: RoutedExperts, expert: int, x: Tensor) -> Tensor:
        gate, up = self._multiply(layer, "w13", expert, x).chunk(2, -1)
        return self._multiply(layer, "w2", expert, silu(gate) * up)

    def _multiply_grouped(self, layer: RoutedExperts, stack: str, expert: int, x: Tensor) -> Tensor:
        """The grouped product in which one expert gets all rows."""
        rows = torch.where(torch.arange(self.experts + 1) > expert, len(x), 0)
        offsets = rows.to(x.device, torch.int32)
        return self._stack(layer, stack).multiply(x, None, offsets)

    def _multiply(self, layer: RoutedExperts, stack: str, expert: int, x: Tensor) -> Tensor:
        stored = {part: getattr(layer, f"{stack}_{part}")[expert] for part in self.axes[stack]}
        return self.kernels[stack].multiply(
            Call(x, None, stored, None, self.formats[stack], x.dtype)
        )
