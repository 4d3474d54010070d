"""The files of a batch: lines read one by one or in spans, answers written so that no end of a run loses or
doubles any. Files are JSON lines or, by their names, Parquet (which needs pyarrow, part of the `ray` extra).

A line is appended by one system call, a part of a Parquet folder by one renaming. Only a kill in the middle
of that call can leave a piece of a last line, which has no line feed and is cut off by resuming.
"""

import fcntl
import functools
import itertools
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from nanovllm.batch_lines import Answer

ANSWERS_PER_PART = 4096  # of a Parquet folder


class Span(NamedTuple):
    """Lines that stand together in the input: so many bytes (Parquet: rows) of it, and which to answer."""

    start: int
    size: int
    first_line: int
    lines: list[int]


def is_parquet(path: Path) -> bool:
    return path.suffix == ".parquet"


def read_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """The lines that are not blank, with their numbers from 1. Only a line feed ends a line of JSON."""
    if is_parquet(path):
        batches = _pyarrow("parquet").ParquetFile(path).iter_batches(1024)
        yield from enumerate((_to_line(row) for batch in batches for row in batch.to_pylist()), 1)
        return
    with open(path, "rb") as file:
        for number, text in enumerate(file, 1):
            if text.strip():
                yield number, text


def count_lines(path: Path, output: "Output") -> int:
    """How many lines there are that the output does not hold."""
    if is_parquet(path):
        numbers: Iterable[int] = range(1, _pyarrow("parquet").ParquetFile(path).metadata.num_rows + 1)
    else:
        numbers = (number for number, _ in read_lines(path))
    return sum(not output.holds(number) for number in numbers)


def split(path: Path, size: int, output: "Output") -> Iterator[Span]:
    """The lines that the output does not hold, as spans of so many in the order of the input."""
    start = 0
    if is_parquet(path):
        num_rows = _pyarrow("parquet").ParquetFile(path).metadata.num_rows
        for start in range(0, num_rows, size):
            lines = range(start + 1, min(start + size, num_rows) + 1)
            wanted = [line for line in lines if not output.holds(line)]
            if wanted:
                yield Span(start, len(lines), start + 1, wanted)
        return
    with open(path, "rb") as file:
        texts = enumerate(file, 1)
        while chunk := list(itertools.islice(texts, size)):
            num_bytes = sum(len(text) for _, text in chunk)
            wanted = [line for line, text in chunk if text.strip() and not output.holds(line)]
            if wanted:
                yield Span(start, num_bytes, chunk[0][0], wanted)
            start += num_bytes


def read_span(path: Path, span: Span) -> list[tuple[int, bytes]]:
    """Those of its lines that are to be answered, with their numbers."""
    if is_parquet(path):
        rows = _rows(path, span.start, span.size)
        texts: Iterable[bytes] = map(_to_line, rows)
    else:
        with open(path, "rb") as file:
            file.seek(span.start)
            texts = file.read(span.size).split(b"\n")
    wanted = set(span.lines)
    return [(line, text) for line, text in enumerate(texts, span.first_line) if line in wanted]


def _rows(path: Path, start: int, size: int) -> list[dict[str, Any]]:
    """Rows of a Parquet file, which may lie in more than one of its groups."""
    metadata, rows, end = _pyarrow("parquet").ParquetFile(path).metadata, [], 0
    for group in range(metadata.num_row_groups):
        begin, end = end, end + metadata.row_group(group).num_rows
        if begin < start + size and start < end:
            first, last = max(start, begin), min(start + size, end)
            rows += _row_group(path, group).slice(first - begin, last - first).to_pylist()
    return rows


@functools.lru_cache(1)  # spans that follow each other often lie in one group, which can be large
def _row_group(path: Path, group: int) -> Any:
    return _pyarrow("parquet").ParquetFile(path).read_row_group(group)


def _to_line(row: dict[str, Any]) -> bytes:
    """A row as a line. Parquet gives every object all fields that any has: those without a value go."""

    def dense(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: dense(item) for name, item in value.items() if item is not None}
        return [dense(item) for item in value] if isinstance(value, list) else value

    return json.dumps(dense(row), default=str).encode()


def _pyarrow(module: str) -> Any:
    try:
        return __import__(f"pyarrow.{module}", fromlist=[module])
    except ImportError as error:
        raise ValueError('Parquet files need pyarrow: pip install -e ".[ray]"') from error


class Output:
    """
    The answers there are. `done` has a byte for every input line: 1 for those that the output holds. A lock
    keeps a second run from answering the same lines.
    """

    def __init__(self, path: Path, resume: bool):
        self.path = path
        self.done = bytearray()
        self.file = self._open()
        try:
            self._lock()
            if resume:
                self._read()
            elif not self._is_empty():
                raise ValueError(f"--output {path} exists already; go on from it with --resume, or remove it")
        except BaseException:
            os.close(self.file)
            raise

    def _open(self) -> int:
        return os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)

    def _lock(self) -> None:
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"--output {self.path} is being written by another run") from None
        except OSError:
            pass  # not every network file system has locks

    def _is_empty(self) -> bool:
        return os.fstat(self.file).st_size == 0

    def _read(self) -> None:
        """Find the lines that are done; a last line that is not whole is cut off."""
        size = 0
        with open(self.path, "rb") as file:
            for number, text in enumerate(file, 1):
                if not text.endswith(b"\n"):
                    break
                try:
                    self.mark(json.loads(text)["line"])
                except (ValueError, TypeError, KeyError, IndexError):
                    raise ValueError(
                        f"--output {self.path} cannot be resumed: its line {number} is no answer"
                    ) from None
                size += len(text)
        os.ftruncate(self.file, size)

    def mark(self, line: int) -> None:
        if line >= len(self.done):
            self.done.extend(bytes(max(1024, line + 1 - len(self.done))))
        self.done[line] = 1

    def holds(self, line: int) -> bool:
        return line < len(self.done) and self.done[line] == 1

    def write(self, answer: Answer) -> None:
        rest = memoryview(answer.text)
        while rest:  # a second call is needed only where a disk is full, and says so then
            rest = rest[os.write(self.file, rest) :]
        self.mark(answer.line)

    def close(self) -> None:
        os.close(self.file)


class ParquetOutput(Output):
    """
    A folder of Parquet files with the columns `line` and `answer` (as JSON). A run that is killed loses the
    answers of the part that it has begun, and --resume computes them again.
    """

    def __init__(self, path: Path, resume: bool):
        self.parquet = _pyarrow("parquet")
        self.answers: list[Answer] = []
        super().__init__(path, resume)

    def _open(self) -> int:
        self.path.mkdir(exist_ok=True)
        return os.open(self.path, os.O_RDONLY)  # for the lock

    def _is_empty(self) -> bool:
        return not self._parts()

    def _parts(self) -> list[Path]:
        return sorted(self.path.glob("part-*.parquet"))

    def _read(self) -> None:
        for part in self._parts():
            for line in self.parquet.read_table(part, columns=["line"])["line"].to_pylist():
                self.mark(line)

    def write(self, answer: Answer) -> None:
        self.answers.append(answer)
        self.mark(answer.line)
        if len(self.answers) == ANSWERS_PER_PART:
            self._write_part()

    def _write_part(self) -> None:
        answers, self.answers = self.answers, []
        columns = {"line": [a.line for a in answers], "answer": [a.text.decode().strip() for a in answers]}
        name = f"part-{len(self._parts()):06}.parquet"
        unfinished = self.path / f".{name}"
        self.parquet.write_table(_pyarrow("lib").table(columns), unfinished)
        unfinished.replace(self.path / name)

    def close(self) -> None:
        try:
            if self.answers:
                self._write_part()
        finally:
            super().close()


def open_output(path: Path, resume: bool) -> Output:
    return (ParquetOutput if is_parquet(path) else Output)(path, resume)
