"""The house keeps to its plan (design.md sections 1 to 3): imports, names and sizes.

Reads the source with `ast` and imports none of it. Each check is a function from a source tree to a list of
violations, which name file and line; the last tests show on tiny trees that each of them can fail.
"""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
from package_source import Module, count_code, is_function, read_package

ROOT = Path(__file__).resolve().parent.parent

# Whom a part of the core must not know. What is not named here, it may import, as long as there is no circle.
MUST_NOT_IMPORT = {
    "kernels": "config sampling_params utils checkpoints distributed layers models engine text llm",
    "checkpoints": "kernels layers models engine text distributed llm",
    "utils": "layers models engine text distributed llm",
    "config": "layers models engine text distributed llm",
    "sampling_params": "config checkpoints kernels layers models engine text distributed llm",
    "layers": "models engine text llm",
    "models": "engine text llm",
    "distributed": "text llm",
    "text": "models layers kernels llm",
    "engine": "llm",
}
# Extensions import the core and themselves, and these.
EDGES = {
    ("models", "experts"),
    ("experts", "quantised"),
    ("transformers", "experts"),
    ("transformers", "quantised"),
    ("checkpoints", "quantised"),
}
# Files of the core that may name extensions: what assembles the parts, and public paths that only import.
SHIMS = """
    assembly.py __init__ __main__ batch integrations utils/argparse_utils
    inputs outputs
""".split()
# Imports that the plan does not allow and that are still there. The bound is 0: they only become fewer.
CORE_IMPORTS_LEFT = 0
EDGES_LEFT = 0

# Tokens of code that Python's tokenizer counts, without comments, docstrings, line ends and indents: the
# plan's bounds, and what is reached so far, which is to fall.
PACKAGE_TOKENS, PACKAGE_REACHED = 142_000, 171_951
TOOLS = "bench lab timeline exact rollout server states".split()  # do not count for the package
BENCH_TOKENS = 6_000
CORE_TOKENS, CORE_REACHED = 36_000, 35_941
CORE_LINES = 3_900

HOST_ONLY = """
    engine/sequence.py engine/scheduler.py engine/block_manager.py
""".split()

# One decode step, models, layers and kernels aside, in the order in which it is read.
DECODE_STEP = """
    engine/llm_engine.py engine/scheduler.py engine/sequence.py engine/block_manager.py
    engine/batch.py engine/slots.py engine/model_runner.py engine/cuda_graphs.py
""".split()

# The vocabulary of design.md section 3. `Name.member` is a method or a field.
CONTRACT = {
    "engine/sequence.py": """
        SequenceStatus SequenceStatus.WAITING SequenceStatus.RUNNING SequenceStatus.FINISHED Sequence
        Sequence.seq_id Sequence.token_ids Sequence.last_token Sequence.num_tokens Sequence.num_prompt_tokens
        Sequence.num_cached_tokens Sequence.block_table Sequence.__len__ Sequence.__getitem__
        Sequence.is_finished Sequence.num_completion_tokens Sequence.prompt_token_ids
        Sequence.completion_token_ids Sequence.num_cached_blocks Sequence.num_blocks
        Sequence.last_block_num_tokens Sequence.block Sequence.append_token""",
    "engine/block_manager.py": """
        Block Block.block_id Block.ref_count Block.hash Block.token_ids Block.update Block.reset
        BlockManager BlockManager.blocks BlockManager.hash_to_block_id BlockManager.free_block_ids
        BlockManager.used_block_ids BlockManager.compute_hash BlockManager.can_allocate BlockManager.allocate
        BlockManager.deallocate BlockManager.can_append BlockManager.may_append""",
    "engine/scheduler.py": """
        Scheduler Scheduler.waiting Scheduler.running Scheduler.add Scheduler.schedule Scheduler.preempt
        Scheduler.postprocess Scheduler.is_finished""",
    "engine/batch.py": "Batch StepOutput",
    "engine/model_runner.py": """
        ModelRunner ModelRunner.run ModelRunner.call ModelRunner.prepare_prefill ModelRunner.prepare_decode
        ModelRunner.prepare_block_tables ModelRunner.prepare_sample ModelRunner.run_model
        ModelRunner.warmup_model ModelRunner.allocate_kv_cache ModelRunner.capture_cudagraph""",
    "engine/llm_engine.py": "LLMEngine",
    "llm.py": "LLM",
    "extensions/api/async_llm.py": "AsyncLLM",
    "layers/activation.py": "SiluAndMul",
    "layers/layernorm.py": "RMSNorm Stream",
    "layers/sampler.py": "Sampler",
    "layers/attention.py": "Attention Attention.k_cache Attention.v_cache store_kvcache",
    "layers/rotary_embedding.py": "apply_rotary_emb RotaryEmbedding get_rope",
    "layers/linear.py": """
        divide LinearBase ReplicatedLinear ColumnParallelLinear MergedColumnParallelLinear QKVParallelLinear
        RowParallelLinear""",
    "layers/embed_head.py": "VocabParallelEmbedding ParallelLMHead",
    "models/qwen3.py": """
        Qwen3Attention Qwen3MLP Qwen3DecoderLayer Qwen3Model Qwen3ForCausalLM Qwen3ForCausalLM.forward
        Qwen3ForCausalLM.packed_modules_mapping Qwen3ForCausalLM.compute_logits""",
    "utils/context.py": """
        Context Context.is_prefill Context.cu_seqlens_q Context.cu_seqlens_k Context.max_seqlen_q
        Context.max_seqlen_k Context.slot_mapping Context.context_lens Context.block_tables
        get_context set_context reset_context""",
    "utils/loader.py": "default_weight_loader load_model",
}

# What may stand there although nothing in the package calls it.
CALLED_BY_USERS = {
    "llm.py": "LLM.generate",
    "extensions/text/llm.py": """TextLLM.generate TextLLM.generate_iter TextLLM.generate_from TextLLM.stream
        TextLLM.chat TextLLM.score TextLLM.encode TextLLM.decode TextLLM.get_tokenizer""",
    "extensions/checkpoints/recommended.py": "RecommendingLLM.default_sampling_params",
    "engine/llm_engine.py": """LLMEngine.add_request LLMEngine.step LLMEngine.abort LLMEngine.clear
        LLMEngine.is_finished LLMEngine.exit""",
    "extensions/timeline/snapshot.py": "SnapshotLLM.snapshot",
    "extensions/safety/stats.py": "StatsLLM.stats",
    "extensions/api/llm.py": "ApiLLM.add_request",
    "extensions/lab/simulator.py": "Simulator.wait_until",
    "extensions/models/known.py": "register_model",
    "extensions/api/async_llm.py": """AsyncLLM AsyncLLM.generate AsyncLLM.stream AsyncLLM.chat AsyncLLM.score
        AsyncLLM.encode AsyncLLM.stats AsyncLLM.get_tokenizer AsyncLLM.abort AsyncLLM.exit""",
    "extensions/api/cleanup.py": "cleanup_dist_env_and_memory",
    "extensions/api/engine_args.py": "EngineArgs EngineArgs.add_cli_args EngineArgs.from_cli_args",
}
CALLED_FROM_OUTSIDE = {
    "extensions/cpu/vectors.py": "FloatsModel",  # Numba's
    "extensions/cpu/compiled.py": "Step decode_step compute_logits",  # from a module imported when needed
    "extensions/lab/check.py": "Findings.pytest_runtest_logreport Findings.pytest_collectreport",  # pytest's
    "extensions/exact/trainer.py": "Product.backward Recomputed.backward",  # autograd's
    "distributed/ranks.py": "serve",  # what a new process runs
    "extensions/ranks/reports.py": "serve",
    "extensions/batch/__main__.py": "_Stderr.flush",  # sys.stderr's
    "extensions/api/argparse_utils.py": "FlexibleArgumentParser.parse_known_args",  # argparse's
    "utils/validation.py": "_ShortRepr.repr_int",  # reprlib's
    "extensions/api/lm_eval.py": """NanoVLLM NanoVLLM.prefix_token_id NanoVLLM.tokenizer_name
        NanoVLLM.apply_chat_template NanoVLLM._loglikelihood_tokens NanoVLLM.loglikelihood_rolling
        NanoVLLM.generate_until""",  # the harness's
}
WAITING_FOR_AN_ISSUE = {"layers/attention.py": "store_kvcache"}
TABLES = [CONTRACT, CALLED_BY_USERS, CALLED_FROM_OUTSIDE, WAITING_FOR_AN_ISSUE]


@cache
def package() -> dict[str, Module]:
    return read_package(ROOT)


def hold(violations: list[str]) -> None:
    assert not violations, f"{len(violations)} violations\n" + "\n".join(violations)


# Imports


class Import(NamedTuple):
    """`target` is a module; `name` is what is taken out of it, or "" for the module itself."""

    target: str
    name: str
    local_name: str
    line: int


def imports(module: Module, modules: dict[str, Module]) -> Iterator[Import]:
    """Every import of the file, inside functions and under conditions too."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            yield from (Import(a.name, "", a.asname or a.name, node.lineno) for a in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{module.path}:{node.lineno}: imports are absolute"
            for alias in node.names:
                inner, local_name = f"{node.module}.{alias.name}", alias.asname or alias.name
                target, name = (inner, "") if inner in modules else (node.module, alias.name)
                yield Import(target, name, local_name, node.lineno)


def import_graph(modules: dict[str, Module]) -> dict[str, dict[str, str]]:
    """For each module: what it imports, of this package or not, and where."""
    return {
        name: {each.target: f"{module.path}:{each.line}" for each in imports(module, modules)}
        for name, module in modules.items()
    }


def ways_from(start: str, graph: dict[str, dict[str, str]]) -> dict[str, str]:
    """For each module that imports lead to from `start`, itself too if they do: one of the shortest ways."""
    ways, queue = {}, [start]
    for name in queue:
        for target, place in graph.get(name, {}).items():
            if target not in ways:
                ways[target] = f"{ways.get(name, '')}{place}: imports {target}; "
                queue.append(target)
    return ways


def find_circles(modules: dict[str, Module]) -> list[str]:
    found, graph = [], import_graph(modules)
    for name, module in modules.items():
        way = ways_from(name, graph).get(name)
        if way and f" {module.path}:" not in " ".join(found):  # else it is in one that was found already
            found.append(way)
    return found


def find_wrong_directions(modules: dict[str, Module]) -> list[str]:
    found = []
    for name, targets in import_graph(modules).items():
        part, *_ = name.removeprefix("nanovllm.").split(".")
        for target, place in targets.items():
            other, *_ = target.removeprefix("nanovllm.").split(".")
            if target in modules and other in MUST_NOT_IMPORT.get(part, "").split():
                found.append(f"{place}: {part} must not import {target}")
    return found


def extension_of(name: str) -> str:
    """Which extension a module is in, or ""."""
    _, *parts = name.split(".")
    return parts[1] if len(parts) > 1 and parts[0] == "extensions" else ""


def find_core_imports(modules: dict[str, Module]) -> list[str]:
    """Imports from the core into extensions."""
    return [
        f"{place}: imports {target}"
        for name, targets in import_graph(modules).items()
        for target, place in targets.items()
        if not extension_of(name) and extension_of(target) and not place.startswith(tuple(SHIMS))
    ]


def find_wrong_edges(modules: dict[str, Module]) -> list[str]:
    """Imports from one extension into another that it must not know."""
    return [
        f"{place}: {own} must not import {target}"
        for name, targets in import_graph(modules).items()
        for target, place in targets.items()
        if (own := extension_of(name)) and extension_of(target) not in ("", own)
        if (own, extension_of(target)) not in EDGES
    ]


def find_way_to_device(modules: dict[str, Module], start: str) -> list[str]:
    """The shortest way by imports from module `start` to torch, triton or a kernel, if there is one."""
    for target, way in ways_from(start, import_graph(modules)).items():
        if target.split(".")[0] in ("torch", "triton") or target.startswith("nanovllm.kernels"):
            return [way]
    return []


def test_no_modules_import_each_other_in_a_circle():
    hold(find_circles(package()))


def test_imports_point_one_way():
    hold(find_wrong_directions(package()))


def test_the_core_imports_no_more_of_extensions_than_is_left_to_cut():
    found = find_core_imports(package())
    assert len(found) <= CORE_IMPORTS_LEFT, "\n".join(found)


def test_extensions_know_no_more_of_each_other_than_is_left_to_cut():
    found = find_wrong_edges(package())
    assert len(found) <= EDGES_LEFT, "\n".join(found)


@pytest.mark.parametrize("path", HOST_ONLY)
def test_the_host_side_of_the_corridor_reaches_neither_torch_nor_kernels(path):
    hold(find_way_to_device(package(), "nanovllm." + path.removesuffix(".py").replace("/", ".")))


# Models


def find_second_forwards(modules: dict[str, Module]) -> list[str]:
    found = []
    for module in modules.values():
        classes = [n for n in ast.walk(module.tree) if isinstance(n, ast.ClassDef)]
        for node in classes if module.path.startswith("models/") else ():
            forwards = [f for f in node.body if is_function(f) and f.name.startswith("forward")]
            found += [f"{module.path}:{f.lineno}: second forward of {node.name}" for f in forwards[1:]]
    return found


def find_weights(modules: dict[str, Module]) -> list[str]:
    return [
        f"{module.path}:{node.lineno}: {ast.unparse(node)}: a layer keeps its weight to itself"
        for module in modules.values()
        if module.path.startswith("models/")
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Attribute) and node.attr == "weight"
    ]


def test_a_layer_has_one_forward():
    hold(find_second_forwards(package()))


def test_no_model_reads_a_weight():
    hold(find_weights(package()))


# Names


@dataclass
class Definition:
    """A function or class, or (`owner` is its class) a method."""

    module: Module
    owner: str
    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef

    @property
    def full_name(self) -> str:
        return f"{self.owner}.{self.node.name}".removeprefix(".")


def definitions(module: Module) -> Iterator[Definition]:
    for node in module.tree.body:
        if is_function(node) or isinstance(node, ast.ClassDef):
            yield Definition(module, "", node)
        if isinstance(node, ast.ClassDef):
            yield from (Definition(module, node.name, inner) for inner in node.body if is_function(inner))


def uses(modules: dict[str, Module]) -> dict[tuple[str, str], list[tuple[str, int]]]:
    """
    (module, name) of a function or class, and ("", name) of a method -> the places (module, line) that use
    it. Methods go by name alone; `call("name")`, which runs a method on every rank, and `notify("name")`
    and `tell("name")`, which run one of every observer, count for them.
    """
    found = defaultdict(list)
    for module in modules.values():
        aliases = {}  # local name -> module of the package
        for each in imports(module, modules):
            found[each.target, each.name].append((module.name, each.line))
            if not each.name:
                aliases[each.local_name] = each.target
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                found[module.name, node.id].append((module.name, node.lineno))
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                owner = node.value.id if isinstance(node.value, ast.Name) else ""
                found[aliases.get(owner, ""), node.attr].append((module.name, node.lineno))
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute | ast.Name):
                called = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id
                if (
                    called in ("call", "notify", "tell")
                    and node.args
                    and isinstance(node.args[0], ast.Constant)
                ):
                    found["", node.args[0].value].append((module.name, node.lineno))
    return found


def find_unused(modules: dict[str, Module]) -> list[str]:
    found, used = [], uses(modules)
    for definition in [d for module in modules.values() for d in definitions(module)]:
        module, node = definition.module, definition.node
        exceptions = " ".join(table.get(module.path, "") for table in TABLES[1:]).split()
        if node.name.startswith("__") or definition.full_name in exceptions:
            continue
        if definition.owner and node.name == "forward":  # nn.Module's __call__ runs it
            continue
        places = used["" if definition.owner else module.name, node.name]
        if all(name == module.name and node.lineno <= line <= node.end_lineno for name, line in places):
            found.append(f"{module.path}:{node.lineno}: nothing uses {definition.full_name}")
    return found


def names_in(module: Module) -> set[str]:
    """Names of the module, imported ones too, and `Class.member` for methods and fields."""
    names = set()
    for node in module.tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
        elif is_function(node) or isinstance(node, ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
        if isinstance(node, ast.ClassDef):
            inner = [n for child in node.body for n in (child, *ast.walk(child))]
            names |= {f"{node.name}.{n.name}" for n in node.body if is_function(n)}
            names |= {f"{node.name}.{n.id}" for n in inner if isinstance(n, ast.Name) and is_stored(n)}
            names |= {f"{node.name}.{n.attr}" for n in inner if isinstance(n, ast.Attribute) and is_stored(n)}
    return names


def is_stored(node: ast.Name | ast.Attribute) -> bool:
    return isinstance(node.ctx, ast.Store)


def find_missing(modules: dict[str, Module], contract: dict[str, str]) -> list[str]:
    by_path = {module.path: names_in(module) for module in modules.values()}
    return [
        f"{path}: has no {name}"
        for path, names in contract.items()
        for name in names.split()
        if name not in by_path.get(path, ())
    ]


def test_whatever_is_defined_is_used():
    hold(find_unused(package()))


@pytest.mark.parametrize("table", TABLES)
def test_the_names_of_the_plan_exist(table):
    hold(find_missing(package(), table))


# Sizes


def find_long_files(modules: dict[str, Module], limit: int) -> list[str]:
    lengths = {module.path: module.text.count("\n") for module in modules.values()}
    return [f"{path}: {length} lines, at most {limit}" for path, length in lengths.items() if length > limit]


def test_the_package_stays_small():
    """Its tokens; see PACKAGE_TOKENS."""
    counted = {name: module for name, module in package().items() if extension_of(name) not in TOOLS}
    sizes = {module.path: count_code(module)[0] for module in counted.values()}
    assert sum(sizes.values()) <= max(PACKAGE_TOKENS, PACKAGE_REACHED), sorted(sizes.items(), key=str)


def test_the_benchmark_stays_small():
    """Its page in lines, and what goes beyond it in tokens."""
    modules = [module for name, module in package().items() if extension_of(name) == "bench"]
    assert 0 < sum(count_code(module)[0] for module in modules) <= BENCH_TOKENS
    assert (ROOT / "bench.py").read_text().count("\n") <= 150


def test_the_core_becomes_small():
    """Its tokens and lines; see CORE_TOKENS and CORE_LINES."""
    sizes = [count_code(module) for name, module in package().items() if not extension_of(name)]
    tokens, lines = map(sum, zip(*sizes, strict=True))
    assert tokens <= max(CORE_TOKENS, CORE_REACHED) and lines <= CORE_LINES


def test_what_tests_share_is_in_tests_support():
    files = (ROOT / "tests").rglob("*.py")
    assert not [file for file in files if re.search(r"(?m)^\s*(from|import) test_", file.read_text())]


def test_no_file_is_longer_than_350_lines():
    hold(find_long_files(package(), 350))


def test_the_readme_is_read_in_one_sitting():
    length = (ROOT / "README.md").read_text().count("\n")
    assert length <= 120, f"README.md: {length} lines"


def test_one_decode_step_is_read_in_eight_files():
    lengths = {module.path: module.text.count("\n") for module in package().values()}
    missing = [path for path in DECODE_STEP if path not in lengths]
    assert len(DECODE_STEP) <= 8 and not missing, f"there is no {missing}"
    read = {path: lengths[path] for path in DECODE_STEP}
    assert sum(read.values()) <= 1850, f"{sum(read.values())} lines: {read}"


# The checks themselves, on tiny trees


def read_tree(folder: Path, files: dict[str, str]) -> dict[str, Module]:
    for path, text in files.items():
        file = folder / "nanovllm" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return read_package(folder)


@pytest.mark.parametrize(
    "text",
    [
        "from nanovllm.b import g",
        "import nanovllm.b",
        "from nanovllm import b",
        "def f():\n    from nanovllm.b import g\n    return g",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from nanovllm.b import g",
    ],
)
def test_a_circle_is_found(tmp_path, text):
    modules = read_tree(tmp_path, {"a.py": text, "b.py": "from nanovllm.a import f", "c.py": "import a"})
    line = text[: text.index("nanovllm")].count("\n") + 1
    (way,) = find_circles(modules)
    assert way == f"a.py:{line}: imports nanovllm.b; b.py:1: imports nanovllm.a; "


def test_a_package_is_not_in_a_circle_with_its_own_modules(tmp_path):
    files = {"p/__init__.py": "from nanovllm.p.a import A"}
    files |= {"p/a.py": "from nanovllm.p import b", "p/b.py": ""}
    assert not find_circles(read_tree(tmp_path, files))
    files["p/b.py"] = "from nanovllm.p import A"
    assert find_circles(read_tree(tmp_path, files))


def test_an_import_upwards_is_found(tmp_path):
    files = {"layers/a.py": "def f():\n    import nanovllm.engine.b", "engine/b.py": ""}
    (found,) = find_wrong_directions(read_tree(tmp_path, files))
    assert found == "layers/a.py:2: layers must not import nanovllm.engine.b"


def test_imports_of_extensions_are_found(tmp_path):
    files = {"engine/a.py": "from nanovllm.extensions.models import m", "extensions/models/m.py": "import re"}
    files |= {"__init__.py": "from nanovllm.extensions.batch.b import x", "extensions/experts/e.py": ""}
    files |= {"extensions/batch/b.py": "import nanovllm.extensions.models.m\nimport nanovllm.engine.a"}
    files["extensions/models/m.py"] = "from nanovllm.extensions.experts import e"
    modules = read_tree(tmp_path, files)
    assert find_core_imports(modules) == ["engine/a.py:1: imports nanovllm.extensions.models.m"]
    assert find_wrong_edges(modules) == [
        "extensions/batch/b.py:1: batch must not import nanovllm.extensions.models.m"
    ]


@pytest.mark.parametrize("goal", ["torch", "torch.nn", "triton.language", "nanovllm.kernels.k"])
def test_a_way_to_the_device_is_found(tmp_path, goal):
    files = {"a.py": "import os\nimport nanovllm.b", "b.py": f"def f():\n    import {goal}"}
    files["kernels/k.py"] = "import os"
    modules = read_tree(tmp_path, files)
    (way,) = find_way_to_device(modules, "nanovllm.a")
    assert way == f"a.py:2: imports nanovllm.b; b.py:2: imports {goal}; "
    assert not find_way_to_device(modules, "nanovllm.kernels.k")


def test_a_second_forward_and_a_read_weight_are_found(tmp_path):
    text = "class A:\n    def forward(self): pass\n\n    def forward_small(self):\n        self.up.weight"
    modules = read_tree(tmp_path, {"models/a.py": text, "layers/a.py": text})
    assert find_second_forwards(modules) == ["models/a.py:4: second forward of A"]
    (found,) = find_weights(modules)
    assert found.startswith("models/a.py:5: self.up.weight")


def test_what_nothing_uses_is_found(tmp_path):
    a = """
        from nanovllm import b
        from nanovllm.b import by_import
        class Lonely: pass
        class Used:
            def run(self): return self.run()
            def called(self): self.call("called")
            def on_ranks(self): pass
            def forward(self): pass
        def recursive(): return recursive()
        def same_file(): pass
        def _private(): pass
        def __getattr__(name): return same_file(), by_import(), b.by_module(), Used.call("on_ranks"), lonely
    """
    b = "def by_import(): pass\ndef by_module(): pass\ndef lonely(): pass\nclass B:\n    def step(self): pass"
    modules = read_tree(tmp_path, {"a.py": re.sub("^ {8}", "", a, flags=re.M), "b.py": b})
    names = [found.split()[-1] for found in find_unused(modules)]
    assert names == ["Lonely", "Used.run", "Used.called", "recursive", "_private", "lonely", "B", "B.step"]


def test_a_missing_name_is_found(tmp_path):
    text = "from b import f\nclass A:\n    x: int\n    def g(self):\n        self.y, z = 1, 2\n"
    modules = read_tree(tmp_path, {"a.py": text})
    found = find_missing(modules, {"a.py": "f A A.x A.g A.y A.no no", "c.py": "A"})
    assert found == ["a.py: has no A.no", "a.py: has no no", "c.py: has no A"]


def test_tokens_and_lines_are_counted(tmp_path):
    text = '"""Doc."""\n\n# comment\nx = [  # 1\n    2,\n]\n\n\n'
    text += 'def f():\n    """Doc\n    on."""\n    return """a\n\nb"""\n'
    modules = read_tree(tmp_path, {"a.py": text})
    assert count_code(modules["nanovllm.a"]) == (6 + 5 + 2, 3 + 1 + 3)
    assert find_long_files(modules, 13) == ["a.py: 14 lines, at most 13"]
