/* Colours of tokens: what the policy thought of them, what the update made of them. */

const HEATS = {
  none: "plain",
  logprob: "log probability",
  advantage: "advantage",
  ratio: "importance ratio",
  mask: "loss mask",
};

const HEAT_HELP = {
  none: "",
  logprob: "darker: less likely; full colour at −4 nats or less",
  advantage: "blue: made more likely; red: made less likely; full colour at ±2",
  ratio: "trainer to sampler; blue: above 1, red: below 1; full colour at a factor of 1.5",
  mask: "coloured: the policy sampled it and it is trained; all else is masked",
};

/* [class, strength in 0..1] of token j of a line. */
function heatOf(line, j, heat) {
  if (heat === "mask") return line.masked ? ["", 0] : ["sampled", 0.55];
  if (heat === "logprob") return ["unlikely", Math.min(1, -line.logprobs[j] / 4)];
  const value = heat === "advantage" ? line.advantage : line.ratios.length ? Math.log(line.ratios[j]) : null;
  if (value === null || value === undefined) return ["", 0];
  const full = heat === "advantage" ? 2 : Math.log(1.5);
  return [value >= 0 ? "more" : "less", Math.min(1, Math.abs(value) / full)];
}

function tokenTitle(line, j, caption) {
  const parts = [caption === undefined ? "" : JSON.stringify(plain(caption)), "id " + line.ids[j]];
  parts.push("log probability " + number(line.logprobs[j]));
  if (line.advantage !== null) parts.push("advantage " + signed(line.advantage));
  if (line.ratios.length) parts.push("ratio " + line.ratios[j].toFixed(6));
  return parts.filter(Boolean).join("\n");
}

/* The line's tokens as coloured spans; ids stand for tokens whose text is not known. */
function tokens(line, captions, heat, marked) {
  return line.ids.map((id, j) => {
    const caption = captions[id];
    const [kind, strength] = heatOf(line, j, heat);
    const classes = ["token", kind, j === marked ? "diverges" : "", caption === undefined ? "nameless" : ""];
    const node = el("span", { class: classes.filter(Boolean).join(" "), title: tokenTitle(line, j, caption) });
    node.style.setProperty("--heat", strength.toFixed(3));
    // Where the policy writes the space after a prompt, the prompt is shown with it.
    const said = caption !== undefined && j === 0 && !line.text.startsWith(" ") ? caption.replace(/^ /, "") : caption;
    node.append(said === undefined ? String(id) : visible(said.replace(/\n/g, "↵")));
    return node;
  });
}
