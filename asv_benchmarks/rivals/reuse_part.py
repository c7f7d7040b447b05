"""How much of each prompt a KV cache has seen, by policy, over growing real conversations."""

from __future__ import annotations

import os
import tempfile

from kalos_ctx import ContextAssembler, Policy, SessionStore, demo_data
from rivals.chats import conversations

BUDGET = 4096
LEAST = 200  # messages of a conversation, so that its history outgrows the budget
POLICIES = {
    "sliding": Policy(stable_prefix=False),
    **{
        f"stable, low water {low}": Policy(stable_prefix=True, low_water=low)
        for low in (0.9, 0.75, 0.5, 0.25)
    },
}


def reuse(say, out, *, quick=False):
    """A window at every user turn by every policy; shares of all prompt tokens.

    `late` counts only the windows behind which the history no longer fits: those that a policy
    can make differ.
    """
    rows = [row for row in conversations() if len(row["messages"]) >= LEAST]
    rows = rows[:3] if quick else rows
    total = {name: {"all": [0, 0], "late": [0, 0], "windows": 0} for name in POLICIES}
    with tempfile.TemporaryDirectory(prefix="kalos-rivals-") as folder:
        store = SessionStore.open(os.path.join(folder, "s"), tokenizer=demo_data.tokenizer_dir())
        # Each policy has an assembler of its own: reuse is against the window before.
        assemblers = {name: ContextAssembler(store, device="cpu") for name in POLICIES}
        for row in rows:
            stored = 0
            for message in row["messages"]:
                seq = store.append(row["id"], message["role"], message["content"])
                stored += store.turns(row["id"], seq, seq + 1)[0].num_tokens
                if message["role"] != "user":
                    continue
                for name, policy in POLICIES.items():
                    window = assemblers[name].assemble(row["id"], max_tokens=BUDGET, policy=policy)
                    with window:
                        found = (len(window), window.report.reused_tokens)
                    count(total[name], found, late=stored > BUDGET)
        for assembler in assemblers.values():
            assembler.close()
        store.close()
    out["reuse"] = []
    for name, sums in total.items():
        low_water = POLICIES[name].low_water if POLICIES[name].stable_prefix else None
        line = {
            "policy": name,
            "low_water": low_water,
            "conversations": len(rows),
            "windows": sums["windows"],
            "reused_percent": percent(*sums["all"]),
            "reused_percent_late": percent(*sums["late"]),
            "tokens_a_late_window": round(sums["late"][0] / max(1, sums["windows"])),
        }
        out["reuse"].append(line)
        say(f"{name:36} {line['reused_percent']:7.1f} % of all, "
            f"{line['reused_percent_late']:5.1f} % once the history is cut, "
            f"{line['tokens_a_late_window']:,} tokens a window")  # fmt: skip


def count(sums, found, *, late):
    """Add one window."""
    for which in ("all", "late") if late else ("all",):
        sums[which][0] += found[0]
        sums[which][1] += found[1]
    sums["windows"] += late


def percent(tokens, reused):
    return round(100 * reused / max(1, tokens), 1)
