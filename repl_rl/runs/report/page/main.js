/* Reads the data, keeps what is chosen in the address, draws the page, and follows a running training if asked to. */

const TABS = { overview: "Overview", rollouts: "Rollouts", run: "Run" };

function stateFromAddress() {
  const given = Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
  return { tab: "overview", q: "", outcome: "any outcome", status: "", error: "", sort: "as recorded", id: null,
    other: null, heat: "none", ...given };
}

function remember(state) {
  const kept = Object.entries(state).filter(([name, value]) => value && !(name === "tab" && value === "overview") &&
    !["any outcome", "as recorded", "none"].includes(value));
  history.replaceState(null, "", "#" + new URLSearchParams(kept));
}

function start(data) {
  const rows = index(data), chunks = new Map();
  let state = stateFromAddress();
  const load = async (t) => {
    const number = Math.floor(t.at / CHUNK);
    if (!chunks.has(number)) chunks.set(number, unpacked(data.chunks[number]));
    return { ...t, ...(await chunks.get(number))[t.at % CHUNK] };
  };
  const changed = () => remember(state);
  const body = el("div", { id: "body" });
  const tabs = Object.entries(TABS).map(([name, text]) =>
    el("button", { "data-tab": name, role: "tab", onclick: () => { state.tab = name; show(); } }, text));
  function show() {
    for (const tab of tabs) tab.setAttribute("aria-selected", String(tab.dataset.tab === state.tab));
    const views = { overview: () => overview(data), run: () => runView(data),
      rollouts: () => browser(data, rows, state, load, changed) };
    body.replaceChildren((views[state.tab] || views.overview)());
    changed();
  }
  document.getElementById("page").replaceChildren(head(data, tabs), body);
  document.title = data.name + " · repl_rl";
  show();
  window.onhashchange = () => { state = stateFromAddress(); show(); };
  document.body.dataset.ready = "yes";
}

function head(data, tabs) {
  const s = data.summary;
  const facts = [s.engine, s.sandbox, s.cores ? s.cores + " cores" : null].filter(Boolean).join(" · ");
  const status = s.status || "running";
  return el("header", { class: "top" },
    el("div", { class: "name" }, el("h1", {}, visible(data.name)), el("span", { class: "chip " + status }, status),
      el("span", { class: "quiet" }, plain(facts))),
    el("nav", { role: "tablist" }, tabs, themeButton()),
    (s.error ? [el("p", { class: "note bad" }, visible(s.error))] : []),
    data.notes.map((note) => el("p", { class: "note" }, visible(note))));
}

function runView(data) {
  const table = (pairs) => el("table", { class: "facts" }, pairs.map(([name, value]) =>
    el("tr", {}, el("th", {}, visible(name)), el("td", {}, visible(String(value))))));
  const flat = Object.entries(data.summary).filter(([, v]) => v === null || typeof v !== "object")
    .map(([name, v]) => [name, v === null ? "none" : typeof v === "number" ? number(v, 5) : v]);
  const fleet = data.summary.fleet;
  const nodes = !fleet ? [] : [el("h2", {}, "Fleet on " + fleet.cluster), table([
    ...fleet.nodes.map((n) => [n.name, `${n.seat}: ${n.rollouts_played} rollouts, ${n.tokens} tokens, policy step ${n.policy_step}`]),
    ...fleet.lost.map((n) => [n.name, `${n.seat}: lost: ${n.why}`])])];
  return el("section", { class: "run" }, el("div", {}, el("h2", {}, "Summary"), table(flat), nodes, el("h2", {}, "Versions"),
    table(Object.entries(data.versions))), el("div", {}, el("h2", {}, "Configuration"), el("pre", {}, visible(data.config))));
}

async function follow(version) {
  const base = location.pathname.replace(/[^/]*$/, "");
  try {
    const now = await (await fetch(base + "version")).text();
    if (now !== version && version !== null) {
      start(await unpacked(await (await fetch(base + "data")).text()));
    }
    setTimeout(() => follow(now), 2000);
  } catch {
    setTimeout(() => follow(version), 5000);
  }
}

if (typeof document !== "undefined" && document.getElementById("data")) {
  unpacked(document.getElementById("data").textContent).then(start);
  if (document.body.dataset.follow === "yes") follow(null);
}
