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
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from outrider import origins
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
from outrider.connection import API_KEY_VARIABLE
from outrider.service.address import check_address

if TYPE_CHECKING:
    from outrider.front_door import FrontDoor

EXIT_FAILED = 1
EXIT_BAD_USAGE = 2
EXIT_INTERRUPTED = 130
DEFAULT_PORT = 50051
DEFAULT_HTTP_PORT = 8080

_EXAMPLES = """\
examples:
  outrider up                                    the bundled pair of models, until Ctrl-C
  outrider generate "def main():"                in another terminal
  outrider generate --show-speculation < prompt.txt
  outrider up --target DIR --draft DIR --http-port 8080
  outrider dashboard                             the page of the one with --http-port
  outrider demo                                  start, compare with and without speculation, end

`outrider COMMAND --help` has all flags of a command."""


class UsageError(Exception):
    """The command line asks for what cannot be; the message is for the user."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; its exit status. Errors that a user can act on are one line on stderr."""
    parser = _parser()
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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="outrider",
        description="Speculative decoding with drafting and verifying as services of their own.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"outrider {_version()}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_up(commands)
    _add_generate(commands)
    _add_dashboard(commands)
    _add_demo(commands)
    return parser


def _add_up(commands: Any) -> None:
    up = commands.add_parser(
        "up", help="start gateway, verifier and drafter on this machine", description=_up.__doc__, allow_abbrev=False
    )
    up.add_argument("--host", default="127.0.0.1", help="address that the gateway listens on (default %(default)s)")
    up.add_argument("--port", type=_port, default=DEFAULT_PORT, help="port of the gateway (default %(default)s)")
    up.add_argument(
        "--http-port",
        type=_port,
        metavar="PORT",
        help="serve HTTP too: an OpenAI-compatible API, and a page at /dashboard (default: no HTTP)",
    )
    _add_models(up)
    _add_front_door(up)
    up.add_argument("--model-name", help="name that clients see (default: the target's own)")
    up.add_argument("--drain-seconds", type=_seconds, default=10.0, metavar="S",
                    help="how long running requests may go on after Ctrl-C (default %(default)g)")  # fmt: skip
    up.add_argument("--log-level", choices=["DEBUG", "INFO", "WARNING", "ERROR"], default="INFO")
    up.add_argument("--log-dir", type=Path, metavar="DIR", help="where to write the logs (default: a temporary folder)")
    up.set_defaults(run=_up)


def _add_models(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--target", type=Path, metavar="DIR", help="target model (default: the bundled one)")
    parser.add_argument("--draft", type=Path, metavar="DIR", help="draft model (default: the bundled one)")
    parser.add_argument(
        "--drafter",
        choices=["model", "ngram", "scripted", "none"],
        default="model",
        help="what drafts: a model, look-up in the text so far, a script, nothing (default %(default)s)",
    )
    parser.add_argument("--script", default="", help="for --drafter scripted: MODULE:FUNCTION or a JSON file")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (default %(default)s)")
    parser.add_argument("--dtype", default="auto", help="auto, float32 or bfloat16 (default %(default)s)")


def _add_front_door(parser: argparse.ArgumentParser) -> None:
    door = parser.add_argument_group("front door", "Who may call the gateway; see docs/security.md.")
    door.add_argument("--api-keys", type=_file, metavar="FILE", help="TOML file with the keys of those who may call")
    door.add_argument("--tls-certificate", type=_file, metavar="FILE", help="serve by TLS, with this certificate")
    door.add_argument("--tls-key", type=_file, metavar="FILE", help="the certificate's private key")
    door.add_argument("--tls-client-ca", type=_file, metavar="FILE", help="authorities of certificates of clients")
    door.add_argument("--allow-plaintext", action="store_true", help="no TLS, although other machines can reach --host")
    door.add_argument(
        "--allow-unauthenticated", action="store_true", help="let anyone call, although other machines can reach --host"
    )


def _add_connection(parser: argparse.ArgumentParser) -> None:
    connection = parser.add_argument_group("connection")
    connection.add_argument(
        "--api-key-file", type=_file, metavar="FILE", help=f"file with the API key (default: ${API_KEY_VARIABLE})"
    )
    connection.add_argument("--tls", action="store_true", help="by TLS, which the next four imply")
    connection.add_argument("--ca", type=_file, metavar="FILE", help="authorities of the gateway's certificate")
    connection.add_argument("--certificate", type=_file, metavar="FILE", help="certificate to show to the gateway")
    connection.add_argument("--certificate-key", type=_file, metavar="FILE", help="its private key")
    connection.add_argument(
        "--server-name", default="", metavar="NAME", help="what the gateway's certificate is for, if not the host"
    )


def _add_generate(commands: Any) -> None:
    generate = commands.add_parser(
        "generate", help="stream one completion", description=_generate.__doc__, allow_abbrev=False
    )
    generate.add_argument("prompt", nargs="?", metavar="PROMPT", help="text to continue; - or none reads stdin")
    generate.add_argument(
        "--address", type=_address, default=f"localhost:{DEFAULT_PORT}", help="gateway (default %(default)s)"
    )
    _add_connection(generate)
    sampling = generate.add_argument_group("sampling")
    sampling.add_argument("--temperature", type=float, metavar="T", help="0 is greedy (default 1)")
    sampling.add_argument("--top-k", type=int, metavar="K", help="keep the K most likely tokens")
    sampling.add_argument("--top-p", type=float, metavar="P", help="keep the likeliest tokens with this probability")
    sampling.add_argument("--min-p", type=float, metavar="P", help="keep tokens with this share of the likeliest's")
    sampling.add_argument("--repetition-penalty", type=float, metavar="X")
    sampling.add_argument("--presence-penalty", type=float, metavar="X")
    sampling.add_argument("--frequency-penalty", type=float, metavar="X")
    sampling.add_argument("--seed", type=int, metavar="N", help="repeat the random numbers of an earlier request")
    stopping = generate.add_argument_group("stopping")
    stopping.add_argument("--max-tokens", type=int, metavar="N", help="default: up to the model's context length")
    stopping.add_argument("--stop", action="append", metavar="TEXT", help="end before this text; may be repeated")
    stopping.add_argument("--stop-token-id", action="append", type=int, dest="stop_token_ids", metavar="ID")
    stopping.add_argument("--ignore-eos", action="store_true", help="go on past the model's end-of-sequence token")
    speculation = generate.add_argument_group("speculation")
    speculation.add_argument("--no-speculation", action="store_true", help="decode with the target alone")
    speculation.add_argument("--max-draft-tokens", type=int, metavar="K", help="most draft tokens a step, 1 to 32")
    speculation.add_argument("--verification", choices=list(Verification), help="how draft tokens are verified")
    output = generate.add_argument_group("output")
    how = output.add_mutually_exclusive_group()
    how.add_argument("--json", action="store_true", help="print one JSON object at the end, nothing else")
    how.add_argument("--show-speculation", action="store_true", help="colour tokens by where they came from")
    output.add_argument(
        "--logprobs", type=int, metavar="N", help="with --json: log-probabilities, and those of the top N"
    )
    generate.add_argument("--request-id", default="", help="for logs and traces")
    generate.add_argument("--timeout", type=_seconds, metavar="S", help="give up after this many seconds")
    generate.set_defaults(run=_generate)


def _add_dashboard(commands: Any) -> None:
    page = commands.add_parser(
        "dashboard", help="open the page of a running gateway", description=_dashboard.__doc__, allow_abbrev=False
    )
    page.add_argument(
        "--address",
        type=_host_and_port,
        default=f"localhost:{DEFAULT_HTTP_PORT}",
        help="the gateway's HTTP (default %(default)s)",
    )
    page.add_argument("--no-open", action="store_true", help="print the URL, open no browser")
    page.set_defaults(run=_dashboard)


def _add_demo(commands: Any) -> None:
    demo = commands.add_parser(
        "demo", help="start everything, generate with and without speculation, compare", description=_demo.__doc__,
        allow_abbrev=False,
    )  # fmt: skip
    _add_models(demo)
    demo.add_argument("--max-tokens", type=int, default=128, metavar="N", help="tokens a run (default %(default)s)")
    demo.add_argument("--prompt", help="text to continue (default: from a file that the models were not trained on)")
    demo.set_defaults(run=_demo)


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
            f"({speculation.acceptance_rate:.0%})"
        )
    parts += [f"no drafter from position {item.position} on: {item.reason}" for item in speculation.fallbacks]
    if completion.tokens_per_second is not None:
        parts.append(f"{completion.tokens_per_second:.1f} tokens/s")
    return ", ".join(parts)


def _prompt(argument: str | None) -> str:
    if argument is not None and argument != "-":
        return argument
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"stdin is not UTF-8: {error}") from error


def _host_and_port(text: str) -> str:
    try:
        return check_address(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _address(text: str) -> str:
    # Other ways to name a gateway are gRPC's business.
    return text if text.startswith(("dns:", "unix:", "ipv4:", "ipv6:")) else _host_and_port(text)


def _port(text: str) -> int:
    if not text.isdigit() or not 0 < int(text) < 1 << 16:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port, 1 to 65535")
    return int(text)


def _file(text: str) -> Path:
    path = Path(text)
    if not path.is_file():
        raise argparse.ArgumentTypeError(f"no file at {text}")
    return path.resolve()


def _seconds(text: str) -> float:
    seconds = float(text)
    # Written so that NaN fails too.
    if not 0 <= seconds < 1e9:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time in seconds")
    return seconds


def _version() -> str:
    try:
        return metadata.version("outrider")
    except metadata.PackageNotFoundError:
        return "of a checkout that is not installed"


if __name__ == "__main__":
    sys.exit(main())
