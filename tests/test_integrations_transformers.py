"""transformers' own experts classes and registry, executed from the wheel of 5.12.1, with megamoe chosen by name."""

import gc
import sys
import weakref
from collections.abc import Callable, MutableMapping
from functools import wraps
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import megamoe
from megamoe.integrations import transformers as adapter
from megamoe.oracle.definitions import execute_definitions
from megamoe.oracle.downloads import OracleUnavailable, unpacked_wheel
from megamoe.oracle.metrics import assert_bytes_equal, compare
from megamoe.oracle.random_layers import random_layer
from megamoe.recipe import Recipe

T, H, I, E, K = 5, 256, 128, 4, 2


class Transformers:
    """Registries and classes of the wheel, put where `register` imports them from."""

    def __init__(self, root: Path) -> None:
        general = execute_definitions(
            root / "utils" / "generic.py",
            ["GeneralInterface"],
            {"MutableMapping": MutableMapping, "Callable": Callable},
        )
        functions = ("deepgemm_bf16", "batched_mm", "grouped_mm", "sonicmoe")
        self.moe = execute_definitions(
            root / "integrations" / "moe.py",
            ["ExpertsInterface", "ALL_EXPERTS_FUNCTIONS", "_default_apply_gate", "use_experts_implementation"],
            {
                **vars(general), "wraps": wraps, "torch": torch, "Callable": Callable,
                **{f"{name}_experts_forward": None for name in functions},
            },
        )  # fmt: skip
        act = {"silu": torch.nn.SiLU(), "gelu": torch.nn.GELU()}
        common = {"torch": torch, "nn": torch.nn, "F": torch.nn.functional, "ACT2FN": act, **vars(self.moe)}
        self.fp8 = execute_definitions(
            root / "integrations" / "finegrained_fp8.py",
            ["_cdiv", "_first_attr", "_alloc_expert_proj", "_FP8_DTYPE", "FP8Experts", "FP8ExpertsInterface",
             "ALL_FP8_EXPERTS_FUNCTIONS", "_get_ue8m0_dtype"],
            {**common, **dict.fromkeys(
                ("fp8_batched_mm_experts_forward", "fp8_grouped_mm_experts_forward",
                 "deepgemm_fp8_fp4_experts_forward", "deepgemm_fp8_fp4_megamoe_experts_forward")
            )},
        )  # fmt: skip
        self.classes = {
            name: getattr(execute_definitions(root / "models" / model / f"modeling_{model}.py", [name], common), name)
            for model, name in (
                ("qwen3_moe", "Qwen3MoeExperts"), ("deepseek_v4", "DeepseekV4Experts"), ("gpt_oss", "GptOssExperts")
            )
        }  # fmt: skip
        self.classes["FP8Experts"] = self.moe.use_experts_implementation(
            self.fp8.FP8Experts, experts_interface=self.fp8.ALL_FP8_EXPERTS_FUNCTIONS
        )


@pytest.fixture(scope="module")
def upstream() -> Transformers:
    try:
        return Transformers(unpacked_wheel("transformers==5.12.1", None, download=True) / "transformers")
    except OracleUnavailable as error:
        pytest.skip(str(error))


@pytest.fixture
def registered(upstream: Transformers, monkeypatch: pytest.MonkeyPatch) -> Transformers:
    for name, module in (("moe", upstream.moe), ("finegrained_fp8", upstream.fp8)):
        for parent in ("transformers", "transformers.integrations"):
            monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
        monkeypatch.setitem(sys.modules, f"transformers.integrations.{name}", module)
    adapter.register()
    adapter.register()
    return upstream


def _config(**fields: object) -> SimpleNamespace:
    sizes = dict(
        num_experts=E, num_local_experts=E, hidden_size=H, intermediate_size=I, moe_intermediate_size=I,
        hidden_act="silu", swiglu_limit=2.0,
    )  # fmt: skip
    return SimpleNamespace(**{**sizes, "_experts_implementation": "megamoe", **fields})


def _experts(upstream: Transformers, name: str, device: str, *arguments: object, **fields: object) -> Any:
    module = upstream.classes[name](_config(**fields), *arguments).to(device)
    generator = torch.Generator().manual_seed(0)
    for parameter_name, parameter in module.named_parameters():
        if parameter.dtype == torch.float32 and not parameter_name.endswith("scale_inv"):
            values = torch.randn(parameter.shape, generator=generator) * parameter.shape[-1] ** -0.5
            parameter.data = values.bfloat16().to(device)
    return module


def _inputs(device: str, tokens: int = T) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(tokens, H, generator=generator).bfloat16()
    scores, ids = torch.rand(tokens, E, generator=generator).topk(K)
    return x.to(device), ids.to(device), (scores / scores.sum(1, keepdim=True)).bfloat16().to(device)


@pytest.mark.parametrize("name", ["Qwen3MoeExperts", "DeepseekV4Experts", "GptOssExperts"])
def test_bf16_experts_are_the_eager_ones(name: str, registered: Transformers, device: str) -> None:
    """Within BF16's roundings of what the class itself computes in fp32; gpt-oss is transposed, interleaved, biased."""
    module = _experts(registered, name, device)
    inputs = _inputs(device)
    with torch.no_grad():
        y = module(*inputs)
        module.config._experts_implementation = "eager"
        expected = module.float()(inputs[0].float(), inputs[1], inputs[2].float())
    assert (y.dtype, y.shape) == (torch.bfloat16, (T, H))
    report = compare(y, expected)
    assert report.rel_rms < 8e-3
    assert report.fitted_scale == pytest.approx(1, abs=2e-3)


@pytest.mark.parametrize("weights", ["fp8", "fp4", "fp4 with fp32 scales"])
def test_quantized_experts_are_the_layer_of_their_weights(weights: str, registered: Transformers, device: str) -> None:
    recipe = (
        Recipe("fp8xfp8", "block128", "trtllm_gen") if weights == "fp8" else Recipe("fp8xfp4", "mx32", "trtllm_gen")
    )
    plain = random_layer(
        recipe, tokens=T, hidden=H, intermediate=I, num_experts=E, top_k=K, device=device
    ).weights  # fmt: skip
    fields: dict[str, object] = {} if weights == "fp8" else {"expert_dtype": "fp4"}
    module = _experts(registered, "FP8Experts", device, (128, 128), **fields)
    for name, weight, scale in (("gate_up_proj", plain.w13, plain.w13_scale), ("down_proj", plain.w2, plain.w2_scale)):
        assert scale is not None
        assert getattr(module, name).shape == weight.shape
        assert getattr(module, f"{name}_scale_inv").shape == scale.shape
        getattr(module, name).data = weight if weights == "fp8" else weight.view(torch.int8)
        if weights != "fp8":
            scale = scale.view(torch.float8_e8m0fnu)
        getattr(module, f"{name}_scale_inv").data = scale.float() if "fp32" in weights else scale
    x, ids, topk_weights = _inputs(device)
    with torch.no_grad():
        y = module(x, ids, topk_weights)
    given = (plain.w13, plain.w13_scale, plain.w2, plain.w2_scale)
    expected = megamoe.mega_moe(x, ids, topk_weights.float(), *given, **vars(recipe), activation_clamp=2.0)
    assert_bytes_equal(y, expected)
    held = adapter._PREPARED[module].weights.routed
    assert held.w13.data_ptr() == plain.w13.data_ptr(), "no second copy"


def test_ids_of_other_ranks_are_skipped(registered: Transformers, device: str) -> None:
    module = _experts(registered, "Qwen3MoeExperts", device)
    x, ids, weights = _inputs(device)
    there, gone = ids.clone(), ids.clone()
    there[:, 1], gone[:, 1] = E, -1
    with torch.no_grad():
        assert_bytes_equal(module(x, there, weights), module(x, gone, weights))
        assert module(x[:0], ids[:0], weights[:0]).shape == (0, H)


def test_weights_are_prepared_once_and_again_when_they_change(
    registered: Transformers, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = _experts(registered, "Qwen3MoeExperts", device)
    count = 0
    prepare = adapter._prepare

    def counted(module: torch.nn.Module) -> object:
        nonlocal count
        count += 1
        return prepare(module)

    monkeypatch.setattr(adapter, "_prepare", counted)
    inputs, more = _inputs(device), _inputs(device, 17)
    with torch.no_grad():
        first = module(*inputs)
        assert adapter._PREPARED[module].layer.max_tokens == 16  # type: ignore[union-attr]
        module(*more)
        assert adapter._PREPARED[module].layer.max_tokens == 32  # type: ignore[union-attr]
        assert_bytes_equal(module(*inputs), first)
        assert count == 1
        module.down_proj.mul_(2)
        assert_bytes_equal(module(*inputs), 2 * first, "written in place")
        module.down_proj.data = module.down_proj.data.clone() / 2
        assert_bytes_equal(module(*inputs), first, "another tensor")
    assert count == 3
    found = weakref.ref(adapter._PREPARED[module])
    del module
    gc.collect()
    assert found() is None, "forgotten with the module"


def test_the_smaller_workspace_goes_before_the_larger_one_comes(
    registered: Transformers, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = _experts(registered, "Qwen3MoeExperts", device)
    inputs, more = _inputs(device), _inputs(device, 17)
    with torch.no_grad():
        module(*inputs)
        smaller = weakref.ref(adapter._PREPARED[module].layer)  # type: ignore[arg-type]
        make, there = megamoe.MegaMoE, []

        def made(*arguments: Any, **options: Any) -> megamoe.MegaMoE:
            gc.collect()
            there.append(smaller())
            return make(*arguments, **options)

        monkeypatch.setattr(megamoe, "MegaMoE", made)
        module(*more)
    assert there == [None]


def test_the_activation_is_checked_on_the_cpu(registered: Transformers, device: str) -> None:
    """Also under a default device that has no numbers."""
    module = _experts(registered, "GptOssExperts", device)
    with torch.device("meta"):
        assert adapter._activation(module, interleaved=True)["activation"] == "swigluoai"


def test_gradients_are_refused_not_lost(registered: Transformers, device: str) -> None:
    module = _experts(registered, "Qwen3MoeExperts", device)
    with pytest.raises(RuntimeError, match=r"^megamoe computes no gradients: .*inference_mode"):
        module(*_inputs(device))
    module.requires_grad_(False)
    module(*_inputs(device))
    with torch.inference_mode():
        module(*_inputs(device))


def _set(**attributes: object) -> Callable[[Any], None]:
    return lambda module: [setattr(module, name, value) for name, value in attributes.items()] and None


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("Qwen3MoeExperts", _set(act_fn=torch.nn.GELU()), "computes another activation than its attributes say"),
        ("GptOssExperts", _set(_apply_gate=lambda gate_up: gate_up[:, :8]), "computes another activation"),
        ("Qwen3MoeExperts", _set(_apply_gate=None), "has no method _apply_gate, by which its activation is checked"),
        ("Qwen3MoeExperts", _set(has_gate=False), "has no gate"),
        ("Qwen3MoeExperts", _set(down_proj=None), "has no tensor down_proj"),
        ("Qwen3MoeExperts", lambda module: module.half(), "has torch.float16 weights with"),
        ("FP8Experts", _set(block_size=(64, 128)), r"has block_size=\(64, 128\); served: \(128, 128\)"),
        ("FP8Experts", _set(activation_scheme="static"), "with activation_scheme='static'"),
    ],
)
def test_other_modules_are_refused(
    name: str, change: Callable[[Any], None], words: str, registered: Transformers, device: str
) -> None:
    module = _experts(registered, name, device, *([(128, 128)] if name == "FP8Experts" else []))
    change(module)
    with torch.no_grad(), pytest.raises(megamoe.UnsupportedError, match=f"^{name} .*{words}|^{name} {words}"):
        module(*_inputs(device))


def test_scales_that_are_no_powers_of_two(registered: Transformers, device: str) -> None:
    module = _experts(registered, "FP8Experts", device, (128, 128), expert_dtype="fp4")
    module.gate_up_proj_scale_inv.data = torch.full_like(module.gate_up_proj_scale_inv, 3.0, dtype=torch.float32)
    with torch.no_grad(), pytest.raises(megamoe.UnsupportedError, match="scales that are no powers of two"):
        module(*_inputs(device))


def test_names(registered: Transformers) -> None:
    assert registered.moe.ALL_EXPERTS_FUNCTIONS["megamoe"] is adapter.experts_forward
    assert registered.fp8.ALL_FP8_EXPERTS_FUNCTIONS["megamoe"] is adapter.experts_forward
    with pytest.raises(ValueError, match="^name is ''"):
        adapter.register("")
