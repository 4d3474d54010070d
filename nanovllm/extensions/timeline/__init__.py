"""One run of the engine as one page: `LLM(model, timeline="run.html")`.

    lanes     a row for each sequence: when it waited, when its prompt was computed and how much of it the KV
              cache had, when it decoded, when it was preempted, when it ended
    curves    tokens a second, sequences in a step, blocks in use, time of the step on the device and on the
              host
    blocks    the KV cache at the step under the cursor, a cell for each block, in the colour of the sequence
              that wrote it

How it is made: recorder.py is an Observer. The engine tells it of requests, steps and blocks as they happen,
and it keeps lists of small numbers, never a picture: which step, which sequence, which block. page.js plays
the same events again in a browser, forwards to the step that is looked at, so the map of blocks at any step
costs no memory here. The page is one file that fetches nothing. `timeline="run.json"` writes the same steps
in the format of Chrome's traces, which Perfetto (ui.perfetto.dev) opens.

The file is written when the engine ends, by `exit()` or with Python.
"""
