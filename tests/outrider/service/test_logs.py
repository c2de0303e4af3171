"""Log lines for people and for machines, with the ids of the request that they are about."""

from __future__ import annotations

import asyncio
import io
import json
import logging
from collections.abc import Iterator

import pytest

from outrider.service.logs import LogFormat, Subject, about, set_up_logging

TRACE_ID, SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SUBJECT = Subject("r-1", 7, f"00-{TRACE_ID}-{SPAN_ID}-01")
logger = logging.getLogger("tests.logs")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def root_logger() -> Iterator[None]:
    """Puts back what pytest had set up."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    # Or setting up anew would close them.
    root.handlers.clear()
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def logged(log_format: LogFormat, stream: io.StringIO | None = None, level: str = "INFO") -> io.StringIO:
    stream = stream or io.StringIO()
    set_up_logging(level, "gateway", log_format, stream)
    return stream


def test_json_has_the_ids_and_one_line_a_record() -> None:
    stream = logged("json")
    logger.info("outside")
    with about(SUBJECT):
        logger.warning("two\nlines, %d numbers", 2, extra={"num_tokens": 5})
        try:
            raise ValueError("no")
        except ValueError:
            logger.exception("failed")
    outside, warning, failure = (json.loads(line) for line in stream.getvalue().splitlines())
    assert "trace_id" not in outside
    assert warning["message"] == "two\nlines, 2 numbers"
    assert (warning["severity"], warning["service"], warning["logger"]) == ("WARNING", "gateway", "tests.logs")
    ids = {"trace_id": TRACE_ID, "span_id": SPAN_ID, "request_id": "r-1", "sequence_id": 7}
    assert ids.items() <= warning.items()
    assert warning["num_tokens"] == 5
    assert "ValueError: no" in failure["exception"]
    assert warning["timestamp"].endswith("+00:00")


def test_text_for_a_terminal_and_json_for_a_pod() -> None:
    stream = logged("auto", Terminal())
    with about(SUBJECT):
        logger.info("hello")
    assert f"I gateway tests.logs: hello [request_id=r-1 sequence_id=7 trace_id={TRACE_ID}" in stream.getvalue()
    stream = logged("auto")
    logger.info("hello")
    assert json.loads(stream.getvalue())["message"] == "hello"


def test_a_request_id_cannot_forge_a_line() -> None:
    """Catches ids, which clients choose, that look like lines or fields of their own."""
    stream = logged("text")
    with about(Subject("x\n2026-01-01 E gateway root: all is lost trace_id=1")):
        logger.info("hello")
    assert len(stream.getvalue().splitlines()) == 1
    assert 'request_id="x\\n2026' in stream.getvalue()


async def test_tasks_do_not_mix() -> None:
    stream = logged("json")

    async def work(name: str) -> None:
        with about(Subject(name)):
            await asyncio.sleep(0)
            logger.info(name)
            await asyncio.sleep(0)
        logger.info("done")

    await asyncio.gather(*(work(str(number)) for number in range(5)))
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert len(lines) == 10
    for line in lines:
        assert line.get("request_id") == (None if line["message"] == "done" else line["message"])


def test_less_severe_lines_are_left_out() -> None:
    stream = logged("text", level="WARNING")
    logger.info("hello")
    assert stream.getvalue() == ""
