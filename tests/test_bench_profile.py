"""What a profiler is told about a launch is what the bench counts."""

from types import SimpleNamespace

import pytest
import torch

from megamoe import profile
from megamoe.bench.layers import spec_of
from megamoe.bench.shapes import MODELS
from megamoe.bench.work import count_work
from megamoe.recipe import Recipe, resolve_recipe

TOKENS = 64
KERNEL = SimpleNamespace(name="kernel")


def _arguments(recipe: Recipe) -> dict[str, object]:
    spec = spec_of(MODELS["deepseek-v4-flash"], recipe)
    t = spec.traits
    return {
        "num_tokens": TOKENS, "num_experts": spec.num_experts, "H": spec.hidden, "I": spec.intermediate,
        "SHARED_I": spec.shared_intermediate, "TOP_K": spec.top_k, "A_FORMAT": t.act, "B_FORMAT": t.weight,
        "B_SCALE": t.weight_scale_format, "B_GROUP": t.weight_group[1], "SHARED_FORMAT": spec.shared_weight,
        "SHARED_SCALE": "ue8m0" if spec.shared_weight != t.weight else t.weight_scale_format, "SHARED": True,
    }  # fmt: skip


@pytest.mark.parametrize("name", ["fp8xfp4", "fp8xfp8", "mxf4xmxf4", "nvfp4xnvfp4"])
@pytest.mark.parametrize(("stage", "work"), [("gate_up", profile.gate_up_work), ("down", profile.down_work)])
def test_gemms_are_counted_as_in_the_bench(name: str, stage: str, work: object) -> None:
    recipe = resolve_recipe(name)
    told = work((1,), KERNEL, _arguments(recipe))  # type: ignore[operator]
    spec = spec_of(MODELS["deepseek-v4-flash"], recipe)
    counted = count_work(spec, stage, TOKENS, min(spec.num_experts, TOKENS * spec.top_k), TOKENS * spec.top_k)
    assert told["flops8"] == counted.flops
    assert told["bytes"] == pytest.approx(counted.num_bytes, rel=0.01), "scales of activations are left out"
    assert told["name"].startswith("kernel [T=64 ")


def test_bf16_counts_as_such() -> None:
    arguments = {**_arguments(resolve_recipe("fp8xfp4")), "A_FORMAT": "bf16"}
    assert "flops16" in profile.gate_up_work((1,), KERNEL, arguments)


def test_small_kernels_are_counted_as_in_the_bench() -> None:
    recipe = resolve_recipe("fp8xfp8")
    spec, arguments = spec_of(MODELS["deepseek-v4-flash"], recipe), _arguments(recipe)
    slots = TOKENS * spec.top_k
    told = profile.combine_work((1,), KERNEL, arguments)
    assert told["bytes"] == count_work(spec, "combine", TOKENS, 0, slots).num_bytes
    told = profile.pre_dispatch_work((1,), KERNEL, {**arguments, "num_rows": TOKENS, "KIND": "fp8_block128"})
    assert told["bytes"] == pytest.approx(count_work(spec, "pre_dispatch", TOKENS, 0, slots).num_bytes, rel=0.02)
    told = profile.routing_work((1,), KERNEL, {"num_slots": slots, "num_tiles": 100, "num_experts": 256})
    assert told["bytes"] == pytest.approx(count_work(spec, "routing", TOKENS, 0, slots).num_bytes, rel=0.2)


def test_ranges_are_off_until_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []

    class Range:
        def __init__(self, name: str) -> None:
            opened.append(name)

        def __enter__(self) -> None: ...

        def __exit__(self, *error: object) -> None: ...

    monkeypatch.setattr(torch.cuda.nvtx, "range", Range)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.delenv("MEGAMOE_PROFILE", raising=False)
    with profile.stage("gate_up"):
        assert opened == []
    monkeypatch.setenv("MEGAMOE_PROFILE", "1")
    with profile.stage("gate_up"):
        assert opened == ["megamoe.gate_up"]
