/* Two runs side by side: what was set otherwise, what became of each, and their curves in one picture. */

const TOLD = [
  ["status", "status", String],
  ["held-out tasks solved, before", "solve_rate_first", percent],
  ["held-out tasks solved, after", "solve_rate_last", percent],
  ["solved greedily, before", "greedy_first", percent],
  ["solved greedily, after", "greedy_last", percent],
  ["lines in error, before", "line_error_rate_first", percent],
  ["lines in error, after", "line_error_rate_last", percent],
  ["solved by checkpoints/best", "solve_rate_best", percent],
  ["follow altered output", "tamper_followed", percent],
  ["held-out tasks", "held_out_tasks", String],
  ["steps", "stopped_at_step", String],
  ["wall clock", "wall_s", duration],
  ["engine", "engine", String],
  ["sandbox", "sandbox", String],
  ["cores", "cores", String],
];
const FIRST = [
  ["Solve rate of training rollouts", "solve_rate", { max: 1, format: share }],
  ["Lines in error", "line_error_rate", { format: share }],
  ["Mean outcome", "reward_mean", {}],
  ["Lines of a rollout", "lines_per_rollout", {}],
  ["Sampled tokens a step", "sampled_tokens", {}],
  ["Entropy, nats", "entropy", {}],
  ["Sampler and trainer apart, nats, largest", "logprob_gap_max", { log: true }],
  ["Gradient norm", "grad_norm", {}],
  ["Seconds of rollouts a step", "rollout_s", {}],
  ["Seconds of the update a step", "update_s", {}],
];

function difference(show, values) {
  if (!values.every((v) => typeof v === "number") || ![percent, duration].includes(show)) return "";
  const apart = values[1] - values[0];
  return (apart > 0 ? "+" : apart < 0 ? "−" : "") + show(Math.abs(apart));
}

function figuresTable(runs) {
  const rows = TOLD.map(([label, name, show]) => [label, show, runs.map((run) => run.summary[name])])
    .filter(([, , values]) => values.some((v) => v !== undefined && v !== null));
  const cell = (show, v) => el("td", {}, v === undefined || v === null ? "–" :
    visible(typeof v === "number" ? show(v) : typeof v === "object" ? JSON.stringify(v) : String(v)));
  return el("table", { class: "facts beside" }, headRow(runs, "difference"),
    rows.map(([label, show, values]) => el("tr", {}, el("th", {}, label), values.map((v) => cell(show, v)),
      el("td", {}, difference(show, values)))));
}

function settingsTable(data) {
  if (!data.settings.length) return el("p", { class: "quiet" }, "They have the same settings.");
  return el("table", { class: "facts beside" }, headRow(data.runs),
    data.settings.map(([name, ...values]) => el("tr", {}, el("th", {}, visible(name)), values.map((v) => el("td", {}, visible(v))))));
}

function headRow(runs, ...more) {
  return el("tr", {}, el("th", {}), runs.map((run, k) => el("th", {}, el("i", { class: "swatch c" + k }), visible(run.name))),
    more.map((text) => el("th", {}, text)));
}

/* One figure of both runs over the steps of both. */
function together(runs, title, name, options) {
  const xs = [...new Set(runs.flatMap((run) => run.metrics.step || []))].sort((a, b) => a - b);
  const series = runs.map((run) => {
    const at = new Map((run.metrics.step || []).map((x, i) => [x, (run.metrics[name] || [])[i]]));
    return { name: plain(run.name), values: xs.map((x) => at.get(x) ?? null) };
  });
  return chart(title, xs, series, options);
}

function heldOut(runs) {
  const found = runs.map((run) => evaluated(run, "solve_rate"));
  const xs = [...new Set(found.flat().map(([x]) => x))].sort((a, b) => a - b);
  const series = found.map((points, k) => ({ name: plain(runs[k].name), points, values: xs.map((x) => new Map(points).get(x) ?? null) }));
  return chart("Held-out tasks solved", xs, series, { max: 1, format: share });
}

function others(runs) {
  const known = new Set(["step", ...FIRST.map(([, name]) => name)]);
  const names = [...new Set(runs.flatMap((run) => Object.keys(run.metrics)))].filter((name) => !known.has(name)).sort();
  return el("details", { class: "families" }, el("summary", {}, `All other figures (${names.length})`),
    el("div", { class: "charts" }, names.map((name) => together(runs, plain(name), name, {}))));
}

unpacked(document.getElementById("data").textContent).then((data) => {
  document.getElementById("page").replaceChildren(
    el("header", { class: "top" }, el("div", { class: "name" }, el("h1", {}, visible(data.name)),
      el("span", { class: "quiet" }, "side by side")), el("nav", {}, themeButton())),
    el("section", { class: "run" }, el("div", {}, el("h2", {}, "What became of them"), figuresTable(data.runs)),
      el("div", {}, el("h2", {}, "What was set otherwise"), settingsTable(data))),
    el("div", { class: "charts" }, heldOut(data.runs), FIRST.map(([title, name, options]) => together(data.runs, title, name, options))),
    others(data.runs));
  document.body.dataset.ready = "yes";
});
