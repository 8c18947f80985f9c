"use strict";
// The element `data` holds the output of `df11 inspect --json --tensors`, with names and original
// files, for one path, or for two that are compared.
const data = JSON.parse(document.getElementById("data").textContent);
const [model, other] = data.models;
const at = (id) => document.getElementById(id);
const PAGE = 200; // rows of tensors that are shown at a time

const sum = (values) => values.reduce((sum, value) => sum + value, 0);

// ---- text ----
function bytes(value) {
  const units = ["B", "kB", "MB", "GB", "TB", "PB"];
  let at = 0;
  while (value >= 999.5 && at + 1 < units.length) { value /= 1000; at += 1; }
  const digits = at === 0 || value >= 99.95 ? 0 : value >= 9.995 ? 1 : 2;
  return `${value.toFixed(digits)} ${units[at]}`;
}
const percent = (part) => `${(100 * part).toFixed(1)} %`;
const number = (value) => value.toLocaleString("en");
const bits = (value) => (value === null || value === undefined ? "–" : value.toFixed(3));
/** Bits of sign, mantissa and exponents' entropy. */
const information = ({ entropy_bits_per_weight: entropy, kept_bits_per_weight: kept }) =>
  entropy === null ? null : entropy + kept;
const count = (value, noun) => `${number(value)} ${noun}${value === 1 ? "" : "s"}`;

/** Makes elements of a namespace, with attributes and children; text is never read as markup. */
const maker = (namespace) => (name, attributes = {}, ...children) => {
  const element = document.createElementNS(namespace, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
};
const make = maker("http://www.w3.org/1999/xhtml");
const draw = maker("http://www.w3.org/2000/svg");

// ---- sizes ----
function tiles(of) {
  const stored = of.container_bytes;
  const sizes = [of.original_bytes, stored].map((each) => bytes(each).replace(" ", "\u00a0"));
  const all = [
    [sizes.join(" → "), "original files → containers"],
    [of.original_bytes ? percent(stored / of.original_bytes) : "–", "of the original size"],
    [bytes(Math.max(0, of.original_bytes - stored)), "saved"],
    [bits(of.total.bits_per_weight), "bits per weight, of 16"],
    [bits(information(of.total)), "entropy limit: sign, mantissa and exponent entropy"],
    [number(of.tensors.length),
      `tensors in ${count(of.blocks.length, "block")}, ${count(of.containers, "container")}`],
  ];
  const list = all.map(([value, name]) =>
    make("div", { class: "tile" }, make("b", {}, value), make("span", {}, name)));
  return make("div", { class: "tiles" }, ...list);
}

// ---- charts ----
const LEFT = 44, HEIGHT = 240, BOTTOM = 210, TOP = 12;

/** Bars that pointer and arrow keys choose; `tell` gives the text of one, `enter` acts on it. */
function chart({ label, bars, max, step, unit, tell, enter }) {
  const WIDTH = Math.max(240, document.querySelector("main").clientWidth);
  const y = (value) => BOTTOM - (BOTTOM - TOP) * Math.min(1, value / max);
  const svg = draw("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, "aria-hidden": "true" });
  for (let value = 0; value <= max + step / 1000; value += step) {
    const shown = `${Number(value.toFixed(4))}${unit}`;
    svg.append(
      draw("line",
        { class: value ? "grid" : "axis", x1: LEFT, x2: WIDTH, y1: y(value), y2: y(value) }),
      draw("text", { x: LEFT - 6, y: y(value) + 4, "text-anchor": "end" }, shown));
  }
  const width = (WIDTH - LEFT) / Math.max(1, bars.length);
  const gap = Math.min(4, width / 8);
  const every = Math.ceil(42 / width);
  const groups = bars.map((bar, index) => {
    const x = LEFT + width * index;
    const group = draw("g", {});
    const parts = bar.parts.length;
    bar.parts.forEach((stack, part) => {
      let from = 0;
      const each = (width - gap) / parts;
      for (const [kind, to] of stack) {
        const rect = { class: kind, x: x + gap / 2 + each * part, width: each };
        if (kind === "mark") {
          const { x: x1, width: length } = rect;
          group.append(draw("line", { class: kind, x1, x2: x1 + length, y1: y(to), y2: y(to) }));
          continue;
        }
        group.append(draw("rect", { ...rect, y: y(to), height: Math.max(0, y(from) - y(to)) }));
        from = to;
      }
    });
    // All of the height takes the pointer.
    const all = { x, y: TOP, width, height: BOTTOM - TOP, fill: "transparent", stroke: "none" };
    group.append(draw("rect", all));
    if (index % every === 0) {
      const place = { x: x + width / 2, y: BOTTOM + 18, "text-anchor": "middle" };
      svg.append(draw("text", place, bar.label));
    }
    svg.append(group);
    return group;
  });
  const caption = make("figcaption", { "aria-live": "polite" });
  const attributes = { tabindex: "0", role: "group", "aria-label": label };
  const figure = make("figure", attributes, svg, caption);
  let chosen = -1;
  const choose = (index) => {
    groups[chosen]?.classList.remove("chosen");
    chosen = Math.max(0, Math.min(bars.length - 1, index));
    groups[chosen]?.classList.add("chosen");
    if (bars.length) caption.textContent = tell(bars[chosen]);
  };
  groups.forEach((group, index) => {
    group.addEventListener("pointerenter", () => choose(index));
    group.addEventListener("click", () => { choose(index); enter?.(bars[index]); });
  });
  figure.addEventListener("keydown", (event) => {
    const last = bars.length - 1;
    const keys = { ArrowRight: chosen + 1, ArrowLeft: chosen - 1, Home: 0, End: last };
    const to = keys[event.key];
    if (to !== undefined) choose(to);
    else if (event.key === "Enter" && chosen >= 0) enter?.(bars[chosen]);
    else return;
    event.preventDefault();
  });
  return figure;
}

function legend(...entries) {
  const list = entries.map(([color, name]) =>
    make("span", {}, make("i", { style: `background: var(--${color})` }), name));
  return make("p", { class: "legend" }, ...list);
}

/** Sign and mantissa, what is stored above them, and where the entropy ends. */
function stack(block, kind) {
  const { bits_per_weight: stored, kept_bits_per_weight: kept } = block;
  const parts = [["plane", Math.min(kept, stored)], [kind, stored]];
  if (information(block) !== null) parts.push(["mark", information(block)]);
  return parts;
}

function blockChart() {
  const others = new Map((other?.blocks ?? []).map((block) => [block.name, block]));
  // The end of a name tells blocks apart; all of it is in the caption.
  const short = (name) => {
    const end = name.split(/[./]/).pop();
    return end.length <= 8 ? end : `${end.slice(0, 7)}…`;
  };
  const bars = model.blocks.filter((block) => block.weights > 0).map((block) => {
    const twin = others.get(block.name);
    const parts = [stack(block, "code")];
    if (twin && twin.weights > 0) parts.push(stack(twin, "other"));
    return { block, twin, parts, label: short(block.name) };
  });
  if (!bars.length) return make("p", {}, "There are no BF16 weights.");
  const code = other ? `exponent, ${model.name}` : "exponent, as stored";
  const names = [["plane", "sign and mantissa"], ["code", code]];
  if (other) names.push(["other", `exponent, ${other.name}`]);
  names.push(["mark", "entropy limit"]);
  const tell = ({ block, twin }) => {
    const text = `${block.name}: ${bits(block.bits_per_weight)} bits per weight, `
      + `${bytes(block.decoded_bytes)} → ${bytes(block.stored_bytes)}, `
      + count(block.tensor_count, "tensor");
    if (!twin) return text;
    return `${text}; ${other.name}: ${bits(twin.bits_per_weight)}, ${bytes(twin.stored_bytes)}`;
  };
  const enter = ({ block }) => search(`block:${block.name}`);
  const label = "Bits per weight by block";
  const figure = chart({ label, bars, max: 16, step: 4, unit: "", tell, enter });
  return make("div", {}, legend(...names), figure);
}

function exponentChart() {
  const counts = model.exponents;
  const total = counts ? sum(counts) : 0;
  if (!total) {
    at("entropy").textContent = counts ? "There are no BF16 weights." : "They were not counted.";
    return "";
  }
  const shares = counts.map((one) => one / total);
  const common = shares.map((share) => share >= 0.0005);
  const [first, last] = [common.indexOf(true), common.lastIndexOf(true)];
  const outside = 1 - sum(shares.slice(first, last + 1));
  const occur = shares.filter((share) => share).length;
  const entropy = model.total.entropy_bits_per_weight;
  at("entropy").textContent = `The 8 bits of an exponent carry ${bits(entropy)} bits of `
    + `information: ${occur} of 256 values occur, ${percent(outside)} of them outside this range. `
    + "A weight is ±1.m × 2^(e − 127).";
  const most = Math.max(...shares);
  const step = [0.01, 0.02, 0.05, 0.1].find((step) => most / step <= 6) ?? 0.2;
  const bars = shares.slice(first, last + 1).map((share, index) =>
    ({ exponent: first + index, parts: [[["code", 100 * share]]], label: String(first + index) }));
  const tell = ({ exponent }) => `exponent ${exponent}: `
    + `${(100 * shares[exponent]).toFixed(3)} %, ${count(counts[exponent], "weight")}`;
  const max = 100 * step * Math.ceil(most / step);
  return chart({ label: "Exponents", bars, max, step: 100 * step, unit: " %", tell });
}

// ---- tables ----
function table(columns, rows) {
  const head = columns.map(([name, kind]) => make("th", { class: kind, scope: "col" }, name));
  const cell = (text, [label, kind]) => make("td", { class: kind, "data-label": label },
    ...(kind.includes("name") ? parts(text) : [text]));
  const body = rows.map((row) =>
    make("tr", {}, ...row.map((text, index) => cell(text, columns[index]))));
  return make("div", { class: "scroll" },
    make("table", {}, make("thead", {}, make("tr", {}, ...head)), make("tbody", {}, ...body)));
}

/** A text whose lines break after dots rather than within a word. */
function parts(text) {
  return text.split(/(?<=\.)(?=\D)/).flatMap((part, at) => (at ? [make("wbr", {}), part] : [part]));
}

/** Shows the rows of tables as lists if their columns do not fit. */
function fitTables() {
  for (const area of document.querySelectorAll(".scroll")) {
    area.classList.remove("stacked");
    area.classList.toggle("stacked", area.scrollWidth > area.clientWidth);
  }
}

function rawTable() {
  const groups = new Map();
  for (const tensor of model.tensors) {
    if (!tensor.reason) continue;
    const key = `${tensor.dtype}\n${tensor.why}`;
    const group = groups.get(key) ?? { ...tensor, tensors: 0, bytes: 0 };
    group.tensors += 1;
    group.bytes += tensor.stored_bytes;
    groups.set(key, group);
  }
  if (!groups.size) return make("p", {}, "Nothing: all tensors are compressed.");
  const rows = [...groups.values()].sort((a, b) => b.bytes - a.bytes);
  return table([["dtype", "text"], ["why", "text name"], ["tensors", ""], ["stored", ""]],
    rows.map((group) => [group.dtype, group.why, number(group.tensors), bytes(group.bytes)]));
}

const COLUMNS = [
  ["tensor", "text name", "name"], ["block", "text name", "block"], ["dtype", "text", "dtype"],
  ["shape", "text", "shape"], ["encoding", "text", "encoding"],
  ["decoded", "", "decoded_bytes"], ["stored", "", "stored_bytes"],
  ["bits/weight", "", "bits_per_weight"], ["entropy limit", "", "entropy_bits_per_weight"],
];
if (other) COLUMNS.push([`stored, ${other.name}`, "", "twin"], ["same bits", "text", "same"]);
let sorted = null, descending = false, shown = PAGE, wanted = "";

function matching() {
  const exact = wanted.startsWith("block:") ? wanted.slice(6) : null;
  const words = exact === null ? wanted.toLowerCase().split(/\s+/).filter(Boolean) : [];
  const rows = model.tensors.filter((tensor) => exact === null
    ? words.every((word) => tensor.text.includes(word))
    : tensor.block === exact);
  if (sorted === null) return rows;
  const order = (a, b) => {
    const [x, y] = [a[sorted] ?? -1, b[sorted] ?? -1];
    if (typeof x !== "string") return x - y;
    return x.localeCompare(String(y), "en", { numeric: true });
  };
  return rows.slice().sort((a, b) => (descending ? order(b, a) : order(a, b)));
}

function cells(tensor) {
  const encoding = tensor.reason ? `${tensor.encoding} (${tensor.reason})` : tensor.encoding;
  const row = [tensor.name, tensor.block, tensor.dtype, tensor.shape.join("\u00a0×\u00a0"), encoding,
    bytes(tensor.decoded_bytes), bytes(tensor.stored_bytes), bits(tensor.bits_per_weight),
    bits(information(tensor))];
  if (other) row.push(tensor.twin === null ? "–" : bytes(tensor.twin), same(tensor));
  return row;
}
const same = (tensor) => (tensor.same === null ? "not there" : tensor.same ? "yes" : "no");

function list() {
  const rows = matching();
  const area = at("tensors");
  const focused = document.activeElement?.dataset?.key;
  area.replaceChildren(table(COLUMNS, rows.slice(0, shown).map(cells)));
  area.querySelectorAll("th").forEach((head, index) => {
    const key = COLUMNS[index][2];
    const button = make("button", { type: "button", "data-key": key }, head.textContent);
    const up = sorted === key ? (descending ? "descending" : "ascending") : "none";
    head.setAttribute("aria-sort", up);
    if (up !== "none") button.append(descending ? " ↓" : " ↑");
    button.addEventListener("click", () => {
      descending = sorted === key && !descending;
      sorted = key;
      list();
    });
    head.replaceChildren(button);
    if (key === focused) button.focus();
  });
  fitTables();
  at("found").textContent = `${number(rows.length)} of ${count(model.tensors.length, "tensor")}`;
  at("more").hidden = rows.length <= shown;
}

function search(text) {
  at("query").value = text;
  wanted = text.trim();
  shown = PAGE;
  list();
  at("h-tensors").scrollIntoView();
}

// ---- comparison ----
function comparison() {
  const tensors = model.tensors;
  const kinds = [
    [`in ${other.name} too, with the same bits`, tensors.filter((tensor) => tensor.same === true)],
    ["in both, with other bits", tensors.filter((tensor) => tensor.same === false)],
    [`in ${model.name} alone`, tensors.filter((tensor) => tensor.same === null)],
    [`in ${other.name} alone`, other.tensors.filter((tensor) => tensor.same === null)],
  ];
  const files = new Map(other.files.map((file) => [file.path, file.hash]));
  const equal = model.files.filter((file) => files.get(file.path) === file.hash).length;
  const verdict = model.identity === other.identity
    ? "The same identity: both give back the same files, byte for byte."
    : `Different identities: ${equal} of ${number(model.files.length)} files are the same.`;
  const columns = [
    ["tensors", "text"], ["number", ""], ["stored", ""], ["first names", "text name"],
  ];
  const rows = kinds.map(([name, list]) => [
    name, number(list.length), bytes(sum(list.map((tensor) => tensor.stored_bytes))),
    list.slice(0, 3).map((tensor) => tensor.name).join(", ") + (list.length > 3 ? ", …" : ""),
  ]);
  return make("div", {}, make("p", {}, verdict), table(columns, rows));
}

// ---- the page ----
const THEMES = ["system", "light", "dark"];
function setTheme(theme) {
  if (theme === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  at("theme").textContent = `Theme: ${theme}`;
}

/** Why a tensor is not compressed, in short and in a sentence. */
function reason({ encoding, dtype, decoded_bytes, target }) {
  if (encoding === "alias") return [null, `the same bytes as ${target}`];
  if (encoding !== "raw") return [null, ""];
  if (!data.coded_dtypes.includes(dtype)) {
    return ["not compressed", "not a float of 8, 16 or 32 bits"];
  }
  if (decoded_bytes < data.small_bytes) {
    return ["small", "a tensor this small would save almost nothing"];
  }
  // The container does not tell which.
  return ["would not shrink, or --layout raw",
    "its codes would take more bytes than they save, or --layout raw was given"];
}

/** Joins the components of a pipeline; names begin with their folders. */
function join(of) {
  const parts = of.components ?? [of];
  const name = (part, name) => (part.component ? `${part.component}/${name}` : name);
  of.identity = parts[parts.length - 1].identity;
  of.containers = sum(parts.map((part) => part.shards.length));
  of.original_bytes = sum(of.files.map((file) => file.stored ?? 0));
  of.exponents = parts.every((part) => part.exponents)
    ? parts[0].exponents.map((_, at) => sum(parts.map((part) => part.exponents[at]))) : null;
  of.blocks = parts.flatMap((part) => part.blocks.map((block) => {
    block.name = name(part, block.name);
    for (const tensor of block.tensors) prepare(tensor, block.name, name(part, tensor.name));
    return block;
  }));
  of.tensors = of.blocks.flatMap((block) => block.tensors);
}

function prepare(tensor, block, name) {
  const [short, why] = reason(tensor);
  const text = [name, block, tensor.dtype, tensor.encoding, why].join(" ").toLowerCase();
  Object.assign(tensor, { name, block, reason: short, why, text });
}

/** Tells of each tensor what the other path has under its name. */
function compare(of, others) {
  const twins = new Map(others.map((tensor) => [tensor.name, tensor]));
  for (const tensor of of.tensors) {
    const twin = twins.get(tensor.name);
    tensor.twin = twin ? twin.stored_bytes : null;
    tensor.same = twin ? twin.hash === tensor.hash : null;
  }
}

function drawCharts() {
  at("blocks").replaceChildren(blockChart());
  at("exponents").replaceChildren(exponentChart());
}

function show() {
  data.models.forEach(join);
  if (other) {
    compare(model, other.tensors);
    compare(other, model.tensors);
  }
  at("title").textContent = data.models.map((each) => each.name).join(" and ");
  at("about").textContent = `identity ${model.identity} · df11 ${data.version}`;
  for (const missing of model.missing_components ?? []) {
    at("about").append(make("p", { class: "bad" }, `missing: ${missing}`));
  }
  for (const each of data.models) {
    if (other) at("sizes").append(make("p", { class: "names" }, each.name));
    at("sizes").append(tiles(each));
  }
  drawCharts();
  at("raw").append(rawTable());
  at("compare-section").hidden = !other;
  if (other) at("compare").append(comparison());
  const columns = [["path", "text name"], ["kind", "text"], ["bytes", ""], ["BLAKE3", "text name"]];
  at("files").append(table(columns,
    model.files.map((file) => [file.path, file.kind, number(file.length), file.hash])));

  // Options after # in the address: q=… searches, theme=… chooses.
  const asked = new URLSearchParams(location.hash.slice(1));
  let theme = THEMES.includes(asked.get("theme")) ? asked.get("theme") : "system";
  setTheme(theme);
  const next = () => setTheme(theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length]);
  at("theme").addEventListener("click", next);
  at("query").value = wanted = asked.get("q") ?? "";
  list();
  at("query").addEventListener("input", () => {
    wanted = at("query").value.trim();
    shown = PAGE;
    list();
  });
  at("search").addEventListener("submit", (event) => event.preventDefault());
  let width = innerWidth;
  addEventListener("resize", () => {
    if (width === innerWidth) return; // as a keyboard that opens
    width = innerWidth;
    drawCharts();
    fitTables();
  });
  at("more").addEventListener("click", () => { shown += PAGE; list(); });
  document.addEventListener("keydown", (event) => {
    const typing = document.activeElement === at("query");
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "/" && !typing) at("query").focus();
    else if (event.key === "Escape" && typing) search("");
    else if (event.key === "t" && !typing) next();
    else return;
    event.preventDefault();
  });
}
show();
