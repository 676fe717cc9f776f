// What the page's words mean.
import { $, element } from "./dom.js";

export const ORIGINS = {
  drafted: "drafted and accepted",
  grafted: "grafted: forced text, drafted by the grammar and accepted",
  bonus: "bonus: the target’s own choice",
  forced: "forced: the only token that the mask allowed",
  unknown: "origin unknown",
};

// What became of a draft: a short name, and a sentence.
export const FATES = {
  accepted: ["accepted", "accepted: the target chose it too"],
  rejected: ["refused by the target", "refused by the target, which chose another token here or before it"],
  masked: ["refused by the grammar", "refused by the grammar’s mask: no text may go on like this"],
  late: ["mask was late", "not accepted: its mask was not there in time"],
  cut: ["behind the end", "accepted, but behind the output’s end"],
};

export const WORDS = {
  draft: "A guess of the next tokens: by a small model, by the text so far, or by the grammar. A tree of them is checked at once.",
  verify: "One pass of the model over all guessed tokens; those that the model itself would choose are kept, and one more of its own.",
  "accept length": "How many tokens a verify gives on average: the guesses that it keeps, and one of its own. 1 is plain decoding.",
  grammar: "The CPU’s work on the rule: it says which tokens are legal at each guess, while verify runs.",
  wait: "Time in which the model waited for the grammar: work on the rule that verify did not hide. The aim is none.",
  bonus: "The token that a verify adds of its own behind the guesses that it kept.",
};

// What the server calls it → what the page does.
const SHOWN = { lane: "grammar", exposed: "wait" };
export const label = (name) => SHOWN[name] ?? name;

export function explain() {
  for (const word of document.querySelectorAll("abbr[data-word]")) word.title = WORDS[word.dataset.word];
  $("words").replaceChildren(...Object.entries(WORDS).map(([word, text]) =>
    element("div", {}, element("dt", {}, word), element("dd", {}, text))));
}
