"""
What every test needs: no more threads than the small matrices can use, Ctrl-C even where the shell has it
ignored (as it has for what runs in the background), and `gpu` tests only on a GPU.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "2")  # read when torch is imported, and inherited by ranks
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import signal

import pytest
import torch

SHARE_OF_A_GPU = 5 << 30  # bytes

signal.signal(signal.SIGINT, signal.default_int_handler)


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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
