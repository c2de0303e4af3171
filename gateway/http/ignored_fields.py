"""What becomes of fields that nobody knows: ignored and named in the answer's head, or refused."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from urllib.parse import quote

from gateway.http.errors import bad_request
from outrider.protocol.errors import Reason, Violation

logger = logging.getLogger(__name__)

IGNORED_FIELDS = "x-outrider-ignored-fields"
# A client chooses how many there are and how long their names; servers take headers of some 8 KiB in all.
MAX_HEADER_CHARACTERS = 1024
_MORE = "..."


def refuse_unknown(names: Sequence[str]) -> None:
    """Raise ApiError, naming all of them, if there are any."""
    if names:
        raise bad_request([Violation(name, "", Reason.UNKNOWN_FIELD) for name in names])


def note_ignored(request_id: str, names: Sequence[str]) -> dict[str, str]:
    """Log them, and the header that lists them; none where there are none."""
    if not names:
        return {}
    listed = _listed(names)
    logger.debug("request %s: ignored %s", request_id, listed)
    return {IGNORED_FIELDS: listed}


def _listed(names: Sequence[str]) -> str:
    """The names between commas, as many as fit; what a header cannot have, or what parts them, is written as %XX."""
    listed: list[str] = []
    room = MAX_HEADER_CHARACTERS - len(_MORE)
    for name in names:
        text = quote(name, safe="[]")
        room -= len(text) + len(", ")
        if room < 0:
            listed.append(_MORE)
            break
        listed.append(text)
    return ", ".join(listed)
