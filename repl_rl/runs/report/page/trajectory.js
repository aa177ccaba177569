/* One trajectory as a console session, with what each line was worth beside it. */

const BAD = new Set(["syntax_error", "exception", "timeout", "memory_limit", "output_limit", "killed"]);

function statusKind(status) {
  if (status === null) return "unrun";
  if (status === "sandbox_fault") return "fault";
  return BAD.has(status) ? "bad" : status === "answered" ? "answered" : "fine";
}

function outcomeChip(t) {
  if (t.outcome === null) return el("span", { class: "chip" }, "not graded");
  const parts = (t.parts || []).map(([name, value]) => name + " " + signed(value)).join("\n");
  const worth = [0, 1].includes(t.outcome) ? "" : ", " + number(t.outcome, 3);
  return el("span", { class: "chip " + (t.solved ? "good" : "poor"), title: plain(parts) }, (t.solved ? "solved" : "not solved") + worth);
}

/* options: heat; upto (lines to draw); split ({line, token, where} of a first divergence); current; onpick(line). */
function trajectoryView(t, captions, options = {}) {
  const { heat = "none", upto = t.lines.length, split = null, current = null, onpick = null } = options;
  const box = el("div", { class: "session", "data-heat": heat });
  if (t.workspace) box.append(el("div", { class: "row" }, el("span"), workspaceView(t.workspace)));
  box.append(el("div", { class: "row start" }, el("span"), el("pre", { class: "seen" }, visible(bare(t.prompt)))));
  t.lines.slice(0, upto).forEach((line, i) => box.append(...lineRows(t, line, i)));
  if (upto >= t.lines.length) box.append(el("p", { class: "ending" }, ending(t)));
  return box;

  function lineRows(t, line, i) {
    const before = split && i < split.line ? " shared" : "";
    const here = split && i === split.line;
    const code = el("pre", { class: "code" }, el("span", { class: "ps" }, line.prompt));
    if (heat === "none" && !(here && split.where === "token")) code.append(visible(line.text.replace(/\n$/, "")));
    else code.append(...tokens(line, captions, heat, here && split.where === "token" ? split.token : -1));
    const pick = onpick ? { onclick: () => onpick(i) } : {};
    const rows = [
      el(
        "div",
        { class: "row line" + before + (i === current ? " current" : ""), "data-line": i, ...pick },
        el("span", { class: "dot " + statusKind(line.status), title: line.status || "not run" }),
        code,
        facts(line),
      ),
    ];
    const output = bare(line.seen || "");
    if (output || (here && split.where === "seen")) {
      const mark = here && split.where === "seen" ? " diverges" : "";
      const bad = statusKind(line.status) === "bad" ? " bad" : "";
      rows.push(el("div", { class: "row" + before }, el("span"), el("pre", { class: "seen" + bad + mark }, visible(output))));
    }
    return rows;
  }
}

/* What the console began with: closed at first, each part with its size and as much of its text as was kept. */
function workspaceView(workspace) {
  const names = workspace.parts.map(([name]) => name).join(", ");
  return el("details", { class: "workspace" },
    el("summary", {}, visible("workspace " + workspace.digest.slice(0, 12) + ": " + names)),
    workspace.parts.map(([name, size, text]) => [el("p", { class: "quiet" }, visible(name + (size ? " (" + size + ")" : ""))),
      el("pre", { class: "seen" }, visible(text))]));
}

/* Without the console's next prompt, which is drawn at the next line. */
function bare(text) {
  return text.replace(/(>>> |\.\.\. )$/, "").replace(/\n$/, "");
}

function facts(line) {
  const reward = line.reward === null ? null : el("span", { title: "reward of the line" }, "r " + signed(line.reward));
  const named = line.named.map(([name, value]) => name + " " + signed(value)).join("\n");
  const advantage =
    line.advantage === null
      ? null
      : el("span", { class: line.advantage > 0 ? "up" : line.advantage < 0 ? "down" : "", title: "advantage" },
          "A " + signed(line.advantage));
  const time = line.ms === null ? null : el("span", { title: "wall clock" }, number(line.ms, 2) + " ms");
  return el("span", { class: "facts", title: plain(named) }, reward, advantage, time);
}

function ending(t) {
  const parts = [outcomeChip(t), " ended: " + t.stop.replaceAll("_", " ")];
  if (t.answer !== null) parts.push(", answer ", el("code", {}, visible(t.answer)));
  if (t.failure) parts.push(", our failure: ", visible(t.failure));
  return parts;
}
