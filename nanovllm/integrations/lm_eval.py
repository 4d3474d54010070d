"""`python -m nanovllm.integrations.lm_eval`, see extensions/api/lm_eval.py."""

from nanovllm.extensions.api.lm_eval import NanoVLLM, cli_evaluate

__all__ = ["NanoVLLM"]

if __name__ == "__main__":
    cli_evaluate()
