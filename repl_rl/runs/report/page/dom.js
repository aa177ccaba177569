"use strict";
/* Elements and untrusted text. Whatever a program printed reaches the page as text nodes only, never as markup. */

function el(tag, props, ...children) {
  const svg = ["svg", "path", "line", "text", "g", "circle", "rect", "title"].includes(tag) && props && props.svg;
  const node = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(props || {})) {
    if (name === "svg" || value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "value") node.value = value;
    else node.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children.flat(3)) {
    if (child === null || child === undefined || child === false) continue;
    node.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
  return node;
}

function svg(tag, props, ...children) {
  return el(tag, { svg: true, ...props }, ...children);
}

/* Controls, marks that reorder or hide text, lone surrogates, tags: all that a reader would not see as it is. */
const UNSEEN = new RegExp(
  "[\\u0000-\\u0008\\u000b-\\u001f\\u007f-\\u009f\\u00ad\\u034f\\u061c\\u115f\\u1160\\u17b4\\u17b5\\u180b-\\u180f" +
    "\\u200b-\\u200f\\u2028-\\u202e\\u2060-\\u206f\\u3164\\ufe00-\\ufe0f\\ufeff\\uffa0\\ufff0-\\uffff" +
    "\\u{e0000}-\\u{e0fff}\\p{Surrogate}]",
  "gu",
);

function nameOf(char) {
  const code = char.codePointAt(0);
  if (code < 32) return String.fromCodePoint(0x2400 + code);
  if (code === 127) return "\u2421";
  return "U+" + code.toString(16).toUpperCase().padStart(4, "0");
}

/* `text` as nodes, with every unseen character spelt out. */
function visible(text) {
  const out = document.createDocumentFragment();
  let from = 0;
  for (const found of text.matchAll(UNSEEN)) {
    if (found.index > from) out.append(text.slice(from, found.index));
    out.append(el("span", { class: "unseen" }, nameOf(found[0])));
    from = found.index + found[0].length;
  }
  if (from < text.length) out.append(text.slice(from));
  return out;
}

/* The same for places that take a plain string, such as a tooltip. */
function plain(text) {
  return text.replace(UNSEEN, nameOf);
}

function number(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 10000) return value.toLocaleString("en", { maximumFractionDigits: 0 });
  if (size < 0.001) return value.toExponential(1).replace("e-", "e−").replace("-", "−");
  return String(Number(value.toPrecision(digits))).replace("-", "−");
}

function signed(value) {
  return value > 0 ? "+" + number(value) : number(value);
}

function percent(value) {
  return value === null || value === undefined ? "–" : (100 * value).toFixed(1) + "%";
}
