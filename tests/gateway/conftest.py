from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from gateway.tokenizer import Tokenizer
from tests.gateway import tokenizers_for_tests
from tests.gateway.fake_verifier import FakeVerifier


@pytest.fixture
async def verifier() -> AsyncIterator[FakeVerifier]:
    """A verifier without a script."""
    verifier = await FakeVerifier().start()
    yield verifier
    await verifier.stop()


@pytest.fixture
async def other_verifier() -> AsyncIterator[FakeVerifier]:
    """A second one."""
    verifier = await FakeVerifier().start()
    yield verifier
    await verifier.stop()


@pytest.fixture
def tokenizer() -> Tokenizer:
    """Byte-level, no template."""
    return Tokenizer(tokenizers_for_tests.byte_level())
