// How a sample falls into messages and turns. Runs of the mask say who wrote what; ChatML headers and tool markup
// give names to the parts where they are there, and nothing depends on them.

const HEADER = /<\|im_start\|>([^\n<]*)\n?/;
const ONLY_HEADER = /^<\|im_start\|>assistant\n?(<think>\s*<\/think>\s*)?$/; // of the turn that comes next
const ROLES = ["system", "developer", "user", "assistant", "tool", "function", "environment", "observation"];
const CONTROL = new RegExp(
  `<\\|im_start\\|>(?:(?:${ROLES.join("|")})(?=\\n))?|<\\|[^|<>\\s]{1,40}\\|>|</?(?:tool_call|tool_response|think)>`,
  "g",
);
const REGION = /<(tool_call|tool_response|think)>/g;

// Columns by token: where its text starts, and what is known of the sampled ones.
class Columns {
  constructor(sample) {
    const size = sample.lengths.length;
    this.sample = sample;
    this.starts = new Int32Array(size + 1);
    for (let t = 0; t < size; t++) this.starts[t + 1] = this.starts[t] + sample.lengths[t];
    this.runs = []; // {sampled, from, to} in tokens
    this.place = new Int32Array(size).fill(-1); // among the sampled tokens
    let token = 0;
    let sampled = 0;
    sample.mask.forEach((length, run) => {
      if (length) this.runs.push({ sampled: run % 2 === 1, from: token, to: token + length });
      for (let end = token + length; token < end; token++) if (run % 2) this.place[token] = sampled++;
    });
    this.versions = unpack(sample.versions, sampled);
    this.advantages = Array.isArray(sample.advantages)
      ? unpack(sample.advantages, sampled)
      : new Array(sampled).fill(sample.advantages);
    this.logprobs = sample.logprobs.map((x) => (x === null ? null : -x / 1e4));
  }

  // What is known of a sampled token; those before it without a text share its character.
  token(t) {
    let first = t;
    while (first > 0 && this.sample.lengths[first - 1] === 0 && this.place[first - 1] >= 0) first--;
    const places = [];
    for (let k = first; k <= t; k++) places.push(this.place[k]);
    const logprobs = places.map((p) => this.logprobs[p] ?? null);
    const last = this.place[t];
    return {
      tokens: places.length,
      logprob: logprobs.includes(null) ? null : sum(logprobs),
      version: this.versions[last] ?? null,
      advantage: this.advantages[last] ?? null,
    };
  }

  // [from, to] of the tokens of a run, up to a limit, counted from an origin in the text.
  ranges({ from, to }, origin, limit) {
    const ranges = [];
    for (let t = from; t < to && this.starts[t] - origin < limit; t++)
      ranges.push([this.starts[t] - origin, this.starts[t + 1] - origin]);
    return ranges;
  }

  // The token that the text at this place belongs to.
  at(place) {
    let low = 0;
    let high = this.sample.lengths.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (this.starts[middle] <= place) low = middle;
      else high = middle - 1;
    }
    return low;
  }
}

function unpack(pairs, size) {
  const column = new Array(size).fill(null);
  for (let i = 0, at = 0; i < pairs.length; i += 2) {
    column.fill(pairs[i], at, at + pairs[i + 1]);
    at += pairs[i + 1];
  }
  return column;
}

// Messages and turns in order: {role, turn, from, to} with places in the text; up to `start` it is a ChatML header;
// `sampled` is a run of tokens.
function blocksOf(columns) {
  const { starts, runs, sample } = columns;
  const blocks = [];
  let turn = 0;
  let ahead = null; // where the header of the turn that comes next begins
  for (const run of runs) {
    const [from, to] = [starts[run.from], starts[run.to]];
    if (run.sampled) {
      blocks.push({ role: "policy", turn: ++turn, from: ahead ?? from, to, sampled: run });
      ahead = null;
      continue;
    }
    const parts = splitMessages(sample.text.slice(from, to));
    for (const [number, part] of parts.entries()) {
      const start = from + part.at;
      const end = start + part.text.length;
      const before = blocks[blocks.length - 1];
      const last = number === parts.length - 1 && run !== runs[runs.length - 1];
      const role = part.role || (turn ? "environment" : "prompt");
      if (last && ONLY_HEADER.test(part.text)) ahead = start;
      else if (before && !part.role && !part.text.trim()) before.to = end; // the line end behind an end token
      else blocks.push({ role, turn: 0, from: start, to: end, sampled: null });
    }
  }
  for (const block of blocks) block.start = headerEnd(sample.text.slice(block.from, block.from + 60), block.from);
  return blocks;
}

function headerEnd(text, from) {
  const header = HEADER.exec(text);
  return header && header.index === 0 && roleOf(text) ? from + header[0].length : from;
}

function splitMessages(text) {
  const places = [...text.matchAll(/<\|im_start\|>/g)].map((m) => m.index);
  if (places[0] !== 0) places.unshift(0);
  return places
    .map((at, n) => ({ at, text: text.slice(at, places[n + 1] ?? text.length) }))
    .filter((part) => part.text)
    .map((part) => ({ ...part, role: roleOf(part.text) }));
}

function roleOf(text) {
  const header = HEADER.exec(text);
  const role = header && header.index === 0 ? header[1].trim() : "";
  return ROLES.includes(role) ? role : "";
}

// Tool calls, tool answers and thoughts inside a block; one that is not closed goes to the block's end.
function regionsOf(text) {
  const regions = [];
  REGION.lastIndex = 0;
  for (let open = REGION.exec(text); open; open = REGION.exec(text)) {
    const close = text.indexOf(`</${open[1]}>`, REGION.lastIndex);
    const end = close < 0 ? text.length : close + open[1].length + 3;
    const inside = text.slice(open.index + open[0].length, close < 0 ? text.length : close);
    const empty = open[1] === "think" && !inside.trim(); // templates put one there where thinking is off
    if (!empty) regions.push({ kind: open[1], from: open.index, to: end, label: labelOf(open[1], inside, close >= 0) });
    REGION.lastIndex = end;
  }
  return regions;
}

function labelOf(kind, inside, closed) {
  const open = closed ? "" : " · not closed";
  if (kind !== "tool_call") return { tool_response: "tool response", think: "thinking" }[kind] + open;
  try {
    const call = JSON.parse(inside);
    return `tool call · ${typeof call.name === "string" ? call.name.slice(0, 60) : "no name"}${open}`;
  } catch {
    return `tool call · malformed${open}`;
  }
}
