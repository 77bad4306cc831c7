// Numbers, colours and small DOM pieces; data reaches the page as text only, never as markup.

export const TIER_COLOURS = ["#009e73", "#56b4e9", "#e69f00", "#d55e00", "#cc79a7"]; // Okabe and Ito
export const LOCAL_COLOUR = "#8f99a8";
export const PARTS = [ // Tol's bright scheme
  ["queue", "admission queue", "#bbbbbb"],
  ["prefill", "prefill", "#4477aa"],
  ["transfer", "transfer + wait", "#ee6677"],
  ["first_step", "first step", "#ccbb44"],
];
const RAMPS = { // low to high load
  dark: [[45, 62, 98], [62, 96, 130], [124, 123, 120], [190, 168, 98], [252, 225, 85]], // cividis with a lifted foot
  light: [[214, 228, 243], [158, 196, 226], [88, 150, 200], [33, 98, 163], [8, 42, 98]], // ColorBrewer blues
};
const light = matchMedia("(prefers-color-scheme: light)");

const GAP = "\u00a0"; // keeps a number and its unit on one line

export const theme = () => (light.matches ? "light" : "dark");
export const onTheme = (call) => light.addEventListener("change", call);

export function loadColour(load) {
  const ramp = RAMPS[theme()];
  const place = Math.min(Math.max(load, 0), 1) * (ramp.length - 1);
  const k = Math.min(Math.floor(place), ramp.length - 2);
  return `rgb(${ramp[k].map((low, c) => Math.round(low + (ramp[k + 1][c] - low) * (place - k))).join(",")})`;
}

export const rampGradient = () =>
  `linear-gradient(90deg, ${[0, 0.25, 0.5, 0.75, 1].map(loadColour).join(",")})`;

export function seconds(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size < 1e-3) return `${figures(value * 1e6)}${GAP}µs`;
  if (size < 1) return `${figures(value * 1e3)}${GAP}ms`;
  return size < 120 ? `${figures(value)}${GAP}s` : `${Math.round(value / 60)}${GAP}min`;
}

export function bytes(value) {
  const units = ["B", "KB", "MB", "GB", "TB"];
  let step = 0;
  for (; value >= 1000 && step < units.length - 1; step += 1) value /= 1000;
  return `${figures(value)}${GAP}${units[step]}`;
}

export function tokens(value) {
  if (value === null || value === undefined) return "–";
  return value >= 1e6 ? `${figures(value / 1e6)}M` : value >= 1e3 ? `${figures(value / 1e3)}K` : figures(value);
}

export const figures = (value) =>
  Math.abs(value) >= 100 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(3)));

export const percent = (share) => `${Math.round(share * 100)}${GAP}%`;

export function clock(at) {
  const whole = Math.floor(at);
  const two = (number) => String(number).padStart(2, "0");
  return `${Math.floor(whole / 3600)}:${two(Math.floor(whole / 60) % 60)}:${two(whole % 60)}`;
}

export function term(name, value, tiers) {
  if (value === null || value === undefined) return "–";
  if (name === "tier") return tiers[value] ?? String(value);
  if (name === "simulated") return value ? "yes" : "no";
  if (name.endsWith("_bytes_per_s")) return `${bytes(value)}/s`;
  if (name.endsWith("_s")) return seconds(value);
  if (name.endsWith("_bytes")) return bytes(value);
  if (name.endsWith("_share") || name === "congestion") return percent(value);
  return figures(value);
}

export const isTime = (name) => name.endsWith("_s") && !name.endsWith("_per_s");

export function element(tag, className = "", text = "") {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== "") made.textContent = text;
  return made;
}

export function setText(target, text) { // an equal text must not trigger screen readers and layout
  if (target.textContent !== text) target.textContent = text;
}

export function key(colour, text, block = false) {
  const made = element("span", "key");
  const swatch = element("span", block ? "swatch block" : "swatch");
  swatch.style.background = colour;
  made.append(swatch, text);
  return made;
}

// A bar of [width share, colour, title] segments; elements are created only when the number of segments changes.
export function fillBar(bar, segments) {
  while (bar.children.length < segments.length) bar.append(document.createElement("i"));
  while (bar.children.length > segments.length) bar.lastChild.remove();
  segments.forEach(([share, colour, title], k) => {
    const segment = bar.children[k];
    segment.style.width = `${(share * 100).toFixed(2)}%`;
    segment.style.background = colour;
    segment.title = title;
  });
}

export function barRow(policy, count, names = []) {
  const node = element("div", "row"), head = element("header"), name = element("span", "name", policy), line = element("span", "figures");
  head.append(name, line);
  node.append(head);
  const bars = Array.from({ length: count }, (_, k) => {
    const bar = element("div", "bar");
    bar.setAttribute("role", "img");
    if (names[k]) node.append(element("span", "label", names[k]));
    node.append(bar);
    return bar;
  });
  return { node, figures: line, bars };
}

export function fillTable(table, head, rows) { // cells are kept; only their texts change
  const top = table.tHead, body = table.tBodies[0];
  if (!top.rows.length) top.insertRow().append(...head.map(() => { const cell = element("th"); cell.scope = "col"; return cell; }));
  head.forEach((text, k) => setText(top.rows[0].cells[k], text));
  while (body.rows.length < rows.length) { const row = body.insertRow(); for (const _ of head) row.insertCell(); }
  while (body.rows.length > rows.length) body.deleteRow(-1);
  rows.forEach((texts, k) => texts.forEach((text, column) => { if (text !== "") setText(body.rows[k].cells[column], text); }));
}

// The datacenter of every instance, by position.
export function datacentersOf(layout) {
  const names = new Array(layout.instances.length).fill("");
  const walk = (place, datacenter) => {
    const here = place.kind === "datacenter" ? place.name : datacenter;
    for (const index of place.instances) names[index] = here;
    for (const child of place.children) walk(child, here);
  };
  walk(layout.root, "");
  return names;
}

export const roleNow = (layout, tick, k) => tick?.load.offload?.roles[layout.instances[k].name] ?? layout.instances[k].role;

// State of a WAN path: "" in use, or why nothing is sent over it; [short, long].
const PATH_STATES = {
  "": ["", "in use"],
  shut: ["closed", "closed, no KV arrives"],
  trying: ["closed, probing", "closed, one request probes"],
  full: ["full", "full of other traffic"],
  empty: ["idle", "no instance is up"],
};
export const pathStateTexts = (state) => PATH_STATES[state];
export const isShut = (state) => state !== "" && state !== "empty";

export function pathState(site, up) { // `up`: whether an instance of the site is up; the core treats all as down while the path is closed
  if (site.wan_path === "open") return "shut";
  if (site.wan_path === "half-open") return "trying";
  if (site.open) return "";
  return up ? "full" : "empty";
}

const MOST_FACTOR = 8; // largest value at the top of a chart, as a multiple of the current one

// Values over the last minutes. Lines have a logarithmic scale, because values change by factors; an area is a share of one.
export class Chart {
  static most_s = 300;
  static least_s = 60;
  static gap_s = 5; // longest interval that a line crosses; after a longer one, there were no samples

  constructor(courses, words = percent) { // courses: [name, colour, "line" | "dashed" | "area"]
    this.courses = courses;
    this.words = words;
    this.node = element("div", "chart");
    const picture = drawn("svg", { viewBox: "0 0 100 100", preserveAspectRatio: "none", role: "img" });
    this.shut = drawn("path", { class: "shut" });
    this.paths = courses.map(([, colour, kind]) => drawn("path", {
      class: kind, ...(kind === "area" ? { fill: colour, stroke: "none" } : { stroke: colour, fill: "none" }),
    }));
    picture.append(...this.paths, this.shut);
    [this.high, this.low, this.since, this.now] = ["high", "low", "since", "now"].map((place) => element("span", place));
    setText(this.now, "now");
    this.node.append(picture, this.high, this.low, this.since, this.now);
    this.picture = picture;
  }

  draw(samples, label) { // samples: {at, shut, and a value for each course}, ascending
    const end = samples[samples.length - 1].at, span = Math.min(Math.max(end - samples[0].at, Chart.least_s), Chart.most_s);
    const shares = this.courses[0][2] === "area";
    const values = shares ? [0, 1] : samples.flatMap((sample) => this.courses.map(([name]) => sample[name])).filter((value) => value > 0);
    // A threshold has its largest value until the first search; that must not flatten later values.
    const most = shares ? 1 : MOST_FACTOR * Math.max(...values.slice(-this.courses.length));
    const [low, high] = [Math.min(...values) / (shares ? 1 : 1.25), Math.min(Math.max(...values), most) * (shares ? 1 : 1.25)];
    const x = (at) => (100 * (1 - (end - at) / span)).toFixed(2);
    const y = (value) => (shares ? 100 * (1 - value) : 100 * (1 - Math.log(Math.min(value, high) / low) / Math.log(high / low))).toFixed(2);
    this.courses.forEach(([name], k) => this.paths[k].setAttribute("d", shares ? area(samples, name, x, y) : steps(samples, name, x, y)));
    this.shut.setAttribute("d", hatched(samples, x, span / 60));
    setText(this.high, this.words(high));
    setText(this.low, this.words(low));
    setText(this.since, `${seconds(Math.round(span))} ago`);
    this.picture.setAttribute("aria-label", label);
  }
}

export function drawn(tag, attributes) {
  const made = document.createElementNS(document.getElementById("blank").namespaceURI, tag); // avoids a URL in the script
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

const follows = (samples, k) => k > 0 && samples[k].at - samples[k - 1].at <= Chart.gap_s;

function steps(samples, name, x, y) {
  return samples.map((sample, k) => {
    const value = sample[name];
    if (!(value > 0)) return "";
    return follows(samples, k) && samples[k - 1][name] > 0 ? `H${x(sample.at)}V${y(value)}` : `M${x(sample.at)} ${y(value)}`;
  }).join("");
}

function area(samples, name, x, y) {
  return samples.map((sample, k) => (follows(samples, k) && samples[k - 1][name] !== null
    ? `M${x(samples[k - 1].at)} 100V${y(samples[k - 1][name])}H${x(sample.at)}V100Z` : "")).join("");
}

function hatched(samples, x, step) { // vertical strokes, so that the state is shown by shape and not by colour alone
  return samples.map((sample, k) => {
    if (!sample.shut || !follows(samples, k)) return "";
    const strokes = [];
    for (let at = step * Math.ceil(samples[k - 1].at / step); at < sample.at; at += step) strokes.push(`M${x(at)} 0V100`);
    return strokes.join("");
  }).join("");
}
