// Elements and numbers. Text only ever enters the page as text nodes: what a model wrote is never markup.

const SVG = "http://www.w3.org/2000/svg";

function fill(node, name, rest) {
  const classes = name.split(".").slice(1);
  const [attributes, ...children] = rest[0]?.constructor === Object ? rest : [{}, ...rest];
  if (classes.length) node.setAttribute("class", classes.join(" "));
  for (const [key, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (key === "vars") for (const [property, of] of Object.entries(value)) node.style.setProperty(property, of);
    else if (key === "class") node.classList.add(...String(value).split(/\s+/).filter(Boolean));
    else node.setAttribute(key, value === true ? "" : value);
  }
  node.append(...children.flat().filter((child) => child && child !== true));
  return node;
}

// el("div.first.wide", { title: "…" }, child, [children], condition && child); attributes may be missing
const el = (name, ...rest) => fill(document.createElement(name.split(".")[0]), name, rest);
const svg = (name, ...rest) => fill(document.createElementNS(SVG, name.split(".")[0]), name, rest);
const button = (says, does, attributes = {}) => el("button", { type: "button", onclick: does, ...attributes }, says);
const byId = (id) => document.getElementById(id);

// Three digits, a real minus sign, and a dash for what is no number.
function number(value, signed = false) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  let text = String(+size.toPrecision(3));
  if (size >= 1000) text = Math.round(size).toLocaleString("en");
  else if (size && size < 0.001) text = size.toExponential(1);
  return (value < 0 ? "−" : signed && value > 0 ? "+" : "") + text;
}

function percent(p) {
  if (p >= 0.995) return "100 %";
  if (p < 0.001) return "<0.1 %";
  return (p >= 0.1 ? (100 * p).toFixed(0) : (100 * p).toPrecision(2)) + " %";
}

const count = (n, one, many = one + "s") => `${n.toLocaleString("en")} ${n === 1 ? one : many}`;
const span = (from, to) => (from === to ? `${from}` : `${from}–${to}`);
const sum = (numbers) => numbers.reduce((a, b) => a + b, 0);
const mean = (numbers) => (numbers.length ? sum(numbers) / numbers.length : null);
const least = (numbers) => numbers.reduce((a, b) => Math.min(a, b), Infinity);
const most = (numbers) => numbers.reduce((a, b) => Math.max(a, b), -Infinity);
