"""What the page shows is what happened."""

import json
import random
import shutil

import pytest
import recorded_graphs

from nanovllm import LLM, SamplingParams
from nanovllm.engine.interfaces import Observer
from nanovllm.extensions.timeline import recorder
from tiny_checkpoints import make_checkpoint, one_thread  # noqa: F401

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
OPTIONS = {
    "kvcache_block_size": 16,
    "num_kvcache_blocks": 12,
    "max_num_batched_tokens": 64,
    "dtype": "float32",
}
HOSTILE = "</script><script>document.title = 'run'</script><!-- <b>"


class Snapshots(Observer):
    """What the engine holds when each step is launched. Before this one the youngest is preempted."""

    watches = True

    def __init__(self, preempt_before=None):
        self.taken, self.preempt_before = [], preempt_before

    def started(self, engine):
        self.engine = engine

    def launching(self, step):
        self.taken.append(self.engine.snapshot())

    def after_step(self, step):
        if len(self.taken) == self.preempt_before:
            self.engine.scheduler.preempt(self.engine.scheduler.running[-1])


def run(folder, ending):
    """A run in which prompts are shared, computed in chunks and preempted; and what was so at each step."""
    rng, snapshots = random.Random(1), Snapshots(preempt_before=12)
    common = [*HOSTILE.encode()][:40]
    prompts = [common + [rng.randrange(97, 123) for _ in range(rng.randint(1, 60))] for _ in range(6)] + [
        [97]
    ]
    params = [SamplingParams(temperature=0, max_tokens=rng.randint(1, 40), ignore_eos=True) for _ in prompts]
    options = OPTIONS | {"timeline": folder / f"run{ending}", "extensions": [snapshots]}
    with LLM(str(make_checkpoint(folder / "<b>model")), **options) as llm:
        results = llm.generate(prompts, params, use_tqdm=False)
        assert llm.scheduler.num_preemptions and any(result["num_cached_tokens"] for result in results)
    return folder / f"run{ending}", snapshots.taken, results


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    return run(tmp_path_factory.mktemp("timeline"), ".html")


def data_of(page):
    text = page.read_text()
    begin = text.index('type="application/json">') + len('type="application/json">')
    return json.loads(text[begin : text.index("</script>", begin)])


def test_the_page_is_one_file_that_fetches_nothing(page):
    text = page[0].read_text()
    assert "http:" not in text.replace("http://www.w3.org", "") and "https:" not in text
    assert text.count("<script") == 2, "text of prompts opens no element"


def test_spans_say_what_each_sequence_did_in_every_step(page):
    _, snapshots, results = page
    data = data_of(page[0])
    assert len(data["steps"]) == len(snapshots)
    assert [sequence["preempted"] for sequence in data["sequences"] if sequence["preempted"]] == [[12]]
    for sequence, result in zip(data["sequences"], results, strict=True):
        assert sequence["tokens"] == result.prompt_token_ids + result["token_ids"]
        assert sequence["spans"][0][0] == "waiting" or sequence["arrived"] == sequence["spans"][0][1]
        computed = 0
        for kind, first, last, *rest in sequence["spans"]:
            if kind == "waiting":
                continue
            before, found = rest[0], rest[2] if kind == "prefill" else 0
            if first in sequence["preempted"] or not computed:
                assert kind == "prefill" and before == found
                assert computed or found == result["num_cached_tokens"]
            else:
                assert before == computed and not found
            computed = before + (rest[1] if kind == "prefill" else last - first + 1)
        # The last token is drawn, and never computed.
        assert computed == len(sequence["tokens"]) - 1
        assert sequence["first"] is not None and sequence["ended"] >= sequence["first"]


def test_a_trace_has_every_step_and_sequence(tmp_path):
    file, snapshots, results = run(tmp_path, ".json")
    events = json.loads(file.read_text())["traceEvents"]
    device = [event for event in events if event["ph"] == "X" and (event["pid"], event["tid"]) == (0, 0)]
    assert len(device) == len(snapshots) and all(event["dur"] >= 0 for event in device)
    assert len({event["tid"] for event in events if event["ph"] == "X" and event["pid"] == 1}) == len(results)
    assert {event["args"]["name"] for event in events if event["ph"] == "M"} == {
        "engine", "sequences", "device", "host",
    }  # fmt: skip


@pytest.mark.parametrize("value, message", [("run.txt", "html"), ("nowhere/run.html", "folder"), (3, "path")])
def test_a_file_that_cannot_be_written_is_refused(tmp_path, monkeypatch, value, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=f"timeline.*{message}"):
        LLM("smollm2", timeline=value)


def test_what_cannot_be_written_in_the_end_is_a_warning(tmp_path):
    folder = tmp_path / "out"
    folder.mkdir()
    with LLM(str(make_checkpoint(tmp_path / "model")), **OPTIONS, timeline=folder / "run.html") as llm:
        llm.generate([[1, 2]], SamplingParams(max_tokens=2), use_tqdm=False)
        shutil.rmtree(folder)
        with pytest.warns(UserWarning, match="timeline was not written"):
            llm.exit()


def test_with_graphs_and_a_step_in_flight_everything_is_recorded_at_its_step(tmp_path, monkeypatch):
    snapshots = Snapshots()
    options = OPTIONS | {"timeline": tmp_path / "run.html", "extensions": [snapshots]}
    params = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in (9, 5, 12)]
    with LLM(str(make_checkpoint(tmp_path / "model")), **options) as llm:
        recorded_graphs.install(llm, monkeypatch)
        llm.generate([[97, 98, 99] * 7, [97, 98] * 3, [100]], params, use_tqdm=False)
    data = data_of(tmp_path / "run.html")
    assert len(data["steps"]) == len(snapshots.taken)
    special = [step[-1] for step in data["steps"] if step[-1]]
    assert special[:2] == ["warm-up", "capture"]
    assert all(
        begin <= end and host >= 0 and device >= 0 for _, begin, end, host, device, *_ in data["steps"]
    )
    for sequence, wanted in zip(data["sequences"], params, strict=True):
        decoded = sum(last - first + 1 for kind, first, last, *_ in sequence["spans"] if kind == "decode")
        # The step in flight when a sequence ended may have computed one token more, which was thrown away.
        assert decoded - (wanted.max_tokens - 1) in (0, 1)
        tables = [each["block_tables"].get(sequence["id"], []) for each in snapshots.taken]
        number = data["sequences"].index(sequence)
        taken = [event[2] for event in data["events"] if event[1] == "taken" and event[3] == number]
        assert taken == max(tables, key=len)


@pytest.mark.parametrize("bound", [{"MAX_STEPS": 5}, {"MAX_EVENTS": 7}, {"MAX_COMPUTED": 70}])
def test_what_is_recorded_has_an_end(tmp_path, monkeypatch, bound):
    for name, value in bound.items():
        monkeypatch.setattr(recorder, name, value)
    options = OPTIONS | {"timeline": tmp_path / "run.html", "max_num_seqs": 2}
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    with LLM(str(make_checkpoint(tmp_path / "model")), **options) as llm:
        llm.generate([[97 + i] * 20 for i in range(4)], params, use_tqdm=False)
    data = data_of(tmp_path / "run.html")
    last = len(data["steps"]) - 1
    assert data["cut"] == f"recorded up to step {last + 1}" and last < 40
    assert len(data["sequences"]) == 2, "the others had only waited"
    assert all(event[0] <= last + 1 for event in data["events"])
    for sequence in data["sequences"]:
        assert sequence["first"] <= last and sequence["ended"] <= last


@pytest.fixture
def browser():
    webdriver = pytest.importorskip("selenium.webdriver")
    if CHROMIUM is None or shutil.which("chromedriver") is None:
        pytest.skip("needs chromium and chromedriver")
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in "--headless=new --no-sandbox --disable-gpu --disable-background-networking".split():
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options, webdriver.ChromeService(shutil.which("chromedriver")))
    driver.set_window_size(1400, 900)
    yield driver
    driver.quit()


def expected_map(snapshot, blocks_shown):
    """By block, the sequences whose tables have it."""
    holders = [[] for _ in range(blocks_shown)]
    for seq_id, table in sorted(snapshot["block_tables"].items()):
        for block_id in table:
            holders[block_id].append(seq_id)
    return holders


@pytest.mark.browser
def test_a_browser_shows_the_blocks_of_every_step(page, browser):
    file, snapshots, results = page
    browser.get(f"file://{file}")
    ask = browser.execute_script
    assert ask("return timeline.numLanes()") == len(results)
    assert browser.title == "<b>model", "text is shown, never run"
    shown = data_of(file)["num_blocks_shown"]
    rng = random.Random(2)
    for step in rng.sample(range(len(snapshots)), 10):  # in any order
        ask(f"timeline.goTo({step})")
        snapshot, found = snapshots[step], ask("return timeline.map()")
        assert [holders for _, holders, _ in found] == expected_map(snapshot, shown)
        for block_id, (kind, holders, _) in enumerate(found):
            assert (kind in ("cached", "free")) == (block_id in snapshot["free"])
            assert (kind == "shared") == (snapshot["ref_counts"][block_id] > 1)
            if len(holders) == 1:
                assert (kind == "closed") == (snapshot["hashes"][block_id] != -1)
            if kind == "cached":
                assert snapshot["hashes"][block_id] != -1
    assert [entry for entry in browser.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")] == []


@pytest.mark.browser
def test_keys_move_the_cursor(page, browser):
    from selenium.webdriver.common.keys import Keys

    browser.get(f"file://{page[0]}")
    body, last = browser.find_element("tag name", "body"), len(page[1]) - 1
    where = [0]
    for key in (Keys.ARROW_RIGHT, Keys.ARROW_RIGHT, Keys.ARROW_LEFT, Keys.END, Keys.ARROW_RIGHT, Keys.HOME):
        body.send_keys(key)
        where.append(browser.execute_script("return timeline.step()"))
    assert where == [0, 1, 2, 1, last, last, 0]
    theme = "return document.documentElement.dataset.theme"
    before = browser.execute_script(theme)
    for key in ("t", "x", "+", "+", "-"):
        body.send_keys(key)
    assert browser.execute_script(theme) != before
    body.send_keys(" ")
    assert browser.find_element("id", "play").text == "Pause"
    assert browser.get_log("browser") == []
