"use strict";
// Asks for the version of the report, and when it is another loads it beside the one that is seen, puts it where the reader
// was (place, open parts, what was chosen and typed), and only then shows it.
const by = (id) => document.getElementById(id);
const EVERY_MS = 1500;
let version = null; // of the page that is seen
let seen = null; // its frame
let coming = null; // the frame that is loading
let untouched = new Map(); // values of the seen page's controls as it came

function say(text, light) {
  by("state").textContent = text;
  by("light").className = light;
}

async function look() {
  try {
    const answer = await (await fetch("/version", { cache: "no-store" })).json();
    say(answer.state, answer.live ? "on" : "");
    if (answer.version !== version && !coming && !(by("hold").checked && seen)) load(answer.version);
  } catch {
    say("gspo watch has stopped; the page stays as it was", "off");
  }
  setTimeout(look, EVERY_MS);
}

function load(next) {
  coming = document.createElement("iframe");
  coming.className = "coming";
  coming.title = "report";
  coming.addEventListener("load", () => arrive(next), { once: true });
  coming.src = "/report";
  by("place").append(coming);
}

function arrive(next) {
  const page = coming.contentDocument;
  if (page && page.body) {
    const values = new Map([...controls(page)].map((control) => [control.id, state(control)]));
    if (seen) carry(seen, coming);
    untouched = values;
    document.title = page.title || document.title;
    by("wait").hidden = true;
    if (seen) seen.remove();
    coming.className = "";
    seen = coming;
    version = next;
  } else {
    coming.remove(); // no answer: the next look tries again
  }
  coming = null;
}

const controls = (page) => page.querySelectorAll("select[id], input[id], textarea[id]");
const state = (control) => (control.type === "checkbox" || control.type === "radio" ? control.checked : control.value);
const summary = (details) => (details.querySelector("summary") || details).textContent;

function carry(from, to) {
  const [old, page] = [from.contentDocument, to.contentDocument];
  const open = new Map([...old.querySelectorAll("details")].map((d) => [summary(d), d.open]));
  for (const details of page.querySelectorAll("details")) if (open.has(summary(details))) details.open = open.get(summary(details));
  for (const control of controls(old)) {
    const same = page.getElementById(control.id);
    if (same && state(control) !== untouched.get(control.id)) set(same, state(control));
  }
  const focused = old.activeElement && old.activeElement.id ? page.getElementById(old.activeElement.id) : null;
  const [window_old, window_new] = [from.contentWindow, to.contentWindow];
  window_new.scrollTo({ top: window_old.scrollY + drift(old, page, window_old), behavior: "instant" });
  if (focused && document.activeElement === from) {
    to.className = "";
    focused.focus({ preventScroll: true });
  }
}

function set(control, value) {
  if (typeof value === "boolean") control.checked = value;
  else control.value = control.options ? nearest([...control.options].map((o) => o.value), value) : value;
  for (const kind of ["input", "change"]) control.dispatchEvent(new control.ownerDocument.defaultView.Event(kind, { bubbles: true }));
}

function nearest(values, wanted) {
  if (values.includes(wanted)) return wanted;
  return values.reduce((best, v) => (Math.abs(v - wanted) < Math.abs(best - wanted) ? v : best), values[values.length - 1]);
}

// How much further down the element at the top of the screen has moved.
function drift(old, page, view) {
  const above = [...old.querySelectorAll("[id]")].filter((e) => page.getElementById(e.id) && e.getClientRects().length);
  const anchor = above.filter((e) => e.getBoundingClientRect().top <= 60).pop();
  if (!anchor || view.scrollY === 0) return 0;
  return page.getElementById(anchor.id).getBoundingClientRect().top - (anchor.getBoundingClientRect().top + view.scrollY);
}

look();
