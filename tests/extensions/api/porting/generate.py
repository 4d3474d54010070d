"""Engine and sampling options from the command line, and what the checkpoint recommends for all others."""

from nanovllm import LLM, EngineArgs
from nanovllm.extensions.api.argparse_utils import FlexibleArgumentParser


def create_parser():
    parser = FlexibleArgumentParser()
    EngineArgs.add_cli_args(parser)
    parser.set_defaults(model="no-such-model")
    group = parser.add_argument_group("Sampling parameters")
    group.add_argument("--max-tokens", type=int)
    group.add_argument("--temperature", type=float)
    group.add_argument("--top-p", type=float)
    return parser


def main(args: dict):
    wanted = {name: args.pop(name) for name in ("max_tokens", "temperature", "top_p")}
    llm = LLM(**args)
    sampling_params = llm.get_default_sampling_params()
    for name, value in wanted.items():
        if value is not None:
            setattr(sampling_params, name, value)
    for output in llm.generate(["Once upon a time", "The sea is"], sampling_params):
        print(f"Prompt: {output.prompt!r}\nOutput: {output.outputs[0].text!r}")


if __name__ == "__main__":
    main(vars(create_parser().parse_args()))
