"""The `outrider` command: up, generate, dashboard, demo."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from rich.console import Console

from outrider import origins
from outrider.arguments import make_parser
from outrider.bundled import bundled_model
from outrider.client import (
    AsyncClient,
    Chunk,
    ClientError,
    Completion,
    GenerateOptions,
    InvalidRequestError,
    Tls,
    UnavailableError,
    Verification,
)
from outrider.completion import CompletionBuilder

if TYPE_CHECKING:
    from outrider.front_door import FrontDoor

EXIT_FAILED = 1
EXIT_BAD_USAGE = 2
EXIT_INTERRUPTED = 130


class UsageError(Exception):
    """The command line asks for what cannot be; the message is for the user."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; its exit status. Errors that a user can act on are one line on stderr."""
    parser = make_parser(up=_up, generate=_generate, dashboard=_dashboard, demo=_demo)
    if not (sys.argv[1:] if arguments is None else arguments):
        parser.print_help()
        return EXIT_BAD_USAGE
    parsed = parser.parse_args(arguments)
    try:
        status: int = parsed.run(parsed)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader has gone: let the interpreter's last flush go nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except (UsageError, InvalidRequestError) as error:
        print(f"outrider: {error}", file=sys.stderr)
        return EXIT_BAD_USAGE
    except ClientError as error:
        print(f"outrider: {error.code.name}: {error}{_advice(error, parsed)}", file=sys.stderr)
        return EXIT_FAILED
    return status


def _advice(error: ClientError, parsed: argparse.Namespace) -> str:
    # In gRPC's own words, not those of a gateway that is loading or draining.
    words = ("failed to connect", "DNS resolution failed")
    is_nobody_there = isinstance(error, UnavailableError) and error.message.startswith(words)
    return f"\nIs a gateway at {parsed.address}? `outrider up` starts one." if is_nobody_there else ""


def _up(parsed: argparse.Namespace) -> int:
    """Start gateway, verifier and drafter on this machine, each in its own process, and serve until Ctrl-C."""
    from outrider.front_door import FrontDoor
    from outrider.local import Options
    from outrider.up import run_up

    front_door = FrontDoor(**{field.name: getattr(parsed, field.name) for field in fields(FrontDoor)})
    _check_front_door(parsed.host, parsed.port, front_door)
    options = Options(
        **_models(parsed),
        front_door=front_door,
        host=parsed.host,
        port=parsed.port,
        http_port=parsed.http_port,
        model_name=parsed.model_name,
        chat_template=parsed.chat_template,
        num_drafters=parsed.num_drafters,
        max_draft_tokens=parsed.max_draft_tokens,
        verification=parsed.verification,
        num_candidates=parsed.num_candidates,
        max_running=parsed.max_running,
        max_model_len=parsed.max_model_len,
        drain_seconds=parsed.drain_seconds,
        log_level=parsed.log_level,
        log_directory=parsed.log_dir,
    )
    return run_up(options, Console(stderr=True))


def _check_front_door(host: str, port: int, front_door: FrontDoor) -> None:
    # The gateway would refuse as well, but only once the models are loaded.
    from gateway.auth import Authenticator
    from gateway.settings import GatewaySettings
    from outrider.service.security import ServerSecurity
    from outrider.service.settings import BadSettingsError

    flags = ["--listen", f"{host}:{port}", "--verifiers", "127.0.0.1:1", *front_door.flags()]
    try:
        settings = GatewaySettings.load(flags, program="outrider up")
        ServerSecurity(settings)
        if settings.api_keys is not None:
            Authenticator(settings.api_keys)
    except BadSettingsError as error:
        raise UsageError(str(error)) from error


def _demo(parsed: argparse.Namespace) -> int:
    """Start everything on free ports, continue one prompt with and without speculation, and compare."""
    from outrider.demo import run_demo
    from outrider.local import Options

    return run_demo(Options(**_models(parsed)), parsed.prompt, parsed.max_tokens, Console())


def _dashboard(parsed: argparse.Namespace) -> int:
    """Open the page that a gateway serves: live tokens, acceptance, the steps of requests, pools, fallbacks.

    `outrider up --http-port 8080` serves it, and so does any gateway with --http-listen and --dashboard.
    """
    from outrider import dashboard

    try:
        url = dashboard.find(parsed.address)
    except dashboard.NoDashboardError as error:
        print(f"outrider: {error}", file=sys.stderr)
        return EXIT_FAILED
    dashboard.show(url, opens_browser=not parsed.no_open)
    return 0


def _models(parsed: argparse.Namespace) -> dict[str, Any]:
    kind = parsed.drafter
    if parsed.draft is not None and kind != "model":
        raise UsageError(f"--draft names a draft model, which --drafter {kind} does not use")
    if kind == "model" and (parsed.target is None) != (parsed.draft is None):
        raise UsageError("--target and --draft belong together: the bundled models fit only each other")
    if bool(parsed.script) != (kind == "scripted"):
        raise UsageError("--script belongs to --drafter scripted")
    try:
        target = parsed.target or bundled_model("target")
        draft = (parsed.draft or bundled_model("draft")) if kind == "model" else None
    except FileNotFoundError as error:
        raise UsageError(f"{error}; name models with --target and --draft") from error
    for flag, directory in (("--target", target), ("--draft", draft)):
        if directory is not None and not (directory / "config.json").is_file():
            raise UsageError(f"{flag}: no model in {directory}, it has no config.json")
    return {
        "target": target.resolve(),
        "draft": draft.resolve() if draft is not None else None,
        "drafter": kind,
        "script": parsed.script,
        "device": parsed.device,
        "target_device": parsed.target_device,
        "draft_device": parsed.draft_device,
        "dtype": parsed.dtype,
    }


def _generate(parsed: argparse.Namespace) -> int:
    """Stream one completion of PROMPT from a gateway to stdout."""
    if parsed.logprobs is not None and not parsed.json:
        raise UsageError("--logprobs needs --json, which has a place for them")
    prompt = _prompt(parsed.prompt)
    options: GenerateOptions = {
        "max_tokens": parsed.max_tokens,
        "temperature": parsed.temperature,
        "top_k": parsed.top_k,
        "top_p": parsed.top_p,
        "min_p": parsed.min_p,
        "repetition_penalty": parsed.repetition_penalty,
        "presence_penalty": parsed.presence_penalty,
        "frequency_penalty": parsed.frequency_penalty,
        "seed": parsed.seed,
        "stop": parsed.stop,
        "stop_token_ids": parsed.stop_token_ids,
        "ignore_eos": parsed.ignore_eos,
        "speculation": not parsed.no_speculation,
        "max_draft_tokens": parsed.max_draft_tokens,
        "verification": parsed.verification,
        "logprobs": parsed.logprobs,
        "token_texts": parsed.show_speculation,
        "request_id": parsed.request_id,
    }
    # An event loop takes Ctrl-C between two steps of its own. Raised inside the locks of gRPC's blocking calls,
    # KeyboardInterrupt became a RuntimeError or a crash.
    completion = asyncio.run(_stream(parsed, prompt, options))
    if parsed.json:
        print(json.dumps(completion_as_json(completion), ensure_ascii=False))
        return 0
    print()
    if parsed.show_speculation:
        notes = Console(stderr=True, highlight=False, soft_wrap=True)
        notes.print(origins.legend(completion.tokens))
        notes.print(summary(completion))
    return 0


async def _stream(parsed: argparse.Namespace, prompt: str, options: GenerateOptions) -> Completion:
    builder = CompletionBuilder()
    console = Console(file=sys.stdout)
    async with (
        _client(parsed) as client,
        # Closed, not only left, when stdout's reader is gone: that cancels the request.
        aclosing(client.stream(prompt, timeout=parsed.timeout, **options)) as events,
    ):
        async for event in events:
            builder.add(event)
            if parsed.json or not isinstance(event, Chunk):
                continue
            if parsed.show_speculation:
                origins.write(console, event)
            else:
                sys.stdout.write(event.text)
                sys.stdout.flush()
    return builder.build()


def _client(parsed: argparse.Namespace) -> AsyncClient:
    files = {"ca": parsed.ca, "certificate": parsed.certificate, "key": parsed.certificate_key}
    has_tls = parsed.tls or parsed.server_name or any(files.values())
    tls = Tls(**files, server_name=parsed.server_name) if has_tls else None
    try:
        api_key = None if parsed.api_key_file is None else parsed.api_key_file.read_text(encoding="utf-8").strip()
        return AsyncClient(parsed.address, api_key=api_key, tls=tls)
    except (OSError, ValueError) as error:
        raise UsageError(str(error)) from error


def completion_as_json(completion: Completion) -> dict[str, Any]:
    """What `generate --json` prints."""
    speculation, timings = completion.speculation, completion.timings
    as_json: dict[str, Any] = {
        "request_id": completion.request_id,
        "model": completion.model,
        "seed": completion.seed,
        "text": completion.text,
        "token_ids": list(completion.token_ids),
        "token_origins": [token.origin.value for token in completion.tokens],
        "finish_reason": completion.finish_reason.value,
        "stop_string": completion.stop_string or None,
        "usage": {
            "prompt_tokens": completion.usage.num_prompt_tokens,
            "output_tokens": completion.usage.num_output_tokens,
        },
        "speculation": {
            "verification": speculation.verification,
            "steps": speculation.num_steps,
            "drafted": speculation.num_draft_tokens,
            "accepted": speculation.num_accepted_tokens,
            "accepted_per_position": list(speculation.num_accepted_per_position),
            "acceptance_rate": speculation.acceptance_rate,
            "mean_acceptance_length": completion.mean_acceptance_length,
            "fallbacks": [{"reason": item.reason.value, "position": item.position} for item in speculation.fallbacks],
        },
        "timing": {
            "queue_seconds": timings.queue_seconds,
            "prefill_seconds": timings.prefill_seconds,
            "time_to_first_token_seconds": timings.time_to_first_token_seconds,
            "total_seconds": timings.total_seconds,
        },
    }
    if any(token.logprob is not None for token in completion.tokens):
        as_json["logprobs"] = [
            {"logprob": token.logprob, "top": [[top.token_id, top.logprob] for top in token.top_logprobs]}
            for token in completion.tokens
        ]
    return as_json


def summary(completion: Completion) -> str:
    """One line on what speculation did."""
    speculation = completion.speculation
    parts = [f"{completion.usage.num_output_tokens} tokens in {speculation.num_steps} target steps"]
    if speculation.acceptance_rate is not None:
        parts.append(
            f"{speculation.num_accepted_tokens} of {speculation.num_draft_tokens} draft tokens accepted "
            f"({speculation.acceptance_rate:.0%}{_by(speculation.verification)})"
        )
    parts += [f"no drafter from position {item.position} on: {item.reason}" for item in speculation.fallbacks]
    if completion.tokens_per_second is not None:
        parts.append(f"{completion.tokens_per_second:.1f} tokens/s")
    return ", ".join(parts)


def _by(verification: Verification | None) -> str:
    return "" if verification is None else f", {verification} verification"


def _prompt(argument: str | None) -> str:
    if argument is not None and argument != "-":
        return argument
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"stdin is not UTF-8: {error}") from error


if __name__ == "__main__":
    sys.exit(main())
