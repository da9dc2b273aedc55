// Fields, buttons and keys: what they show, and what of the page they change.

const KEYS = [
  ["j k", "next, previous episode"],
  ["← →", "previous, next step"],
  ["c", "two steps side by side, or one"],
  ["s", "all steps, or the step of this episode"],
  ["1 – 5", "colour by " + Object.values(COLORS).join(", ").toLowerCase()],
  ["[ ]", "previous, next sample of the episode"],
  ["/", "search"],
  ["n p", "next, previous hit"],
  ["t", "light, dark or as the system"],
  ["Esc", "clear the search"],
  ["click", "on the curve: that step; with Shift, beside the one that is open"],
  ["?", "this list"],
];
const TYPING_MS = 150;

// What stays the same as long as the page is open.
function fillControls(app) {
  const { store, run } = app;
  byId("name").textContent = run.name;
  byId("about").textContent = `${count(store.size, "episode")} of ${count(store.steps.length, "step")}`;
  byId("left-out").hidden = !run.leftOut;
  byId("left-out").textContent =
    `${count(run.leftOut, "episode")} left out to stay within ${run.maxMb} MB. Every step keeps its share; ` +
    "look at fewer steps (--steps 10:20) or raise --max-mb.";
  const options = (id, entries) => byId(id).append(...entries.map(([value, says]) => el("option", { value }, says)));
  options("source", [["", "all"], ...store.facts.sources.map((source) => [source, source])]);
  options("status", [["", "all"], ...store.facts.statuses.map((status) => [status, status])]);
  options("sort", Object.entries(SORTS));
  byId("source-field").hidden = store.facts.sources.length < 2;
  for (const [value, says] of Object.entries(KINDS))
    byId("kind").append(button(says, () => app.update({ kind: value }), { value }));
  for (const [n, [value, says]] of Object.entries(COLORS).entries())
    byId("color").append(button(says, () => app.update({ color: value }), { value, title: `Key ${n + 1}` }));
  for (const [keys, says] of KEYS) {
    const caps = keys.split(" ").map((key) => (key === "–" ? key : el("kbd", key)));
    byId("key-list").append(el("dt", caps), el("dd", says));
  }
}

function listen(app) {
  byId("compare").onclick = () => app.toggleCompare();
  byId("theme").onclick = () => app.nextTheme();
  byId("help").onclick = () => byId("keys").showModal();
  byId("filters").onsubmit = (event) => event.preventDefault();
  for (const name of ["source", "status", "sort"])
    byId(name).onchange = (event) => app.update({ [name]: event.target.value });
  for (const name of ["min", "max"]) byId(name).oninput = (event) => app.update({ [name]: real(event.target.value) });
  let waiting = 0;
  byId("q").oninput = () => {
    clearTimeout(waiting);
    waiting = setTimeout(() => app.update({ q: byId("q").value }), TYPING_MS);
  };
  addEventListener("hashchange", () => app.update(readAddress()));
  addEventListener("keydown", (event) => onKey(app, event));
  hoverCard(byId("card"), app.panes);
}

// What follows the state.
function showControls(app) {
  const { state, store, listed } = app;
  for (const name of ["q", "source", "status", "sort", "min", "max"])
    if (document.activeElement !== byId(name)) byId(name).value = state[name] ?? "";
  for (const name of ["kind", "color"])
    for (const choice of byId(name).children) choice.setAttribute("aria-pressed", String(choice.value === state[name]));
  const all = count(store.size, "episode");
  byId("count").textContent = listed.length === store.size ? all : `${listed.length.toLocaleString("en")} of ${all}`;
  const chips = [];
  if (state.step !== null && !app.comparing)
    chips.push(button(`step ${state.step} ×`, () => app.toggleStep(), { class: "chip", title: "Show all steps (s)" }));
  if (FILTERS.some((name) => state[name] !== STATE[name][0]))
    chips.push(button("clear filters ×", () => app.update(unfiltered()), { class: "chip" }));
  byId("chips").replaceChildren(...chips);
  histogram(byId("histogram"), store, state);
  byId("legend").replaceChildren(...legend(state.color, store, app.open));
  byId("compare").setAttribute("aria-pressed", String(app.comparing));
  byId("theme").textContent = { auto: "Auto", light: "Light", dark: "Dark" }[state.theme];
}

// A step of the comparison: which, how it went, and where among its episodes the pane is.
function stepBar(app, letter, n, step) {
  const { store } = app;
  const there = app.ofStep(step);
  const rewards = there.map((i) => store.facts.reward[i]).filter((reward) => reward !== null);
  const lengths = there.map((i) => store.facts.sampled[i]);
  const steps = [...new Set([...store.steps, step])].sort((a, b) => a - b);
  const options = steps.map((s) => el("option", { value: s, selected: s === step }, `Step ${s}`));
  const take = (event) => app.update({ [n ? "compare" : "step"]: Number(event.target.value) });
  const move = (says, title, does) => button(says, does, { class: "quiet", title });
  return [
    el("b.letter", { class: letter }, letter),
    move("‹", "Previous step", () => app.moveStep(-1, n)),
    el("select", { "aria-label": `Step of pane ${letter}`, onchange: take }, options),
    move("›", "Next step", () => app.moveStep(1, n)),
    el(
      "span.aside",
      { title: "Of the episodes that pass the filters: mean reward, and mean sampled tokens" },
      `${count(there.length, "episode")} · mean ${number(mean(rewards))} · ${number(mean(lengths))} tokens`,
    ),
    el("span.gap"),
    move("‹", "Previous episode of this step", () => app.moveEpisode(-1, n)),
    el("span.aside.place", `${there.indexOf(app.open[n]) + 1} / ${there.length}`),
    move("›", "Next episode of this step", () => app.moveEpisode(1, n)),
  ];
}

function nothing(app, step) {
  const where = step === null ? "" : ` of step ${step}`;
  const elsewhere = step !== null && !app.comparing;
  return el(
    "div.empty",
    el("p", `No episode${where} passes the filters.`),
    button("Clear the filters", () => app.update(unfiltered())),
    elsewhere && button("Look at all steps", () => app.update({ step: null })),
  );
}

function onKey(app, event) {
  if (event.ctrlKey || event.metaKey || event.altKey || byId("keys").open) return;
  const { target, key } = event;
  if (/^(INPUT|SELECT|TEXTAREA)$/.test(target.tagName ?? "")) {
    if (key === "Escape" || (key === "Enter" && target.id === "q")) target.blur();
    if (key === "Escape" && target.id === "q") app.update({ q: "" });
    return;
  }
  const keys = {
    j: () => app.moveEpisode(1),
    k: () => app.moveEpisode(-1),
    ArrowRight: () => app.moveStep(1),
    ArrowLeft: () => app.moveStep(-1),
    c: () => app.toggleCompare(),
    s: () => app.toggleStep(),
    t: () => app.nextTheme(),
    n: () => app.markHit(1, true),
    p: () => app.markHit(-1, true),
    "[": () => app.moveSample(-1),
    "]": () => app.moveSample(1),
    "/": () => byId("q").focus(),
    "?": () => byId("keys").showModal(),
    Escape: () => app.update({ q: "" }),
  };
  for (const [n, color] of Object.keys(COLORS).entries()) keys[n + 1] = () => app.update({ color });
  if (target === byId("list")) Object.assign(keys, { ArrowDown: keys.j, ArrowUp: keys.k });
  if (!Object.hasOwn(keys, key)) return;
  event.preventDefault();
  keys[key]();
}
