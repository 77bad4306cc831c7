// The last 15 minutes as small lines: requests, time to first token, and KV bytes.

import { bytes, drawn, element, figures, seconds, setText } from "./format.js";

const AT = 0, MOST_S = 900, LEAST_S = 120, POINTS_MOST = 180, GAP_S = 30; // a line does not cross a longer pause
const CHARTS = [ // title, unit of the texts, and the lines: [place in a point, name, class]
  { title: "requests / s", text: figures, lines: [[1, "", "line"]] },
  { title: "TTFT", text: seconds, lines: [[2, "p50", "line"], [3, "p95", "dashed"]] },
  { title: "KV transferred", text: (value) => `${bytes(value)}/s`, lines: [[4, "", "line"]] },
];

export class History {
  constructor(panel) {
    this.panel = panel;
    this.points = [];
    this.charts = CHARTS.map((chart) => {
      const node = element("div", "spark"), head = element("p", "line"), name = element("span", "name"), now = element("span", "figures"), picture = drawn("svg", { viewBox: "0 0 100 100", preserveAspectRatio: "none", role: "img" });
      const paths = chart.lines.map(([, , kind]) => drawn("path", { class: kind, fill: "none" }));
      const box = element("div", "chart"), high = element("span", "high");
      head.append(name, now);
      picture.append(...paths);
      box.append(picture, high);
      node.append(head, box);
      panel.append(node);
      return { ...chart, name, now, high, picture, paths };
    });
  }

  set(points) { // all points of a snapshot
    this.points = points.slice(-POINTS_MOST);
    this.draw();
  }

  add(point) { // the newest point, repeated in every update until the next one
    const last = this.points[this.points.length - 1];
    if (!point || (last && point[AT] <= last[AT])) return;
    this.points = [...this.points, point].slice(-POINTS_MOST);
    this.draw();
  }

  draw() {
    this.panel.hidden = this.points.length < 2;
    if (this.panel.hidden) return;
    const end = this.points[this.points.length - 1][AT], span = Math.min(Math.max(end - this.points[0][AT], LEAST_S), MOST_S);
    for (const { title, text, lines, name: heading, now, high, picture, paths } of this.charts) {
      const top = Math.max(...this.points.flatMap((point) => lines.map(([place]) => point[place] ?? 0)));
      lines.forEach(([place], k) => paths[k].setAttribute("d", pathOf(this.points, place, end, span, top)));
      const texts = lines.map(([place, name]) => {
        const known = this.points.map((point) => point[place]).filter((value) => value !== null), last = this.points[this.points.length - 1][place];
        const range = known.length ? `, lowest ${text(Math.min(...known))}, highest ${text(Math.max(...known))}` : "";
        return `${name ? `${name} ` : ""}now ${last === null ? "none" : text(last)}${range}`;
      });
      setText(now, lines.map(([place, name]) => `${name ? `${name} ` : ""}${text(this.points[this.points.length - 1][place])}`).join(" · "));
      setText(heading, `${title}, last ${seconds(span)}`);
      setText(high, top > 0 ? text(top) : "none");
      picture.setAttribute("aria-label", `${title}, last ${seconds(span)}: ${texts.join("; ")}`);
    }
  }
}

function pathOf(points, place, end, span, top) {
  return points.map((point, k) => {
    if (point[place] === null) return "";
    const before = points[k - 1], follows = before && before[place] !== null && point[AT] - before[AT] <= GAP_S;
    const x = Math.max(0, 100 * (1 - (end - point[AT]) / span)), y = 96 - 88 * (top > 0 ? point[place] / top : 0);
    return `${follows ? "L" : "M"}${x.toFixed(2)} ${y.toFixed(2)}${follows ? "" : "h.01"}`; // a point alone is visible too
  }).join("");
}
