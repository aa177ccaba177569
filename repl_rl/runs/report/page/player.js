/* The player: one trajectory, line by line, forth and back; with a kernel behind it, a console to go on in. */

const SPEED_MS = 700;

/* data as the page's, unpacked; live: a function message -> promise of an answer, or null without a kernel. */
function player(root, data, live) {
  const rows = index(data), chunks = new Map();
  const state = { q: "", at: 0, upto: null, heat: "none", other: "", timer: null, console: null, note: "" };
  const load = async (t) => {
    const number = Math.floor(t.at / CHUNK);
    if (!chunks.has(number)) chunks.set(number, unpacked(data.chunks[number]));
    return { ...t, ...(await chunks.get(number))[t.at % CHUNK] };
  };
  const view = el("div", { class: "stage" });
  const sought = el("input", { type: "search", "aria-label": "search", placeholder: "Search …",
    oninput: (event) => { state.q = event.target.value; list(); } });
  const chosen = el("select", { "aria-label": "trajectory", onchange: (event) => choose(Number(event.target.value)) });
  const sort = choices("order", Object.keys(SORTS).map((k) => [k, k]), "as recorded", (value) => { state.sort = value; list(); });
  const outcome = choices("outcome", Object.keys(OUTCOMES).map((k) => [k, k]), "any outcome",
    (value) => { state.outcome = value; list(); });
  const scrub = el("input", { type: "range", min: 0, "aria-label": "line",
    oninput: (event) => go(Number(event.target.value)) });
  const place = el("span", { class: "quiet place" });
  const button = (name, text, act) => el("button", { "data-act": name, title: name, onclick: act }, text);
  const heat = choices("token colours", Object.entries(HEATS), "none", (value) => { state.heat = value; draw(); });
  const other = el("select", { "aria-label": "compare with", onchange: (event) => { state.other = event.target.value; draw(); } });
  const bar = el("div", { class: "tools" }, el("div", { class: "buttons" },
    button("first", "⇤", () => go(0)), button("back", "←", () => go(state.upto - 1)), button("play", "▶", play),
    button("next", "→", () => go(state.upto + 1)), button("last", "⇥", () => go(Infinity))), scrub, place, heat, other);
  const box = el("div", { class: "player", tabindex: 0 }, rows.length > 1 ? el("div", { class: "tools" }, sought, outcome, sort, chosen) : "",
    bar, view, live ? liveBar() : "");
  box.addEventListener("keydown", keys);
  root.append(box);
  list();

  function list() {
    const found = search(rows, state);
    chosen.replaceChildren(...found.slice(0, 500).map((t) =>
      el("option", { value: t.at, selected: t.at === state.at }, plain(`${t.id}  ${t.solved ? "✓" : "·"}`))));
    if (found.length && !found.some((t) => t.at === state.at)) choose(found[0].at);
    else if (state.upto === null && found.length) choose(state.at);
  }

  async function choose(at) {
    stop();
    Object.assign(state, { at, console: null, other: "", note: "" });
    state.t = await load(rows[at]);
    state.upto = state.t.lines.length;
    scrub.max = state.t.lines.length;
    const mates = rows.filter((o) => o.task === state.t.task && o.step === state.t.step && o.at !== at);
    other.replaceChildren(el("option", { value: "" }, "compare with …"), ...mates.map((o) =>
      el("option", { value: o.at }, plain(o.id))));
    draw();
  }

  function go(line) {
    state.upto = Math.max(0, Math.min(state.t.lines.length, line));
    state.console = null;
    draw();
  }

  function play() {
    if (state.timer) return stop();
    if (state.upto >= state.t.lines.length) go(0);
    state.timer = setInterval(() => (state.upto >= state.t.lines.length ? stop() : go(state.upto + 1)), SPEED_MS);
    draw();
  }

  function stop() {
    clearInterval(state.timer);
    state.timer = null;
    bar.querySelector("[data-act=play]").textContent = "▶";
  }

  function keys(event) {
    if (["INPUT", "SELECT"].includes(event.target.tagName) && event.target.type !== "range") return;
    const act = { ArrowRight: () => go(state.upto + 1), ArrowLeft: () => go(state.upto - 1), Home: () => go(0),
      End: () => go(Infinity), " ": play }[event.key];
    if (!act) return;
    event.preventDefault();
    event.stopPropagation();
    act();
  }

  async function draw() {
    scrub.value = state.upto;
    place.textContent = `line ${state.upto} of ${state.t.lines.length}`;
    bar.querySelector("[data-act=play]").textContent = state.timer ? "❚❚" : "▶";
    const captions = data.tokens;
    if (state.other !== "") {
      view.replaceChildren(diffView(state.t, await load(rows[Number(state.other)]), captions, state.heat));
      return;
    }
    view.replaceChildren(trajectoryView(state.t, captions,
      { heat: state.heat, upto: state.upto, current: state.upto - 1, onpick: (i) => go(i + 1) }));
    if (state.console) view.append(consoleView(state.console, captions, state.heat));
    if (state.note) view.append(el("p", { class: "note" }, visible(state.note)));
  }

  function liveBar() {
    const text = el("input", { type: "text", "aria-label": "your line", placeholder: "a line of yours",
      onkeydown: (event) => { if (event.key === "Enter") ask("type", text); } });
    const count = el("input", { type: "number", min: 1, max: 64, value: 4, "aria-label": "continuations" });
    const act = (name, label, extra) => el("button", { "data-act": name, onclick: () => ask(name, text, extra && extra()) }, label);
    return el("div", { class: "tools live" }, text, act("type", "run here"), act("edit", "run instead of the next line"),
      act("step", "run the next line"), act("branch", "let the policy go on", () => Number(count.value)), count);
  }

  async function ask(kind, text, count) {
    stop();
    const message = { kind, text: text.value, count: count || 0, at: state.at, line: state.upto, fresh: !state.console };
    const answer = await live(message);
    state.note = answer.error || "";
    if (!answer.error) {
      text.value = "";
      state.console = answer;
    }
    draw();
  }
}

/* What a rebuilt console has shown, and what the policy made of it. */
function consoleView(console, captions, heat) {
  const rows = console.steps.map((step) => el("div", { class: "row live-step" }, el("span", { class: "dot " + statusKind(step.status) }),
    el("pre", {}, el("span", { class: "ps" }, step.prompt), el("b", {}, visible(step.text.replace(/\n$/, ""))), "\n",
      el("span", { class: "seen" }, visible(bare(step.shown)))),
    el("span", { class: "facts" }, step.difference ? el("span", { class: "down" }, "not as recorded: " + step.difference) : "")));
  const value = console.value === null ? "not graded" : number(console.value);
  const branches = console.branches.map((t) => el("details", { class: "branch" }, el("summary", {}, visible(t.id), " ", outcomeChip(t)),
    trajectoryView(t, captions, { heat })));
  return el("div", { class: "console" }, el("h3", {}, "In a fresh console, rebuilt to line " + console.line), rows,
    branches.length ? [el("p", { class: "quiet worth" }, `mean outcome of ${branches.length} continuations: ${value}`), branches] : []);
}
