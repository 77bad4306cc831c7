// Everything beside the map: key figures, TTFT and tier bars, the oracle, the decisions and why they fell.

import {
  LOCAL_COLOUR, PARTS, TIER_COLOURS, bytes, clock, element, figures, fillBar, isTime, key, percent, rampGradient, seconds,
  setText, term,
} from "./format.js";

const $ = (id) => document.getElementById(id);
const BREAKER = ["closed", "half-open", "open"];
const TERM_COLOURS = ["#ee6677", "#4477aa", "#ccbb44", "#66ccee", "#aa3377", "#228833"];
const LIST_MOST = 14;

export class Panels {
  constructor() {
    this.kpis = new Map();
    this.splits = new Map();
    this.kept = []; // decisions in the list, newest first
    this.newest = 0;
    this.chosen = null;
    this.held = false; // the list stands still while somebody points at it: a click must hit what was seen
    $("tiers").keys = element("div", "keys");
    $("tiers").append($("tiers").keys);
    const list = $("decisions");
    for (const [on, off] of [["pointerenter", "pointerleave"], ["focusin", "focusout"]]) {
      list.addEventListener(on, () => this.hold(true));
      list.addEventListener(off, () => this.hold(false));
    }
  }

  setLayout(layout) {
    this.layout = layout;
    this.kept = [];
    this.newest = 0;
    setText($("cluster"), layout.name);
    document.title = `kvroute · ${layout.name}`;
    this.legend();
  }

  setTick(tick) {
    this.tick = tick;
    const { load } = tick;
    setText($("policy"), tick.policy);
    setText($("uptime"), `up ${clock(tick.at)}`);
    setText($("version"), tick.version);
    this.figures(tick, load);
    this.ttft(tick.splits);
    this.tiers(tick.splits);
    this.oracle(load.oracle);
    this.decisions(tick.decisions);
    if ($("table-box").open) this.table();
  }

  figures(tick, load) {
    const main = tick.splits.find((split) => split.policy === tick.policy) ?? tick.splits[0];
    const shown = [
      ["requests / s", figures(tick.arrivals_per_s), `${tick.requests} in all`],
      ["in flight", String(load.in_flight), ""],
      ["queued", String(load.queued), "", load.queued > 0],
      ["TTFT p50", main && main.streams !== 0 ? seconds(main.ttft_p50_s) : "–", ""],
      ["TTFT p90", main && main.streams !== 0 ? seconds(main.ttft_p90_s) : "–", ""],
      ["transfers", String(tick.transfers_under_way), ""],
      ["rejected / s", figures(tick.rejects_per_s), `${tick.rejects} in all`, tick.rejects_per_s > 0],
      ["errors / s", figures(tick.errors_per_s), "", tick.errors_per_s > 0],
    ];
    for (const [name, value, note, bad] of shown) {
      if (!this.kpis.has(name)) {
        const box = element("div", "kpi"), figure = element("b");
        box.append(figure, element("span", "", name));
        $("kpis").append(box);
        this.kpis.set(name, { box, figure });
      }
      const { box, figure } = this.kpis.get(name);
      setText(figure, value);
      box.title = note;
      box.classList.toggle("bad", Boolean(bad));
    }
  }

  rows(parent, splits, make) { // one row per policy, kept between ticks
    const known = parent.rows ?? (parent.rows = new Map());
    for (const [policy, row] of known) {
      if (!splits.some((split) => split.policy === policy)) { row.node.remove(); known.delete(policy); }
    }
    if (parent.hint) parent.hint.hidden = splits.length > 0;
    else { parent.hint = element("p", "empty", "No request yet."); parent.prepend(parent.hint); parent.hint.hidden = splits.length > 0; }
    for (const split of splits) {
      if (!known.has(split.policy)) {
        const row = make(split);
        known.set(split.policy, row);
        parent.insertBefore(row.node, parent.keys ?? null);
      }
    }
    return known;
  }

  ttft(splits) {
    const parent = $("ttft");
    if (!parent.keys) {
      parent.keys = element("div", "keys");
      parent.keys.append(...PARTS.map(([, name, colour]) => key(colour, name, true)));
      parent.append(parent.keys);
    }
    const rows = this.rows(parent, splits, (split) => barRow(split.policy, 1));
    const sum = (split) => Object.values(split.part_mean_s).reduce((all, part) => all + part, 0);
    const most = Math.max(1e-9, ...splits.map(sum));
    for (const split of splits) {
      const row = rows.get(split.policy);
      const times = split.streams === 0 ? "no streams" : `p50 ${seconds(split.ttft_p50_s)} · p90 ${seconds(split.ttft_p90_s)}`;
      setText(row.figures, `${times} · ${split.requests} req`);
      fillBar(row.bars[0], PARTS.map(([part, name, colour]) => [
        split.part_mean_s[part] / most, colour,
        `${name}: mean ${seconds(split.part_mean_s[part])}, p50 ${seconds(split.part_p50_s[part])}, p90 ${seconds(split.part_p90_s[part])}`,
      ]));
      row.bars[0].setAttribute("aria-label", PARTS.map(([part, name]) => `${name} ${seconds(split.part_mean_s[part])}`).join(", "));
    }
  }

  tiers(splits) {
    const parent = $("tiers");
    const rows = this.rows(parent, splits, (split) => barRow(split.policy, 2, ["requests", "bytes"]));
    for (const split of splits) {
      const row = rows.get(split.policy);
      const requests = [...split.tier_requests, split.local], volume = split.tier_bytes;
      const all = Math.max(1, total(requests)), carried = Math.max(1, total(volume));
      const name = (tier) => this.layout.tiers[tier] ?? "no transfer";
      const colour = (tier) => TIER_COLOURS[tier] ?? LOCAL_COLOUR;
      fillBar(row.bars[0], requests.map((count, tier) => [count / all, colour(tier), `${name(tier)}: ${count} (${percent(count / all)})`]));
      fillBar(row.bars[1], volume.map((value, tier) => [value / carried, colour(tier), `${name(tier)}: ${bytes(value)} (${percent(value / carried)})`]));
      row.bars[0].setAttribute("aria-label", requests.map((count, tier) => `${name(tier)} ${percent(count / all)}`).join(", "));
      row.bars[1].setAttribute("aria-label", volume.map((value, tier) => `${name(tier)} ${percent(value / carried)}`).join(", "));
      setText(row.figures, `${bytes(total(volume))} moved`);
    }
  }

  oracle(oracle) {
    setText($("oracle-note"), oracle.source === "static" ? (oracle.learned_ratio.some((ratio) => ratio !== null) ? "static map, corrected by own transfers" : "static map") : `${oracle.source}, ${oracle.age_s === null ? "nothing yet" : `${seconds(oracle.age_s)} old`}`);
    const rows = this.layout.tiers.map((name, tier) => [
      name, `${bytes(this.layout.tier_bytes_per_s[tier])}/s`, percent(oracle.congestion[tier]),
      oracle.learned_ratio[tier] === null ? "–" : `× ${oracle.learned_ratio[tier].toFixed(2)}`,
    ]);
    fillTable($("oracle"), ["tier", "static", "congestion", "measured"], rows);
    [...$("oracle").tBodies[0].rows].forEach((row, tier) => { row.cells[0].style.boxShadow = `inset 4px 0 ${TIER_COLOURS[tier]}`; row.cells[0].style.paddingLeft = "10px"; });
  }

  hold(held) {
    this.held = held;
    setText($("decisions-note"), held ? "the list stands still while you are on it" : "choose one to see why");
    if (!held) this.list();
  }

  decisions(decisions) {
    const fresh = decisions.filter((decision) => decision.id > this.newest);
    if (!fresh.length) return;
    this.newest = fresh[fresh.length - 1].id;
    this.kept = [...fresh.reverse(), ...this.kept].slice(0, LIST_MOST);
    if (!this.held) this.list();
  }

  list() {
    const list = $("decisions");
    while (list.children.length < this.kept.length) list.append(this.entry());
    this.kept.forEach((decision, k) => this.show(list.children[k].firstChild, decision));
  }

  entry() {
    const button = element("button");
    button.type = "button";
    for (const part of ["when", "request quiet", "kind", "path", "terms quiet", "badge", "cost"]) button.append(element("span", part));
    button.addEventListener("click", () => { this.chosen = button.decision; this.why(); this.list(); $("why-panel").scrollIntoView({ block: "nearest" }); });
    const item = element("li");
    item.append(button);
    return item;
  }

  show(button, decision) {
    button.decision = decision;
    const [when, request, kind, path, terms, badge, cost] = button.children;
    const winner = decision.candidates.find((candidate) => candidate.name === decision.chosen);
    setText(when, clock(decision.at));
    setText(request, `#${decision.request_id}`);
    setText(kind, decision.kind);
    setText(path, decision.kind === "reject" ? decision.reason : decision.source ? `${decision.source} → ${decision.chosen}` : decision.chosen);
    setText(terms, winner && decision.unit === "s" ? summands(winner.terms) : "");
    setText(badge, decision.tier === null ? "" : this.layout.tiers[decision.tier]);
    badge.style.borderColor = decision.tier === null ? "transparent" : TIER_COLOURS[decision.tier];
    setText(cost, winner ? (decision.unit === "s" ? seconds(winner.cost) : `${figures(winner.cost)} ${decision.unit}`) : "");
    kind.classList.toggle("reject", decision.kind === "reject");
    button.setAttribute("aria-pressed", String(this.chosen?.id === decision.id));
  }

  explainNewest() { // on a page that stands still, one decision is open from the start
    this.chosen = this.kept.find((decision) => decision.kind === "decode" && decision.candidates.length > 1) ?? null;
    if (this.chosen) { this.why(); this.list(); }
  }

  why() {
    const decision = this.chosen, box = $("why");
    $("why-panel").hidden = false;
    setText($("why-note"), `request #${decision.request_id}: ${decision.kind}${decision.kind === "reject" ? "" : ` by ${decision.policy}`}, ${clock(decision.at)}`);
    box.replaceChildren();
    if (decision.reason) box.append(element("p", "", decision.reason));
    if (!decision.candidates.length) {
      box.append(element("p", "empty", decision.chosen ? `${decision.chosen}; this decision keeps no terms.` : "No candidates."));
      return;
    }
    const names = Object.keys(decision.candidates[0].terms), times = decision.unit === "s" ? names.filter(isTime) : [];
    const table = element("table"), most = Math.max(1e-12, ...decision.candidates.map((candidate) => Math.abs(candidate.cost ?? 0)));
    const head = ["candidate", ...(times.length ? [""] : []), `cost${decision.unit === "s" ? "" : ` (${decision.unit})`}`, ...names.map(spoken)];
    table.append(element("thead"), element("tbody"));
    fillTable(table, head, decision.candidates.map((candidate) => [
      candidate.name + (candidate.feasible ? "" : " (no room)"), ...(times.length ? [""] : []),
      decision.unit === "s" ? seconds(candidate.cost) : figures(candidate.cost), ...names.map((name) => term(name, candidate.terms[name], this.layout.tiers)),
    ]));
    decision.candidates.forEach((candidate, k) => {
      const row = table.tBodies[0].rows[k];
      row.cells[0].title = candidate.name;
      row.classList.toggle("chosen", candidate.name === decision.chosen);
      row.classList.toggle("infeasible", !candidate.feasible);
      if (times.length) {
        const bar = element("div", "bar thin");
        fillBar(bar, times.map((name, part) => [candidate.terms[name] / most, TERM_COLOURS[part % TERM_COLOURS.length], `${spoken(name)}: ${seconds(candidate.terms[name])}`]));
        row.cells[1].append(bar);
      }
    });
    const keys = element("div", "keys");
    keys.append(...times.map((name, part) => key(TERM_COLOURS[part % TERM_COLOURS.length], spoken(name), true)));
    if (decision.others) keys.append(`and ${decision.others} dearer candidates`);
    const scroll = element("div", "scroll");
    scroll.append(table);
    box.append(scroll, keys);
  }

  table() {
    const rows = this.layout.instances.map((instance, k) => [instance.name, ...this.words(k)]);
    fillTable($("instances"), ["instance", "role", "state", "own", "running", "waiting", "load", "pending", "KV used", "scraped", "model", "place"], rows);
    this.layout.instances.forEach((_, k) => {
      const tile = this.tick.instances[k];
      $("instances").tBodies[0].rows[k].classList.toggle("down", !tile[0] || tile[1] === 2);
    });
  }

  words(k) { // one instance as texts
    const instance = this.layout.instances[k], [up, breaker, own, running, waiting, load, pending, kv, age] = this.tick.instances[k];
    const state = !up ? "down" : breaker ? `breaker ${BREAKER[breaker]}` : "up";
    return [instance.role, state, String(own), String(running), String(waiting), percent(load), seconds(pending),
      kv === null ? "–" : percent(kv), age === null ? "–" : `${seconds(age)} ago`, instance.model, instance.place];
  }

  // `said`: whether a screen reader shall hear it; not at every tick.
  inspect(k, said = false) {
    if (said && k >= 0 && this.tick) setText($("map-said"), `${this.layout.instances[k].name}, ${this.words(k).slice(0, 2).join(", ")}`);
    const line = $("inspector");
    if (k < 0 || !this.tick) { setText(line, "Point at an instance, or focus the map and use the arrow keys."); return; }
    const [role, state, own, running, waiting, load, pending, kv, age, model, place] = this.words(k);
    line.replaceChildren(element("b", "", this.layout.instances[k].name),
      ` · ${role}, ${state} · ${own} of ours, ${running} running, ${waiting} waiting · load ${load}` +
      `${role === "decode" ? "" : ` · ${pending} of prefill pending`} · KV ${kv} · scraped ${age} · ${model} · ${place}`);
  }

  legend() {
    const box = $("legend"), ramp = element("span", "ramp"), load = element("span", "key");
    ramp.style.background = rampGradient();
    load.append("idle", ramp, "full");
    const both = this.layout.instances.some((instance) => instance.role === "both") ? [element("span", "key", "◆ both")] : [];
    const tiers = () => this.layout.tiers.map((name, tier) => key(TIER_COLOURS[tier], name));
    box.replaceChildren(load, element("span", "key", "■ prefill"), element("span", "key", "● decode"), ...both,
      element("span", "key", "✕ down"), element("span", "key", "▨ breaker open"), ...tiers());
    $("tiers").keys.replaceChildren(...tiers(), key(LOCAL_COLOUR, "no transfer"));
  }
}

const total = (values) => values.reduce((sum, value) => sum + value, 0);
const spoken = (name) => (isTime(name) ? name.slice(0, -2) : name.replace(/_bytes_per_s$/, " bandwidth")).replaceAll("_", " ");

// What a cost in seconds is the sum of, without what adds nothing.
const summands = (terms) => Object.entries(terms).filter(([name, value]) => isTime(name) && value > 0)
  .map(([name, value]) => `${spoken(name)} ${seconds(value)}`).join(" + ");

function barRow(policy, count, names = []) {
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

function fillTable(table, head, rows) { // cells are kept; only their texts change
  const top = table.tHead, body = table.tBodies[0];
  if (!top.rows.length) top.insertRow().append(...head.map(() => { const cell = element("th"); cell.scope = "col"; return cell; }));
  head.forEach((text, k) => setText(top.rows[0].cells[k], text));
  while (body.rows.length < rows.length) { const row = body.insertRow(); for (const _ of head) row.insertCell(); }
  while (body.rows.length > rows.length) body.deleteRow(-1);
  rows.forEach((texts, k) => texts.forEach((text, column) => { if (text !== "") setText(body.rows[k].cells[column], text); }));
}
