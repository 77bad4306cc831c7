// The page: one stream of events from the gateway while the page is visible; the map and the panels draw it.

import { onTheme } from "./format.js";
import { History } from "./history.js";
import { ClusterMap } from "./map.js";
import { Panels } from "./panels.js";

const $ = (id) => document.getElementById(id);
const panels = new Panels();
const past = new History($("history-panel"));
const map = new ClusterMap($("map"), (index) => panels.inspect(index, true));
let source = null, layout = null, updated_ms = 0;

function status(text, kind) {
  $("link").textContent = text;
  $("link").className = `chip ${kind}`;
}

function tick(data) {
  updated_ms = performance.now();
  panels.setTick(data);
  past.add(data.history);
  map.setTick(data);
  if (map.chosen >= 0) panels.inspect(map.chosen);
  const { load } = data, down = data.instances.filter((tile) => !tile[0] || tile[1] === 2).length;
  const cut = (load.offload?.sites ?? []).filter((site) => site.wan_path !== "closed").map((site) => `, WAN path of ${site.name} closed`).join("");
  const shared = load.replication, with_others = !shared ? "" : shared.state === "in_sync" ? `, in sync with ${shared.gateways} other gateway${shared.gateways === 1 ? "" : "s"}` : `, ${shared.state === "disconnected" ? "without the other gateways" : "joining the other gateways"}`;
  const note = `${layout.instances.length} instances${down ? `, ${down} out of service` : ""}${cut}${with_others}`;
  if ($("map-note").textContent !== note) {
    $("map-note").textContent = note;
    $("map").setAttribute("aria-label", `${layout.name}: ${note}`);
  }
  const panics = (load.panics ?? []).filter((each) => each.active).map((each) => `${each.role} (${each.available} of ${each.instances} available)`);
  const panic = panics.length ? `panic: health checks and breakers ignored: ${panics.join(", ")}` : "";
  if ($("panic").textContent !== panic) {
    $("panic").textContent = panic;
    $("panic").hidden = !panic;
  }
  if (load.draining) status("draining", "bad");
  else if (!load.ready) status("not ready", "bad");
  else status("live", "good");
}

function show(snapshot) {
  layout = snapshot.layout;
  panels.setLayout(layout);
  map.setLayout(layout);
  past.set(snapshot.history ?? []);
  tick(snapshot.tick);
}

function open() {
  source = new EventSource("events");
  source.addEventListener("snapshot", (event) => show(JSON.parse(event.data)));
  source.addEventListener("tick", (event) => { if (layout) tick(JSON.parse(event.data)); });
  source.onerror = () => {
    status("no connection, reconnecting", "bad");
    if (source.readyState === EventSource.CLOSED) setTimeout(() => { close(); open(); }, 2000);
  };
}

function close() {
  source?.close();
  source = null;
}

document.addEventListener("visibilitychange", () => {
  if (document.hidden) close();
  else if (!source && !saved) open();
});
setInterval(() => { if (source && updated_ms && performance.now() - updated_ms > 3000) status("no update for 3 s", "bad"); }, 1000);
$("table-box").addEventListener("toggle", () => { if (layout && panels.tick && $("table-box").open) panels.table(); });
onTheme(() => { if (layout) panels.legend(); });
const saved = $("saved"); // a saved page contains its state
if (saved) {
  map.repeats = true;
  show(JSON.parse(saved.textContent));
  panels.explainNewest();
  status("saved", "quiet");
} else open();
