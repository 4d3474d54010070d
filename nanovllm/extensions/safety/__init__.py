"""What happens when things go wrong, and what keeps them from going wrong.

- `recovery.py`: a step that fails leaves every other request as it was. The step is undone, the requests are
  queued again with the tokens they had, and halving the batch finds the one request that makes steps fail.
- `prompt_checks.py`, `sampling_checks.py`, `options.py`: what cannot be served is refused before anything
  has changed.
- `admission.py`: admission control (an `Admission`). A sequence is admitted if the KV cache is expected to
  suffice until all that run have ended, so that hardly any is preempted and computed twice; if requests do
  not need too much of a device's memory together; and one at a time after a step that failed.
- `options.py`, `sampling_checks.py`, `structured_checks.py`: what options and requests may say.
"""
