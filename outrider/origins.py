"""Shows output tokens in the colour of their origin."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from rich.console import Console
from rich.style import Style
from rich.text import Text

from outrider.completion import Chunk, Token, TokenOrigin

STYLES = {
    TokenOrigin.ACCEPTED: Style(color="green"),
    TokenOrigin.RECOVERED: Style(color="red", underline=True),
    TokenOrigin.BONUS: Style(color="cyan", bold=True),
    TokenOrigin.PLAIN: Style(),
    TokenOrigin.UNKNOWN: Style(dim=True),
}
_MEANINGS = {
    TokenOrigin.ACCEPTED: "drafted, accepted by the target",
    TokenOrigin.RECOVERED: "sampled by the target in place of a rejected draft",
    TokenOrigin.BONUS: "sampled by the target after a draft accepted in full",
    TokenOrigin.PLAIN: "decoded without a draft",
    TokenOrigin.UNKNOWN: "of an origin that this client does not know",
}


def pieces(chunk: Chunk) -> list[tuple[str, TokenOrigin]]:
    """The chunk's text, cut where the origin changes.

    A token whose text is still held back shows with the token that completes it; text behind the last token, held back
    until the end of the completion, takes its colour.
    """
    cut: list[tuple[str, TokenOrigin]] = []
    num_shown = 0
    for token in chunk.tokens:
        if token.text:
            cut.append((token.text, token.origin))
            num_shown += len(token.text)
    if rest := chunk.text[num_shown:]:
        cut.append((rest, chunk.tokens[-1].origin if chunk.tokens else TokenOrigin.PLAIN))
    return cut


def write(console: Console, chunk: Chunk) -> None:
    """Print the chunk in colour, where the console has any. Nothing is wrapped or expanded on the way."""
    for text, origin in pieces(chunk):
        # Console.print would turn tabs into spaces and drop control characters.
        console.file.write(_paint(console, text, origin))
    console.file.flush()


def legend(tokens: Iterable[Token]) -> Text:
    """The colours of the origins that occurred, with how often each did."""
    counts = Counter(token.origin for token in tokens)
    lines = []
    for origin, style in STYLES.items():
        if counts[origin]:
            lines.append(Text.assemble((f"{origin.lower():<9}", style), f" {counts[origin]:>5}  {_MEANINGS[origin]}"))
    return Text("\n").join(lines)


def _paint(console: Console, text: str, origin: TokenOrigin) -> str:
    if console.no_color or not console.is_terminal:
        return text
    # A colour that spans a line break would colour the rest of the line in some terminals.
    return "\n".join(STYLES[origin].render(line) if line else line for line in text.split("\n"))
