// Draws a run as its rounds come: one small chart for each thing that is measured.

const CHARTS = [ // title, keys with their names, how a number is written
  ["Score", { seen: "training clients", unseen: "new clients", unlabeled: "new clients without labels" }, (v) => v.toPrecision(3)],
  ["Loss", { loss: "" }, (v) => v.toPrecision(3)],
  ["ε spent", { epsilon: "" }, (v) => v.toPrecision(3)],
  ["Megabytes so far", { bytes_up: "up", bytes_down: "down" }, (v) => (v / 1e6).toFixed(2)],
  ["Seconds so far", { seconds: "" }, (v) => v.toFixed(1)],
  ["Failures", { failures: "" }, String],
];
const $ = (id) => document.getElementById(id);
let run = {}, rounds = [], over = false, waiting = false;

function made(kind, attributes, ...content) {
  const node = kind === "svg" || kind === "polyline" ? document.createElementNS("http://www.w3.org/2000/svg", kind) : document.createElement(kind);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...content);
  return node;
}

function chart([title, keys, written]) {
  const lines = Object.keys(keys).map((key) => [key, rounds.filter((one) => Number.isFinite(one[key]))]).filter(([, points]) => points.length);
  if (!lines.length) return [];
  const values = lines.flatMap(([key, points]) => points.map((one) => one[key])), low = Math.min(0, ...values), high = Math.max(...values, low + 1e-9), last = rounds.at(-1).round;
  const told = lines.map(([key, points]) => `${keys[key]} ${written(points.at(-1)[key])}`.trim());
  const drawn = made("svg", { viewBox: "0 0 300 90", role: "img", "aria-label": `${title} by rounds; now ${told.join(", ")}` });
  for (const [i, [key, points]] of lines.entries()) {
    const at = points.map((one) => `${4 + (292 * (one.round - 1)) / Math.max(1, last - 1)},${86 - (82 * (one[key] - low)) / (high - low)}`);
    drawn.append(made("polyline", { class: `line-${i}`, points: at.length > 1 ? at.join(" ") : `${at[0]} 8,${at[0].split(",")[1]}` }));
  }
  return [made("section", {}, made("h2", {}, title), drawn, made("p", { class: "soft" }, ...told.map((word, i) => made("span", { class: `told-${i}` }, word))))];
}

function draw() {
  waiting = false;
  const done = rounds.at(-1)?.round ?? 0;
  document.title = $("name").textContent = run.name;
  $("where").textContent = `${run.method}: ${done ? `round ${done} of ${run.rounds}` : "waiting for its first round"}${over ? ", and it has ended" : ""}.`;
  $("charts").replaceChildren(...CHARTS.flatMap(chart));
}

function soon() { // many rounds may come at once
  if (!waiting) { waiting = true; setTimeout(draw, 50); }
}

const source = new EventSource("events"), hear = (kind, task) => source.addEventListener(kind, (event) => { $("problem").hidden = true; task(JSON.parse(event.data)); soon(); });
hear("run", (about) => { run = about; rounds = []; over = false; });
hear("round", (round) => rounds.push(round));
hear("over", (is) => { over = is; });
source.onerror = () => { $("problem").hidden = false; };
