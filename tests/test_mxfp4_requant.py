"""FP8 blocks to MXFP4: the kernel against the reference, the reference against SGLang's own function, both by bytes."""

from collections.abc import Callable

import pytest
import torch

from megamoe import formats
from megamoe.kernels.mxfp4_requant import mxfp4_requant
from megamoe.oracle.definitions import execute_definitions
from megamoe.oracle.downloads import OracleUnavailable, unpacked_wheel
from megamoe.oracle.metrics import assert_bytes_equal
from megamoe.oracle.reference.mxfp4_requant import mxfp4_requant_reference
from megamoe.oracle.reference.quantizers import BlockFormat, dequantize_weight

BLOCK = (128, 128)
MXFP4 = BlockFormat("e2m1", "ue8m0", 1, 32)
QUANTIZATION = "sglang/srt/layers/quantization"


def _weight(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    """Normal E4M3 values of every size, each 16th row of zeros of both signs, some groups of one value."""
    generator = torch.Generator().manual_seed(seed)
    w = 60 * torch.randn(rows, columns, generator=generator)
    w *= torch.exp2(torch.randint(-8, 3, (rows, 1), generator=generator).float())
    w[::16] = torch.where(torch.rand(columns, generator=generator) < 0.5, 0.0, -0.0)
    w[1, :32] = -0.015625
    return formats.encode_e4m3(w)


def _scales(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.exp2(torch.rand(-(-rows // 128), -(-columns // 128), generator=generator) * 24 - 20)


def _every_exponent() -> tuple[torch.Tensor, torch.Tensor]:
    """Groups whose amax/6 takes every BF16 mantissa in the binades around which the logarithm's step changes, in BF16's
    subnormal ones and in the last: a scale per row."""
    sizes = (0, 1, 2, 3, 4, 7, 8, 15, 16, 31, 32, 63, 64)
    binades = sorted({*range(-131, -124), *(-size for size in sizes), *sizes, 121})
    mantissas = torch.arange(128).repeat_interleave(2) / 128 + 1
    amax = (mantissas * 6)[None, :] * torch.exp2(torch.tensor(binades).float())[:, None]
    # 6·d itself is no BF16 in general: both neighbours, so that every d is met after rounding.
    amax = amax.view(torch.int32).add(torch.tensor([-(1 << 15), 1 << 15]).repeat(128)).view(torch.float32)
    scale = amax.flatten()[:, None] / 448
    weight = torch.full((scale.numel(), 32), 448.0)
    weight[:, 1:8] = torch.tensor([-448.0, 30.0, -30.0, 0.0, 75.0, 112.0, 1.0])
    return formats.encode_e4m3(weight), scale.contiguous()


@pytest.fixture(scope="module")
def sglang() -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """`quantize_block_fp8_weight_to_mxfp4` as the wheel of 0.5.19 has it, without the package around it."""
    try:
        folder = unpacked_wheel("sglang==0.5.19", None, download=True)
        util = execute_definitions(
            folder / QUANTIZATION / "mxfp4_tensor.py", ["MXFP4QuantizeUtil"], {"torch": torch, "Optional": list}
        )
        namespace = {"torch": torch, "MXFP4QuantizeUtil": util.MXFP4QuantizeUtil, "List": list, "Tuple": tuple}
        names = ["_MXFP4QuantizedData", "block_quant_dequant", "quantize_block_fp8_weight_to_mxfp4"]
        module = execute_definitions(folder / QUANTIZATION / "fp8_utils.py", names, namespace)
    except OracleUnavailable as error:
        pytest.skip(str(error))
    return module.quantize_block_fp8_weight_to_mxfp4


CASES = {
    "blocks": (_weight(256, 384), _scales(256, 384), BLOCK),
    "tails": (_weight(130, 160, 1), _scales(130, 160, 1), BLOCK),
    "every mantissa": (*_every_exponent(), (1, 32)),
}


@pytest.mark.parametrize("case", CASES)
def test_the_reference_is_sglangs(case: str, sglang: Callable[..., tuple[torch.Tensor, torch.Tensor]]) -> None:
    weight, scale, block = CASES[case]
    q, sf = sglang(weight, scale, list(block))
    ours = mxfp4_requant_reference(weight, scale, block, exact=False)
    assert_bytes_equal(ours[0], q.view(torch.uint8), "elements")
    assert_bytes_equal(ours[1], sf.view(torch.uint8), "scales")


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_the_kernel_is_the_reference(case: str, exact: bool, device: str) -> None:
    weight, scale, block = CASES[case]
    q, sf = mxfp4_requant(weight.to(device), scale.to(device), block, exact=exact)
    expected = mxfp4_requant_reference(weight, scale, block, exact=exact)
    assert_bytes_equal(q.cpu(), expected[0], "elements")
    assert_bytes_equal(sf.cpu(), expected[1], "scales")


@pytest.mark.parametrize("exact", [False, True])
def test_known_codes(exact: bool, device: str) -> None:
    """Ties go down, every zero and whatever is not positive has bit 3, low nibble = even column."""
    values = torch.zeros(1, 32)
    values[0, :12] = torch.tensor([0.0, -0.0, 0.25, 0.28125, -0.1015625, -0.25, 0.1015625, 5, 5.5, 2.5, 6, -6])
    q, sf = mxfp4_requant(formats.encode_e4m3(values).to(device), torch.ones(1, 1, device=device), BLOCK, exact=exact)
    assert formats.unpack_e2m1(q.cpu())[0, :12].tolist() == [8, 8, 0, 1, 8, 8, 0, 6, 7, 4, 7, 15]
    assert sf.item() == 127


def test_the_exponents_slip_and_the_exact_ones_do_not(device: str) -> None:
    """amax/6 1 % above 2^-20: upstream's byte is one less, its largest value saturates."""
    weight = torch.full((1, 32), 448.0).to(torch.float8_e4m3fn).to(device)
    scale = torch.tensor([[1.01 * 6 * 2**-20 / 448]], device=device)
    q, sf = mxfp4_requant(weight, scale, BLOCK, exact=False)
    assert (sf.item(), formats.unpack_e2m1(q.cpu())[0, 0].item()) == (107, 7)
    q, sf = mxfp4_requant(weight, scale, BLOCK, exact=True)
    assert (sf.item(), formats.unpack_e2m1(q.cpu())[0, 0].item()) == (108, 5)


@pytest.mark.parametrize("exact", [False, True])
def test_the_round_trip_is_within_its_error(exact: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    weight = formats.encode_e4m3(100 * torch.randn(128, 256, generator=generator))
    scale = torch.tensor([[0.0009765625, 0.0013]])
    q, sf = mxfp4_requant_reference(weight, scale, BLOCK, exact=exact)
    expected = dequantize_weight(weight, scale, BlockFormat("e4m3", "fp32", *BLOCK))
    error = (dequantize_weight(q, sf, MXFP4) - expected).norm() / expected.norm()
    assert 0.08 < error < 0.15


@pytest.mark.filterwarnings("ignore:.*encountered in multiply:RuntimeWarning")
@pytest.mark.parametrize("exact", [False, True])
def test_numbers_that_are_none_stay_visible_and_alone(exact: bool, device: str) -> None:
    weight = torch.full((3, 64), 7.0).to(torch.float8_e4m3fn)
    weight.view(torch.uint8)[0, 3] = 0x7F
    scale = torch.tensor([[1.0, 1.0], [1.0, 1.0], [1.0, 3e38]])
    q, sf = mxfp4_requant(weight.to(device), scale.to(device), (1, 32), exact=exact)
    expected = mxfp4_requant_reference(weight, scale, (1, 32), exact=exact)
    assert_bytes_equal(q.cpu(), expected[0], "elements")
    assert_bytes_equal(sf.cpu(), expected[1], "scales")
    assert (sf.cpu() == 255).tolist() == [[True, False], [False, False], [False, True]]
    assert (formats.unpack_e2m1(q.cpu())[0, :32] & 7 == 0).all()
