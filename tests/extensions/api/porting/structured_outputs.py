"""Answers out of a list, by a regular expression, as JSON and by a grammar."""

import json
import os

from nanovllm import LLM, SamplingParams
from nanovllm.sampling_params import StructuredOutputsParams

MAX_TOKENS = 60
structured_outputs_params_choice = StructuredOutputsParams(choice=["Sunny", "Rainy"])
sampling_params_choice = SamplingParams(structured_outputs=structured_outputs_params_choice)
structured_outputs_params_regex = StructuredOutputsParams(regex=r"[a-z]{3}-[0-9]{2}\n")
sampling_params_regex = SamplingParams(
    structured_outputs=structured_outputs_params_regex, stop=["\n"], max_tokens=MAX_TOKENS
)
schema = {
    "type": "object",
    "properties": {
        "boat": {"enum": ["sail", "motor"]},
        "crew": {"type": "integer", "maximum": 99, "minimum": 1},
    },
    "required": ["boat", "crew"],
    "additionalProperties": False,
}
structured_outputs_params_json = StructuredOutputsParams(json=schema, disable_any_whitespace=True)
sampling_params_json = SamplingParams(
    structured_outputs=structured_outputs_params_json, max_tokens=MAX_TOKENS
)
structured_outputs_params_grammar = StructuredOutputsParams(grammar='start: "turn " ("left" | "right")')
sampling_params_grammar = SamplingParams(
    structured_outputs=structured_outputs_params_grammar, max_tokens=MAX_TOKENS
)


def generate_output(prompt: str, sampling_params: SamplingParams, llm: LLM) -> str:
    outputs = llm.generate(prompt, sampling_params)
    return outputs[0].outputs[0].text


def main():
    llm = LLM(model=os.environ["MODEL"], max_model_len=200)
    print("Choice:", generate_output("The weather is ", sampling_params_choice, llm))
    print("Regex:", generate_output("My number plate is ", sampling_params_regex, llm))
    print("JSON:", json.loads(generate_output("A boat as JSON: ", sampling_params_json, llm))["boat"])
    print("Grammar:", generate_output("At the corner ", sampling_params_grammar, llm))


if __name__ == "__main__":
    main()
