"use strict";
const { meta, records } = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);
const NS = "http://www.w3.org/2000/svg";

// Okabe and Ito's colours first: distinct for colour-blind readers too. Recipes of one backend differ by dash and marker.
const COLORS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6d31", "#7b61b8", "#9a9a9a", "#b03a5b",
  "#4f8f2f", "#444e86"];
const DASHES = ["", "7 4", "2 3", "9 3 2 3"];
const MARKERS = ["circle", "square", "triangle", "diamond"];
const STAGE_ORDER = ["layer", "layer_with_plan", "pre_dispatch", "routing", "gate_up", "down", "combine"];

const unique = (values) => [...new Set(values)];
const recipeOf = (r) => `${r.mma_type} ${r.act_scale}${r.numerics === "trtllm_gen" ? " trtllm" : ""}`;
const nameOf = (r) => `${r.backend} ${recipeOf(r)}`;
const backends = unique(records.map((r) => r.backend));
const series = unique(records.map(nameOf)).map((name) => {
  const first = records.find((r) => nameOf(r) === name);
  const siblings = unique(records.filter((r) => r.backend === first.backend).map(recipeOf));
  const nth = siblings.indexOf(recipeOf(first));
  return { name, color: COLORS[backends.indexOf(first.backend) % COLORS.length], dash: DASHES[nth % 4],
    marker: MARKERS[nth % 4], own: first.backend.startsWith("triton") && first.backend !== "triton_kernels" };
});
const seriesOf = (r) => series.find((s) => s.name === nameOf(r));
const hidden = new Set();
const choice = {};

const fmt = (x, digits = 3) => {
  if (x === null || x === undefined) return "–";
  if (x !== 0 && Math.abs(x) < 1e-3) return x.toExponential(1);
  if (Math.abs(x) >= 1000) return Math.round(x).toLocaleString("en");
  return String(Number(x.toPrecision(digits)));
};

// ---- controls
const CONTROLS = [
  ["model", "Model", (r) => r.model],
  ["stage", "Stage", (r) => r.stage],
  ["routing", "Routing", (r) => r.routing],
  ["shared", "Shared experts", (r) => String(r.n_shared)],
];
for (const [key, label, get] of CONTROLS) {
  let values = unique(records.map(get));
  if (key === "stage") values.sort((a, b) => STAGE_ORDER.indexOf(a) - STAGE_ORDER.indexOf(b));
  if (key === "shared") values.sort();
  choice[key] = values[0];
  const box = document.createElement("label");
  const select = document.createElement("select");
  select.id = key;
  for (const value of values) select.add(new Option(value, value));
  select.disabled = values.length === 1;
  select.onchange = () => { choice[key] = select.value; draw(); };
  box.append(label, select);
  $("controls").append(box);
}
const chosen = () => records.filter((r) => CONTROLS.every(([key, , get]) => get(r) === choice[key]));
const visible = () => chosen().filter((r) => !hidden.has(nameOf(r)));

// ---- svg helpers
function el(parent, tag, attributes, text) {
  const node = document.createElementNS(NS, tag);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== undefined) node.textContent = text;
  parent.append(node);
  return node;
}
function canvas(id, width, height, label) {
  $(id).replaceChildren();
  const svg = el($(id), "svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label });
  return svg;
}
function empty(id, text) {
  const p = document.createElement("p");
  p.className = "dim";
  p.textContent = text;
  $(id).replaceChildren(p);
}
function logScale(low, high, from, to) {
  const a = Math.log(low), b = Math.log(high) === a ? a + 1 : Math.log(high);
  return (x) => from + ((Math.log(x) - a) / (b - a)) * (to - from);
}
function decades(low, high) {
  const ticks = [];
  for (let p = Math.floor(Math.log10(low)); p <= Math.ceil(Math.log10(high)); p++)
    for (const m of [1, 2, 5]) if (m * 10 ** p >= low * 0.999 && m * 10 ** p <= high * 1.001) ticks.push(m * 10 ** p);
  return ticks.length > 9 ? ticks.filter((t) => Math.abs(Math.log10(t) - Math.round(Math.log10(t))) < 1e-9) : ticks;
}
function marker(svg, kind, x, y, color, size = 4) {
  const common = { fill: color, stroke: "var(--bg)", "stroke-width": 1 };
  const s = size;
  if (kind === "circle") return el(svg, "circle", { cx: x, cy: y, r: s, ...common });
  const paths = { square: `M${x - s} ${y - s}h${2 * s}v${2 * s}h${-2 * s}z`, triangle: `M${x} ${y - 1.2 * s}l${1.2 * s} ${2.2 * s}h${-2.4 * s}z`,
    diamond: `M${x} ${y - 1.3 * s}l${1.3 * s} ${1.3 * s}l${-1.3 * s} ${1.3 * s}l${-1.3 * s} ${-1.3 * s}z` };
  return el(svg, "path", { d: paths[kind], ...common });
}
function hover(node, text) {
  node.setAttribute("tabindex", "0");
  node.setAttribute("aria-label", text);
  const show = (x, y) => {
    const tip = $("tip");
    tip.textContent = text;
    tip.style.display = "block";
    tip.style.left = `${Math.max(4, Math.min(x + 12, window.innerWidth - tip.offsetWidth - 8))}px`;
    tip.style.top = `${Math.max(4, Math.min(y + 12, window.innerHeight - tip.offsetHeight - 8))}px`;
  };
  node.addEventListener("mousemove", (event) => show(event.clientX, event.clientY));
  node.addEventListener("focus", () => { const b = node.getBoundingClientRect(); show(b.right, b.bottom); });
  for (const name of ["mouseleave", "blur"]) node.addEventListener(name, () => { $("tip").style.display = "none"; });
}
const describe = (r) => [
  `${nameOf(r)}`,
  `${r.tokens} token${r.tokens > 1 ? "s" : ""}: ${fmt(r.median_us, 4)} µs (${fmt(r.p20_us, 4)} … ${fmt(r.p80_us, 4)})`,
  `${fmt(r.useful_tflops)} TFLOP/s, weights ${fmt(r.weight_gbps)} GB/s, ${r.launches} launches`,
  r.roofline_pct === null ? "" : `${fmt(r.roofline_pct)} % of the roofline`,
  r.problem ? `WRONG: ${r.problem}` : "",
].filter(Boolean).join("\n");

// ---- legend
function drawLegend() {
  $("legend").replaceChildren();
  for (const s of series.filter((s) => chosen().some((r) => nameOf(r) === s.name))) {
    const button = document.createElement("button");
    button.setAttribute("aria-pressed", String(!hidden.has(s.name)));
    const svg = el(button, "svg", { width: 34, height: 14, viewBox: "0 0 34 14", style: "width:34px" });
    el(svg, "line", { x1: 1, x2: 33, y1: 7, y2: 7, stroke: s.color, "stroke-width": 2, "stroke-dasharray": s.dash });
    marker(svg, s.marker, 17, 7, s.color);
    button.append(s.name);
    button.onclick = () => { hidden.has(s.name) ? hidden.delete(s.name) : hidden.add(s.name); draw(); };
    $("legend").append(button);
  }
}

// ---- latency
function drawLatency() {
  const rows = visible();
  if (!rows.length) return empty("latency", "Nothing to show: every contender is hidden or none ran.");
  const W = 1200, H = 430, L = 70, R = 14, T = 10, B = 46;
  const svg = canvas("latency", W, H, "time against tokens, one line per contender");
  const tokens = unique(rows.map((r) => r.tokens)).sort((a, b) => a - b);
  const low = Math.min(...rows.map((r) => r.p20_us)) * 0.85, high = Math.max(...rows.map((r) => r.p80_us)) * 1.2;
  const x = tokens.length > 1 ? logScale(tokens[0], tokens.at(-1), L + 20, W - R - 20) : () => (L + W - R) / 2;
  const y = logScale(low, high, H - B, T);
  for (const tick of decades(low, high)) {
    el(svg, "line", { class: "grid", x1: L, x2: W - R, y1: y(tick), y2: y(tick) });
    el(svg, "text", { class: "dim", x: L - 8, y: y(tick) + 4, "text-anchor": "end" }, fmt(tick));
  }
  let last = -Infinity;
  for (const t of tokens) {
    el(svg, "line", { class: "grid", x1: x(t), x2: x(t), y1: T, y2: H - B });
    if (x(t) - last < 38) continue;
    last = x(t);
    el(svg, "text", { class: "dim", x: x(t), y: H - B + 18, "text-anchor": "middle" }, String(t));
  }
  el(svg, "text", { x: (L + W - R) / 2, y: H - 6, "text-anchor": "middle" }, "tokens");
  el(svg, "text", { x: 14, y: (T + H - B) / 2, "text-anchor": "middle", transform: `rotate(-90 14 ${(T + H - B) / 2})` }, "µs per call");
  for (const s of series) {
    const line = rows.filter((r) => nameOf(r) === s.name).sort((a, b) => a.tokens - b.tokens);
    if (!line.length) continue;
    const up = line.map((r) => `${x(r.tokens)},${y(r.p80_us)}`), down = line.map((r) => `${x(r.tokens)},${y(r.p20_us)}`).reverse();
    el(svg, "polygon", { points: [...up, ...down].join(" "), fill: s.color, opacity: 0.15 });
    el(svg, "polyline", { points: line.map((r) => `${x(r.tokens)},${y(r.median_us)}`).join(" "), fill: "none", stroke: s.color,
      "stroke-width": s.own ? 2.5 : 1.8, "stroke-dasharray": s.dash, class: "series" });
    for (const r of line) hover(marker(svg, s.marker, x(r.tokens), y(r.median_us), s.color, s.own ? 5 : 4), describe(r));
  }
}

// ---- speed-up
function drawSpeedup() {
  const rows = chosen();
  const names = series.filter((s) => rows.some((r) => nameOf(r) === s.name)).map((s) => s.name);
  const select = $("base");
  const before = select.value;
  select.replaceChildren(...names.map((name) => new Option(name, name)));
  const own = series.filter((s) => s.own && names.includes(s.name)).map((s) => s.name);
  select.value = names.includes(before) ? before : own[0] ?? names[0];
  select.onchange = drawSpeedup;
  const base = new Map(rows.filter((r) => nameOf(r) === select.value).map((r) => [r.tokens, r]));
  const others = visible().filter((r) => nameOf(r) !== select.value && base.has(r.tokens));
  if (!others.length) return empty("speedup", "There is no other contender to compare with here.");
  const W = 1200, H = 330, L = 70, R = 14, T = 12, B = 46;
  const svg = canvas("speedup", W, H, `speed-up of ${select.value} over the others`);
  const ratio = (r) => r.median_us / base.get(r.tokens).median_us;
  const low = Math.min(0.8, ...others.map(ratio)) / 1.1, high = Math.max(1.25, ...others.map(ratio)) * 1.1;
  const y = logScale(low, high, H - B, T);
  const ticks = [0.01, 0.02, 0.05, 0.1, 0.2, 0.33, 0.5, 0.67, 0.8, 1, 1.25, 1.5, 2, 3, 5, 10, 20, 50, 100].filter((t) => t >= low && t <= high);
  for (const t of ticks) {
    el(svg, "line", { class: "grid", x1: L, x2: W - R, y1: y(t), y2: y(t) });
    el(svg, "text", { class: "dim", x: L - 6, y: y(t) + 4, "text-anchor": "end" }, `${t}×`);
  }
  const tokens = unique(others.map((r) => r.tokens)).sort((a, b) => a - b);
  const group = (W - L - R) / tokens.length;
  tokens.forEach((t, index) => {
    const bars = series.map((s) => others.find((r) => r.tokens === t && nameOf(r) === s.name)).filter(Boolean);
    const width = Math.min(26, (group * 0.86) / bars.length);
    const start = L + group * (index + 0.5) - (width * bars.length) / 2;
    bars.forEach((r, n) => {
      const s = seriesOf(r), top = Math.min(y(1), y(ratio(r))), height = Math.abs(y(1) - y(ratio(r)));
      const bar = el(svg, "rect", { x: start + n * width, y: top, width: Math.max(1, width - 1), height: Math.max(1, height), fill: s.color,
        "fill-opacity": s.dash ? 0.6 : 1, class: "bar-mark" });
      hover(bar, `${r.tokens} tokens: ${nameOf(r)}\ntakes ${fmt(ratio(r))}× the time of ${select.value}\n${fmt(r.median_us, 4)} against ${fmt(base.get(t).median_us, 4)} µs`);
    });
    el(svg, "text", { class: "dim", x: L + group * (index + 0.5), y: H - B + 18, "text-anchor": "middle" }, String(t));
  });
  el(svg, "line", { x1: L, x2: W - R, y1: y(1), y2: y(1), stroke: "var(--fg)", "stroke-width": 1.5 });
  el(svg, "text", { x: (L + W - R) / 2, y: H - 6, "text-anchor": "middle" }, "tokens");
  el(svg, "text", { x: 14, y: (T + H - B) / 2, "text-anchor": "middle", transform: `rotate(-90 14 ${(T + H - B) / 2})` }, "their time / its time");
}

// ---- roofline
function drawRoofline() {
  const roof = meta.roofline;
  $("rooftext").textContent = roof
    ? `Useful TFLOP/s against FLOPs per byte that must move. Roofs measured in the same run: read ${fmt(roof.read_gbps)} GB/s, ` +
      `copy ${fmt(roof.copy_gbps)} GB/s, BF16 ${fmt(roof.bf16_tflops)}${roof.fp8_tflops ? `, FP8 ${fmt(roof.fp8_tflops)}` : ""} TFLOP/s.`
    : "No roofline was measured in this run.";
  const rows = visible().filter((r) => r.flops > 0 && r.bytes > 0);
  if (!roof) return empty("roofline", "It is measured on a GPU only.");
  if (!rows.length) return empty("roofline", "This stage does no matrix work; its share of the read bandwidth is in the table.");
  const W = 1200, H = 400, L = 70, R = 14, T = 12, B = 46;
  const svg = canvas("roofline", W, H, "TFLOP/s against FLOPs per byte, with the measured roofs");
  const top = Math.max(roof.fp8_tflops ?? 0, roof.bf16_tflops);
  const xs = rows.map((r) => r.flops / r.bytes);
  const xlow = Math.min(...xs, 1) * 0.7, xhigh = Math.max(...xs, (1000 * top) / roof.read_gbps) * 2;
  const ylow = Math.min(...rows.map((r) => r.useful_tflops)) * 0.6, yhigh = top * 1.6;
  const x = logScale(xlow, xhigh, L, W - R), y = logScale(ylow, yhigh, H - B, T);
  for (const t of decades(xlow, xhigh)) {
    el(svg, "line", { class: "grid", x1: x(t), x2: x(t), y1: T, y2: H - B });
    el(svg, "text", { class: "dim", x: x(t), y: H - B + 18, "text-anchor": "middle" }, fmt(t));
  }
  for (const t of decades(ylow, yhigh)) {
    el(svg, "line", { class: "grid", x1: L, x2: W - R, y1: y(t), y2: y(t) });
    el(svg, "text", { class: "dim", x: L - 6, y: y(t) + 4, "text-anchor": "end" }, fmt(t));
  }
  const slope = (intensity) => (intensity * roof.read_gbps) / 1000;
  const from = Math.max(xlow, (1000 * ylow) / roof.read_gbps);
  el(svg, "line", { class: "roof", x1: x(from), y1: y(slope(from)), x2: x((1000 * top) / roof.read_gbps), y2: y(top) });
  const roofs = [["BF16", roof.bf16_tflops], ...(roof.fp8_tflops ? [["FP8", roof.fp8_tflops]] : [])];
  for (const [name, rate] of roofs) {
    el(svg, "line", { class: "roof", x1: x((1000 * rate) / roof.read_gbps), x2: W - R, y1: y(rate), y2: y(rate) });
  }
  for (const r of rows) {
    const s = seriesOf(r);
    hover(marker(svg, s.marker, x(r.flops / r.bytes), y(r.useful_tflops), s.color), describe(r));
  }
  for (const [name, rate] of roofs)
    el(svg, "text", { class: "halo", x: W - R, y: y(rate) + (name === "BF16" ? 15 : -6), "text-anchor": "end" }, `${name} ${fmt(rate)} TFLOP/s`);
  const label = xlow * 4;
  if (slope(label) > ylow)
    el(svg, "text", { x: x(label) - 8, y: y(slope(label)) - 8, "text-anchor": "end" }, `read ${fmt(roof.read_gbps)} GB/s`);
  el(svg, "text", { x: (L + W - R) / 2, y: H - 6, "text-anchor": "middle" }, "FLOPs per byte");
  el(svg, "text", { x: 14, y: (T + H - B) / 2, "text-anchor": "middle", transform: `rotate(-90 14 ${(T + H - B) / 2})` }, "TFLOP/s");
}

// ---- table
const COLUMNS = [
  ["model", (r) => r.model, 1], ["tokens", (r) => r.tokens], ["shared", (r) => r.n_shared], ["routing", (r) => r.routing, 1],
  ["stage", (r) => r.stage, 1], ["backend", (r) => r.backend, 1], ["recipe", recipeOf, 1], ["µs", (r) => r.median_us],
  ["± %", (r) => r.samples < 3 ? null : (50 * (r.p80_us - r.p20_us)) / r.median_us], ["launches", (r) => r.launches],
  ["TFLOP/s", (r) => r.useful_tflops], ["weights GB/s", (r) => r.weight_gbps], ["roofline %", (r) => r.roofline_pct],
  ["rel. error", (r) => r.rel_rms], ["problem", (r) => r.problem, 1],
];
const sort = { column: 1, down: false };
function drawTable() {
  const words = $("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
  const text = (r) => [r.model, r.tokens, r.routing, r.stage, r.backend, recipeOf(r), r.problem ?? ""].join(" ").toLowerCase();
  const rows = ($("all").checked ? records : visible()).filter((r) => words.every((word) => text(r).includes(word)));
  const get = COLUMNS[sort.column][1];
  const byTime = (a, b) => a.tokens - b.tokens || a.median_us - b.median_us;
  rows.sort((a, b) => {
    const [p, q] = [get(a), get(b)];
    if (p === null || q === null) return (p === null) - (q === null) || byTime(a, b); // rows without a value come last
    const order = typeof p === "number" ? p - q : String(p).localeCompare(String(q));
    return (sort.down ? -order : order) || byTime(a, b);
  });
  // A column that says the same in every row says nothing; the controls above show it.
  const constant = ["model", "shared", "routing", "stage", "problem"];
  const shown = COLUMNS.filter(([name, value]) => !constant.includes(name) || unique(rows.map(value)).length > 1 ||
    (name === "problem" && rows.some((r) => r.problem)));
  const table = $("rows");
  table.replaceChildren();
  const head = table.createTHead().insertRow();
  shown.forEach(([name, , isText]) => {
    const index = COLUMNS.findIndex(([other]) => other === name);
    const th = document.createElement("th");
    if (isText) th.className = "text";
    th.setAttribute("aria-sort", index !== sort.column ? "none" : sort.down ? "descending" : "ascending");
    const button = document.createElement("button");
    button.textContent = name;
    button.onclick = () => { sort.down = index === sort.column && !sort.down; sort.column = index; drawTable(); };
    th.append(button);
    head.append(th);
  });
  const body = table.createTBody();
  for (const r of rows) {
    const tr = body.insertRow();
    if (r.problem) tr.className = "bad";
    for (const [name, value, isText] of shown) {
      const td = tr.insertCell();
      const v = value(r);
      if (isText) td.className = "text";
      td.textContent = typeof v !== "number" ? v ?? "–" : ["tokens", "shared", "launches"].includes(name) ? String(v) : fmt(v, name === "µs" ? 4 : 3);
      if (name === "backend" && r.note) td.title = r.note;
    }
  }
  $("count").textContent = `${rows.length} row${rows.length === 1 ? "" : "s"}`;
}

function draw() {
  drawLegend();
  drawLatency();
  drawSpeedup();
  drawRoofline();
  drawTable();
}
$("filter").oninput = drawTable;
$("all").onchange = drawTable;
const versions = Object.entries(meta.versions ?? {}).map(([name, version]) => `${name} ${version}`);
$("about").textContent = [meta.device, meta.driver && `driver ${meta.driver}`, meta.cuda && `CUDA ${meta.cuda}`, `megamoe ${meta.megamoe}`,
  ...versions, meta.date].filter(Boolean).join(" · ");
$("method").textContent = meta.method ?? "";
$("meta").textContent = JSON.stringify({ ...meta, method: undefined, skipped: undefined }, null, 1);
$("skipped").textContent = (meta.skipped ?? []).join("\n");
$("skippedbox").hidden = !(meta.skipped ?? []).length;
draw();
document.body.dataset.ready = "yes";
