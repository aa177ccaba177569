"use strict";
// Whatever a policy writes or a console prints is untrusted: it becomes text, never markup.

const $ = id => document.getElementById(id);
const ERRORS = new Set(["syntax_error", "exception", "timeout", "memory_limit", "output_limit", "killed"]);
const STEERING = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]/g;
let model = "", conversation = null, under_way = null;

// Characters that could hide or turn others become visible.
const printable = text => text.replace(STEERING, found => "U+" + found.codePointAt(0).toString(16).toUpperCase().padStart(4, "0"));

function put(parent, kind, name, text) {
  const element = document.createElement(kind);
  element.className = name;
  element.textContent = printable(text);
  parent.append(element);
  element.scrollIntoView({ block: "nearest" });
  return element;
}

function headers() {
  const said = { "Content-Type": "application/json" };
  if ($("key").value) said["Authorization"] = "Bearer " + $("key").value;
  return said;
}

async function refused(response) {
  if (response.status === 401) $("locked").hidden = false;
  const said = await response.json().catch(() => ({}));
  if (said.error?.code === "conversation_not_found") conversation = null; // it waited for too long
  return new Error(said.error?.message ?? "the server answered " + response.status);
}

async function named() {
  if (model) return;
  const response = await fetch("v1/models", { headers: headers() });
  if (!response.ok) throw await refused(response);
  model = (await response.json()).data[0].id;
  $("model").textContent = model;
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ;) {
    const { done, value } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) if (part !== "data: [DONE]") yield JSON.parse(part.slice("data: ".length));
  }
}

function show(turn, line, prompt) {
  const row = put(turn, "div", ERRORS.has(line.status) ? "line error" : "line", "");
  put(row, "pre", "typed", line.source).dataset.prompt = prompt;
  put(row, "span", "status", line.status === null ? "not run" : `${line.status.replace("_", " ")}, ${line.ms.toFixed(1)} ms`);
  if (line.output) put(turn, "pre", "output", line.output.replace(/\n$/, ""));
  return line.status === "incomplete" ? "... " : ">>> ";
}

function end(turn, ours) {
  conversation = ours.conversation;
  if (ours.answer !== null) put(turn, "p", "answer", ours.answer);
  if (ours.answer === null || conversation === null) {
    const next = conversation === null ? "; the next question begins in a new console" : "";
    put(turn, "p", "note", ours.stop.replaceAll("_", " ") + next);
  }
}

async function ask(question) {
  const turn = put($("turns"), "section", "turn", "");
  put(turn, "p", "question", question);
  const before = conversation;
  let begun = false;
  under_way = new AbortController();
  busy(true);
  try {
    await named();
    const repl = conversation === null ? { keep: true } : { conversation };
    const asked = { model, messages: [{ role: "user", content: question }], temperature: 0, stream: true, repl };
    const body = JSON.stringify(asked);
    const response = await fetch("v1/chat/completions", { method: "POST", headers: headers(), body, signal: under_way.signal });
    if (!response.ok) throw await refused(response);
    begun = true;
    let prompt = ">>> ";
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message);
      if (event.repl?.line) prompt = show(turn, event.repl.line, prompt);
      else if (event.repl) end(turn, event.repl);
    }
  } catch (error) {
    const stopped = error.name === "AbortError";
    const lost = stopped || begun || conversation !== before; // a turn that is cut takes its console along
    if (lost) conversation = null;
    const next = lost ? "; the next question begins in a new console" : "";
    put(turn, "p", "failure", (stopped ? "stopped" : error.message) + next);
  } finally {
    under_way = null;
    busy(false);
  }
}

function busy(now) {
  $("ask").disabled = $("afresh").disabled = now;
  $("stop").disabled = !now;
  document.body.dataset.busy = now;
}

$("form").addEventListener("submit", event => {
  event.preventDefault();
  const question = $("question").value.trim();
  if (!question || under_way) return;
  $("question").value = "";
  ask(question);
});
$("stop").addEventListener("click", () => under_way?.abort());
$("afresh").addEventListener("click", () => {
  if (conversation === null) return;
  fetch("v1/conversations/" + conversation, { method: "DELETE", headers: headers() });
  conversation = null;
  put($("turns"), "p", "note", "a new console");
});
named().catch(() => { }).finally(() => { document.body.dataset.ready = "true"; });
