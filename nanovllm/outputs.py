"""Results under the names that scripts for vLLM import."""

from nanovllm.text.results import Completion as CompletionOutput
from nanovllm.text.results import Result as RequestOutput

__all__ = ["CompletionOutput", "RequestOutput"]
