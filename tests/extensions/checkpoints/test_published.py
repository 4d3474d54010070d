"""The configurations of much-used models, as they are published: each loads, or is refused in these words.

`python tests/extensions/checkpoints/test_published.py` writes down what the engine makes of them now, and
`python tests/test_docs.py` makes docs/models.md of that.
"""

import json
import tempfile
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers
from transformers import CONFIG_MAPPING

from nanovllm import LLM
from nanovllm.extensions.checkpoints import support

FILE = Path(__file__).parents[2] / "support/published_configs.json"
PUBLISHED = json.loads(FILE.read_text())["models"]
LISTS = "; through transformers: ", "; known without transformers: ", "; supported: "  # they grow


def outcome(config: dict[str, Any], folder: Path) -> tuple[dict[str, str], float]:
    """What becomes of a model with this config.json, on a GPU; and how many billions of weights it has."""
    (folder / "config.json").write_text(json.dumps(config))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a model that reads images its text part is read
            config, _ = LLM.open_model(str(folder), {"load_format": "dummy"})
        if config.hf_config.dtype is None:
            config = replace(config, dtype="bfloat16")
        model = support.build(config).model
    except ValueError as error:
        sentence = str(error).removeprefix(f"{folder}/config.json: ")
        for names in LISTS:
            sentence = sentence.partition(names)[0]
        return {"refused": sentence}, 0.0
    kinds, count, num_bytes = support.measure(model, config)
    theirs = getattr(model.lm_head, "model", None)
    found = {"class": type(theirs or model).__name__, "by": "transformers" if theirs else "this project"}
    return found | {"weights": f"{kinds}, {num_bytes / 1e9:.2f} GB"}, count / 1e9


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_configuration_loads_or_is_refused_in_these_words(tmp_path, name):
    expected = dict(PUBLISHED[name])
    config, billions = expected.pop("config"), expected.pop("billions")
    kind, needs_transformers = config["model_type"], expected.get("by") != "this project"
    if needs_transformers and int(transformers.__version__.split(".")[0]) < 5:
        pytest.skip("needs transformers 5")
    if needs_transformers and kind not in CONFIG_MAPPING and "is not known" not in str(expected):
        pytest.skip("this version of transformers does not know it")
    found, count = outcome(config, tmp_path)
    assert found == expected
    assert "refused" in found or count == pytest.approx(billions, rel=1e-3)


def test_most_of_sixty_load():
    """The others keep a state, or take more than 200 GB."""
    assert len(PUBLISHED) == 60
    assert sum("refused" not in entry for entry in PUBLISHED.values()) == 57


if __name__ == "__main__":
    lines = []
    for name, entry in PUBLISHED.items():
        with tempfile.TemporaryDirectory() as folder:
            found, _ = outcome(entry["config"], Path(folder))
        entry = {"billions": entry["billions"]} | found | {"config": entry["config"]}
        lines.append(f"{json.dumps(name)}: {json.dumps(entry)}")
    head, begin, _ = FILE.read_text().partition('"models": {\n')
    FILE.write_text(head + begin + ",\n".join(lines) + "\n}}\n")
