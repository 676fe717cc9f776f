// What the steps of an answer say: their tokens, and the spans that ran in them.
import { element } from "./dom.js";
import { ORIGINS } from "./words.js";

// Steps that /timeline tells of at most.
const MOST_STEPS = 200;

// The first step is the prefill's: its one token is no verify's.
export const verifies = (steps) => steps.slice(1).filter((step) => step.tokens.length);

export function acceptLength(steps) {
  const lengths = verifies(steps).map((step) => step.tokens.length);
  return lengths.length ? lengths.reduce((a, b) => a + b, 0) / lengths.length : undefined;
}

// A token in the colour of how it came.
export function shown({ text, origin = "unknown", thinking }) {
  if (origin === "unknown") return element("span", { className: thinking ? "thinking" : "" }, text);
  return element("span", { className: `token ${origin}`, title: ORIGINS[origin] }, text);
}

// Steps of others that may have run since an answer's last.
const SINCE = 32;

// How many of the engine's last steps hold an answer's.
export function stepsBack(steps) {
  const numbers = steps.map(({ draft }) => draft?.step).filter((number) => number !== undefined);
  return numbers.length ? Math.min(MOST_STEPS, numbers.at(-1) - numbers[0] + 1 + SINCE) : 0;
}

// Milliseconds from the end of an answer's first step to the end of its last; undefined where nobody knows.
export function msBetween(steps, spans) {
  const ends = [steps[0], steps.at(-1)].map((step) => spans.filter((span) => span.lane === "compute" && span.step === step?.draft?.step)
    .reduce((most, { end_ns }) => Math.max(most, end_ns), -Infinity));
  const ms = (ends[1] - ends[0]) / 1e6;
  return ms > 0 && ms < Infinity ? ms : undefined;
}

// Of each step of an answer: when its parts ran, in ms from its first; null where nobody knows any more.
export function stepTimes(steps, spans) {
  const byStep = Map.groupBy(spans, (span) => span.step);
  return steps.map(({ draft }) => partsOf(byStep.get(draft?.step) ?? []));
}

const PARTS = {
  compute: ["draft", "verify", "prefill", "exposed", "accept", "extend"],
  prefill: ["prefill"],
  lane: ["accept", "fill"],
};

function partsOf(spans) {
  const parts = spans.filter(({ lane, name }) => PARTS[lane]?.includes(name))
    .map(({ lane, name, start_ns, end_ns }) => ({ lane, name, start: start_ns / 1e6, end: end_ns / 1e6 }));
  if (!parts.length) return null;
  const first = Math.min(...parts.map((part) => part.start));
  for (const part of parts) {
    part.start -= first;
    part.end -= first;
  }
  const end = Math.max(...parts.map((part) => part.end));
  const total = (keep) => union(parts.filter(keep));
  return { parts, end,
    draft: total(({ name }) => name === "draft"),
    verify: total(({ name }) => name === "verify" || name === "prefill"),
    lane: total(({ lane }) => lane === "lane"),
    exposed: total(({ name }) => name === "exposed"),
    accept: total(({ lane, name }) => lane === "compute" && name === "accept"),
    extend: total(({ name }) => name === "extend"),
    // When the guesses are there, when the grammar has judged them, and when the target has.
    drafted: ends(parts, "compute", "draft") ?? 0,
    masked: ends(parts, "lane", "fill") ?? end,
    decided: ends(parts, "compute", "accept") ?? end };
}

const ends = (parts, lane, name) => {
  const found = parts.filter((part) => part.lane === lane && part.name === name);
  return found.length ? Math.max(...found.map((part) => part.end)) : undefined;
};

// Time in which at least one of the parts ran.
export function union(parts) {
  let total = 0, covered = -Infinity;
  for (const { start, end } of parts.toSorted((a, b) => a.start - b.start)) {
    total += Math.max(0, end - Math.max(start, covered));
    covered = Math.max(covered, end);
  }
  return total;
}
