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
  if (upto >= t.lines.length) box.append(...strangers(t).map((child) => childView(child, captions, heat)), el("p", { class: "ending" }, ending(t)));
  return box;

  function lineRows(t, line, i) {
    const before = split && i < split.line ? " shared" : "";
    const here = split && i === split.line;
    const code = el("pre", { class: "code" }, el("span", { class: "ps" }, line.prompt));
    if (heat === "none" && !(here && split.where === "token")) code.append(visible(line.text.replace(/\n$/, "")));
    else code.append(...tokens({ ...line, masked: t.trained === false }, captions, heat, here && split.where === "token" ? split.token : -1));
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
    if ((line.others || []).length) rows.push(el("div", { class: "row" + before }, el("span"), othersView(line.others)));
    for (const call of line.calls || []) rows.push(el("div", { class: "row" + before }, el("span"), callView(t, call, captions, heat)));
    if (line.more_calls) rows.push(el("div", { class: "row" + before }, el("span"), el("p", { class: "quiet more-calls" }, `and ${line.more_calls} calls more`)));
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

/* What else was written at the place of a line, and not gone on from. */
function othersView(others) {
  return el("details", { class: "others" }, el("summary", {}, others.length + " written and not chosen"),
    others.map((other) => [el("pre", { class: "seen" }, visible(other.text.replace(/\n$/, ""))),
      el("p", { class: "quiet" }, "mean log probability " + number(other.logprob) +
        (other.advantage === null ? ", not trained" : ", trained, A " + signed(other.advantage)))]));
}

const CALL_CHARS = 120;

/* A call of a host function: closed at first; within it arguments, answer, and the trajectory that was sampled for it. */
function callView(t, call, captions, heat) {
  const child = (t.children || []).find((each) => each.id === call.child);
  const told = call.error === null ? " → " + call.answer : " ✗ " + call.error;
  const whose = child ? (child.trained ? ", child, trained" : ", child, masked") : "";
  return el("details", { class: "call" },
    el("summary", { class: call.error === null ? "" : "bad" }, visible(short(call.name + "(" + call.arguments + ")")), visible(short(told)),
      el("span", { class: "quiet" }, "  " + number(call.ms, 2) + " ms" + whose)),
    el("p", { class: "quiet" }, "arguments"), el("pre", { class: "seen" }, visible(call.arguments)),
    el("p", { class: "quiet" }, call.error === null ? "answer" : "error"), el("pre", { class: "seen" }, visible(call.error === null ? call.answer : call.error)),
    child ? childView(child, captions, heat) : "");
}

function childView(child, captions, heat) {
  const how = child.trained ? "trained with the advantage of the line that asked" : "masked: in no row of the update";
  return el("details", { class: "child" }, el("summary", {}, visible(child.id), el("span", { class: "quiet" }, "  " + how)),
    trajectoryView(child, captions, { heat }));
}

/* Children whose call is not drawn here, such as one beyond those of a line that are. */
function strangers(t) {
  const known = new Set(t.lines.flatMap((line) => (line.calls || []).map((call) => call.child)));
  return (t.children || []).filter((child) => !known.has(child.id));
}

function short(text) {
  const flat = text.replace(/\s+/g, " ");
  return flat.length > CALL_CHARS ? flat.slice(0, CALL_CHARS) + " …" : flat;
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
