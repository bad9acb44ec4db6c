// Noise that protects each row: the same mechanisms, grid and accounting as unalike/privacy/{discrete,mechanisms}.py,
// with bits from the operating system. A value is rounded to a grid and gets a whole number of steps, and every
// decision compares integers (Canonne, Kamath and Steinke 2020), so nothing leaks through floating point.

const UP = 1 + 1e-12; // before rounding up: what floating point may have taken off

// Random integers

let pool = new Uint32Array(0), used = 0;

function word() { // 32 bits
  if (used === pool.length) { crypto.getRandomValues((pool = new Uint32Array(4096))); used = 0; }
  return pool[used++];
}

export function below(bound) { // uniform BigInt in [0, bound), as many words as the bound needs
  const words = Math.ceil(bound.toString(2).length / 32) + 1, whole = 1n << BigInt(32 * words), limit = whole - (whole % bound);
  for (;;) {
    let value = 0n;
    for (let i = 0; i < words; i++) value = (value << 32n) | BigInt(word());
    if (value < limit) return value % bound;
  }
}

const coin = (a, b) => below(b) < a; // true with probability a / b

function coinExp(a, b) { // true with probability exp(−a/b) (Alg. 1)
  for (; a > b; a -= b) if (!coinExp(b, b)) return false;
  let k = 1n;
  while (coin(a, b * k)) k++;
  return k % 2n === 1n;
}

export function discreteLaplace(t) { // probability ∝ exp(−|k|/t) (Alg. 2)
  for (;;) {
    const u = below(t);
    if (!coinExp(u, t)) continue;
    let v = 0n;
    while (coinExp(1n, 1n)) v++;
    const size = u + t * v, negative = word() & 1;
    if (!(negative && size === 0n)) return negative ? -size : size;
  }
}

export function discreteGaussian(sigma) { // probability ∝ exp(−k²/2σ²) (Alg. 3 with t = σ)
  for (;;) {
    const y = discreteLaplace(sigma), distance = (y < 0n ? -y : y) - sigma;
    if (coinExp(distance * distance, 2n * sigma * sigma)) return y;
  }
}

// The grid, and a vector with noise

export function gridStep(clip, count, norm) {
  const many = Math.max(count, norm === "l2" ? 2 ** 14 : 2 ** 7);
  return 2 ** Math.floor(Math.log2(clip / (2 ** 13 * (norm === "l2" ? Math.sqrt(many) : many))));
}

function withSteps(values, step, draw) {
  const safe = values.every(Number.isFinite) ? values : values.map(() => 0);
  return Float32Array.from(safe, (v) => Number(BigInt(roundEven(v / step)) + draw()) * step);
}

function roundEven(v) {
  const near = Math.round(v);
  return Math.abs(v % 1) === 0.5 && near % 2 !== 0 ? near - 1 : near;
}

export function addGaussian(values, sensitivity, multiplier) {
  const step = gridStep(sensitivity, values.length, "l2"), moved = sensitivity / step + Math.sqrt(values.length);
  const sigma = BigInt(Math.ceil(multiplier * moved * UP));
  return withSteps([...values], step, () => discreteGaussian(sigma));
}

export function addLaplace(values, sensitivity, epsilon) {
  const step = gridStep(sensitivity, values.length, "l1"), moved = sensitivity / step + 3 * values.length;
  const scale = BigInt(Math.ceil(moved * UP / epsilon));
  return withSteps([...values], step, () => discreteLaplace(scale));
}

// What it costs

function upperTail(x) { // P(N > x), with a small relative error also far out
  if (x < 0) return 1 - upperTail(-x);
  if (x < 3) {
    let term = x, total = x;
    for (let n = 1; term > 1e-18 * total; n++) { term *= x * x / (2 * n + 1); total += term; }
    return 0.5 - total * Math.exp(-x * x / 2) / Math.sqrt(2 * Math.PI);
  }
  let fraction = 0;
  for (let n = 200; n > 0; n--) fraction = n / (x + fraction);
  return Math.exp(-x * x / 2) / ((x + fraction) * Math.sqrt(2 * Math.PI));
}

export function gaussianDelta(multiplier, epsilon) { // Balle and Wang 2018, Theorem 8
  const shift = 0.5 / multiplier, far = epsilon * multiplier;
  return upperTail(far - shift) - Math.exp(epsilon) * upperTail(far + shift);
}

function solve(low, high, tooLow) { // the smallest number that is not too low, on a logarithmic scale
  for (let i = 0; i < 200; i++) {
    const middle = Math.sqrt(low * high);
    if (tooLow(middle)) low = middle; else high = middle;
  }
  return high;
}

export const gaussianMultiplier = (epsilon, delta) => UP * solve(1e-3, 1e7, (z) => gaussianDelta(z, epsilon) > delta);

function gaussianEpsilon(multiplier, delta) {
  return gaussianDelta(multiplier, 0) <= delta ? 0 : solve(1e-9, 1e3, (epsilon) => gaussianDelta(multiplier, epsilon) > delta);
}

// ε at δ of all releases of one row: {noise: "gaussian", multiplier}, {noise: "laplace", epsilon} or {noise: "none"}.
// Gaussians compose exactly, with the slack of discrete noise (see slack in discrete.py); Laplace's ε is added to that.
export function spent(releases, delta) {
  if (releases.some((one) => one.noise === "none")) return Infinity;
  let inverse = 0, laplace = 0;
  for (const one of releases) {
    if (one.noise === "gaussian") inverse += 1 / one.multiplier ** 2; else laplace += one.epsilon;
  }
  if (inverse === 0) return laplace;
  const s = 2 ** -26 * inverse, inner = delta * (Math.exp(-s / 24) - 1e-7);
  const epsilon = gaussianEpsilon(1 / Math.sqrt(inverse), inner);
  const r = 0.5 + Math.sqrt(2 * (epsilon + 60 * Math.LN2 + Math.log(1e7 / delta)));
  return epsilon + (r * r / 8 + 1 / 12) * s + laplace;
}
