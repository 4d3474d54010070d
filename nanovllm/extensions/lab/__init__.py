"""Your own idea as an object, and a place to try it.

    from nanovllm import LLM
    from nanovllm.engine.interfaces import LogitsProcessor

    class NeverSayNo(LogitsProcessor):
        name = "never_say_no"

        def wants(self, params):
            return True

        def apply(self, logits, step):
            logits[:, 1234] = float("-inf")
            return logits

    LLM("smollm2", extensions=[NeverSayNo()])

An extension derives from one interface of the engine or from several, and overrides the methods that it
needs: the engine's own extensions do nothing else. `docs/extending.md` has all of them in the order in which
a step meets them.

    adding.py     checks such objects and puts them among the engine's parts
    simulator.py  an engine whose model draws nothing and whose clock is a number: scheduling alone, 10,000
                  requests in seconds
    check.py      `python -m nanovllm.extensions.lab check scheduler mine.py`: the core's tests against a
                  class of yours, and a race with the one it replaces
"""
