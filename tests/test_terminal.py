"""The command `nanovllm`: a conversation, texts to continue, and the ways to the other tools."""

import io
import json
import shutil
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from nanovllm import LLM, SamplingParams
from nanovllm.extensions.api.engine_args import command_line_options
from nanovllm.extensions.checkpoints.recommended import RecommendingLLM
from nanovllm.extensions.server import terminal
from nanovllm.extensions.server.__main__ import COMMANDS, HELP, main
from tiny_checkpoints import make_checkpoint, one_thread  # noqa: F401

ROOT = Path(terminal.__file__).parents[3]
OPTIONS = (
    "--device cpu --kvcache-block-size 16 --num-kvcache-blocks 400 --temperature 0 --max-tokens 6".split()
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> str:
    return str(make_checkpoint(tmp_path_factory.mktemp("checkpoint"), vocab_size=257, num_hidden_layers=1))


@pytest.fixture
def converse(checkpoint, monkeypatch, capsys):
    """Has a conversation, and gives the texts that the model was asked to continue and what was printed."""

    def converse(said: list, *options: str) -> tuple[list[str], str, str]:
        prompts, stream, coming = [], LLM.stream, iter(said)

        def spy(llm, prompt, params):
            prompts.append(prompt["prompt"])
            return stream(llm, prompt, params)

        def take(_):
            text = next(coming, EOFError)
            if isinstance(text, str):
                return text
            raise text

        monkeypatch.setattr(LLM, "stream", spy)
        monkeypatch.setattr("builtins.input", take)
        main(["chat", "--model", checkpoint, *OPTIONS, *options])
        return prompts, *capsys.readouterr()

    return converse


def answers_of(checkpoint: str, prompts: list[str]) -> list[str]:
    with LLM(checkpoint, device="cpu", num_kvcache_blocks=20) as llm:
        return [result["text"] for result in llm.generate(prompts, SamplingParams(0, 6), use_tqdm=False)]


# --- a conversation ---


def test_a_conversation_is_told_whole_until_it_is_cleared(converse, checkpoint):
    said = ["one", " ", "two", "/clear", "three", "/exit", "never"]
    prompts, printed, _ = converse(said, "--system", "Be brief.")
    answers = answers_of(checkpoint, prompts)
    start = "[system]Be brief.\n"
    assert prompts == [
        f"{start}[user]one\n[assistant]",
        f"{start}[user]one\n[assistant]{answers[0]}\n[user]two\n[assistant]",
        f"{start}[user]three\n[assistant]",
    ]
    assert printed == "".join(f"{answer}\n" for answer in answers)
    assert converse(["one"])[0] == ["[user]one\n[assistant]"]


def test_ctrl_c_ends_an_answer_and_what_there_is_of_it_was_said(converse, monkeypatch):
    pieces, show = [], terminal.show

    def interrupt(text: str) -> None:
        show(text)
        pieces.append(text)
        if len(pieces) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(terminal, "show", interrupt)
    prompts, _, complaints = converse([KeyboardInterrupt, "one", "two"])
    assert pieces[0] == "\n" and pieces[3] == "\n"  # what ends the line that ^C is on
    assert prompts[1] == f"[user]one\n[assistant]{pieces[1]}{pieces[2]}\n[user]two\n[assistant]"
    assert not complaints


def test_what_cannot_be_answered_is_said_and_forgotten(converse):
    prompts, _, complaints = converse(["x" * 600, "a\udcffb", "two"])
    assert prompts[-1] == "[user]two\n[assistant]"
    first, second = complaints.splitlines()
    assert first.startswith("nanovllm chat: prompt: ") and "max_model_len" in first
    assert second.startswith("nanovllm chat: ") and "surrogate" in second


def test_a_terminal_shows_an_answer_while_it_is_made_and_ctrl_c_and_ctrl_d_end_what_they_should(tmp_path):
    folder = make_checkpoint(
        tmp_path, vocab_size=250, max_position_embeddings=9000
    )  # no token ends an answer
    command = [sys.executable, "-m", "nanovllm", "chat", "--model", str(folder), *OPTIONS]
    command += ["--max-tokens", "6000", "--max-model-len", "8000", "--num-kvcache-blocks", "600"]
    in_terminal = "import pty, sys; sys.exit(pty.spawn(sys.argv[1:]) >> 8)"
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
    with subprocess.Popen([sys.executable, "-c", in_terminal, *command], cwd=ROOT, **pipes) as process:
        watchdog = threading.Timer(120, process.kill)
        watchdog.start()
        shown = b""

        def wait(for_what: bytes) -> None:
            nonlocal shown
            while not shown.endswith(for_what) and (more := process.stdout.read(1)):
                shown += more
            assert shown.endswith(for_what), shown

        wait(b"> ")
        process.stdin.write(b"hello\n")
        wait(b"hello\r\n")
        shown += process.stdout.read(1)
        process.stdin.write(b"\x03")
        wait(b"\r\n> ")
        process.stdin.write(b"\x04")
        assert process.wait() == 0
        watchdog.cancel()
    assert b"Ctrl-C only an answer" in shown and b"Traceback" not in shown


def test_a_terminal_gets_no_signs_that_control_it(monkeypatch):
    for is_terminal, shown in ((True, "a]52;bc\t\nü\u2028"), (False, "a\x1b]52;b\x07\rc\t\nü\x9b\u2028")):
        stdout = io.StringIO()
        stdout.isatty = lambda is_terminal=is_terminal: is_terminal
        monkeypatch.setattr(sys, "stdout", stdout)
        terminal.show("a\x1b]52;b\x07\rc\t\nü\x9b\u2028")
        assert stdout.getvalue() == shown


def test_the_model_that_nobody_named_and_what_it_recommends(checkpoint):
    model = SimpleNamespace(generation_config={}, config=SimpleNamespace(model="smollm2"))
    model.default_sampling_params = partial(RecommendingLLM.default_sampling_params, model)
    args = terminal._parse(terminal._make_parser("chat", ""), [], "")
    assert args.model == "smollm2"
    assert terminal._params(model, args, None) == SamplingParams(0.6, None)
    model.generation_config = {"temperature": 0.3, "top_k": 5, "max_new_tokens": 9}
    assert terminal._params(model, args, None) == SamplingParams(0.3, None, top_k=5)
    args = terminal._parse(terminal._make_parser("chat", ""), ["--temperature=1", "--max-tokens=3"], "")
    assert terminal._params(model, args, None) == SamplingParams(1.0, 3, top_k=5)


# --- texts ---


def test_texts_are_continued(checkpoint, monkeypatch, capsys):
    generate = ["generate", "--model", checkpoint, *OPTIONS]
    texts = ["abc", "ab\nabc"]
    answers = answers_of(checkpoint, texts)
    for text, answer in zip(texts, answers, strict=True):
        main([*generate, text])
        assert capsys.readouterr().out == f"{answer}\n"
    main([*generate, *texts])
    both = [f"\nPrompt: {text}\nCompletion: {a}\n" for text, a in zip(texts, answers, strict=True)]
    assert capsys.readouterr().out == "".join(both)
    monkeypatch.setattr(sys, "stdin", io.StringIO(texts[1]))
    main(generate)
    assert capsys.readouterr().out == f"{answers[1]}\n"


def test_a_reader_that_goes_away_ends_it_in_silence(checkpoint):
    command = [sys.executable, "-m", "nanovllm", "generate", "--model", checkpoint, *OPTIONS, "abc"]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    with subprocess.Popen(command, cwd=ROOT, **pipes) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 1


# --- the command ---


def test_help_says_every_command_and_every_option_of_each(capsys):
    main([])
    main(["--help"])
    assert capsys.readouterr().out == f"{HELP}\n" * 2
    main(["--version"])
    assert capsys.readouterr().out == "nanovllm 0.1.0\n"
    for name in COMMANDS:
        assert f"\n  {name} " in HELP
    for name in ("chat", "generate", "batch"):
        with pytest.raises(SystemExit, match="^0$"):
            main([name, "--help"])
        told = capsys.readouterr().out
        assert told.startswith(f"usage: nanovllm {name} ")
        options = {*command_line_options(), "model", "max_tokens", "temperature", "top_p", "top_k", "min_p"}
        assert not [option for option in options if f"  --{option.replace('_', '-')}" not in told]


@pytest.mark.parametrize(
    ("argv", "error"),
    [
        ("generate --model missing abc", "nanovllm generate: model 'missing': there is no such folder"),
        ("chat --temperature -1", "nanovllm chat: temperature must be"),
        ("chat --model CHECKPOINT --device cpu", "nanovllm chat: the tokenizer of .* has no chat template"),
        ("generate --model CHECKPOINT --device cpu --top_k 2", "nanovllm generate: prompt is empty: ''"),
        ("batch --model m --input missing --output out", "nanovllm.batch: --input missing is no"),
    ],
)
def test_a_user_error_is_one_line(tmp_path, checkpoint, monkeypatch, argv, error):
    copy = shutil.copytree(checkpoint, tmp_path / "model", ignore=shutil.ignore_patterns("*.jinja"))
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    with pytest.raises(SystemExit, match=f"^{error}"):
        main(argv.replace("CHECKPOINT", str(copy)).split())


def test_an_unknown_command_and_an_interrupted_one(monkeypatch, capsys):
    with pytest.raises(SystemExit, match="^2$"):
        main(["server"])
    assert capsys.readouterr().err == f"nanovllm: there is no command 'server'\n{HELP}\n"
    monkeypatch.setattr(terminal.LLM, "__init__", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(SystemExit, match="^130$"):
        main(["generate", "abc"])
    assert capsys.readouterr().err == "nanovllm generate: interrupted\n"
    monkeypatch.setattr(terminal.LLM, "__init__", lambda *_, **__: (_ for _ in ()).throw(ImportError("pip")))
    with pytest.raises(SystemExit, match="^nanovllm generate: pip$"):
        main(["generate", "abc"])


def test_files_of_prompts_go_to_the_batch_tool(tmp_path, checkpoint):
    (tmp_path / "in.txt").write_text("abc\n")
    files = f"--input {tmp_path / 'in.txt'} --output {tmp_path / 'out.jsonl'}"
    main(["batch", "--model", checkpoint, *OPTIONS, *files.split()])
    answer = json.loads((tmp_path / "out.jsonl").read_text())
    assert [answer["text"]] == answers_of(checkpoint, ["abc"])


def test_the_benchmark_is_run_under_the_name_of_the_command(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["nanovllm"])
    with pytest.raises(SystemExit, match="^0$"):
        main(["bench", "--help"])
    printed = capsys.readouterr().out
    assert printed.startswith("usage: nanovllm bench ") and "--num-seqs" in printed
    with pytest.raises(SystemExit, match="^nanovllm bench: model 'missing'"):
        main(["bench", "--model", "missing", "--device", "cpu"])
