"""Four beginnings, completed together."""

import os

from nanovllm import LLM, SamplingParams

prompts = ["A ship in the harbour", "The first rule of gardening", "Two trains leave", "My favourite number"]
sampling_params = SamplingParams(temperature=0.7, top_p=0.9)


def main():
    llm = LLM(model=os.environ["MODEL"])
    outputs = llm.generate(prompts, sampling_params)
    for output in outputs:
        prompt = output.prompt
        generated_text = output.outputs[0].text
        print(f"Prompt: {prompt!r}\nOutput: {generated_text!r}")


if __name__ == "__main__":
    main()
