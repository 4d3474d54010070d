"""The real model that tests use: the engine's built-in one.

`from smollm2 import smollm2_gguf` gives a test module the fixture.
"""

import hashlib
import os
from pathlib import Path

import pytest

from nanovllm.checkpoints.smollm2 import FILE, SHA256, fetch_smollm2


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """
    The file that NANOVLLM_TEST_GGUF names, or the one in the user's cache, downloaded if it is not there yet.
    Skips where it cannot be.
    """
    named = os.environ.get("NANOVLLM_TEST_GGUF")
    try:
        path = Path(named) if named else fetch_smollm2()
    except ValueError as error:
        pytest.skip(str(error))
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert digest == SHA256, f"{path} is not {FILE}: its SHA-256 is {digest}"
    return path
