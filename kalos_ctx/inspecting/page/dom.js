// Elements, numbers and requests. Text enters the page as text alone, never as markup.

export function el(tag, options = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(options)) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "class") made.className = value;
    else if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name === "style") {
      for (const [property, one] of Object.entries(value)) made.style.setProperty(property, one);
    } else made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

export const byId = (id) => document.getElementById(id);

const grouped = new Intl.NumberFormat("en");
export const count = (value) => grouped.format(value);
export const plural = (value, one, many) => `${count(value)} ${value === 1 ? one : many}`;

export function percent(part, whole) {
  if (!whole) return "0 %";
  const share = (100 * part) / whole;
  // Not 100 % for what lacks a token, and not 0 % for what has one.
  const shown = share > 99 && share < 100 ? 99 : share > 0 && share < 1 ? 1 : Math.round(share);
  return `${shown} %`;
}

export function duration(us) {
  return us < 1000 ? `${us.toFixed(us < 10 ? 1 : 0)} µs` : `${(us / 1000).toFixed(1)} ms`;
}

export function nbytes(value) {
  const units = ["bytes", "KiB", "MiB", "GiB", "TiB"];
  let at = 0;
  while (value >= 1024 && at < units.length - 1) {
    value /= 1024;
    at += 1;
  }
  return `${value.toFixed(at ? 1 : 0)} ${units[at]}`;
}

export class Problem extends Error {
  constructor(error) {
    super(error.sentence);
    this.details = error;
  }
}

// Returns a document of the server; raises a Problem with the sentence that it gives.
export async function ask(name, fields, signal) {
  let answer;
  try {
    answer = await fetch(`api/${name}?${new URLSearchParams(fields)}`, { signal });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Problem({ kind: "Gone", sentence: "kalos inspect has ended; start it again." });
  }
  const body = await answer.json();
  if (!answer.ok) throw new Problem(body.error);
  return body;
}
