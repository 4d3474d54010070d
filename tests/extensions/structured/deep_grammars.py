"""Compiles and follows the deepest grammars that are accepted, in a thread with a small stack.

`python tests/extensions/structured/deep_grammars.py FOLDER` says "survived": a stack that overflows would end
the process.
"""

import sys
import threading
from collections.abc import Callable
from typing import Any

from nanovllm import LLM, SamplingParams, StructuredOutputsParams
from nanovllm.extensions.structured.grammar import MAX_LEVELS


def schema(number: int, wrap: Callable[[dict], dict]) -> dict[str, Any]:
    """Its definitions refer each to the next."""
    definitions = {f"d{i}": wrap({"$ref": f"#/$defs/d{i + 1}"}) for i in range(number)}
    definitions[f"d{number}"] = {"type": "string"}
    return dict(json={"$defs": definitions, "$ref": "#/$defs/d0"})


def in_property(inner: dict) -> dict:
    return {"type": "object", "properties": {"a": inner}, "required": ["a"]}


def in_lists(inner: dict) -> dict:
    for _ in range(40):
        inner = {"prefixItems": [inner]}
    return inner


def rules(number: int, right: str, name: str = "r", root: str = "start:", sign: str = ":") -> dict[str, Any]:
    """Each rule refers to the next."""
    lines = [f"{name}{i}{sign} {right.format(f'{name}{i + 1}')}" for i in range(number)]
    return dict(grammar="\n".join([f"{root} {name}0", *lines, f'{name}{number}{sign} "b"']))


IN_TEXT, NOT, GBNF = '"a" {}', '~("x" {})', dict(root="root ::=", sign=" ::=")
WORKING = [
    schema(1000, in_property),
    rules(1000, IN_TEXT),
    rules(1000, IN_TEXT, **GBNF),
    rules(1000, NOT, name="R"),
]
DEEPEST = [schema(MAX_LEVELS // 41 - 1, in_lists), rules(MAX_LEVELS // 3 - 1, NOT, name="R")]
DEEPEST.append(rules(MAX_LEVELS - 4, "{}"))
TOO_DEEP = [schema(MAX_LEVELS // 3, in_property), rules(MAX_LEVELS, IN_TEXT), rules(2000, IN_TEXT, **GBNF)]


def error_of(llm: LLM, fields: dict[str, Any]) -> str:
    """Why a request is refused; empty if it is answered."""
    params = SamplingParams(0, 3, ignore_eos=True, structured_outputs=StructuredOutputsParams(**fields))
    try:
        results = llm.generate([[1]] * 3, params, use_tqdm=False)
    except ValueError as error:
        return str(error)
    assert all(len(result["token_ids"]) == 3 for result in results)
    return ""


def check(llm: LLM) -> None:
    for fields in WORKING:
        assert not (error := error_of(llm, fields)), error
    for fields in DEEPEST:
        assert "must have at most" not in (error := error_of(llm, fields)), error
    for fields in TOO_DEEP:
        assert "must have at most" in error_of(llm, fields)
    print("survived")


def main() -> None:
    with LLM(sys.argv[1], device="cpu", num_kvcache_blocks=20, enforce_eager=True) as llm:
        threading.stack_size(512 * 2**10)
        thread = threading.Thread(target=check, args=(llm,))
        thread.start()
        thread.join()


if __name__ == "__main__":
    main()
