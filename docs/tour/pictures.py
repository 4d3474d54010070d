"""Makes the pictures of the tour, each from a real run: `python docs/tour/pictures.py [name ...]`.

Most show a part of the page that `LLM(..., timeline="run.html")` writes; for these Chromium and selenium are
needed. The others are drawn with matplotlib. Without names all are made, one function each.
"""

import contextlib
import io
import json
import math
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "docs" / "lab"), str(HERE)]

from nanovllm import LLM, SamplingParams  # noqa: E402
from nanovllm.engine.interfaces import Observer  # noqa: E402

SMALL = {"kvcache_block_size": 16, "max_model_len": 512, "max_num_batched_tokens": 64, "device": "cpu"}
Box = tuple[int, int, int, int]  # left, top, right, bottom
COLOURS = ["#3b7ddd", "#f2a33c", "#22a884", "#a06cd5", "#d43d51", "#687385", "#8fb339", "#c77dba"]


class CannotDraw(Exception):
    """What a picture needs is not installed."""


# --- runs and the browser ---


def as_chat(llm: Any, question: str) -> list[int]:
    """The token ids that a chat model is asked with."""
    messages = [{"role": "user", "content": question}]
    text = llm.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return llm.tokenizer.encode(text, add_special_tokens=False)


@contextlib.contextmanager
def recorded(prompts: list[Any], max_tokens: list[int], chat: bool = False, **options: Any) -> Iterator[Any]:
    """A browser with the timeline of one run on SmolLM2. `max_tokens` of each prompt."""
    with browser() as driver, tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "run.html"
        with LLM("smollm2", **(SMALL | options), timeline=str(page)) as llm:
            if chat:
                prompts = [as_chat(llm, prompt) for prompt in prompts]
            params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=not chat) for n in max_tokens]
            llm.generate(prompts, params, use_tqdm=False)
        driver.get(page.as_uri())
        driver.execute_script("document.documentElement.dataset.theme = 'light'; redraw()")
        yield driver


@contextlib.contextmanager
def browser() -> Iterator[Any]:
    chromium, service = shutil.which("chromium"), shutil.which("chromedriver")
    try:
        from selenium import webdriver
    except ImportError:
        chromium = None
    if not (chromium and service):
        raise CannotDraw("it needs Chromium, chromedriver and the package selenium")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for argument in ("headless=new", "no-sandbox", "disable-gpu", "force-device-scale-factor=1"):
        options.add_argument(f"--{argument}")
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(service))
    try:
        yield driver
    finally:
        driver.quit()


# Times of the computer that happens to draw a picture say nothing about the engine.
WITHOUT_TIMES = """
if (CURVES.length > 2) { CURVES.pop(); CURVES.shift(); }
byTime = false;
redraw();
redraw(); // the lanes have more room now
timeline.goTo(%d);
%s;
for (const name of $("details").querySelectorAll("dt")) {
  if (name.textContent === "first token") { name.nextSibling.remove(); name.remove(); }
}
$("axis").textContent = "by step";
const { num_blocks, block_size } = data;
$("summary").textContent =
  `${sequences.length} sequences, ${steps.length} steps, ${num_blocks} blocks of ${block_size} tokens`;
$("where").textContent = $("where").textContent.replace(/, [0-9.]+ ms.*/, "");
"""


def look(driver: Any, size: tuple[int, int], step: int, script: str = "", selector: str = "body") -> Any:
    """The page in a window of this size at a step, after a script; the elements are cut out."""
    from PIL import Image

    driver.set_window_size(*size)
    time.sleep(0.3)  # until the page has seen it
    driver.execute_script(WITHOUT_TIMES % (step, script))
    image = Image.open(io.BytesIO(driver.get_screenshot_as_png())).convert("RGB")
    return image.crop(part(driver, selector))


def part(driver: Any, selector: str) -> Box:
    """Where an element of the page is."""
    found = driver.execute_script(
        f"const r = document.querySelector('{selector}').getBoundingClientRect();"
        "return [r.left, r.top, r.right, r.bottom]"
    )
    return tuple(map(round, found))


def save(image: Any, name: str) -> None:
    """With a palette of its own: these pictures have few colours."""
    path = HERE / f"{name}.png"
    image.quantize(128, dither=0).save(path, optimize=True)
    print(f"{path.name}: {image.width} x {image.height}, {path.stat().st_size // 1000} KB")


def save_figure(figure: Any, name: str) -> None:
    from PIL import Image

    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=120, facecolor="white")
    save(Image.open(buffer).convert("RGB"), name)


def side_by_side(images: list[Any]) -> Any:
    from PIL import Image

    whole = Image.new("RGB", (sum(image.width for image in images), images[0].height), "white")
    left = 0
    for image in images:
        whole.paste(image, (left, 0))
        left += image.width
    return whole


# --- the pictures ---


def timeline() -> None:
    """The README's first picture: eight questions to a chat model, in a small cache."""
    questions = [
        "introduce yourself",
        "list all prime numbers within 100",
        "What is the capital of France?",
        "Write a haiku about rain.",
        "Why is the sky blue?",
        "Name three fruits.",
        "Tell me a short story about a fox and a crow who meet on a cold morning in the woods.",
        "What is two plus two?",
    ]
    max_tokens = [64, 56, 24, 32, 40, 24, 48, 20]
    options = {"num_kvcache_blocks": 30, "max_num_seqs": 6}
    with recorded(questions, max_tokens, chat=True, **options) as driver:
        save(look(driver, (1200, 660), 22, "describeBlock(0)"), "timeline")


def request() -> None:
    """Chapter 1: three prompts, and the tokens that each step drew."""
    prompts = ["The capital of France is", "One, two, three,", "The opposite of hot is"]
    with recorded(prompts, [9, 12, 6], num_kvcache_blocks=12) as driver:
        save(look(driver, (1200, 590), 5, "describeSequence(0)", "main"), "1_a_request")


def blocks() -> None:
    """Chapter 2: a sequence comes to the border of its first block, and over it."""
    with recorded(["Once upon a time there was a small boy who"], [8], num_kvcache_blocks=4) as driver:
        prompt, size = driver.execute_script("return [data.sequences[0].prompt, data.block_size]")
        print(f"  {prompt} tokens in the prompt")
        full = size - prompt  # the step that writes the last token of the first block
        images = []
        for step in (full - 1, full, full + 1):
            script = f"describeBlock({0 if step <= full else 1})"
            images.append(look(driver, (1000, 640), step, script, "#right"))
        save(side_by_side(images), "2_blocks")


def step() -> None:
    """Chapter 3: five prompts, of which three may run; a small cache, so that one is preempted."""
    prompts = ["Once upon a time", "The sun is", "A cat and a dog", "In the morning I", "Water is"]
    options = {"num_kvcache_blocks": 6, "max_num_seqs": 3}
    with recorded(prompts, [30, 16, 34, 20, 12], **options) as driver:
        print(" ", driver.execute_script("return [steps.length, sequences.map(s => s.preempted)]"))
        save(look(driver, (1500, 560), 20, "", "#left"), "3_a_step")


def chunks() -> None:
    """Chapter 4: a long prompt arrives beside three short ones; a step has room for 64 tokens."""
    words = "the cat sat on the mat and saw a bird that flew over the old house by the sea ".split()
    long = " ".join(words[i * 7 % len(words)] for i in range(400))
    prompts = ["The sky is", "One, two,", "My name is", long]
    with recorded(prompts, [14, 14, 14, 5], num_kvcache_blocks=40) as driver:
        print(" ", driver.execute_script("return [sequences[3].prompt, sequences[3].spans]"))
        save(look(driver, (1500, 520), 5, "", "#left"), "4_chunks")


def prefixes() -> None:
    """Chapter 5: six questions about one text."""
    text = (
        "The old lighthouse stood at the end of a long stone pier. Every evening Anna walked out with a "
        "lamp, a blanket and a small brown dog called Pepper, and sat there until the ferry had come in."
    )
    questions = ["What was the dog called?", "Who had a lamp?", "Where did the lighthouse stand?"]
    questions += ["What came in?", "What colour was the dog?", "How long was the pier?"]
    prompts = [f"{text}\n{question}" for question in questions]
    with recorded(prompts, [8] * 6, chat=True, num_kvcache_blocks=32, max_num_seqs=4) as driver:
        spans = driver.execute_script(
            "return sequences.map(s => [s.prompt, s.spans.filter(p => p[0] === 'prefill')])"
        )
        for line in spans:
            print(" ", line)
        save(look(driver, (1200, 620), 3, "describeSequence(3)", "main"), "5_prefix_cache")


class Snapshots(Observer):
    """What the engine says of itself before each step."""

    watches = True

    def __init__(self) -> None:
        self.snapshots: list[dict[str, Any]] = []
        self.lengths: list[dict[int, int]] = []

    def started(self, engine: Any) -> None:
        self.engine = engine

    def launching(self, step: Any) -> None:
        self.snapshots.append(self.engine.snapshot())
        self.lengths.append({seq.seq_id: seq.num_tokens for seq in step.sequences})


def decode() -> None:
    """Chapter 6: what a decode step reads, by sequence and by block."""
    from matplotlib.figure import Figure

    common = "This is a list of things that I like, and I like all of them very much:"
    prompts = [f"{common} {what}" for what in ("apples,", "rain and snow,", "the sea and")]
    prompts.append("Hello there, my")
    watcher, size = Snapshots(), SMALL["kvcache_block_size"]
    with LLM("smollm2", **SMALL, num_kvcache_blocks=16, extensions=[watcher]) as llm:
        params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (28, 12, 24, 26)]
        llm.generate(prompts, params, use_tqdm=False)
    at = 22
    snapshot, lengths = watcher.snapshots[at], watcher.lengths[at]
    owners: dict[int, list[int]] = {}
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    upper, lower = figure.subplots(2, 1, height_ratios=[3, 1])
    for row, (seq_id, table) in enumerate(snapshot["block_tables"].items()):
        for place, block_id in enumerate(table):
            owners.setdefault(block_id, []).append(row)
            first = COLOURS[owners[block_id][0]]
            filled = min(size, lengths[seq_id] - place * size)
            upper.barh(row, filled, left=place * size, color=first, edgecolor="white", height=0.7)
            upper.text(place * size + 0.4, row, f"block {block_id}", va="center", fontsize=8, color="white")
        upper.plot(lengths[seq_id] - 0.5, row, "v", color="#14202f", markersize=7)
        print(f"  {lengths[seq_id]} tokens, blocks {table}")
    upper.set_yticks(range(len(lengths)), [f"sequence {i}" for i in range(len(lengths))])
    upper.set_xticks(range(0, max(lengths.values()) + size, size))
    upper.invert_yaxis()
    upper.set_title("What the step reads: the triangle is the token that asks", fontsize=10, loc="left")
    for block_id in range(len(snapshot["ref_counts"])):
        rows = owners.get(block_id, [])
        colour = COLOURS[rows[0]] if rows else "#e6e9ee"
        lower.bar(block_id, 1, color=colour, edgecolor="white", width=1)
        label = f"{block_id}" + (f"\nx{len(rows)}" if len(rows) > 1 else "")
        lower.text(
            block_id, 0.5, label, ha="center", va="center", fontsize=8, color="white" if rows else "#687385"
        )
    lower.set_title("Where it lies: the blocks of the KV cache", fontsize=10, loc="left")
    lower.axis("off")
    for side in ("top", "right"):
        upper.spines[side].set_visible(False)
    save_figure(figure, "6_decode")


def graphs() -> None:
    """Chapter 7: the batch sizes of a simulated run, and the graphs that they are padded to."""
    from harness import burst, run
    from matplotlib.figure import Figure

    from nanovllm.engine.cuda_graphs import get_graph_sizes
    from nanovllm.extensions.lab.simulator import Simulator, step_seconds

    sizes: list[int] = []

    def cost(batch: Any) -> float:
        if not batch.is_prefill:
            sizes.append(batch.num_sequences)
        return step_seconds(batch)

    with Simulator(cost=cost, max_num_seqs=256) as engine:
        run(engine, burst(count=256))
    graph_sizes = get_graph_sizes(256)
    padded = [next(size for size in graph_sizes if size >= each) for each in sizes]
    print(f"  {len(sizes)} decode steps, {len(set(sizes))} batch sizes, {len(set(padded))} graphs")
    print(f"  {sum(padded) / sum(sizes) - 1:.1%} of rows are padding more; kinds {sorted(set(padded))}")
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    axes = figure.subplots()
    axes.fill_between(
        range(len(sizes)), sizes, padded, step="post", color="#f2a33c", label="padding", linewidth=0
    )
    axes.fill_between(range(len(sizes)), sizes, step="post", color="#3b7ddd", label="sequences", linewidth=0)
    axes.set(xlabel="decode step", ylabel="rows of the batch", xlim=(0, len(sizes)))
    axes.legend(loc="upper right")
    axes.set_yticks([size for size in graph_sizes if size % 64 == 0])
    axes.grid(axis="y", alpha=0.3)
    save_figure(figure, "7_graphs")


class CountWeights(Observer):
    """On each rank: how large its part of the model is. The ranks write files, rank 0 reads them."""

    folder = Path(tempfile.gettempdir()) / "nanovllm-tour"

    def starting(self, rank: int, make_runner: Callable) -> None:
        self.rank = rank

    def before_warmup(self, model: Any) -> None:
        split, whole = {}, {}  # the same tensor may be the embedding and the head
        for module in model.modules():
            if (matrix := getattr(module, "matrix", None)) is not None:
                split[id(matrix)] = math.prod(matrix.shape)
            elif (weight := getattr(module, "weight", None)) is not None:
                (split if weight.dim() > 1 else whole)[id(weight)] = weight.numel()
        self.folder.mkdir(exist_ok=True)
        counts = sum(split.values()), sum(whole.values())
        (self.folder / f"{self.rank}.json").write_text(json.dumps(counts))


def ranks() -> None:
    """Chapter 8: what a rank of one and of three holds of SmolLM2."""
    from matplotlib.figure import Figure

    bars = {}
    for size in (1, 3):
        options = {"tensor_parallel_size": size, "extensions": ["pictures:CountWeights"]}
        with LLM("smollm2", **SMALL, **options, num_kvcache_blocks=8) as llm:
            params = SamplingParams(temperature=0, max_tokens=4)
            [result] = llm.generate(["The sky is"], params, use_tqdm=False)
            print(f"  {size} ranks: {result['token_ids']}")
            block = llm.model_runner.kv_cache.block_bytes
        for rank in range(size):
            split, whole = json.loads((CountWeights.folder / f"{rank}.json").read_text())
            bars[f"rank {rank} of {size}"] = split / 1e6, whole / 1e6, block / 1024
            print(
                f"  rank {rank} of {size}: {split:,} weights split, {whole:,} whole, {block:,} bytes a block"
            )
    shutil.rmtree(CountWeights.folder)
    figure = Figure(figsize=(9, 2.6), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    for i, (split, whole, block) in enumerate(bars.values()):
        left.barh(i, split, color=COLOURS[i], height=0.7)
        left.text(split + 1, i, f"{split:.1f} and {whole:.2f} of norms, whole", va="center", fontsize=8)
        right.barh(i, block, color=COLOURS[i], height=0.7)
        right.text(block + 3, i, f"{block:.0f}", va="center", fontsize=8)
    left.set_yticks(range(len(bars)), bars)
    left.invert_yaxis()
    left.set(xlabel="million weights", xlim=(0, 215))
    right.set(xlabel="KiB of keys and values a block of 16 tokens", xlim=(0, 420))
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    save_figure(figure, "8_ranks")


PICTURES = [timeline, request, blocks, step, chunks, prefixes, decode, graphs, ranks]


def main(names: list[str]) -> None:
    """Each in a process of its own, where sequences are counted from 0."""
    known = {make.__name__: make for make in PICTURES}
    if len(names) != 1:
        for name in names or known:
            subprocess.run([sys.executable, __file__, name], check=True)
        return
    [name] = names
    try:
        known[name]()
    except CannotDraw as problem:
        print(f"{name} is left out: {problem}")
    except ModuleNotFoundError as problem:
        print(f"{name} is left out: it needs the package {problem.name}")


if __name__ == "__main__":
    main(sys.argv[1:])
