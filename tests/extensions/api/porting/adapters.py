"""What the adapters for vLLM of langchain-community 0.4.2, llama-index-llms-vllm 0.8.0 and outlines 1.3.3 do
with it, one function each: the same imports, arguments and attributes.
"""

import os
import sys


def langchain() -> list[str]:
    from vllm import LLM, SamplingParams

    where = {"tensor_parallel_size": 1, "trust_remote_code": False, "dtype": "auto", "download_dir": None}
    client = LLM(model=os.environ["MODEL"], **where, swap_space=1)
    asked = {"n": 1, "best_of": None, "max_tokens": 4, "top_k": -1, "top_p": 1.0, "temperature": 1.0}
    asked |= {"presence_penalty": 0.0, "frequency_penalty": 0.0, "stop": None, "ignore_eos": True}
    asked |= {"use_beam_search": False, "logprobs": None}
    known = SamplingParams.__annotations__.keys()
    params = SamplingParams(**{name: value for name, value in asked.items() if name in known})
    with client:
        outputs = client.generate(["Hello", "you"], params)
    return [output.outputs[0].text for output in outputs]


def llama_index() -> list[str]:
    from vllm import LLM, SamplingParams

    where = {"tensor_parallel_size": 1, "trust_remote_code": False, "dtype": "auto", "download_dir": None}
    client = LLM(model=os.environ["MODEL"], **where)
    asked = {"temperature": 1.0, "max_tokens": 4, "n": 1, "frequency_penalty": 0.0, "presence_penalty": 0.0}
    asked |= {"best_of": None, "ignore_eos": True, "stop": None, "logprobs": None, "top_k": -1, "top_p": 1.0}
    with client:
        outputs = client.generate(["Hello"], SamplingParams(**asked))
    return [outputs[0].outputs[0].text]


def outlines() -> list[str]:
    from vllm import LLM
    from vllm.sampling_params import SamplingParams, StructuredOutputsParams

    def constrained(params: SamplingParams, **shape: object) -> SamplingParams:
        values = {name: getattr(params, name) for name in params.__struct_fields__}
        return SamplingParams(**{**values, "structured_outputs": StructuredOutputsParams(**shape)})

    with LLM(os.environ["MODEL"]) as model:
        model.get_tokenizer().apply_chat_template([{"role": "user", "content": "test"}])
        params = constrained(SamplingParams(max_tokens=4), regex="[a-c]{3}")
        chats = [[{"role": "user", "content": text}] for text in ("Hello", "you")]
        texts = [each.text for each in model.chat(messages=chats[0], sampling_params=params)[0].outputs]
        for batch in model.chat(messages=chats, sampling_params=params):
            texts += [sample.text for sample in batch.outputs]
        results = model.generate(prompts="Hello", sampling_params=constrained(params, regex="[d-f]{3}"))
        return texts + [completion.text for completion in results[0].outputs]


if __name__ == "__main__":
    for text in globals()[sys.argv[1]]():
        print(repr(text))
