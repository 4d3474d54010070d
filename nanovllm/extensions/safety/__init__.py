"""What happens when things go wrong, and what keeps them from going wrong.

- `recovery.py`: a step that fails leaves every other request as it was. The step is undone, the requests are
  queued again with the tokens they had, and halving the batch finds the one request that makes steps fail.
- `isolation.py`: how many may run meanwhile (an `Admission`).
- `prompt_checks.py`, `sampling_checks.py`, `options.py`: what cannot be served is refused before anything
  has changed.
- `forecast.py`: admission control. A sequence is admitted if the KV cache is expected to suffice until all
  that run have ended, so that hardly any is preempted and computed twice.
- `budget.py`: requests wait that would need too much of a device's memory together (an `Admission`).
- `options.py`, `sampling_checks.py`, `structured_checks.py`: what options and requests may say.
"""
