/* Rows of the list of rollouts: what they hold, and how they are found and ordered. */

const COLUMNS = ["id", "task", "promptNumber", "step", "outcome", "stop", "statuses", "classes", "reward", "tokens", "answer", "solved"];
const SORTS = {
  "as recorded": null,
  "newest first": (a, b) => b.step - a.step || a.at - b.at,
  "lowest line reward": (a, b) => (a.reward ?? Infinity) - (b.reward ?? Infinity),
  "highest line reward": (a, b) => (b.reward ?? -Infinity) - (a.reward ?? -Infinity),
  "most tokens": (a, b) => b.tokens - a.tokens,
};
const OUTCOMES = {
  "any outcome": () => true,
  solved: (t) => t.solved,
  "not solved": (t) => t.outcome !== null && !t.solved,
  "not graded": (t) => t.outcome === null,
};

const CHUNK = 128;

async function unpacked(text) {
  const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

function index(data) {
  return data.rows.map((row, at) => {
    const t = Object.fromEntries(COLUMNS.map((name, i) => [name, row[i]]));
    t.at = at;
    t.prompt = data.prompts[t.promptNumber];
    t.hay = [t.id, t.task, t.prompt, t.answer, t.stop, t.statuses, t.classes.join(" ")].join("\n").toLowerCase();
    return t;
  });
}

/* The rows that a filter keeps, in its order. filter: {q, outcome, status, error, sort}. */
function search(rows, filter) {
  const words = filter.q.toLowerCase().split(/\s+/).filter(Boolean);
  const outcome = OUTCOMES[filter.outcome] || OUTCOMES["any outcome"];
  const found = rows.filter((t) =>
    outcome(t) && (!filter.status || t.statuses.split(" ").includes(filter.status)) &&
    (!filter.error || t.classes.includes(filter.error)) && words.every((word) => t.hay.includes(word)));
  const order = SORTS[filter.sort];
  return order ? found.sort(order) : found;
}

function choices(label, values, value, onchange) {
  return el("select", { "aria-label": label, onchange: (event) => onchange(event.target.value) },
    values.map(([v, text]) => el("option", { value: v, selected: v === value }, text)));
}
