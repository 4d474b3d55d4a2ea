"""How tokens choose experts: the distributions a layer is measured under."""

from __future__ import annotations

import torch

ROUTINGS = ("uniform", "zipf", "all_to_one")
ZIPF_EXPONENT = 1.0


def expert_ids(routing: str, tokens: int, num_experts: int, top_k: int, generator: torch.Generator) -> torch.Tensor:
    """int32 [T, K], K distinct experts per token, on the generator's device.

    uniform     K of E, every set equally likely
    zipf        drawn without replacement with weights 1/rank; which expert has which rank is drawn first
    all_to_one  every token picks the same K experts: the worst imbalance that distinct experts allow
    """
    device = generator.device
    if routing == "uniform":
        scores = torch.rand(tokens, num_experts, generator=generator, device=device)
    elif routing == "zipf":
        rank = torch.randperm(num_experts, generator=generator, device=device) + 1
        # Gumbel keys: the K largest of log-weight + noise are a draw without replacement.
        uniform = torch.rand(tokens, num_experts, generator=generator, device=device).clamp_min(1e-30)
        scores = -ZIPF_EXPONENT * rank.float().log() - (-uniform.log()).log()
    elif routing == "all_to_one":
        scores = torch.rand(1, num_experts, generator=generator, device=device).expand(tokens, -1)
    else:
        raise ValueError(f"routing is {routing!r}; allowed: {', '.join(ROUTINGS)}")
    return scores.topk(top_k, dim=-1).indices.int().contiguous()
