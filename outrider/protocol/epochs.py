"""The epoch rule, which both ends of a Draft stream apply by themselves and so need not tell each other about.

Committed tokens are compared with the draft tokens proposed for their positions. As long as they agree, the epoch goes
on. The first that differs ends it: what was proposed from there on stands behind a token that is no part of the
sequence. The drafter proposes anew in the next epoch, and the verifier drops what still arrives of the old one. As
proposals and verdicts are each in order, both ends compare the same tokens and count the same epochs, whatever the
delays between them.
"""

from __future__ import annotations


def first_difference(proposed: list[int], committed: list[int]) -> int | None:
    """Index of the first committed token that ends the epoch; None where it goes on.

    Both begin at the same position; what one of them has beyond the other is not compared.
    """
    num_proposed, num_committed = len(proposed), len(committed)
    if num_proposed < num_committed:
        is_same = proposed == committed[:num_proposed]
    else:
        is_same = proposed[:num_committed] == committed
    if is_same:
        return None
    index = 0
    while proposed[index] == committed[index]:
        index += 1
    return index
