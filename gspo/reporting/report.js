"use strict";
// The table of samples. Texts come from a model: they go into the page through textContent alone.
const data = JSON.parse(document.getElementById("data").textContent);
const by = (id) => document.getElementById(id);
const PAGE = 8;
let page = 0;

function element(tag, className, text) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

const short = (value) => (value === null || value === undefined ? "none" : String(Number(value.toPrecision(6))));
const signed = (value) => (value > 0 ? "+" : "") + value.toFixed(3);

function facts(sample) {
  const out = [];
  if (typeof sample.advantage === "number") out.push("advantage " + signed(sample.advantage));
  if (sample.num_tokens !== null) out.push(sample.num_tokens + " tokens");
  if (sample.finish_reason === "length") out.push("cut at the limit");
  if (typeof sample.ratio === "number") out.push("s " + sample.ratio.toFixed(6));
  if (sample.clipped) out.push("clipped");
  return out.join(" · ");
}

function cell(label, ...children) {
  const td = element("td");
  if (label) td.dataset.label = label;
  td.append(...children);
  return td;
}

function verdicts(sample) {
  return sample.parts.map((part) => {
    const value = part.value === null ? "abstains" : short(part.value);
    return element("div", "facts", part.name + ": " + value + (part.why ? " (" + part.why + ")" : ""));
  });
}

function row(sample) {
  const scored = typeof sample.reward === "number";
  const tone = typeof sample.advantage !== "number" || sample.advantage === 0 ? "" : sample.advantage > 0 ? " high" : " low";
  const reward = element("div", "reward" + tone, scored ? sample.reward.toFixed(2) : "none");
  const origin = [sample.id, "seed " + sample.seed, "weights " + sample.weight_version].join(" · ");
  const tr = element("tr");
  tr.append(
    cell("", reward),
    cell("prompt", element("div", "text", sample.prompt)),
    cell("response", element("div", "text", sample.response), element("div", "facts", facts(sample)), element("div", "facts", origin)),
    cell("answer and verdict", element("div", "text", sample.answer), ...verdicts(sample)),
  );
  return tr;
}

function haystack(sample) {
  return [sample.prompt, sample.response, sample.answer, sample.id, ...sample.parts.map((p) => p.why)].join("\n").toLowerCase();
}

function matching(step) {
  const wanted = by("filter").value.trim().toLowerCase();
  const found = step.samples.filter((sample) => haystack(sample).includes(wanted));
  const sign = { up: 1, down: -1 }[by("order").value];
  const key = (sample) => (sample.reward === null ? Infinity : sign * sample.reward);
  return sign ? found.sort((a, b) => (key(a) === key(b) ? 0 : key(a) < key(b) ? -1 : 1)) : found;
}

function show() {
  const at = by("step").selectedIndex;
  const step = data.steps[at];
  const found = matching(step);
  const pages = Math.max(1, Math.ceil(found.length / PAGE));
  page = Math.min(page, pages - 1);
  by("rows").replaceChildren(...found.slice(page * PAGE, (page + 1) * PAGE).map(row));
  by("count").textContent =
    found.length + " shown of " + step.samples.length + " kept here, of " + step.recorded + " recorded at step " + step.step +
    "; " + data.steps.length + " of " + data.recorded + " recorded steps are kept here. Green and red: better and worse than the group.";
  by("page").textContent = "page " + (page + 1) + " of " + pages;
  by("previous").disabled = page === 0;
  by("next").disabled = page >= pages - 1;
  by("earlier").disabled = at === 0;
  by("later").disabled = at === data.steps.length - 1;
}

function turn(change) {
  return () => { change(); show(); };
}

function move(by_steps) {
  return turn(() => { by("step").selectedIndex += by_steps; page = 0; });
}

if (data.steps.length) {
  for (const step of data.steps) by("step").append(element("option", "", String(step.step)));
  by("step").selectedIndex = data.steps.length - 1;
  for (const id of ["step", "order", "filter"]) by(id).addEventListener("input", turn(() => { page = 0; }));
  by("earlier").addEventListener("click", move(-1));
  by("later").addEventListener("click", move(1));
  by("previous").addEventListener("click", turn(() => { page -= 1; }));
  by("next").addEventListener("click", turn(() => { page += 1; }));
  by("browser").hidden = false;
  show();
} else {
  by("no-samples").hidden = false;
}
