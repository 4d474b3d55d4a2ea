"""`LayerSpec`: the static shape of one MoE layer on one rank; everything sized or compiled is sized from it."""

from __future__ import annotations

from dataclasses import dataclass

from megamoe.recipe import Recipe, Traits, traits

MAX_EXPERTS = 1024
MAX_TOP_K = 32
ACTIVATIONS = ("swiglu", "swigluoai", "situ")
ACTIVATION_DEFAULTS: dict[str, tuple[float, float]] = {
    "swiglu": (1.0, 0.0),
    "swigluoai": (1.702, 1.0),
    "situ": (4.0, 25.0),
}
"""alpha and beta where none are given: gpt-oss's for swigluoai, and what DeepGEMM has built in."""
SWIGLUOAI_ALPHA, SWIGLUOAI_BETA = ACTIVATION_DEFAULTS["swigluoai"]


@dataclass(frozen=True)
class LayerSpec:
    """Static description of a layer.

    `num_experts` counts the routed experts of all ranks, the range of the caller's ids; this rank's weights hold
    `num_local_experts` of them, from `expert_offset` on unless an expert map places them.

    `intermediate` is the width I of one expert. Under DeepGEMM numerics the `num_shared_experts` S experts are one
    dense MLP of width I·S, evaluated on every token with weight 1; under `trtllm_gen` they are S more experts that the
    caller's ids name E … E+S−1.
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
    activation_alpha: float | None = None  # None: the activation's own (`ACTIVATION_DEFAULTS`)
    activation_beta: float | None = None
    local_experts: int | None = None  # None: this rank's equal share of `num_experts`
    local_expert_offset: int = 0
    has_expert_map: bool = False
    ep_rank: int = 0
    ep_size: int = 1

    @property
    def traits(self) -> Traits:
        return traits(self.recipe)

    @property
    def alpha(self) -> float:
        own = ACTIVATION_DEFAULTS[self.activation][0]
        return own if self.activation_alpha is None else self.activation_alpha

    @property
    def beta(self) -> float:
        own = ACTIVATION_DEFAULTS[self.activation][1]
        return own if self.activation_beta is None else self.activation_beta

    @property
    def num_local_experts(self) -> int:
        return self.num_experts // self.ep_size if self.local_experts is None else self.local_experts

    @property
    def expert_offset(self) -> int:
        return self.local_expert_offset + self.ep_rank * (self.num_experts // self.ep_size)

    @property
    def shared_slots(self) -> int:
        """Shared experts that ids name (`trtllm_gen`)."""
        return self.num_shared_experts if self.recipe.numerics == "trtllm_gen" else 0

    @property
    def num_slot_experts(self) -> int:
        """Experts that a slot of this rank can name: the local routed ones, then the shared slots."""
        return self.num_local_experts + self.shared_slots

    @property
    def shared_intermediate(self) -> int:
        """Width of the dense shared MLP (DeepGEMM numerics), else 0."""
        return 0 if self.shared_slots else self.intermediate * self.num_shared_experts

    @property
    def combine_slots(self) -> int:
        """Rows the combine adds per token: one per slot and, where there is a dense shared MLP, one more."""
        return self.top_k + (1 if self.shared_intermediate else 0)
