"use strict";
// Asks for the state of all runs and shows it. The page changes nothing, so it has no buttons.
const EVERY = 1500;
const cards = new Map();
const status = document.getElementById("status");
let tag = "", runs = [], folder = "";

const element = (name, parent, kind = "") => {
  const made = parent.appendChild(document.createElement(name));
  if (kind) made.className = kind;
  return made;
};
const path = (parent, kind) => {
  const made = parent.appendChild(document.createElementNS("http://www.w3.org/2000/svg", "path"));
  made.setAttribute("class", kind);
  return made;
};
const percent = value => value === null ? "–" : `${(100 * value).toFixed(1)} %`;
const bytes = count => count >= 1e9 ? `${(count / 1e9).toFixed(2)} GB` : `${(count / 1e6).toFixed(1)} MB`;
const time = seconds => {
  if (seconds < 90) return `${Math.max(0, Math.round(seconds))} s`;
  return seconds < 5400 ? `${Math.round(seconds / 60)} min` : `${(seconds / 3600).toFixed(1)} h`;
};

const card = name => {
  const box = document.createElement("article");
  const parts = {box, title: element("h2", box), about: element("p", box, "about"), accuracy: element("p", box, "big")};
  parts.progress = element("progress", box);
  parts.progress.setAttribute("aria-label", `rounds of ${name}`);
  const chart = box.appendChild(document.createElementNS("http://www.w3.org/2000/svg", "svg"));
  chart.setAttribute("preserveAspectRatio", "none");
  chart.setAttribute("role", "img");
  Object.assign(parts, {chart, grid: path(chart, "grid"), tasks: path(chart, "task"), lossy: path(chart, "lossy"), curve: path(chart, "curve")});
  parts.key = element("p", box, "key");
  parts.facts = element("p", box, "facts");
  parts.training = element("p", box, "facts");
  parts.refused = element("ul", box);
  return parts;
};
const lineThrough = (points, most) => {
  let pen = "M";
  return points.filter(([, value]) => value !== null).map(([round, value]) => {
    const text = `${pen}${round - 1} ${(100 - 100 * value / most).toFixed(1)}`;
    pen = "L";
    return text;
  }).join("") + (points.length === 1 ? "h0.001" : "");
};

const show = run => {
  const known = cards.get(run.name) || card(run.name), {box} = known;
  cards.set(run.name, known);
  box.className = run.state;
  known.title.textContent = run.name;
  known.about.replaceChildren();
  element("span", known.about, "state").textContent = run.state;
  known.about.append(` · ${run.method} on ${run.data}, seed ${run.seed}`);
  known.accuracy.textContent = percent(run.accuracy);
  known.progress.max = run.rounds || 1;
  known.progress.value = run.state === "finished" ? known.progress.max : run.round;
  const rounds = Math.max(2, run.rounds || run.round);
  known.chart.setAttribute("viewBox", `0 0 ${rounds - 1} 100`);
  known.chart.setAttribute("aria-label", `accuracy after round ${run.round}: ${percent(run.accuracy)}`);
  known.grid.setAttribute("d", [0, 25, 50, 75, 100].map(y => `M0 ${y}H${rounds - 1}`).join(""));
  known.tasks.setAttribute("d", run.starts.filter(start => start > 0).map(start => `M${start - 0.5} 0V100`).join("") || "M0 0");
  known.curve.setAttribute("d", lineThrough(run.curve, 1) || "M0 0");
  const losses = run.loss.map(([, value]) => value).filter(value => value !== null), most = Math.max(...losses, 1e-9);
  known.lossy.setAttribute("d", lineThrough(run.loss, most) || "M0 0");
  known.key.replaceChildren();
  element("b", known.key).textContent = "accuracy";
  known.key.append(" from 0 to 100 %");
  if (losses.length) {
    known.key.append(" · ");
    element("i", known.key).textContent = "sum of losses";
    known.key.append(` from 0 to ${most.toPrecision(3)}`);
  }
  const where = run.rounds ? `round ${run.round} of ${run.rounds}` : `round ${run.round}`;
  const task = run.task ? `, task ${run.task}${run.tasks ? ` of ${run.tasks}` : ""}` : "";
  const sent = Object.entries(run.bytes).map(([channel, count]) => `${bytes(count)} with the ${channel}`).join(", ");
  known.facts.dataset.ends = run.ends ?? "";
  known.facts.dataset.text = [where + task, sent, `${run.refused} refused, ${run.missing} absent`].filter(Boolean).join(" · ");
  known.training.textContent = run.training.length ? `In this round: ${run.training.join(", ")}` : "";
  known.refused.replaceChildren();
  for (const one of run.refusals) {
    element("li", known.refused).textContent = `round ${one.round}: refused ${one.client} (${one.kind}): ${one.reason}`;
  }
};

// Moves only what is in the wrong place, so that a screen reader or a selection is not disturbed.
const place = (section, names) => names.forEach((name, i) => {
  const {box} = cards.get(name);
  if (section.children[i] !== box) section.insertBefore(box, section.children[i] || null);
});

const tick = () => {
  const now = Date.now() / 1000;
  for (const {facts} of cards.values()) {
    const ends = Number(facts.dataset.ends);
    const text = facts.dataset.text + (ends ? ` · about ${time(ends - now)} left` : "");
    if (facts.textContent !== text) facts.textContent = text;
  }
};

const ask = async () => {
  try {
    const answer = await fetch("/state", {headers: tag ? {"If-None-Match": tag} : {}});
    if (answer.status === 200) {
      tag = answer.headers.get("etag");
      ({runs, folder} = await answer.json());
      runs.forEach(show);
      const present = new Set(runs.map(run => run.name));
      for (const [name, {box}] of cards) if (!present.has(name)) { box.remove(); cards.delete(name); }
      const named = state => runs.filter(run => (run.state === "running") === state).map(run => run.name);
      place(document.getElementById("running"), named(true));
      place(document.getElementById("others"), named(false));
    } else if (answer.status !== 304) throw new Error(answer.status);
    const count = state => runs.filter(run => run.state === state).length;
    const text = runs.length
      ? `${folder}: ${count("running")} running, ${count("stopped")} stopped, ${count("finished")} finished`
      : `${folder}: no run yet; start one with holdfast run`;
    if (status.textContent !== text) status.textContent = text;
    status.className = "";
  } catch {
    status.textContent = "holdfast watch does not answer; this is the last known state";
    status.className = "lost";
  }
  tick();
  setTimeout(ask, document.hidden ? 5 * EVERY : EVERY);
};
ask();
