"""Draft tokens that a file or a callable gives: for tests, to replay a known answer, and for drafters of one's own."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path

from drafter_service.chain_drafter import ChainDrafter
from drafter_service.drafter import NoDraft
from drafter_service.sequence import DraftSequence
from outrider.v1 import drafter_pb2

# Ids fit into 32 bits with a sign.
MAX_TOKEN_ID = 1 << 31
# Given the committed token ids and the most tokens to draft, the draft tokens; none is an answer too.
Script = Callable[[Sequence[int], int], Sequence[int]]


class ScriptedDrafter(ChainDrafter):
    """Drafts what its script says, each token as certain."""

    kind = "scripted"
    name = "scripted"

    def __init__(self, script: Script) -> None:
        super().__init__()
        self._script = script

    def find(self, sequence: DraftSequence) -> Sequence[int] | NoDraft:
        """What the script says. One that raises, or names no ids, costs its sequence the drafter and nothing else."""
        try:
            found = list(self._script(tuple(sequence.token_ids), sequence.max_draft_tokens))
        except Exception as error:
            return NoDraft(sequence, drafter_pb2.REFUSAL_REASON_INTERNAL, f"the script raised {error!r}")
        if not all(0 <= token_id < MAX_TOKEN_ID for token_id in found):
            return NoDraft(sequence, drafter_pb2.REFUSAL_REASON_INTERNAL, "the script named what is no token id")
        return found[: sequence.max_draft_tokens]


def load_script(source: str) -> Script:
    """The script that `source` names: `module:function`, or a JSON file {"sequences": [[token ids], ...]}.

    A file's script drafts what stands behind the committed tokens in the first sequence that begins with them. Raises
    ValueError when there is no such function or file, or the file holds something else.
    """
    module_name, separator, name = source.partition(":")
    if separator and not Path(source).exists():
        try:
            function = getattr(importlib.import_module(module_name), name)
        except (ImportError, AttributeError) as error:
            raise ValueError(f"script: cannot import {source!r}: {error}") from error
        if not callable(function):
            raise ValueError(f"script: {source!r} is not callable")
        script: Script = function
        return script
    return _Replay(_read(Path(source)))


def _read(path: Path) -> list[list[int]]:
    try:
        content = json.loads(path.read_text())
    except OSError as error:
        raise ValueError(f"script: cannot read {path}: {error}") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"script: {path} is no JSON: {error}") from error
    sequences = content.get("sequences") if isinstance(content, dict) and len(content) == 1 else None
    if not isinstance(sequences, list) or not all(
        isinstance(sequence, list) and all(isinstance(token, int) and token >= 0 for token in sequence)
        for sequence in sequences
    ):
        raise ValueError(f'script: {path} must hold {{"sequences": [[token ids], ...]}} and nothing else')
    return sequences


class _Replay:
    def __init__(self, sequences: list[list[int]]) -> None:
        self._sequences = [tuple(sequence) for sequence in sequences]

    def __call__(self, token_ids: Sequence[int], max_draft_tokens: int) -> Sequence[int]:
        length = len(token_ids)
        prefix = tuple(token_ids)
        for sequence in self._sequences:
            if len(sequence) > length and sequence[:length] == prefix:
                return sequence[length : length + max_draft_tokens]
        return ()
