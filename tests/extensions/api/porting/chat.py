"""One conversation, then ten, then one through another template; options collected in EngineArgs."""

from dataclasses import asdict

from nanovllm import LLM, EngineArgs
from nanovllm.extensions.api.argparse_utils import FlexibleArgumentParser

conversation = [
    {"role": "system", "content": "You answer in one sentence."},
    {"role": "user", "content": [{"type": "text", "text": "Good morning!"}]},
    {"role": "assistant", "content": "Good morning, what can I do?"},
    {"role": "user", "content": "Tell me about lighthouses."},
]
TEMPLATE = "{% for message in messages %}{{ message['role'] }}> {{ message['content'] }}\n{% endfor %}"


def print_outputs(outputs):
    for output in outputs:
        print(f"Prompt: {output.prompt!r}\nOutput: {output.outputs[0].text!r}")


def main(engine_args):
    llm = LLM(**asdict(engine_args))
    sampling_params = llm.get_default_sampling_params()
    sampling_params.max_tokens = 8
    print_outputs(llm.chat(conversation, sampling_params, use_tqdm=False))
    print_outputs(llm.chat([conversation for _ in range(10)], sampling_params=sampling_params, use_tqdm=True))
    options = dict(chat_template=TEMPLATE, chat_template_content_format="auto", add_generation_prompt=False)
    print_outputs(llm.chat(messages=conversation, sampling_params=sampling_params, **options))


if __name__ == "__main__":
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    main(EngineArgs.from_cli_args(parser.parse_args()))
