// The lines of transfers on the map: through the gaps between tiles inside a datacenter, along the link between two.

const CURVE_STEPS = 24;
const LANES = [0, -2.5, 2.5]; // transfers side by side in one gap
export const ROUTED_LEAST = 14; // smaller tiles leave no gap for a line: an arc over the tiles instead

// A line: `at(share)` is its point at a share of its length, `bends` the shares where it changes its direction.
const lineOf = (points) => {
  const sums = [0];
  for (let k = 1; k < points.length; k += 1) sums.push(sums[k - 1] + Math.hypot(points[k].x - points[k - 1].x, points[k].y - points[k - 1].y));
  const length = sums[sums.length - 1] || 1;
  return { at: (share) => along(points, sums, share * length), bends: sums.map((sum) => sum / length), sums };
};

// Between two tiles (their upper left corners): out of the side, through the gaps beside the columns and above the
// lower one of the two rows, and into the side. `gap` is the distance between tiles, `size` their size.
export function gapRoute(source, target, size, gap, id) {
  const half = size / 2, lane = LANES[id % LANES.length] * Math.min(1, gap / 9), sideways = Math.abs(source.x - target.x), lower = Math.max(source.y, target.y);
  const right = target.x > source.x + 1, left = target.x < source.x - 1;
  const from = { x: source.x + (left ? 0 : size), y: source.y + half + lane }, to = { x: target.x + (right ? 0 : size), y: target.y + half + lane };
  if (Math.abs(source.y - target.y) < 1 && sideways < 1.7 * (size + gap)) return lineOf([from, to]); // neighbours
  const out = from.x + (left ? -1 : 1) * (gap / 2) + lane, into = to.x + (right ? -1 : 1) * (gap / 2) + lane;
  if (Math.abs(out - into) < gap) return lineOf([from, { x: out, y: from.y }, { x: out, y: to.y }, to]);
  const across = lower - gap / 2 + lane;
  return lineOf([from, { x: out, y: from.y }, { x: out, y: across }, { x: into, y: across }, { x: into, y: to.y }, to]);
}

export function arcRoute(a, b) {
  const length = Math.hypot(b.x - a.x, b.y - a.y), bend = Math.min(46, length * 0.22);
  const c = { x: (a.x + b.x) / 2 - (bend * (b.y - a.y)) / (length || 1), y: (a.y + b.y) / 2 + (bend * (b.x - a.x)) / (length || 1) };
  return { at: (share) => bezier(a, c, b, share), bends: Array.from({ length: CURVE_STEPS + 1 }, (_, k) => k / CURVE_STEPS) };
}

export const linkRoute = (a, ends, b) => lineOf([a, ...ends, b]);

// The points to draw of a line from one share to another.
export function pointsOf({ at, bends }, from, to) {
  return [at(from), ...bends.filter((share) => share > from && share < to).map(at), at(to)];
}

function along(points, sums, distance) {
  let k = 1;
  while (k < points.length - 1 && sums[k] < distance) k += 1;
  const share = (distance - sums[k - 1]) / (sums[k] - sums[k - 1] || 1), a = points[k - 1], b = points[k];
  return { x: a.x + share * (b.x - a.x), y: a.y + share * (b.y - a.y) };
}

function bezier(a, c, b, t) {
  const u = 1 - t;
  return { x: u * u * a.x + 2 * u * t * c.x + t * t * b.x, y: u * u * a.y + 2 * u * t * c.y + t * t * b.y };
}
