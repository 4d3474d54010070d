"""Extensions of a reader's own: what is refused, what good ones do, and what bad ones cannot break."""

import gc
import os
import shutil
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from pathlib import Path

import pytest
from block_pool import check_pool
from cases import slow

from nanovllm import LLM, SamplingParams
from nanovllm.engine.block_manager import PrefixCache
from nanovllm.engine.interfaces import LogitsProcessor, Observer
from nanovllm.engine.scheduler import Admission, SchedulingPolicy
from nanovllm.extensions.lab.adding import ExtensionError
from nanovllm.extensions.models import known
from nanovllm.kernels.kv_store import CacheLayout
from nanovllm.layers.attention import AttentionBackend
from nanovllm.models.qwen3 import Qwen3ForCausalLM
from tiny_checkpoints import edit_json, make_checkpoint, one_thread  # noqa: F401

ROOT = Path(__file__).parents[3]
OPTIONS = {
    "kvcache_block_size": 16,
    "num_kvcache_blocks": 24,
    "max_num_batched_tokens": 64,
    "dtype": "float32",
}
PROMPTS = [[5, 6, 7] * 12, [5, 6, 7] * 11 + [9, 9], [8] * 20]
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(make_checkpoint(tmp_path_factory.mktemp("lab") / "model"))


@pytest.fixture(scope="module")
def plain(model):
    with LLM(model, **OPTIONS) as llm:
        return tokens(llm)


def tokens(llm):
    return [result["token_ids"] for result in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


def make(base, **members):
    """An extension of a class with these members."""
    if base is LogitsProcessor:
        members = {"name": "mine", "wants": lambda self, params: True} | members
    if base is Observer:
        members = {"watches": True} | members
    return type("Mine", (base,), members)()


def fail(*_, **__):
    raise KeyError("mine")


# --- what is refused ---

SIMILAR = make(LogitsProcessor, aply=lambda self, logits, step: logits)
REFUSED = {
    "no interface": (object(), TypeError, "object is no extension"),
    "a number": (3, TypeError, "int is no extension"),
    "no module": ("nowhere.at:All", ValueError, "nowhere.at:All"),
    "no such name": ("nanovllm.engine.interfaces:Nobody", ValueError, "Nobody"),
    "misspelt": (SIMILAR, TypeError, "'aply', which nobody calls; is 'apply' meant"),
    "without wants": (type("Mine", (LogitsProcessor,), {"name": "mine"})(), TypeError, "no method 'wants'"),
    "without admits": (type("Mine", (Admission,), {})(), TypeError, "no method 'admits'"),
    "an argument too few": (
        make(Observer, after_step=lambda self: None),
        TypeError,
        "Mine.after_step must take",
    ),
    "without a name": (make(LogitsProcessor, name=""), ValueError, "name of its own"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_extension_is_refused_by_name(model, case):
    extension, error, message = REFUSED[case]
    with pytest.raises(error, match=message):
        LLM(model, extensions=[extension], **OPTIONS)


@pytest.mark.parametrize("base", [PrefixCache, SchedulingPolicy, AttentionBackend, CacheLayout])
def test_two_that_cannot_stand_together_are_refused_by_name(model, base):
    first, second = type("First", (base,), {})(), type("Second", (base,), {})()
    with pytest.raises(ValueError, match=f"First and Second cannot stand together.*{base.__name__}"):
        LLM(model, extensions=[first, second], **OPTIONS)


def test_two_of_one_class_are_refused_too(model):
    policy = type("Mine", (SchedulingPolicy,), {})
    with pytest.raises(ValueError, match="Mine and Mine cannot stand together"):
        LLM(model, extensions=[policy(), policy()], **OPTIONS)


def test_two_logits_processors_of_one_name_are_refused(model):
    with pytest.raises(ValueError, match="name of its own, not 'mine'"):
        LLM(model, extensions=[make(LogitsProcessor), make(LogitsProcessor)], **OPTIONS)


@pytest.mark.parametrize("value", [3, {}])
def test_the_option_is_a_list(model, value):
    with pytest.raises(ValueError, match="extensions must be None or a list"):
        LLM(model, extensions=value)


def test_with_several_ranks_an_extension_must_have_a_name(model):
    with pytest.raises(ValueError, match="with several ranks extensions must be .package.module:Name., got"):
        LLM(model, extensions=[make(Observer)], tensor_parallel_size=2, **OPTIONS)


# --- what good ones do ---


def test_extensions_are_applied_in_order_and_reach_every_request(model, plain):
    def ban_and_note(name, token_id, seen):
        def apply(self, logits, step):
            logits[:, token_id] = float("-inf")
            seen.append(name)
            return logits

        return make(LogitsProcessor, name=name, apply=apply)

    first, second = plain[0][0], plain[1][0]
    seen = []
    with LLM(
        model, extensions=[ban_and_note("b", first, seen), ban_and_note("a", second, seen)], **OPTIONS
    ) as llm:
        found = tokens(llm)
    assert seen[:4] == ["b", "a", "b", "a"]
    assert not any(token_id in (first, second) for completion in found for token_id in completion)


def test_a_field_of_ones_own_reaches_the_hooks(model):
    class Urgent(SchedulingPolicy):
        def order(self, waiting):
            return sorted(waiting, key=lambda seq: -(seq.sampling_params.extra or {}).get("priority", 0))

    class Order(Observer):
        watches = True

        def __init__(self):
            self.prompts = []

        def admitted(self, seq, hit):
            self.prompts.append(seq.prompt_token_ids[0])

    order = Order()
    with LLM(model, extensions=[Urgent(), order], max_num_seqs=1, **OPTIONS) as llm:
        params = [SamplingParams(max_tokens=2, extra={"priority": i}) for i in (1, 3, 2)]
        llm.generate([[10], [30], [20]], params, use_tqdm=False)
    assert order.prompts == [30, 20, 10]


def test_whoever_is_preempted_all_answers_stay_what_they_were(model, no_forecast):
    """Here the one with the fewest tokens, which the step may have counted before it lacked a block."""
    lost = []
    fewest = make(SchedulingPolicy, victim=lambda self, running: min(running, key=len))
    watcher = make(Observer, preempted=lambda self, seq: lost.append(len(seq)))
    options = OPTIONS | {"num_kvcache_blocks": 9, "enable_prefix_caching": False}
    params = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)
    found = []
    for extensions in ([], [fewest, watcher]):
        with LLM(model, extensions=extensions, **options) as llm:
            results = llm.generate(PROMPTS, params, use_tqdm=False)
            found.append([result["token_ids"] for result in results])
            check_pool(llm.scheduler.block_manager, [])
    assert found[0] == found[1] and lost


def test_an_order_may_be_a_generator(model, plain):
    def order(self, waiting):
        yield from sorted(waiting, key=len)

    with LLM(model, extensions=[make(SchedulingPolicy, order=order)], **OPTIONS) as llm:
        assert tokens(llm) == plain


def test_a_thread_may_use_its_engine_while_an_extension_of_another_is_called(model, plain):
    found = []

    def use_another(self, step):
        if not found:
            found.append(None)
            thread = threading.Thread(target=lambda: found.append(tokens(other)))
            thread.start()
            thread.join(60)

    quiet = make(Observer, started=lambda self, engine: None)
    with LLM(model, extensions=[quiet], **OPTIONS) as other:
        with LLM(model, extensions=[make(Observer, after_step=use_another)], **OPTIONS) as llm:
            assert tokens(llm) == plain
    assert found == [None, plain]


def test_a_snapshot_is_plain_data_of_its_own(model):
    taken = []
    watcher = make(Observer, after_step=lambda self, step: taken.append(self.engine.snapshot()))
    watcher.__class__.started = lambda self, engine: setattr(self, "engine", engine)
    with LLM(model, extensions=[watcher], **OPTIONS) as llm:
        tokens(llm)
        end = llm.snapshot()
    busiest = max(taken, key=lambda snapshot: len(snapshot["running"]))
    assert len(busiest["running"]) == 3 and set(busiest["block_tables"]) == set(busiest["running"])
    for block_id, ref_count in enumerate(busiest["ref_counts"]):
        assert ref_count == sum(table.count(block_id) for table in busiest["block_tables"].values())
        assert (block_id in busiest["free"]) == (ref_count == 0)
    assert (
        not end["running"] and sorted(end["free"]) == list(range(24)) and any(h != -1 for h in end["hashes"])
    )


def test_hooks_of_torch_see_a_layer_in_eager_steps(model):
    shapes = []

    def before_warmup(self, model):
        model.model.layers[1].mlp.register_forward_hook(lambda *_: shapes.append(1))

    with LLM(model, extensions=[make(Observer, before_warmup=before_warmup)], **OPTIONS) as llm:
        tokens(llm)
    assert len(shapes) == 20  # a step of prefill, and one for each token but the last


# --- what bad ones cannot break ---

BAD = {
    **{f"Observer.{hook}": make(Observer, **{hook: fail}) for hook in (
        "added", "admitted", "block", "launching", "after_step", "ended",
        "before_first_decode",
    )},
    **{f"LogitsProcessor.{hook}": make(LogitsProcessor, **{hook: fail}) for hook in (
        "wants", "read", "prepare", "apply", "hidden", "drawn",
    )},
    "a result that is missing": make(LogitsProcessor, apply=lambda self, logits, step: None),
    "a wrong shape": make(LogitsProcessor, apply=lambda self, logits, step: logits[:, :10]),
    "a wrong device": make(LogitsProcessor, apply=lambda self, logits, step: logits.to("meta")),
    "a bad message": make(LogitsProcessor, prepare=lambda self, sequences: 1, receive=fail),
    "PrefixCache.find": make(PrefixCache, find=fail),
    "PrefixCache.written": make(PrefixCache, written=fail),
    "Admission.admits": make(Admission, admits=fail),
    "no verdict": make(Admission, admits=lambda self, seq, hit, state: "yes"),
    "SchedulingPolicy.order": make(SchedulingPolicy, order=fail),
    "a stranger in the order": make(SchedulingPolicy, order=lambda self, waiting: [object()]),
    "one twice in the order": make(SchedulingPolicy, order=lambda self, waiting: [*waiting, *waiting]),
    "no tokens": make(SchedulingPolicy, chunk=lambda self, seq, num_tokens: 0),
    "too many tokens": make(SchedulingPolicy, chunk=lambda self, seq, num_tokens: num_tokens + 1),
    "AttentionBackend.prefill": make(AttentionBackend, prefill=fail),
    "half a decode": make(AttentionBackend, decode=lambda self, q, k, v, variant, step: q[:, :1]),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_a_bad_extension_is_an_error_that_names_it_and_the_engine_goes_on(model, case):
    with LLM(model, extensions=[BAD[case]], **OPTIONS) as llm:
        for _ in range(2):
            with pytest.raises(ExtensionError, match=r"Mine\.\w+ raised"):
                tokens(llm)
            llm.clear()
            assert llm.is_finished() and not llm.snapshot()["running"]
            check_pool(llm.scheduler.block_manager, [])


@pytest.mark.parametrize("hook", ["starting", "before_warmup", "started"])
def test_one_that_fails_at_the_start_ends_it(model, hook):
    with pytest.raises(ExtensionError, match=f"Mine.{hook} raised KeyError"):
        LLM(model, extensions=[make(Observer, **{hook: fail})], **OPTIONS)


def test_once_it_stops_failing_all_is_as_before(model, plain):
    def fail_at_first(self, step):
        self.count = getattr(self, "count", 0) + 1
        if self.count < 3:
            raise KeyError("mine")

    with LLM(model, extensions=[make(Observer, after_step=fail_at_first)], **OPTIONS) as llm:
        for _ in range(3):
            try:
                found = tokens(llm)
            except ExtensionError:
                continue
        assert found == plain


def test_what_a_request_must_not_ask_for_stays_a_value_error(model):
    def read(self, request, where):
        raise ValueError(f"{where}: not that")

    with LLM(model, extensions=[make(LogitsProcessor, read=read)], **OPTIONS) as llm:
        with pytest.raises(ValueError, match="sampling_params for prompts.0.: not that"):
            tokens(llm)


@pytest.mark.parametrize("call", ["step", "clear", "add_request", "abort"])
def test_one_that_calls_the_engine_from_inside_is_refused(model, call):
    arguments = {"add_request": ([1],), "abort": (0,)}.get(call, ())
    bad = make(Observer, after_step=lambda self, step: getattr(self.engine, call)(*arguments))
    bad.__class__.started = lambda self, engine: setattr(self, "engine", engine)
    with LLM(model, extensions=[bad], **OPTIONS) as llm:
        with pytest.raises(ExtensionError, match="Mine.after_step must not call the engine"):
            tokens(llm)
        assert llm.is_finished()


def test_one_that_sleeps_makes_the_engine_slow_and_nothing_else(model, plain):
    with LLM(
        model, extensions=[make(Observer, after_step=lambda self, step: time.sleep(0.001))], **OPTIONS
    ) as llm:
        assert tokens(llm) == plain


def test_what_one_writes_into_a_batch_is_computed_and_nothing_is_lost(model, plain):
    def launching(self, step):
        if step.batch.is_prefill and not self.is_done:
            step.batch.token_ids[:] = 11
            self.is_done = True

    with LLM(model, extensions=[make(Observer, launching=launching, is_done=False)], **OPTIONS) as llm:
        assert tokens(llm) != plain
        llm.clear()  # and what the cache holds is forgotten
        assert tokens(llm) == plain


STRANGER = """
    import torch
    from nanovllm.engine.interfaces import LogitsProcessor

    class Favourite(LogitsProcessor):
        name = "favourite"
        needs_whole = False

        def wants(self, params):
            return params.extra is not None

        def prepare(self, sequences):
            return [(seq.slot, ["favourite", None].index(seq.sampling_params.extra)) for seq in sequences]

        def allocate(self, num_slots, vocab_size, device):
            self.bias = torch.zeros(num_slots, device=device)

        def receive(self, message):
            for slot, is_plain in message:
                self.bias[slot] = 0.0 if is_plain else 1e4

        def apply(self, logits, step):
            if step.vocab_start <= 42 < step.vocab_start + logits.shape[1]:
                logits[:, 42 - step.vocab_start] += self.bias[step.slots].to(logits.dtype)
            return logits
"""


STRANGERS_SCRIPT = """
    import os
    from nanovllm import LLM, SamplingParams
    from nanovllm.extensions.lab.adding import ExtensionError

    if __name__ == "__main__":
        plain, mine, unknown = (
            SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, extra=extra)
            for extra in (None, "favourite", "another")
        )
        with LLM({model!r}, **{options}) as llm:
            def fails(error, *request):
                try:
                    llm.generate(*request, use_tqdm=False)
                except error:
                    return True

            for _ in range(3):
                results = llm.generate([[7, 8]] * 2, [mine, plain], use_tqdm=False)
                first, second = (result["token_ids"] for result in results)
                assert first == [42] * 6 and 42 not in second, (first, second)
                assert fails(ValueError, [[-1]])
                assert fails(ExtensionError, [[7], [8]], [mine, unknown])
                if not (child := os.fork()):
                    os._exit(not fails(RuntimeError, [[7]]))
                assert os.waitpid(child, 0)[1] == 0
            assert (llm.model_runner.graphs is None) == (llm.config.device == "cpu")
"""


@pytest.mark.parametrize(
    ("device", "ranks"), [slow("cpu", 1), slow("cpu", 2), pytest.param("cuda", 1, marks=pytest.mark.gpu)]
)
def test_a_strangers_package_works_on_every_rank_after_forks_and_failing_calls(
    model, tmp_path, device, ranks
):
    package = tmp_path / "stranger"
    package.mkdir()
    (package / "__init__.py").write_text(textwrap.dedent(STRANGER))
    options = OPTIONS | {
        "tensor_parallel_size": ranks,
        "device": device,
        "extensions": ["stranger:Favourite"],
    }
    script = textwrap.dedent(STRANGERS_SCRIPT).format(model=model, options=options)
    (tmp_path / "script.py").write_text(script)
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "script.py"], cwd=tmp_path, env=environ, check=True, timeout=300)


def test_an_engine_with_extensions_is_freed_when_it_is_deleted(model):
    watcher = make(Observer, started=lambda self, engine: setattr(self, "engine", engine))
    llm = LLM(model, extensions=[watcher], **OPTIONS)
    tokens(llm)
    gone = weakref.ref(llm)
    gc.collect()
    gc.disable()
    try:
        del llm
        assert gone() is None
    finally:
        gc.enable()


class Louder(Qwen3ForCausalLM):
    """Qwen3 whose logits are twice as large."""

    def compute_logits(self, hidden_states):
        return 2 * super().compute_logits(hidden_states)


def test_a_model_of_ones_own_is_built_for_its_architecture(model, tmp_path, monkeypatch):
    monkeypatch.setitem(known.MODELS, "LouderForCausalLM", None)  # gone after the test
    folder = shutil.copytree(model, tmp_path / "louder")
    edit_json(folder / "config.json", architectures=["LouderForCausalLM"])
    known.register_model("LouderForCausalLM", Louder)
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=0, ignore_eos=True)

    def logprob(path):
        with LLM(str(path), **OPTIONS) as llm:
            [result] = llm.generate([PROMPTS[0]], params, use_tqdm=False)
            [[logprob]] = (each.values() for each in result["logprobs"])
        return result["token_ids"], logprob.logprob

    (plain, before), (louder, after) = logprob(model), logprob(folder)
    assert plain == louder and after > before


def test_a_layout_and_a_back_end_of_ones_own_compute_every_layer(model, plain):
    stored, attended = [], []

    def store(k, v, *caches):
        stored.append(len(k))
        return CacheLayout.store(k, v, *caches)

    def decode(self, q, k, v, variant, step):
        attended.append(len(q))
        return AttentionBackend.decode(self, q, k, v, variant, step)

    layout = type("Mine", (CacheLayout,), {"store": staticmethod(store)})()
    with LLM(model, extensions=[layout, make(AttentionBackend, decode=decode)], **OPTIONS) as llm:
        assert tokens(llm) == plain
    assert len(stored) == 2 * 20 and attended == [3] * 2 * 19  # layers and steps
