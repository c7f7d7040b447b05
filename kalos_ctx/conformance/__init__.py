"""Cases from public reports, for any store of chat turns and any assembler of windows.

A candidate derives from `Candidate`; `run` or `pytest_cases` runs the cases over what a factory
makes. docs/conformance.md has an example.
"""

from kalos_ctx.conformance.adapter import (
    CAPABILITIES,
    Candidate,
    Factory,
    Rows,
    Setup,
    StoredTurn,
    WindowReport,
)
from kalos_ctx.conformance.case import Case, CaseFailed
from kalos_ctx.conformance.cases import CASES
from kalos_ctx.conformance.pytest_entry import pytest_cases
from kalos_ctx.conformance.runner import Outcome, Results, markdown_table, run

__all__ = [
    "CAPABILITIES",
    "CASES",
    "Candidate",
    "Case",
    "CaseFailed",
    "Factory",
    "Outcome",
    "Results",
    "Rows",
    "Setup",
    "StoredTurn",
    "WindowReport",
    "markdown_table",
    "pytest_cases",
    "run",
]
