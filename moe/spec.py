"""`LayerSpec`: the static shape of one MoE layer on one rank; everything sized or compiled is sized from it."""

from __future__ import annotations

from dataclasses import dataclass

from megamoe.recipe import Recipe, Traits, traits

MAX_EXPERTS = 1024
MAX_TOP_K = 32
ACTIVATIONS = ("swiglu", "swigluoai", "situ")
SWIGLUOAI_ALPHA, SWIGLUOAI_BETA = 1.702, 1.0  # gpt-oss, and what DeepGEMM has built in


@dataclass(frozen=True)
class LayerSpec:
    """Static description of a layer.

    `intermediate` is the routed expert width I; the `num_shared_experts` S experts are one dense MLP of width I·S
    under DeepGEMM numerics, evaluated on every token with weight 1. `num_experts` counts the routed experts of all
    ranks; this rank owns `num_local_experts` of them, starting at `expert_offset`.
    """

    recipe: Recipe
    hidden: int
    intermediate: int
    num_experts: int
    top_k: int
    num_shared_experts: int = 0
    shared_weight: str | None = None  # element format of the shared weights; None: no shared experts
    activation: str = "swiglu"
    activation_clamp: float | None = None
    activation_alpha: float = SWIGLUOAI_ALPHA  # swigluoai: gate·sigmoid(alpha·gate)·(up + beta)
    activation_beta: float = SWIGLUOAI_BETA
    ep_rank: int = 0
    ep_size: int = 1

    @property
    def traits(self) -> Traits:
        return traits(self.recipe)

    @property
    def num_local_experts(self) -> int:
        return self.num_experts // self.ep_size

    @property
    def expert_offset(self) -> int:
        return self.ep_rank * self.num_local_experts

    @property
    def shared_intermediate(self) -> int:
        return self.intermediate * self.num_shared_experts

    @property
    def combine_slots(self) -> int:
        """Rows the combine adds per token: top-k routed ones and, where there are shared experts, one more."""
        return self.top_k + (1 if self.num_shared_experts else 0)
