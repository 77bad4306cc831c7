// Numbers, colours and small DOM pieces; data reaches the page as text only, never as markup.

export const TIER_COLOURS = ["#009e73", "#56b4e9", "#e69f00", "#d55e00", "#cc79a7"]; // Okabe and Ito
export const LOCAL_COLOUR = "#8f99a8";
export const PARTS = [ // Tol's bright scheme
  ["queue", "queue at the door", "#bbbbbb"],
  ["prefill", "prefill", "#4477aa"],
  ["transfer", "transfer + wait", "#ee6677"],
  ["first_step", "first step", "#ccbb44"],
];
const RAMPS = { // low to high load
  dark: [[45, 62, 98], [62, 96, 130], [124, 123, 120], [190, 168, 98], [252, 225, 85]], // cividis with a lifted foot
  light: [[214, 228, 243], [158, 196, 226], [88, 150, 200], [33, 98, 163], [8, 42, 98]], // ColorBrewer blues
};
const light = matchMedia("(prefers-color-scheme: light)");

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
  if (size < 1e-3) return `${figures(value * 1e6)} µs`;
  if (size < 1) return `${figures(value * 1e3)} ms`;
  return size < 120 ? `${figures(value)} s` : `${Math.round(value / 60)} min`;
}

export function bytes(value) {
  const units = ["B", "KB", "MB", "GB", "TB"];
  let step = 0;
  for (; value >= 1000 && step < units.length - 1; step += 1) value /= 1000;
  return `${figures(value)} ${units[step]}`;
}

export const figures = (value) =>
  Math.abs(value) >= 100 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(3)));

export const percent = (share) => `${Math.round(share * 100)} %`;

export function clock(at) {
  const whole = Math.floor(at);
  const two = (number) => String(number).padStart(2, "0");
  return `${Math.floor(whole / 3600)}:${two(Math.floor(whole / 60) % 60)}:${two(whole % 60)}`;
}

export function term(name, value, tiers) {
  if (value === null || value === undefined) return "–";
  if (name === "tier") return tiers[value] ?? String(value);
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

export function setText(target, text) { // an equal text must not wake screen readers and layout
  if (target.textContent !== text) target.textContent = text;
}

export function key(colour, text, block = false) {
  const made = element("span", "key");
  const swatch = element("span", block ? "swatch block" : "swatch");
  swatch.style.background = colour;
  made.append(swatch, text);
  return made;
}

// A bar of [width share, colour, title] segments, made anew only where the number of segments changes.
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
