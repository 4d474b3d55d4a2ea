"""The launch configurations: the predicate over a whole space, and the heuristic over every layer and architecture."""

import dataclasses
import itertools

import pytest

from megamoe.kernels.config import (
    ARCHITECTURES,
    INTERPRETER,
    GemmConfig,
    LayerConfig,
    choose_config,
    illegal_reason,
)
from megamoe.kernels.operands import default_specs
from megamoe.spec import LayerSpec

SPECS = {str(spec.recipe): spec for spec in default_specs()}
FP8XFP4 = "fp8xfp4/mx32/deep_gemm_sm100"
TOKENS = (0, 1, 2, 16, 64, 255, 1024, 8192, 65536)


@pytest.mark.parametrize("arch", (*ARCHITECTURES, INTERPRETER))
@pytest.mark.parametrize("recipe", SPECS)
def test_heuristic_only_picks_legal_configs(recipe: str, arch: int) -> None:
    spec = SPECS[recipe]
    for num_tokens, experts, shared in itertools.product(TOKENS, (6, 8, 256, 1024), (0, 1, 2)):
        layer = dataclasses.replace(
            spec,
            num_experts=experts,
            num_shared_experts=shared,
            shared_weight=spec.shared_weight if shared else None,
        )
        config = choose_config(layer, arch, num_tokens)
        assert illegal_reason(config, layer, arch) is None, (num_tokens, experts, shared, config)


def test_heuristic_is_pure() -> None:
    spec = SPECS[FP8XFP4]
    assert choose_config(spec, 90, 64) == choose_config(spec, 90, 64)
    assert hash(choose_config(spec, 90, 64)) == hash(choose_config(spec, 90, 64))


def test_more_tokens_never_shrink_the_tile() -> None:
    for spec, arch in itertools.product(SPECS.values(), ARCHITECTURES):
        sizes = [choose_config(spec, arch, tokens).block_m for tokens in TOKENS]
        assert sizes == sorted(sizes)


@dataclasses.dataclass(frozen=True)
class Illegal:
    change: dict[str, object]
    arch: int
    says: str
    recipe: str = FP8XFP4


ILLEGAL = {
    "not a power of two": Illegal({"block_n": 384}, 90, "block_n=384"),
    "half a scale atom": Illegal({"block_n": 64}, 90, "block_n=64"),
    "half a scale word": Illegal({"block_k": 64}, 100, "block_k=64"),
    "half a scale group": Illegal({"block_k": 16}, 90, "block_k=16"),
    "promotion across scale groups": Illegal({"block_k": 256}, 90, "block_k=256", "fp8xfp8/block128/deep_gemm_sm90"),
    "half a group of the intermediate": Illegal({"block_n": 128}, 90, "block_n=128", "fp8xfp8/block128/trtllm_gen"),
    "promotion across scale groups of MXFP4": Illegal(
        {"block_k": 256}, 90, "block_k=256", "fp8xfp4/block128/deep_gemm_sm90"
    ),
    "BF16 MMA for what is block-scaled": Illegal({"mma": "bf16"}, 100, "mma='bf16'"),
    "small tcgen05 tile": Illegal({"block_m": 64}, 100, "block_m=64"),
    "small wgmma tile": Illegal({"block_m": 32}, 90, "block_m=32"),
    "shared memory of sm_120": Illegal({"block_m": 128, "block_n": 256, "num_stages": 4}, 120, "shared memory"),
    "block-scaled MMA on sm_90": Illegal({"mma": "scaled"}, 90, "mma='scaled'"),
    "decoding what needs no decoding": Illegal({"mma": "decoded"}, 100, "mma='decoded'"),
}


@pytest.mark.parametrize("case", ILLEGAL.values(), ids=ILLEGAL)
def test_illegal_configs_say_what_is_wrong(case: Illegal) -> None:
    spec = SPECS[case.recipe]
    good = choose_config(spec, case.arch, 8192)
    bad = LayerConfig(dataclasses.replace(good.gate_up, **case.change), dataclasses.replace(good.down, **case.change))
    reason = illegal_reason(bad, spec, case.arch)
    assert reason is not None
    assert case.says in reason


def test_both_gemms_share_one_tile_list() -> None:
    spec: LayerSpec = SPECS[FP8XFP4]
    good = choose_config(spec, 90, 8192)
    down: GemmConfig = dataclasses.replace(good.down, block_m=good.down.block_m // 2)
    reason = illegal_reason(LayerConfig(good.gate_up, down), spec, 90)
    assert reason is not None
    assert "block_m differs" in reason
