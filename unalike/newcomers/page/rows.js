// Reads a newcomer's file by the schema of the run, as unalike/newcomers/file.py reads it: the same numbers from the
// same file, or a message that says what is wrong with it. Nothing here sends anything.

import { size } from "./onnx.js";

const MOST_BYTES = 64 * 2 ** 20, MOST_ROWS = 200000;
const ABSENT = new Set(["", "#N/A", "#N/A N/A", "#NA", "-1.#IND", "-1.#QNAN", "-NaN", "-nan", "1.#IND", "1.#QNAN", "<NA>", "N/A", "NA", "NULL", "NaN", "None", "n/a", "nan", "null"]); // pandas' own
const NUMBER = /^[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?$/;
const DATE = /^(\d{4})-(\d\d)-(\d\d)(?:[ T](\d\d):(\d\d)(?::(\d\d(?:\.\d+)?))?Z?)?$/;
const TRUTH = /^(true|false)$/i, LARGEST = 3.4028234663852886e38; // of float32
const TIME = /^(\d\d?):(\d\d)(?::(\d\d(?:\.\d+)?))?$/;
const GAP = " is missing"; // the end of an indicator's name

export class Wrong extends Error {} // the file's fault, in words for its owner

// A table's cells: quotes and line ends as in RFC 4180

export function cells(text, delimiter) {
  const rows = [];
  let row = [], cell = "", quoted = false, opened = false;
  const endRow = () => {
    row.push(cell);
    if (row.length > 1 || opened || cell.trim() !== "") rows.push(row);
    row = []; cell = ""; opened = false;
  };
  for (let i = text.charCodeAt(0) === 0xfeff ? 1 : 0; i < text.length; i++) {
    const sign = text[i];
    if (quoted) {
      if (sign !== '"') cell += sign;
      else if (text[i + 1] === '"') { cell += '"'; i++; } else quoted = false;
    } else if (sign === '"' && cell === "") { quoted = true; opened = true; }
    else if (sign === delimiter) { row.push(cell); cell = ""; }
    else if (sign === "\n" || sign === "\r") { if (sign === "\r" && text[i + 1] === "\n") i++; endRow(); }
    else cell += sign;
  }
  if (quoted) throw new Wrong("the file ends inside quotes; is a closing \" missing?");
  if (cell !== "" || row.length) endRow();
  return rows;
}

export function readNumber(word, decimal = ".") { // NaN if it is none
  const plain = decimal === "," ? word.replaceAll(",", ".") : word;
  if (NUMBER.test(plain)) return Number(plain);
  const date = DATE.exec(word), time = TIME.exec(word);
  if (date) { // days since the year 2000
    const [y, m, d, hour, minute, second] = date.slice(1).map((part) => Number(part ?? 0));
    const day = new Date(0);
    day.setUTCFullYear(y, m - 1, d); // Date.UTC takes the year 1 for 1901
    if (day.getUTCMonth() !== m - 1 || hour > 23 || minute > 59 || second >= 60) return NaN;
    return (day.getTime() - Date.UTC(2000, 0, 1)) / 864e5 + (hour * 3600 + minute * 60 + second) / 86400;
  }
  if (time) return Number(time[1]) + Number(time[2]) / 60 + Number(time[3] ?? 0) / 3600;
  return NaN;
}

export function decoded(buffer, name) {
  try { return new TextDecoder("utf-8", { fatal: true }).decode(buffer); } catch { throw new Wrong(`${name} is not UTF-8 text; save it as CSV with UTF-8`); }
}

// A schema with its columns in their order, which an object in JSON would lose where a name looks like a number
export const withColumns = (schema, card) => ({ ...schema, columns: card.columns && new Map(card.columns) });

const listed = (words, most = 10) => words.slice(0, most).join(", ") + (words.length > most ? ", …" : "");

// The rows of each client of a file: a Map of name to lines {row, x, gaps, id, client, label}, and notes about what was understood

export function readTable(text, name, schema, how) {
  if (text.length > MOST_BYTES) throw new Wrong(`${name} is larger than this page reads (64 MB); use unalike personalize`);
  const delimiter = how.delimiter ?? (name.toLowerCase().endsWith(".tsv") ? "\t" : ",");
  const [header, ...rows] = cells(text, delimiter);
  if (!header) throw new Wrong(`${name} is empty`);
  const titles = header.map((title) => title.trim());
  if (titles.length === 1 && /[;\t|]/.test(titles[0])) throw new Wrong(`${name}: only one column was found, "${titles[0]}"; choose another delimiter`);
  const twice = titles.find((title, i) => titles.indexOf(title) !== i);
  if (twice !== undefined) throw new Wrong(`${name}: the column "${twice}" occurs more than once`);
  if (titles.some((title) => title === "" || title.startsWith("Unnamed: "))) throw new Wrong(`${name}: a column has no name, which is often a saved row number and no feature; name it or remove it`);
  if (!rows.length) throw new Wrong(`${name} has no rows, but a newcomer needs at least one`);
  if (rows.length > MOST_ROWS) throw new Wrong(`${name} has more than ${MOST_ROWS} rows; use unalike personalize`);
  const long = rows.findIndex((row) => row.length > titles.length);
  if (long >= 0) throw new Wrong(`${name}: data row ${long + 1} has ${rows[long].length} cells, but the header names ${titles.length} columns`);

  const wanted = [...(schema.columns ?? [])], real = wanted.map(([title]) => title).filter((title) => !isIndicator(title, schema));
  const client = pickRole(how.client_column, "client", titles), label = pickRole(how.label_column, "y", titles);
  const id = titles.includes(how.id_column ?? "") ? how.id_column : null;
  const lacking = real.filter((title) => !titles.includes(title));
  if (lacking.length) throw new Wrong(`${name}: the columns must be those of training, ${real.join(", ")}; missing: ${lacking.join(", ")}. Rename or add them (the order does not matter)`);
  const notes = [], others = titles.filter((title) => !real.includes(title) && ![client, label, id].includes(title));
  if (others.length) notes.push(`ignored, because training did not have them: ${listed(others)}`);

  const codes = [how.na_values ?? []].flat().flatMap((word) => String(word).split(",")).map((word) => word.trim()).filter(Boolean);
  const nothing = new Set([...ABSENT, ...codes]), numbers = new Set(codes.map((code) => readNumber(code, how.decimal)));
  const at = Object.fromEntries(titles.map((title, i) => [title, i]));
  const word = (row, title) => { const cell = row[at[title]] ?? ""; return ABSENT.has(cell) ? "" : cell.trim(); };
  const decimals = (said) => (how.decimal === "," ? said.replaceAll(",", ".") : said);
  const gone = (row, title) => nothing.has(word(row, title));
  const known = (row, title) => (gone(row, title) ? "" : word(row, title));
  const width = size(schema.shape), x = new Float32Array(rows.length * width), gaps = new Uint8Array(x.length);
  let column = 0;
  for (const [title, values] of wanted) {
    const source = isIndicator(title, schema) ? title.slice(0, -GAP.length) : title;
    const truths = rows.every((row) => TRUTH.test(row[at[source]] ?? "")); // without a gap, as pandas reads them
    const plain = rows.every((row) => gone(row, source) || NUMBER.test(decimals(word(row, source)))); // then −9.0 is the code −9, too
    rows.forEach((row, i) => {
      const said = word(row, source), to = i * width + column, empty = gone(row, source) || (plain && numbers.has(readNumber(said, how.decimal)));
      if (source !== title) { x[to] = +empty; return; }
      if (empty) { for (let j = 0; j < (values?.length ?? 1); j++) { x[to + j] = NaN; gaps[to + j] = 1; } return; }
      if (values) {
        const place = values.indexOf(said);
        if (place < 0) throw new Wrong(`${name}: the column "${title}" holds "${said}" in data row ${i + 1}, which was not in training; the values there are ${listed(values, 50)}`);
        x[to + place] = 1;
        return;
      }
      const number = truths ? +/^t/i.test(said) : readNumber(said, how.decimal);
      if (Number.isNaN(number)) throw new Wrong(`${name}: the column "${title}" should hold numbers, but data row ${i + 1} holds "${said}"`);
      x[to] = number;
      if (!(Math.abs(number) <= LARGEST)) throw new Wrong(`${name}: data row ${i + 1} holds a number too large: ${said}`);
    });
    column += values?.length ?? 1;
  }
  const lines = rows.map((row, i) => ({
    row: i, said: real.map((title) => known(row, title)), x: x.subarray(i * width, (i + 1) * width), gaps: gaps.subarray(i * width, (i + 1) * width),
    id: id ? known(row, id) : String(i + 1), client: client ? word(row, client) : "", label: label ? known(row, label) : "",
  }));
  const nobody = lines.find((line) => client && line.client === "");
  if (nobody) throw new Wrong(`${name}: data row ${nobody.row + 1} does not say whose it is; fill in the column "${client}"`);
  const clients = Map.groupBy(lines, (line) => line.client);
  return { clients, notes, labeled: label !== null && lines.some((line) => line.label !== "") };
}

export const isIndicator = (title, schema) => title.endsWith(GAP) && schema.columns.has(title.slice(0, -GAP.length));

const pickRole = (given, usual, titles) => (given === "" ? null : titles.includes(given ?? usual) ? given ?? usual : null);

// One client's lines as inputs of the graphs: what to do about gaps, and labels as numbers

export function asInputs(lines, name, schema, how) {
  const notes = [], lacking = lines.filter((line) => line.gaps.some(Boolean));
  let kept = lines;
  if (lacking.length && how.missing === "drop") {
    kept = lines.filter((line) => !line.gaps.some(Boolean));
    if (!kept.length) throw new Wrong(`${name}: every row lacks a feature, so nothing is left; fill some in`);
    notes.push(`left out for lack of a value: ${lacking.length} of the rows; no prediction is made for them`);
  } else if (lacking.length && ["mean", "client"].includes(how.missing)) {
    if (!schema.shift) throw new Wrong(`${name}: values are missing, and the run has no means to fill them with; fill them in`);
    notes.push(`missing and filled in by the means of training: ${lacking.reduce((n, line) => n + line.gaps.reduce((a, b) => a + b, 0), 0)} of the values`);
  } else if (lacking.length) throw new Wrong(`${name}: data row ${lacking[0].row + 1} lacks a value; fill it in`);
  const width = size(schema.shape), data = new Float32Array(kept.length * width), shift = schema.shift?.values ?? [];
  kept.forEach((line, i) => line.x.forEach((v, j) => { data[i * width + j] = line.gaps[j] ? shift[shift.length === 1 ? 0 : j] : v; }));
  return { ...withLabels(kept, name, schema), x: typed(data, kept.length, schema), lines: kept, notes, leftOut: lines.length - kept.length };
}

function typed(data, rows, schema) {
  const type = { float32: 1, uint8: 2, int64: 7, float64: 11 }[schema.stored];
  return { dims: [rows, ...schema.shape], type, data: type === 1 ? data : Float64Array.from(data) };
}

function withLabels(lines, name, schema) { // y as the run's numbers; −1 where a label is missing
  const known = (schema.class_names ?? Array.from({ length: schema.classes ?? 0 }, (_, i) => i)).map(String);
  const codes = lines.map(({ label, row }) => {
    if (label === "") return -1;
    if (!schema.classes) {
      const value = readNumber(label);
      if (Number.isNaN(value)) throw new Wrong(`${name}: the run predicts numbers, but the label of data row ${row + 1} is "${label}"`);
      return value;
    }
    const plain = NUMBER.test(label) && Number.isSafeInteger(Number(label)) ? String(Number(label)) : label;
    const place = known.includes(label) ? known.indexOf(label) : known.indexOf(plain);
    if (place < 0) throw new Wrong(`${name}: the class "${label}" was not in training (data row ${row + 1}); the run knows ${listed(known)}`);
    return place;
  });
  const labeled = lines.filter((line) => line.label !== "").length;
  return { labeled, y: { dims: [lines.length], type: schema.classes ? 7 : 1, data: (schema.classes ? Float64Array : Float32Array).from(codes) } };
}

// A name for each different row that is the same in every call: row_names in unalike/newcomers/ledger.py

export async function rowNames(lines) {
  const names = new Set();
  for (const line of lines) {
    const view = new DataView(new ArrayBuffer(8 * line.x.length));
    line.x.forEach((v, i) => view.setFloat64(8 * i, line.gaps[i] ? NaN : v + 0, true));
    const hash = new Uint8Array(await crypto.subtle.digest("SHA-256", view.buffer));
    names.add([...hash.subarray(0, 8)].map((byte) => byte.toString(16).padStart(2, "0")).join(""));
  }
  return [...names];
}

// A picture's pixels as they are in the file: upright, and without a conversion of colours

export async function pixels(file) {
  let picture;
  try { picture = await createImageBitmap(file, { colorSpaceConversion: "none" }); } catch { throw new Wrong(`${file.name} is no picture that this browser can read`); }
  const pen = new OffscreenCanvas(picture.width, picture.height).getContext("2d", { willReadFrequently: true });
  pen.drawImage(picture, 0, 0);
  return pen.getImageData(0, 0, picture.width, picture.height);
}

// {width, height, data: RGBA bytes} as a canvas gives them, to one line of a schema of images

export function pictureLine(picture, name, schema, largest, row = 0, label = "") {
  const [channels, height, width] = schema.shape, area = picture.width * picture.height;
  for (let i = 0; i < area; i++) if (picture.data[4 * i + 3] !== 255) throw new Wrong(`${name} is partly transparent; save it without transparency`);
  const planes = channels === 1 ? [grey(picture.data, area)] : [0, 1, 2].map((c) => Uint8Array.from({ length: area }, (_, i) => picture.data[4 * i + c]));
  const x = new Float32Array(channels * height * width);
  planes.forEach((plane, c) => {
    resize(plane, picture.width, picture.height, width, height).forEach((v, i) => { x[c * height * width + i] = Math.round(v * largest / 255); });
  });
  return { row, x, gaps: new Uint8Array(x.length), id: name, client: "", label };
}

const grey = (rgba, area) => Uint8Array.from({ length: area }, (_, i) => (rgba[4 * i] * 19595 + rgba[4 * i + 1] * 38470 + rgba[4 * i + 2] * 7471 + 0x8000) >> 16);

function weights(from, to) { // Pillow's BILINEAR: a triangle as wide as a pixel of the result, in fixed point
  const scale = from / to, wide = Math.max(1, scale);
  return Array.from({ length: to }, (_, i) => {
    const centre = (i + 0.5) * scale, first = Math.max(0, Math.trunc(centre - wide + 0.5)), last = Math.min(from, Math.trunc(centre + wide + 0.5));
    const found = Array.from({ length: last - first }, (_, j) => Math.max(0, 1 - Math.abs((j + first - centre + 0.5) / wide)));
    const total = found.reduce((a, b) => a + b, 0);
    return [first, found.map((w) => Math.trunc(0.5 + (w / total) * 2 ** 22))];
  });
}

export function resize(plane, width, height, toWidth, toHeight) {
  const blend = (parts, at) => {
    const total = parts[1].reduce((sum, w, j) => sum + w * at(parts[0] + j), 2 ** 21);
    return Math.min(255, Math.max(0, Math.floor(total / 2 ** 22)));
  };
  let now = plane;
  if (width !== toWidth) {
    const across = weights(width, toWidth), from = now;
    now = Uint8Array.from({ length: toWidth * height }, (_, k) => blend(across[k % toWidth], (j) => from[Math.floor(k / toWidth) * width + j]));
  }
  if (height !== toHeight) {
    const down = weights(height, toHeight), from = now;
    now = Uint8Array.from({ length: toWidth * toHeight }, (_, k) => blend(down[Math.floor(k / toWidth)], (j) => from[j * toWidth + (k % toWidth)]));
  }
  return now;
}
