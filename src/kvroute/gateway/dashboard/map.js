// The cluster as a map on one canvas: domains as frames, instances as tiles, KV transfers as moving lines.

import { LOCAL_COLOUR, TIER_COLOURS, loadColour, onTheme } from "./format.js";

const UP = 0, BREAKER = 1, LOAD = 5; // places in a tile
const SHOW_MS = 800; // the shortest time a transfer is shown: most are over sooner
const MOVING_MOST = 160;
const TILE_MOST = 58, TILE_LEAST = 4;
const still = matchMedia("(prefers-reduced-motion: reduce)");

// Domains that hold instances, with the lists that drawing needs; a level without a name has no frame.
function domainOf(place) {
  if (place.kind === "node") return place.instances.length ? { ...place, children: [] } : null;
  const children = place.children.map(domainOf).filter(Boolean);
  return children.length ? { ...place, children } : null;
}

// Put boxes side by side, wrapping at `width`; gives positions and the size of the whole.
function flow(boxes, width, gap) {
  let x = 0, y = 0, line = 0, most = 0;
  for (const box of boxes) {
    if (x > 0 && x + box.w > width) { x = 0; y += line + gap; line = 0; }
    box.x = x; box.y = y;
    x += box.w + gap;
    line = Math.max(line, box.h);
    most = Math.max(most, x - gap);
  }
  return { w: most, h: y + line };
}

function square(boxes, gap, aspect) { // the width at which flowing boxes come closest to an aspect
  const area = boxes.reduce((sum, box) => sum + (box.w + gap) * (box.h + gap), 0);
  return Math.max(Math.sqrt(area * aspect), ...boxes.map((box) => box.w));
}

// The box of a domain: { kind, name, x, y, w, h, children, tiles }, positions relative to the parent's inside.
function boxOf(place, plan, width) {
  const { tile, aspect } = plan, gap = Math.max(1, tile * 0.16);
  const box = { kind: place.kind, name: place.name, children: [], tiles: [], pad: 0, top: 0 };
  if (place.kind === "node") {
    const columns = Math.min(place.instances.length, 8);
    place.instances.forEach((index, k) => {
      box.tiles.push({ index, x: (k % columns) * (tile + gap), y: Math.floor(k / columns) * (tile + gap) });
    });
    const rows = Math.ceil(place.instances.length / columns);
    return Object.assign(box, { w: columns * (tile + gap) - gap, h: rows * (tile + gap) - gap });
  }
  const framed = place.name !== "" && place.kind !== "cluster";
  box.pad = framed ? Math.max(2, tile * 0.22) : 0;
  box.top = framed ? labelHeight(place.kind, tile) : 0;
  const between = place.kind === "rack" ? gap * 1.4 : Math.max(3, tile * 0.34);
  const inside = width - 2 * box.pad;
  box.children = place.children.map((child) => boxOf(child, plan, inside));
  let size;
  if (place.kind === "rack") { // a rack's nodes stand on one another, at most 8 high
    const columns = Math.ceil(box.children.length / 8);
    const wide = Math.max(...box.children.map((child) => child.w));
    size = flow(box.children, columns * (wide + between), between);
  } else {
    const most = place.kind === "cluster" ? inside : Math.min(inside, square(box.children, between, aspect));
    size = flow(box.children, most + 0.01, between);
  }
  return Object.assign(box, { w: size.w + 2 * box.pad, h: size.h + box.top + box.pad });
}

const labelHeight = (kind, tile) => (kind === "rack" ? (tile >= 12 ? 14 : Math.max(2, tile * 0.2)) : 17);

// The largest tiles with which the cluster fits; beyond the smallest the map grows downwards instead.
export function planOf(root, width, height) {
  let best = null;
  for (const aspect of [0.6, 1, 1.6, 2.4, 4, 8]) {
    for (let tile = TILE_MOST; tile >= TILE_LEAST; tile -= tile > 16 ? 1 : 0.5) {
      if (best && tile < best.tile) break;
      const box = boxOf(root, { tile, aspect }, width);
      const fits = box.w <= width + 0.5 && box.h <= height;
      if (fits || tile === TILE_LEAST) {
        const better = !best || (fits && (!best.fits || tile > best.tile || box.h < best.box.h));
        if (better) best = { tile, aspect, box, fits };
        break;
      }
    }
  }
  return best;
}

export class ClusterMap {
  constructor(canvas, inspect) {
    this.canvas = canvas;
    this.inspect = inspect;
    this.back = document.createElement("canvas"); // all but the transfers; drawn when data come, not per frame
    this.tiles = [];
    this.moving = new Map();
    this.values = [];
    this.layout = null;
    this.chosen = -1;
    this.frame = 0;
    this.repeats = false; // a saved page has no further ticks: its transfers start again
    new ResizeObserver(() => this.resize()).observe(canvas);
    onTheme(() => this.redraw());
    canvas.addEventListener("pointermove", (event) => this.choose(this.at(event)));
    canvas.addEventListener("pointerleave", () => { if (document.activeElement !== canvas) this.choose(-1); });
    canvas.addEventListener("keydown", (event) => this.key(event));
    canvas.addEventListener("focus", () => this.choose(this.chosen < 0 ? 0 : this.chosen));
    canvas.addEventListener("blur", () => this.choose(-1));
  }

  setLayout(layout) {
    this.layout = layout;
    this.root = domainOf(layout.root);
    this.moving.clear();
    this.chosen = -1;
    this.width = 0;
    this.resize();
  }

  setTick(tick) {
    this.values = tick.instances;
    const now = performance.now();
    for (const transfer of tick.transfers) this.transfer(transfer, now);
    this.redraw();
  }

  transfer(transfer, now) {
    const shown = this.moving.get(transfer.id);
    const length = Math.max(SHOW_MS, 1000 * (transfer.took_s ?? Math.max(transfer.expected_s, transfer.age_s)));
    if (shown) {
      shown.under_way = transfer.took_s === null;
      // The end is known now: no line is left behind that has landed.
      shown.ms = Math.max(length, shown.under_way ? now - shown.from + 300 : 0);
    } else if (this.moving.size < MOVING_MOST && (transfer.took_s === null || now - this.started(transfer, now) < SHOW_MS)) {
      this.moving.set(transfer.id, { ...transfer, from: this.started(transfer, now), ms: length, under_way: transfer.took_s === null });
    }
  }

  // One that is over before it was seen sets out now, so that it is seen at all.
  started(transfer, now) { return transfer.took_s === null ? now - 1000 * transfer.age_s : now - Math.min(1000 * transfer.age_s, SHOW_MS * 0.3); }

  resize() {
    if (!this.layout || !this.root) return;
    const width = Math.floor(this.canvas.clientWidth);
    if (!width || width === this.width) return;
    this.width = width;
    const aim = Math.min(Math.max(340, Math.round(width * 0.62)), Math.max(340, Math.round(innerHeight * 0.58)));
    const plan = planOf(this.root, width - 4, aim);
    this.tile = plan.tile;
    const height = Math.max(120, Math.ceil(plan.box.h) + 6);
    this.canvas.style.height = `${height}px`;
    const scale = devicePixelRatio || 1;
    for (const canvas of [this.canvas, this.back]) {
      canvas.width = Math.round(width * scale);
      canvas.height = Math.round(height * scale);
      canvas.getContext("2d").setTransform(scale, 0, 0, scale, 0, 0);
    }
    this.place(plan.box, Math.max(2, (width - plan.box.w) / 2), 3);
    this.redraw();
  }

  place(root, left, top) {
    this.tiles = new Array(this.layout.instances.length).fill(null);
    this.frames = [];
    const walk = (box, x, y) => {
      if (box.pad) this.frames.push({ ...box, x, y });
      for (const { index, x: dx, y: dy } of box.tiles) this.tiles[index] = { x: x + dx, y: y + dy };
      for (const child of box.children) walk(child, x + box.pad + child.x, y + box.top + child.y);
    };
    walk(root, left, top);
  }

  redraw() {
    if (!this.width || !this.root) return;
    const style = getComputedStyle(document.documentElement);
    this.ink = Object.fromEntries(["panel", "edge", "text", "quiet", "bad", "accent", "track"].map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
    const draw = this.back.getContext("2d");
    draw.clearRect(0, 0, this.width, this.back.height);
    for (const frame of this.frames) this.drawFrame(draw, frame);
    this.tiles.forEach((tile, index) => { if (tile) this.drawTile(draw, tile, index); });
    this.wake();
  }

  drawFrame(draw, frame) {
    const rack = frame.kind === "rack";
    draw.beginPath();
    draw.roundRect(frame.x, frame.y, frame.w, frame.h, Math.min(6, this.tile * 0.3));
    draw.fillStyle = rack ? this.ink.track : "transparent";
    draw.globalAlpha = rack ? 0.75 : 1;
    if (rack) draw.fill();
    draw.globalAlpha = 1;
    if (!rack) { draw.strokeStyle = this.ink.edge; draw.lineWidth = 1; draw.stroke(); }
    if (frame.top < 12) return;
    draw.fillStyle = this.ink.quiet;
    draw.font = `${rack ? 10 : 11}px system-ui, "DejaVu Sans", sans-serif`;
    draw.textBaseline = "alphabetic";
    const text = fitting(draw, frame.name, frame.w - 2 * frame.pad);
    draw.fillText(text, frame.x + frame.pad + (rack ? 0 : 1), frame.y + frame.top - (rack ? 4 : 5));
  }

  drawTile(draw, { x, y }, index) {
    const value = this.values[index], size = this.tile, role = this.layout.instances[index].role;
    const down = value && !value[UP], open = value && value[BREAKER] === 2, half = value && value[BREAKER] === 1;
    shape(draw, role, x, y, size);
    draw.fillStyle = !value || down ? this.ink.panel : loadColour(value[LOAD]);
    draw.fill();
    draw.lineWidth = down || open || half ? Math.max(1, size * 0.08) : 0.8;
    draw.strokeStyle = down || open || half ? this.ink.bad : this.ink.quiet;
    draw.setLineDash(half ? [2, 2] : []);
    draw.globalAlpha = down || open || half ? 1 : 0.55;
    draw.stroke();
    draw.globalAlpha = 1;
    draw.setLineDash([]);
    if (down || open) this.strike(draw, role, x, y, size, down);
    else if (size >= 18) this.letter(draw, role, x, y, size, value);
  }

  strike(draw, role, x, y, size, crossed) { // down: a cross; breaker open: hatching
    draw.save();
    shape(draw, role, x, y, size);
    draw.clip();
    draw.beginPath();
    if (crossed) {
      draw.moveTo(x, y); draw.lineTo(x + size, y + size); draw.moveTo(x + size, y); draw.lineTo(x, y + size);
    } else {
      for (let k = -size; k < size; k += Math.max(3, size / 4)) { draw.moveTo(x + k, y + size); draw.lineTo(x + k + size, y); }
    }
    draw.stroke();
    draw.restore();
  }

  letter(draw, role, x, y, size, value) {
    draw.fillStyle = inkOn(loadColour(value ? value[LOAD] : 0));
    draw.font = `600 ${Math.round(size * 0.42)}px system-ui, "DejaVu Sans", sans-serif`;
    draw.textAlign = "center";
    draw.textBaseline = "middle";
    draw.fillText(role === "both" ? "PD" : role[0].toUpperCase(), x + size / 2, y + size / 2 + 0.5);
    draw.textAlign = "left";
  }

  wake() { if (!this.frame) this.frame = requestAnimationFrame((now) => this.animate(now)); }

  animate(now) {
    this.frame = 0;
    const draw = this.canvas.getContext("2d");
    draw.clearRect(0, 0, this.width, this.canvas.height);
    draw.drawImage(this.back, 0, 0, this.width, this.back.height / (devicePixelRatio || 1));
    for (const [id, transfer] of this.moving) {
      if (this.repeats) transfer.from += transfer.ms * Math.floor(Math.max(0, now - transfer.from) / transfer.ms);
      if (now - transfer.from > transfer.ms) this.moving.delete(id);
      else this.drawTransfer(draw, transfer, Math.max(0, now - transfer.from) / transfer.ms);
    }
    if (this.chosen >= 0 && this.tiles[this.chosen]) this.drawChosen(draw);
    if (this.moving.size && !still.matches && !document.hidden) this.wake();
  }

  drawTransfer(draw, transfer, share) {
    const source = this.tiles[transfer.source], target = this.tiles[transfer.target];
    if (!source || !target) return;
    const half = this.tile / 2, a = { x: source.x + half, y: source.y + half }, b = { x: target.x + half, y: target.y + half };
    const length = Math.hypot(b.x - a.x, b.y - a.y), bend = Math.min(46, length * 0.22);
    const c = { x: (a.x + b.x) / 2 - (bend * (b.y - a.y)) / (length || 1), y: (a.y + b.y) / 2 + (bend * (b.x - a.x)) / (length || 1) };
    draw.strokeStyle = draw.fillStyle = TIER_COLOURS[transfer.tier] ?? LOCAL_COLOUR;
    draw.lineCap = "round";
    const arc = (from, to, width, alpha) => {
      draw.beginPath();
      for (let k = 0; k <= 12; k += 1) {
        const point = bezier(a, c, b, from + ((to - from) * k) / 12);
        if (k) draw.lineTo(point.x, point.y); else draw.moveTo(point.x, point.y);
      }
      draw.lineWidth = width; draw.globalAlpha = alpha; draw.stroke();
    };
    const width = Math.min(3.2, Math.max(1.2, this.tile * 0.12));
    if (still.matches) { arc(0, 1, width, 0.75); share = 1; } else { arc(0, 1, 1, 0.3); arc(Math.max(0, share - 0.28), share, width, 0.95); }
    draw.globalAlpha = 1;
    const head = bezier(a, c, b, share);
    draw.beginPath(); draw.arc(head.x, head.y, width * 1.25, 0, 7); draw.fill();
  }

  drawChosen(draw) {
    const { x, y } = this.tiles[this.chosen];
    draw.strokeStyle = this.ink.accent;
    draw.lineWidth = 2;
    draw.strokeRect(x - 2.5, y - 2.5, this.tile + 5, this.tile + 5);
  }

  at(event) {
    const x = event.offsetX, y = event.offsetY, size = this.tile + 1;
    return this.tiles.findIndex((tile) => tile && x >= tile.x - 1 && x <= tile.x + size && y >= tile.y - 1 && y <= tile.y + size);
  }

  key(event) {
    const step = { ArrowRight: [1, 0], ArrowLeft: [-1, 0], ArrowDown: [0, 1], ArrowUp: [0, -1] }[event.key];
    if (!step || !this.tiles.length) return;
    event.preventDefault();
    const from = this.tiles[Math.max(this.chosen, 0)];
    let best = this.chosen, least = Infinity;
    this.tiles.forEach((tile, index) => { // the nearest one in that direction; sideways counts double
      if (!tile || !from) return;
      const ahead = (tile.x - from.x) * step[0] + (tile.y - from.y) * step[1];
      const aside = Math.abs((tile.x - from.x) * step[1]) + Math.abs((tile.y - from.y) * step[0]);
      if (ahead > 0.5 && ahead + 2 * aside < least) { least = ahead + 2 * aside; best = index; }
    });
    this.choose(best);
  }

  choose(index) {
    if (index === this.chosen) return;
    this.chosen = index;
    this.inspect(index);
    this.wake();
  }
}

function shape(draw, role, x, y, size) { // prefill square, decode round, both a diamond
  draw.beginPath();
  if (role === "prefill") draw.roundRect(x, y, size, size, size * 0.12);
  else if (role === "decode") draw.arc(x + size / 2, y + size / 2, size / 2, 0, 7);
  else { draw.moveTo(x + size / 2, y); draw.lineTo(x + size, y + size / 2); draw.lineTo(x + size / 2, y + size); draw.lineTo(x, y + size / 2); draw.closePath(); }
}

function bezier(a, c, b, t) {
  const u = 1 - t;
  return { x: u * u * a.x + 2 * u * t * c.x + t * t * b.x, y: u * u * a.y + 2 * u * t * c.y + t * t * b.y };
}

function fitting(draw, text, width) {
  if (draw.measureText(text).width <= width) return text;
  const number = /[0-9]+$/.exec(text)?.[0]; // of a rack between racks it says as much
  if (number && draw.measureText(number).width <= width) return number;
  let kept = text.length - 1;
  while (kept > 0 && draw.measureText(`${text.slice(0, kept)}…`).width > width) kept -= 1;
  return kept > 0 ? `${text.slice(0, kept)}…` : "";
}

function inkOn(rgb) {
  const [red, green, blue] = rgb.match(/\d+/g).map(Number);
  return 0.299 * red + 0.587 * green + 0.114 * blue > 135 ? "#10161f" : "#f4f7fb";
}
