"""The command line of `outrider`: its commands, their flags, and what can be a value."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

from outrider.client import Verification
from outrider.connection import API_KEY_VARIABLE
from outrider.service.address import check_address

DEFAULT_PORT = 50051
DEFAULT_HTTP_PORT = 8080

# Runs a command as its flags say; the exit status.
Command = Callable[[argparse.Namespace], int]

_EXAMPLES = """\
examples:
  outrider up                                    the bundled pair of models, until Ctrl-C
  outrider generate "def main():"                in another terminal
  outrider generate --show-speculation < prompt.txt
  outrider up --target DIR --draft DIR --http-port 8080
  outrider dashboard                             the page of the one with --http-port
  outrider demo                                  start, compare with and without speculation, end

`outrider COMMAND --help` has all flags of a command."""


def make_parser(*, up: Command, generate: Command, dashboard: Command, demo: Command) -> argparse.ArgumentParser:
    """The parser of `outrider`; what it returns has as `run` what runs the command that was given."""
    parser = argparse.ArgumentParser(
        prog="outrider",
        description="Speculative decoding with drafting and verifying as services of their own.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"outrider {_version()}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_up(commands, up)
    _add_generate(commands, generate)
    _add_dashboard(commands, dashboard)
    _add_demo(commands, demo)
    return parser


def _add_up(commands: Any, run: Command) -> None:
    up = commands.add_parser(
        "up", help="start gateway, verifier and drafter on this machine", description=run.__doc__, allow_abbrev=False
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
    _add_capacity(up)
    _add_front_door(up)
    up.add_argument("--model-name", help="name that clients see (default: the target's own)")
    up.add_argument(
        "--chat-template", type=_file, metavar="FILE", help="chat template in Jinja (default: the tokenizer's own)"
    )
    up.add_argument("--drain-seconds", type=_seconds, default=10.0, metavar="S",
                    help="how long running requests may go on after Ctrl-C (default %(default)g)")  # fmt: skip
    up.add_argument("--log-level", choices=["DEBUG", "INFO", "WARNING", "ERROR"], default="INFO")
    up.add_argument("--log-dir", type=Path, metavar="DIR", help="where to write the logs (default: a temporary folder)")
    up.set_defaults(run=run)


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
    parser.add_argument(
        "--device", type=_device, default="auto", help="auto, cpu, cuda or cuda:N (default %(default)s)"
    )
    parser.add_argument("--target-device", type=_device, metavar="DEVICE", help="the target's own (default: --device)")
    parser.add_argument("--draft-device", type=_device, metavar="DEVICE", help="the drafters' own (default: --device)")
    parser.add_argument("--dtype", default="auto", help="auto, float32 or bfloat16 (default %(default)s)")


def _add_capacity(parser: argparse.ArgumentParser) -> None:
    capacity = parser.add_argument_group("speculation and capacity", "By default what the services take by themselves.")
    capacity.add_argument(
        "--max-draft-tokens", type=_count, metavar="K", help="most draft tokens a step, of any request"
    )
    capacity.add_argument(
        "--verification",
        choices=[Verification.REJECTION.value, Verification.COUPLED.value],
        help="how draft tokens of sampled requests without a seed are verified",
    )
    capacity.add_argument(
        "--num-candidates", type=_count, metavar="M", help="candidates kept of the draft model's distribution"
    )
    capacity.add_argument(
        "--num-drafters", type=_count, default=1, metavar="N", help="drafters to start (default %(default)s)"
    )
    capacity.add_argument("--max-running", type=_count, metavar="N", help="most sequences decoded at once")
    capacity.add_argument(
        "--max-model-len", type=_count, metavar="N", help="most tokens of a sequence, prompt and output together"
    )


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


def _add_generate(commands: Any, run: Command) -> None:
    generate = commands.add_parser(
        "generate", help="stream one completion", description=run.__doc__, allow_abbrev=False
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
    sampling.add_argument("--seed", type=int, metavar="N", help="repeat the tokens of an earlier request")
    stopping = generate.add_argument_group("stopping")
    stopping.add_argument("--max-tokens", type=int, metavar="N", help="default: up to the model's context length")
    stopping.add_argument("--stop", action="append", metavar="TEXT", help="end before this text; may be repeated")
    stopping.add_argument("--stop-token-id", action="append", type=int, dest="stop_token_ids", metavar="ID")
    stopping.add_argument("--ignore-eos", action="store_true", help="go on past the model's end-of-sequence token")
    speculation = generate.add_argument_group("speculation")
    speculation.add_argument("--no-speculation", action="store_true", help="decode with the target alone")
    speculation.add_argument("--max-draft-tokens", type=int, metavar="K", help="most draft tokens a step, 1 to 32")
    speculation.add_argument(
        "--verification",
        choices=[rule.value for rule in Verification],
        help="how draft tokens are verified (default: greedy at temperature 0; above, coupled with --seed, else as the "
        "verifier is set)",
    )
    output = generate.add_argument_group("output")
    how = output.add_mutually_exclusive_group()
    how.add_argument("--json", action="store_true", help="print one JSON object at the end, nothing else")
    how.add_argument("--show-speculation", action="store_true", help="colour tokens by where they came from")
    output.add_argument(
        "--logprobs", type=int, metavar="N", help="with --json: log-probabilities, and those of the top N"
    )
    generate.add_argument("--request-id", default="", help="for logs and traces")
    generate.add_argument("--timeout", type=_seconds, metavar="S", help="give up after this many seconds")
    generate.set_defaults(run=run)


def _add_dashboard(commands: Any, run: Command) -> None:
    page = commands.add_parser(
        "dashboard", help="open the page of a running gateway", description=run.__doc__, allow_abbrev=False
    )
    page.add_argument(
        "--address",
        type=_host_and_port,
        default=f"localhost:{DEFAULT_HTTP_PORT}",
        help="the gateway's HTTP (default %(default)s)",
    )
    page.add_argument("--no-open", action="store_true", help="print the URL, open no browser")
    page.set_defaults(run=run)


def _add_demo(commands: Any, run: Command) -> None:
    demo = commands.add_parser(
        "demo", help="start everything, generate with and without speculation, compare", description=run.__doc__,
        allow_abbrev=False,
    )  # fmt: skip
    _add_models(demo)
    demo.add_argument("--max-tokens", type=int, default=128, metavar="N", help="tokens a run (default %(default)s)")
    demo.add_argument("--prompt", help="text to continue (default: from a file that the models were not trained on)")
    demo.set_defaults(run=run)


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


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 on")
    return int(text)


def _device(text: str) -> str:
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not auto, cpu, cuda or cuda:N")
    return text


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
