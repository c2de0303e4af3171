"""Log lines: text for a person at a terminal, JSON for what collects a pod's output; both say which request they mean.

Nothing here, and nothing that logs, ever writes a prompt or a completion.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal, TextIO

LogFormat = Literal["auto", "json", "text"]

# What a record has by itself; anything else was given by `extra`.
_OWN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


@dataclass(frozen=True)
class Subject:
    """The request that the work at hand is for."""

    request_id: str = ""
    sequence_id: int | None = None
    traceparent: str = ""

    def fields(self) -> dict[str, str | int]:
        """What is known of it, by the names under which logs have it."""
        fields: dict[str, str | int] = {}
        if self.request_id:
            fields["request_id"] = self.request_id
        if self.sequence_id is not None:
            fields["sequence_id"] = self.sequence_id
        parts = self.traceparent.split("-")
        if len(parts) == 4:
            fields["trace_id"], fields["span_id"] = parts[1], parts[2]
        return fields


_subject: ContextVar[Subject | None] = ContextVar("outrider_log_subject", default=None)


@contextmanager
def about(subject: Subject) -> Iterator[None]:
    """Whatever is logged in this block, in this task or thread, is about that request."""
    before = _subject.get()
    _subject.set(subject)
    try:
        yield
    finally:
        # Not by a token: a generator may be closed in another context than the one that it began in.
        _subject.set(before)


def set_up_logging(level: str, service: str, log_format: LogFormat = "auto", stream: TextIO | None = None) -> None:
    """Log to stderr, or to `stream`. `auto` is text on a terminal and JSON anywhere else."""
    stream = sys.stderr if stream is None else stream
    is_text = log_format == "text" or (log_format == "auto" and stream.isatty())
    handler = logging.StreamHandler(stream)
    handler.setFormatter(TextFormatter(service) if is_text else JsonFormatter(service))
    logging.basicConfig(level=level, handlers=[handler], force=True)


class TextFormatter(logging.Formatter):
    """One line a record, and the request's ids behind it."""

    def __init__(self, service: str) -> None:
        super().__init__(f"%(asctime)s %(levelname).1s {service} %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        """The line without a traceback, which follows below it."""
        line = super().formatMessage(record)
        fields = _fields(record)
        return f"{line} [{' '.join(f'{key}={_word(value)}' for key, value in fields.items())}]" if fields else line


class JsonFormatter(logging.Formatter):
    """One object a line, with the names that OpenTelemetry's log model gives to its fields where it has any."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        """The record as one line of JSON."""
        entry: dict[str, object] = {
            "timestamp": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="microseconds"),
            "severity": record.levelname,
            "service": self._service,
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            entry["stack"] = self.formatStack(record.stack_info)
        return json.dumps(entry, ensure_ascii=False, default=str)


def _word(value: object) -> str:
    # A client chooses its request id: it shall not begin a line of its own, nor look like another field.
    text = str(value)
    return text if text.isprintable() and " " not in text else json.dumps(text)


def _fields(record: logging.LogRecord) -> dict[str, object]:
    subject = _subject.get()
    extra = {key: value for key, value in vars(record).items() if key not in _OWN}
    return {**(subject.fields() if subject is not None else {}), **extra}
