// Small pictures: what the colours mean, and how rewards are spread.

const SURPRISE = [0.1, 0.5, 1, 2, 4, 7]; // nats: from each on, the next shade
const OLDEST = 7; // lags from here on look the same
const BINS = 24;

// The class of a token with this advantage, logprob or version; `base` is the version of lag 0.
function shadeOf(color, { advantage, logprob, version }, strongest, base) {
  if (color === "mask") return "sampled";
  if (color === "advantage" && advantage !== null) {
    const level = Math.ceil(6 * Math.min(1, Math.abs(advantage) / strongest));
    return advantage ? `${advantage > 0 ? "p" : "n"}${level}` : "zero";
  }
  if (color === "logprob" && logprob !== null) return `h${SURPRISE.filter((from) => -logprob >= from).length}`;
  if (color === "version" && version !== null) return version < 0 ? "teacher" : `v${lagOf(version, base)}`;
  return "";
}

const lagOf = (version, base) => Math.min(OLDEST, Math.max(0, base - version));

function legend(color, store, open) {
  const swatch = (name, says) => el("span.swatch", el("i.token", { class: name }), says);
  const scale = (names) => el("span.scale", names.map((name) => el("i.token", { class: name })));
  if (color === "advantage") {
    if (!store.advantage) return ["no advantages on this page"];
    const shades = ["n6", "n5", "n4", "n3", "n2", "n1", "zero", "p1", "p2", "p3", "p4", "p5", "p6"];
    return [number(-store.advantage), scale(shades), number(store.advantage, true)];
  }
  if (color === "logprob") {
    return ["expected", scale(["h0", "h1", "h2", "h3", "h4", "h5", "h6"]), "surprising (p < 0.1 %)"];
  }
  if (color === "version") {
    const lags = open.filter((i) => i !== null).flatMap((i) => lagsOf(store, i));
    const known = [...new Set(lags)].sort((a, b) => a - b);
    if (!known.length) return ["no versions here"];
    return ["lag in steps:", ...known.map((lag) => swatch(`v${lag}`, lag === OLDEST ? "7 or more" : String(lag)))];
  }
  return color === "mask" ? [swatch("sampled", "sampled by the policy"), swatch("", "given")] : [];
}

function lagsOf(store, i) {
  const versions = store.body(i).samples.flatMap((sample) => sample.versions.filter((_, n) => n % 2 === 0));
  return versions.filter((version) => version !== null && version >= 0).map((version) => lagOf(version, store.base(i)));
}

// How many episodes of the page have which reward; those inside the chosen range are in colour.
function histogram(root, store, { min, max }) {
  const bins = new Array(BINS).fill(0);
  for (const reward of store.facts.reward)
    if (reward !== null) bins[Math.min(BINS - 1, Math.floor(store.place(reward) * BINS))]++;
  const width = (store.highest - store.lowest) / BINS;
  const inside = (n) =>
    (min === null || store.lowest + (n + 1) * width >= min) && (max === null || store.lowest + n * width <= max);
  const height = (size) => (size ? `${Math.max(8, 100 * Math.sqrt(size / most(bins)))}%` : "1px");
  root.replaceChildren(
    ...bins.map((size, n) => el("i", { class: inside(n) ? "in" : "", vars: { height: height(size) } })),
  );
}
