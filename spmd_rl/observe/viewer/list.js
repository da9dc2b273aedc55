// The list of episodes. Thousands of rows, of which only those in sight exist.

// pixels
const ROW = 56;
const HEADING = 30;
const SPARE = 300;

class List {
  constructor(root, store, choose) {
    Object.assign(this, { root, store, choose, rows: [], query: "" });
    this.sheet = el("div.sheet");
    root.append(this.sheet);
    root.addEventListener("scroll", () => this.draw());
    new ResizeObserver(() => this.draw()).observe(root);
  }

  // chosen: Map of episode → letter ("" | "A" | "B"); letters: Map of step → letter, in a comparison
  show(episodes, { grouped, chosen, letters, query }) {
    Object.assign(this, { chosen, letters, query });
    this.rows = [];
    let top = 0;
    for (let at = 0; at < episodes.length; at++) {
      const i = episodes[at];
      if (grouped && (at === 0 || this.heading(episodes[at - 1]) !== this.heading(i))) {
        const from = at;
        let to = at;
        while (to < episodes.length && this.heading(episodes[to]) === this.heading(i)) to++;
        this.rows.push({ top, heading: i, members: episodes.slice(from, to) });
        top += HEADING;
      }
      this.rows.push({ top, episode: i });
      top += ROW;
    }
    this.sheet.style.height = `${top}px`;
    this.draw();
  }

  heading(i) {
    return `${this.store.facts.step[i]} ${this.store.kind(i)}`;
  }

  reveal(i) {
    const row = this.rows.find((r) => r.episode === i);
    if (!row) return;
    const { scrollTop, clientHeight } = this.root;
    if (row.top - HEADING < scrollTop) this.root.scrollTop = row.top - HEADING;
    else if (row.top + ROW > scrollTop + clientHeight) this.root.scrollTop = row.top + ROW - clientHeight + 8;
    this.draw();
  }

  draw() {
    const from = this.root.scrollTop - SPARE;
    const to = this.root.scrollTop + (this.root.clientHeight || 600) + SPARE;
    let low = 0;
    let high = this.rows.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.rows[middle].top < from) low = middle + 1;
      else high = middle;
    }
    const drawn = [];
    for (let at = low; at < this.rows.length && this.rows[at].top < to; at++) {
      const row = this.rows[at];
      drawn.push(row.members ? this.headingRow(row) : this.episodeRow(row));
    }
    this.sheet.replaceChildren(...drawn);
  }

  headingRow({ top, heading, members }) {
    const rewards = members.map((i) => this.store.facts.reward[i]).filter((reward) => reward !== null);
    const step = this.store.facts.step[heading];
    const letter = this.letters.get(step);
    return el(
      "div.heading",
      { vars: { top: `${top}px` }, role: "presentation" },
      letter && el("b.letter", { class: letter }, letter),
      el("span", `Step ${step}`),
      this.store.kind(heading) === "eval" && el("span.badge.eval", "evaluation"),
      el("span.aside", `${members.length} × · mean ${number(mean(rewards))}`),
    );
  }

  episodeRow({ top, episode: i }) {
    const { store } = this;
    const letter = this.chosen.get(i);
    const title = `${store.source(i)} · ${store.facts.task[i]}`;
    return el(
      "div.row",
      {
        class: letter === undefined ? "" : `chosen ${letter}`,
        role: "option",
        id: `row-${store.id(i)}`,
        "aria-selected": String(letter !== undefined),
        vars: { top: `${top}px` },
        onclick: () => this.choose(i),
      },
      rewardBox(store, i),
      el(
        "div.what",
        el("div.line", el("span.title", title), el("span.aside", this.aside(i))),
        el("div.snippet", snippet(store.body(i), this.query)),
      ),
    );
  }

  // How it ended; under headings how long it was, else which step it is of.
  aside(i) {
    const { store } = this;
    const status = store.status(i) !== "ok" && statusBadge(store.status(i));
    if (this.rows[0].members) return [status || count(store.facts.sampled[i], "token")];
    return [status, ` step ${store.facts.step[i]}${store.kind(i) === "eval" ? " eval" : ""}`];
  }
}

const statusBadge = (status) => el("span.badge", { class: status }, status);

function rewardBox(store, i) {
  const reward = store.facts.reward[i];
  const place = store.place(reward);
  const look = { class: place === null ? "none" : "", vars: { "--place": place ?? 0 } };
  return el("div.reward", look, el("span", number(reward)), el("i"));
}

// The end of what the policy said, or the first hit of the search.
function snippet(body, query) {
  if (query) {
    for (const { text } of body.samples) {
      const hit = searchPattern(query).exec(text);
      if (!hit) continue;
      const start = Math.max(0, hit.index - 24);
      const plain = (s) => s.replace(/\s+/g, " ");
      return [
        (start ? "…" : "") + plain(text.slice(start, hit.index)),
        el("mark", plain(hit[0].slice(0, 200))),
        plain(text.slice(hit.index + hit[0].length, hit.index + 120)),
      ];
    }
  }
  if (body.error) return [body.error.slice(0, 200)];
  body.said ??= body.samples.map(lastSaid).filter(Boolean).join(" ⁄ ") || "nothing sampled";
  return [body.said];
}

function lastSaid(sample) {
  const runs = sample.mask;
  if (runs.length < 2) return "";
  const last = runs.length % 2 ? runs.length - 2 : runs.length - 1; // odd places are runs of mask 1
  const before = sum(runs.slice(0, last));
  const length = (from, to) => sum(sample.lengths.slice(from, to));
  const start = length(0, before);
  const text = sample.text.slice(start, start + Math.min(300, length(before, before + runs[last])));
  const plain = text.replace(/<\|[^|<>\s]{1,40}\|>/g, "");
  return plain.replace(/\s+/g, " ").trim();
}
