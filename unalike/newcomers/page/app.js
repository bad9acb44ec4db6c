// The page: reads a newcomer's rows, shows what would leave, asks for a model, and uses it. See docs/serve.md.

import { read, run, size, tensor } from "./onnx.js";
import { addGaussian, addLaplace, gaussianMultiplier, spent } from "./noise.js";
import { Wrong, asInputs, decoded, isIndicator, pictureLine, pixels, readTable, rowNames, withColumns } from "./rows.js";

const $ = (id) => document.getElementById(id);
const SHOWN = 8;
const now = {}; // card, schema, graphs, file, clients, inputs, names, clean, sent, theta

// Saying things

function say(text = "") { $("status").textContent = text; }

function complain(error) {
  $("problem").textContent = error instanceof Wrong ? error.message : `Something went wrong: ${error.message}`;
  $("problem").hidden = false;
  say();
}

let queue = Promise.resolve();

function attempt(what, task) { // one thing after the other
  const done = queue.then(() => carryOut(what, task));
  queue = done.catch(() => {});
  return done;
}

async function carryOut(what, task) { // busy, then done or an explanation
  $("problem").hidden = true;
  say(what);
  await new Promise((done) => setTimeout(done, 20)); // let the browser paint
  try { await task(); say(); } catch (error) { complain(error); if (!(error instanceof Wrong)) throw error; }
}

function table(where, titles, lines) {
  const cell = (tag, content, kind) => {
    const made = document.createElement(tag);
    if (kind) made.className = kind;
    made.append(content);
    return made;
  };
  const head = document.createElement("tr"), body = lines.map((line) => {
    const row = document.createElement("tr");
    row.append(...line.map(([content, kind]) => cell("td", content, kind)));
    return row;
  });
  head.append(...titles.map((title) => [].concat(title)).map(([title, kind]) => cell("th", title, kind)));
  $(where).replaceChildren(head, ...body);
}

function options(where, words) {
  $(where).replaceChildren(...words.map(([value, word]) => new Option(word, value)));
}

const plural = (n, word) => `${n.toLocaleString("en")} ${word}${n === 1 ? "" : "s"}`;

function svg(name, attributes) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

function bars(values) {
  const wide = Math.min(8, 100 / values.length), left = 50 - wide * values.length / 2, top = Math.max(...values.map(Math.abs), 1e-9), drawn = $("bars");
  drawn.setAttribute("viewBox", "0 0 100 40");
  drawn.setAttribute("preserveAspectRatio", "none");
  drawn.replaceChildren(...[...values].map((v, i) => svg("rect", {
    x: left + i * wide + wide * 0.1, width: wide * 0.8, y: v > 0 ? 20 - (v / top) * 19 : 20, height: Math.max(0.2, (Math.abs(v) / top) * 19), class: v > 0 ? "up" : "down",
  })), svg("line", { x1: 0, x2: 100, y1: 20, y2: 20, "stroke-width": 0.15 }));
}

// The run

async function reach(path, request) {
  try { return await fetch(path, request); } catch { throw new Wrong("The service cannot be reached. Try again when there is a network."); }
}

async function get(path, kind) {
  const answer = await reach(path);
  if (!answer.ok) throw new Wrong(`${path} could not be loaded (${answer.status})`);
  return answer[kind]();
}

async function begin() {
  if (!isSecureContext) throw new Wrong("This page came over plain HTTP, where anybody on the way could have changed it. Open it over HTTPS.");
  navigator.serviceWorker?.register("offline.js");
  const runs = await get("v1/runs.json", "json");
  if (!runs.length) throw new Wrong("This service has no model to give.");
  options("run", runs.map((card) => [card.name, `${card.name} (${card.method})`]));
  $("choose").hidden = runs.length < 2;
  $("run").onchange = () => attempt("Loading…", () => choose(runs.find((card) => card.name === $("run").value)));
  await choose(runs[0]);
}

const place = (card, file) => `v1/runs/${encodeURIComponent(card.name)}/${file}`;

async function choose(card) {
  const graphs = ["model.onnx", ...(card.made_at ? ["describe.onnx"] : []), ...(card.offline ? ["make.onnx"] : [])];
  const [plain, model, describe, make] = await Promise.all([get(place(card, "schema.json"), "json"), ...graphs.map((file) => get(place(card, file), "arrayBuffer"))]);
  for (const key of Object.keys(now)) delete now[key];
  const graph = async (bytes) => bytes && (card.engine ? withRuntime(bytes) : read(bytes));
  Object.assign(now, { card, schema: withColumns(plain, card), model: await graph(model), modelBytes: model, describe: await graph(describe), make: await graph(make), drawn: [] });
  keepForLater(["v1/runs.json", ...(card.engine ?? []).map((file) => `page/ort/${file}`), ...["card.json", "schema.json", ...graphs].map((file) => place(card, file))]);
  const about = [`${card.method}, trained for ${plural(card.rounds, "round")} with ${plural(card.clients, "client")}.`];
  if (card.trained) about.push(card.trained);
  $("about").textContent = about.join(" ");
  $("card").href = place(card, "card.json");
  const { schema } = now, image = schema.kind === "image";
  $("file").accept = image ? "image/png,image/jpeg,image/bmp,image/gif,image/webp" : ".csv,.tsv,text/csv";
  $("file").multiple = image;
  $("drawing").hidden = !(image && schema.shape[0] === 1);
  $("reading").hidden = image;
  const columns = [...(schema.columns?.keys() ?? [])].filter((title) => !isIndicator(title, schema)), labels = card.reads_labels ? " Rows need labels: the model is made from rows and labels." : "";
  $("expects").textContent = image
    ? `Pictures; each is scaled to ${schema.shape[2]} × ${schema.shape[1]} pixels.${labels}`
    : `A CSV file with a header and the columns ${columns.join(", ")}.${labels}`;
  const how = card.read ?? {};
  $("delimiter").value = how.delimiter ?? ""; $("decimal").value = how.decimal ?? ".";
  $("missing").value = how.missing === "client" ? "mean" : ["mean", "drop"].includes(how.missing) ? how.missing : "";
  $("as").hidden = !card.reads_labels;
  options("class", classNames().map((word) => [word, word]));
  $("locally").hidden = !(card.made_at === "server" && card.offline);
  $("local").checked = card.offline;
  forget();
  promise();
}

// Where the service gives out ONNX Runtime Web, that computes: sooner for large networks, but 14 MB to load

async function withRuntime(bytes) {
  const ort = await import("./ort/ort.wasm.bundle.min.mjs"), kinds = { 1: ["float32", Float32Array], 2: ["uint8", Uint8Array], 7: ["int64", BigInt64Array, BigInt], 11: ["float64", Float64Array] };
  Object.assign(ort.env.wasm, { numThreads: 1, wasmPaths: { wasm: new URL("ort/ort-wasm-simd-threaded.wasm", import.meta.url).href } });
  const session = await ort.InferenceSession.create(new Uint8Array(bytes), { logSeverityLevel: 3 });
  return { run: (feeds) => session.run(Object.fromEntries(Object.entries(feeds).map(([name, { dims, type, data }]) => {
    const [kind, Kind, convert = Number] = kinds[type];
    return [name, new ort.Tensor(kind, Kind.from(data, convert), dims)];
  }))) };
}

const compute = (graph, feeds) => (graph.run ? graph.run(feeds) : run(graph, feeds));

async function keepForLater(files) { // the worker keeps what is loaded once it runs; now it keeps what was loaded before
  $("offline").hidden = true;
  try {
    await navigator.serviceWorker.ready;
    await (await caches.open("unalike")).addAll(files);
    $("offline").hidden = false;
  } catch { /* a private window, or no network: then it works with one */ }
}

function promise() {
  $("promise").textContent = now.card.made_at === "server" && !here()
    ? `Your rows stay in this page. ${plural(now.card.length, "number")} leave it, once you have seen them.`
    : "Your rows stay in this page. Nothing leaves it.";
}

const classNames = () => (now.schema.class_names ?? Array.from({ length: now.schema.classes ?? 0 }, (_, i) => i)).map(String);

// Step 1: the rows

function forget(file = null) { // what came before is not to be sent, or shown beside what comes now
  Object.assign(now, { file, inputs: null, sent: null, theta: null });
  for (const id of ["read", "whose", "step-leaves", "step-model"]) $(id).hidden = true;
}

async function take(files) {
  if (!files.length) return;
  forget();
  if (now.schema.kind === "image") return takePictures(files);
  if (files.length > 1) throw new Wrong("One table at a time, please.");
  now.file = { name: files[0].name, text: decoded(await files[0].arrayBuffer(), files[0].name) };
  return readAgain();
}

function settings() {
  const kept = now.card.read ?? {}, own = $("na").value.split(",").map((word) => word.trim()).filter(Boolean);
  return { ...kept, delimiter: $("delimiter").value || undefined, decimal: $("decimal").value, missing: $("missing").value, na_values: [...[].concat(kept.na_values ?? []), ...own] };
}

function readAgain() {
  if (!now.file) return;
  forget(now.file);
  const how = settings(), { clients, notes } = readTable(now.file.text, now.file.name, now.schema, how);
  const names = [...clients.keys()];
  options("client", names.map((name) => [name, `${name} (${plural(clients.get(name).length, "row")})`]));
  $("whose").hidden = names.length < 2;
  Object.assign(now, { clients, notes, how });
  return use(clients.get(names[0]));
}

async function takePictures(files) {
  const lines = [];
  for (const file of files) {
    lines.push(pictureLine(await pixels(file), file.name, now.schema, now.card.pixels, lines.length));
  }
  now.drawn.push(...lines);
  return use(now.drawn);
}

function use(lines) {
  const inputs = asInputs(lines, now.file?.name ?? "the pictures", now.schema, now.how ?? {});
  if (now.card.reads_labels && inputs.labeled === 0) throw new Wrong("This model is made from rows and labels, and these rows have no labels.");
  Object.assign(now, { inputs, theta: null, names: null, unlike: null });
  const unseen = [...(now.notes ?? []), ...inputs.notes];
  $("read").hidden = false;
  $("understood").textContent = `${now.file ? `${now.file.name}: ` : ""}${plural(inputs.lines.length, "row")} understood${inputs.labeled ? `, ${inputs.labeled} with a label` : ""}. They stay here.`;
  $("notes").replaceChildren(...unseen.map((note) => Object.assign(document.createElement("li"), { textContent: note })));
  preview(inputs.lines.slice(0, SHOWN));
  $("step-model").hidden = true;
  return describe();
}

function preview(lines) {
  if (now.schema.kind === "image") {
    table("rows", ["as read", "picture"], lines.map((line) => [[thumbnail(line)], [line.id]]));
    return;
  }
  const titles = [...(now.schema.columns ?? [])].filter(([title]) => !isIndicator(title, now.schema)).slice(0, 12), kinds = titles.map(([, values]) => (values ? "" : "number"));
  table("rows", ["row", ...titles.map(([title], i) => [title, kinds[i]])], lines.map((line) => [[line.id], ...kinds.map((kind, i) => [line.said[i] || "missing", kind])]));
}

function thumbnail(line) {
  const [, height, width] = now.schema.shape, canvas = document.createElement("canvas"), pen = canvas.getContext("2d");
  Object.assign(canvas, { width, height });
  canvas.style.width = "28px";
  const image = pen.createImageData(width, height), area = width * height, planes = now.schema.shape[0];
  for (let i = 0; i < area; i++) {
    for (let c = 0; c < 3; c++) image.data[4 * i + c] = line.x[(planes === 1 ? 0 : c) * area + i] * 255 / now.card.pixels;
    image.data[4 * i + 3] = 255;
  }
  pen.putImageData(image, 0, 0);
  return canvas;
}

// Step 2: what leaves

async function describe() {
  const { card, inputs } = now;
  $("step-leaves").hidden = false;
  $("get").disabled = Boolean(card.made_at); // until it is shown what would be sent
  if (!card.made_at) {
    $("leaves-title").textContent = "Nothing leaves this page";
    $("leaves").textContent = "Everybody gets the same model here, and it is in this page already.";
    $("noise").hidden = true; $("bars").parentElement.hidden = true; $("numbers").parentElement.hidden = true;
    return;
  }
  let rows = inputs.lines.map((_, i) => i);
  if (card.describe_rows && rows.length > card.describe_rows) rows = pickRandom(rows, card.describe_rows);
  const feeds = { x: take_rows(inputs.x, rows) };
  if (card.reads_labels) feeds.y = take_rows(inputs.y, rows);
  now.clean = (await compute(now.describe, feeds)).v.data;
  if (![...now.clean].every(Number.isFinite)) throw new Wrong("the network overflows on these rows; are they on the scale of training?");
  $("bars").parentElement.hidden = $("numbers").parentElement.hidden = false;
  $("noise").hidden = !(card.noise && !here());
  return show();
}

function take_rows(whole, rows) {
  const each = size(whole.dims.slice(1)), part = tensor([rows.length, ...whole.dims.slice(1)], null, whole.type);
  rows.forEach((row, i) => part.data.set(whole.data.subarray(row * each, (row + 1) * each), i * each));
  return part;
}

function pickRandom(all, count) {
  const rest = [...all], random = crypto.getRandomValues(new Uint32Array(count));
  return Array.from({ length: count }, (_, i) => rest.splice(Math.floor(random[i] / 2 ** 32 * rest.length), 1)[0]);
}

const here = () => now.card.made_at === "newcomer" || (now.card.offline && $("local").checked);
const epsilon = () => Math.round(2 ** (Number($("epsilon").value) / 4) * 100) / 100;
const usualDelta = (n) => Math.min(0.01, n ** -1.1);

async function show() {
  const { card, clean, inputs } = now, bytes = 4 * clean.length, n = inputs.lines.length;
  const insist = card.noise?.always, wanted = !here() && card.noise && ($("protect").checked || insist);
  $("how-much").hidden = !wanted;
  Object.assign(now, { release: { noise: "none" }, sent: null, epsilon: epsilon() }); // the slider may move before the cost is known
  $("get").disabled = true;
  now.delta = usualDelta(n);
  $("epsilon-shown").textContent = now.epsilon;
  $("epsilon").ariaValueText = `ε = ${now.epsilon}`;
  promise();
  if (wanted && inputs.leftOut) throw new Wrong(`ε is promised for a number of rows that does not depend on what they hold, but ${plural(inputs.leftOut, "row")} would be left out for lack of a value. Fill them in, or remove them from the file.`);
  if (wanted) {
    const distance = card.noise.distance / Math.min(n, card.describe_rows ?? n), e = now.epsilon;
    now.release = card.noise.kind === "laplace" ? { noise: "laplace", epsilon: e } : { noise: "gaussian", multiplier: gaussianMultiplier(e, now.delta) };
    now.sent = card.noise.kind === "laplace" ? addLaplace(clean, distance, e) : addGaussian(clean, distance, now.release.multiplier);
  }
  now.sent ??= clean;
  $("get").disabled = false;
  bars(now.sent);
  $("numbers").textContent = [...now.sent].map((v) => v.toPrecision(6)).join(", ");
  $("leaves-title").textContent = here() ? "Nothing leaves this page" : "What leaves this page";
  $("leaves").textContent = here()
    ? `These ${plural(clean.length, "number")} describe your rows. The model is made of them in this page.`
    : `These ${plural(clean.length, "number")} (${plural(bytes, "byte")}) describe all your rows together, and nothing else is sent.`;
  $("get").textContent = here() ? "Make my model" : `Send ${plural(bytes, "byte")} and get my model`;
  if (!$("noise").hidden) await showCost(wanted, n);
}

async function showCost(wanted, n) {
  const { release } = now, names = (now.names ??= await rowNames(now.inputs.lines)), before = await history(names);
  if (release !== now.release) return; // the slider has moved on
  const total = Math.max(...before.map((releases) => spent([...releases, release], now.delta)));
  const earlier = before.some((releases) => releases.length) ? ` With what was sent of these rows before, ε = ${Number.isFinite(total) ? total.toPrecision(3) : "∞"}.` : "";
  $("cost").textContent = wanted
    ? `What anybody can learn of one row from these numbers is bounded by (ε,\u00a0δ)\u00a0=\u00a0(${now.epsilon},\u00a0${Number(now.delta.toPrecision(2))}). More rows need less noise; you have ${n}.${earlier}`
    : `Without noise, the numbers are exact: nobody promises how little they tell about a row.${earlier}`;
}

// What was sent of each row before: in this browser, by a hash of the row

function database() {
  return new Promise((done, fail) => {
    const asked = indexedDB.open("unalike-ledger", 1);
    asked.onupgradeneeded = () => asked.result.createObjectStore("rows");
    asked.onsuccess = () => done(asked.result);
    asked.onerror = () => fail(asked.error);
  });
}

async function store(mode, task) {
  const opened = await database(), change = opened.transaction("rows", mode), rows = change.objectStore("rows");
  const asked = task(rows);
  await new Promise((done, fail) => { change.oncomplete = done; change.onerror = change.onabort = () => fail(change.error); });
  opened.close();
  return asked;
}

async function history(names) {
  const asked = await store("readonly", (rows) => names.map((name) => rows.get(name)));
  return asked.map((one) => one.result ?? []);
}

async function remember(names, release) {
  const before = await history(names);
  await store("readwrite", (rows) => names.forEach((name, i) => rows.put([...before[i], release], name)));
}

async function exportLedger() { // as `unalike personalize --ledger` reads it
  const names = now.names, events = [], before = await history(names);
  const number = (release) => {
    const plain = release.noise === "none" ? { kind: "non_private" } : { kind: release.noise, noise_multiplier: release.noise === "laplace" ? 1 / release.epsilon : release.multiplier };
    const known = events.findIndex((event) => JSON.stringify(event) === JSON.stringify(plain));
    return known >= 0 ? known : events.push(plain) - 1;
  };
  const newcomers = before.map((releases, i) => {
    const counts = {};
    for (const release of releases) counts[number(release)] = (counts[number(release)] ?? 0) + 1;
    return [Object.entries(counts).map(([event, count]) => [Number(event), count]), [names[i]]];
  });
  const about = now.card.about_ledger, server = { seen: false, most: [] };
  return JSON.stringify({ about, delta: now.delta, unit: "point", relation: null, notes: [], shared: [], cohorts: [], clients: [], newcomers, server, events }, null, 2);
}

// Step 3: the model

async function personalize() {
  const { card } = now;
  if (!card.made_at) now.theta = null;
  else if (here()) {
    now.theta = (await compute(now.make, { v: tensor([card.length], Float32Array.from(now.clean)) })).theta.data;
  } else {
    now.names ??= await rowNames(now.inputs.lines);
    await remember(now.names, now.release); // before it leaves
    await ask();
  }
  await predict();
}

async function ask() {
  const body = new DataView(new ArrayBuffer(4 * now.sent.length));
  now.sent.forEach((v, i) => body.setFloat32(4 * i, v, true));
  const type = "application/octet-stream", key = $("key").value && { Authorization: `Bearer ${$("key").value}` };
  const request = { method: "POST", body: body.buffer, headers: { Accept: type, "Content-Type": type, ...key } };
  const answer = await reach(place(now.card, "personalize"), request);
  if (answer.status === 401) {
    $("needs-key").hidden = false;
    throw new Wrong("This service asks for a key: fill it in beside the button, and try again.");
  }
  if (!answer.ok) throw new Wrong(`The service refused: ${(await answer.json().catch(() => ({ error: answer.status }))).error}`);
  const bytes = await answer.arrayBuffer(), view = new DataView(bytes), length = Number(view.getBigUint64(0, true));
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(bytes, 8, length))), from = 8 + length;
  now.theta = Float32Array.from({ length: header.theta.shape[0] }, (_, i) => view.getFloat32(from + 4 * i, true));
  now.unlike = header.__metadata__?.unlike;
}

async function scores(theta) {
  const x = now.inputs.x, own = theta && (now.card.engine // which lets nobody give what has a value in the file
    ? await compute(await withRuntime(modelFile()), { x })
    : run(now.model, { x, theta: tensor([theta.length], theta) }));
  const out = (own || await compute(now.model, { x })).scores, each = size(out.dims.slice(1));
  return Array.from({ length: out.dims[0] }, (_, i) => out.data.subarray(i * each, (i + 1) * each));
}

function words(line) { // what is predicted, and the probability of each class
  if (!now.schema.classes) return { word: String(Number(line[0].toPrecision(9))), p: [] };
  const top = Math.max(...line), parts = [...line].map((v) => Math.exp(v - top)), total = parts.reduce((a, b) => a + b, 0);
  return { word: classNames()[line.indexOf(top)], p: parts.map((v) => v / total) };
}

async function predict() {
  const own = (await scores(now.theta)).map(words), common = now.theta ? (await scores(null)).map(words) : null, lines = now.inputs.lines, image = now.schema.kind === "image";
  now.predictions = own;
  $("served").textContent = now.theta ? `A model of ${plural(now.theta.length, "number")}, made for these rows. It runs in this page.` : "The model that everybody gets. It runs in this page.";
  $("unlike").hidden = now.unlike !== "yes";
  $("unlike").textContent = `Your rows look unlike those of training, so expect less of this model than of its scores.${now.release?.noise === "none" ? "" : " The noise may be why."}`;
  const known = lines.flatMap((line, i) => (line.label && now.schema.classes ? [i] : [])), right = (all) => known.filter((i) => all[i].word === lines[i].label).length;
  const found = common ? [`It disagrees with the common model on ${plural(own.filter((one, i) => one.word !== common[i].word).length, "row")} of ${own.length}.`] : [];
  if (known.length) found.push(`Of ${plural(known.length, "row")} with a label, it gets ${right(own)} right${common ? `, and the common model ${right(common)}` : ""}.`);
  $("found").textContent = found.join(" ");
  $("more").textContent = own.length > 200 ? `The first 200 of ${plural(own.length, "row")}; the file that you can save has all.` : "";
  const titles = ["row", ...(image ? ["as read"] : []), "your model", ...(now.schema.classes ? ["probability"] : []), ...(common ? ["common model"] : []), ...(lines.some((line) => line.label) ? ["label"] : [])];
  table("predictions", titles, own.slice(0, 200).map((one, i) => [
    [lines[i].id], ...(image ? [[thumbnail(lines[i])]] : []), [Object.assign(document.createElement("b"), { textContent: one.word })],
    ...(now.schema.classes ? [[Math.max(...one.p).toFixed(2)]] : []),
    ...(common ? [[common[i].word, common[i].word !== one.word ? "other" : ""]] : []), ...(titles.at(-1) === "label" ? [[lines[i].label || "–"]] : []),
  ]));
  $("save-ledger").hidden = !now.names;
  $("step-model").hidden = false;
  $("h-model").focus({ preventScroll: true });
  $("step-model").scrollIntoView({ block: "start", behavior: matchMedia("(prefers-reduced-motion: reduce)").matches ? "auto" : "smooth" });
}

function save(name, content, type) {
  const url = URL.createObjectURL(new Blob([content], { type })), link = Object.assign(document.createElement("a"), { href: url, download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}

function predictionsFile() {
  const quote = (word) => (/[",\n\r]/.test(word) ? `"${word.replaceAll('"', '""')}"` : /^[=+\-@\t]/.test(word) && Number.isNaN(Number(word)) ? `'${word}` : word);
  const classes = now.schema.classes ? classNames() : [];
  const lines = [["id", "prediction", ...classes.map((word) => `p_${word}`)], ...now.predictions.map((one, i) => [now.inputs.lines[i].id, one.word, ...one.p.map((v) => v.toPrecision(6))])];
  return lines.map((line) => line.map(quote).join(",") + "\n").join("");
}

function modelFile() { // model.onnx with the parameters of this model in the place of the common ones
  const bytes = new Uint8Array(now.modelBytes.slice(0)), at = read(now.modelBytes).constants.theta.at;
  if (now.theta) new Uint8Array(now.theta.buffer, now.theta.byteOffset, 4 * now.theta.length).forEach((byte, i) => { bytes[at + i] = byte; });
  return bytes;
}

// Drawing

function drawable() {
  const canvas = $("canvas"), pen = canvas.getContext("2d", { willReadFrequently: true });
  const clear = () => { pen.fillStyle = "#000"; pen.fillRect(0, 0, canvas.width, canvas.height); };
  Object.assign(pen, { lineCap: "round", lineJoin: "round", strokeStyle: "#fff", lineWidth: 24 });
  clear();
  let last = null;
  const place = (event) => { const box = canvas.getBoundingClientRect(); return [(event.clientX - box.left) * canvas.width / box.width, (event.clientY - box.top) * canvas.height / box.height]; };
  const draw = (to) => { pen.beginPath(); pen.moveTo(...(last ?? to)); pen.lineTo(...to); pen.stroke(); last = to; };
  canvas.onpointerdown = (event) => { canvas.setPointerCapture(event.pointerId); last = null; draw(place(event)); };
  canvas.onpointermove = (event) => { if (event.buttons) draw(place(event)); };
  canvas.onpointerup = () => { last = null; };
  let at = [112, 112];
  canvas.onkeydown = (event) => { // arrows move, with Shift they draw
    const by = { ArrowLeft: [-8, 0], ArrowRight: [8, 0], ArrowUp: [0, -8], ArrowDown: [0, 8] }[event.key];
    if (!by) return;
    event.preventDefault();
    const to = [Math.min(224, Math.max(0, at[0] + by[0])), Math.min(224, Math.max(0, at[1] + by[1]))];
    if (event.shiftKey) { last = at; draw(to); }
    at = to;
  };
  $("clear").onclick = clear;
  $("add").onclick = () => attempt("Reading…", () => {
    const line = pictureLine(pen.getImageData(0, 0, canvas.width, canvas.height), `drawing ${now.drawn.length + 1}`, now.schema, now.card.pixels, now.drawn.length, now.card.reads_labels ? $("class").value : "");
    now.drawn.push(line);
    clear();
    return use(now.drawn);
  });
}

// What a visitor can do

$("file").onchange = () => { const files = [...$("file").files]; $("file").value = ""; attempt("Reading…", () => take(files)); };
$("drop").ondragover = (event) => { event.preventDefault(); $("drop").classList.add("over"); };
$("drop").ondragleave = () => $("drop").classList.remove("over");
$("drop").ondrop = (event) => { event.preventDefault(); $("drop").classList.remove("over"); attempt("Reading…", () => take([...event.dataTransfer.files])); };
for (const id of ["delimiter", "decimal", "na", "missing"]) $(id).onchange = () => attempt("Reading…", readAgain);
$("client").onchange = () => attempt("Reading…", () => use(now.clients.get($("client").value)));
for (const id of ["protect", "local"]) $(id).onchange = () => attempt("", describe);
$("epsilon").oninput = () => attempt("", show);
$("get").onclick = () => attempt("Making your model…", async () => { $("get").disabled = true; try { await personalize(); } finally { $("get").disabled = false; } });
$("save-predictions").onclick = () => save("predictions.csv", predictionsFile(), "text/csv");
$("save-model").onclick = () => save("model.onnx", modelFile(), "application/octet-stream");
$("save-ledger").onclick = async () => save("ledger.json", await exportLedger(), "application/json");
drawable();
attempt("Loading…", begin);
