/* The overview: what changed, and the curves behind it. */

const share = (v) => percent(v).replace(".0%", "%");

function keyFigures(data) {
  const s = data.summary;
  const change = (name) => (s[name + "_last"] === undefined ? percent(s[name + "_first"]) :
    [el("small", {}, percent(s[name + "_first"]) + " → "), percent(s[name + "_last"])]);
  const figures = [
    ["held-out tasks solved", change("solve_rate"), s.solve_rate_first !== undefined],
    ["solved greedily", change("greedy"), s.greedy_first !== undefined],
    ["lines in error", change("line_error_rate"), s.line_error_rate_first !== undefined],
    ["solved by checkpoints/best", `${percent(s.solve_rate_best)} (step ${s.best_step})`, s.best_step !== undefined],
    ["follow altered output", percent(s.tamper_followed), typeof s.tamper_followed === "number"],
    ["steps", String(s.stopped_at_step ?? data.steps.length), true],
    ["wall clock", s.wall_s ? duration(s.wall_s) : "–", s.wall_s !== undefined],
  ];
  return el("dl", { class: "figures" },
    figures.filter((f) => f[2]).map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))));
}

function duration(s) {
  return s < 90 ? number(s, 2) + " s" : s < 5400 ? (s / 60).toFixed(1) + " min" : (s / 3600).toFixed(1) + " h";
}

function overview(data) {
  const m = data.metrics, xs = m.step || [];
  const s = data.summary;
  const of = (name, label) => ({ name: label || name, values: m[name] });
  const steps = data.steps.map((step) => step.step);
  const charts = [
    chart("Solve rate", xs, [of("solve_rate", "training rollouts"), { name: "held-out tasks", points: evaluated(data, "solve_rate") },
      { name: "greedy", points: evaluated(data, "greedy") }],
      { max: 1, format: share }),
    chart("Lines in error, by class", steps, classSeries(data.steps), { stacked: true, format: share }),
    chart("Reward of a rollout, by source", steps, rewardSeries(data.steps),
      { help: "mean outcome, and mean sum of line rewards for each status" }),
    ...namedCharts(m, xs),
    chart("Lines of a rollout", xs, [of("lines_per_rollout", "lines"), of("line_tokens_mean", "tokens a line")]),
    chart("Tokens a step", xs, [of("sampled_tokens", "sampled"), of("observed_tokens", "observed")], { stacked: true }),
    chart("Seconds a step", xs, [of("rollout_s", "rollouts"), of("update_s", "update"), of("sync_s", "weight sync")],
      { stacked: true }),
    chart("Idle, share of a step", xs, [of("trainer_idle", "the trainer waits"), of("sampler_idle", "nothing is sampled")],
      { format: share, max: 1 }),
    chart("Age of what is learned from, steps", xs, [of("staleness_mean", "mean"), of("staleness_max", "oldest")]),
    chart("Farming indicators", xs, [of("void_line_rate", "void lines"), of("print_rate", "print"),
      of("print_spam_rate", "print the same"), of("try_rate", "try"), of("repeat_rate", "repeated"),
      of("line_tokens_drift", "line length drift")],
      { format: share, help: "shares of lines that compute nothing, print, print nothing new, hide errors, repeat the line before" }),
    chart("Shaping", xs, [of("shaping_share", "share of reward"), of("shaping_correlation", "correlation")],
      { help: "how line rewards stand to outcomes" }),
    chart("Length", xs, [of("length_outcome_correlation", "with outcome"), of("length_advantage_correlation", "with advantage")],
      { help: "correlations of a rollout's length, within its group: above 0, long ones are paid more" }),
    chart("Sampler and trainer apart, nats", xs, [of("logprob_gap_max", "largest"), of("logprob_gap_mean", "mean"),
      of("logprob_gap_after_observation", "after observations")],
      { log: true }),
    chart("Nodes of the fleet", xs, [of("fleet_nodes", "ready"), of("fleet_nodes_lost", "lost so far"),
      of("fleet_groups_replayed", "groups begun again so far")]),
    chart("Entropy, nats", xs, [of("entropy", "")]),
    chart("Gradient norm", xs, [of("grad_norm", "")]),
    chart("Endings and faults", xs, [of("answered_rate", "answered"), of("cut_rate", "cut by a budget"), of("too_long_rate", "too long"),
      of("timeout_rate", "timeouts"), of("sandbox_fault_rate", "our faults")], { format: share, max: 1 }),
  ];
  return el("section", {}, keyFigures(data), familyTable(s), el("div", { class: "charts" }, charts));
}

/* Points [step, value] of the evaluations on held-out tasks: before, during and after the training. */
function evaluated(data, name) {
  const s = data.summary, m = data.metrics, xs = m.step || [], last = s.stopped_at_step ?? xs[xs.length - 1] ?? 0;
  return [
    ...(s[name + "_first"] === undefined ? [] : [[0, s[name + "_first"]]]),
    ...xs.map((x, i) => [x, (m["eval/" + name] || [])[i]]).filter(([x, y]) => typeof y === "number" && x !== last),
    ...(s[name + "_last"] === undefined ? [] : [[last, s[name + "_last"]]]),
  ];
}

/* A chart for each kind of figure that has names of its own; six names each, and the sum of the rest. */
function namedCharts(m, xs) {
  const kinds = [
    ["outcome/", "Outcome, by part", "mean over graded rollouts; the parts add up"],
    ["reward/", "Rewards of lines, by name", "mean sum over the lines of a rollout"],
    ["error/", "Lines in error, by exception", "shares of executed lines"],
    ["tool/", "Tools", "calls and failures a rollout"],
  ];
  return kinds.map(([kind, title, help]) => {
    const size = (name) => m[name].reduce((sum, v) => sum + Math.abs(v ?? 0), 0);
    const names = Object.keys(m).filter((name) => name.startsWith(kind)).sort((a, b) => size(b) - size(a));
    const series = names.slice(0, 6).map((name) => ({ name: plain(name.slice(kind.length)), values: m[name].map((v) => v ?? 0) }));
    if (names.length > 6) series.push({ name: "the rest", values: xs.map((_, at) =>
      names.slice(6).reduce((sum, name) => sum + (m[name][at] ?? 0), 0)) });
    return series.length ? chart(title, xs, series, { help }) : null;
  }).filter(Boolean);
}

/* The six most frequent classes, as shares of all lines of their step. */
function classSeries(steps) {
  const totals = {};
  for (const step of steps) for (const [name, n] of Object.entries(step.classes)) totals[name] = (totals[name] || 0) + n;
  const names = Object.keys(totals).sort((a, b) => totals[b] - totals[a]);
  const series = names.slice(0, 6).map((name) => ({
    name: plain(name), values: steps.map((step) => (step.classes[name] || 0) / Math.max(step.lines, 1)),
  }));
  const rest = names.slice(6);
  if (rest.length) series.push({ name: "others", values: steps.map((step) =>
    rest.reduce((sum, name) => sum + (step.classes[name] || 0), 0) / Math.max(step.lines, 1)) });
  return series;
}

function rewardSeries(steps) {
  const names = [...new Set(steps.flatMap((step) => Object.keys(step.earned)))].sort();
  return [{ name: "outcome", values: steps.map((step) => step.outcome) },
    ...names.slice(0, 6).map((name) => ({ name: plain(name.replaceAll("_", " ")), values: steps.map((step) => step.earned[name] || 0) }))];
}

function familyTable(s) {
  if (!s.families_first || !Object.keys(s.families_first).length) return null;
  const last = s.families_last || {};
  const bar = (value) => {
    const node = el("span", { class: "bar" }, el("i"));
    node.firstChild.style.width = 100 * (value || 0) + "%";
    return node;
  };
  return el("details", { class: "families" }, el("summary", {}, "Solve rate by family of tasks"),
    el("table", {}, Object.keys(s.families_first).map((name) => el("tr", {}, el("th", {}, plain(name)),
      el("td", {}, percent(s.families_first[name])), el("td", {}, name in last ? percent(last[name]) : ""),
      el("td", {}, bar(last[name] ?? s.families_first[name]))))));
}
