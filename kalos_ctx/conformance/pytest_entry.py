"""The cases as a test of another project's suite."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

from kalos_ctx.conformance.adapter import Factory
from kalos_ctx.conformance.case import Case
from kalos_ctx.conformance.cases import chosen
from kalos_ctx.conformance.runner import ERROR, FAILED, NOT_APPLICABLE, examine, run_case


def pytest_cases(
    factory: Factory,
    ids: list[str] | None = None,
    *,
    known_failures: Mapping[str, str] | None = None,
) -> Callable[..., None]:
    """Return a test, one for each case, to be assigned to a name that begins with `test_`.

    Parameters
    ----------
    factory : callable
        Takes a `Setup`, returns a `Candidate`.
    ids : list of str, optional
        Only these cases.
    known_failures : mapping of str to str, optional
        Case to the reason why it fails today. It is expected to fail: once it passes, the test
        says so by failing.

    Raises
    ------
    ValueError
        An ID or a capability that there is not.

    Notes
    -----
    A case that is not applicable is skipped, with the missing capability as the reason.
    """
    pytest: Any = importlib.import_module("pytest")  # no dependency of the package
    profile = examine(factory)
    known = dict(known_failures or {})
    chosen(list(known))
    parameters = [
        pytest.param(
            one,
            id=one.id,
            marks=[pytest.mark.xfail(reason=known[one.id], strict=True)] if one.id in known else [],
        )
        for one in chosen(ids)
    ]

    def test_case(case: Case, tmp_path: Any) -> None:
        """Run one case."""
        outcome = run_case(case, factory, profile, tmp_path)
        if outcome.status == NOT_APPLICABLE:
            pytest.skip(outcome.why)
        if outcome.status in (FAILED, ERROR):
            reports = ", ".join(case.reports) or "seen by running a library"
            pytest.fail(
                f"{case.id}, {case.title}: {outcome.why} (cause: {case.cause}; {reports})",
                pytrace=False,
            )

    test: Callable[..., None] = pytest.mark.parametrize("case", parameters)(test_case)
    return test
