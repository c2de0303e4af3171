"""Shows on the terminal how the services of a local cluster come up and what becomes of them."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

from outrider.local import Report, ServiceState


class ClusterProgress:
    """A spinner for each service that loads, a line for each change that stays. Plain lines without a terminal."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Progress(
            SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), console=console, transient=True
        )
        self._tasks: dict[str, TaskID] = {}

    def report(self, report: Report) -> None:
        """Take one change."""
        name, message = f"{report.service:<8}", report.message
        match report.state:
            case ServiceState.LOADING:
                self._wait(report.service, "loading")
            case ServiceState.SERVING:
                self._settle(report.service)
                self._print(Text("✓ ", style="green") + Text(f"{name} {message}"))
            case ServiceState.LOST:
                self._settle(report.service)
                self._print(Text("✗ ", style="red") + Text(message))
            case ServiceState.RESTARTING:
                self._print(Text(f"  {name} starts again {message}"))
            case ServiceState.STOPPING:
                self._settle(report.service)
                self._wait(report.service, "finishing what runs")
            case ServiceState.STOPPED:
                self._settle(report.service)

    def _print(self, line: Text) -> None:
        self._console.print(line, soft_wrap=True)

    def _wait(self, service: str, description: str) -> None:
        if not self._console.is_terminal:
            self._print(Text(f"  {service:<8} {description}"))
            return
        self._tasks[service] = self._progress.add_task(f"{service:<8} {description}")
        self._progress.start()

    def _settle(self, service: str) -> None:
        if (task := self._tasks.pop(service, None)) is None:
            return
        self._progress.remove_task(task)
        if not self._tasks:
            # A live display redraws the line that the cursor is on: it must not run while others print.
            self._progress.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for service in list(self._tasks):
            self._settle(service)
