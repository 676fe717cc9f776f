// The timeline: what ran when in the engine's last steps, whoever's they were.
import { $, element, shape, swatch } from "./dom.js";
import { call } from "./server.js";
import { union } from "./steps.js";
import { label, WORDS } from "./words.js";

const ALWAYS = ["host", "plan", "compute", "copy", "lane"];
export const COLOURS = { draft: "#f2a541", verify: "#4e79a7", accept: "#c7b42c", extend: "#59a14f", fill: "#af7aa1",
  masks: "#d4a6c8", upload: "#9c755f", tree: "#76b7b2", results: "#8cb0d9", plan: "#a0a0a0", count: "#86bc86",
  assign: "#6b6ecf", prefill: "#3f8f8a", exposed: "var(--wait)" };
// Whose names are written in white.
const DARK = ["verify", "assign", "upload", "prefill", "exposed"];
// Steps further apart belong to different runs.
const GAP_NS = 250e6;

// Draws as many steps as are chosen; gives the spans of at least the last `steps`.
export async function showTimeline(steps = 0) {
  const chosen = Number($("span-steps").value);
  try {
    const { spans } = await (await call(`/timeline?steps=${Math.max(chosen, steps)}`)).json();
    const newest = spans.reduce((most, { step }) => Math.max(most, step), 0);
    drawTimeline(lastRun(spans.filter(({ step }) => step > newest - chosen)));
    return spans;
  } catch (error) {
    $("timeline-note").textContent = error.message;
    return [];
  }
}

function lastRun(spans) {
  const sorted = spans.toSorted((a, b) => b.end_ns - a.end_ns);
  let start = sorted[0]?.start_ns;
  const kept = [];
  for (const span of sorted) {
    if (start - span.end_ns > GAP_NS) break;
    start = Math.min(start, span.start_ns);
    kept.push(span);
  }
  return kept.sort((a, b) => a.start_ns - b.start_ns);
}

const unionMs = (spans) => union(spans.map(({ start_ns, end_ns }) => ({ start: start_ns, end: end_ns }))) / 1e6;

// Rows of a stream: spans that run at once lie beneath each other.
function packed(spans) {
  const rows = [];
  for (const span of spans) {
    const row = rows.find((other) => other.at(-1).end_ns <= span.start_ns);
    if (row) row.push(span);
    else rows.push([span]);
  }
  return rows;
}

let drawn = null;
addEventListener("resize", () => { if (drawn) drawTimeline(drawn); });

function drawTimeline(spans) {
  drawn = spans;
  const exposed = spans.filter((span) => span.name === "exposed");
  const grammar = unionMs(spans.filter((span) => span.lane === "lane"));
  const waited = unionMs(exposed);
  const share = `, ${(100 * Math.max(0, 1 - waited / grammar)).toFixed(0)}% of it hidden`;
  $("timeline-note").replaceChildren(...(spans.length ? [
    element("span", { className: waited ? "wait" : "" }, element("abbr", { title: WORDS.wait }, "wait"),
      ` for the grammar ${waited.toFixed(2)} ms`),
    grammar ? ` · grammar ${grammar.toFixed(2)} ms${share}` : " · no grammar"] : ["no steps yet"]));
  const start = Math.min(...spans.map((s) => s.start_ns)), end = Math.max(...spans.map((s) => s.end_ns));
  const steps = new Map();
  for (const span of spans) if (span.lane === "compute" && !steps.has(span.step)) steps.set(span.step, span.start_ns);
  // Prompts are computed beside the rest where there are threads for it.
  const lanes = spans.some(({ lane }) => lane === "prefill") ? ALWAYS.toSpliced(3, 0, "prefill") : ALWAYS;
  const high = 30, head = 18, foot = 18, bottom = head + high * lanes.length;
  $("lanes").replaceChildren(...(spans.length ? lanes : []).map((lane, index) => {
    const name = element("div", {}, lane === "lane" ? element("abbr", { title: WORDS.grammar }, label(lane)) : lane);
    name.style.cssText = `height: ${high}px; line-height: ${high}px; margin-top: ${index ? 0 : head}px`;
    return name;
  }));
  const width = Math.max($("scroll").clientWidth, steps.size * 90);
  const x = (ns) => ((ns - start) / (end - start || 1)) * (width - 4) + 2;
  const chart = shape("svg", { width, height: bottom + foot, role: "img", "aria-label": $("timeline-note").textContent });
  for (let y = head; y < bottom; y += high) chart.append(shape("line", { class: "grid", x1: 0, x2: width, y1: y, y2: y }));
  for (const [step, at] of steps) {
    chart.append(shape("line", { class: "grid", x1: x(at), x2: x(at), y1: 4, y2: bottom, "stroke-dasharray": "4 3" }));
    if (x(at) < width - 20) chart.append(shape("text", { x: x(at) + 3, y: 13 }, step));
  }
  for (const { start_ns: from, end_ns: to } of exposed) {
    chart.append(shape("rect", { x: x(from), y: head, width: Math.max(1, x(to) - x(from)), height: bottom - head,
      fill: "var(--wait)", opacity: 0.13 }));
  }
  lanes.forEach((lane, index) => {
    const rows = packed(spans.filter((span) => span.lane === lane));
    const tall = (high - 6) / Math.max(1, rows.length);
    rows.forEach((row, number) => row.forEach(({ name, start_ns: from, end_ns: to, step }) => bar(chart, {
      name, x: x(from), y: head + high * index + 3 + number * tall, wide: x(to) - x(from), tall: tall - 1,
      hint: `${label(name)}, step ${step}: ${((to - from) / 1e6).toFixed(3)} ms` })));
  });
  for (let i = 0; i <= 4; i++) chart.append(shape("text", { x: 2 + (i * (width - 4)) / 4, y: bottom + 14,
    "text-anchor": ["start", "middle", "middle", "middle", "end"][i] }, `${(((end - start) / 1e6) * i / 4).toFixed(1)} ms`));
  $("scroll").replaceChildren(...(spans.length ? [chart] : []));
  const names = Object.keys(COLOURS).filter((name) => spans.some((span) => span.name === name));
  $("spans-legend").replaceChildren(...names.map((name) =>
    swatch(COLOURS[name], name === "exposed" ? "wait: compute waits for the grammar" : name)));
}

// One piece of work, with its name where that fits.
export function bar(chart, { name, x, y, wide, tall, hint }) {
  const width = Math.max(1, wide);
  chart.append(shape("rect", { x, y, width, height: tall, rx: 2, fill: COLOURS[name] ?? "var(--soft)",
    class: name === "exposed" ? "exposed" : "span" }, undefined, hint));
  if (tall < 13 || width < label(name).length * 7 + 6) return;
  chart.append(shape("text", { x: x + width / 2, y: y + tall / 2 + 4, "text-anchor": "middle",
    class: `name ${DARK.includes(name) ? "on-dark" : "on-light"}` }, label(name)));
}
