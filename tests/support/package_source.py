"""The package as source: its modules, parsed, and how much code they hold."""

import ast
import io
import tokenize
from dataclasses import dataclass
from pathlib import Path


@dataclass
class Module:
    """A file of the package: `name` is dotted, `path` starts behind `nanovllm/`."""

    name: str
    path: str
    text: str
    tree: ast.Module


def read_package(root: Path) -> dict[str, Module]:
    """Every module below `root`/nanovllm, by dotted name."""
    modules = {}
    for file in sorted((root / "nanovllm").rglob("*.py")):
        path = file.relative_to(root / "nanovllm")
        name = ".".join(("nanovllm", *path.with_suffix("").parts)).removesuffix(".__init__")
        text = file.read_text()
        modules[name] = Module(name, path.as_posix(), text, ast.parse(text))
    return modules


def is_function(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)


SILENT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}


def count_code(module: Module) -> tuple[int, int]:
    """Tokens, and lines that hold such: comments, docstrings and white space do not count."""
    docstrings = set()
    for node in ast.walk(module.tree):
        has_body = isinstance(node, ast.Module | ast.ClassDef) or is_function(node)
        if has_body and ast.get_docstring(node) is not None:
            docstrings.update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    num_tokens, lines = 0, set()
    for token in tokenize.generate_tokens(io.StringIO(module.text).readline):
        if token.type not in SILENT | {tokenize.ENDMARKER} and token.start[0] not in docstrings:
            num_tokens += 1
            lines.update(range(token.start[0], token.end[0] + 1))
    return num_tokens, len(lines)
