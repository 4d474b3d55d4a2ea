"""MegaMoE buffers: upstream's views over one allocation."""

from dataclasses import dataclass, field

import pytest
import torch

from megamoe.kernels.layouts.buffers import (
    SM90_VIEWS,
    SM100_VIEWS,
    BufferLayout,
    align_tokens,
    slice_buffer,
    sm90_layout,
    sm90_unsupported_reason,
    sm100_layout,
    sm100_unsupported_reason,
)

SHAPE = dict(num_experts=8, max_tokens=384, top_k=2, hidden=1024, intermediate=512)
I8, I32, I64, F32, BF16, E4M3 = (
    torch.int8, torch.int32, torch.int64, torch.float32, torch.bfloat16, torch.float8_e4m3fn,
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A buffer of SHAPE: for each view (dtype, shape, strides), for each region of upstream's 1 … 7 its bytes."""

    mma_type: str | None  # None: SM90
    views: dict[str, tuple[torch.dtype, tuple[int, ...], tuple[int, ...]]]
    upstream_bytes: dict[str, int]
    options: dict[str, int] = field(default_factory=dict)

    @property
    def layout(self) -> BufferLayout:
        return _layout(self.mma_type, **self.options)


def _layout(mma_type: str | None, **changes: int) -> BufferLayout:
    shape = {**SHAPE, **changes}
    return sm90_layout(**shape) if mma_type is None else sm100_layout(mma_type, **shape)


ROUTING = {"topk_idx": (I64, (384, 2), (2, 1)), "topk_weights": (F32, (384, 2), (2, 1))}
NONE = (I8, (0,), (1,))
NO_SHARED = dict.fromkeys(("shared_l1_acts_sf", "shared_l2_acts", "shared_l2_acts_sf"), NONE)
X_SCALES = {"x_scales": (F32, (384,), (1,))}
# 128 rows for every 8 tokens.
SF_ROWS = 128 * 48

CASES = {
    "fp8xfp4": Case(
        "fp8xfp4",
        {
            "x": (I8, (384, 1024), (1024, 1)),
            "x_sf": (I32, (384, 8), (8, 1)),
            **ROUTING,
            "shared_l1_acts": (I8, (384, 1024), (1024, 1)),
            **NO_SHARED,
            "l1_acts": (I8, (0, 1024), (1024, 1)),
            "l1_acts_sf": (I32, (0, 8), (1, 0)),
            "l2_acts": (I8, (768, 512), (512, 1)),
            "l2_acts_sf": (I32, (768, 4), (1, 768)),
            **X_SCALES,
        },
        {"x": 393216, "x_sf": 12288, "topk_idx": 6144, "topk_weights": 3072},
    ),
    "fp8xfp4, 2 shared": Case(
        "fp8xfp4",
        {
            "x": (I8, (384, 1024), (1024, 1)),
            "x_sf": (I32, (384, 8), (8, 1)),
            **ROUTING,
            "shared_l1_acts": (I8, (384, 1024), (1024, 1)),
            "shared_l1_acts_sf": (I32, (SF_ROWS, 8), (1, SF_ROWS)),
            "shared_l2_acts": (I8, (384, 1024), (1024, 1)),
            "shared_l2_acts_sf": (I32, (SF_ROWS, 8), (1, SF_ROWS)),
            "l1_acts": (I8, (0, 1024), (1024, 1)),
            "l1_acts_sf": (I32, (0, 8), (1, 0)),
            "l2_acts": (I8, (768, 512), (512, 1)),
            "l2_acts_sf": (I32, (768, 4), (1, 768)),
            **X_SCALES,
        },
        {"shared_l1_acts_sf": 196608, "shared_l2_acts": 2 * 196608, "shared_l2_acts_sf": 2 * 98304},
        {"num_shared_experts": 2},
    ),
    "mxf4xmxf4, 1 shared": Case(
        "mxf4xmxf4",
        {
            "x": (I8, (384, 512), (512, 1)),
            "x_sf": (I32, (384, 8), (8, 1)),
            **ROUTING,
            "shared_l1_acts": (I8, (384, 512), (512, 1)),
            "shared_l1_acts_sf": (I32, (SF_ROWS, 8), (1, SF_ROWS)),
            "shared_l2_acts": (I8, (384, 256), (256, 1)),
            "shared_l2_acts_sf": (I32, (SF_ROWS, 4), (1, SF_ROWS)),
            "l1_acts": (I8, (0, 512), (512, 1)),
            "l1_acts_sf": (I32, (0, 8), (1, 0)),
            "l2_acts": (I8, (768, 256), (256, 1)),
            "l2_acts_sf": (I32, (768, 4), (1, 768)),
            **X_SCALES,
        },
        {"x": 196608, "x_sf": 12288, "shared_l1_acts_sf": 196608, "shared_l2_acts": 98304,
         "shared_l2_acts_sf": 98304},
        {"num_shared_experts": 1},
    ),
    "nvfp4xnvfp4": Case(
        "nvfp4xnvfp4",
        {
            "x": (I8, (384, 512), (512, 1)),
            "x_sf": (I32, (384, 16), (16, 1)),
            **ROUTING,
            "shared_l1_acts": (I8, (384, 512), (512, 1)),
            **NO_SHARED,
            "l1_acts": (I8, (0, 512), (512, 1)),
            "l1_acts_sf": (I32, (0, 16), (1, 0)),
            "l2_acts": (I8, (768, 256), (256, 1)),
            "l2_acts_sf": (I32, (768, 8), (1, 768)),
            **X_SCALES,
        },
        {"x": 196608, "x_sf": 24576},
    ),
    "bf16xbf16, 1 shared": Case(
        "bf16xbf16",
        {
            "x": (BF16, (384, 1024), (1024, 1)),
            "x_sf": NONE,
            **ROUTING,
            "shared_l1_acts": (BF16, (384, 1024), (1024, 1)),
            "shared_l1_acts_sf": NONE,
            "shared_l2_acts": (BF16, (384, 512), (512, 1)),
            "shared_l2_acts_sf": NONE,
            "l1_acts": (BF16, (0, 1024), (1024, 1)),
            "l1_acts_sf": NONE,
            "l2_acts": (BF16, (768, 512), (512, 1)),
            "l2_acts_sf": NONE,
            **X_SCALES,
        },
        {"x": 786432, "shared_l2_acts": 393216},
        {"num_shared_experts": 1},
    ),
    "SM90": Case(
        None,
        {
            "x": (E4M3, (384, 1024), (1024, 1)),
            "x_sf": (F32, (384, 8), (8, 1)),
            **ROUTING,
            "l1_acts": (E4M3, (0, 1024), (1024, 1)),
            "l1_acts_sf": (F32, (0, 8), (1, 0)),
            "l2_acts": (E4M3, (768, 512), (512, 1)),
            "l2_acts_sf": (F32, (768, 8), (1, 768)),
        },
        {"x": 393216, "x_sf": 12288, "topk_idx": 6144, "topk_weights": 3072},
    ),
}  # fmt: skip
each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


@each_case
def test_views_are_upstream_s(case: Case) -> None:
    layout = case.layout
    views = slice_buffer(layout, torch.full((layout.nbytes,), -1, dtype=I8))
    assert tuple(views) == (SM90_VIEWS if case.mma_type is None else SM100_VIEWS)
    actual = {name: (view.dtype, tuple(view.shape), view.stride()) for name, view in views.items()}
    assert actual == case.views


@each_case
def test_callers_regions_have_upstream_s_sizes(case: Case) -> None:
    actual = {name: case.layout.region(name).nbytes for name in case.upstream_bytes}
    assert actual == case.upstream_bytes


def test_offsets_behind_the_workspace_are_upstream_s() -> None:
    """Upstream: x at 45056, x_sf 438272, topk_idx 450560, topk_weights 456704, l1_acts 459776."""
    layout = _layout("fp8xfp4")
    names = ("x", "x_sf", "topk_idx", "topk_weights", "l1_acts")
    offsets = [layout.region(name).offset - layout.region("x").offset for name in names]
    assert offsets == [0, 393216, 405504, 411648, 414720]


@each_case
def test_regions_do_not_overlap_and_are_aligned(case: Case) -> None:
    layout = case.layout
    end = 0
    for region in layout.regions:
        behind_plan = region.name == "x"
        assert region.offset >= end if behind_plan else region.offset == end, region.name
        assert region.offset % (128 if behind_plan else region.dtype.itemsize) == 0, region.name
        if region.name in case.views:
            assert region.offset % 16 == 0, f"{region.name} must serve 16-byte accesses"
        end = region.offset + region.nbytes
    assert layout.nbytes == end


@each_case
def test_every_region_is_dense_and_its_own(case: Case) -> None:
    """Writing a region's number through its view fills exactly its bytes."""
    layout = case.layout
    buffer = torch.full((layout.nbytes,), -1, dtype=I8)
    expected = buffer.clone()
    for number, region in enumerate(layout.regions):
        view = region.of(buffer)
        raw = torch.full((region.nbytes,), number, dtype=torch.uint8).view(region.dtype)
        view.copy_(raw.reshape(view.shape))
        expected[region.offset : region.offset + region.nbytes] = number
    assert torch.equal(buffer, expected)


def test_shared_l1_acts_is_x() -> None:
    layout = _layout("fp8xfp4", num_shared_experts=1)
    views = slice_buffer(layout, torch.empty(layout.nbytes, dtype=I8))
    assert views["shared_l1_acts"].data_ptr() == views["x"].data_ptr()


@pytest.mark.parametrize(("tokens", "rounded"), [(1, 384), (384, 384), (385, 768), (8192, 8448)])
def test_tokens_are_rounded_up_to_384(tokens: int, rounded: int) -> None:
    assert align_tokens(tokens) == rounded
    for layout in (_layout("fp8xfp4", max_tokens=tokens), _layout(None, max_tokens=tokens)):
        assert layout.num_tokens == rounded
        assert layout.region("x").shape[0] == rounded
        assert layout.region("combine").shape == (rounded, 2, 1024)


def test_a_larger_buffer_may_be_sliced() -> None:
    layout = _layout(None)
    assert slice_buffer(layout, torch.empty(layout.nbytes + 77, dtype=I8))["x"].shape == (384, 1024)


MULTIPLES = [
    ("fp8xfp4", 512, 512),
    ("mxf4xmxf4", 512, 512),
    ("nvfp4xnvfp4", 256, 256),
    ("bf16xbf16", 256, 128),
    (None, 512, 256),
]


@pytest.mark.parametrize(("mma_type", "hidden", "intermediate"), MULTIPLES, ids=lambda value: str(value))
def test_multiples_of_each_kind(mma_type: str | None, hidden: int, intermediate: int) -> None:
    _layout(mma_type, hidden=3 * hidden, intermediate=3 * intermediate)
    with pytest.raises(ValueError, match=f"hidden={hidden // 2}; .* multiples of {hidden}$"):
        _layout(mma_type, hidden=hidden // 2)
    with pytest.raises(ValueError, match=f"intermediate={intermediate // 2}; .* multiples of {intermediate}$"):
        _layout(mma_type, intermediate=intermediate // 2)


REFUSED = [
    ("fp8xfp8", {}, "mma_type='fp8xfp8' has no SM100 buffer"),
    ("fp8xfp4", {"top_k": 33}, "top_k=33"),
    ("fp8xfp4", {"top_k": 32, "num_shared_experts": 1}, "make 33"),
    ("fp8xfp4", {"num_shared_experts": -1}, "num_shared_experts=-1"),
    ("fp8xfp4", {"num_experts": 1025}, "num_experts=1025"),
    ("fp8xfp4", {"max_tokens": 0}, "max_tokens=0"),
    ("fp8xfp4", {"num_ranks": 2}, "num_ranks=2"),
    (None, {"intermediate": 4352}, "intermediate=4352"),
    (None, {"num_ranks": 2}, "num_ranks=2"),
    (None, {"top_k": 0}, "top_k=0"),
]


@pytest.mark.parametrize(("mma_type", "changes", "reason"), REFUSED, ids=lambda value: str(value))
def test_unsupported_reason_names_the_argument(mma_type: str | None, changes: dict, reason: str) -> None:
    shape = {**SHAPE, **changes}
    actual = sm90_unsupported_reason(**shape) if mma_type is None else sm100_unsupported_reason(mma_type, **shape)
    assert actual is not None
    assert reason in actual


@pytest.mark.parametrize("mma_type", ["fp8xfp4", None], ids=["SM100", "SM90"])
def test_supported_shapes_have_no_reason(mma_type: str | None) -> None:
    shape = {**SHAPE, "top_k": 32}
    assert (
        sm90_unsupported_reason(**shape) if mma_type is None else sm100_unsupported_reason(mma_type, **shape)
    ) is None


def test_slice_refuses_other_buffers() -> None:
    layout = _layout("fp8xfp4")
    with pytest.raises(TypeError, match="uint8; allowed: int8"):
        slice_buffer(layout, torch.empty(layout.nbytes, dtype=torch.uint8))
    with pytest.raises(ValueError, match=f"{layout.nbytes - 1} bytes, the layout needs {layout.nbytes}"):
        slice_buffer(layout, torch.empty(layout.nbytes - 1, dtype=I8))
    with pytest.raises(ValueError, match="one contiguous axis"):
        slice_buffer(layout, torch.empty(2 * layout.nbytes, dtype=I8)[::2])
