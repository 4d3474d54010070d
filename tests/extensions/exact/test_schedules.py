"""A sequence has the same logits, bit for bit, whatever an engine is set to and what else it computes."""

import pytest
from cases import slow
from exact_schedules import compare

from tiny_checkpoints import make_checkpoint, one_thread  # noqa: F401

pytestmark = pytest.mark.usefixtures("no_forecast")

SHAPES = {
    "qwen3": dict(num_attention_heads=4, num_key_value_heads=2, head_dim=16),
    "qwen2": dict(hidden_size=60, num_attention_heads=6, num_key_value_heads=1, intermediate_size=100),
    "llama": dict(
        hidden_size=96, num_hidden_layers=1, num_attention_heads=3, num_key_value_heads=3, head_dim=20
    ),
}
KINDS = [
    ("qwen3", dict(dtype="float32")),
    ("qwen3", dict(dtype="bfloat16")),
    ("qwen3", dict(dtype="bfloat16", kv_cache_dtype="int8")),
    ("qwen2", dict(dtype="float32", kv_cache_dtype="bfloat16")),
    ("qwen2", dict(dtype="bfloat16")),
    ("llama", dict(dtype="float32")),
    ("llama", dict(dtype="float32", kv_cache_dtype="int8")),
]
ENGINES = 15  # of each kind, which compute 45 schedules: 315 in all
FEW = 7


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> dict[str, str]:
    return {
        name: str(make_checkpoint(tmp_path_factory.mktemp(name), name, seed=5, **shape))
        for name, shape in SHAPES.items()
    }


@pytest.mark.parametrize(
    "number, engines", [(0, FEW), (3, FEW), *(slow(number, ENGINES) for number in range(len(KINDS)))]
)
def test_a_sequence_in_any_company_has_the_logits_of_the_sequence_alone(checkpoints, number, engines):
    name, options = KINDS[number]
    counts, different = compare(checkpoints[name], engines, number, device="cpu", exact=True, **options)
    assert not different, f"{len(different)} of {counts['completions']}, first {different[0]}"
    assert counts["preemptions"] and all(counts[name] > 30 for name in ("chunks", "hits", "copies")), counts


@pytest.mark.parametrize("name", SHAPES)
def test_without_the_mode_the_same_schedules_change_logits(checkpoints, name):
    counts, different = compare(checkpoints[name], 3, 0, 12, device="cpu", dtype="float32")
    assert len(different) > counts["completions"] / 4
