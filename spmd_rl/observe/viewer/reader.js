// One episode, to be read: its messages and turns, token by token. Of long texts only the beginning is there until
// somebody asks for more.

// characters
const FIRST = { system: 160, given: 2400, policy: 24000 };
const MORE = 60000;
const AROUND_HIT = 400;

class Reader {
  constructor(store, pane) {
    Object.assign(this, { store, pane, columns: new WeakMap(), limits: new Map(), episode: null });
  }

  // on: {open(episode), sample(number)}, what the head's buttons do
  show(i, number, { q, color }, on) {
    const top = this.episode === i ? this.pane.scrollTop : 0;
    if (this.episode !== i || this.number !== number || this.query !== q) this.limits.clear();
    Object.assign(this, { episode: i, number, query: q, color });
    const { samples } = this.store.body(i);
    const sample = samples[Math.min(number, samples.length - 1)];
    if (!this.columns.has(sample)) this.columns.set(sample, new Columns(sample));
    this.now = this.columns.get(sample);
    this.redraw = () => this.show(i, number, { q, color }, on);
    const blocks = blocksOf(this.now).map((block) => this.block(block));
    const nothing = el("p.empty", "This rollout has no tokens.");
    this.pane.replaceChildren(head(this.store, i, sample, q, on), el("div.blocks", blocks.length ? blocks : nothing));
    this.pane.scrollTop = top;
  }

  block(block) {
    const kind = block.sampled ? "policy" : "given";
    const text = this.now.sample.text.slice(block.start, block.to);
    const hits = hitsOf(text, this.query);
    const asked = this.limits.get(block.from) ?? FIRST[block.role] ?? FIRST[kind];
    const limit = hits.length ? Math.max(asked, hits[0][1] + AROUND_HIT) : asked;
    const to = text.length <= limit * 1.2 ? text.length : endOfLine(text, limit);
    const more = () => {
      this.limits.set(block.from, to + MORE);
      this.redraw();
    };
    return el(
      "section.block",
      { class: kind },
      el(
        "h3",
        el("span.role", block.role),
        block.sampled && el("span.turn", `turn ${block.turn}`),
        el("code.control", this.now.sample.text.slice(block.from, block.start)),
        el("span.aside", figures(block, this.now)),
      ),
      el("div.text", this.atoms(text, to, block, hits)),
      to < text.length && button(`Show ${count(text.length - to, "more character")}`, more, { class: "more" }),
    );
  }

  // The text up to `end`, cut wherever something changes: a sampled token, a control token, a region, a hit.
  atoms(text, end, block, hits) {
    const regions = block.role === "system" ? [] : regionsOf(text); // a system message only speaks about calls
    const bounds = regions.map(({ from, to }) => [from, to]);
    const controls = rangesOf(text.slice(0, end), CONTROL);
    const tokens = block.sampled ? this.now.ranges(block.sampled, block.start, end) : [];
    const [inRegion, inControl, inToken, inHit] = [bounds, controls, tokens, hits].map(walker);
    const cuts = new Set([[0, end], bounds, controls, tokens, hits].flat(2));
    const places = [...cuts].filter((cut) => cut <= end).sort((a, b) => a - b);
    const out = [];
    let region = null;
    let box = null;
    for (let n = 0; n + 1 < places.length; n++) {
      const from = places[n];
      const now = inRegion(from);
      if (now !== region) {
        box = now === null ? null : el("div.region", { class: regions[now].kind }, el("div.label", regions[now].label));
        if (box) out.push(box);
        region = now;
      }
      const token = inToken(from) === null ? -1 : this.now.at(block.start + from);
      const atom = this.atom(text.slice(from, places[n + 1]), token, inControl(from) !== null, inHit(from) !== null);
      if (box) box.append(atom);
      else out.push(atom);
    }
    return out;
  }

  atom(text, token, control, hit) {
    const inner = hit ? el("mark", text) : document.createTextNode(text);
    const classes = [control && "control", text.includes("\n") && "newline"];
    if (token >= 0) {
      const { store, color, episode } = this;
      classes.push("token", shadeOf(color, this.now.token(token), store.advantage, store.base(episode)));
    }
    const said = classes.filter(Boolean).join(" ");
    return said ? el("span", { class: said, "data-token": token >= 0 ? token : null }, inner) : inner;
  }

  // What the card says about a token: [[its text, which one], [name, value], …]
  describe(t) {
    const { sample, starts } = this.now;
    if ("whole" in sample) return [["no columns", "of tokens in this older file"]];
    const { tokens, logprob, version, advantage } = this.now.token(t);
    const lag = this.store.kind(this.episode) === "train" ? ` (lag ${this.store.base(this.episode) - version})` : "";
    const sampler = version < 0 ? "a frozen teacher" : `${version}${lag}`;
    return [
      [
        JSON.stringify(sample.text.slice(starts[t], starts[t + 1])).slice(0, 80),
        tokens > 1 ? `${tokens} tokens, up to number ${t}` : `token ${t}`,
      ],
      ["logprob", logprob === null ? "–" : `${number(logprob)} (${percent(Math.exp(logprob))})`],
      ["version", version === null ? "–" : sampler],
      ["advantage", number(advantage, true)],
    ];
  }
}

function figures(block, columns) {
  if (!block.sampled) return count(block.to - block.from, "character");
  if ("whole" in columns.sample) return count(columns.sample.whole, "token");
  const { from, to } = block.sampled;
  const places = [columns.place[from], columns.place[to - 1] + 1];
  const logprobs = columns.logprobs.slice(...places).filter((logprob) => logprob !== null);
  const versions = columns.versions.slice(...places).filter((version) => version !== null && version >= 0);
  const facts = [count(to - from, "token")];
  if (logprobs.length) facts.push(`mean logprob ${number(mean(logprobs))}`);
  if (versions.length) facts.push(`version ${span(least(versions), most(versions))}`);
  return facts.join(" · ");
}

// A nearby end of a line before the limit, so that the beginning of a long text ends well.
function endOfLine(text, limit) {
  const end = text.lastIndexOf("\n", limit) + 1;
  return end > limit / 2 ? end : limit;
}

// Number of the range that a growing place lies in, or null; ranges are in order and apart.
function walker(ranges) {
  let at = 0;
  return (place) => {
    while (at < ranges.length && ranges[at][1] <= place) at++;
    return at < ranges.length && ranges[at][0] <= place ? at : null;
  };
}

// A card beside the token under the pointer.
function hoverCard(card, panes) {
  const hide = () => {
    card.hidden = true;
  };
  const show = (reader, token) => {
    const [[piece, which], ...facts] = reader.describe(Number(token.dataset.token));
    const rows = facts.flatMap(([name, value]) => [el("dt", name), el("dd", value)]);
    card.hidden = false;
    card.replaceChildren(el("code", piece), el("small", which), el("dl", rows));
    const box = token.getClientRects()[0];
    const size = card.getBoundingClientRect();
    card.style.left = `${Math.max(8, Math.min(box.left, innerWidth - size.width - 8))}px`;
    card.style.top = `${box.top > size.height + 12 ? box.top - size.height - 6 : box.bottom + 6}px`;
  };
  for (const { body, reader } of panes) {
    body.addEventListener("pointerover", (event) => {
      const token = event.target.closest("[data-token]");
      if (token) show(reader, token);
      else hide();
    });
    for (const name of ["pointerleave", "scroll"]) body.addEventListener(name, hide);
  }
}
