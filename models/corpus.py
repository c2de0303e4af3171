"""The training text: Python's standard library, split by file, and the tokenizer trained on it."""

import hashlib
import itertools
import json
import random
import re
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_TEXT = "<|endoftext|>"
END_OF_TEXT_ID = 0

# Packages of others, character tables, generated text, and inputs that are broken on purpose.
EXCLUDED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "__pycache__", "encodings", "pydoc_data", "data", "tokenizedata"}
)
HELD_OUT_ONE_IN = 24
SNIPPET_NUM_TOKENS = (32, 64, 96, 128, 192, 256, 384, 480, 640, 1024, 1600)
NUM_SNIPPETS = 33
LEAK_LINES = 4  # a snippet shares no such run of lines with the training text, be it indented otherwise


@dataclass(frozen=True)
class SourceFile:
    """One file, named by its path below the source folder."""

    path: str
    text: str

    @property
    def is_held_out(self) -> bool:
        """Chosen by the hash of the path alone, so that every run holds out the same files."""
        return int.from_bytes(hashlib.sha256(self.path.encode()).digest()[:8], "big") % HELD_OUT_ONE_IN == 0


@dataclass(frozen=True)
class Snippet:
    """A stretch of whole lines out of a held-out file."""

    path: str
    num_tokens: int
    text: str


@dataclass(frozen=True)
class Corpus:
    """The files of both sides of the split, and their tokens, each file closed by the end-of-text token."""

    tokenizer: Tokenizer
    train_files: list[SourceFile]
    held_out_files: list[SourceFile]
    train_documents: list[torch.Tensor]  # int64 [num_tokens] each
    held_out_documents: list[torch.Tensor]  # int64 [num_tokens] each


def default_source() -> Path:
    """The standard library of the Python that runs this."""
    return Path(sysconfig.get_path("stdlib"))


def build_corpus(source: Path, *, vocab_size: int, max_files: int | None = None) -> Corpus:
    """Read the files below ``source``, train the tokenizer on the training side and encode both sides."""
    files = list(itertools.islice(read_files(source), max_files))
    train_files = [file for file in files if not file.is_held_out]
    held_out_files = [file for file in files if file.is_held_out]
    if not train_files or not held_out_files:
        raise ValueError(f"{source} holds too few Python files to be split: {len(files)}")
    tokenizer = train_tokenizer([file.text for file in train_files], vocab_size=vocab_size)
    return Corpus(
        tokenizer=tokenizer,
        train_files=train_files,
        held_out_files=held_out_files,
        train_documents=[encode_document(tokenizer, file.text) for file in train_files],
        held_out_documents=[encode_document(tokenizer, file.text) for file in held_out_files],
    )


def read_files(source: Path) -> Iterator[SourceFile]:
    """The Python files worth learning from, in the order of their paths, identical ones once."""
    seen: set[str] = set()
    for file in sorted(source.rglob("*.py")):
        path = file.relative_to(source)
        # What the build of this one Python wrote (_sysconfigdata, config-*) tells about a machine, not about Python.
        is_build_output = path.name.startswith("_sysconfigdata") or path.parts[0].startswith("config-")
        if is_build_output or not EXCLUDED_FOLDERS.isdisjoint(path.parts[:-1]):
            continue
        try:
            text = file.read_bytes().decode("utf-8")
        except UnicodeDecodeError:
            continue
        if text.strip() and "\r" not in text and text not in seen:
            seen.add(text)
            yield SourceFile(path.as_posix(), text)


def train_tokenizer(texts: list[str], *, vocab_size: int) -> Tokenizer:
    """Byte-level BPE of exactly ``vocab_size`` tokens; decoding an encoding gives back the text byte for byte."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer, length=len(texts))
    if tokenizer.get_vocab_size() != vocab_size or tokenizer.token_to_id(END_OF_TEXT) != END_OF_TEXT_ID:
        raise ValueError(f"the text is too small for {vocab_size} tokens: got {tokenizer.get_vocab_size()}")
    return tokenizer


def encode_document(tokenizer: Tokenizer, text: str) -> torch.Tensor:
    """Token ids of a whole file, closed by the end-of-text token."""
    return torch.tensor([*tokenizer.encode(text).ids, END_OF_TEXT_ID])


def epoch_windows(
    documents: list[torch.Tensor],
    window: int,
    generator: torch.Generator,
) -> torch.Tensor:  # int64 [num_windows, window]
    """One pass over the documents in a new order, packed end to end and cut at a new offset."""
    order = torch.randperm(len(documents), generator=generator).tolist()
    stream = torch.cat([documents[index] for index in order])
    offset = int(torch.randint(window, (), generator=generator))
    num_windows = (len(stream) - offset) // window
    windows = stream[offset : offset + num_windows * window].view(num_windows, window)
    return windows[torch.randperm(num_windows, generator=generator)]


def batches(
    epoch: Callable[[], torch.Tensor],  # int64 [num_windows, window]
    batch_size: int,
) -> Iterator[torch.Tensor]:  # int64 [batch_size, window]
    """Endless batches: epoch after epoch, the last incomplete batch of each left out."""
    while True:
        windows = epoch()
        if len(windows) < batch_size:
            raise ValueError(f"{len(windows)} windows do not fill a batch of {batch_size}")
        for start in range(0, len(windows) - batch_size + 1, batch_size):
            yield windows[start : start + batch_size]


def cut_snippets(corpus: Corpus, *, seed: int) -> list[Snippet]:
    """Prompts of mixed length for demos and tests, from file starts and definitions; the training text holds none."""
    rng = random.Random(seed)
    train_text = "\0".join(file.text for file in corpus.train_files)
    train_runs = {run for file in corpus.train_files for run in line_runs(file.text)}
    lengths = itertools.cycle(SNIPPET_NUM_TOKENS)
    length = next(lengths)
    snippets: list[Snippet] = []
    # Four rounds over the files in a new order each: a file gives at most one snippet a round.
    for file in itertools.chain.from_iterable(
        rng.sample(corpus.held_out_files, len(corpus.held_out_files)) for _ in range(4)
    ):
        start = rng.choice([0, *(match.start() for match in re.finditer(r"^(?:def|class) ", file.text, re.MULTILINE))])
        snippet = cut_snippet(corpus.tokenizer, file, start, num_tokens=length)
        if snippet is None or snippet.text in train_text or not train_runs.isdisjoint(line_runs(snippet.text)):
            continue
        if all(snippet.text not in other.text and other.text not in snippet.text for other in snippets):
            snippets.append(snippet)
            length = next(lengths)
        if len(snippets) == NUM_SNIPPETS:
            break
    return snippets


def cut_snippet(tokenizer: Tokenizer, file: SourceFile, start: int, *, num_tokens: int) -> Snippet | None:
    """Whole lines from ``start`` on, as many as fit into ``num_tokens``; None where the file ends too early."""
    text = ""
    size = 0
    for line in file.text[start:].splitlines(keepends=True):
        longer = len(tokenizer.encode(text + line).ids)
        if longer > num_tokens:
            break
        text, size = text + line, longer
    return Snippet(file.path, size, text) if size >= num_tokens * 3 // 4 else None


def line_runs(text: str) -> Iterator[str]:
    """Every run of ``LEAK_LINES`` lines that say something."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    for start in range(len(lines) - LEAK_LINES + 1):
        yield "\n".join(lines[start : start + LEAK_LINES])


def save_snippets(snippets: list[Snippet], path: Path) -> None:
    """Write the snippets as a JSON list."""
    path.write_text(json.dumps([asdict(snippet) for snippet in snippets], indent=1, ensure_ascii=False) + "\n", "utf-8")


def load_snippets(path: Path) -> list[Snippet]:
    """Read what ``save_snippets`` wrote."""
    return [Snippet(**fields) for fields in json.loads(path.read_text("utf-8"))]
