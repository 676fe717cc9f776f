// A finished answer once more, step by step and slowly: its text, its drafts, and what ran when.
import { $, element, shape, swatch } from "./dom.js";
import { shown, stepTimes } from "./steps.js";
import { COLOURS, bar } from "./timeline.js";
import { drawTree, treeOf } from "./tree.js";
import { FATES, label } from "./words.js";

// Where nobody knows how long a step took, in ms.
const GUESSED_MS = 10;
// How long a step is shown when the speed is not chosen, and how long its end stays, in ms.
const COMFORTABLE_MS = 1500, REST_MS = 450;
const still = matchMedia("(prefers-reduced-motion: reduce)");

// Of the answer: its steps, their times, and what is drawn of the step that is shown.
let steps = [], times = [], at = 0, paint = () => {}, head = () => {};
// The way through it: the frame asked for, and when the step that is shown began on the clock.
let frame = null, begun = 0, told = "";

export function showReplay(all, spans) {
  pause();
  steps = all;
  times = stepTimes(steps, spans);
  $("replay-card").hidden = !steps.length;
  if (!steps.length) return;
  $("replay-at").max = steps.length - 1;
  $("replay-text").replaceChildren(...steps.flatMap((step) => step.tokens.map(shown)));
  choosePace();
  drawStrip();
  show(firstOfInterest());
}

// The first step whose tree has branches that were refused, or else the first that drafted.
function firstOfInterest() {
  const refused = ({ draft }) => draft?.nodes.some(({ fate }) => fate === "rejected" || fate === "masked");
  const found = [steps.findIndex(refused), steps.findIndex(({ draft }) => draft?.nodes.length), 0];
  return found.find((index) => index >= 0);
}

function choosePace() {
  const known = times.filter(Boolean).map(({ end }) => end).sort((a, b) => a - b);
  const usual = known[Math.floor(known.length / 2)] ?? GUESSED_MS;
  const options = [...$("replay-pace").options].map(({ value }) => Number(value));
  const distance = (pace) => Math.abs(Math.log((pace * usual) / COMFORTABLE_MS));
  $("replay-pace").value = options.reduce((best, pace) => (distance(pace) < distance(best) ? pace : best));
}

// One step ------------------------------------------------------------------------------------------
function show(index, phase = "decided") {
  at = index;
  const step = steps[at];
  const before = steps.slice(0, at).findLast(({ tokens }) => tokens.length)?.tokens.at(-1).text;
  $("replay-at").value = at;
  $("replay-at").setAttribute("aria-valuetext", `step ${at + 1} of ${steps.length}`);
  $("replay-note").textContent = `step ${at + 1} of ${steps.length}`;
  told = $("fates").dataset.phase = phase;
  paint = drawTree($("tree"), treeOf(step, before ?? "prompt"), phase);
  head = drawTimes(times[at]);
  showCounts(step);
  markText(phase);
  for (const column of document.querySelectorAll("#strip .column")) {
    column.classList.toggle("now", Number(column.dataset.step) === at);
  }
}

function markText(phase) {
  const spans = $("replay-text").children;
  let number = 0;
  steps.forEach(({ tokens }, index) => tokens.forEach(() => {
    const there = index < at || (index === at && phase === "decided");
    spans[number].classList.toggle("ahead", !there);
    spans[number].classList.toggle("now", index === at && there);
    number += 1;
  }));
  const pane = $("replay-text"), now = pane.querySelector(".now, .ahead");
  if (!now) return;
  const lowest = now.offsetTop + now.offsetHeight - pane.offsetTop;
  if (lowest > pane.scrollTop + pane.clientHeight || lowest < pane.scrollTop) pane.scrollTop = lowest - pane.clientHeight / 2;
}

function showCounts({ draft, tokens }) {
  const nodes = draft?.nodes ?? [];
  const count = (fate) => nodes.filter((node) => node.fate === fate).length;
  const drafts = nodes.length + (draft?.left_out ?? 0);
  const parts = Object.keys(FATES).filter(count).map((fate) =>
    element("span", { className: `fate ${fate}` }, `${count(fate)} ${FATES[fate][0]}`));
  if (draft?.left_out) parts.push(element("span", { className: "soft" }, `${draft.left_out} more not shown`));
  $("fates").replaceChildren(element("strong", {}, drafts === 0 ? "Nothing drafted" : `${drafts} drafted`), ...parts,
    element("span", { className: "soft" }, `→ ${tokens.length} token${tokens.length === 1 ? "" : "s"}`));
}

// When the step's parts ran; what it gives moves the playhead.
function drawTimes(time) {
  const holder = $("replay-times"), rows = ["compute", "lane"];
  holder.replaceChildren();
  $("replay-legend").replaceChildren();
  if (!time) {
    holder.append(element("p", { className: "soft" }, "The server no longer knows when this step ran."));
    return () => {};
  }
  const width = Math.max(260, holder.clientWidth), left = 58, tall = 26;
  const x = (ms) => left + (ms / time.end) * (width - left - 4);
  const chart = shape("svg", { width, height: rows.length * tall + 18, role: "img", "aria-label": "When the parts of this step ran" });
  rows.forEach((row, index) => {
    chart.append(shape("text", { x: 0, y: index * tall + 17 }, label(row)),
      shape("line", { class: "grid", x1: left, x2: width, y1: (index + 1) * tall, y2: (index + 1) * tall }));
    for (const { lane, name, start, end } of time.parts) {
      if ((lane === "lane") !== (row === "lane")) continue;
      bar(chart, { name, x: x(start), y: index * tall + 3, wide: x(end) - x(start), tall: tall - 6,
        hint: `${label(name)}: ${(end - start).toFixed(3)} ms` });
    }
  });
  chart.append(shape("text", { x: left, y: rows.length * tall + 14 }, "0"),
    shape("text", { x: width - 4, y: rows.length * tall + 14, "text-anchor": "end" }, `${time.end.toFixed(2)} ms`));
  const line = shape("line", { class: "playhead", x1: left, x2: left, y1: 0, y2: rows.length * tall, visibility: "hidden" });
  chart.append(line);
  holder.append(chart);
  const { draft, verify, lane, exposed, accept, extend } = time;
  const named = { draft, verify, lane, exposed, accept, extend };
  $("replay-legend").replaceChildren(...Object.entries(named).map(([name, ms]) =>
    swatch(COLOURS[name === "lane" ? "fill" : name], `${label(name)} ${ms.toFixed(2)} ms`)));
  return (ms) => {
    line.setAttribute("visibility", ms === null ? "hidden" : "visible");
    for (const end of ["x1", "x2"]) line.setAttribute(end, x(Math.min(ms ?? 0, time.end)));
  };
}

// All steps -----------------------------------------------------------------------------------------
// A column a step: the device's work upwards, the grammar's beneath it.
function drawStrip() {
  const holder = $("strip"), up = 46, down = 22;
  const known = times.filter(Boolean).map(({ draft, verify, exposed }) => draft + verify + exposed).sort((a, b) => a - b);
  // A step that made a recording would dwarf all others.
  const top = Math.min(known.at(-1) ?? 1, 4 * (known[Math.floor(known.length / 2)] ?? 1)) || 1;
  const room = $("strip-row").clientWidth;
  const pitch = Math.max(7, Math.min(44, Math.floor((room < 600 ? room : room * 0.6) / steps.length)));
  const chart = shape("svg", { width: pitch * steps.length, height: up + down, role: "img",
    "aria-label": "Time of each step: draft, verify and wait for the grammar, and the grammar’s own work beneath" });
  chart.append(shape("line", { class: "grid", x1: 0, x2: pitch * steps.length, y1: up, y2: up }));
  times.forEach((time, index) => {
    const x = index * pitch;
    const column = shape("g", { class: "column", "data-step": index }, undefined, time
      ? `step ${index + 1}: draft ${time.draft.toFixed(2)}, verify ${time.verify.toFixed(2)}, grammar ${time.lane.toFixed(2)}, wait ${time.exposed.toFixed(2)} ms`
      : `step ${index + 1}`);
    column.append(shape("rect", { class: "ground", x, y: 0, width: pitch, height: up + down }));
    let y = up;
    for (const name of ["draft", "verify", "exposed"]) {
      const high = time ? Math.min((time[name] / top) * (up - 2), y - 1) : 0;
      y -= high;
      if (high > 0) column.append(shape("rect", { x: x + 1, y, width: pitch - 2, height: high, fill: COLOURS[name] }));
    }
    const deep = time ? Math.min((time.lane / top) * (up - 2), down - 1) : 0;
    if (deep > 0) column.append(shape("rect", { x: x + 1, y: up + 1, width: pitch - 2, height: deep, fill: COLOURS.fill }));
    column.onclick = () => { pause(); show(index); };
    chart.append(column);
  });
  holder.replaceChildren(chart);
}

// Motion --------------------------------------------------------------------------------------------
const pace = () => Number($("replay-pace").value);

function play() {
  if (at === steps.length - 1) show(0, "start");
  setPlaying(true);
  begin();
}

function begin() {
  show(at, still.matches ? "decided" : "start");
  begun = performance.now();
  frame = requestAnimationFrame(advance);
}

function advance(now) {
  const time = times[at], length = time?.end ?? GUESSED_MS, ms = (now - begun) / pace();
  // However slow the machine is, a step's end stays for a frame.
  const ended = told === "decided";
  if (!still.matches) {
    tell(phaseAt(time, ms, length));
    head(ms);
  }
  if (!ended || now - begun < length * pace() + REST_MS) {
    frame = requestAnimationFrame(advance);
  } else if (at < steps.length - 1) {
    at += 1;
    begin();
  } else pause();
}

function tell(phase) {
  if (phase === told) return;
  told = $("fates").dataset.phase = phase;
  paint(phase);
  markText(phase);
}

function phaseAt(time, ms, length) {
  if (ms >= (time?.decided ?? length)) return "decided";
  if (ms >= (time?.masked ?? length)) return "masked";
  return ms >= (time?.drafted ?? 0) ? "drafted" : "start";
}

function pause() {
  if (frame === null) return;
  cancelAnimationFrame(frame);
  frame = null;
  setPlaying(false);
  if (steps.length) show(at);
}

function setPlaying(playing) {
  $("replay-play").textContent = playing ? "❚❚ Pause" : "▶ Play";
  $("replay-card").classList.toggle("playing", playing);
}

const move = (by) => {
  pause();
  show(Math.max(0, Math.min(steps.length - 1, at + by)));
};

export function addReplay() {
  $("replay-play").onclick = () => (frame === null ? play() : pause());
  $("replay-back").onclick = () => move(-1);
  $("replay-on").onclick = () => move(1);
  $("replay-at").oninput = () => { pause(); show(Number($("replay-at").value)); };
  addEventListener("resize", () => {
    if (!steps.length || frame !== null) return;
    drawStrip();
    show(at);
  });
}
