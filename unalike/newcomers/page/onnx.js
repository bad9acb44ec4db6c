// Reads an ONNX file and computes it: the operators that Unalike's networks are exported with, and no others.
// A tensor is {dims, data, type}: float32 in a Float32Array, everything else in a Float64Array.

const FLOAT = 1, UINT8 = 2, INT32 = 6, INT64 = 7, BOOL = 9, DOUBLE = 11;
const MOST = 2 ** 28; // numbers in a tensor

export const size = (dims) => dims.reduce((a, b) => a * b, 1);

export function tensor(dims, data = null, type = FLOAT) {
  const count = size(dims);
  if (!(count <= MOST)) throw new Error(`a tensor of ${count} numbers is too large for this page`);
  return { dims, type, data: data ?? new (type === FLOAT ? Float32Array : Float64Array)(count) };
}

// The file: protocol buffers, of which only what is needed is read

function* fields(bytes) {
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
  let at = 0;
  const varint = () => {
    let value = 0n, shift = 0n;
    for (;;) {
      if (at >= bytes.length || shift > 63n) throw new Error("the ONNX file is damaged");
      const byte = bytes[at++];
      value |= BigInt(byte & 127) << shift;
      if (byte < 128) return BigInt.asIntN(64, value);
      shift += 7n;
    }
  };
  while (at < bytes.length) {
    const tag = Number(varint()), wire = tag & 7;
    let value;
    if (wire === 0) value = Number(varint());
    else if (wire === 5) { value = view.getFloat32(at, true); at += 4; }
    else if (wire === 1) { value = view.getFloat64(at, true); at += 8; }
    else if (wire === 2) {
      const length = Number(varint());
      if (length < 0 || at + length > bytes.length) throw new Error("the ONNX file is damaged");
      value = bytes.subarray(at, at + length);
      at += length;
    } else throw new Error("the ONNX file is damaged");
    yield [tag >> 3, value, wire];
  }
}

const text = (bytes) => new TextDecoder().decode(bytes);

function integers(value, wire) { // one of a repeated field, or all of them packed
  if (wire === 0) return [value];
  const found = [];
  for (const [, one] of fields(withTags(value))) found.push(one);
  return found;
}

function withTags(packed) { // a packed field as a message of single ones, so that one reader is enough
  const out = [];
  let fresh = true;
  for (const byte of packed) {
    if (fresh) out.push(8);
    out.push(byte);
    fresh = byte < 128;
  }
  return Uint8Array.from(out);
}

function readTensor(bytes) {
  let type = FLOAT, raw = null, name = "";
  const dims = [], values = [];
  for (const [field, value, wire] of fields(bytes)) {
    if (field === 1) dims.push(...integers(value, wire));
    else if (field === 2) type = value;
    else if (field === 4 || field === 10) values.push(...(wire === 2 ? numbers(value, field === 4 ? FLOAT : DOUBLE) : [value]));
    else if (field === 5 || field === 7) values.push(...integers(value, wire));
    else if (field === 8) name = text(value);
    else if (field === 9) raw = value;
    else if (field === 13 || field === 14) throw new Error("this page reads no ONNX files with data outside of them");
  }
  const made = tensor(dims, null, type);
  made.data.set(raw ? numbers(raw, type) : values);
  made.at = raw?.byteOffset; // where its numbers are in the file
  return [name, made];
}

function numbers(bytes, type) {
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
  const read = {
    [FLOAT]: [4, (at) => view.getFloat32(at, true)],
    [DOUBLE]: [8, (at) => view.getFloat64(at, true)],
    [INT64]: [8, (at) => Number(view.getBigInt64(at, true))],
    [INT32]: [4, (at) => view.getInt32(at, true)],
    [UINT8]: [1, (at) => view.getUint8(at)],
    [BOOL]: [1, (at) => view.getUint8(at)],
  }[type];
  if (!read) throw new Error(`this page does not know ONNX's tensors of type ${type}`);
  return Array.from({ length: bytes.length / read[0] }, (_, i) => read[1](i * read[0]));
}

function readNode(bytes) {
  const node = { inputs: [], outputs: [], op: "", has: {} };
  for (const [field, value] of fields(bytes)) {
    if (field === 1) node.inputs.push(text(value));
    else if (field === 2) node.outputs.push(text(value));
    else if (field === 4) node.op = text(value);
    else if (field === 5) {
      const found = { ints: [], floats: [] };
      let name = "";
      for (const [part, one, wire] of fields(value)) {
        if (part === 1) name = text(one);
        else if (part === 2 || part === 3) found.value = one;
        else if (part === 4) found.value = text(one);
        else if (part === 5) found.value = readTensor(one)[1];
        else if (part === 7) found.floats.push(...(wire === 2 ? numbers(one, FLOAT) : [one]));
        else if (part === 8) found.ints.push(...integers(one, wire));
      }
      node.has[name] = found.value ?? (found.ints.length ? found.ints : found.floats);
    }
  }
  return node;
}

export function read(buffer) {
  const bytes = new Uint8Array(buffer);
  const graph = { nodes: [], constants: {}, inputs: [], outputs: [] };
  for (const [field, value] of fields(bytes)) {
    if (field !== 7) continue;
    for (const [part, one] of fields(value)) {
      if (part === 1) graph.nodes.push(readNode(one));
      else if (part === 5) { const [name, made] = readTensor(one); graph.constants[name] = made; }
      else if (part === 11 || part === 12) {
        for (const [place, title] of fields(one)) if (place === 1) graph[part === 11 ? "inputs" : "outputs"].push(text(title));
      }
    }
  }
  const unknown = graph.nodes.find((node) => !(node.op in OPERATORS));
  if (unknown) throw new Error(`this page cannot compute the operator ${unknown.op}; open the model in ONNX Runtime`);
  return graph;
}

export function run(graph, inputs) {
  const values = { ...graph.constants, ...inputs };
  for (const name of graph.inputs) if (!(name in values)) throw new Error(`the graph needs ${name}`);
  for (const node of graph.nodes) {
    const made = OPERATORS[node.op](node.inputs.map((name) => (name === "" ? undefined : values[name])), node.has, node);
    [].concat(made).forEach((one, i) => { values[node.outputs[i]] = one; });
  }
  return Object.fromEntries(graph.outputs.map((name) => [name, values[name]]));
}

// Operators

const like = (x, data) => ({ dims: x.dims, type: x.type, data });
const axis = (a, rank) => (a < 0 ? a + rank : a);
const each = (f) => ([x]) => like(x, x.data.map(f));

function strides(dims) {
  const found = new Array(dims.length).fill(1);
  for (let i = dims.length - 2; i >= 0; i--) found[i] = found[i + 1] * dims[i + 1];
  return found;
}

function pairwise(f, type = null) { // with NumPy's broadcasting
  return (all) => all.slice(1).reduce((a, b) => {
    const rank = Math.max(a.dims.length, b.dims.length);
    const wide = (x) => [...new Array(rank - x.dims.length).fill(1), ...x.dims];
    const da = wide(a), db = wide(b), dims = da.map((n, i) => (n === 1 ? db[i] : n));
    if (dims.some((n, i) => (da[i] !== n && da[i] !== 1) || (db[i] !== n && db[i] !== 1))) throw new Error(`shapes ${a.dims} and ${b.dims} do not fit`);
    const out = tensor(dims, null, type ?? a.type);
    const sa = strides(da).map((s, i) => (da[i] === 1 ? 0 : s)), sb = strides(db).map((s, i) => (db[i] === 1 ? 0 : s));
    const place = new Array(rank).fill(0);
    for (let k = 0, ia = 0, ib = 0; k < out.data.length; k++) {
      out.data[k] = f(a.data[ia], b.data[ib]);
      for (let i = rank - 1; i >= 0; i--) {
        ia += sa[i]; ib += sb[i];
        if (++place[i] < dims[i]) break;
        ia -= sa[i] * dims[i]; ib -= sb[i] * dims[i]; place[i] = 0;
      }
    }
    return out;
  }, all[0]);
}

function transpose(x, perm) {
  const dims = perm.map((p) => x.dims[p]), from = strides(x.dims), step = perm.map((p) => from[p]);
  const out = tensor(dims, null, x.type), place = new Array(dims.length).fill(0);
  for (let k = 0, at = 0; k < out.data.length; k++) {
    out.data[k] = x.data[at];
    for (let i = dims.length - 1; i >= 0; i--) {
      at += step[i];
      if (++place[i] < dims[i]) break;
      at -= step[i] * dims[i]; place[i] = 0;
    }
  }
  return out;
}

function multiply(a, b, m, k, n, out, oa = 0, ob = 0, oc = 0) { // C[m, n] += A[m, k] · B[k, n]
  for (let i = 0; i < m; i++) {
    for (let p = 0; p < k; p++) {
      const v = a[oa + i * k + p];
      const row = ob + p * n, to = oc + i * n;
      for (let j = 0; j < n; j++) out[to + j] += v * b[row + j];
    }
  }
}

function matmul([a, b]) {
  const left = a.dims.length === 1, right = b.dims.length === 1;
  const da = left ? [1, ...a.dims] : a.dims, db = right ? [...b.dims, 1] : b.dims;
  const [m, k] = da.slice(-2), n = db[db.length - 1], fronts = [da.slice(0, -2), db.slice(0, -2)];
  const lead = pairwise(() => 0)(fronts.map((front) => tensor(front))).dims, many = size(lead);
  const [x, y] = [[a, da], [b, db]].map(([one, dims], i) => ([1, many].includes(size(fronts[i])) ? one : spread({ ...one, dims }, [...lead, ...dims.slice(-2)])).data);
  const sa = x.length === m * k ? 0 : m * k, sb = y.length === k * n ? 0 : k * n, out = new Float64Array(many * m * n);
  for (let i = 0; i < many; i++) multiply(x, y, m, k, n, out, i * sa, i * sb, i * m * n);
  const dims = [...lead, ...(left ? [] : [m]), ...(right ? [] : [n])];
  return tensor(dims, Float32Array.from(out), a.type);
}

function gemm([a, b, c], has) {
  const x = has.transA ? transpose(a, [1, 0]) : a, w = has.transB ? transpose(b, [1, 0]) : b;
  const [m, k] = x.dims, n = w.dims[1], out = new Float64Array(m * n);
  multiply(x.data, w.data, m, k, n, out);
  const alpha = has.alpha ?? 1, scaled = tensor([m, n], Float32Array.from(out, (v) => v * alpha));
  if (!c) return scaled;
  const beta = has.beta ?? 1;
  return pairwise((u, v) => u + beta * v)([scaled, c]);
}

function windows(has, dims, kernel) {
  if ((has.auto_pad ?? "NOTSET") !== "NOTSET") throw new Error("this page does not know auto_pad");
  const rank = kernel.length, pads = has.pads?.length ? has.pads : new Array(2 * rank).fill(0);
  const step = has.strides?.length ? has.strides : new Array(rank).fill(1);
  const spread = has.dilations?.length ? has.dilations : new Array(rank).fill(1);
  const round = has.ceil_mode ? Math.ceil : Math.floor;
  const out = dims.map((n, i) => round((n + pads[i] + pads[i + rank] - spread[i] * (kernel[i] - 1) - 1) / step[i]) + 1);
  return { out, pads, step, spread };
}

const flat = (dims) => (dims.length === 1 ? [1, ...dims] : dims); // one dimension as a picture one pixel high

function as2d(has, x, kernel) {
  if (kernel.length === 2) return [has, x, kernel];
  const two = (list, fill) => (list?.length ? (list.length === 1 ? [fill, list[0]] : [fill, list[0], fill, list[1]]) : undefined);
  const wide = { ...has, pads: two(has.pads, 0), strides: two(has.strides, 1), dilations: two(has.dilations, 1) };
  return [wide, { ...x, dims: [...x.dims.slice(0, 2), ...flat(x.dims.slice(2))] }, flat(kernel)];
}

function conv([input, weight, bias], attributes) {
  const [has, x, kernel] = as2d(attributes, input, weight.dims.slice(2));
  const [rows, channels, height, width] = x.dims, [made, per] = weight.dims, groups = has.group ?? 1;
  const { out: [h, w], pads, step, spread } = windows(has, [height, width], kernel);
  const patch = per * kernel[0] * kernel[1], each = made / groups, area = h * w;
  const columns = new Float32Array(patch * area), sums = new Float64Array(each * area);
  const out = tensor([rows, made, h, w]);
  for (let r = 0; r < rows; r++) {
    for (let g = 0; g < groups; g++) {
      let at = 0;
      for (let c = 0; c < per; c++) for (let i = 0; i < kernel[0]; i++) for (let j = 0; j < kernel[1]; j++) {
        const plane = (r * channels + g * per + c) * height;
        for (let y = 0; y < h; y++) {
          const fromY = y * step[0] - pads[0] + i * spread[0];
          for (let z = 0; z < w; z++) {
            const fromX = z * step[1] - pads[1] + j * spread[1];
            const inside = fromY >= 0 && fromY < height && fromX >= 0 && fromX < width;
            columns[at++] = inside ? x.data[(plane + fromY) * width + fromX] : 0;
          }
        }
      }
      sums.fill(0);
      multiply(weight.data, columns, each, patch, area, sums, g * each * patch);
      for (let k = 0; k < each; k++) {
        const extra = bias ? bias.data[g * each + k] : 0, to = (r * made + g * each + k) * area;
        for (let p = 0; p < area; p++) out.data[to + p] = sums[k * area + p] + extra;
      }
    }
  }
  return input.dims.length === 3 ? { ...out, dims: [rows, made, w] } : out;
}

function pool(average) {
  return ([input], attributes) => {
    const [has, x, kernel] = as2d(attributes, input, attributes.kernel_shape);
    const [rows, channels, height, width] = x.dims, { out: [h, w], pads, step, spread } = windows(has, [height, width], kernel);
    const out = tensor([rows, channels, h, w]);
    let at = 0;
    for (let p = 0; p < rows * channels; p++) for (let y = 0; y < h; y++) for (let z = 0; z < w; z++) {
      let best = -Infinity, total = 0, count = 0;
      for (let i = 0; i < kernel[0]; i++) for (let j = 0; j < kernel[1]; j++) {
        const fromY = y * step[0] - pads[0] + i * spread[0], fromX = z * step[1] - pads[1] + j * spread[1];
        if (fromY < 0 || fromY >= height || fromX < 0 || fromX >= width) continue;
        const v = x.data[(p * height + fromY) * width + fromX];
        best = v > best || Number.isNaN(v) ? v : best; total += v; count++;
      }
      out.data[at++] = average ? total / (has.count_include_pad ? kernel[0] * kernel[1] : count) : best;
    }
    return input.dims.length === 3 ? { ...out, dims: [rows, channels, w] } : out;
  };
}

function reduce(start, add, finish = (v) => v) {
  return ([x, axes], has) => {
    const rank = x.dims.length, given = axes ? [...axes.data] : has.axes?.length ? has.axes : null;
    if (!given && has.noop_with_empty_axes) return x;
    const gone = new Set((given ?? x.dims.map((_, i) => i)).map((a) => axis(a, rank)));
    const kept = x.dims.map((n, i) => (gone.has(i) ? 1 : n)), step = strides(kept).map((s, i) => (gone.has(i) ? 0 : s));
    const sums = new Float64Array(size(kept)).fill(start), place = new Array(rank).fill(0);
    for (let k = 0, to = 0; k < x.data.length; k++) {
      sums[to] = add(sums[to], x.data[k]);
      for (let i = rank - 1; i >= 0; i--) {
        to += step[i];
        if (++place[i] < x.dims[i]) break;
        to -= step[i] * x.dims[i]; place[i] = 0;
      }
    }
    const many = x.data.length / Math.max(1, sums.length), dims = (has.keepdims ?? 1) ? kept : kept.filter((_, i) => !gone.has(i));
    const out = tensor(dims, null, x.type);
    sums.forEach((v, i) => { out.data[i] = finish(v, many); });
    return out;
  };
}

function alongAxis(x, a, f) { // f over each line of this axis
  const rank = x.dims.length, n = x.dims[axis(a, rank)], inner = size(x.dims.slice(axis(a, rank) + 1));
  const out = tensor(x.dims, null, x.type);
  for (let k = 0; k < x.data.length; k += n * inner) for (let i = 0; i < inner; i++) {
    const line = Array.from({ length: n }, (_, j) => x.data[k + j * inner + i]);
    f(line).forEach((v, j) => { out.data[k + j * inner + i] = v; });
  }
  return out;
}

const softmax = (log) => ([x], has) => alongAxis(x, has.axis ?? -1, (line) => {
  const top = Math.max(...line), total = line.reduce((s, v) => s + Math.exp(v - top), 0);
  return line.map((v) => (log ? v - top - Math.log(total) : Math.exp(v - top) / total));
});

function slice([x, starts, ends, axes, steps]) {
  const rank = x.dims.length, from = new Array(rank).fill(0), by = new Array(rank).fill(1), dims = [...x.dims];
  const chosen = axes ? [...axes.data] : starts.data.map((_, i) => i);
  chosen.forEach((a, i) => {
    const at = axis(a, rank), n = x.dims[at], step = steps ? steps.data[i] : 1;
    const bound = (v) => Math.min(Math.max(v < 0 ? v + n : v, step < 0 ? -1 : 0), step < 0 ? n - 1 : n);
    from[at] = bound(starts.data[i]); by[at] = step;
    dims[at] = Math.max(0, Math.ceil((bound(ends.data[i]) - from[at]) / step));
  });
  return pick(x, dims, (place, i) => from[i] + place * by[i]);
}

function pick(x, dims, where) {
  const out = tensor(dims, null, x.type), step = strides(x.dims), place = new Array(dims.length).fill(0);
  for (let k = 0; k < out.data.length; k++) {
    let at = 0;
    for (let i = 0; i < dims.length; i++) at += where(place[i], i) * step[i];
    out.data[k] = x.data[at];
    for (let i = dims.length - 1; i >= 0; i--) { if (++place[i] < dims[i]) break; place[i] = 0; }
  }
  return out;
}

function gather([x, index], has) {
  const a = axis(has.axis ?? 0, x.dims.length), n = x.dims[a];
  const before = size(x.dims.slice(0, a)), after = size(x.dims.slice(a + 1));
  const out = tensor([...x.dims.slice(0, a), ...index.dims, ...x.dims.slice(a + 1)], null, x.type);
  let to = 0;
  for (let b = 0; b < before; b++) for (const raw of index.data) {
    const i = raw < 0 ? raw + n : raw;
    if (!(i >= 0 && i < n)) throw new Error(`the network does not know the number ${raw}`);
    for (let j = 0; j < after; j++) out.data[to++] = x.data[(b * n + i) * after + j];
  }
  return out;
}

function concat(all, has) {
  const a = axis(has.axis, all[0].dims.length), dims = [...all[0].dims];
  dims[a] = all.reduce((s, x) => s + x.dims[a], 0);
  const out = tensor(dims, null, all[0].type), before = size(dims.slice(0, a));
  let to = 0;
  for (let b = 0; b < before; b++) for (const x of all) {
    const run = size(x.dims.slice(a));
    out.data.set(x.data.subarray(b * run, (b + 1) * run), to);
    to += run;
  }
  return out;
}

function split([x, sizes], has, node) {
  const a = axis(has.axis ?? 0, x.dims.length), n = x.dims[a], many = has.num_outputs ?? node.outputs.length;
  const parts = sizes ? [...sizes.data] : Array.from({ length: many }, (_, i) => Math.min(Math.ceil(n / many), n - i * Math.ceil(n / many)));
  let from = 0;
  return parts.map((part) => {
    const start = from;
    from += part;
    return a === 0
      ? tensor([part, ...x.dims.slice(1)], x.data.subarray(start * size(x.dims.slice(1)), from * size(x.dims.slice(1))), x.type)
      : pick(x, x.dims.map((d, i) => (i === a ? part : d)), (place, i) => (i === a ? start + place : place));
  });
}

function reshape([x, shape], has) {
  const dims = [...shape.data].map((n, i) => (n === 0 && !has.allowzero ? x.dims[i] : n)), open = dims.indexOf(-1);
  if (open >= 0) dims[open] = x.data.length / dims.reduce((s, n) => (n === -1 ? s : s * n), 1);
  if (size(dims) !== x.data.length) throw new Error(`${x.dims} cannot become ${dims}`);
  return { ...x, dims };
}

function unsqueeze([x, axes]) {
  const rank = x.dims.length + axes.data.length, at = new Set([...axes.data].map((a) => axis(a, rank))), rest = [...x.dims];
  return { ...x, dims: Array.from({ length: rank }, (_, i) => (at.has(i) ? 1 : rest.shift())) };
}

function squeeze([x, axes]) {
  const gone = axes ? new Set([...axes.data].map((a) => axis(a, x.dims.length))) : new Set(x.dims.flatMap((n, i) => (n === 1 ? [i] : [])));
  return { ...x, dims: x.dims.filter((_, i) => !gone.has(i)) };
}

function cast([x], has) {
  const data = has.to === FLOAT ? Float32Array.from(x.data) : Float64Array.from(x.data, [INT64, INT32, UINT8].includes(has.to) ? Math.trunc : has.to === BOOL ? (v) => +(v !== 0) : undefined);
  return { dims: x.dims, type: has.to, data };
}

const spread = (x, dims) => pairwise((v) => v)([x, tensor(dims)]);

const expand = ([x, shape]) => spread(x, [...shape.data]);

function where([test, a, b]) {
  const { dims } = pairwise(() => 0)([test, a, b]), [yes, first, second] = [test, a, b].map((x) => spread(x, dims));
  return like(first, first.data.map((v, i) => (yes.data[i] ? v : second.data[i])));
}

function instanceNorm([x, scale, bias], has) {
  const run = size(x.dims.slice(2)), out = tensor(x.dims);
  for (let k = 0, p = 0; k < x.data.length; k += run, p++) {
    let mean = 0, square = 0;
    for (let i = 0; i < run; i++) mean += x.data[k + i] / run;
    for (let i = 0; i < run; i++) square += (x.data[k + i] - mean) ** 2 / run;
    const by = scale.data[p % x.dims[1]] / Math.sqrt(square + (has.epsilon ?? 1e-5)), c = bias.data[p % x.dims[1]];
    for (let i = 0; i < run; i++) out.data[k + i] = (x.data[k + i] - mean) * by + c;
  }
  return out;
}

function layerNorm([x, scale, bias], has) {
  const run = size(x.dims.slice(axis(has.axis ?? -1, x.dims.length))), out = tensor(x.dims);
  for (let k = 0; k < x.data.length; k += run) {
    let mean = 0, square = 0;
    for (let i = 0; i < run; i++) mean += x.data[k + i] / run;
    for (let i = 0; i < run; i++) square += (x.data[k + i] - mean) ** 2 / run;
    const by = 1 / Math.sqrt(square + (has.epsilon ?? 1e-5));
    for (let i = 0; i < run; i++) out.data[k + i] = (x.data[k + i] - mean) * by * scale.data[i] + (bias ? bias.data[i] : 0);
  }
  return out;
}

function erf(x) { // to 1.2e-7 (Abramowitz and Stegun 7.1.26 has 1.5e-7; this is the series and the fraction)
  const a = Math.abs(x);
  if (a > 6) return Math.sign(x);
  if (a < 2.5) {
    let term = a, total = a;
    for (let n = 1; Math.abs(term) > 1e-17 * total + 1e-300; n++) { term *= -a * a / n; total += term / (2 * n + 1); }
    return Math.sign(x) * total * 2 / Math.sqrt(Math.PI);
  }
  let fraction = 0;
  for (let n = 60; n > 0; n--) fraction = n / 2 / (a + fraction);
  return Math.sign(x) * (1 - Math.exp(-a * a) / ((a + fraction) * Math.sqrt(Math.PI)));
}

export const OPERATORS = {
  Add: pairwise((a, b) => a + b), Sub: pairwise((a, b) => a - b), Mul: pairwise((a, b) => a * b), Div: ([a, b]) => pairwise(a.type === FLOAT || a.type === DOUBLE ? (u, v) => u / v : (u, v) => Math.trunc(u / v))([a, b]),
  Pow: pairwise((a, b) => a ** b), Max: pairwise((a, b) => Math.max(a, b)), Min: pairwise((a, b) => Math.min(a, b)),
  Equal: pairwise((a, b) => +(a === b), BOOL), Less: pairwise((a, b) => +(a < b), BOOL), Greater: pairwise((a, b) => +(a > b), BOOL),
  And: pairwise((a, b) => +(a && b), BOOL), Not: ([x]) => ({ dims: x.dims, type: BOOL, data: x.data.map((v) => +!v) }),
  IsNaN: ([x]) => ({ dims: x.dims, type: BOOL, data: Float64Array.from(x.data, (v) => +Number.isNaN(v)) }),
  Relu: each((v) => (v > 0 || Number.isNaN(v) ? v : 0)), Tanh: each(Math.tanh), Sigmoid: each((v) => 1 / (1 + Math.exp(-v))),
  Exp: each(Math.exp), Log: each(Math.log), Sqrt: each(Math.sqrt), Abs: each(Math.abs), Neg: each((v) => -v), Sin: each(Math.sin), Cos: each(Math.cos),
  Reciprocal: each((v) => 1 / v), Erf: each(erf), Identity: ([x]) => x, Cast: cast,
  LeakyRelu: ([x], has) => like(x, x.data.map((v) => (v < 0 ? v * (has.alpha ?? 0.01) : v))),
  Clip: ([x, low, high]) => like(x, x.data.map((v) => Math.min(Math.max(v, low ? low.data[0] : -Infinity), high ? high.data[0] : Infinity))),
  MatMul: matmul, Gemm: gemm, Conv: conv, MaxPool: pool(false), AveragePool: pool(true),
  GlobalAveragePool: ([x]) => reduce(0, (a, b) => a + b, (v, n) => v / n)([x], { axes: x.dims.map((_, i) => i).slice(2), keepdims: 1 }),
  ReduceMean: reduce(0, (a, b) => a + b, (v, n) => v / n), ReduceSum: reduce(0, (a, b) => a + b), ReduceMax: reduce(-Infinity, Math.max),
  ReduceMin: reduce(Infinity, Math.min), ReduceL2: reduce(0, (a, b) => a + b * b, Math.sqrt), ReduceSumSquare: reduce(0, (a, b) => a + b * b),
  Softmax: softmax(false), LogSoftmax: softmax(true), InstanceNormalization: instanceNorm, LayerNormalization: layerNorm,
  Transpose: ([x], has) => transpose(x, has.perm?.length ? has.perm : x.dims.map((_, i) => x.dims.length - 1 - i)),
  Reshape: reshape, Unsqueeze: unsqueeze, Squeeze: squeeze, Slice: slice, Gather: gather, Concat: concat, Split: split, Expand: expand, Where: where,
  Flatten: ([x], has) => { const a = axis(has.axis ?? 1, x.dims.length); return { ...x, dims: [size(x.dims.slice(0, a)), size(x.dims.slice(a))] }; },
  Shape: ([x], has) => { const part = x.dims.slice(has.start ?? 0, has.end ?? undefined); return tensor([part.length], Float64Array.from(part), INT64); },
  ConstantOfShape: ([shape], has) => { const out = tensor([...shape.data], null, has.value?.type ?? FLOAT); out.data.fill(has.value ? has.value.data[0] : 0); return out; },
  Constant: (_, has) => has.value?.data ? has.value : ("value_int" in has ? tensor([], Float64Array.of(has.value_int), INT64) : tensor([], Float32Array.of(has.value_float))),
};
