// A race: the same request with and without speculation.
import { $ } from "./dom.js";
import { body, fail } from "./form.js";
import { exclusively } from "./run.js";
import { call, events } from "./server.js";
import { shown } from "./steps.js";

export const race = () => exclusively(async (signal) => {
  const request = body();
  if (!request) return;
  const lost = new AbortController();
  const either = AbortSignal.any([signal, lost.signal]);
  $("race-card").hidden = false;
  $("race-note").textContent = "running …";
  $("race-card").scrollIntoView({ block: "nearest" });
  try {
    const ends = await Promise.all([follow("race-with", { ...request, speculate: true }, either),
      follow("race-without", { ...request, speculate: false }, either)]);
    const same = ends[0].text === ends[1].text;
    $("race-note").textContent = `${ends[0].steps} steps against ${ends[1].steps}; ${
      same ? "the same text" : "another text (sampled without a seed, or in half precision)"}`;
  } catch (error) {
    lost.abort();
    $("race-note").textContent = error.name === "AbortError" ? "stopped" : "failed";
    if (error.name !== "AbortError") fail(error.message, error.param);
  }
});

async function follow(pane, request, signal) {
  const start = performance.now(), end = { text: "", steps: 0 };
  let tokens = 0;
  $(pane).replaceChildren();
  $(`${pane}-note`).textContent = "";
  const options = { method: "POST", body: JSON.stringify(request), signal };
  for await (const event of events(await call("/v1/chat/completions", options))) {
    const made = event.overlap_spec?.tokens ?? [];
    tokens += made.length;
    end.steps += made.length > 0;
    end.text += made.map(({ text }) => text).join("");
    $(pane).append(...made.map(shown));
    if (made.length) {
      $(`${pane}-note`).textContent = `${tokens} tokens in ${end.steps} steps, ${(performance.now() - start).toFixed(0)} ms`;
    }
  }
  return end;
}
