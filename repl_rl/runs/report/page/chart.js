/* Small line and area charts, drawn by hand: a title, a legend that tells values under the pointer, quiet axes. */

const W = 380, H = 190, LEFT = 44, RIGHT = 8, TOP = 8, BOTTOM = 22;

/* series: [{name, values, points: [[x, y]]}], values aligned with xs. options: stacked, format, log, max. */
function chart(title, xs, series, options = {}) {
  const { stacked = false, format = number, log = false, help = "" } = options;
  const shown = series.filter((s) => (s.values || []).some((v) => v !== null && v !== undefined) || (s.points || []).length);
  const box = el("figure", { class: "chart" }, el("figcaption", { title: help }, title));
  if (!shown.length || xs.length === 0) {
    box.append(el("p", { class: "quiet" }, "nothing recorded"));
    return box;
  }
  const tops = stacked ? stack(shown, xs.length) : shown.map((s) => s.values || []);
  const all = [...tops.flat(), ...shown.flatMap((s) => (s.points || []).map((p) => p[1]))];
  const scale = scaleOf(all.filter((v) => Number.isFinite(v)), log, options.max);
  const [x0, x1] = [Math.min(xs[0], 0 + xs[0]), Math.max(xs[xs.length - 1], xs[0] + 1)];
  const left = shown.some((s) => s.points) ? Math.min(x0, ...shown.flatMap((s) => (s.points || []).map((p) => p[0]))) : x0;
  const X = (x) => LEFT + ((x - left) / (x1 - left)) * (W - LEFT - RIGHT);
  const Y = (y) => TOP + (1 - scale.at(y)) * (H - TOP - BOTTOM);
  const plot = svg("svg", { viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": title });
  for (const tick of scale.ticks) {
    plot.append(svg("line", { class: "grid", x1: LEFT, x2: W - RIGHT, y1: Y(tick), y2: Y(tick) }));
    plot.append(svg("text", { class: "tick end", x: LEFT - 6, y: Y(tick) + 3 }, format(tick)));
  }
  for (const x of [...new Set([left, Math.round((left + x1) / 2), x1])])
    plot.append(svg("text", { class: "tick mid", x: X(x), y: H - 6 }, String(x)));
  shown.forEach((s, k) => {
    const below = stacked && k > 0 ? tops[k - 1] : null;
    if (stacked) plot.append(svg("path", { class: "area c" + k, d: area(xs, tops[k], below, X, Y, scale) }));
    else if (s.values) plot.append(svg("path", { class: "curve c" + k, d: path(xs, tops[k], X, Y) }));
    for (const [x, y] of s.points || []) plot.append(svg("circle", { class: "point c" + k, cx: X(x), cy: Y(y), r: 3.5 }));
  });
  const legend = shown.length > 1 || shown[0].name ? shown.map((s, k) => legendEntry(s, k)) : [];
  const values = legend.map((entry) => entry.querySelector("b"));
  box.append(el("div", { class: "legend" }, legend), plot);
  hover(plot, xs, X, (i) => {
    shown.forEach((s, k) => {
      if (values[k]) values[k].textContent = i === null || !s.values ? "" : " " + format(s.values[i]);
    });
    box.firstChild.textContent = i === null ? title : title + " · step " + xs[i];
  });
  return box;
}

function legendEntry(s, k) {
  return el("span", {}, el("i", { class: "c" + k }), s.name, el("b"));
}

function stack(series, n) {
  const tops = [];
  for (const s of series) {
    const below = tops[tops.length - 1];
    tops.push(Array.from({ length: n }, (_, i) => (s.values[i] || 0) + (below ? below[i] : 0)));
  }
  return tops;
}

function scaleOf(values, log, max) {
  const high = max !== undefined ? max : Math.max(...values, 0) || 1;
  if (log) {
    const lows = values.filter((v) => v > 0);
    const a = Math.floor(Math.log10(Math.min(...lows, 1))), b = Math.max(a + 1, Math.ceil(Math.log10(high)));
    const ticks = [];
    for (let e = a; e <= b; e += Math.max(1, Math.ceil((b - a) / 4))) ticks.push(10 ** e);
    return { at: (v) => (Math.log10(Math.max(v, 10 ** a)) - a) / (b - a), ticks };
  }
  const low = Math.min(...values, 0);
  const step = nice((high - low) / 3);
  const first = Math.floor(low / step) * step, last = max !== undefined ? max : Math.ceil(high / step - 1e-9) * step;
  const ticks = [];
  for (let v = first; v <= last + step * 1e-6; v += step) ticks.push(Math.abs(v) < step * 1e-6 ? 0 : v);
  return { at: (v) => (v - first) / (last - first || 1), ticks };
}

function nice(rough) {
  const power = 10 ** Math.floor(Math.log10(rough || 1));
  return [1, 2, 2.5, 5, 10].find((m) => m * power >= rough * 0.999) * power;
}

function path(xs, ys, X, Y) {
  let d = "", down = false;
  xs.forEach((x, i) => {
    const y = ys[i];
    if (y === null || y === undefined || !Number.isFinite(y)) return (down = false);
    d += (down ? "L" : "M") + X(x).toFixed(1) + " " + Y(y).toFixed(1);
    down = true;
  });
  return d;
}

function area(xs, top, below, X, Y, scale) {
  const forth = xs.map((x, i) => X(x).toFixed(1) + " " + Y(top[i]).toFixed(1));
  const back = xs.map((x, i) => X(x).toFixed(1) + " " + Y(below ? below[i] : Math.max(0, scale.ticks[0])).toFixed(1));
  return "M" + forth.join("L") + "L" + back.reverse().join("L") + "Z";
}

function hover(plot, xs, X, tell) {
  const rule = svg("line", { class: "rule", y1: TOP, y2: H - BOTTOM, x1: -9, x2: -9 });
  plot.append(rule);
  plot.addEventListener("pointermove", (event) => {
    const frame = plot.getBoundingClientRect();
    const x = ((event.clientX - frame.left) / frame.width) * W;
    let best = 0;
    xs.forEach((v, i) => (best = Math.abs(X(v) - x) < Math.abs(X(xs[best]) - x) ? i : best));
    rule.setAttribute("x1", X(xs[best]));
    rule.setAttribute("x2", X(xs[best]));
    tell(best);
  });
  plot.addEventListener("pointerleave", () => {
    rule.setAttribute("x1", -9);
    rule.setAttribute("x2", -9);
    tell(null);
  });
}
