"""Parameters that clients of other servers know, that change what is generated, and that are not to be had here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outrider.protocol.errors import Reason
from outrider.protocol.violations import Violations

_UNSET = (None,)

# Each with the values that ask for nothing. Ignoring any other would give an answer to another question.
_EVERYWHERE: Mapping[str, tuple[Any, ...]] = {
    "response_format": (None, {"type": "text"}),
    # vLLM's.
    "use_beam_search": (None, False),
    "length_penalty": (None, 1.0),
    "bad_words": (None, []),
    "allowed_token_ids": (None, []),
    "logits_processors": (None, []),
    "prompt_logprobs": _UNSET,
    "structured_outputs": _UNSET,
    "guided_json": _UNSET,
    "guided_regex": _UNSET,
    "guided_choice": _UNSET,
    "guided_grammar": _UNSET,
    # SGLang's.
    "regex": _UNSET,
    "ebnf": _UNSET,
    "json_schema": _UNSET,
    "lora_path": _UNSET,
}
COMPLETION: Mapping[str, tuple[Any, ...]] = {**_EVERYWHERE, "suffix": (None, ""), "prompt_embeds": _UNSET}
CHAT: Mapping[str, tuple[Any, ...]] = {
    **_EVERYWHERE,
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "modalities": (None, ["text"]),
    "audio": _UNSET,
    "reasoning_effort": _UNSET,
    "verbosity": _UNSET,
    "web_search_options": _UNSET,
    # vLLM's: an operator chooses the template.
    "chat_template": _UNSET,
    "documents": (None, []),
    "echo": (None, False),
}


def refuse(fields: Mapping[str, Any], allowed: Mapping[str, tuple[Any, ...]], violations: Violations) -> None:
    """Note each field that asks for what we cannot do; `allowed` has the harmless values."""
    for name, value in fields.items():
        if name in allowed and value not in allowed[name]:
            violations.add(name, "is not supported", Reason.NOT_SUPPORTED)
