"""The real model that tests use: the engine's built-in one.

`from smollm2 import smollm2_gguf` gives a test module the fixture.
"""

import hashlib
import json
import os
from pathlib import Path

import pytest
from gguf_files import placed
from open_checkpoints import open_checkpoint
from safetensors.torch import save_file

from nanovllm.extensions.checkpoints.smollm2 import FILE, SHA256, fetch_smollm2


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


@pytest.fixture(scope="session")
def smollm2_folder(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model as a folder, its weights dequantised to bfloat16."""
    folder = tmp_path_factory.mktemp("smollm2")
    checkpoint = open_checkpoint(smollm2_gguf)
    tensors = {tensor.name: tensor[:].bfloat16().contiguous() for tensor in placed(checkpoint)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer = checkpoint.tokenizer()
    tokenizer.save_pretrained(folder)
    raw = checkpoint.hf_config().raw | {
        "dtype": "bfloat16",
        "eos_token_id": list(checkpoint.eos_token_ids(tokenizer)),
    }
    del raw["quantization_config"]
    (folder / "config.json").write_text(json.dumps(raw))
    return folder
