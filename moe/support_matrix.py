"""The support matrix, docs/support_matrix.md: recipe × architecture × option, asked of the code that serves or refuses.

    python -m megamoe.support_matrix > docs/support_matrix.md

Every cell is a call of the public API as far as it goes without running: its checks on tensors without memory (device
"meta"), then the Triton backend's reason for that architecture.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from megamoe.backends.base import LayerRequest, layer_unsupported_reason
from megamoe.backends.triton import kernels_unsupported_reason
from megamoe.kernels.config import ARCHITECTURES, INTERPRETER, arch_name, choose_config
from megamoe.options import LayerOptions, resolve
from megamoe.plain_weights import PlainWeights
from megamoe.recipe import TABLE, Recipe, traits
from megamoe.spec import LayerSpec
from megamoe.validation import SCALE_DTYPES, WEIGHT_DTYPES, check_weights, has_shared_slots, scale_of

META = torch.device("meta")
COLUMNS = (*ARCHITECTURES, INTERPRETER)
MAX_TOKENS, TOP_K, SHARED = 8192, 8, 2


@dataclass(frozen=True)
class Sizes:
    hidden: int = 4096
    intermediate: int = 2048
    num_experts: int = 256
    top_k: int = TOP_K


@dataclass(frozen=True)
class Option:
    """What a row of the matrix adds to a plain layer: `arguments` of the API, tensors given as shapes whose "E" is the
    number of experts with a row in per-expert tensors; `shared`: element format of the shared experts."""

    name: str
    arguments: dict[str, Any]
    shared: str | None = None
    sizes: Sizes = Sizes()


PER_EXPERT, BY_ID = ("E",), (256,)
OPTIONS = (
    Option("`swiglu`, no option", {}),
    Option("a clamp", {"activation_clamp": 10.0}),
    Option("a clamp per expert", {"activation_clamp": PER_EXPERT}),
    Option("`swigluoai` with alpha, beta and a clamp", dict(
        activation="swigluoai", activation_alpha=1.702, activation_beta=1.0, activation_clamp=7.0)),
    Option("`swigluoai` with alpha, beta and clamp per expert", dict(
        activation="swigluoai", activation_alpha=PER_EXPERT, activation_beta=PER_EXPERT, activation_clamp=PER_EXPERT)),
    Option("`situ`", {"activation": "situ"}),
    Option("`situ` with alpha and beta", dict(activation="situ", activation_alpha=2.0, activation_beta=20.0)),
    Option("`situ` with alpha and beta per expert", dict(
        activation="situ", activation_alpha=PER_EXPERT, activation_beta=PER_EXPERT)),
    Option("`w13_bias`, `w2_bias`", {"w13_bias": ("E", 4096), "w2_bias": ("E", 4096)}),
    Option("`l1_alphas`, `l2_alphas`, `l2_act_scales`", dict(
        l1_alphas=("E", 2), l2_alphas=PER_EXPERT, l2_act_scales=PER_EXPERT)),
    Option("`x_gsf`", {"x_gsf": (1,)}),
    Option("`expert_scales`, `routed_scaling_factor`", {"expert_scales": BY_ID, "routed_scaling_factor": 2.5}),
    Option("`w13_layout=\"interleaved\"`", {"w13_layout": "interleaved"}),
    Option("shared experts in E4M3", {}, shared="e4m3"),
    Option("shared experts in E2M1", {}, shared="e2m1"),
    Option("shared experts in BF16", {}, shared="bf16"),
    Option("`local_expert_offset`, `num_experts`", {"local_expert_offset": 256, "num_experts": 1024}),
    Option("`expert_map`", {"expert_map": torch.int32, "expert_scales": (1024,)}),
    Option("H = I = 2880", {}, sizes=Sizes(2880, 2880)),
    Option("H = 2176, I = 384", {}, sizes=Sizes(2176, 384)),
    Option("H = 16512", {}, sizes=Sizes(16512)),
    Option("1024 experts, top-32", {}, sizes=Sizes(num_experts=1024, top_k=32)),
)  # fmt: skip

_HEAD = f"""# Support matrix

Made by `python -m megamoe.support_matrix` from the recipe table and the code's own refusals; a test compares.

Every layer has H 4096, I 2048, {Sizes().num_experts} experts, top-{TOP_K} and up to {MAX_TOKENS} tokens, unless its row
says otherwise. A number is a refusal, listed at the end; sm_100 stands for every 10.x, sm_120 for every 12.x. The CPU
interpreter's column is the reference backend's too, limits of size aside. On sm_100 and sm_120 the kernels have been
compiled, but not run. A rank's experts are served (`expert_map`, or `local_expert_offset` and `num_experts`); the
exchange between ranks is not.

## Recipes

How the numbers meet: `scaled`, block-scaled MMA; `widened`, the same after E2M1 weights became E4M3; `decoded`, BF16
MMA of operands decoded in registers; `block`, FP8 MMA with fp32 scales from block to block; `bf16`, BF16 MMA.
"""


def page() -> str:
    """docs/support_matrix.md."""
    reasons: dict[str, int] = {}
    columns = " | ".join(arch_name(arch) for arch in COLUMNS)
    rule = "---|" * (len(COLUMNS) + 1)
    lines = [_HEAD, f"| recipe | {columns} |", f"|{rule}"]
    for recipe in TABLE:
        cells = (_cell(refusal(recipe, OPTIONS[0], arch), reasons, _mma(recipe, arch)) for arch in COLUMNS)
        lines.append(f"| `{recipe}` | {' | '.join(cells)} |")
    for recipe in TABLE:
        lines += ["", f"## `{recipe}`", "", f"| option | {columns} |", f"|{rule}"]
        for option in OPTIONS:
            cells = (_cell(refusal(recipe, option, arch), reasons, "yes") for arch in COLUMNS)
            lines.append(f"| {option.name} | {' | '.join(cells)} |")
    lines += ["", "## Refusals", "", *(f"{number}. {reason}" for reason, number in reasons.items())]
    return "\n".join(lines) + "\n"


def refusal(recipe: Recipe, option: Option, arch: int) -> str | None:
    """Why a layer of `recipe` with `option` does not run on `arch`: the error's message or the backend's reason."""
    try:
        spec = _spec(recipe, option)
    except (TypeError, ValueError) as error:
        return str(error).replace(str(recipe), "this recipe")
    return layer_unsupported_reason(LayerRequest(spec, META, MAX_TOKENS)) or kernels_unsupported_reason(
        spec, arch, MAX_TOKENS
    )


def _spec(recipe: Recipe, option: Option) -> LayerSpec:
    """The layer that the API makes of the arguments; raises what it raises."""
    slots = SHARED if option.shared is not None and has_shared_slots(recipe) else 0
    arguments = {name: _argument(value, option.sizes.num_experts + slots) for name, value in option.arguments.items()}
    if recipe.act_scale == "nv16":
        arguments["x_gsf"] = _argument((1,), 0)
    weight_names = PlainWeights.__dataclass_fields__.keys()
    weights = replace(
        _weights(recipe, option), **{name: value for name, value in arguments.items() if name in weight_names}
    )
    dims = check_weights(weights, recipe)
    options = LayerOptions(**{name: value for name, value in arguments.items() if name not in weight_names})
    spec, _ = resolve(options, recipe, dims, option.sizes.top_k, META)
    return spec


def _argument(value: Any, experts: int) -> Any:
    if value is torch.int32:
        return torch.empty(1024, dtype=torch.int32, device=META)
    if isinstance(value, tuple):
        return torch.empty([experts if size == "E" else size for size in value], device=META)
    return value


def _weights(recipe: Recipe, option: Option) -> PlainWeights:
    h, i, experts = option.sizes.hidden, option.sizes.intermediate, option.sizes.num_experts
    weight = traits(recipe).weight
    tensors = [*_matrix(recipe, weight, (experts, 2 * i, h)), *_matrix(recipe, weight, (experts, h, i))]
    if option.shared is not None:
        up: tuple[int, ...] = (2 * i * SHARED, h)
        down: tuple[int, ...] = (h, i * SHARED)
        if has_shared_slots(recipe):
            up, down = (SHARED, 2 * i, h), (SHARED, h, i)
        tensors += [*_matrix(recipe, option.shared, up), *_matrix(recipe, option.shared, down)]
    return PlainWeights(*tensors)  # type: ignore[arg-type]


def _matrix(recipe: Recipe, weight: str, shape: tuple[int, ...]) -> Iterator[torch.Tensor | None]:
    *lead, rows, columns = shape
    yield torch.empty(
        *lead, rows, columns // (2 if weight == "e2m1" else 1), dtype=WEIGHT_DTYPES[weight][0], device=META
    )
    scale_format, (group_rows, group_columns) = scale_of(recipe, weight)
    if scale_format is None:
        yield None
    else:
        scales = (*lead, -(-rows // group_rows), -(-columns // group_columns))
        yield torch.empty(scales, dtype=SCALE_DTYPES[scale_format][0], device=META)


def _mma(recipe: Recipe, arch: int) -> str:
    """How the numbers meet on `arch`, few tokens and many; both are named where they differ."""
    spec = _spec(recipe, OPTIONS[0])
    names = dict.fromkeys(choose_config(spec, arch, tokens).gate_up.mma for tokens in (1, MAX_TOKENS))
    return ", ".join(names)


def _cell(reason: str | None, reasons: dict[str, int], served: str) -> str:
    return served if reason is None else f"[{reasons.setdefault(reason, len(reasons) + 1)}](#refusals)"


if __name__ == "__main__":
    print(page(), end="")
