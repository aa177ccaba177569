/* Where two rollouts of a task part. */

/* {line, token, where: "token" | "seen" | "end"} of the first difference; null if there is none. */
function divergence(a, b) {
  const most = Math.max(a.lines.length, b.lines.length);
  for (let i = 0; i < most; i++) {
    const x = a.lines[i], y = b.lines[i];
    if (!x || !y) return { line: i, token: 0, where: x || y ? "token" : "end" };
    const shared = Math.max(x.ids.length, y.ids.length);
    for (let j = 0; j < shared; j++) if (x.ids[j] !== y.ids[j]) return { line: i, token: j, where: "token" };
    if (x.seen !== y.seen) return { line: i, token: 0, where: "seen" };
  }
  return null;
}

function diffView(a, b, captions, heat) {
  const split = divergence(a, b);
  const said = split
    ? `They part at line ${split.line + 1}` + (split.where === "seen" ? ", in what the console showed." :
        `, token ${split.token + 1}.`)
    : "They are equal, token by token.";
  const column = (t) =>
    el("div", { class: "side" }, el("h3", {}, visible(t.id), " ", outcomeChip(t)),
      trajectoryView(t, captions, { heat, split }));
  return el("div", {}, el("p", { class: "quiet split" }, said), el("div", { class: "sides" }, column(a), column(b)));
}
