"""A model's chat template: from messages to the text that the model was trained on.

Rendered the way `transformers` renders it, which would bring torch into a service that has no use for it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from outrider.protocol.errors import InvalidArgumentError

# Conversations that are rendered on the event loop; a template takes about a millisecond for as many characters.
MAX_CHARACTERS_ON_LOOP = 8192
# Stands behind the words of a message that is to be continued, while the template is rendered; as in `transformers`.
_MARK = "CONTINUE_FINAL_MESSAGE_TAG "
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class BadTemplateError(Exception):
    """There is a chat template, and it cannot be used; the message says why."""


class ChatTemplate:
    """One template, compiled. It comes with a model, which makes it foreign code: it runs in Jinja's sandbox."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Raises BadTemplateError for a template that does not compile."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals.update(
            raise_exception=_raise_exception, strftime_now=_strftime_now, namespace=_GuardedNamespace, **special_tokens
        )
        try:
            self._template = environment.from_string(source)
        except TemplateSyntaxError as error:
            raise BadTemplateError(f"the chat template is not valid, line {error.lineno}: {error}") from error

    @classmethod
    def load(cls, directory: Path | None, file: Path | None = None) -> ChatTemplate | None:
        """The template in `file`, else that of the model in `directory`, None when it has none.

        Raises BadTemplateError.
        """
        try:
            path = None if directory is None else directory / "tokenizer_config.json"
            config = json.loads(path.read_text("utf-8")) if path is not None and path.is_file() else {}
            if file is not None:
                source: str | None = file.read_text("utf-8")
            else:
                source = None if directory is None else _source(directory, config)
        except (OSError, ValueError) as error:
            raise BadTemplateError(f"the chat template cannot be read: {error}") from error
        return None if source is None else cls(source, _special_tokens(config))

    async def render(
        self,
        messages: Sequence[Mapping[str, str]],
        variables: Mapping[str, Any],
        *,
        begins_message: bool = True,
        continues_message: bool = False,
    ) -> str:
        """The conversation as text, up to where the assistant's next message begins unless `begins_message` is false.

        `continues_message`: up to the end of the last message's own words, which are to go on. Raises
        InvalidArgumentError, naming `messages`, where the template refuses them or leaves those words out.
        """
        render = self._render_open if continues_message else self._render
        context = {"add_generation_prompt": begins_message, **variables}
        if sum(len(message["content"]) for message in messages) <= MAX_CHARACTERS_ON_LOOP:
            return render(messages, context)
        return await asyncio.to_thread(render, messages, context)

    def _render_open(self, messages: Sequence[Mapping[str, str]], variables: Mapping[str, Any]) -> str:
        last = messages[-1]
        text = self._render([*messages[:-1], {**last, "content": last["content"] + _MARK}], variables)
        before, mark, behind = text.rpartition(_MARK.rstrip())
        if not mark or last["content"].strip() not in before:
            raise InvalidArgumentError("messages", "the model's chat template leaves out the message to be continued")
        # A template that trims messages would have trimmed this one without the mark as well.
        return before if behind.startswith(" ") else before.rstrip()

    def _render(self, messages: Sequence[Mapping[str, str]], variables: Mapping[str, Any]) -> str:
        context = {"tools": None, "documents": None, **variables, "messages": messages}
        try:
            return self._template.render(context)
        except TemplateError as error:
            raise InvalidArgumentError("messages", f"the model's chat template refuses them: {error}") from error
        except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError) as error:
            # What a template runs into with input that it did not foresee.
            raise InvalidArgumentError(
                "messages", f"the model's chat template cannot render them: {type(error).__name__}: {error}"
            ) from error


class _Generation(Extension):
    """`{% generation %}` marks the assistant's words for training; for us it is transparent."""

    tags = {"generation"}  # noqa: RUF012  # as Jinja declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _GuardedNamespace(Namespace):
    """Keeps a template away from Python's internals, which a plain namespace would let it reach by name."""

    def __init__(*arguments: Any, **values: Any) -> None:
        # `self` may be the name of a template's own value.
        self, *rest = arguments
        attributes = dict(*rest, **values)
        for name in attributes:
            _check_name(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: str) -> None:
    if name.startswith("_"):
        raise TemplateError(f"a namespace cannot have {name!r}")


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    # Jinja's own filter escapes what has a meaning in HTML, and models were trained on text that is not escaped.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _source(directory: Path, config: Mapping[str, Any]) -> str | None:
    file = directory / "chat_template.jinja"
    if file.is_file():
        return file.read_text("utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        # Several by name, for tools and the like.
        template = next((entry["template"] for entry in template if entry.get("name") == "default"), None)
    if template is not None and not isinstance(template, str):
        raise ValueError("chat_template in tokenizer_config.json is neither text nor a list of named texts")
    return template


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    tokens = {}
    for name in SPECIAL_TOKENS:
        token = config.get(name)
        # Written out, an added token is an object with its text and how it is matched.
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str):
            tokens[name] = text
    return tokens
