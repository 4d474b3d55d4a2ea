"""docs/support_matrix.md is what the code says, and what it says is so."""

from pathlib import Path

import pytest
import torch

import megamoe
from megamoe import support_matrix
from megamoe.kernels.config import ARCHITECTURES, INTERPRETER
from megamoe.recipe import TABLE, Recipe
from megamoe.support_matrix import OPTIONS, refusal

PAGE = Path(__file__).parent.parent / "docs" / "support_matrix.md"


def test_the_page_is_the_generated_one() -> None:
    assert PAGE.read_text() == support_matrix.page(), "run python -m megamoe.support_matrix > docs/support_matrix.md"


@pytest.mark.parametrize("recipe", TABLE, ids=str)
def test_a_plain_layer_runs_everywhere(recipe: Recipe) -> None:
    for arch in (*ARCHITECTURES, INTERPRETER):
        assert refusal(recipe, OPTIONS[0], arch) is None


def test_rows_cover_every_argument() -> None:
    """Of those that are not in every call, with the shared weights under `shared`."""
    import inspect

    always = {
        "hidden_states", "topk_ids", "topk_weights", "w13", "w13_scale", "w2", "w2_scale", "mma_type", "act_scale",
        "numerics", "check_ids", "output", "moe_backend",
    }  # fmt: skip
    shared = {"shared_w13", "shared_w13_scale", "shared_w2", "shared_w2_scale"}
    arguments = set(inspect.signature(megamoe.mega_moe).parameters) - always - shared
    assert arguments == {name for option in OPTIONS for name in option.arguments}
    assert any(option.shared for option in OPTIONS)


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.name)
def test_nothing_is_allocated(option: support_matrix.Option) -> None:
    """A layer of a matrix row would not fit into memory: its tensors are on no device."""
    spec_tensors = support_matrix._weights(next(iter(TABLE)), option)
    assert all(t.is_meta for t in vars(spec_tensors).values() if isinstance(t, torch.Tensor))
