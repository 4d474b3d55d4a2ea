"""Where the suite runs: on the GPU when there is one, in Triton's CPU interpreter when there is none."""

import os

import torch

torch.set_num_threads(1)  # the suite runs in parallel processes: one core each

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # read once, when triton is first imported

import pytest  # noqa: E402

if not HAS_GPU:
    from megamoe.oracle import interpreter

    interpreter.install()


@pytest.fixture(scope="session")
def device() -> str:
    """The device the kernels run on in this session."""
    return "cuda" if HAS_GPU else "cpu"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if HAS_GPU:
        return
    skip = pytest.mark.skip(reason="needs a CUDA GPU (torch.cuda.is_available() is False)")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)
