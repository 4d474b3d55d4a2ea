"""Buffer views against upstream's compiled host code of 0.1.7, run in a process of its own without a GPU."""

from typing import Any

import pytest
import torch

from megamoe.kernels.layouts import buffers
from megamoe.oracle.deep_gemm import host_code
from megamoe.oracle.deep_gemm.views import View, view_differences
from megamoe.oracle.downloads import OracleUnavailable

pytestmark = pytest.mark.differential

SHAPES = (
    dict(num_experts=8, max_tokens=384, top_k=2, hidden=1024, intermediate=512),
    dict(num_experts=7, max_tokens=768, top_k=6, hidden=2048, intermediate=1536),
    dict(num_experts=256, max_tokens=6144, top_k=8, hidden=7168, intermediate=2048),
)
SM100 = [
    (mma_type, num_shared, shape)
    for mma_type in ("fp8xfp4", "mxf4xmxf4", "nvfp4xnvfp4", "bf16xbf16")
    for num_shared in (0, 1, 2)
    for shape in SHAPES[: 3 if num_shared == 1 else 2]
]


def _load(major: int) -> host_code.HostCode:
    try:
        return host_code.load(major, download=True)
    except OracleUnavailable as error:
        pytest.skip(str(error))


def _sizes(shape: dict[str, int]) -> tuple[int, ...]:
    return tuple(shape[name] for name in ("num_experts", "max_tokens", "top_k", "hidden", "intermediate"))


@pytest.mark.slow
def test_sm100_views() -> None:
    calls = [
        ("get_symm_buffer_size_for_mega_moe", (1, *_sizes(shape), mma_type, "swiglu", num_shared))
        for mma_type, num_shared, shape in SM100
    ]
    sizes = _load(10).call([*calls, ("get_token_alignment_for_mega_moe", ())])
    assert sizes.pop() == buffers.TOKEN_ALIGNMENT
    assert sizes[0][0] == 7_361_024, "the contract's example"
    for (mma_type, num_shared, shape), (_, views) in zip(SM100, sizes):
        arguments: Any = {**shape, "num_shared_experts": num_shared}
        layout = buffers.sm100_layout(mma_type, **arguments)
        differences = view_differences(layout, views)
        assert differences == [], (mma_type, num_shared, shape)


@pytest.mark.slow
def test_sm90_views() -> None:
    calls = [("get_symm_buffer_size_for_sm90_mega_moe", (1, *_sizes(shape), True, "swiglu")) for shape in SHAPES]
    for shape, (_, views) in zip(SHAPES, _load(9).call(calls)):
        assert view_differences(buffers.sm90_layout(**shape), views) == [], shape


@pytest.mark.slow
def test_a_wrong_argument_of_the_host_code_is_a_reason() -> None:
    with pytest.raises(OracleUnavailable, match="upstream's host code ended with status"):
        _load(10).call([("get_symm_buffer_size_for_mega_moe", (1, 8, 384, 2, 1000, 512, "fp8xfp4", "swiglu", 0))])


def test_other_surroundings_have_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_code.platform, "machine", lambda: "aarch64")
    with pytest.raises(OracleUnavailable, match="on aarch64: the module is for Linux on x86_64"):
        host_code.load(10)
    monkeypatch.setattr(host_code.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(torch, "__version__", "2.11.0")
    with pytest.raises(OracleUnavailable, match=r"torch is 2\.11\.0; the module of 0\.1\.7 is built for 2\.13"):
        host_code.load(10)


def test_a_view_of_another_shape_stride_or_dtype_is_a_difference() -> None:
    layout = buffers.sm90_layout(**SHAPES[0])
    same = [
        View.of(tensor)
        for tensor in buffers.slice_buffer(layout, torch.empty(layout.nbytes, dtype=torch.int8)).values()
    ]
    assert view_differences(layout, same) == []
    x, x_sf = same[:2]
    for change in (
        {0: x._replace(shape=(385, 1024))},
        {1: x_sf._replace(stride=(1, 384))},
        {1: x_sf._replace(dtype=torch.int32)},
        {5: same[5]._replace(shape=(9, 7))},
    ):
        (index,) = change
        changed = [change.get(i, view) for i, view in enumerate(same)]
        (difference,) = view_differences(layout, changed)
        assert difference.startswith(f"{layout.view_names[index]}: ")
    assert view_differences(layout, [x._replace(dtype=torch.int8), *same[1:]]) == []
