// Tokens that a verify gave and that it checked, over the steps of a run.
import { $, shape } from "./dom.js";
import { acceptLength, verifies } from "./steps.js";
import { ORIGINS } from "./words.js";

const SHOWN_STEPS = 120;

function axes(holder, top, label) {
  const width = holder.clientWidth, height = 110, left = 26, bottom = 14;
  const chart = shape("svg", { width, height, role: "img", "aria-label": label });
  const y = (value) => 6 + (height - bottom - 6) * (1 - value / top);
  for (const value of new Set([0, Math.round(top / 2), top])) {
    chart.append(shape("line", { class: "grid", x1: left, x2: width, y1: y(value), y2: y(value) }),
      shape("text", { x: left - 5, y: y(value) + 4, "text-anchor": "end" }, value));
  }
  chart.append(shape("text", { x: width, y: height - 2, "text-anchor": "end" }, "steps →"));
  holder.replaceChildren(chart);
  return { chart, y, left, width };
}

let drawn = [];
addEventListener("resize", () => showSteps(drawn));

export function showSteps(all) {
  drawn = all;
  const steps = verifies(all).slice(-SHOWN_STEPS);
  if (!steps.length) return;
  const mean = acceptLength(all);
  $("accept-note").textContent = `${mean.toFixed(2)} on average`;
  const most = Math.max(...steps.map((step) => step.tokens.length));
  const { chart, y, left, width } = axes($("accept"), Math.max(2, most), `Tokens a verify: ${mean.toFixed(2)} on average`);
  const wide = Math.min(18, (width - left) / steps.length);
  steps.forEach((step, index) => step.tokens.forEach(({ text, origin }, place) => chart.append(shape("rect", {
    x: left + index * wide, width: Math.max(1, wide - 2), y: y(place + 1), height: Math.max(1, y(0) - y(1) - 1),
    fill: `var(--${origin})` }, undefined, `verify ${index + 1}: ${JSON.stringify(text)}, ${ORIGINS[origin]}`))));
  chart.append(shape("line", { x1: left, x2: width, y1: y(mean), y2: y(mean), stroke: "var(--ink)", "stroke-dasharray": "4 3" }));
  showTiers(steps.map((step) => step.tier), wide);
}

function showTiers(tiers, wide) {
  const last = tiers.at(-1);
  $("tier-note").textContent = `now ${last.nodes} tokens: guesses ${last.steps} deep, ${last.top_k} wide`;
  const top = Math.max(2, ...tiers.map((tier) => tier.nodes));
  const { chart, y, left } = axes($("tier"), top, `Tokens checked a verify, now ${last.nodes}`);
  const path = tiers.map(({ nodes }, index) => `${index ? "L" : "M"}${left + index * wide} ${y(nodes)}h${wide}`);
  chart.append(shape("path", { d: path.join(""), fill: "none", stroke: "var(--drafted)", "stroke-width": 2 }));
}
