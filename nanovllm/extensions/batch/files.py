"""Reads the lines of a batch, and writes their answers so that none is lost or doubled however a run ends.

Files are JSON lines or, where their names end in .parquet, Parquet (needs pyarrow, part of the `ray` extra);
in a .txt file each line is a prompt. An input is read twice: first to find its lines (`find_lines`), then to
answer them.

A line is appended by one system call, and a part of a Parquet folder appears by one renaming. Only a kill in
the middle of that call can leave a piece of a line: it has no line feed, and resuming cuts it off.
"""

import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nanovllm.extensions.batch.lines import MAX_LINE, Answer, to_json

try:
    import fcntl
except ImportError:  # on Windows, where outputs have no locks
    fcntl = None

ANSWERS_PER_PART = 4096  # of a Parquet folder
ROWS_AT_ONCE = 1024  # that are read from a Parquet file


def is_parquet(path: Path) -> bool:
    return path.suffix == ".parquet"


def find_lines(path: Path) -> bytearray:
    """A byte for each line number from 0 on: 1 where there is nothing to answer, as for blank lines and 0."""
    done = bytearray(b"\1")
    if is_parquet(path):
        return done + bytes(_pyarrow().parquet.ParquetFile(path).metadata.num_rows)
    return done + bytes(text.isspace() for text in _texts(path))


def read_lines(path: Path, done: bytearray) -> Iterator[tuple[int, bytes]]:
    """The lines that are not done, with their numbers from 1."""
    texts = _texts(path)
    if is_parquet(path):
        batches = _pyarrow().parquet.ParquetFile(path).iter_batches(ROWS_AT_ONCE)
        texts = (_to_line(row) for batch in batches for row in batch.to_pylist())
    return ((line, text) for line, text in enumerate(texts, 1) if not done[line])


def _texts(path: Path) -> Iterator[bytes]:
    """
    The lines, as JSON. Only a line feed ends a line; in a .txt file it is the prompt itself. Of one longer
    than MAX_LINE only the beginning is kept, and `parse_line` refuses it.
    """
    with open(path, "rb") as file:
        while text := file.readline(MAX_LINE + 1):
            piece = text
            while piece and not piece.endswith(b"\n"):
                piece = file.readline(2**20)
            if path.suffix == ".txt" and not text.isspace():
                # A byte that is not UTF-8 becomes a surrogate: the engine then refuses this prompt alone.
                text = to_json({"prompt": text.decode("utf-8-sig", "surrogateescape").rstrip("\r\n")})
            yield text


def _to_line(row: dict[str, Any]) -> bytes:
    """
    A row as a line. Parquet gives every object the fields of all objects; the empty ones are left out. So are
    numbers that JSON does not have, which are how tables write that there is none.
    """

    def without_empty(fields: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in fields.items() if value is not None}

    text = json.dumps(row, default=str)
    row = json.loads(text, parse_constant=lambda _: None, object_hook=without_empty)
    return json.dumps(row).encode()


def _pyarrow() -> Any:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise ValueError('Parquet files need pyarrow: pip install -e ".[ray]"') from error
    return pyarrow


class Output:
    """
    The answers so far. `done` is what `find_lines` gave, with 1 also for every line that the output holds. A
    lock keeps a second run from answering the same lines.
    """

    def __init__(self, path: Path, resume: bool, done: bytearray):
        self.path, self.done = path, done
        self.file = self._open()
        try:
            self._lock()
            if not resume and not self._is_empty():
                raise ValueError(f"--output {path} exists already; go on from it with --resume, or remove it")
            # An output may be a pipe, which cannot be read, or be damaged, or be that of another input.
            for place, line in self._read() if resume else ():
                if type(line) is not int or not 0 < line < len(done):
                    fault = f"{place} is no answer to one of the {len(done) - 1} lines of the input"
                    raise ValueError(f"--output {path} cannot be resumed: {fault}")
                done[line] = 1
        except BaseException:
            os.close(self.file)
            raise

    def _open(self) -> int:
        as_it_is = getattr(os, "O_BINARY", 0)  # of Windows: a line feed stays one
        return os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | as_it_is, 0o666)

    def _lock(self) -> None:
        if fcntl is None:
            return
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"--output {self.path} is being written by another run") from None
        except OSError:
            pass  # not every network file system has locks

    def _is_empty(self) -> bool:
        return os.fstat(self.file).st_size == 0

    def _read(self) -> Iterator[tuple[str, Any]]:
        """Place and line number of every answer in the output. A last line that is not whole is cut off."""
        size = 0
        with open(self.path, "rb") as file:
            for number, text in enumerate(file, 1):
                if not text.endswith(b"\n"):
                    break
                try:
                    line = json.loads(text)["line"]
                except (ValueError, TypeError, KeyError, RecursionError):
                    line = None
                yield f"its line {number}", line
                size += len(text)
        os.ftruncate(self.file, size)

    def write(self, answer: Answer) -> None:
        rest = memoryview(answer.text)
        while rest:  # one call writes all of it, unless the disk is full: then the next call says so
            rest = rest[os.write(self.file, rest) :]
        self.done[answer.line] = 1

    def close(self) -> None:
        os.close(self.file)


class ParquetOutput(Output):
    """
    A folder of Parquet files with the columns `line` and `answer` (as JSON). A run that is killed loses the
    answers that are not in a part yet, and --resume computes them again.
    """

    def __init__(self, path: Path, resume: bool, done: bytearray):
        self.pyarrow = _pyarrow()
        self.answers: list[Answer] = []
        self.numbers = itertools.count()  # of parts that this run may write, if they are not there yet
        super().__init__(path, resume, done)

    def _open(self) -> int:
        self.path.mkdir(exist_ok=True)
        return os.open(self.path if fcntl else os.devnull, os.O_RDONLY)  # for the lock

    def _is_empty(self) -> bool:
        return not self._parts()

    def _parts(self) -> list[Path]:
        return sorted(self.path.glob("part-*.parquet"))

    def _read(self) -> Iterator[tuple[str, Any]]:
        for part in self._parts():
            try:
                lines = self.pyarrow.parquet.read_table(part, columns=["line"])["line"].to_pylist()
            except (ValueError, KeyError):  # no Parquet file, or another program's
                lines = [None]
            yield from ((f"line {number} of its {part.name}", line) for number, line in enumerate(lines, 1))

    def write(self, answer: Answer) -> None:
        self.answers.append(answer)
        self.done[answer.line] = 1
        if len(self.answers) == ANSWERS_PER_PART:
            self._write_part()

    def _write_part(self) -> None:
        answers, self.answers = self.answers, []
        columns = {"line": [a.line for a in answers], "answer": [a.text.decode().strip() for a in answers]}
        paths = (self.path / f"part-{number:06}.parquet" for number in self.numbers)
        path = next(path for path in paths if not path.exists())
        unfinished = path.with_name(f".{path.name}")
        self.pyarrow.parquet.write_table(self.pyarrow.table(columns), unfinished)
        unfinished.replace(path)

    def close(self) -> None:
        try:
            if self.answers:
                self._write_part()
        finally:
            super().close()


def open_output(path: Path, resume: bool, done: bytearray) -> Output:
    return (ParquetOutput if is_parquet(path) else Output)(path, resume, done)
