// Draws a window: the bar, its parts token by token, what was dropped, recalled and reused.

import { byId, count, duration, el, percent, plural } from "./dom.js";

const KINDS = {
  head: { label: "Head", letter: "H" },
  user: { label: "User", letter: "U" },
  assistant: { label: "Assistant", letter: "A" },
  tool: { label: "Tool", letter: "T" },
  system: { label: "System", letter: "S" },
  summary: { label: "Summary", letter: "Σ" },
  passage: { label: "Recalled", letter: "R" },
  prompt: { label: "Generation prompt", letter: "G" },
};

const REASONS = {
  budget: "older than what fits",
  group: "fits by itself, but not the call or the results that belong to it",
  orphan: "the call that it answers is gone",
  expired: "its time to live is over",
  summarized: "a summary stands for it",
  start_on: "the history may not begin with it",
  end_on: "the history may not end with it",
  overflow: "part of the newest unit, which does not fit",
  recall_budget: "does not fit what recalled passages may take",
  duplicate: "stands in the history already",
  empty: "has no token IDs",
};

const ROLE_KINDS = {
  user: "user", assistant: "assistant", tool: "tool", function: "tool",
  system: "system", developer: "system",
};

function kindOf(part) {
  if (part.kind === "turn") return ROLE_KINDS[part.role] ?? "system";
  if (part.kind === "segment") return "head";
  return part.kind === "generation_prompt" ? "prompt" : part.kind;
}

function titleOf(part) {
  switch (part.kind) {
    case "turn": return `Turn ${part.seq}`;
    case "summary": return `Summary from turn ${part.seq}`;
    case "passage":
      return part.name === "session" ? `Turn ${part.id}, recalled` : `${part.name} ${part.id}`;
    case "generation_prompt": return "Generation prompt";
    default: return part.name ?? "Head";
  }
}

function reuseOf(part, reused) {
  if (part.start + part.tokens <= reused) return "reused";
  return part.start < reused ? `${count(reused - part.start)} of ${count(part.tokens)} reused` : "new";
}

export function drawWindow(place, found, recallBy) {
  place.replaceChildren(
    bar(found),
    facts(found),
    el("div", { class: "detail" }, parts(found), aside(found, recallBy)),
  );
}

// ---- The bar ------------------------------------------------------------------------------------

function bar(found) {
  const whole = Math.max(found.max_tokens, 1);
  const width = (tokens) => ({ "flex-grow": String(tokens) });
  const tiles = found.segments.map((part, i) => {
    const kind = kindOf(part);
    const label = `${titleOf(part)}, ${KINDS[kind].label}, ${plural(part.tokens, "token", "tokens")}`;
    return el(
      "a",
      {
        class: `tile k-${kind}`, href: `#part-${i}`, title: label, "aria-label": label,
        style: width(part.tokens), onclick: (event) => show(event, i),
      },
      el("span", { "aria-hidden": "true" }, KINDS[kind].letter),
    );
  });
  const free = found.max_tokens - found.reserve - found.num_tokens;
  if (free > 0) tiles.push(el("span", { class: "tile free", style: width(free), title: `${count(free)} free` }));
  if (found.reserve) {
    const title = `${count(found.reserve)} reserved for the reply`;
    tiles.push(el("span", { class: "tile reserve", style: width(found.reserve), title }, "reserve"));
  }
  const { reuse } = found;
  const share = (100 * Math.min(reuse.tokens, found.num_tokens)) / whole;
  const kinds = [...new Set(found.segments.map(kindOf))];
  return el(
    "section",
    { class: "bar-box", "aria-label": "The window as a bar" },
    el("div", { class: "bar" }, ...tiles),
    el(
      "div",
      { class: "reuse-line", "aria-hidden": "true" },
      reuse.tokens ? el("span", { class: "reuse-mark", style: { width: `${share}%` } }) : null,
    ),
    el(
      "ul",
      { class: "legend" },
      ...kinds.map((kind) => el("li", {}, badge(kind), KINDS[kind].label)),
      free > 0 ? el("li", {}, el("span", { class: "swatch free" }), `${count(free)} free`) : null,
      found.reserve
        ? el("li", {}, el("span", { class: "swatch reserve" }), `${count(found.reserve)} reserve`)
        : null,
      reuse.tokens ? el("li", {}, el("span", { class: "swatch reuse" }), "reused beginning") : null,
    ),
  );
}

function badge(kind) {
  return el("span", { class: `badge k-${kind}`, "aria-hidden": "true" }, KINDS[kind].letter);
}

function show(event, i) {
  event.preventDefault();
  const part = byId(`part-${i}`);
  part.scrollIntoView({ block: "nearest" });
  part.querySelector(".text")?.focus({ preventScroll: true });
}

// ---- In numbers ---------------------------------------------------------------------------------

function facts(found) {
  const total = found.budget.total;
  const { dropped, reuse, hits, timings } = found;
  const reasons = Object.entries(dropped.by_reason).map(([why, n]) => `${count(n)} ${words(why)}`);
  return el(
    "dl",
    { class: "cards" },
    card("Tokens", count(found.num_tokens), `of ${count(total)}, ${percent(found.num_tokens, total)} full`),
    card("Reused", percent(reuse.tokens, found.num_tokens), reuseSentence(reuse)),
    card("Dropped", count(dropped.count), reasons.join(", ") || "everything stands in the window"),
    card(
      "Recalled",
      count(hits.filter((hit) => !hit.why).length),
      found.no_hits === "zero_query" ? "the query is all zeros" : `of ${plural(hits.length, "hit", "hits")}`,
    ),
    card("Built in", duration(timings.total), `of which recall ${duration(timings.recall)}`),
  );
}

function card(name, value, more) {
  return el(
    "div",
    { class: "card" },
    el("dt", {}, name),
    el("dd", {}, el("strong", {}, value), el("span", {}, more)),
  );
}

function reuseSentence(reuse) {
  const { before } = reuse;
  if (before && before.as_of === null) return before.why;
  const tokens = plural(reuse.tokens, "token", "tokens");
  if (reuse.until) return `${tokens}; the match ended in ${reuse.until}`;
  if (reuse.tokens) return `${tokens}: all of the window before`;
  return before ? "nothing is the same" : "there is no window before to compare with";
}

const words = (why) => why.replaceAll("_", " ");

// ---- Parts and their tokens ---------------------------------------------------------------------

function parts(found) {
  const rows = found.segments.map((part, i) => {
    const kind = kindOf(part);
    const cut = found.cut.find((one) => part.kind === "turn" && one.seq === part.seq);
    const reuse = reuseOf(part, found.reuse.tokens);
    return el(
      "li",
      { class: `part k-${kind}`, id: `part-${i}` },
      el(
        "h4",
        {},
        badge(kind),
        el("span", { class: "what" }, titleOf(part)),
        el("span", { class: "role" }, part.role ?? KINDS[kind].label.toLowerCase()),
        cut ? el("span", { class: "mark" }, `lost its first ${plural(cut.tokens, "token", "tokens")}`) : null,
        el("span", { class: `mark ${reuse === "new" ? "is-new" : ""}` }, reuse),
        el("span", { class: "tokens" }, plural(part.tokens, "token", "tokens")),
      ),
      tokens(part, titleOf(part)),
    );
  });
  return el(
    "section",
    { class: "parts", "aria-label": "What stands in the window" },
    el("h3", {}, "In the window"),
    rows.length ? el("ol", {}, ...rows) : el("p", { class: "note" }, "The window is empty."),
  );
}

function tokens(part, title) {
  const label = `Tokens of ${title}; arrow keys go from one to the next`;
  const options = { class: "text", tabindex: "0", role: "group", "aria-label": label };
  if (part.pieces) {
    let at = part.start;
    const spans = part.pieces.map(([text, ids]) => {
      const control = /^<[|/]?[\w|:.-]+[|]?>$/.test(text) ? " control" : "";
      const span = el(
        "span",
        { class: `token${control}`, "data-ids": ids.join(" "), "data-at": at },
        ...withLineEnds(text),
      );
      at += ids.length;
      return span;
    });
    return el("p", { ...options, dir: "auto" }, ...spans);
  }
  if (part.text !== null) return el("p", { ...options, "aria-label": title, dir: "auto" }, part.text);
  const ids = part.token_ids ?? [];
  const spans = ids.map((id, i) =>
    el("span", { class: "token id", "data-ids": id, "data-at": part.start + i }, String(id)),
  );
  const more = part.tokens - ids.length;
  if (more) spans.push(`… ${count(more)} more`);
  return el("p", { ...options, class: "text ids" }, ...spans);
}

// A line end is a token like others, so it is shown where it stands.
function withLineEnds(text) {
  const [first, ...rest] = text.split("\n");
  const sign = () => el("span", { class: "line-end", "aria-hidden": "true" }, "↵");
  return [first, ...rest.flatMap((line) => [sign(), `\n${line}`])];
}

let marked = null;

function mark(token) {
  marked?.classList.remove("on");
  marked = token;
  const tip = byId("tip");
  tip.hidden = !token;
  if (!token) return;
  token.classList.add("on");
  const ids = token.dataset.ids.split(" ");
  tip.replaceChildren(
    el("strong", {}, ids.length > 1 ? `IDs ${ids.join(", ")}` : `ID ${ids[0]}`),
    el("span", {}, `place ${count(Number(token.dataset.at))} in the window`),
  );
  const box = token.getClientRects()[0] ?? token.getBoundingClientRect();
  const left = Math.min(Math.max(8, box.left), document.documentElement.clientWidth - tip.offsetWidth - 8);
  const above = box.top - tip.offsetHeight - 6;
  tip.style.left = `${left}px`;
  tip.style.top = `${above < 4 ? box.bottom + 6 : above}px`;
}

export function watchTokens(place) {
  place.addEventListener("mouseover", (event) => mark(event.target.closest(".token")));
  place.addEventListener("mouseleave", () => mark(null));
  place.addEventListener("focusout", () => mark(null));
  document.addEventListener("scroll", () => mark(null), { capture: true, passive: true });
  place.addEventListener("keydown", (event) => {
    const text = event.target.closest(".text");
    if (!text) return;
    if (event.key === "Escape") return mark(null);
    const all = [...text.querySelectorAll(".token")];
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (!all.length || !(step || event.key === "Home" || event.key === "End")) return;
    event.preventDefault();
    const now = all.indexOf(marked);
    let next = event.key === "End" ? all.length - 1 : 0;
    if (step) next = now < 0 ? 0 : Math.min(Math.max(now + step, 0), all.length - 1);
    all[next].scrollIntoView({ block: "nearest" });
    mark(all[next]);
    const { ids } = all[next].dataset;
    byId("spoken").textContent = `${all[next].textContent.trim() || "blank"}, ID ${ids}`;
  });
}

// ---- Beside them --------------------------------------------------------------------------------

function aside(found, recallBy) {
  return el(
    "aside",
    { class: "beside" },
    el("section", { "aria-label": "Recalled" }, el("h3", {}, "Recalled"), hitList(found, recallBy)),
    el("section", { "aria-label": "Dropped" }, el("h3", {}, "Dropped"), droppedList(found.dropped)),
    el("section", { "aria-label": "Budget" }, el("h3", {}, "Budget and time"), budgetTable(found)),
  );
}

function hitList(found, recallBy) {
  const { hits } = found;
  if (!hits.length) {
    return el("p", { class: "note" }, "Nothing was recalled. Choose above what to recall by.");
  }
  const best = Math.max(...hits.map((hit) => Math.abs(hit.score)), 1e-9);
  return el("ol", { class: "hits" }, ...hits.map((hit) => {
    const name = hit.collection === null ? `turn ${hit.id}` : `${hit.source} ${hit.id}`;
    const share = Math.max(2, (100 * Math.abs(hit.score)) / best);
    return el(
      "li",
      {},
      el(
        "div",
        { class: "line" },
        el("span", { class: "what" }, name),
        el("span", { class: hit.why ? "mark" : "mark is-in" }, hit.why ? words(hit.why) : "in the window"),
        el("span", { class: "tokens" }, hit.score.toFixed(4)),
      ),
      el("div", { class: "score", "aria-hidden": "true" }, el("span", { style: { width: `${share}%` } })),
      el("p", { class: "preview", dir: "auto" }, hit.text ?? "no text is stored"),
      el(
        "div",
        { class: "line small" },
        hit.why ? el("span", {}, REASONS[hit.why] ?? "") : null,
        el("button", { type: "button", class: "quiet", onclick: () => recallBy(hit) }, "Recall by this"),
      ),
    );
  }));
}

function droppedList(dropped) {
  if (!dropped.count) return el("p", { class: "note" }, "Nothing was dropped.");
  const reasons = Object.entries(dropped.by_reason).map(([why, n]) =>
    el("li", {}, el("span", { class: "mark" }, words(why)), ` ${count(n)}: ${REASONS[why] ?? ""}`),
  );
  const rows = dropped.newest.map((one) => {
    const kind = one.kind === "turn" ? ROLE_KINDS[one.role] ?? "system" : one.kind;
    const title = one.kind === "turn" ? `Turn ${one.seq}` : titleOf(one);
    return el(
      "li",
      {},
      el(
        "div",
        { class: "line" },
        badge(kind),
        el("span", { class: "what" }, title),
        el("span", { class: "mark" }, words(one.why)),
        one.tokens === null ? null : el("span", { class: "tokens" }, plural(one.tokens, "token", "tokens")),
      ),
      one.text === null ? null : el("p", { class: "preview", dir: "auto" }, one.text),
    );
  });
  const rest = dropped.count - rows.length;
  return el(
    "div",
    {},
    el("ul", { class: "reasons" }, ...reasons),
    el("ol", { class: "dropped", tabindex: "0", "aria-label": "Dropped, the newest first" }, ...rows),
    rest ? el("p", { class: "note" }, `and ${count(rest)} older ones`) : null,
  );
}

function budgetTable(found) {
  const { budget, timings } = found;
  const rows = [
    ["Max tokens less reserve", count(budget.total)],
    ["Head and generation prompt", count(budget.head)],
    ["History may take", count(budget.history)],
    ["Recall may take", count(budget.recall)],
    ...Object.entries(timings).map(([name, us]) => [`Time: ${name}`, duration(us)]),
    ["Path", found.path],
  ];
  return el(
    "table",
    { class: "budget" },
    el("tbody", {}, ...rows.map(([name, value]) =>
      el("tr", {}, el("th", { scope: "row" }, name), el("td", {}, value)))),
  );
}
