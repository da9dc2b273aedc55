// What an episode was, above its tokens: outcome, figures, parts of the reward, other attempts, task, samples.

const NEAR = 20; // other attempts on either side of this one

function head(store, i, sample, query, on) {
  const body = store.body(i);
  const { reward } = store.facts;
  const kind = store.kind(i) === "eval" && el("span.badge.eval", "evaluation");
  return el(
    "header.head",
    el(
      "div.first",
      el(
        "div",
        el("h2", `${store.source(i)} · ${store.facts.task[i]}`, kind, statusBadge(store.status(i))),
        el("p.facts", factsOf(store, i, sample).map((fact) => el("span", fact))),
      ),
      el("div.outcome", rewardBox(store, i), el("small", reward[i] === null ? "no reward" : "reward")),
    ),
    body.error && el("p.error", el("b", "No reward: "), body.error),
    rewardParts(body.parts),
    attempts(store, i, on.open),
    task(body.data, query),
    body.samples.length > 1 && tabs(body.samples, sample, on.sample),
  );
}

function factsOf(store, i, sample) {
  const { step, sampled, given, turns, oldest, newest, advantage, seconds } = store.facts;
  const facts = [`step ${step[i]}`];
  if (oldest[i] !== null) {
    const lags = span(store.base(i) - newest[i], store.base(i) - oldest[i]);
    facts.push(`version ${span(oldest[i], newest[i])}${store.kind(i) === "train" ? ` (lag ${lags})` : ""}`);
  }
  facts.push(`${count(sampled[i], "token")} sampled, ${given[i].toLocaleString("en")} given`, count(turns[i], "turn"));
  if (sample.temperature !== null)
    facts.push(sample.temperature === 0 ? "greedy" : `temperature ${number(sample.temperature)}`);
  const alone = store.body(i).samples.length === 1; // seats of one game have opposite ones
  if (advantage[i] !== null && alone) facts.push(`advantage ${number(advantage[i], true)}`);
  return [...facts, `${number(seconds[i])} s`];
}

function rewardParts(parts) {
  const shown = Object.entries(parts).map(([name, value]) => el("div", el("dt", name), el("dd", number(value))));
  return shown.length > 0 && el("dl.parts", shown);
}

// The rest of the group, and the same task at other steps.
function attempts(store, i, open) {
  const same = store.sameTask(i);
  if (same.length < 2) return null;
  const at = same.indexOf(i);
  const near = same.slice(Math.max(0, at - NEAR), at + NEAR + 1);
  const pill = (other) => {
    const reward = store.facts.reward[other];
    const here = other === i ? { class: "pill here", "aria-current": "true" } : { class: "pill" };
    return button(number(reward), () => open(other), { ...here, vars: { "--place": store.place(reward) ?? 0 } });
  };
  const ofStep = (step) => near.filter((other) => store.facts.step[other] === step).map(pill);
  const steps = [...new Set(near.map((other) => store.facts.step[other]))];
  const groups = steps.map((step) => el("span.group", el("span.step", `step ${step}`), ofStep(step)));
  return el("div.attempts", el("span.label", `${same.length} attempts at this task`), groups);
}

// The task's own data, open where it is short.
function task(data, query) {
  if (data === null || data === undefined || (typeof data === "object" && !Object.keys(data).length)) return null;
  const rows = typeof data === "object" && !Array.isArray(data) ? Object.entries(data) : [["data", data]];
  const short = rows.length <= 6 && rows.every(([, value]) => readable(value).length <= 160);
  const shown = rows.map(([name, value]) => el("div", el("dt", name), el("dd", marked(readable(value), query))));
  return el("details.data", { open: short }, el("summary", "Task"), el("dl", shown));
}

function marked(text, query) {
  if (!query) return [text];
  const out = [];
  let at = 0;
  for (const [from, to] of hitsOf(text, query)) {
    out.push(text.slice(at, from), el("mark", text.slice(from, to)));
    at = to;
  }
  return [...out, text.slice(at)];
}

function tabs(samples, chosen, take) {
  const tab = (sample, n) =>
    el(
      "button",
      { type: "button", role: "tab", "aria-selected": String(sample === chosen), onclick: () => take(n) },
      sample.agent || `sample ${n + 1}`,
      sample.reward !== null && el("b", { title: "reward of this sample" }, number(sample.reward)),
      typeof sample.advantages === "number" && el("small", { title: "advantage" }, number(sample.advantages, true)),
    );
  return el("div.tabs", { role: "tablist", "aria-label": "Samples of this episode" }, samples.map(tab));
}
