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


EVERY_PATH = os.environ.get("MEGAMOE_EVERY_PATH") == "1"


def _is_of_another_path(item: pytest.Item) -> bool:
    """Whether a test takes a dispatch path that another one stands for."""
    from megamoe.oracle.dispatch_paths import PATHS, REPRESENTATIVE

    values = item.callspec.params.values() if hasattr(item, "callspec") else ()
    names = {name for name, path in PATHS.items() for value in values if value is path}
    names |= {value for value in values if isinstance(value, str) and value in PATHS}
    return bool(names) and not names & REPRESENTATIVE


def _leave_out(config: pytest.Config, items: list[pytest.Item], unwanted: list[pytest.Item]) -> None:
    config.hook.pytest_deselected(items=unwanted)
    deselected = set(unwanted)
    items[:] = [item for item in items if item not in deselected]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "differential" not in config.option.markexpr:
        _leave_out(config, items, [item for item in items if item.get_closest_marker("whole_suite")])
    if HAS_GPU:
        return
    if not EVERY_PATH:  # all of them take an hour of the interpreter, and two minutes of a GPU
        others = [i for i in items if _is_of_another_path(i) and not i.get_closest_marker("every_path")]
        _leave_out(config, items, others)
    skip = pytest.mark.skip(reason="needs a CUDA GPU (torch.cuda.is_available() is False)")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)
