// All panels except the map: key figures, TTFT and tier bars, the oracle, the decisions and their reasons.

import {
  Chart, LOCAL_COLOUR, PARTS, TIER_COLOURS, barRow, bytes, clock, datacentersOf, element, figures, fillBar, fillTable, isShut,
  isTime, key, percent, rampGradient, roleNow, seconds, setText, term, tokens, pathState, pathStateTexts,
} from "./format.js";

const $ = (id) => document.getElementById(id);
const BREAKER = ["closed", "half-open", "open"];
const TERM_COLOURS = ["#ee6677", "#4477aa", "#ccbb44", "#66ccee", "#aa3377", "#228833", "#ee8866", "#44bb99", "#997700", "#bbbbbb"];
const LIST_MOST = 14;
const MEASURED_BY = { "": "unknown", kvroute: "kvroute's connector", nixl: "NIXL", sglang: "SGLang", tcp: "sender's TCP", "first-byte": "first byte" };
const RACK = 1; // the first tier of which transfers teach the capacity
const PLACED = {
  short: "no more uncached tokens than the threshold", long: "more uncached tokens than the threshold",
  home_down: "no prefill instance at home is up", away_down: "no other datacenter is available",
  not_worth_it: "offloading would take much longer than prefill at home", no_instance_up: "no instance is up",
};

export class Panels {
  constructor() {
    this.kpis = new Map();
    this.splits = new Map();
    this.offloading = new Offloading();
    this.kept = []; // decisions in the list, newest first
    this.newest = 0;
    this.chosen = null;
    this.held = false; // the list is paused while it has the pointer or the focus, so that a click hits the visible row
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
    this.offloading.setLayout(layout);
    setText($("cluster"), layout.name);
    document.title = `kvroute · ${layout.name}`;
    this.legend();
  }

  setTick(tick) {
    this.tick = tick;
    const { load } = tick;
    setText($("policy"), tick.policy);
    this.shadow(tick.shadow);
    setText($("uptime"), `up ${clock(tick.at)}`);
    setText($("version"), tick.version);
    this.figures(tick, load);
    this.ttft(tick.splits);
    this.tiers(tick.splits);
    this.paths(tick.paths);
    this.calibration(tick.calibration);
    this.learned(load.foresight);
    this.oracle(load.oracle);
    this.offloading.setTick(tick);
    this.decisions(tick.decisions);
    if ($("table-box").open) this.table();
  }

  shadow(shadow) {
    const chip = $("shadow");
    chip.hidden = !shadow;
    if (!shadow) return;
    const { policy, decisions, differ, gain_s, loss_s } = shadow;
    const share = decisions ? differ / decisions : 0, each = (sum) => seconds(sum / Math.max(differ, 1));
    setText(chip, `shadow policy: ${policy}, differs ${percent(share)}`);
    chip.title = `Evaluated without effect. ${differ} of ${decisions} decode decisions differ. Mean cost of its choice there: ${each(gain_s)} less in its own terms, ${each(loss_s)} more in those of ${this.tick.policy}.`;
  }

  figures(tick, load) {
    const landed = tick.transfers.filter((transfer) => transfer.took_s !== null).length;
    const main = tick.splits.find((split) => split.policy === tick.policy) ?? tick.splits[0];
    const shown = [
      ["requests / s", figures(tick.arrivals_per_s), `${tick.requests} in total`],
      ["in flight", String(load.in_flight), ""],
      ["queued", String(load.queued), "", load.queued > 0],
      ["TTFT p50", main && main.streams !== 0 ? seconds(main.ttft_p50_s) : "–", ""],
      ["TTFT p90", main && main.streams !== 0 ? seconds(main.ttft_p90_s) : "–", ""],
      // Most transfers end between two updates, so those of the last second are counted, as on the map.
      ["transfers", String(tick.transfers_in_flight + landed), `${tick.transfers_in_flight} in flight, ${landed} ended within the last second`],
      ["rejected / s", figures(tick.rejects_per_s), `${tick.rejects} in total`, tick.rejects_per_s > 0],
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
    else { parent.hint = element("p", "empty", "No requests yet."); parent.prepend(parent.hint); parent.hint.hidden = splits.length > 0; }
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
      setText(row.figures, `${bytes(total(volume))} transferred`);
    }
  }

  oracle(oracle) {
    setText($("oracle-note"), oracle.source === "static" ? (oracle.learned_ratio.some((ratio) => ratio !== null) ? "static map, corrected by own transfers" : "static map") : `${oracle.source}, ${oracle.age_s === null ? "no data yet" : `${seconds(oracle.age_s)} old`}`);
    const rows = this.layout.tiers_present.map((tier) => [
      this.layout.tiers[tier], `${bytes(this.layout.tier_bytes_per_s[tier])}/s`, percent(oracle.congestion[tier]),
      oracle.learned_ratio[tier] === null ? "–" : `× ${oracle.learned_ratio[tier].toFixed(2)}`,
    ]);
    fillTable($("oracle"), ["tier", "static", "congestion", "correction"], rows);
    [...$("oracle").tBodies[0].rows].forEach((row, k) => {
      inColour(row, this.layout.tiers_present[k]);
      row.title = "Static: the bandwidth in the cluster file. Correction: the rate that own transfers reached, those that shared a path included, over the predicted rate.";
    });
  }

  // The measured pairs of instances that are slowest compared with the cluster file, and what has measured them.
  paths(paths) {
    $("paths-panel").hidden = !paths.length;
    fillTable($("paths"), ["path", "measured by", "rate", "of the file's", "last"], paths.map((path) => [
      `${path.source} → ${path.target}`, MEASURED_BY[path.measured_by] ?? path.measured_by, `${bytes(path.bytes_per_s)}/s`,
      percent(path.ratio), path.age_s ? `${seconds(path.age_s)} ago` : "just now",
    ]));
    [...$("paths").tBodies[0].rows].forEach((row, k) => {
      inColour(row, paths[k].tier);
      row.title = `Rate of ${paths[k].transfers} transfers, later ones count more; they may have shared the path. By the cluster file a transfer alone has ${bytes(paths[k].map_bytes_per_s)}/s.`;
    });
  }

  // Predicted and actual time to the first token, by deciles of the prediction.
  calibration(rows) {
    $("calibration-panel").hidden = !rows.length;
    fillTable($("calibration"), ["predicted", "actual", "P90", "actual / predicted", "requests"], rows.map((row) => [
      seconds(row.predicted_s), seconds(row.actual_p50_s), seconds(row.actual_p90_s),
      row.predicted_s ? `× ${(row.actual_s / row.predicted_s).toFixed(2)}` : "–", String(row.requests),
    ]));
  }

  // What foresight has learned from own transfers about each tier; inside a rack it is the speed of the NICs.
  learned(foresight) {
    $("learned-panel").hidden = !foresight;
    if (!foresight) return;
    setText($("learned-note"), `from own transfers${foresight.policy === this.tick.policy ? "" : `, by the shadow policy ${foresight.policy}`}`);
    const tiers = foresight.tiers.map((tier, k) => ({ ...tier, k })).filter((tier) => tier.k >= RACK && tier.bytes_per_s !== null);
    fillTable($("learned"), ["tier", "capacity", "single", "transfers", "last"], tiers.map((tier) => [
      this.layout.tiers[tier.k], `× ${tier.factor.toFixed(2)}`, `${bytes(tier.bytes_per_s)}/s`,
      tier.transfers ? String(tier.transfers) : "–", tier.age_s === null ? "never" : tier.age_s ? `${seconds(tier.age_s)} ago` : "just now",
    ]));
    [...$("learned").tBodies[0].rows].forEach((row, k) => {
      inColour(row, tiers[k].k);
      row.title = `Capacity of the paths over the one in the cluster file, without the effect of own transfers on each other, and the bandwidth of a single transfer with that correction. Learned from ${tiers[k].transfers} transfers with a total weight of ${tiers[k].weight.toFixed(1)}: older transfers count less.`;
    });
  }

  hold(held) {
    this.held = held;
    setText($("decisions-note"), held ? "paused while pointed at or focused" : "select one to see its costs");
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
    setText(request, decision.request_id < 0 ? "" : `#${decision.request_id}`);
    setText(kind, decision.kind);
    setText(path, decision.kind === "reject" ? decision.reason : decision.kind === "switch_role" ? `${decision.chosen} → ${decision.role}` : decision.source ? `${decision.source} → ${decision.chosen}` : decision.chosen);
    setText(terms, winner && decision.unit === "s" ? summands(winner.terms) : "");
    setText(badge, decision.tier === null ? "" : this.layout.tiers[decision.tier]);
    badge.style.borderColor = decision.tier === null ? "transparent" : TIER_COLOURS[decision.tier];
    setText(cost, winner ? (decision.unit === "s" ? seconds(winner.cost) : `${figures(winner.cost)} ${decision.unit}`) : "");
    kind.classList.toggle("reject", decision.kind === "reject");
    button.setAttribute("aria-pressed", String(this.chosen?.id === decision.id));
  }

  explainNewest() { // on a saved page, one decision is open from the start
    this.chosen = this.kept.find((decision) => decision.kind === "decode" && decision.candidates.length > 1) ?? null;
    if (this.chosen) { this.why(); this.list(); }
  }

  why() {
    const decision = this.chosen, box = $("why");
    $("why-panel").hidden = false;
    const whose = decision.kind === "switch_role" ? "review of roles" : `request #${decision.request_id}: ${decision.kind}${decision.kind === "reject" ? "" : ` by ${decision.policy}`}`;
    setText($("why-note"), `${whose}, ${clock(decision.at)}`);
    box.replaceChildren();
    if (decision.reason) box.append(element("p", "", decision.reason));
    if (decision.offload) box.append(...this.offloaded(decision.offload));
    if (!decision.candidates.length) {
      box.append(element("p", "empty", decision.kind === "switch_role" ? `${decision.chosen} is drained and will serve ${decision.role}: the review under Datacenters gives the reason.` : decision.chosen ? `${decision.chosen}; no cost terms were stored.` : "No candidates."));
      return;
    }
    const keys = this.priced(decision, decision.candidates, decision.chosen, box);
    if (decision.shadow) keys.append(this.shadowed(decision));
    if (decision.others) keys.append(`and ${decision.others} more expensive candidates`);
    if (!decision.aggregated.length) return;
    box.append(element("p", "", "The pair was compared with single instances (aggregated):"));
    const pair = decision.aggregated.find((candidate) => candidate.name.includes(" and "));
    this.priced(decision, decision.aggregated, pair.name, box);
  }

  // Append a table of candidates and their terms to the box; return the line of keys below it.
  priced(decision, candidates, chosen, box) {
    const names = Object.keys(candidates[0].terms), priced = (name) => candidates.some((candidate) => candidate.terms[name] > 0);
    const times = decision.unit === "s" ? names.filter((name) => isTime(name) && priced(name)) : [];
    const table = element("table"), most = Math.max(1e-12, ...candidates.map((candidate) => Math.abs(candidate.cost ?? 0)));
    const head = ["candidate", ...(times.length ? [""] : []), `cost${decision.unit === "s" ? "" : ` (${decision.unit})`}`, ...names.map(termLabel)];
    table.append(element("thead"), element("tbody"));
    fillTable(table, head, candidates.map((candidate) => [
      candidate.name + this.absence(decision, candidate), ...(times.length ? [""] : []),
      decision.unit === "s" ? seconds(candidate.cost) : figures(candidate.cost), ...names.map((name) => term(name, candidate.terms[name], this.layout.tiers)),
    ]));
    candidates.forEach((candidate, k) => {
      const row = table.tBodies[0].rows[k];
      row.cells[0].title = candidate.name;
      row.classList.toggle("chosen", candidate.name === chosen);
      row.classList.toggle("infeasible", !candidate.feasible);
      if (times.length) {
        const bar = element("div", "bar thin");
        fillBar(bar, times.map((name, part) => [candidate.terms[name] / most, TERM_COLOURS[part % TERM_COLOURS.length], `${termLabel(name)}: ${seconds(candidate.terms[name])}`]));
        row.cells[1].append(bar);
      }
    });
    const keys = element("div", "keys");
    keys.append(...times.map((name, part) => key(TERM_COLOURS[part % TERM_COLOURS.length], termLabel(name), true)));
    const scroll = element("div", "scroll");
    scroll.append(table);
    box.append(scroll, keys);
    return keys;
  }

  // Why a prompt is prefilled in this datacenter, and the predicted times at each datacenter.
  offloaded({ site, reason, terms }) {
    const why = `prefilled at ${site}: ${PLACED[reason] ?? reason}; ${figures(terms.incremental_tokens ?? 0)} uncached tokens, threshold ${figures(terms.threshold_tokens ?? 0)}`;
    const sites = new Map();
    for (const [name, value] of Object.entries(terms)) {
      const cut = name.lastIndexOf(".");
      if (cut < 0) continue;
      const figure = name.slice(cut + 1), of = name.slice(0, cut);
      sites.set(of, { ...sites.get(of), [figure]: value });
    }
    const columns = [...new Set([...sites.values()].flatMap(Object.keys))];
    const table = element("table"), scroll = element("div", "scroll");
    table.append(element("thead"), element("tbody"));
    fillTable(table, ["datacenter", ...columns.map(termLabel)], [...sites].map(([name, own]) => [name, ...columns.map((column) => term(column, own[column], this.layout.tiers))]));
    [...sites.keys()].forEach((name, k) => table.tBodies[0].rows[k].classList.toggle("chosen", name === site));
    scroll.append(table);
    return [element("p", "", why), scroll];
  }

  // What the shadow policy would have done.
  shadowed({ chosen, shadow }) {
    const who = this.tick.shadow?.policy ?? "the shadow policy";
    if (!shadow.target) return `${who} would have rejected the request. `;
    if (shadow.target === chosen) return `${who} would have chosen the same instance. `;
    const by = [["gain_s", "less in its own terms"], ["loss_s", "more in these terms"]].filter(([name]) => typeof shadow[name] === "number");
    return `${who} would have chosen ${shadow.target}${by.map(([name, words]) => `, ${seconds(shadow[name])} ${words}`).join("")}. `;
  }

  // Why a candidate could not be chosen, as far as the decision shows it.
  absence(decision, candidate) {
    if (candidate.feasible) return "";
    if (decision.kind === "read") return " (no storage NIC)";
    if (decision.aggregated.includes(candidate)) return " (full or unavailable)";
    if (decision.kind !== "decode") return " (not considered)";
    if (candidate.terms.same_domain === 0) return " (other domain)";
    const k = this.layout.instances.findIndex((instance) => instance.name === candidate.name);
    return k >= 0 && roleNow(this.layout, this.tick, k) === "prefill" ? " (prefills)" : " (full or unavailable)";
  }

  table() {
    const models = new Set(this.layout.instances.map((instance) => instance.model)).size > 1; // one model needs no column
    const stored = this.tick.instances.some((tile) => typeof tile[9] === "number"); // a cluster without a store needs no column
    const rows = this.layout.instances.map((instance, k) => {
      const [role, state, own, running, waiting, load, pending, kv, age, model, place, storage] = this.words(k);
      return [instance.name, role, state, own, running, waiting, load, pending, ...(stored ? [storage] : []), kv, age, ...(models ? [model] : []), place];
    });
    const head = ["instance", "role", "state", "own", "running", "waiting", "load", "pending", ...(stored ? ["storage queue"] : []), "KV used", "scraped", ...(models ? ["model"] : []), "place"];
    if ($("instances").tHead.rows[0]?.cells.length !== head.length) { // a reload may add the column of models
      $("instances").tHead.replaceChildren();
      $("instances").tBodies[0].replaceChildren();
    }
    fillTable($("instances"), head, rows);
    this.layout.instances.forEach((_, k) => {
      const tile = this.tick.instances[k];
      $("instances").tBodies[0].rows[k].classList.toggle("down", !tile[0] || tile[1] === 2);
    });
  }

  words(k) { // one instance as texts
    const instance = this.layout.instances[k], [up, breaker, own, running, waiting, load, pending, kv, age, storage] = this.tick.instances[k];
    const state = !up ? "down" : breaker ? `breaker ${BREAKER[breaker]}` : "up";
    return [roleNow(this.layout, this.tick, k), state, String(own), String(running), String(waiting), percent(load), seconds(pending),
      kv === null ? "–" : percent(kv), age === null ? "–" : `${seconds(age)} ago`, instance.model, instance.place,
      typeof storage === "number" ? seconds(storage) : "–"];
  }

  // `announced`: whether a screen reader announces it; not at every tick.
  inspect(k, announced = false) {
    if (announced && k >= 0 && this.tick) setText($("map-announcement"), `${this.layout.instances[k].name}, ${this.words(k).slice(0, 2).join(", ")}`);
    const line = $("inspector");
    if (k < 0 || !this.tick) { setText(line, "Point at an instance, or focus the map and use the arrow keys."); return; }
    const [role, state, own, running, waiting, load, pending, kv, age, model, place] = this.words(k);
    line.replaceChildren(element("b", "", this.layout.instances[k].name),
      ` · ${role}, ${state} · ${own} own requests, ${running} running, ${waiting} waiting · load ${load}` +
      `${role === "decode" ? "" : ` · ${pending} of pending prefill`} · KV ${kv} · scraped ${age} · ${model} · ${place}`);
  }

  legend() {
    const box = $("legend"), ramp = element("span", "ramp"), load = element("span", "key");
    ramp.style.background = rampGradient();
    load.append("idle", ramp, "full");
    const linked = this.layout.wan.length ? [key(TIER_COLOURS[TIER_COLOURS.length - 1], "WAN path, filled by its use", true), element("span", "key", "✕ WAN path closed")] : [];
    const both = this.layout.instances.some((instance) => instance.role === "both") ? [element("span", "key", "◆ both")] : [];
    const tiers = () => this.layout.tiers_present.map((tier) => key(TIER_COLOURS[tier], this.layout.tiers[tier]));
    box.replaceChildren(load, element("span", "key", "■ prefill"), element("span", "key", "● decode"), ...both,
      element("span", "key", "✕ down"), element("span", "key", "▨ breaker open"), ...tiers(), ...linked);
    $("tiers").keys.replaceChildren(...tiers(), key(LOCAL_COLOUR, "no transfer"));
  }
}

const BINDING = {
  prfaas_compute: "offloaded prefill", prfaas_egress: "the WAN path", pd_p: "prefill at home", pd_d: "decode at home",
};
const VERDICT = {
  switch_role: "roles are switched towards the best split",
  relieve: "one role has a queue and the other can spare an instance",
  off: "role switches are off",
  switching: "earlier role switches are in progress",
  no_gain: "no other split gains enough",
  not_busy: "another split is better, but the role that would grow is not busy",
  no_room: "another split is better, but the role that would shrink is needed",
  costly: "another split is better, but a role switch costs more than it gains",
};
const AWAY_COLOUR = TIER_COLOURS[TIER_COLOURS.length - 1], HOME_COLOUR = "#56b4e9";

// Prefill across datacenters: threshold and share over the last minutes, WAN paths, the last review, role switches.
class Offloading {
  setLayout(layout) {
    if (this.layout?.name !== layout.name) this.forget();
    this.layout = layout;
    this.datacenters = datacentersOf(layout);
  }

  forget() {
    this.sites = new Map(); // charts of thresholds, by site
    this.history = [];
    this.seen = new Map(); // role switches in progress, by instance
    this.over = [];
    $("sites").replaceChildren();
    this.share = null;
  }

  setTick(tick) {
    const { offload } = tick.load;
    $("sites-panel").hidden = !offload;
    if (!offload) return;
    if (this.history.length && tick.at < this.history[this.history.length - 1].at) this.forget(); // the gateway has restarted
    this.tick = tick;
    if (!this.share) this.build();
    this.charts(offload, this.sample(tick, offload));
    this.split(tick);
    this.links(tick, offload);
    this.review(tick, offload.review);
    this.roleSwitches(tick, offload);
  }

  build() {
    this.thresholds = element("div");
    this.share = barRow("prefills, last 60 s", 1);
    this.course = new Chart([["away", AWAY_COLOUR, "area"]]);
    const keys = element("div", "keys");
    keys.append(key(AWAY_COLOUR, "offloaded", true), key(HOME_COLOUR, "at home", true), element("span", "key", "▨ WAN path closed"));
    this.share.node.append(this.course.node, keys);
    this.table = element("table");
    this.table.append(element("thead"), element("tbody"));
    const scroll = element("div", "scroll");
    scroll.append(this.table);
    this.note = element("p", "note");
    this.roles = element("ul", "plain");
    $("sites").append(this.thresholds, this.share.node, scroll, this.note, this.roles);
  }

  state(site) {
    return pathState(site, this.tick.instances.some((tile, k) => tile[0] && this.datacenters[k] === site.name));
  }

  sample(tick, offload) { // one per second, for the time range of a chart
    const last = this.history[this.history.length - 1];
    if (last && tick.at - last.at < 1) return false;
    const shut = offload.sites.every((site) => isShut(this.state(site)));
    const sites = new Map(offload.sites.map((site) => [site.name, { now: site.threshold_tokens, base: site.base_tokens, shut: isShut(this.state(site)) }]));
    this.history.push({ at: tick.at, away: tick.offloaded_share, shut, sites });
    while (this.history[0].at < tick.at - Chart.most_s) this.history.shift();
    return true;
  }

  charts(offload, fresh) {
    for (const [name, { row }] of this.sites) if (!offload.sites.some((site) => site.name === name)) { row.node.remove(); this.sites.delete(name); }
    for (const site of offload.sites) {
      if (!this.sites.has(site.name)) {
        const row = barRow(`threshold of ${site.name}`, 0), chart = new Chart([["base", "var(--quiet)", "dashed"], ["now", "var(--accent)", "line"]], tokens);
        const keys = element("div", "keys");
        keys.append(key("var(--accent)", "now"), element("span", "key", "┄ base, as searched"), element("span", "key", "▨ WAN path closed"));
        row.node.append(chart.node, keys);
        this.thresholds.append(row.node);
        this.sites.set(site.name, { row, chart });
      }
      const { row, chart } = this.sites.get(site.name), what = `${tokens(site.threshold_tokens)} tokens, base ${tokens(site.base_tokens)}`;
      setText(row.figures, what);
      row.figures.title = "Prompts with more uncached tokens are prefilled there";
      if (fresh) chart.draw(this.history.map(({ at, sites }) => ({ at, ...sites.get(site.name) })), `Threshold of ${site.name}: ${what}`);
    }
    if (fresh) this.course.draw(this.history, "Share of offloaded prefills");
  }

  split(tick) {
    const share = tick.offloaded_share, away = share ?? 0;
    setText(this.share.figures, share === null ? "no prefills yet" : `${percent(away)} offloaded, ${percent(1 - away)} at home`);
    fillBar(this.share.bars[0], share === null ? [] : [[away, AWAY_COLOUR, `offloaded: ${percent(away)}`], [1 - away, HOME_COLOUR, `at home: ${percent(1 - away)}`]]);
    this.share.bars[0].setAttribute("aria-label", this.share.figures.textContent);
  }

  links(tick, offload) {
    const rows = this.layout.wan.flatMap((link, k) => {
      const site = offload.sites.find(({ name }) => name === link.source || name === link.target), load = tick.wan[k];
      const state = site ? this.state(site) : "";
      return [[link.source, link.target], [link.target, link.source]].map(([source, target], way) => [
        state, `${source} → ${target}`, `${bytes(link.bytes_per_s)}/s`, percent(load.utilisation[way]),
        load.in_flight[way] ? `${load.in_flight[way]}, ${bytes(load.in_flight_bytes[way])}` : "–", pathStateTexts(state)[1],
      ]);
    });
    fillTable(this.table, ["WAN path", "bandwidth", "used", "in flight", "state"], rows.map((row) => row.slice(1)));
    rows.forEach(([state], k) => this.table.tBodies[0].rows[k].classList.toggle("down", state !== ""));
  }

  review(tick, review) {
    if (!review) { setText(this.note, "No review yet: too few requests."); return; }
    const homes = this.layout.sites.filter((site) => site.role === "home").map((site) => site.name);
    const splits = homes.map((home, k) => {
      const roles = this.layout.instances.map((_, at) => at).filter((at) => this.datacenters[at] === home).map((at) => roleNow(this.layout, tick, at));
      const count = (role) => roles.filter((each) => each === role || each === "both").length;
      return `${home} has ${count("prefill")} prefill + ${count("decode")} decode, best ${review.n_prefill[k]} + ${review.n_decode[k]}`;
    });
    const age_s = Math.round(tick.at - review.at);
    setText(this.note, `Review ${age_s > 0 ? `${seconds(age_s)} ago` : "just now"}: ${figures(review.rate_per_s)} requests/s arrive, the present split can serve ` +
      `${figures(review.lambda_max_per_s)}/s (λ max), limited by ${BINDING[review.binding] ?? review.binding}; the best split ${figures(review.best_per_s)}/s, ` +
      `gain ${percent(review.gain)}. ${splits.join("; ")}: ${VERDICT[review.verdict] ?? review.verdict}.`);
  }

  roleSwitches(tick, offload) {
    const now = new Map(offload.role_switches.map((each) => [each.instance, each]));
    for (const [name, { role }] of this.seen) {
      if (now.has(name)) continue;
      const k = this.layout.instances.findIndex((instance) => instance.name === name);
      const serves = k < 0 ? "" : roleNow(this.layout, tick, k);
      this.over = [`${name} ${serves === role ? `serves ${role} since` : `did not switch to ${role} at`} ${clock(tick.at)}`, ...this.over].slice(0, 5);
    }
    this.seen = now;
    const changed = Object.entries(offload.roles).filter(([name]) => !now.has(name));
    const lines = [
      ...offload.role_switches.map(({ instance, role, stage }) => `⇄ ${instance} becomes ${role}: ${stage === "draining" ? "draining" : "its hook is running"}`),
      ...this.over,
      ...(changed.length ? [`Different from the cluster file: ${changed.map(([name, role]) => `${name} serves ${role}`).join(", ")}`] : []),
      ...(offload.switches_roles ? [] : ["No hook: roles do not change."]),
    ];
    while (this.roles.children.length > lines.length) this.roles.lastChild.remove();
    while (this.roles.children.length < lines.length) this.roles.append(element("li"));
    lines.forEach((text, k) => setText(this.roles.children[k], text));
  }
}

const total = (values) => values.reduce((sum, value) => sum + value, 0);
const inColour = (row, tier) => { row.cells[0].style.boxShadow = `inset 4px 0 ${TIER_COLOURS[tier]}`; row.cells[0].style.paddingLeft = "10px"; };
const TERM_LABELS = { imposed_s: "imposed on others", wait_s: "slot wait", step_s: "first step", slot_s: "cost of using a slot", pace_bytes_per_s: "pace",
  prompts_s: "prompts before", steps_s: "steps beside", delay_s: "delay of others", later_s: "later prompts", reserve_s: "kept free for prompts",
  batch_s: "steps of the batch", beyond_s: "price of token delays" };
const termLabel = (name) => TERM_LABELS[name] ?? (isTime(name) ? name.slice(0, -2) : name.replace(/_bytes_per_s$/, " bandwidth")).replaceAll("_", " ");

// The times that add up to a cost in seconds, without those that are 0.
const summands = (terms) => Object.entries(terms).filter(([name, value]) => isTime(name) && value > 0)
  .map(([name, value]) => `${termLabel(name)} ${seconds(value)}`).join(" + ");
