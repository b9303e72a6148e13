
// One response as a strip of tokens, and the weight of each token in the gradient.
// The parser knows the namespace of SVG, so that no address stands in the page.
const SVG = new DOMParser().parseFromString("<svg></svg>", "text/html").querySelector("svg").namespaceURI;
const strip = { response: null, at: 0, marks: [], bars: [] };

function allResponses() {
  return data.strips.steps.flatMap((step) => step.responses);
}

// The scale of colours is the same for all responses: it holds 9 of 10 tokens that moved, rounded up to 1, 2 or 5.
function colourLimit() {
  const sizes = allResponses().flatMap((r) => r.d.map(Math.abs)).filter((d) => d > 0).sort((a, b) => a - b);
  if (!sizes.length) return 0.01;
  const wanted = sizes[Math.floor(0.9 * (sizes.length - 1))];
  const decade = 10 ** Math.floor(Math.log10(wanted));
  return decade * [1, 2, 5, 10].find((m) => m * decade >= wanted * 0.999999);
}

const four = (value) => (value === 0 ? "0" : Math.abs(value) < 1e-3 || Math.abs(value) >= 1e5 ? value.toExponential(3) : value.toPrecision(4));
const plus = (value) => (value > 0 ? "+" : "") + four(value).replace("-", "\u2212");
const advantageOf = (r, i) => (Array.isArray(r.advantage) ? r.advantage[i] : r.advantage);
const position = (r, i) => (r.leftOut && i >= (r.d.length + 1) >> 1 ? i + r.leftOut : i);

function clipped(ratio, advantage, [low, high]) {
  return advantage > 0 ? ratio > 1 + high : advantage < 0 && ratio < 1 - low;
}

// Weights of token i: ratio times advantage by length, or 0 in the clipped branch.
function weights(r, i) {
  const advantage = advantageOf(r, i), w = Math.exp(r.d[i]);
  const one = (ratio, clip) => ({ zero: clipped(ratio, advantage, clip), value: clipped(ratio, advantage, clip) ? 0 : (ratio * advantage) / r.length });
  return { grpo: one(w, data.strips.clips.grpo), gspo: one(r.s, data.strips.clips.gspo) };
}

const quoted = (text) => "\u201c" + text.replaceAll("\n", "\u21b5").replaceAll("\t", "\u21e5") + "\u201d";

function detailOf(r, i) {
  const weight = weights(r, i);
  const pairs = [
    ["token", r.texts[i] === "" ? "part of a character" : quoted(r.texts[i]), "token"],
    ["place", position(r, i) + 1 + " of " + r.length + " \u00b7 id " + r.ids[i], "place"],
    ["ratio w", four(Math.exp(r.d[i])), "ratio"],
    ["d = log w", plus(r.d[i]), "d"],
    ["log p, trainer", plus(r.trainer[i]), "trainer"],
    ["log p, engine", plus(r.engine[i]), "engine"],
    ["weight, grpo", weight.grpo.zero ? "0, clipped" : plus(weight.grpo.value), "grpo"],
    ["weight, gspo", weight.gspo.zero ? "0, clipped" : plus(weight.gspo.value), "gspo"],
  ];
  if (r.gap) pairs.push(["engine less trainer", plus(r.gap[i]), "gap"]);
  return pairs;
}

function point(i, focus) {
  const r = strip.response;
  for (const marks of [strip.marks, strip.bars]) {
    if (marks[strip.at]) marks[strip.at].classList.remove("on");
    marks[i].classList.add("on");
  }
  strip.marks[strip.at].tabIndex = -1;
  strip.marks[strip.at].setAttribute("aria-selected", "false");
  strip.marks[i].tabIndex = 0;
  strip.marks[i].setAttribute("aria-selected", "true");
  strip.at = i;
  by("strip-detail").replaceChildren(
    ...detailOf(r, i).map(([name, value, key]) => {
      const pair = element("div");
      const shown = element("dd", "", value);
      shown.dataset.of = key;
      pair.append(element("dt", "", name), shown);
      return pair;
    }),
  );
  if (focus) strip.marks[i].focus();
}

function tokenMark(r, i, limit) {
  const text = r.texts[i] === "" ? "\u25ab" : r.texts[i].replaceAll("\n", "\u21b5\n").replaceAll("\t", "\u21e5\t");
  const mark = element("span", "token " + (r.d[i] > 0 ? "up" : "down"), text);
  mark.style.setProperty("--a", Math.min(1, Math.sqrt(Math.abs(r.d[i]) / limit)).toFixed(3));
  mark.setAttribute("role", "option");
  mark.setAttribute("aria-label", "token " + (i + 1) + " " + quoted(r.texts[i]) + ", ratio " + four(Math.exp(r.d[i])));
  mark.tabIndex = -1;
  mark.dataset.at = i;
  return mark;
}

function showTokens(r, limit) {
  strip.marks = r.d.map((_, i) => tokenMark(r, i, limit));
  const children = [...strip.marks];
  if (r.leftOut) {
    const told = "\u2026 " + r.leftOut.toLocaleString("en") + " tokens left out, largest |d| " + four(r.leftOutLargest) + " \u2026";
    children.splice((r.d.length + 1) >> 1, 0, element("span", "gap", told));
  }
  by("strip-tokens").classList.toggle("few", r.d.length <= 16);
  by("strip-tokens").replaceChildren(...children);
}

function drawn(tag, attributes, parent, className, text) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (className) made.setAttribute("class", className);
  if (text !== undefined) made.textContent = text;
  parent.append(made);
  return made;
}

function niceTicks(low, high) {
  const rough = (high - low) / 4 || 1;
  const decade = 10 ** Math.floor(Math.log10(rough));
  const size = decade * [1, 2, 5, 10].find((m) => m * decade >= rough);
  const out = [];
  for (let k = Math.ceil(low / size); k * size <= high * (1 + 1e-9) + 1e-12; k += 1) out.push(Number((k * size).toPrecision(6)));
  return out;
}

function showWeights(r) {
  const width = Math.max(260, by("weights").clientWidth || 320), height = 190, left = 58, right = 6, top = 8, bottom = 24;
  const all = r.d.map((_, i) => weights(r, i));
  const values = [0, ...all.flatMap((w) => [w.grpo.value, w.gspo.value])];
  let low = Math.min(...values), high = Math.max(...values);
  if (high === low) high = 1 / r.length;
  const room = (high - low) * 0.06;
  low -= low < 0 ? room : 0;
  high += high > 0 ? room : 0;
  const y = (value) => top + ((high - value) / (high - low)) * (height - top - bottom);
  const slot = Math.min(72, (width - left - right) / r.d.length);
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", "0 0 " + width + " " + height);
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", "Weight of each token in the gradient under grpo and gspo");
  for (const tick of niceTicks(low, high)) {
    drawn("line", { x1: left, x2: width - right, y1: y(tick), y2: y(tick) }, svg, tick === 0 ? "zero" : "rule");
    drawn("text", { x: left - 8, y: y(tick) + 4, "text-anchor": "end" }, svg, "", String(tick).replace("-", "\u2212"));
  }
  strip.bars = all.map((w, i) => {
    const x = left + i * slot, group = drawn("g", {}, svg, "slot");
    drawn("rect", { x, y: top, width: slot, height: height - top - bottom }, group, "back");
    const inner = Math.max(slot * 0.7, 0.8), bar = x + (slot - inner) / 2, base = y(0);
    if (w.grpo.zero) drawn("text", { x: x + slot / 2, y: base + 4, "text-anchor": "middle" }, group, "cross", "\u00d7");
    else drawn("rect", { x: bar, y: Math.min(base, y(w.grpo.value)), width: inner, height: Math.abs(y(w.grpo.value) - base) }, group, "grpo");
    drawn("line", { x1: x, x2: x + slot, y1: y(w.gspo.value), y2: y(w.gspo.value) }, group, "gspo");
    if (slot >= 30) {
      const name = r.texts[i].replaceAll("\n", "\u21b5"), most = Math.floor(slot / 8);
      drawn("text", { x: x + slot / 2, y: height - 6, "text-anchor": "middle" }, group, "name", name.length > most ? name.slice(0, most - 1) + "\u2026" : name);
    }
    group.dataset.at = i;
    return group;
  });
  if (slot < 30) drawn("text", { x: left, y: height - 6 }, svg, "", "tokens in their order, 1 to " + r.length.toLocaleString("en") + (r.leftOut ? ", the middle left out" : ""));
  by("weights").replaceChildren(svg);
  const zeros = all.filter((w) => w.grpo.zero).length, held = all.filter((w) => w.gspo.zero).length;
  const range = ([a, b]) => "clip " + a + "/" + b;
  by("weight-grpo").textContent = "grpo, " + range(data.strips.clips.grpo) + ": " + zeros + " of " + all.length + " tokens clipped";
  by("weight-gspo").textContent = "gspo, " + range(data.strips.clips.gspo) + ": " + (held === all.length ? "clipped, all weights 0" : held ? held + " tokens clipped" : "not clipped");
}

function nameOf(r) {
  return "minibatch " + r.minibatch + " \u00b7 s " + r.s.toFixed(5) + " \u00b7 " + r.length + " tokens \u00b7 " + r.chosen.join(", ");
}

function showResponse() {
  const r = data.strips.steps[Number(by("strip-step").value)].responses[by("strip-response").selectedIndex];
  Object.assign(strip, { response: r, at: 0 });
  by("strip-s").textContent = r.s.toFixed(6);
  const mean = Array.isArray(r.advantage) ? "advantage by token" : "advantage " + plus(r.advantage);
  const reward = typeof r.reward === "number" ? "reward " + short(r.reward) : "no reward";
  const verdict = (r.clipped ? "clipped" : "not clipped") + " in this run";
  by("strip-facts").textContent = [verdict, mean, reward, "minibatch " + r.minibatch, r.length + " tokens", r.id].join(" \u00b7 ");
  by("strip-prompt").textContent = "prompt: " + r.prompt;
  by("strip-left").textContent = r.leftOut ? " Of this response " + r.leftOut.toLocaleString("en") + " tokens in the middle are not in the page; s is that of all." : "";
  showTokens(r, strip.limit);
  showWeights(r);
  const sizes = r.d.map(Math.abs);
  point(sizes.indexOf(Math.max(...sizes)), false);
}

function showStripStep() {
  const step = data.strips.steps[Number(by("strip-step").value)];
  const before = Math.max(0, by("strip-response").selectedIndex);
  by("strip-at").textContent = step.step;
  by("strip-response").replaceChildren(...step.responses.map((r) => element("option", "", nameOf(r))));
  by("strip-response").selectedIndex = Math.min(before, step.responses.length - 1);
  showResponse();
}

function onToken(event) {
  const target = event.target.closest("[data-at]");
  if (target) point(Number(target.dataset.at), false);
}

function onKey(event) {
  const last = strip.marks.length - 1;
  const to = { ArrowRight: strip.at + 1, ArrowDown: strip.at + 1, ArrowLeft: strip.at - 1, ArrowUp: strip.at - 1, Home: 0, End: last }[event.key];
  if (to === undefined) return;
  event.preventDefault();
  point(Math.min(last, Math.max(0, to)), true);
}

// The middle step is shown first: at the end the learning rate may be 0, and nothing moves.
if (by("strip")) {
  strip.limit = colourLimit();
  const name = (d) => Math.exp(d).toFixed(strip.limit < 0.02 ? 4 : strip.limit < 0.2 ? 3 : 2);
  by("strip-low").textContent = "\u2264 " + name(-strip.limit);
  by("strip-high").textContent = "\u2265 " + name(strip.limit);
  by("strip-step").max = data.strips.steps.length - 1;
  by("strip-step").value = data.strips.steps.length >> 1;
  by("strip").hidden = false;
  for (const id of ["strip-tokens", "weights"]) {
    for (const kind of ["pointerover", "click", "focusin"]) by(id).addEventListener(kind, onToken);
  }
  by("strip-tokens").addEventListener("keydown", onKey);
  by("strip-step").addEventListener("input", showStripStep);
  by("strip-response").addEventListener("input", showResponse);
  addEventListener("resize", () => { const at = strip.at; showWeights(strip.response); point(at, false); });
  showStripStep();
}
