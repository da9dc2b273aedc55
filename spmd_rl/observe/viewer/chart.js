// The curve that the episodes stand behind: mean reward and evaluations, every episode of the list as a dot, and the
// chosen steps. A click takes the nearest step that has episodes.

const SMOOTH = 10; // steps, as in reward.png
const CHART = { height: 124, left: 44, right: 18, top: 26, bottom: 22 };

class Chart {
  constructor(root, run, store, choose) {
    Object.assign(this, { root, curve: run.curve, store, width: 0, shown: null });
    const points = Object.values(run.curve).flat();
    const steps = [...store.steps, ...points.map(([step]) => step)];
    const values = [...points.map(([, value]) => value), store.lowest, store.highest].filter(isFinite);
    [this.from, this.to] = [least(steps), most(steps)];
    [this.low, this.high] = values.length ? [least(values), most(values)] : [0, 1];
    if (this.low === this.high) [this.low, this.high] = [this.low - 0.5, this.high + 0.5];
    new ResizeObserver(() => this.shown && root.clientWidth !== this.width && this.draw(...this.shown)).observe(root);
    root.addEventListener("click", (event) => choose(this.nearest(event), event.shiftKey));
    root.addEventListener("pointermove", (event) => this.hover(this.nearest(event)));
    root.addEventListener("pointerleave", () => this.hover(null));
  }

  x(step) {
    const inner = this.width - CHART.left - CHART.right;
    return CHART.left + (this.to > this.from ? ((step - this.from) / (this.to - this.from)) * inner : inner / 2);
  }

  y(value) {
    const inner = CHART.height - CHART.top - CHART.bottom;
    return CHART.top + (1 - (value - this.low) / (this.high - this.low)) * inner;
  }

  at(step, value) {
    return `${this.x(step).toFixed(1)} ${this.y(value).toFixed(1)}`;
  }

  nearest(event) {
    const at = event.clientX - this.root.getBoundingClientRect().left;
    return this.store.steps.reduce((a, b) => (Math.abs(this.x(b) - at) < Math.abs(this.x(a) - at) ? b : a));
  }

  // episodes: what the filters let through, of all steps; marks: [[letter, step], …]
  draw(episodes, marks) {
    this.shown = [episodes, marks];
    this.width = this.root.clientWidth || 1000;
    this.cursor = svg("g.cursor");
    this.hovered = null;
    const view = { viewBox: `0 0 ${this.width} ${CHART.height}`, height: CHART.height, role: "img" };
    const drawn = [this.axes(), this.dots(episodes), this.lines(), marks.map((mark) => this.mark(...mark))];
    this.root.replaceChildren(svg("svg", view, ...drawn, this.cursor), this.key());
  }

  axes() {
    const values = [this.low, (this.low + this.high) / 2, this.high];
    const [left, right] = [CHART.left, this.width - CHART.right];
    const label = (x, y, anchor, says) => svg("text.tick", { x, y, "text-anchor": anchor }, says);
    const ends = [this.from, this.to];
    const clear = (step) => ends.every((end) => Math.abs(this.x(step) - this.x(end)) > 44);
    const steps = [...new Set([...ends, ...roundSteps(this.from, this.to, this.width / 130).filter(clear)])];
    return [
      ...values.map((v) => svg("line.grid", { x1: left, x2: right, y1: this.y(v), y2: this.y(v) })),
      ...values.map((v) => label(left - 8, this.y(v) + 3.5, "end", number(v))),
      ...steps.map((step) => label(this.x(step), CHART.height - 7, "middle", String(step))),
    ];
  }

  dots(episodes) {
    const places = { train: new Set(), eval: new Set() };
    for (const i of episodes) {
      const { step, reward } = this.store.facts;
      if (reward[i] !== null) places[this.store.kind(i)].add(`M${this.at(step[i], reward[i])}h0`);
    }
    return Object.entries(places).map(([kind, of]) => svg(`path.dots.${kind}`, { d: [...of].join("") }));
  }

  lines() {
    const { train, greedy, sampled } = this.curve;
    const smooth = train.map(([step], i) => {
      const last = train.slice(Math.max(0, i + 1 - SMOOTH), i + 1);
      return [step, mean(last.map(([, value]) => value))];
    });
    const path = (name, points) =>
      points.length > 0 && svg(`path.curve.${name}`, { d: "M" + points.map((p) => this.at(...p)).join("L") });
    const circles = (name, points) =>
      points.map(([step, v]) => svg(`circle.point.${name}`, { cx: this.x(step), cy: this.y(v), r: 4 }));
    return [path("raw", train), path("mean", smooth), ...circles("sampled", sampled), ...circles("greedy", greedy)];
  }

  mark(letter, step) {
    const x = this.x(step);
    const says = letter ? `${letter} · ${step}` : String(step);
    const width = 12 + 6.6 * says.length;
    const left = Math.min(Math.max(x - width / 2, 0), this.width - width);
    return svg(
      "g.marker",
      { class: letter },
      svg("line", { x1: x, x2: x, y1: CHART.top - 6, y2: CHART.height - CHART.bottom }),
      svg("rect", { x: left, y: 2, width, height: 18, rx: 9 }),
      svg("text", { x: left + width / 2, y: 15, "text-anchor": "middle" }, says),
    );
  }

  hover(step) {
    if (step === this.hovered) return;
    this.hovered = step;
    if (step === null) return this.cursor.replaceChildren();
    const known = this.curve.train.find(([s]) => s === step);
    const says = `step ${step}` + (known ? ` · mean ${number(known[1])}` : "");
    const x = this.x(step);
    const [side, anchor] = x > this.width - 180 ? [-6, "end"] : [6, "start"];
    this.cursor.replaceChildren(
      svg("line", { x1: x, x2: x, y1: CHART.top - 6, y2: CHART.height - CHART.bottom }),
      svg("text", { x: x + side, y: CHART.top + 4, "text-anchor": anchor }, says),
    );
  }

  key() {
    const { train, greedy, sampled } = this.curve;
    return el(
      "div.key",
      train.length > 0 && el("span.mean", "mean reward of a step"),
      sampled.length > 0 && el("span.sampled", "evaluation, sampled"),
      greedy.length > 0 && el("span.greedy", "evaluation, greedy"),
      el("span.dots", "episodes on this page"),
    );
  }
}

function roundSteps(from, to, most) {
  const rough = Math.max(1, (to - from) / Math.max(1, most));
  const power = 10 ** Math.floor(Math.log10(rough));
  const by = [1, 2, 5, 10].map((m) => m * power).find((m) => m >= rough);
  const steps = [];
  for (let step = Math.ceil(from / by) * by; step <= to; step += by) steps.push(step);
  return steps;
}
