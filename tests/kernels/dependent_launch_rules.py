"""The rules of `kernels.dependent_launch`, held against the PTX of a compiled kernel."""

from __future__ import annotations

import re


def broken_rules(ptx: str, *, early_loads: str) -> list[str]:
    """What a kernel that is launched while the one before it ends does too early.

    A regular expression says which loads may come before the wait: from memory that the kernel before does not write.
    """
    waits = ptx.split("griddepcontrol.wait")
    if len(waits) != 2:
        return [f"{len(waits) - 1} waits"]
    early = waits[0]
    body = early[early.index("{", early.index(".entry")) :]
    broken = [what for what in ("st.global", "red.global", "atom.global", "cp.async", "bra", "ret;") if what in body]
    broken += [load for load in re.findall(r"ld\.global\S*", body) if not re.fullmatch(early_loads, load)]
    if "griddepcontrol.launch_dependents" in body:
        broken.append("launch_dependents")
    return broken
