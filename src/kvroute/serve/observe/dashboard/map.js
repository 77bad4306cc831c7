// The cluster as a map on one canvas: domains as frames, instances as tiles, KV transfers as moving lines.

import {
  LOCAL_COLOUR, TIER_COLOURS, bytes, datacentersOf, isShut, loadColour, onTheme, percent, roleNow, pathState, pathStateTexts,
} from "./format.js";
import { ROUTED_LEAST, arcRoute, gapRoute, linkRoute, pointsOf } from "./routes.js";

const UP = 0, BREAKER = 1, LOAD = 5; // places in a tile
const SHOW_MS = 800; // shortest time for which a transfer is shown: most end earlier
const MOVING_MOST = 160;
const TILE_MOST = 58, TILE_WIDE = 84, WIDE = 1200, TILE_LEAST = 4; // largest tile on a map that is `WIDE` or less
const NAMED_LEAST = 30, NAME_HIGH = 13; // smallest tile with a name below it, height of the name
const LINK_WIDE = 132, LINK_HIGH = 62; // room between datacenters for a link and its figures
const LINK_THICK = 12, LANE = 5, BREAK = 13; // width of a link, of a direction in it, half of the gap in a closed link
const still = matchMedia("(prefers-reduced-motion: reduce)");

// Domains with instances, with the lists for drawing; a level without a name has no frame.
function domainOf(place) {
  if (place.kind === "node") return place.instances.length ? { ...place, children: [] } : null;
  const children = place.children.map(domainOf).filter(Boolean);
  return children.length ? { ...place, children } : null;
}

// Put boxes side by side, wrapping at `width`; sets positions and returns the total size.
function flow(boxes, width, gap, gapDown = gap) {
  let x = 0, y = 0, line = 0, most = 0;
  for (const box of boxes) {
    if (x > 0 && x + box.w > width) { x = 0; y += line + gapDown; line = 0; }
    box.x = x; box.y = y;
    x += box.w + gap;
    line = Math.max(line, box.h);
    most = Math.max(most, x - gap);
  }
  return { w: most, h: y + line };
}

function square(boxes, gap, aspect) { // the width at which flowing boxes have about this aspect
  const area = boxes.reduce((sum, box) => sum + (box.w + gap) * (box.h + gap), 0);
  return Math.max(Math.sqrt(area * aspect), ...boxes.map((box) => box.w));
}

// The box of a domain: { kind, name, x, y, w, h, children, tiles }, positions relative to the parent's inside.
function boxOf(place, plan, width) {
  const { tile, aspect, high } = plan, gap = gapOf(tile), down = tile + nameHeight(tile);
  const box = { kind: place.kind, name: place.name, children: [], tiles: [], pad: 0, top: 0 };
  if (place.kind === "node") {
    const columns = Math.min(place.instances.length, 8);
    place.instances.forEach((index, k) => {
      box.tiles.push({ index, x: (k % columns) * (tile + gap), y: Math.floor(k / columns) * (down + gap) });
    });
    const rows = Math.ceil(place.instances.length / columns);
    return Object.assign(box, { w: columns * (tile + gap) - gap, h: rows * (down + gap) - gap });
  }
  const framed = place.name !== "" && place.kind !== "cluster";
  box.pad = framed ? Math.max(2, tile * 0.22) : 0;
  box.top = framed ? labelHeight(place.kind, tile) : 0;
  const between = place.kind === "rack" ? gap * 1.4 : Math.max(3, tile * 0.34);
  const inside = width - 2 * box.pad;
  box.children = place.children.map((child) => boxOf(child, plan, inside));
  let size;
  if (place.kind === "rack") { // the nodes of a rack are stacked, at most `high` of them
    const columns = Math.ceil(box.children.length / high);
    const wide = Math.max(...box.children.map((child) => child.w));
    size = flow(box.children, columns * (wide + between), between);
  } else if (place.kind === "cluster" && plan.linked) {
    const spare = (inside - box.children.reduce((sum, child) => sum + child.w, 0)) / Math.max(1, box.children.length - 1);
    size = flow(box.children, inside, Math.min(Math.max(spare * 0.6, LINK_WIDE), LINK_WIDE * 1.8), LINK_HIGH);
  } else {
    const most = place.kind === "cluster" ? inside : Math.min(inside, square(box.children, between, aspect));
    size = flow(box.children, most + 0.01, between);
  }
  return Object.assign(box, { w: size.w + 2 * box.pad, h: size.h + box.top + box.pad });
}

const gapOf = (tile) => Math.max(1, tile * 0.16);
const nameHeight = (tile) => (tile >= NAMED_LEAST ? NAME_HIGH : 0);
const labelHeight = (kind, tile) => (kind === "rack" ? (tile >= 12 ? 14 : Math.max(2, tile * 0.2)) : 17);

// The largest tiles with which the cluster fits; with the smallest tiles the map grows in height instead.
export function planOf(root, width, height, linked = false) {
  let best = null;
  for (const high of [8, 4, 2, 1]) {
    for (const aspect of [0.6, 1, 1.6, 2.4, 4, 8]) {
      for (let tile = width > WIDE ? TILE_WIDE : TILE_MOST; tile >= TILE_LEAST; tile -= tile > 16 ? 1 : 0.5) {
        if (best && tile < best.tile) break;
        const box = boxOf(root, { tile, aspect, linked, high }, width);
        const fits = box.w <= width + 0.5 && box.h <= height;
        if (fits || tile === TILE_LEAST) {
          const better = !best || (fits && (!best.fits || tile > best.tile || box.h < best.box.h));
          if (better) best = { tile, aspect, box, fits };
          break;
        }
      }
    }
  }
  return best;
}

export class ClusterMap {
  constructor(canvas, inspect) {
    this.canvas = canvas;
    this.inspect = inspect;
    this.back = document.createElement("canvas"); // behind the transfers; drawn when data arrive, not per frame
    this.front = document.createElement("canvas"); // the tiles: a line that passes behind one does not end there
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
    this.datacenters = datacentersOf(layout);
    this.roles = new Map(layout.sites.map((site) => [site.name, site.role]));
    this.moving.clear();
    this.chosen = -1;
    this.width = 0;
    this.resize();
  }

  setTick(tick) {
    this.values = tick.instances;
    this.tick = tick;
    const now = performance.now();
    for (const transfer of tick.transfers) this.transfer(transfer, now);
    this.redraw();
  }

  transfer(transfer, now) {
    const shown = this.moving.get(transfer.id);
    const length = Math.max(SHOW_MS, 1000 * (transfer.took_s ?? Math.max(transfer.expected_s, transfer.age_s)));
    if (shown) {
      shown.in_flight = transfer.took_s === null;
      // The end is known now: the line of a completed transfer must not remain.
      shown.ms = Math.max(length, shown.in_flight ? now - shown.from + 300 : 0);
    } else if (this.moving.size < MOVING_MOST && (transfer.took_s === null || now - this.started(transfer, now) < SHOW_MS)) {
      this.moving.set(transfer.id, { ...transfer, from: this.started(transfer, now), ms: length, in_flight: transfer.took_s === null });
    }
  }

  // A transfer that ended before its first update starts now, so that it is visible at all.
  started(transfer, now) { return transfer.took_s === null ? now - 1000 * transfer.age_s : now - Math.min(1000 * transfer.age_s, SHOW_MS * 0.3); }

  resize() {
    if (!this.layout || !this.root) return;
    const width = Math.floor(this.canvas.clientWidth);
    if (!width || width === this.width) return;
    this.width = width;
    const aim = Math.min(Math.max(340, Math.round(width * 0.62)), Math.max(340, Math.round(innerHeight * 0.58)));
    const plan = planOf(this.root, width - 4, aim, this.layout.wan.length > 0);
    this.tile = plan.tile;
    const height = Math.max(120, Math.ceil(plan.box.h) + 6);
    this.canvas.style.height = `${height}px`;
    const scale = devicePixelRatio || 1;
    for (const canvas of [this.canvas, this.back, this.front]) {
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
    const frame = (name) => this.frames.find((each) => each.kind === "datacenter" && each.name === name);
    const between = new Map(); // several links between the same two datacenters are side by side
    this.links = this.layout.wan.map((wan, entry) => {
      const source = frame(wan.source), target = frame(wan.target);
      if (!source || !target) return null;
      const pair = [wan.source, wan.target].sort().join("\n"), before = between.get(pair) ?? 0;
      between.set(pair, before + 1);
      return { ...wan, entry, ...endsOf(source, target, before) };
    }).filter(Boolean);
  }

  role(index) { return roleNow(this.layout, this.tick, index); }

  // The state of a link is that of its WAN path: nothing else is known about it.
  linkState(link) {
    const site = this.tick?.load.offload?.sites.find(({ name }) => name === link.source || name === link.target);
    return site ? pathState(site, this.values.some((tile, k) => tile[UP] && this.datacenters[k] === site.name)) : "";
  }

  redraw() {
    if (!this.width || !this.root) return;
    const style = getComputedStyle(document.documentElement);
    this.ink = Object.fromEntries(["panel", "edge", "text", "quiet", "bad", "accent", "track"].map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
    const draw = this.back.getContext("2d"), front = this.front.getContext("2d");
    for (const each of [draw, front]) each.clearRect(0, 0, this.width, this.back.height);
    for (const frame of this.frames) this.drawFrame(draw, frame);
    for (const link of this.links) { link.state = this.linkState(link); this.drawLink(draw, link); }
    this.tiles.forEach((tile, index) => { if (tile) this.drawTile(front, tile, index); });
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
    const only = frame.kind === "datacenter" && this.layout.wan.length && this.roles.get(frame.name) === "prefill" ? " · prefill only" : "";
    const room = frame.w - 2 * frame.pad, text = draw.measureText(frame.name + only).width <= room ? frame.name + only : fitting(draw, frame.name, room);
    draw.fillText(text, frame.x + frame.pad + (rack ? 0 : 1), frame.y + frame.top - (rack ? 4 : 5));
  }

  // A pipe with a lane for each direction, filled to its utilisation; drawn in two parts while its WAN path is closed.
  drawLink(draw, link) {
    const { from, to } = link, length = Math.hypot(to.x - from.x, to.y - from.y), load = this.tick?.wan[link.entry];
    const { state } = link, broken = isShut(state), colour = TIER_COLOURS[TIER_COLOURS.length - 1];
    draw.save();
    draw.translate(from.x, from.y);
    draw.rotate(Math.atan2(to.y - from.y, to.x - from.x));
    draw.fillStyle = this.ink.track;
    draw.strokeStyle = broken ? this.ink.bad : this.ink.quiet;
    draw.lineWidth = broken ? 2 : 1;
    const half = LINK_THICK / 2, parts = broken ? [[0, length / 2 - BREAK], [length / 2 + BREAK, length]] : [[0, length]];
    for (const [start, end] of parts) {
      draw.fillRect(start, -half, end - start, LINK_THICK);
      draw.beginPath();
      draw.moveTo(start, -half); draw.lineTo(end, -half); draw.moveTo(start, half); draw.lineTo(end, half);
      if (broken) for (const x of [length / 2 - BREAK, length / 2 + BREAK]) { draw.moveTo(x - 3, -half - 3); draw.lineTo(x + 3, half + 3); }
      draw.stroke();
    }
    if (load && !broken) {
      draw.fillStyle = colour;
      const used = load.utilisation.map((share) => length * Math.min(share, 1));
      draw.fillRect(0, -LANE, used[0], LANE - 0.5);
      draw.fillRect(length - used[1], 0.5, used[1], LANE - 0.5);
    }
    if (broken) {
      draw.lineWidth = 2.5;
      draw.beginPath();
      for (const side of [-5, 5]) { draw.moveTo(length / 2 - 5, -side); draw.lineTo(length / 2 + 5, side); }
      draw.stroke();
    }
    draw.restore();
    this.drawLinkText(draw, link, load);
  }

  drawLinkText(draw, link, load) {
    const { from, to, lying, state } = link, [word] = pathStateTexts(state);
    const ahead = lying ? (to.x > from.x ? ["→", "←"] : ["←", "→"]) : to.y > from.y ? ["↓", "↑"] : ["↑", "↓"];
    const [forward, backward] = ahead.map((arrow, way) => (load ? `${arrow} ${percent(load.utilisation[way])}${load.in_flight[way] ? `, ${bytes(load.in_flight_bytes[way])}` : ""}` : arrow));
    const head = `${bytes(link.bytes_per_s)}/s`, x = (from.x + to.x) / 2, y = (from.y + to.y) / 2;
    draw.textBaseline = "alphabetic";
    const write = (text, tx, ty, bad = false) => {
      draw.font = `${bad ? "700 " : ""}11px system-ui, "DejaVu Sans", sans-serif`;
      draw.fillStyle = bad ? this.ink.bad : this.ink.quiet;
      draw.fillText(text, tx, ty);
    };
    if (lying) {
      draw.textAlign = "center";
      if (word) write(word, x, y - 28, true);
      write(head, x, y - 13);
      write(forward, x, y + 22);
      write(backward, x, y + 36);
    } else {
      draw.textAlign = "left";
      write(head, x + 16, y - 10);
      write(forward, x + 16, y + 4);
      write(backward, x + 16, y + 18);
      draw.textAlign = "right";
      if (word) write(word, x - 16, y + 4, true);
    }
    draw.textAlign = "left";
  }

  drawTile(draw, { x, y }, index) {
    const value = this.values[index], size = this.tile, role = this.role(index);
    const changing = this.tick?.load.offload?.role_switches.some((each) => each.instance === this.layout.instances[index].name);
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
    else if (size >= 18) this.letter(draw, changing ? "⇄" : role === "both" ? "PD" : role[0].toUpperCase(), x, y, size, value);
    if (nameHeight(size)) {
      draw.fillStyle = this.ink.text;
      draw.font = '10.5px system-ui, "DejaVu Sans", sans-serif';
      draw.textAlign = "center";
      draw.textBaseline = "alphabetic";
      draw.fillText(fitting(draw, this.layout.instances[index].name, size + gapOf(size) - 2), x + size / 2, y + size + NAME_HIGH - 2);
      draw.textAlign = "left";
    }
    if (changing) {
      draw.strokeStyle = this.ink.accent;
      draw.lineWidth = 2;
      draw.setLineDash([3, 2]);
      draw.strokeRect(x - 1, y - 1, size + 2, size + 2);
      draw.setLineDash([]);
    }
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

  letter(draw, text, x, y, size, value) {
    draw.fillStyle = inkOn(loadColour(value ? value[LOAD] : 0));
    draw.font = `600 ${Math.round(size * 0.42)}px system-ui, "DejaVu Sans", sans-serif`;
    draw.textAlign = "center";
    draw.textBaseline = "middle";
    draw.fillText(text, x + size / 2, y + size / 2 + 0.5);
    draw.textAlign = "left";
  }

  wake() { if (!this.frame) this.frame = requestAnimationFrame((now) => this.animate(now)); }

  animate(now) {
    this.frame = 0;
    const draw = this.canvas.getContext("2d");
    draw.clearRect(0, 0, this.width, this.canvas.height);
    const layer = (canvas) => draw.drawImage(canvas, 0, 0, this.width, canvas.height / (devicePixelRatio || 1));
    const over = this.tile < ROUTED_LEAST; // without room between the tiles, transfers are above them
    layer(this.back);
    if (over) layer(this.front);
    for (const [id, transfer] of this.moving) {
      if (this.repeats) transfer.from += transfer.ms * Math.floor(Math.max(0, now - transfer.from) / transfer.ms);
      if (now - transfer.from > transfer.ms) this.moving.delete(id);
      else this.drawTransfer(draw, transfer, Math.max(0, now - transfer.from) / transfer.ms);
    }
    if (!over) layer(this.front);
    if (this.chosen >= 0 && this.tiles[this.chosen]) this.drawChosen(draw);
    if (this.moving.size && !still.matches && !document.hidden) this.wake();
  }

  drawTransfer(draw, transfer, share) {
    const source = this.tiles[transfer.source], target = this.tiles[transfer.target];
    if (!source || !target) return;
    const half = this.tile / 2, a = { x: source.x + half, y: source.y + half }, b = { x: target.x + half, y: target.y + half };
    const { line, most } = this.lineOf(transfer, a, b);
    share = Math.min(share, most);
    draw.strokeStyle = draw.fillStyle = TIER_COLOURS[transfer.tier] ?? LOCAL_COLOUR;
    draw.lineCap = draw.lineJoin = "round";
    const arc = (from, to, width, alpha) => {
      draw.beginPath();
      pointsOf(line, from, to).forEach((point, k) => { if (k) draw.lineTo(point.x, point.y); else draw.moveTo(point.x, point.y); });
      draw.lineWidth = width; draw.globalAlpha = alpha; draw.stroke();
    };
    const width = Math.min(3.2, Math.max(1.2, this.tile * 0.12));
    if (still.matches) { share = most; arc(0, share, width, 0.75); } else { arc(0, 1, 1, 0.3); arc(Math.max(0, share - 0.28), share, width, 0.95); }
    draw.globalAlpha = 1;
    const head = line.at(share);
    draw.beginPath(); draw.arc(head.x, head.y, width * 1.25, 0, 7); draw.fill();
  }

  // The line of a transfer, and the largest share reached now: inside a datacenter between the tiles, between two along
  // their link: up to its end before completion, and up to the gap while it is closed.
  lineOf(transfer, a, b) {
    const [here, there] = [this.datacenters[transfer.source], this.datacenters[transfer.target]];
    const link = here === there ? null : this.links.find(({ source, target }) => (source === here && target === there) || (source === there && target === here));
    if (!link && this.tile < ROUTED_LEAST) return { line: arcRoute(a, b), most: 1 };
    if (!link) return { line: gapRoute(this.tiles[transfer.source], this.tiles[transfer.target], this.tile, gapOf(this.tile), transfer.id), most: 1 };
    const forward = link.source === here, lane = ((transfer.id % 3) - 1) * 1.5 + (forward ? -2.5 : 2.5);
    const length = Math.hypot(link.to.x - link.from.x, link.to.y - link.from.y) || 1;
    const aside = { x: (-lane * (link.to.y - link.from.y)) / length, y: (lane * (link.to.x - link.from.x)) / length };
    const ends = [link.from, link.to].map((end) => ({ x: end.x + aside.x, y: end.y + aside.y }));
    if (!forward) ends.reverse();
    const line = linkRoute(a, ends, b), { sums } = line;
    const whole = transfer.in_flight ? sums[2] : sums[3]; // a transfer that ends while the link is closed has not arrived either
    const most = (isShut(link.state) ? (sums[1] + sums[2]) / 2 - BREAK - 2 : whole) / sums[3];
    return { line, most };
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

// The ends of a link between two frames: on the sides that face each other; `number` shifts further links.
function endsOf(a, b, number) {
  const lying = a.x + a.w <= b.x || b.x + b.w <= a.x, aside = number * (LINK_THICK + 66);
  const middle = (start, size, from, length) => {
    const low = Math.max(start, from), high = Math.min(start + size, from + length);
    return low < high ? [(low + high) / 2, (low + high) / 2] : [start + size / 2, from + length / 2];
  };
  if (lying) {
    const [y, z] = middle(a.y, a.h, b.y, b.h), right = a.x < b.x;
    return { lying, from: { x: right ? a.x + a.w : a.x, y: y + aside }, to: { x: right ? b.x : b.x + b.w, y: z + aside } };
  }
  const [x, z] = middle(a.x, a.w, b.x, b.w), down = a.y < b.y;
  return { lying, from: { x: x + aside, y: down ? a.y + a.h : a.y }, to: { x: z + aside, y: down ? b.y : b.y + b.h } };
}

function fitting(draw, text, width) {
  if (draw.measureText(text).width <= width) return text;
  const number = /[0-9]+$/.exec(text)?.[0]; // the number identifies a rack among racks
  if (number && draw.measureText(number).width <= width) return number;
  let kept = text.length - 1;
  while (kept > 0 && draw.measureText(`${text.slice(0, kept)}…`).width > width) kept -= 1;
  return kept > 0 ? `${text.slice(0, kept)}…` : "";
}

function inkOn(rgb) {
  const [red, green, blue] = rgb.match(/\d+/g).map(Number);
  return 0.299 * red + 0.587 * green + 0.114 * blue > 135 ? "#10161f" : "#f4f7fb";
}
