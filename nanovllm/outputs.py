"""Results under the names that scripts for vLLM import."""

from nanovllm.extensions.text.results import Completion as CompletionOutput
from nanovllm.extensions.text.results import Result as RequestOutput

__all__ = ["CompletionOutput", "RequestOutput"]
