"""
What every test needs: no more threads than the small matrices can use, Ctrl-C even where the shell has it
ignored (as it has for what runs in the background), and `gpu` tests only on a GPU.
"""

import os

# Read when torch is imported, and inherited by ranks. Beside other tests (`-n`) a second thread only waits.
os.environ.setdefault("OMP_NUM_THREADS", "1" if "PYTEST_XDIST_WORKER" in os.environ else "2")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.pop("PYTEST_ADDOPTS", None)  # read by now; tests that a test runs take one process

import signal

import pytest
import torch

SHARE_OF_A_GPU = 5 << 30  # bytes
SMALL_KV_CACHE = 1 << 28  # bytes

signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def small_kv_cache():
    """Where tests do not say how many blocks there are there are few, since they look at each of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nanovllm.engine.memory.CPU_KV_CACHE_BYTES", SMALL_KV_CACHE)
        yield


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Random inputs are the same in every run, whatever ran before."""
    torch.manual_seed(0)


@pytest.fixture
def no_forecast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Admit whoever fits now, so that in a small KV cache some are preempted later."""
    from nanovllm.extensions.safety.admission import AdmissionControl

    monkeypatch.setattr(AdmissionControl, "_most_needed", lambda *_: 0)


def pytest_configure(config: pytest.Config) -> None:
    """Beside other tests (`-n`) an engine takes little of a GPU; a test that wants it whole is `alone`."""
    if hasattr(config, "workerinput") and torch.cuda.is_available():
        from nanovllm.engine import model_runner

        bytes_left = model_runner.bytes_left
        model_runner.bytes_left = lambda *args: min(bytes_left(*args), SHARE_OF_A_GPU)


def pytest_runtest_teardown(item: pytest.Item) -> None:
    """What a test has freed of a GPU is for the tests beside it."""
    if item.get_closest_marker("gpu") and torch.cuda.is_available():
        torch.cuda.empty_cache()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
