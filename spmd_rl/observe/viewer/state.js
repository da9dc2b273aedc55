// What is chosen, and how an address says it, so that a view can be sent to somebody.

const THEMES = ["auto", "light", "dark"];
const KINDS = { all: "All", train: "Training", eval: "Evaluation" };
const COLORS = { advantage: "Advantage", logprob: "Logprob", version: "Version", mask: "Mask", none: "None" };
const SORTS = {
  latest: "Latest step first",
  first: "First step first",
  lowest: "Lowest reward first",
  highest: "Highest reward first",
  longest: "Longest first",
};
const FILTERS = ["kind", "source", "status", "min", "max", "q"];

const natural = (text) => (/^\d{1,15}$/.test(text) ? Number(text) : null);
const real = (text) => (text.trim() !== "" && isFinite(text) ? Number(text) : null);
const oneOf = (names, otherwise) => (text) => (names.includes(text) ? text : otherwise);
const asIs = (text) => text;
const STATE = {
  // name: [what it is when the address says nothing, how to read it]
  step: [null, natural],
  compare: [null, natural],
  episode: ["", asIs],
  other: ["", asIs], // the episode of the second pane
  sample: [0, (text) => natural(text) ?? 0],
  sample2: [0, (text) => natural(text) ?? 0],
  kind: ["all", oneOf(Object.keys(KINDS), "all")],
  source: ["", asIs],
  status: ["", asIs],
  min: [null, real],
  max: [null, real],
  q: ["", asIs],
  sort: ["latest", oneOf(Object.keys(SORTS), "latest")],
  color: ["advantage", oneOf(Object.keys(COLORS), "advantage")],
  theme: ["auto", oneOf(THEMES, "auto")],
};

const unfiltered = () => Object.fromEntries(FILTERS.map((name) => [name, STATE[name][0]]));

function readAddress() {
  const given = new URLSearchParams(location.hash.slice(1));
  const state = {};
  for (const [name, [otherwise, read]] of Object.entries(STATE))
    state[name] = given.has(name) ? read(given.get(name)) : otherwise;
  if (!given.has("theme")) state.theme = remembered();
  return state;
}

function writeAddress(state) {
  const said = Object.keys(STATE).filter((name) => state[name] !== STATE[name][0]);
  const hash = "#" + new URLSearchParams(said.map((name) => [name, state[name]]));
  if (hash !== (location.hash || "#")) history.replaceState(null, "", hash);
}

// The chosen theme, for the next page; a browser may forbid files to remember anything.
function remembered() {
  try {
    const theme = localStorage.getItem("spmd_rl-viewer-theme");
    return THEMES.includes(theme) ? theme : "auto";
  } catch {
    return "auto";
  }
}

function remember(theme) {
  try {
    localStorage.setItem("spmd_rl-viewer-theme", theme);
  } catch {
    // it holds for this page alone
  }
}
