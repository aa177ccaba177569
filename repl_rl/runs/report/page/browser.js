/* The rollouts: a searchable list of which only the visible rows are in the page, and the one that was chosen. */

const ROW = 46;

/* state: the filter and the ids chosen; load(t) gives a promise of the whole trajectory. */
function browser(data, rows, state, load, changed) {
  const statuses = [...new Set(rows.flatMap((t) => t.statuses.split(" ").filter(Boolean)))].sort();
  const classes = [...new Set(rows.flatMap((t) => t.classes))].sort();
  const count = el("span", { class: "quiet count" });
  const list = el("div", { class: "list", tabindex: 0, role: "listbox", "aria-label": "rollouts" });
  const tall = el("div", { class: "tall" });
  const pane = el("div", { class: "pane" });
  list.append(tall);
  let found = [];
  const set = (name) => (value) => { state[name] = value; refresh(); };
  const box = el("input", { type: "search", placeholder: "Search task, prompt, answer, status, error …",
    "aria-label": "search", value: state.q, oninput: (event) => set("q")(event.target.value) });
  const bar = el("div", { class: "filters" }, box,
    choices("outcome", Object.keys(OUTCOMES).map((k) => [k, k]), state.outcome, set("outcome")),
    choices("status", [["", "any status"], ...statuses.map((v) => [v, v.replaceAll("_", " ")])], state.status, set("status")),
    choices("error class", [["", "any error"], ...classes.map((v) => [v, plain(v)])], state.error, set("error")),
    choices("order", Object.keys(SORTS).map((k) => [k, k]), state.sort, set("sort")), count);

  function refresh() {
    found = search(rows, state);
    count.textContent = found.length.toLocaleString("en") + " of " + rows.length.toLocaleString("en");
    tall.style.height = found.length * ROW + "px";
    list.scrollTop = 0;
    draw();
    if (!found.some((t) => t.id === state.id)) choose(found[0]);
    else changed();
  }

  function draw() {
    const from = Math.max(0, Math.floor(list.scrollTop / ROW) - 5);
    const to = Math.min(found.length, from + Math.ceil((list.clientHeight || 700) / ROW) + 10);
    tall.replaceChildren(...found.slice(from, to).map((t, i) => item(t, from + i)));
  }

  function item(t, i) {
    const node = el("div", { class: "item" + (t.id === state.id ? " chosen" : ""), role: "option", "data-id": t.id,
      onclick: () => choose(t) },
      el("i", { class: "mark " + (t.outcome === null ? "none" : t.solved ? "good" : "poor") }),
      el("span", { class: "what" }, visible(firstLine(t.prompt))),
      el("span", { class: "sub" }, "policy step " + t.step + " · " + (t.classes.map(plain).join(", ") || t.stop.replaceAll("_", " "))),
      el("span", { class: "num" }, t.reward === null ? "" : signed(t.reward)));
    node.style.top = i * ROW + "px";
    return node;
  }

  function choose(t) {
    state.id = t ? t.id : null;
    draw();
    changed();
    pane.replaceChildren(t ? el("p", { class: "quiet" }, "…") : el("p", { class: "quiet" }, "No rollout fits the filter."));
    if (t) openRollout(t, pane, data, rows, state, load, changed);
  }

  list.addEventListener("scroll", draw, { passive: true });
  list.addEventListener("keydown", (event) => {
    const move = { ArrowDown: 1, ArrowUp: -1, j: 1, k: -1 }[event.key];
    if (!move) return;
    event.preventDefault();
    const at = Math.min(found.length - 1, Math.max(0, found.findIndex((t) => t.id === state.id) + move));
    if (at * ROW < list.scrollTop || (at + 1) * ROW > list.scrollTop + list.clientHeight) list.scrollTop = (at - 3) * ROW;
    choose(found[at]);
  });
  new ResizeObserver(draw).observe(list);
  const page = el("section", { class: "browser" }, bar, el("div", { class: "split" }, list, pane));
  const start = rows.find((t) => t.id === state.id);
  refresh();
  if (start) choose(start);
  const at = found.findIndex((t) => t.id === state.id);
  requestAnimationFrame(() => { list.scrollTop = Math.max(0, at - 4) * ROW; draw(); });
  return page;
}

function firstLine(prompt) {
  const rows = prompt.split("\n").filter((row) => row.trim() && !row.startsWith(">>>"));
  return (rows[0] || "").slice(0, 160);
}

async function openRollout(t, pane, data, rows, state, load, changed) {
  const members = rows.filter((o) => o.task === t.task && o.step === t.step);
  const whole = await load(t);
  if (state.id !== t.id) return;
  const other = members.find((o) => o.id === state.other && o.id !== t.id);
  const second = other ? await load(other) : null;
  if (state.id !== t.id) return;
  const again = () => openRollout(t, pane, data, rows, state, load, changed);
  const heats = Object.entries(HEATS).map(([name, text]) =>
    el("button", { "aria-pressed": String(state.heat === name), "data-heat": name,
      onclick: () => { state.heat = name; changed(); again(); } }, text));
  const group = members.filter((o) => o.id !== t.id).map((o) =>
    el("button", { class: "member", "aria-pressed": String(!!other && o.id === other.id), "data-id": o.id,
      title: plain(o.id), onclick: () => { state.other = other && o.id === other.id ? null : o.id; changed(); again(); } },
      el("i", { class: "mark " + (o.outcome === null ? "none" : o.solved ? "good" : "poor") }), lastPart(o.id)));
  pane.replaceChildren(
    el("header", {}, el("h2", {}, visible(t.id)), el("span", { class: "quiet" },
      `policy step ${t.step} · ${t.tokens} sampled tokens · ${number(whole.wall_s, 2)} s · seed ${whole.seed}`)),
    el("div", { class: "tools" }, el("div", { class: "buttons", role: "group", "aria-label": "token colours" }, heats),
      el("span", { class: "quiet" }, HEAT_HELP[state.heat] || "")),
    group.length ? el("div", { class: "tools" }, el("span", { class: "quiet" }, "compare with "),
      el("div", { class: "buttons", role: "group", "aria-label": "group" }, group)) : null || "",
    second ? diffView(whole, second, data.tokens, state.heat) : trajectoryView(whole, data.tokens, { heat: state.heat }));
}

function lastPart(id) {
  return plain(id).split("-").pop().slice(0, 12);
}
