"""The `outrider` command against a scripted gateway: what it prints, where, and how it exits."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from rich.console import Console

from outrider import cli, demo
from outrider.completion import (
    Chunk,
    Completion,
    FinishReason,
    SpeculationStatistics,
    Timings,
    Token,
    TokenOrigin,
    Usage,
)
from outrider.origins import pieces
from outrider.v1 import common_pb2, generation_pb2
from tests.outrider.fake_gateway import SMILE, FakeGateway

ROOT = Path(__file__).resolve().parents[2]
TEXT = f"Once {SMILE}upon"


@pytest.fixture
async def gateway() -> AsyncIterator[FakeGateway]:
    async with FakeGateway() as gateway:
        yield gateway


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Processes started by the test take SIGINT, also where a shell started the tests in its background without it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


async def run(*arguments: str, stdin: bytes = b"") -> tuple[int, str, str]:
    """Exit status, stdout and stderr of the command."""
    process = await start(*arguments)
    out, err = await asyncio.wait_for(process.communicate(stdin), 30)
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


async def start(*arguments: str, stdout: int = subprocess.PIPE, **environment: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "outrider.cli", *arguments, cwd=ROOT, env={**os.environ, **environment},
        stdin=subprocess.PIPE, stdout=stdout, stderr=subprocess.PIPE,
    )  # fmt: skip


class TestGenerate:
    async def test_text_goes_to_stdout_and_nothing_else_does(self, gateway: FakeGateway) -> None:
        assert await run("generate", "--address", gateway.address, "tell") == (0, TEXT + "\n", "")

    async def test_flags_arrive_in_the_request(self, gateway: FakeGateway) -> None:
        flags = (
            "--max-tokens 7 --temperature 0.5 --top-k 3 --top-p 0.9 --min-p 0.1 --seed 5 --stop A --stop B "
            "--stop-token-id 4 --ignore-eos --no-speculation --max-draft-tokens 2 --verification coupled "
            "--repetition-penalty 1.5 --presence-penalty 0.5 --frequency-penalty -0.5 --request-id me --json "
            "--logprobs 2"
        )
        assert (await run("generate", "--address", gateway.address, *flags.split(), "tell"))[0] == 0
        request = gateway.requests[0]
        assert (request.request_id, request.prompt, request.logprobs) == ("me", "tell", 2)
        assert request.stopping == generation_pb2.StoppingParameters(
            max_tokens=7, stop=["A", "B"], stop_token_ids=[4], ignore_eos=True
        )
        assert request.sampling == common_pb2.SamplingParameters(
            temperature=0.5, top_k=3, top_p=0.9, min_p=0.1, repetition_penalty=1.5, presence_penalty=0.5,
            frequency_penalty=-0.5, seed=5,
        )  # fmt: skip
        assert request.speculation == generation_pb2.SpeculationParameters(
            mode=generation_pb2.SPECULATION_MODE_OFF,
            max_draft_tokens=2,
            verification=common_pb2.VERIFICATION_COUPLED,
        )

    @pytest.mark.parametrize("arguments", [(), ("-",)])
    async def test_the_prompt_comes_from_stdin(self, gateway: FakeGateway, arguments: tuple[str, ...]) -> None:
        status, out, _ = await run("generate", "--address", gateway.address, *arguments, stdin="grüß\n".encode())
        assert (status, out) == (0, TEXT + "\n")
        assert gateway.requests[0].prompt == "grüß\n"

    async def test_json_is_one_object(self, gateway: FakeGateway) -> None:
        status, out, err = await run("generate", "--address", gateway.address, "--json", "tell")
        assert (status, err, out.count("\n")) == (0, "", 1)
        assert json.loads(out) == {
            "request_id": "drawn",
            "model": "fake",
            "seed": 7,
            "text": TEXT,
            "token_ids": [1, 2, 3, 4, 5],
            "token_origins": ["ACCEPTED", "RECOVERED", "ACCEPTED", "ACCEPTED", "BONUS"],
            "finish_reason": "LENGTH",
            "stop_string": None,
            "usage": {"prompt_tokens": 3, "output_tokens": 5},
            "speculation": {
                "verification": "coupled",
                "steps": 2,
                "drafted": 6,
                "accepted": 3,
                "accepted_per_position": [2, 1, 0],
                "acceptance_rate": 0.5,
                "mean_acceptance_length": 2.5,
                "fallbacks": [{"reason": "DRAFTER_MAX_LENGTH", "position": 6}],
            },
            "timing": {
                "queue_seconds": 0.1,
                "prefill_seconds": 0.2,
                "time_to_first_token_seconds": 1.0,
                "total_seconds": 3.0,
            },
        }

    async def test_show_speculation_colours_a_terminal(self, gateway: FakeGateway) -> None:
        status, out = await run_on_terminal("generate", "--address", gateway.address, "--show-speculation", "tell")
        assert status == 0
        assert out.startswith(f"\x1b[32mOnce\x1b[0m\x1b[4;31m \x1b[0m\x1b[32m{SMILE}\x1b[0m\x1b[1;36mupon\x1b[0m")
        assert gateway.requests[0].token_texts

    async def test_show_speculation_keeps_a_pipe_clean_and_explains_on_stderr(self, gateway: FakeGateway) -> None:
        status, out, err = await run("generate", "--address", gateway.address, "--show-speculation", "tell")
        assert (status, out) == (0, TEXT + "\n")
        assert "recovered" in err
        assert "3 of 6 draft tokens accepted (50%, coupled verification)" in err
        assert "no drafter from position 6 on: DRAFTER_MAX_LENGTH" in err

    async def test_a_bad_request_is_exit_2(self, gateway: FakeGateway) -> None:
        prompt = "fail INVALID_ARGUMENT sampling.top_p: must be at most 1"
        status, out, err = await run("generate", "--address", gateway.address, "--json", prompt)
        assert (status, out, err) == (2, "", "outrider: sampling.top_p: must be at most 1\n")

    @pytest.mark.parametrize(
        "arguments",
        [
            ("--max-tokens", "-1"),
            ("--max-tokens", "many"),
            ("--seed", "-1"),
            ("--verification", "hope"),
            ("--timeout", "nan"),
            ("--json", "--show-speculation"),
            ("--logprobs", "2"),
            ("--address", "localhost"),
            ("--address", "localhost:99999"),
            ("--address", "localhost:0"),
            ("--address", "::1:50051"),
            ("--max-tok", "3"),
            ("--unknown",),
        ],
    )
    async def test_a_bad_command_line_is_exit_2(self, arguments: tuple[str, ...]) -> None:
        status, out, err = await run("generate", *arguments, "tell")
        assert (status, out) == (2, "")
        assert "Traceback" not in err

    async def test_stdin_that_is_no_text_is_exit_2(self) -> None:
        status, _, err = await run("generate", stdin=b"\xff\xfe")
        assert status == 2
        assert "not UTF-8" in err

    @pytest.mark.parametrize("word", ["ABORTED", "RESOURCE_EXHAUSTED", "INTERNAL"])
    async def test_other_errors_are_exit_1(self, gateway: FakeGateway, word: str) -> None:
        status, out, err = await run("generate", "--address", gateway.address, f"fail {word} because")
        assert (status, out, err) == (1, "", f"outrider: {word}: because\n")

    async def test_nobody_there_is_exit_1(self) -> None:
        status, _, err = await run("generate", "--address", "127.0.0.1:1", "tell")
        assert status == 1
        assert err.startswith("outrider: UNAVAILABLE: ")
        assert err.endswith("\nIs a gateway at 127.0.0.1:1? `outrider up` starts one.\n")

    async def test_who_is_there_and_unavailable_needs_no_other(self, gateway: FakeGateway) -> None:
        status, _, err = await run("generate", "--address", gateway.address, "fail UNAVAILABLE loading")
        assert (status, err) == (1, "outrider: UNAVAILABLE: loading\n")

    async def test_a_timeout_is_exit_1(self, gateway: FakeGateway) -> None:
        status, _, err = await run("generate", "--address", gateway.address, "--timeout", "0.5", "hang")
        assert (status, err) == (1, "outrider: DEADLINE_EXCEEDED: Deadline Exceeded\n")

    @pytest.mark.usefixtures("interruptible")
    async def test_ctrl_c_cancels_the_request(self, gateway: FakeGateway) -> None:
        process = await start("generate", "--address", gateway.address, "endless")
        assert process.stdout is not None
        await process.stdout.readexactly(3)
        process.send_signal(signal.SIGINT)
        _, err = await asyncio.wait_for(process.communicate(), 10)
        assert (process.returncode, err) == (130, b"")
        await asyncio.wait_for(gateway.was_cancelled.wait(), 5)

    async def test_ctrl_c_may_come_anywhere(self, gateway: FakeGateway) -> None:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.outrider.interrupt_anywhere", gateway.address, "1", "600", "20",
            cwd=ROOT, stdout=subprocess.PIPE,
        )  # fmt: skip
        out, _ = await asyncio.wait_for(process.communicate(), 120)
        assert json.loads(out) == {"tried": 30, "wrong": []}

    async def test_a_reader_that_leaves_is_no_error(self, gateway: FakeGateway) -> None:
        reader, writer = os.pipe()
        process = await start("generate", "--address", gateway.address, "endless", stdout=writer)
        os.close(writer)
        assert await asyncio.to_thread(os.read, reader, 1) == b"x"
        os.close(reader)
        _, err = await asyncio.wait_for(process.communicate(), 10)
        assert (process.returncode, err) == (1, b"")
        await asyncio.wait_for(gateway.was_cancelled.wait(), 5)


async def run_on_terminal(*arguments: str) -> tuple[int, str]:
    """Exit status of the command, and what it wrote to the terminal that is its stdout."""
    parent, child = pty.openpty()
    process = await start(*arguments, stdout=child, TERM="xterm", NO_COLOR="")
    os.close(child)
    await asyncio.wait_for(process.communicate(), 30)
    out = await asyncio.to_thread(os.read, parent, 4096)
    os.close(parent)
    assert process.returncode is not None
    return process.returncode, out.decode()


class TestUp:
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (("--target", "/nowhere", "--draft", "/nowhere"), "--target: no model in /nowhere"),
            (("--target", "/nowhere"), "belong together"),
            (("--drafter", "ngram", "--draft", "/nowhere"), "does not use"),
            (("--drafter", "scripted"), "--script"),
            (("--port", "0"), "not a port"),
            (("--port", "65536"), "not a port"),
            (("--max-draft-tokens", "0"), "--max-draft-tokens"),
            (("--num-drafters", "many"), "--num-drafters"),
            (("--draft-device", "tpu"), "--draft-device"),
            (("--chat-template", "/nowhere"), "--chat-template"),
        ],
    )
    async def test_what_cannot_be_is_exit_2(self, arguments: tuple[str, ...], message: str) -> None:
        status, _, err = await run("up", *arguments)
        assert status == 2
        assert message in err
        assert "Traceback" not in err

    @pytest.mark.parametrize("log_dir", ["{tmp_path}/config.json/logs", "/proc/self/task"])
    async def test_logs_that_cannot_be_written_are_exit_1(self, tmp_path: Path, log_dir: str) -> None:
        (tmp_path / "config.json").write_text("{}")
        directory = log_dir.format(tmp_path=tmp_path)
        status, _, err = await run("up", "--target", str(tmp_path), "--draft", str(tmp_path), "--log-dir", directory)
        assert status == 1
        assert f"outrider: cannot write logs to {directory}: " in err
        assert "Traceback" not in err

    async def test_an_open_address_is_named_with_its_port(self) -> None:
        status, _, err = await run("up", "--host", "0.0.0.0", "--port", "12345")
        assert status == 2
        assert err.startswith("outrider: other machines can reach 0.0.0.0:12345: set --tls-certificate and --tls-key")

    async def test_a_taken_port_is_exit_1(self, gateway: FakeGateway, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text("{}")
        port = gateway.address.rpartition(":")[2]
        status, _, err = await run("up", "--port", port, "--target", str(tmp_path), "--draft", str(tmp_path))
        assert status == 1
        assert f"cannot listen on 127.0.0.1:{port}" in err


class TestPieces:
    def test_an_empty_token_shows_with_the_next(self) -> None:
        chunk = Chunk("a", (Token(1, TokenOrigin.ACCEPTED, ""), Token(2, TokenOrigin.BONUS, "a")))
        assert pieces(chunk) == [("a", TokenOrigin.BONUS)]

    def test_text_behind_the_last_token_takes_its_colour(self) -> None:
        chunk = Chunk("ab", (Token(1, TokenOrigin.ACCEPTED, "a"),))
        assert pieces(chunk) == [("a", TokenOrigin.ACCEPTED), ("b", TokenOrigin.ACCEPTED)]

    def test_a_gateway_that_tells_no_token_texts(self) -> None:
        chunk = Chunk("ab", (Token(1, TokenOrigin.ACCEPTED), Token(2, TokenOrigin.RECOVERED)))
        assert pieces(chunk) == [("ab", TokenOrigin.RECOVERED)]

    def test_nothing(self) -> None:
        assert pieces(Chunk("", ())) == []


def completion(*token_ids: int, drafted: int, accepted: int, steps: int) -> Completion:
    return Completion(
        request_id="",
        model="",
        seed=0,
        text="",
        tokens=tuple(Token(token_id, TokenOrigin.PLAIN) for token_id in token_ids),
        finish_reason=FinishReason.LENGTH,
        stop_string="",
        usage=Usage(1, len(token_ids)),
        speculation=SpeculationStatistics(steps, drafted, accepted, (), ()),
        timings=Timings(0.0, 0.1, 1.0, 2.0),
    )


class TestDemoReport:
    @pytest.mark.parametrize(
        ("speculative", "is_exact", "status", "sentence"),
        [
            (completion(1, 2, 3, drafted=4, accepted=1, steps=2), True, 0, "yes, all 3 tokens"),
            (completion(1, 2, 9, drafted=4, accepted=1, steps=2), True, 1, "no, from token 2 on"),
            (completion(1, 2, 9, drafted=4, accepted=1, steps=2), False, 0, "no, from token 2 on"),
            (completion(1, 2, drafted=4, accepted=1, steps=2), True, 1, "no, from token 2 on"),
        ],
    )
    @pytest.mark.parametrize("name", ["greedy", "sampled"])
    def test_outputs_with_and_without_drafts_are_compared(
        self,
        capsys: pytest.CaptureFixture[str],
        name: str,
        speculative: Completion,
        is_exact: bool,
        status: int,
        sentence: str,
    ) -> None:
        plain = completion(1, 2, 3, drafted=0, accepted=0, steps=3)
        same = completion(1, 2, 3, drafted=4, accepted=1, steps=2)
        pairs = [(speculative, plain), (same, plain)] if name == "greedy" else [(same, plain), (speculative, plain)]
        runs = [[item] for pair in pairs for item in pair]
        assert demo.report(runs, is_exact=is_exact, console=Console()) == status
        assert f"same {name} output with and without speculation: {sentence}" in capsys.readouterr().out

    def test_a_run_without_drafts_fails(self, capsys: pytest.CaptureFixture[str]) -> None:
        plain = completion(1, 2, 3, drafted=0, accepted=0, steps=3)
        assert demo.report([[plain]] * 4, is_exact=True, console=Console()) == 1
        assert "Nothing was drafted" in capsys.readouterr().out


async def test_the_page_is_not_where_grpc_is(gateway: FakeGateway) -> None:
    status, out, err = await run("dashboard", "--address", gateway.address)
    assert (status, out) == (1, "")
    assert "not by HTTP" in err
    assert "Traceback" not in err


def test_nothing_asked_for_is_answered_with_examples(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    assert 'outrider generate "def main():"' in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("outrider ")
