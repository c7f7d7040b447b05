// The page: which tenant, session and settings are chosen, kept in the address behind the '#'.

import { ask, byId, count, el, nbytes, plural, Problem } from "./dom.js";
import { drawWindow, watchTokens } from "./window.js";

const WAIT_MS = 250;
const form = byId("settings");
const state = { tenant: "", session: null, cursor: null };
let asked = null;
let waiting = 0;

// ---- Start --------------------------------------------------------------------------------------

async function start() {
  const store = await ask("store", {});
  document.title = `${store.name} · Kalos`;
  byId("store-name").textContent = store.name;
  byId("store-facts").textContent = [
    plural(store.sessions, "session", "sessions"), plural(store.turns, "turn", "turns"),
    plural(store.passages, "passage", "passages"), nbytes(store.nbytes),
    store.has_tokenizer ? null : "no tokenizer: texts as stored, without the template's own head",
  ].filter(Boolean).join(" · ");
  const tenants = store.tenants.length ? store.tenants : [{ id: "", name: "" }];
  byId("tenant").replaceChildren(
    ...tenants.map((one) => el("option", { value: one.id }, one.name || "the default one")),
  );
  form.query.querySelector("[value=text]").disabled = !store.has_embedder;
  form.generation_prompt.disabled = !store.has_template;
  readAddress();
  byId("tenant").value = state.tenant;
  await listSessions(true);
  if (state.session) await openSession(state.session);
}

function readAddress() {
  const fields = new URLSearchParams(location.hash.slice(1));
  state.tenant = fields.get("tenant") ?? byId("tenant").value;
  state.session = fields.get("session");
  for (const field of form.elements) {
    if (!field.name || !fields.has(field.name)) continue;
    if (field.type === "checkbox") field.checked = fields.get(field.name) === "1";
    else field.value = fields.get(field.name);
  }
}

function writeAddress() {
  const fields = new URLSearchParams({ ...settings() });
  fields.delete("collection");
  fields.set("tenant", state.tenant);
  fields.set("session", state.session);
  history.replaceState(null, "", `#${fields}`);
}

// ---- Sessions -----------------------------------------------------------------------------------

async function listSessions(anew) {
  const fields = { tenant: state.tenant, search: byId("search").value };
  if (!anew && state.cursor !== null) fields.cursor = state.cursor;
  const page = await ask("sessions", fields);
  const rows = page.sessions.map((one) =>
    el("li", {}, el(
      "button",
      { type: "button", "data-id": one.id, onclick: () => run(() => openSession(one.id)) },
      el("bdi", {}, one.name),
      el("span", { class: "tokens" }, plural(one.turns, "turn", "turns")),
    )),
  );
  const list = byId("session-list");
  if (anew) list.replaceChildren(...rows);
  else list.append(...rows);
  state.cursor = page.cursor;
  byId("more").hidden = page.cursor === null;
  byId("no-session").hidden = list.children.length > 0 || page.cursor !== null;
  markSession();
}

function markSession() {
  for (const one of byId("session-list").querySelectorAll("button")) {
    if (one.dataset.id === state.session) one.setAttribute("aria-current", "true");
    else one.removeAttribute("aria-current");
  }
}

async function openSession(id) {
  const found = await ask("session", { tenant: state.tenant, session: id });
  const other = state.session !== id;
  state.session = id;
  markSession();
  byId("choose").hidden = true;
  byId("session-view").hidden = false;
  byId("session-name").textContent = found.name;
  byId("session-facts").textContent = [
    plural(found.turns, "turn", "turns"),
    found.segments.length ? `pinned: ${found.segments.join(", ")}` : "nothing pinned",
    found.summaries ? plural(found.summaries, "summary", "summaries") : null,
  ].filter(Boolean).join(" · ");
  form.as_of.max = found.turns;
  if (other) form.as_of.value = "";
  drawCollections(found.collections);
  await build();
}

function drawCollections(collections) {
  const known = byId("collections");
  const ticked = new Map([...known.querySelectorAll("input")].map((one) => [one.value, one.checked]));
  known.replaceChildren(...collections.map((one) => {
    const box = el("input", { type: "checkbox", name: "collection", value: one.id });
    box.checked = ticked.get(one.id) ?? true;
    return el("label", { class: "tick" }, box, ` ${one.name} (${count(one.passages)})`);
  }));
  const before = form.query_collection.value;
  form.query_collection.replaceChildren(
    ...collections.map((one) => el("option", { value: one.id }, one.name)),
  );
  if (collections.some((one) => one.id === before)) form.query_collection.value = before;
  if (!collections.length && form.query.value === "passage") form.query.value = "none";
  form.query.querySelector("[value=passage]").disabled = !collections.length;
}

async function listPassages() {
  const collection = form.query_collection.value;
  const list = byId("passages");
  const key = `${state.tenant} ${collection}`;
  if (!collection || list.dataset.of === key) return;
  const page = await ask("passages", { tenant: state.tenant, collection });
  list.dataset.of = key;
  list.replaceChildren(
    ...page.passages.map((one) => el("option", { value: one.id }, one.text ?? "no text")),
  );
  if (!form.query_passage.value && page.passages.length) {
    form.query_passage.value = page.passages[0].id;
  }
}

// ---- Windows ------------------------------------------------------------------------------------

function settings() {
  const fields = new FormData(form);
  const made = {};
  for (const [name, value] of fields) if (name !== "collection" && value !== "") made[name] = value;
  for (const box of form.querySelectorAll("input[type=checkbox]")) {
    if (box.name !== "collection") made[box.name] = box.checked ? "1" : "0";
  }
  return made;
}

function showRecallFields() {
  for (const one of form.querySelectorAll("[data-for]")) {
    one.hidden = !one.dataset.for.split(" ").includes(form.query.value);
  }
}

async function build() {
  showRecallFields();
  if (form.query.value === "passage") await listPassages();
  const fields = new URLSearchParams({ ...settings(), tenant: state.tenant, session: state.session });
  for (const box of byId("collections").querySelectorAll("input:checked")) {
    fields.append("collection", box.value);
  }
  writeAddress();
  asked?.abort();
  asked = new AbortController();
  const result = byId("result");
  result.setAttribute("aria-busy", "true");
  try {
    const found = await ask("window", fields, asked.signal);
    byId("problem").hidden = true;
    drawWindow(result, found, recallBy);
    byId("spoken").textContent = `The window has ${plural(found.num_tokens, "token", "tokens")}.`;
  } catch (error) {
    if (error.name === "AbortError") return;
    result.replaceChildren();
    throw error;
  }
  result.setAttribute("aria-busy", "false");
}

function recallBy(hit) {
  form.query.value = hit.collection === null ? "turn" : "passage";
  if (hit.collection === null) form.query_turn.value = hit.id;
  else {
    form.query_collection.value = hit.collection;
    form.query_passage.value = hit.id;
  }
  run(build);
  form.query.focus();
}

// ---- Events -------------------------------------------------------------------------------------

function explain(error) {
  const problem = byId("problem");
  const lines = [el("p", {}, el("strong", {}, "This cannot be shown. "), error.message)];
  const parts = error.details?.by_segment;
  if (parts && Object.keys(parts).length) {
    lines.push(el("ul", {}, ...Object.entries(parts).map(([name, tokens]) =>
      el("li", {}, `${name}: ${plural(tokens, "token", "tokens")}`))));
  }
  problem.replaceChildren(...lines);
  problem.hidden = false;
  if (!state.session) byId("choose").textContent = error.message;
}

async function run(step) {
  try {
    await step();
  } catch (error) {
    if (!(error instanceof Problem)) throw error;
    explain(error);
  }
}

function soon(step) {
  clearTimeout(waiting);
  waiting = setTimeout(() => run(step), WAIT_MS);
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  run(build);
});
form.addEventListener("input", () => {
  showRecallFields();
  if (form.checkValidity()) soon(build);
});
form.query_collection.addEventListener("input", () => {
  form.query_passage.value = "";
});
byId("search").addEventListener("input", () => soon(() => listSessions(true)));
byId("more").addEventListener("click", () => run(() => listSessions(false)));
byId("tenant").addEventListener("change", (event) => {
  state.tenant = event.target.value;
  state.session = null;
  state.cursor = null;
  form.query_passage.value = "";
  byId("collections").replaceChildren();
  byId("session-view").hidden = true;
  byId("choose").hidden = false;
  run(() => listSessions(true));
});
watchTokens(byId("result"));
showRecallFields();
run(start);
