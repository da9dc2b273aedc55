// All episodes: columns of facts for lists and filters, and one line of JSON each, parsed when somebody looks at it.

const KEPT = 200; // parsed episodes

class Store {
  constructor(run, lines) {
    this.facts = run.facts;
    this.lines = lines;
    this.size = lines.length;
    this.parsed = new Map();
    this.found = { query: "", hits: null };
    this.steps = [...new Set(run.facts.step)].sort((a, b) => a - b);
    const rewards = run.facts.reward.filter((r) => r !== null);
    [this.lowest, this.highest] = [least(rewards), most(rewards)];
    this.advantage = run.advantage;
    this.places = new Map(Array.from({ length: this.size }, (_, i) => [this.id(i), i]));
    this.groups = new Map();
    for (let i = 0; i < this.size; i++) {
      const key = this.taskKey(i);
      if (!this.groups.has(key)) this.groups.set(key, []);
      this.groups.get(key).push(i);
    }
  }

  kind(i) {
    return this.facts.kinds[this.facts.kind[i]];
  }

  source(i) {
    return this.facts.sources[this.facts.source[i]];
  }

  status(i) {
    return this.facts.statuses[this.facts.status[i]];
  }

  // The same on every page of this run: t12.0 is the first episode of training step 12, e20.3 one of an evaluation.
  id(i) {
    return `${this.kind(i)[0]}${this.facts.step[i]}.${this.facts.number[i]}`;
  }

  find(id) {
    return this.places.get(id) ?? null;
  }

  taskKey(i) {
    return `${this.facts.kind[i]} ${this.facts.source[i]} ${this.facts.task[i]}`;
  }

  sameTask(i) {
    return this.groups.get(this.taskKey(i));
  }

  // The version that the step started with: what a token of lag 0 was sampled by.
  base(i) {
    return this.facts.step[i] - (this.kind(i) === "train" ? 1 : 0);
  }

  // 0 for the lowest reward of the page, 1 for the highest.
  place(reward) {
    if (reward === null) return null;
    return this.highest > this.lowest ? (reward - this.lowest) / (this.highest - this.lowest) : 1;
  }

  body(i) {
    if (!this.parsed.has(i)) {
      if (this.parsed.size >= KEPT) this.parsed.delete(this.parsed.keys().next().value);
      this.parsed.set(i, JSON.parse(this.lines[i]));
    }
    return this.parsed.get(i);
  }

  // Episodes that the filters let through, in the order of the list.
  select(state) {
    const f = this.facts;
    const hits = this.search(state.q);
    const chosen = [];
    for (let i = 0; i < this.size; i++) {
      if (hits && !hits[i]) continue;
      if (state.kind !== "all" && this.kind(i) !== state.kind) continue;
      if (state.source && this.source(i) !== state.source) continue;
      if (state.status && this.status(i) !== state.status) continue;
      if ((state.min ?? state.max) !== null && f.reward[i] === null) continue;
      if (state.min !== null && f.reward[i] < state.min) continue;
      if (state.max !== null && f.reward[i] > state.max) continue;
      chosen.push(i);
    }
    return chosen.sort(this.order(state.sort));
  }

  order(sort) {
    const f = this.facts;
    const none = (i) => (f.reward[i] === null ? 1 : 0); // what has no reward comes last, whatever the direction
    const orders = {
      latest: (a, b) => f.step[b] - f.step[a],
      first: (a, b) => f.step[a] - f.step[b],
      lowest: (a, b) => none(a) - none(b) || f.reward[a] - f.reward[b],
      highest: (a, b) => none(a) - none(b) || f.reward[b] - f.reward[a],
      longest: (a, b) => f.sampled[b] - f.sampled[a],
    };
    return (a, b) => orders[sort](a, b) || a - b;
  }

  // Uint8Array: 1 for the episodes that hold the text; null when nothing is looked for.
  search(query) {
    if (!query) return null;
    if (this.found.hits && this.found.query === query) return this.found.hits;
    const among = this.found.hits && query.startsWith(this.found.query) ? this.found.hits : null;
    const pattern = searchPattern(query);
    const found = (text) => text.search(pattern) >= 0;
    const hits = new Uint8Array(this.size);
    for (let i = 0; i < this.size; i++) {
      if (among && !among[i]) continue;
      hits[i] = this.texts(i).some(found) ? 1 : 0;
    }
    this.found = { query, hits };
    return hits;
  }

  texts(i) {
    const body = this.parsed.get(i) ?? JSON.parse(this.lines[i]); // a search through everything keeps nothing
    const data = body.data === null || body.data === undefined ? "" : readable(body.data);
    return [...body.samples.map((s) => s.text), `${this.source(i)} · ${this.facts.task[i]}`, body.error, data];
  }
}

const readable = (value) => (typeof value === "string" ? value : JSON.stringify(value));

function searchPattern(query) {
  return new RegExp(query.replace(/[.*+?^${}()|[\]\\/]/g, "\\$&"), "giu");
}

// [from, to] of everything that a pattern finds, or of every hit of a search.
const rangesOf = (text, pattern) => [...text.matchAll(pattern)].map((m) => [m.index, m.index + m[0].length]);
const hitsOf = (text, query) => (query ? rangesOf(text, searchPattern(query)) : []);
