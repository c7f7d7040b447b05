"""All cases, in the order of their sections and numbers."""

from __future__ import annotations

import re

from kalos_ctx.conformance import (
    cases_content,
    cases_isolation,
    cases_recall,
    cases_reuse,
    cases_storage,
    cases_windows,
)
from kalos_ctx.conformance.case import Case

MODULES = (
    cases_windows,
    cases_content,
    cases_storage,
    cases_isolation,
    cases_recall,
    cases_reuse,
)


def _place(one: Case) -> tuple[str, bool, int, str]:
    return one.section, one.id.startswith("L"), int(re.sub(r"\D", "", one.id)), one.id


CASES: tuple[Case, ...] = tuple(
    sorted(
        (found for module in MODULES for found in vars(module).values() if isinstance(found, Case)),
        key=_place,
    )
)


def chosen(ids: list[str] | None = None) -> tuple[Case, ...]:
    """Return the cases with these IDs, all of them for None.

    Raises
    ------
    ValueError
        There is no case of an ID.
    """
    if not ids:
        return CASES
    unknown = sorted(set(ids) - {one.id for one in CASES})
    if unknown:
        raise ValueError(f"there is no case {', '.join(unknown)}")
    return tuple(one for one in CASES if one.id in ids)
