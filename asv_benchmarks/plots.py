"""Draw docs/images/rivals-*.svg from a recorded run: ``python asv_benchmarks/plots.py [NAME]``.

NAME is a folder of results/ with a rivals.json; without it, the one that docs/performance.md
shows. Needs matplotlib (`pip install '.[rivals]'`). Figures in titles are computed from the file,
so that no title outlives its run.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from xml.sax.saxutils import escape

import matplotlib as mpl

mpl.use("svg")
import matplotlib.pyplot as plt
from matplotlib.ticker import FuncFormatter, NullFormatter, NullLocator
from rivals.tables import SHOWN

HERE = Path(__file__).resolve().parent
IMAGES = HERE.parent / "docs" / "images"

# Okabe and Ito's colours, which people of every colour vision tell apart; shapes say it again.
BLUE, GREEN, ORANGE, PINK, GREY = "#0072B2", "#00805E", "#C04A00", "#A5527F", "#555555"
SKY, YELLOW = "#56B4E9", "#E69F00"
COLOURS = {"kalos": BLUE, "ids": GREEN, "text": ORANGE, "framework": PINK}
MARKERS = "os^DvP<"  # within a group
SIDECAR_RIVAL = "Kalos behind grpcio"
STAGE_COLOURS = {
    "fetch": SKY,
    "parse": YELLOW,
    "tokenise": ORANGE,
    "cut": GREEN,
    "array": GREY,
    "all": BLUE,
}


def style():
    """Plain, light, text kept as text."""
    mpl.rcParams.update(
        {
            "svg.fonttype": "none",
            "svg.hashsalt": "kalos",
            "font.family": "sans-serif",
            "font.size": 10.5,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.edgecolor": GREY,
            "axes.labelcolor": "#222222",
            "xtick.color": GREY,
            "ytick.color": GREY,
            "xtick.labelcolor": "#222222",
            "ytick.labelcolor": "#222222",
            "axes.grid.axis": "y",
            "grid.color": "#e4e4e4",
            "grid.linewidth": 0.8,
            "figure.facecolor": "white",
            "savefig.facecolor": "white",
        }
    )


def time_text(microseconds):
    """Return a time as people say it: 4 us, 37 us, 1.2 ms, 23 s."""
    for unit, factor in (("s", 1e6), ("ms", 1e3)):
        if microseconds >= factor * 0.9995:
            value = microseconds / factor
            return f"{value:.1f} {unit}" if value < 9.95 else f"{value:.0f} {unit}"
    return f"{microseconds:.1f} \u00b5s" if microseconds < 9.95 else f"{microseconds:.0f} \u00b5s"


def tick_text(microseconds, _position=None):
    """A tick of a logarithmic axis of times."""
    for unit, factor in (("s", 1e6), ("ms", 1e3)):
        if microseconds >= factor * 0.999:
            return f"{microseconds / factor:g} {unit}"
    return f"{microseconds:g} \u00b5s"


def log_times(axis, low, high):
    """A logarithmic y axis of times with a tick at each power of ten."""
    axis.set_yscale("log")
    axis.set_ylim(low, high)
    axis.set_yticks([10.0**n for n in range(-1, 9) if low <= 10.0**n <= high])
    axis.yaxis.set_major_formatter(FuncFormatter(tick_text))
    axis.yaxis.set_minor_locator(NullLocator())
    axis.grid(True, axis="y")
    axis.set_axisbelow(True)


def log_counts(axis, values, label):
    """A logarithmic x axis with a tick at each measured size."""
    axis.set_xscale("log")
    axis.set_xticks(values)
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_minor_formatter(NullFormatter())
    axis.set_xlabel(label)


def heading(figure, title, subtitle, top=0.97, left=0.012):
    """The finding, and under it what is drawn."""
    inches = figure.get_size_inches()[1]
    lines = title.count("\n") + 1
    figure.text(left, top, title, fontsize=13.5, weight="bold", va="top", color="#111111",
                linespacing=1.25)  # fmt: skip
    figure.text(left, top - (0.06 + 0.255 * lines) / inches, subtitle, fontsize=9.5, va="top",
                color=GREY, linespacing=1.3)  # fmt: skip


def spread(wanted, gap):
    """Move label positions apart to at least `gap`, each as near to its own as can be."""
    order = sorted(range(len(wanted)), key=wanted.__getitem__)
    blocks = []  # [first, sum of wanted less its place, count]
    for rank, i in enumerate(order):
        blocks.append([rank, wanted[i] - rank * gap, 1])
        while len(blocks) > 1 and blocks[-2][1] / blocks[-2][2] > blocks[-1][1] / blocks[-1][2]:
            _, total, count = blocks.pop()
            blocks[-1][1] += total
            blocks[-1][2] += count
    placed = [0.0] * len(wanted)
    for first, total, count in blocks:
        for rank in range(first, first + count):
            placed[order[rank]] = total / count + rank * gap
    return placed


def end_labels(axis, ends, *, gap, room=0.03, size=9.5):
    """Write each line's name at its end; names that would overlap move apart, with a thin lead."""
    low, high = axis.get_ylim()
    place = axis.transData.transform
    height = axis.transAxes.transform((1, 1))[1] - axis.transAxes.transform((1, 0))[1]
    bottom = axis.transAxes.transform((0, 0))[1]
    right = axis.transAxes.transform((1, 0))[0]
    width = right - axis.transAxes.transform((0, 0))[0]
    ys = [(place((x, min(max(y, low), high)))[1] - bottom) / height for _, x, y, _, _ in ends]
    for (text, x, _, look, weight), own, at in zip(ends, ys, spread(ys, gap), strict=True):
        begin = (place((x, low))[0] - (right - width)) / width
        axis.plot([begin + 0.008, 1 + room * 0.6], [own, at], transform=axis.transAxes,
                  color=look["color"], lw=0.6, alpha=0.55, clip_on=False, zorder=1)  # fmt: skip
        axis.plot([1 + room * 0.8], [at], transform=axis.transAxes, clip_on=False,
                  **{**look, "ls": ""})  # fmt: skip
        axis.text(1 + room * 1.15, at, text, transform=axis.transAxes, color=look["color"],
                  va="center", fontsize=size, weight=weight)  # fmt: skip


def looks_of(data):
    """How each road is drawn: its group's colour, and a marker of its own within the group."""
    looks, seen = {}, {}
    for row in data["roads"]:
        group = row["group"]
        own = group == "kalos" and row["road"] != SIDECAR_RIVAL
        at = seen[group] = seen.get(group, -1) + 1
        looks[row["road"]] = {
            "color": COLOURS[group],
            "marker": MARKERS[at % len(MARKERS)],
            "ms": 5,
            "lw": 2.3 if own else 1.3,
            "ls": "--" if row["road"] == SIDECAR_RIVAL else "-",
            "zorder": 4 if own else 3,
        }
    return looks


def weight_of(name):
    """Kalos's own roads are bold."""
    return "bold" if name.startswith("Kalos") and name != SIDECAR_RIVAL else "normal"


def save(figure, name):
    """Write an SVG whose fonts are the reader's own, with the finding as its title."""
    title = figure.texts[0].get_text().replace("\n", " ")
    path = IMAGES / f"{name}.svg"
    figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})
    plt.close(figure)
    text = path.read_text(encoding="utf-8")
    text = re.sub(r"(font(?:-family)?: [^;\"']*)'[^;\"]*sans-serif", r"\1sans-serif", text)
    # What a screen reader says, and a browser shows at the pointer.
    text = re.sub(r"(<svg [^>]*>)", rf"\1\n <title>{escape(title)}</title>", text, count=1)
    text = "\n".join(line.rstrip() for line in text.splitlines()) + "\n"
    path.write_text(text, encoding="utf-8")
    print(f"{path.relative_to(HERE.parent)}: {len(text) / 1000:.0f} KB")


# ---- (a) Where the time goes ---------------------------------------------------------------------


def stage_bars(axis, rows, factor):
    """Stacked bars, one a road: a label in every part with room, above the first bar else."""
    longest = max(sum(stage["p50"] for stage in row["stages"].values()) for row in rows) / factor
    for y, row in enumerate(rows):
        at = 0.0
        total = sum(stage["p50"] for stage in row["stages"].values()) / factor
        for name, stage in row["stages"].items():
            wide = stage["p50"] / factor
            axis.barh(y, wide, left=at, height=0.58, color=STAGE_COLOURS[name], edgecolor="white",
                      linewidth=0.8 if wide > longest / 100 else 0)  # fmt: skip
            middle, dark = at + wide / 2, name in ("fetch", "parse")
            if wide > longest * 0.075:
                axis.text(middle, y, name, ha="center", va="center", fontsize=9,
                          color="#111111" if dark else "white")  # fmt: skip
            elif y == 0 and wide > longest * 0.018:
                # Neighbours lean away from each other.
                side = {"fetch": "right", "cut": "right", "parse": "left", "array": "left"}[name]
                place = at + wide * (0.8 if side == "right" else 0.1)
                axis.text(place, y - 0.34, name, ha=side, va="bottom", fontsize=9,
                          color="#333333")  # fmt: skip
            at += wide
        share = row["stages"].get("tokenise", {"p50": 0})["p50"] / factor / total
        more = f", {100 * share:.0f} % of it tokenising" if share > 0.005 else ""
        ours = "all" in row["stages"]
        axis.text(total + longest * 0.012, y, f"{time_text(total * factor)}{more}", va="center",
                  fontsize=9.5, color=BLUE if ours else "#222222",
                  weight="bold" if ours else "normal")  # fmt: skip
    axis.set_yticks(range(len(rows)), [row["label"] for row in rows])
    axis.tick_params(axis="y", length=0)
    axis.set_ylim(len(rows) - 0.5, -0.72)
    axis.set_xlim(0, longest * 1.36)
    axis.spines["left"].set_visible(False)


def classic_road(data):
    """Stages of the classic road and of the careful ones."""
    at = {row["road"]: row for row in data["turns"] if row["turns"] == 1000 and "stages" in row}
    upper = [
        ("text from Redis, all of it", "text in Redis,\nthe whole history"),
        ("text from Redis", "text in Redis,\nthe newest 500 turns"),
        ("text from Redis, tiktoken", "the same,\ntiktoken"),
    ]
    lower = [
        ("Redis, token IDs as JSON", "token IDs in Redis,\nas JSON"),
        ("raw int32 from Redis", "token IDs in Redis,\nraw int32"),
        ("Kalos, in process", "Kalos, in process"),
    ]
    chosen = [[{**at[name], "label": label} for name, label in part if name in at]
              for part in (upper, lower)]  # fmt: skip
    kalos = at["Kalos, in process"]
    for row in chosen[1]:
        if row["road"] == "Kalos, in process":
            row["stages"] = {"all": {"p50": kalos["p50"]}}
    whole, share = at["text from Redis, all of it"]["stages"], 0.0
    share = whole["tokenise"]["p50"] / sum(stage["p50"] for stage in whole.values())
    figure, axes = plt.subplots(2, 1, figsize=(9, 5.9))
    figure.subplots_adjust(left=0.185, right=0.985, top=0.805, bottom=0.085, hspace=0.55)
    heading(
        figure,
        f"The classic road spends {100 * share:.0f} % of its time turning text into tokens again",
        "From a session's name to its newest 8,192 tokens as an int32 array; a chat of 1,000 "
        "turns, p50 of each stage,\none caller, Redis on a Unix socket, Hugging Face's tokenizers "
        "unless said otherwise",
    )
    stage_bars(axes[0], chosen[0], 1e3)
    axes[0].set_xlabel("milliseconds")
    axes[1].xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes[0].set_title("text is stored", loc="left", fontsize=10.5, color=GREY)
    stage_bars(axes[1], chosen[1], 1.0)
    most = sum(stage["p50"] for stage in chosen[1][0]["stages"].values())
    axes[1].set_xlabel("microseconds")
    classic = sum(stage["p50"] for stage in chosen[0][0]["stages"].values())
    axes[1].set_title(
        f"token IDs are stored (the axis is stretched {classic / most:.0f} times)",
        loc="left", fontsize=10.5, color=GREY,
    )  # fmt: skip
    save(figure, "rivals-stages")


# ---- (b) Latency against turns -------------------------------------------------------------------


def blob_clause(data):
    """Say in the title where one blob a session in LMDB is faster than Kalos, where it is."""
    of = {(row["road"], row["turns"]): row.get("p50") for row in data["turns"]}
    faster = [
        size
        for size in data["sizes"]["turns"]
        if of["LMDB, a blob a session", size] < of["Kalos, in process", size]
    ]
    if not faster:
        return ""
    if faster == data["sizes"]["turns"]:
        return "; an LMDB blob of ready IDs is faster at every size"
    return f"; an LMDB blob of ready IDs is faster up to {faster[-1]:,}"


def against_turns(data):
    """Every road over the number of turns."""
    looks = looks_of(data)
    names = [name for name in looks if not name.endswith("TCP")]
    figure, axis = plt.subplots(figsize=(10, 7.8))
    figure.subplots_adjust(left=0.07, right=0.655, top=0.87, bottom=0.072)
    sizes = data["sizes"]["turns"]
    axis.set_xlim(sizes[0] * 0.85, sizes[-1] * 1.12)
    log_counts(axis, sizes, "turns in the session")
    times = [row["p50"] for row in data["turns"] if "p50" in row]
    log_times(axis, min(times) / 2, max(times) * 2)
    ends = []
    for name in names:
        rows = [row for row in data["turns"] if row["road"] == name and "p50" in row]
        xs, ys = [row["turns"] for row in rows], [row["p50"] for row in rows]
        axis.plot(xs, ys, **looks[name])
        stopped = xs[-1] < sizes[-1]
        if stopped:
            axis.plot(xs[-1:], ys[-1:], color=looks[name]["color"], marker="x", ms=10, mew=2,
                      zorder=5)  # fmt: skip
        text = f"{name}: {time_text(ys[-1])}" + (f" at {xs[-1]:,}" if stopped else "")
        ends.append((text, xs[-1], ys[-1], looks[name], weight_of(name)))
    end_labels(axis, ends, gap=0.041, room=0.045)
    at = {row["road"]: row for row in data["turns"] if row["turns"] == sizes[-1]}
    ours = at["Kalos, in process"]["p50"]
    raw, text = (at[name]["p50"] / ours for name in ("raw int32 from Redis", "text from Redis"))
    heading(
        figure,
        f"At {sizes[-1]:,} turns Kalos answers in {time_text(ours)}; raw token IDs from Redis "
        f"take {raw:.0f} times\nas long, text from Redis {float(f'{text:.2g}'):,.0f} times"
        f"{blob_clause(data)}",
        "p50 from a session's name to its newest 8,192 tokens; "
        "\u00d7: larger sizes not run, since a call would take more than "
        f"{data['sizes']['limit_s']:.0f} s",
        top=0.985,
    )
    save(figure, "rivals-turns")


# ---- (c) Latency against rows --------------------------------------------------------------------


def against_rows(data):
    """Exact top 10 over the number of rows of 384."""
    figure, axis = plt.subplots(figsize=(8.6, 5.1))
    figure.subplots_adjust(left=0.085, right=0.715, top=0.79, bottom=0.105)
    rows = [row for row in data["search"] if row["dim"] == 384]
    sizes = sorted({row["rows"] for row in rows})
    axis.set_xlim(sizes[0] * 0.9, sizes[-1] * 1.08)
    log_counts(axis, sizes, "rows of 384 float32")
    times = [row["p50"] for row in rows]
    log_times(axis, min(times) / 1.6, max(times) * 1.6)
    looks = {
        "Kalos": (BLUE, "o", "-"),
        "numpy": (GREY, "s", "-"),
        "FAISS flat": (ORANGE, "^", "-"),
        "FAISS flat, 1 thread": (ORANGE, "v", "--"),
        "usearch exact": (PINK, "D", "-"),
    }
    ends = []
    for name, (colour, marker, line) in looks.items():
        own = [row for row in rows if row["road"] == name]
        xs, ys = [row["rows"] for row in own], [row["p50"] for row in own]
        look = {"color": colour, "marker": marker, "ls": line, "ms": 5,
                "lw": 2.3 if name == "Kalos" else 1.4}  # fmt: skip
        axis.plot(xs, ys, **look)
        ends.append((f"{name}: {time_text(ys[-1])}", xs[-1], ys[-1], look, weight_of(name)))
    end_labels(axis, ends, gap=0.058, room=0.045)
    of = {(row["road"], row["rows"]): row["p50"] for row in rows}

    def said(size):
        best = min(of[name, size] for name in looks if name != "Kalos")
        ours = of["Kalos", size]
        if 0.95 <= best / ours <= 1.05:
            return "as fast as the fastest"
        more = best / ours if best > ours else ours / best
        return f"{more:.1f} times as {'fast' if best > ours else 'slow'} as the fastest"

    heading(
        figure,
        f"Exact recall: Kalos is {said(sizes[-1])} rival\nat {sizes[-1]:,} rows, "
        f"{said(sizes[0])} at {sizes[0]:,}",
        f"p50 of the exact top {data['sizes']['top_k']} of MiniLM embeddings on "
        f"{data['machine']['cores']} cores, one query at a time, called from Python",
        top=0.98,
    )
    save(figure, "rivals-recall")


# ---- (d) Prefix reuse ----------------------------------------------------------------------------


def reused(data):
    """Share of prompt tokens that a KV cache has seen, and how long the windows are for it."""
    rows = sorted(data["reuse"], key=lambda row: row["reused_percent_late"])
    figure, axes = plt.subplots(1, 2, figsize=(9, 4.1), width_ratios=[1.55, 1], sharey=True)
    figure.subplots_adjust(left=0.205, right=0.975, top=0.735, bottom=0.135, wspace=0.12)
    labels = {"sliding": "sliding: the newest\nturns that fit"}
    for y, row in enumerate(rows):
        sliding = row["low_water"] is None
        colour = ORANGE if sliding else BLUE
        share = row["reused_percent_late"]
        axes[0].barh(y, 100, height=0.62, color="#eeeeee")
        axes[0].barh(y, share, height=0.62, color=colour)
        axes[0].text(share - 1.5 if share > 30 else share + 1.5, y, f"{share:.1f} %", va="center",
                     ha="right" if share > 30 else "left",
                     color="white" if share > 30 else "#222222", weight="bold")  # fmt: skip
        tokens = row["tokens_a_late_window"]
        axes[1].barh(y, tokens, height=0.62, color=colour, alpha=0.55)
        axes[1].text(tokens + 60, y, f"{tokens:,}", va="center", color="#222222")
    axes[0].set_yticks(
        range(len(rows)),
        [labels.get(row["policy"], f"stable, low water {row['low_water']}"
                    + ("\n(the default)" if row["low_water"] == 0.5 else "")) for row in rows],
    )  # fmt: skip
    for axis in axes:
        axis.tick_params(axis="y", length=0)
        axis.spines["left"].set_visible(False)
        axis.set_ylim(len(rows) - 0.45, -0.55)
    axes[0].set_xlim(0, 100)
    axes[0].set_xlabel("prompt tokens that the KV cache has seen, %")
    axes[1].set_xlim(0, data["sizes"]["reuse_budget"] * 1.18)
    axes[1].set_xlabel("tokens a window, of a budget of 4,096")
    axes[1].xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    of = {row["policy"]: row for row in rows}
    default, sliding = of["stable, low water 0.5"], of["sliding"]
    shorter = 1 - default["tokens_a_late_window"] / sliding["tokens_a_late_window"]
    heading(
        figure,
        f"A stable beginning lets {default['reused_percent_late']:.0f} % of a prompt come from the "
        f"cache, not {sliding['reused_percent_late']:.0f} %,\nfor windows that are "
        f"{100 * shorter:.0f} % shorter on average",
        f"{default['conversations']} real conversations of 200 messages and more, a window at "
        "every user turn, once the history no longer fits; "
        f"{default['windows']:,} windows a policy",
        top=0.97,
    )
    save(figure, "rivals-reuse")


# ---- (e) Latency against callers -----------------------------------------------------------------


def against_callers(data):
    """p50 and p99 from 1 to 64 threads."""
    looks = looks_of(data)
    rows = data["callers"]
    levels = data["sizes"]["callers"]
    names = list(dict.fromkeys(row["road"] for row in rows))
    figure, axes = plt.subplots(1, 2, figsize=(11, 6), sharey=True)
    figure.subplots_adjust(left=0.062, right=0.735, top=0.80, bottom=0.09, wspace=0.07)
    shown = {"p50": "half of the calls (p50)", "p99": "99 of 100 calls (p99)"}
    times = [row[what] for row in rows for what in shown]
    for axis, what in zip(axes, shown, strict=True):
        axis.set_xlim(0.85, levels[-1] * 1.15)
        log_counts(axis, levels, "threads")
        log_times(axis, min(times) / 2, max(times) * 2)
        axis.set_title(shown[what], loc="left", fontsize=10.5, color=GREY)
        ends = []
        for name in names:
            own = [row for row in rows if row["road"] == name]
            xs, ys = [row["callers"] for row in own], [row[what] for row in own]
            axis.plot(xs, ys, **looks[name])
            last = own[-1]
            text = f"{name}\n{last['a_second']:,} a second, slowest {time_text(last['worst'])}"
            ends.append((text, xs[-1], ys[-1], looks[name], weight_of(name)))
        if axis is axes[-1]:
            end_labels(axis, ends, gap=0.088, room=0.07, size=9)
    of = {(row["road"], row["callers"]): row for row in rows}
    ours, theirs = (of[name, levels[-1]]["a_second"] for name in
                    ("Kalos, in process", "raw int32 from Redis"))  # fmt: skip
    heading(
        figure,
        f"With {levels[-1]} threads in one process Kalos gives {ours:,} windows a second, "
        f"raw IDs\nfrom Redis {theirs:,}; that all wait for Python's lock shows in the slowest "
        "calls",
        "Each thread asks for a session of its own without pause: "
        f"{data['sizes']['callers_turns']:,} turns, 8,192 tokens, "
        f"{data['machine']['cores']} cores. At the right: with {levels[-1]} threads",
        top=0.98,
    )
    save(figure, "rivals-callers")


def main():
    """Draw all five."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("name", nargs="?", default=SHOWN, help="a folder of results/")
    options = parser.parse_args()
    path = HERE / "results" / options.name / "rivals.json"
    data = json.loads(path.read_text(encoding="utf-8"))
    style()
    IMAGES.mkdir(exist_ok=True)
    for draw in (classic_road, against_turns, against_rows, reused, against_callers):
        draw(data)


if __name__ == "__main__":
    main()
