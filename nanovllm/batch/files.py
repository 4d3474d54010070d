"""The files of a batch: lines read one by one or in spans, answers written so that no end of a run loses or
doubles any. Files are JSON lines or, by their names, Parquet (which needs pyarrow, part of the `ray` extra);
an input may also be text, with a prompt a line.

An input is read twice: first to find its lines (`find_lines`), then to answer them.

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
from typing import Any, BinaryIO, NamedTuple

from nanovllm.batch.lines import MAX_LINE, Answer, to_json

ANSWERS_PER_PART = 4096  # of a Parquet folder


class Span(NamedTuple):
    """
    So many lines that stand together in the input, from a byte (Parquet: a row) of it on. `done` has a byte
    for each, 1 where there is nothing to answer; it may be shorter, and is empty where all is to be answered.
    """

    start: int
    first_line: int
    num_lines: int
    done: bytes

    @property
    def num_missing(self) -> int:
        return self.num_lines - self.done.count(1)


def is_parquet(path: Path) -> bool:
    return path.suffix == ".parquet"


def read_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """The lines that are not blank, with their numbers from 1."""
    if is_parquet(path):
        batches = _pyarrow("parquet").ParquetFile(path).iter_batches(1024)
        yield from enumerate((_to_line(row) for batch in batches for row in batch.to_pylist()), 1)
        return
    with open(path, "rb") as file:
        for number, (text, _) in enumerate(_texts(file), 1):
            if not text.isspace():
                yield number, _as_json(path, text)


def _texts(file: BinaryIO) -> Iterator[tuple[bytes, int]]:
    """
    The lines with their sizes. Only a line feed ends one. Of one that is longer than MAX_LINE only the
    beginning is kept, which parse_line refuses for its length.
    """
    while text := file.readline(MAX_LINE + 1):
        size, piece = len(text), text
        while piece and not piece.endswith(b"\n"):
            piece = file.readline(2**20)
            size += len(piece)
        yield text, size


def _as_json(path: Path, text: bytes) -> bytes:
    """A line as JSON. In a .txt file it is the prompt itself."""
    if path.suffix != ".txt":
        return text
    # A byte that is not UTF-8 becomes a surrogate: the engine then refuses this prompt and no other.
    return to_json({"prompt": text.decode("utf-8-sig", "surrogateescape").rstrip("\r\n")})


def find_lines(path: Path) -> bytearray:
    """A byte for each line and one for line 0, which there is not: 1 where there is nothing to answer."""
    if is_parquet(path):
        return bytearray(b"\1") + bytes(_num_rows(path))
    done = bytearray(b"\1")
    with open(path, "rb") as file:
        for text, _ in _texts(file):
            done.append(text.isspace())
    return done


def split(path: Path, size: int, output: "Output") -> Iterator[Span]:
    """The lines that the output does not hold, as spans of so many in the order of the input."""
    num_lines = len(output.done) - 1
    with open(path, "rb") as file:
        sizes = itertools.repeat(1) if is_parquet(path) else (num_bytes for _, num_bytes in _texts(file))
        start = 0
        for first_line in range(1, num_lines + 1, size):
            count = min(size, num_lines + 1 - first_line)
            done = bytes(output.done[first_line : first_line + count])
            if 0 in done:
                yield Span(start, first_line, count, done.rstrip(b"\0"))
            start += sum(itertools.islice(sizes, count))


def split_lines(span: Span) -> Iterator[Span]:
    """A span for each of its lines that are to be answered."""
    for i in range(span.num_lines):
        if not any(span.done[i : i + 1]):
            yield span._replace(done=bytes(other != i for other in range(span.num_lines)))


def read_span(path: Path, span: Span) -> list[tuple[int, bytes]]:
    """Those of its lines that are to be answered, with their numbers."""
    if is_parquet(path):
        return _wanted(map(_to_line, _rows(path, span.start, span.num_lines)), span)
    with open(path, "rb") as file:
        file.seek(span.start)
        return _wanted((_as_json(path, text) for text, _ in _texts(file)), span)


def _wanted(texts: Iterable[bytes], span: Span) -> list[tuple[int, bytes]]:
    places = enumerate(itertools.islice(texts, span.num_lines))
    return [(span.first_line + i, text) for i, text in places if not any(span.done[i : i + 1])]


def _num_rows(path: Path) -> int:
    return _pyarrow("parquet").ParquetFile(path).metadata.num_rows


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
    The answers there are. `done` has a byte for every line of the input (see `find_lines`): 1 for those that
    are blank or that the output holds. A lock keeps a second run from answering the same lines.
    """

    def __init__(self, path: Path, resume: bool, done: bytearray):
        self.path = path
        self.done = done
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
                    line = json.loads(text)["line"]
                except (ValueError, TypeError, KeyError, RecursionError):
                    line = None
                self._mark_read(line, f"its line {number}")
                size += len(text)
        os.ftruncate(self.file, size)

    def _mark_read(self, line: Any, place: str) -> None:
        """Mark a line that was read in the output, which may be damaged or of another input."""
        if type(line) is not int or not 0 < line < len(self.done):
            raise ValueError(
                f"--output {self.path} cannot be resumed: {place} is no answer to one of the "
                f"{len(self.done) - 1} lines of the input"
            )
        self.done[line] = 1

    def holds(self, line: int) -> bool:
        return self.done[line] == 1

    def num_missing(self) -> int:
        return self.done.count(0)

    def write(self, answer: Answer) -> None:
        rest = memoryview(answer.text)
        while rest:  # a second call is needed only where a disk is full, and says so then
            rest = rest[os.write(self.file, rest) :]
        self.done[answer.line] = 1

    def close(self) -> None:
        os.close(self.file)


class ParquetOutput(Output):
    """
    A folder of Parquet files with the columns `line` and `answer` (as JSON). A run that is killed loses the
    answers of the part that it has begun, and --resume computes them again.
    """

    def __init__(self, path: Path, resume: bool, done: bytearray):
        self.parquet = _pyarrow("parquet")
        self.answers: list[Answer] = []
        super().__init__(path, resume, done)

    def _open(self) -> int:
        self.path.mkdir(exist_ok=True)
        return os.open(self.path, os.O_RDONLY)  # for the lock

    def _is_empty(self) -> bool:
        return not self._parts()

    def _parts(self) -> list[Path]:
        return sorted(self.path.glob("part-*.parquet"))

    def _read(self) -> None:
        for part in self._parts():
            try:
                lines = self.parquet.read_table(part, columns=["line"])["line"].to_pylist()
            except (ValueError, KeyError):  # no Parquet file, or none of ours
                lines = [None]
            for number, line in enumerate(lines, 1):
                self._mark_read(line, f"line {number} of its {part.name}")

    def write(self, answer: Answer) -> None:
        self.answers.append(answer)
        self.done[answer.line] = 1
        if len(self.answers) == ANSWERS_PER_PART:
            self._write_part()

    def _write_part(self) -> None:
        answers, self.answers = self.answers, []
        columns = {"line": [a.line for a in answers], "answer": [a.text.decode().strip() for a in answers]}
        numbers = (part.stem.removeprefix("part-") for part in self._parts())
        # After the last one, not by how many there are: one may have been taken away.
        name = f"part-{max((int(n) + 1 for n in numbers if n.isdecimal()), default=0):06}.parquet"
        unfinished = self.path / f".{name}"
        self.parquet.write_table(_pyarrow("lib").table(columns), unfinished)
        unfinished.replace(self.path / name)

    def close(self) -> None:
        try:
            if self.answers:
                self._write_part()
        finally:
            super().close()


def open_output(path: Path, resume: bool, done: bytearray) -> Output:
    return (ParquetOutput if is_parquet(path) else Output)(path, resume, done)
