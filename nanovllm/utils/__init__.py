"""Small tools, and what scripts for vLLM import from here: extensions/api brings it."""
