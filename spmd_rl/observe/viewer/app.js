// The page: what is chosen decides what is shown, and every change goes through `update`.

class App {
  constructor(run, lines) {
    this.run = run;
    this.store = new Store(run, lines);
    this.chart = new Chart(byId("chart"), run, this.store, (step, beside) => this.takeStep(step, beside));
    this.list = new List(byId("list"), this.store, (i) => this.choose(i));
    this.panes = ["A", "B"].map((letter) => {
      const bar = el("div.bar");
      const body = el("div.reading", { tabindex: "0" });
      const root = el("article.pane", { "data-pane": letter }, bar, body);
      byId("panes").append(root);
      return { letter, root, bar, body, reader: new Reader(this.store, body) };
    });
    fillControls(this);
    listen(this);
    this.state = readAddress();
    this.update({});
  }

  update(patch) {
    const before = this.state;
    this.state = { ...before, ...patch };
    const { state, store } = this;
    if (!store.facts.sources.includes(state.source)) state.source = "";
    if (!store.facts.statuses.includes(state.status)) state.status = "";
    this.matching = store.select(state);
    this.settle(patch);
    const steps = [state.step, state.compare].filter((step) => step !== null);
    this.listed = steps.length ? [...new Set(steps)].flatMap((step) => this.ofStep(step)) : this.matching;
    this.render(before);
    // A moment later: browsers take only so many addresses in a while, and a key that is held down makes many.
    clearTimeout(this.writing);
    this.writing = setTimeout(() => writeAddress(this.state), 200);
  }

  get comparing() {
    return this.state.compare !== null;
  }

  stepOf(i) {
    return i === null ? null : this.store.facts.step[i];
  }

  // Episodes of a step (null: of all) that the filters let through.
  ofStep(step) {
    return step === null ? this.matching : this.matching.filter((i) => this.stepOf(i) === step);
  }

  // An episode for each pane: the chosen one where the filters let it through, else the first that they do.
  settle(patch) {
    const { state, store } = this;
    const keep = (id, among) => (among.includes(store.find(id)) ? store.find(id) : (among[0] ?? null));
    const idOf = (i) => (i === null ? "" : store.id(i));
    if (this.comparing && state.step === null) state.step = this.stepOf(store.find(state.episode)) ?? store.steps[0];
    const first = keep(state.episode, this.ofStep(state.step));
    if (state.episode && state.episode !== idOf(first)) state.sample = 0;
    state.episode = idOf(first);
    this.open = [first, null];
    if (!this.comparing) return Object.assign(state, { other: "", sample2: 0 });
    const others = this.ofStep(state.compare);
    const moved = !state.other || ["episode", "step", "compare"].some((name) => name in patch);
    const twin = first === null ? undefined : others.find((i) => store.taskKey(i) === store.taskKey(first));
    this.open[1] = moved && !("other" in patch) && twin !== undefined ? twin : keep(state.other, others);
    state.other = idOf(this.open[1]);
  }

  render(before) {
    const { state, open, comparing } = this;
    const root = document.documentElement.dataset;
    [root.theme, root.color] = [state.theme, state.color];
    document.body.classList.toggle("comparing", comparing);
    const steps = comparing ? { B: state.compare, A: state.step } : { "": state.step ?? this.stepOf(open[0]) };
    const marks = Object.entries(steps).filter(([, step]) => step !== null);
    this.chart.draw(this.matching, marks);
    showControls(this);
    this.panes.forEach((pane, n) => this.renderPane(pane, n));
    this.markHit(0, before.q !== state.q || before.episode !== state.episode);
    this.list.show(this.listed, {
      grouped: comparing || ["latest", "first"].includes(state.sort),
      chosen: new Map([...(comparing ? [[open[1], "B"]] : []), [open[0], comparing ? "A" : ""]]),
      letters: new Map(comparing ? marks.map(([letter, step]) => [step, letter]) : []),
      query: state.q,
    });
    if (open[0] === null) return byId("list").removeAttribute("aria-activedescendant");
    if (before.episode !== state.episode) this.list.reveal(open[0]);
    byId("list").setAttribute("aria-activedescendant", `row-${state.episode}`);
  }

  renderPane({ letter, root, bar, body, reader }, n) {
    const { state, store } = this;
    const i = this.open[n];
    root.hidden = n === 1 && !this.comparing;
    if (root.hidden) return;
    const step = n ? state.compare : state.step;
    bar.replaceChildren(...(this.comparing ? stepBar(this, letter, n, step) : []));
    root.dataset.episode = i === null ? "" : store.id(i);
    if (i === null) {
      reader.episode = null;
      body.replaceChildren(nothing(this, step));
      return;
    }
    reader.show(i, n ? state.sample2 : state.sample, state, {
      open: (other) => this.openIn(n, other),
      sample: (number) => this.update(n ? { sample2: number } : { sample: number }),
    });
  }

  choose(i) {
    const { step, compare } = this.state;
    this.openIn(this.comparing && compare !== step && this.stepOf(i) === compare ? 1 : 0, i);
  }

  // Opens an episode in a pane; a step that is not the pane's becomes the pane's.
  openIn(n, i) {
    const id = this.store.id(i);
    const step = this.stepOf(i);
    if (n) return this.update({ other: id, compare: step, sample2: 0 });
    const follow = this.state.step !== null && this.state.step !== step ? { step } : {};
    this.update({ episode: id, sample: 0, ...follow });
  }

  // Of a click on the curve; in a comparison the nearer one of the two steps moves there.
  takeStep(step, beside) {
    const { step: a, compare: b } = this.state;
    const nearer = this.comparing && Math.abs(step - b) < Math.abs(step - a);
    this.update(beside || nearer ? { compare: step } : { step });
  }

  moveStep(by, n = 0) {
    const steps = [...new Set(this.matching.map((i) => this.stepOf(i)))].sort((a, b) => a - b);
    const now = n ? this.state.compare : (this.state.step ?? this.stepOf(this.open[0]));
    const next = by > 0 ? steps.find((s) => s > now) : steps.filter((s) => s < now).pop();
    if (next !== undefined) this.update(n ? { compare: next } : { step: next });
  }

  moveEpisode(by, n = 0) {
    const among = this.comparing ? this.ofStep(n ? this.state.compare : this.state.step) : this.listed;
    const next = among[among.indexOf(this.open[n]) + by];
    if (next !== undefined) this.openIn(n, next);
  }

  moveSample(by) {
    if (this.open[0] === null) return;
    const last = this.store.body(this.open[0]).samples.length - 1;
    this.update({ sample: Math.min(last, Math.max(0, this.state.sample + by)) });
  }

  toggleCompare() {
    const { steps } = this.store;
    if (this.comparing) return this.update({ compare: null });
    const here = this.state.step ?? this.stepOf(this.open[0]) ?? steps[0];
    const last = steps[steps.length - 1];
    this.update(here === last ? { step: steps[0], compare: last } : { step: here, compare: last });
  }

  toggleStep() {
    if (!this.comparing) this.update({ step: this.state.step === null ? this.stepOf(this.open[0]) : null });
  }

  nextTheme() {
    const theme = THEMES[(THEMES.indexOf(this.state.theme) + 1) % THEMES.length];
    remember(theme);
    this.update({ theme });
  }

  // The hit in sight among those that are drawn; `scroll` brings it there, `by` goes on to another one.
  markHit(by, scroll) {
    const marks = [...document.querySelectorAll("#panes .pane:not([hidden]) .text mark")];
    const size = Math.max(1, marks.length);
    if (by) this.hit = (this.hit + by + size) % size;
    else this.hit = scroll ? 0 : Math.min(this.hit ?? 0, size - 1);
    marks.forEach((mark, n) => mark.classList.toggle("current", n === this.hit));
    const said = marks.length ? `hit ${this.hit + 1} of ${marks.length} here` : "no hit here";
    byId("hits").textContent = this.state.q ? said : "";
    if (scroll && marks[this.hit]) marks[this.hit].scrollIntoView({ block: "center" });
  }
}
