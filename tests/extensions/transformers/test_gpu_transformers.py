"""What transformers builds, on a GPU: decode steps are recorded as CUDA graphs, and tokens are its own."""

import warnings

import pytest
import torch
import transformers
from published_configs import PUBLISHED, make_published
from transformers import CONFIG_MAPPING
from transformers_checkpoints import make

from nanovllm import LLM, SamplingParams
from nanovllm.checkpoints.folder import read_json
from nanovllm.extensions.transformers.config import VERIFIED
from nanovllm.extensions.transformers.model import TransformersForCausalLM
from tiny_checkpoints import assert_greedy, load_reference

pytestmark = pytest.mark.gpu

# Before, its experts' tokens were counted on the host; attention went through no function; a number was
# copied from the host, and tokens beyond a table were looked up in it.
RECENT = {"aria_text", "codegen", "gptj", "gemma3n_text"}
ON_THE_HOST = {
    "gpt_oss",
    "phimoe",
}  # torch sorts the tokens of float32 experts there; a scale is copied from there
PROMPTS = [[1, 2, 3], [*range(40)], [7] * 17, [*range(39), 5]]
OPTIONS = dict(dtype="float32", kvcache_block_size=16, num_kvcache_blocks=60, model_impl="transformers")


def is_recent() -> bool:
    return tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 23)


def assert_answers(folder) -> bool:
    """Returns whether there were CUDA graphs."""
    reference = load_reference(folder)
    with LLM(str(folder), **OPTIONS) as llm:
        results = llm.generate(PROMPTS, SamplingParams(0, 20, True), use_tqdm=False)
        has_graphs = llm.model_runner.graphs is not None
    for prompt, result in zip(PROMPTS, results, strict=True):
        assert_greedy(reference, prompt, result["token_ids"])
    return has_graphs


@pytest.mark.parametrize("kind", VERIFIED)
def test_decode_steps_are_recorded_and_right(tmp_path, kind):
    if kind not in CONFIG_MAPPING or kind in RECENT and not is_recent():
        pytest.skip("this version of transformers does not have it, or not so that it can be built")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*without CUDA graphs.*")
        if kind not in ON_THE_HOST:
            assert assert_answers(make(kind, tmp_path))
            return
    with pytest.warns(UserWarning, match="without CUDA graphs"):
        assert not assert_answers(make(kind, tmp_path))


@pytest.mark.parametrize("name", PUBLISHED)
def test_decode_steps_are_recorded_and_right_with_configurations_as_published(tmp_path, name):
    folder = make_published(name, tmp_path)
    if read_json(folder / "config.json")["model_type"] in RECENT and not is_recent():
        pytest.skip("this version of transformers does not have it so that it can be built")
    assert assert_answers(folder)


def test_a_step_that_cannot_be_recorded_is_run_without_graphs(tmp_path, monkeypatch):
    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        input_ids.sum().item()
        return own(self, input_ids, positions)

    own = TransformersForCausalLM.forward
    monkeypatch.setattr(TransformersForCausalLM, "forward", forward)
    with pytest.warns(UserWarning, match="without CUDA graphs"):
        assert not assert_answers(make("llama", tmp_path))
    assert torch.rand(9, device="cuda").unique().numel() == 9  # a failed capture is not in the user's way
