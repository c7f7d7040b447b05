"""The conformance cases: Kalos passes them, and candidates with a known defect do not."""

import json
import re
from pathlib import Path
from types import MappingProxyType

import pytest
from helpers.doc_pages import DOCS, blocks_of, run_page

from kalos_ctx.conformance import CAPABILITIES, CASES, Candidate, kalos, pytest_cases, run
from kalos_ctx.conformance.adapter import StoredTurn
from kalos_ctx.conformance.case import SECTIONS
from kalos_ctx.conformance.runner import main

test_kalos = pytest_cases(kalos.factory)


def test_kalos_only_several_writers_are_not_applicable():
    capabilities = kalos.KalosCandidate.capabilities
    assert [one.id for one in CASES if one.missing(capabilities)] == ["B55"]
    assert kalos.KalosCandidate.not_claimed == {}


def test_cases_are_complete():
    assert len({one.id for one in CASES}) == len(CASES)
    for one in CASES:
        assert re.fullmatch(r"[BL]\d\d\d?b?", one.id)
        assert one.section in SECTIONS
        assert one.priority in (1, 2, 3)
        assert all(re.fullmatch(r"[\w.-]+/[\w.-]+#\d+", report) for report in one.reports)
        assert one.reports or one.id.startswith("L")
        assert {name for need in one.needs for name in need.split("|")} <= CAPABILITIES.keys()


def test_every_capability_is_needed_or_used_by_a_case():
    text = "".join(path.read_text() for path in Path(kalos.__file__).parent.glob("cases_*.py"))
    assert [name for name in CAPABILITIES if f"{name}" not in text] == []


# ---- Candidates in plain Python ------------------------------------------------------------------


class Plain(Candidate):
    """Lists in memory; right in all that it claims."""

    name = "plain"
    capabilities = frozenset(
        {"token_limit", "reserve", "groups", "pin", "read", "rollback", "delete"}
    )

    def __init__(self, setup):
        self.stored = {}
        self.pinned = {}

    def append(self, session, role, token_ids, group=None, calls=(), call=None):
        turn = (role, list(token_ids), group)
        self.stored.setdefault(session, []).append(turn)

    def units(self, session):
        """Turns from a call to its last result are one unit."""
        found, place_of = [], {}
        for _, ids, group in self.stored.get(session, []):
            if group in place_of:
                for later in found[place_of[group] + 1 :]:
                    found[place_of[group]] += later
                del found[place_of[group] + 1 :]
                found[-1] += ids
                continue
            if group is not None:
                place_of[group] = len(found)
            found.append(list(ids))
        return found

    def head(self, session):
        return [one for ids in self.pinned.get(session, {}).values() for one in ids]

    def assemble(self, session, max_tokens, reserve=0):
        left = 10**9 if max_tokens is None else max_tokens - reserve
        head = self.head(session)
        if left < len(head):
            raise ValueError("the pinned text does not fit")
        history = []
        for ids in reversed(self.units(session)):
            if len(head) + len(history) + len(ids) > left:
                break
            history[:0] = ids
        return head + history

    def turns(self, session, *, tenant=""):
        return [StoredTurn(role, ids) for role, ids, _ in self.stored.get(session, [])]

    def pin(self, session, name, token_ids, *, volatile=False):
        self.pinned.setdefault(session, {})[name] = list(token_ids)

    def rollback(self, session, to):
        del self.stored[session][to:]

    def delete(self, session, *, tenant=""):
        self.stored.pop(session, None)


class BySizeAlone(Plain):
    def units(self, session):
        return [ids for _, ids, _ in self.stored.get(session, [])]


class FrontOnly(BySizeAlone):
    def assemble(self, session, max_tokens, reserve=0):
        window = super().assemble(session, max_tokens, reserve)
        results = {ids[0] for role, ids, _ in self.stored.get(session, []) if role == "tool"}
        while window and max_tokens and window[0] in results:
            del window[0]
        return window


class FirstIsRead(Plain):
    def assemble(self, session, max_tokens, reserve=0):
        return [self.units(session)[0][0], *super().assemble(session, max_tokens, reserve)[1:]]


class PinsUncounted(Plain):
    def assemble(self, session, max_tokens, reserve=0):
        pinned, self.pinned = self.pinned, {}
        history = super().assemble(session, max_tokens, reserve)
        self.pinned = pinned
        return self.head(session) + history


class MiddleGoes(Plain):
    def assemble(self, session, max_tokens, reserve=0):
        units = self.units(session)
        while max_tokens is not None and sum(map(len, units)) > max_tokens and units:
            del units[len(units) // 2]
        return self.head(session) + [token for ids in units for token in ids]


class HalfGoes(Plain):
    def assemble(self, session, max_tokens, reserve=0):
        whole = super().assemble(session, None)
        if max_tokens is None or len(whole) <= max_tokens:
            return whole
        return super().assemble(session, max_tokens // 2)


class ReserveForgotten(Plain):
    def assemble(self, session, max_tokens, reserve=0):
        return super().assemble(session, max_tokens)


class ZeroIsAll(Plain):
    def assemble(self, session, max_tokens, reserve=0):
        return super().assemble(session, max_tokens or None, reserve)


class WritesBack(Plain):
    def assemble(self, session, max_tokens, reserve=0):
        window = super().assemble(session, max_tokens, reserve)
        self.append(session, "assistant", window)
        return window


class ContentIsIdentity(Plain):
    def append(self, session, role, token_ids, group=None, calls=(), call=None):
        if (role, list(token_ids), group) not in self.stored.get(session, []):
            super().append(session, role, token_ids, group)


class EncodesAgain(Plain):
    def append(self, session, role, token_ids, group=None, calls=(), call=None):
        text = " ".join(map(str, token_ids)).replace("10 11", "12").replace("6 7", "13")
        super().append(session, role, map(int, text.split()), group)


class FoldsNames(Plain):
    def append(self, session, role, token_ids, group=None, calls=(), call=None):
        super().append(session.strip().lower(), role, token_ids, group)

    def assemble(self, session, max_tokens, reserve=0):
        return super().assemble(session.strip().lower(), max_tokens, reserve)


class RollsBackTooFar(Plain):
    def rollback(self, session, to):
        del self.stored[session][max(0, to - 1) :]


class DeletesFromReadingAlone(Plain):
    def turns(self, session, *, tenant=""):
        return super().turns(session) if session not in self.pinned else []

    def delete(self, session, *, tenant=""):
        self.pinned[session] = {}


class BreaksOnEmpty(Plain):
    def assemble(self, session, max_tokens, reserve=0):
        if any(not ids for _, ids, _ in self.stored.get(session, [])):
            raise IndexError("list index out of range")
        return super().assemble(session, max_tokens, reserve)


class CountsTheTailAgain(Plain):
    def assemble(self, session, max_tokens, reserve=0):
        turns = [ids for _, ids, _ in self.stored.get(session, [])]
        while turns and max_tokens is not None and len([t for i in turns for t in i]) > max_tokens:
            turns = turns[1:]
        return [token for ids in turns for token in ids]


DEFECTS = (
    (BySizeAlone, "B01"), (BySizeAlone, "B20"), (BySizeAlone, "B20b"), (FrontOnly, "B20b"),
    (FirstIsRead, "B02"), (PinsUncounted, "B05"), (PinsUncounted, "B06"), (PinsUncounted, "L01"),
    (PinsUncounted, "B15"), (CountsTheTailAgain, "B08"), (MiddleGoes, "B09"), (HalfGoes, "B13"),
    (ReserveForgotten, "B14"), (ZeroIsAll, "B19"), (EncodesAgain, "B30"), (EncodesAgain, "B32"),
    (WritesBack, "B48"), (RollsBackTooFar, "B50"), (ContentIsIdentity, "B51"),
    (FoldsNames, "B65"), (BreaksOnEmpty, "B76"), (DeletesFromReadingAlone, "B96"),
)  # fmt: skip


def test_a_plain_candidate_passes_all_that_it_claims():
    results = run(Plain)
    assert [one for one in results.outcomes if one.status in ("failed", "error")] == []
    assert results.counts()["passed"] >= 20


@pytest.mark.parametrize(("candidate", "number"), DEFECTS)
def test_a_defect_is_found_by_its_case(candidate, number):
    outcome = run(candidate, [number]).of(number)
    assert outcome.status in ("failed", "error")
    assert outcome.why


# ---- Defects of Kalos's own kind: what plain lists do not have -----------------------------------


class Leaky(kalos.KalosCandidate):
    """Each call forgets one thing."""

    def recall(self, query, top_k, collection, **options):
        options.pop("filters", None)
        options.pop("min_score", None)
        return super().recall(query, top_k, collection, **options)[::-1]

    def delete_passages(self, collection, ids):
        return None

    def delete_tenant(self, tenant):
        for one in self.store.tenants():
            self.store.delete_tenant(one)

    def append(self, session, role, token_ids, **fields):
        fields.pop("ttl", None)
        fields.pop("tenant", None)
        fields.pop("metadata", None)
        super().append(session, role, token_ids, **fields)

    def assemble(self, session, max_tokens, reserve=0, **options):
        options.pop("tenant", None)
        options.pop("alternation", None)
        query = options.pop("query", None)
        extra = [] if query is None else [int(query[0])]
        for name in ("top_k", "collection", "partial"):
            options.pop(name, None)
        return extra + super().assemble(session, max_tokens, reserve, **options)

    def pin(self, session, name, token_ids, *, volatile=False):
        super().pin(session, name, token_ids)

    def batch(self, sessions, max_tokens, *, layout, pad_id=None):
        rows = super().batch(sessions, max_tokens, layout=layout, pad_id=pad_id)
        masks = [
            [int(token != pad_id) for token in row] for row in rows.token_ids if layout != "packed"
        ]
        return type(rows)(rows.token_ids, list(range(8)), rows.starts, masks)

    def block_keys(self, session, block_size, *, salt=""):
        return [str(hash("x"))] * (super().block_keys(session, block_size).__len__() + 1)

    def sessions(self, *, cursor=None, limit=100, tenant=""):
        return super().sessions(limit=limit)


CAUGHT = {
    "B10", "B28", "B39", "B63", "B67", "B68", "B69", "B73", "B74", "B80", "B81", "B86", "B89",
    "B90", "B94", "B95", "B98", "B101", "B102", "B105", "B106", "B107", "B109", "B110", "B111",
}  # fmt: skip


def leaky(setup):
    """Make a candidate that another process can make too."""
    return Leaky(setup)


@pytest.mark.parametrize("number", sorted(CAUGHT))
def test_a_leak_is_found_by_its_case(number):
    assert run(leaky, [number]).of(number).status in ("failed", "error")


# ---- The runner ----------------------------------------------------------------------------------


class Odd(Plain):
    not_claimed = MappingProxyType({"B09": "it says so"})

    def turns(self, session, *, tenant=""):
        raise RuntimeError("no reading today")


def test_runner_tells_errors_from_failures_and_from_what_is_not_claimed():
    results = run(Odd, ["B09", "B48", "B104"])
    assert results.of("B09").status == "not applicable"
    assert results.of("B09").why == "it says so"
    assert results.of("B48").why == "RuntimeError: no reading today"
    assert results.of("B104").why == "needs stable_prefix"
    assert not results.ok
    with pytest.raises(KeyError):
        results.of("B01")
    with pytest.raises(ValueError, match="no case B999"):
        run(Plain, ["B999"])
    unknown = type("Unknown", (Plain,), {"capabilities": frozenset({"magic"})})
    with pytest.raises(ValueError, match="no capability magic"):
        run(unknown)


def test_command_line_prints_json_and_tables_and_says_what_is_wrong(capsys):
    own = "kalos_ctx.conformance.kalos:factory"
    assert main([own, "--case", "B30", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["counts"] == {"passed": 1, "failed": 0, "not applicable": 0, "error": 0}
    assert main([own, "--case", "B30", "--case", "B55", "--markdown"]) == 0
    assert "| n/a |" in capsys.readouterr().out
    for wrong in ([own, "--case", "B999"], ["nothing"], ["kalos_ctx.gone:f"], [f"{own}y"]):
        with pytest.raises(SystemExit) as stopped:
            main(wrong)
        assert stopped.value.code == 2
    assert "Traceback" not in capsys.readouterr().err


def test_docs_page_runs_and_prints_what_it_shows(tmp_path):
    page = DOCS / "conformance.md"
    assert run_page(page, tmp_path) == sum(block.runs for block in blocks_of(page))


def test_docs_page_names_every_case_and_what_failures_mean():
    text = (DOCS / "conformance.md").read_text(encoding="utf-8")
    table = text.partition("### Case by case")[2].partition("###")[0]
    assert re.findall(r"^\| ([BL]\d+b?) \|", table, re.MULTILINE) == [one.id for one in CASES]
    failed = text.partition("in the words of the run")[2].partition("###")[0]
    meaning = text.partition("### What each failure means")[2].partition("\n## ")[0]
    for number in re.findall(r"^\| ([BL]\d+b?):", failed, re.MULTILINE):
        assert number in meaning
