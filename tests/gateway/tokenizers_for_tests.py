"""Small tokenizers of the kinds that models have, made on the spot."""

from __future__ import annotations

import functools

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

TEXT = "The quick brown fox; naïve café, ÅÅ 中文字 日本語 한국어 👩‍👩‍👧 😀😀 é e\u0301 def f(x):\n    return x\n"


@functools.cache
def byte_level() -> Tokenizer:
    """Byte-level BPE, as GPT-2, Llama 3 and Qwen have it: tokens are cut anywhere between bytes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT] * 5, trainer)
    # Not special, and its text is not in the byte alphabet.
    tokenizer.add_tokens([AddedToken("⟨tool⟩", normalized=False)])
    return tokenizer


def id_of(tokenizer: Tokenizer, token: str) -> int:
    """The id of a token that it has."""
    found = tokenizer.token_to_id(token)
    assert found is not None, token
    return found


@functools.cache
def with_template() -> Tokenizer:
    """The byte-level tokenizer whose template puts <s> before a prompt."""
    tokenizer = Tokenizer.from_str(byte_level().to_str())
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return tokenizer


def _pieces() -> list[str]:
    return [*"▁abcdefx中é", "▁a", "▁the", "▁中", "ab", "e\u0301", "\u0301", "▁▁", ",", "."]


@functools.cache
def byte_fallback() -> Tokenizer:
    """Pieces with ▁ for spaces and raw bytes for the rest, as Llama 2 has it: the decoder drops one leading space."""
    vocabulary = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *_pieces()]
    tokenizer = Tokenizer(
        models.BPE(vocab={piece: i for i, piece in enumerate(vocabulary)}, merges=[], byte_fallback=True)
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


@functools.cache
def metaspace() -> Tokenizer:
    """Pieces with ▁ for spaces under the Metaspace decoder, as T5 has it."""
    vocabulary = ["<unk>", "<s>", "</s>", *_pieces()]
    tokenizer = Tokenizer(models.Unigram([(piece, -1.0) for piece in vocabulary], unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


@functools.cache
def word_piece() -> Tokenizer:
    """Words with ## continuations: spaces are the decoder's own."""
    vocabulary = ["[UNK]", "a", "bc", "##d", "##ef", ",", ".", "中"]
    tokenizer = Tokenizer(models.WordPiece({piece: i for i, piece in enumerate(vocabulary)}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(["[UNK]"])
    return tokenizer


ALL = {
    "byte_level": byte_level,
    "byte_fallback": byte_fallback,
    "metaspace": metaspace,
    "word_piece": word_piece,
}
