"""The same long beginning with and without prefix caching: the texts are equal."""

import os

from nanovllm import LLM, SamplingParams
from nanovllm.distributed import cleanup_dist_env_and_memory

prefix = (
    "You keep the register of a small library. Its shelves are, from left to right: " + "novels, maps; " * 9
)
prompts = ["Where is the atlas? ", "Who has borrowed the oldest novel? ", "How many shelves are there? "]
generating_prompts = [prefix + prompt for prompt in prompts]
sampling_params = SamplingParams(temperature=0.0)


def main():
    regular_llm = LLM(model=os.environ["MODEL"], gpu_memory_utilization=0.4, enable_prefix_caching=False)
    outputs = regular_llm.generate(generating_prompts, sampling_params)
    regular_texts = [output.outputs[0].text for output in outputs]
    del regular_llm
    cleanup_dist_env_and_memory()

    cached_llm = LLM(model=os.environ["MODEL"], enable_prefix_caching=True, gpu_memory_utilization=0.4)
    cached_llm.generate(generating_prompts[0], sampling_params)  # so that the beginning is in the cache
    outputs = cached_llm.generate(generating_prompts, sampling_params)
    for output in outputs:
        print(f"Prompt: {output.prompt!r}\nOutput: {output.outputs[0].text!r}")
    same = regular_texts == [output.outputs[0].text for output in outputs]
    print(f"Same texts: {same}, from the cache: {min(output.num_cached_tokens for output in outputs)} tokens")


if __name__ == "__main__":
    main()
