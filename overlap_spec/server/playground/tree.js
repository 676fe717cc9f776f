// The drafts of one step as a tree: what was kept runs straight, what was refused branches off.
import { shape, visible } from "./dom.js";
import { FATES, ORIGINS } from "./words.js";

const HIGH = 24, PITCH = 32, GAP = 26, MARGIN = 8, LETTER = 7.3, LONGEST = 14;
const SIGNS = { rejected: "✕", masked: "⊘", late: "◷", cut: "✂" };

// How much of a step is told: its start, its guesses, the grammar's word, everything.
export const PHASES = ["start", "drafted", "masked", "decided"];

const straight = ({ fate }) => fate === "accepted" || fate === "chosen" || fate === "cut";

// What a step had: the token before it, its drafts, and the target's own choice behind those it kept.
export function treeOf(step, before) {
  const drafts = (step.draft?.nodes ?? []).map((node) => ({ ...node, children: [], origin: undefined }));
  const root = { text: before, fate: "root", children: [] };
  for (const node of drafts) (node.parent < 0 ? root : drafts[node.parent]).children.push(node);
  let last = root;
  for (const { text, origin } of step.tokens) {
    let kept = last.children.find(({ fate }) => fate === "accepted");
    if (!kept) last.children.unshift((kept = { text, fate: "chosen", children: [] }));
    kept.origin = origin;
    last = kept;
  }
  for (const node of [root, ...drafts]) node.children.sort((a, b) => straight(b) - straight(a));
  return root;
}

// Columns are depths; a first child lies beside its parent, further ones beneath.
function place(root) {
  const nodes = [], widths = [];
  let rows = 0;
  const descend = (node, depth, parent) => {
    const text = visible(node.text);
    const label = text.length > LONGEST ? `${text.slice(0, LONGEST - 1)}…` : text;
    const sign = SIGNS[node.fate];
    const letters = label.length + (sign ? 2 : 0);
    Object.assign(node, { depth, above: parent, sign, label, wide: letters * LETTER + 16 });
    widths[depth] = Math.max(widths[depth] ?? 0, 30, node.wide);
    nodes.push(node);
    for (const child of node.children) descend(child, depth + 1, node);
    node.row = node.children.length ? node.children[0].row : rows++;
  };
  descend(root, 0, null);
  const lefts = widths.map((_, depth) => MARGIN + widths.slice(0, depth).reduce((sum, w) => sum + w + GAP, 0));
  for (const node of nodes) Object.assign(node, { x: lefts[node.depth], y: MARGIN + node.row * PITCH });
  return { nodes, width: lefts.at(-1) + widths.at(-1) + MARGIN, height: rows * PITCH + 2 * MARGIN - (PITCH - HIGH) };
}

export function drawTree(holder, root, phase) {
  const { nodes, width, height } = place(root);
  const chart = shape("svg", { width, height, role: "img", "aria-label": told(nodes) });
  chart.append(hatching());
  // What was kept lies above what was not.
  for (const node of nodes.toSorted((a, b) => straight(a) - straight(b))) {
    if (!node.above) continue;
    const from = node.above.x + node.above.wide, y0 = node.above.y + HIGH / 2, y1 = node.y + HIGH / 2;
    const middle = node.x - GAP / 2;
    node.edge = shape("path", { fill: "none",
      d: y0 === y1 ? `M${from} ${y0}H${node.x}` : `M${from} ${y0}H${middle - 6}Q${middle} ${y0} ${middle} ${y0 + 6}V${y1 - 6}Q${middle} ${y1} ${middle + 6} ${y1}H${node.x}` });
    chart.append(node.edge);
  }
  for (const node of nodes) {
    node.group = shape("g", {}, undefined, hint(node));
    const name = shape("text", { x: node.x + 8, y: node.y + HIGH / 2 + 4 });
    name.append(shape("tspan", { class: "label" }, node.label));
    if (node.sign) name.append(shape("tspan", { class: "sign" }, ` ${node.sign}`));
    node.group.append(shape("rect", { x: node.x, y: node.y, width: node.wide, height: HIGH, rx: 6 }),
      shape("rect", { x: node.x, y: node.y, width: node.wide, height: HIGH, rx: 6, class: "hatch", fill: "url(#hatching)" }),
      name);
    chart.append(node.group);
  }
  holder.replaceChildren(chart);
  holder.scrollTop = 0;
  paint(nodes, phase);
  return (later) => paint(nodes, later);
}

function paint(nodes, phase) {
  for (const node of nodes) {
    const name = looks(node, PHASES.indexOf(phase));
    node.group.setAttribute("class", `node ${name}`);
    node.edge?.setAttribute("class", `edge ${name}`);
  }
}

// A descendant of a masked draft is masked: then both are known.
function looks({ fate, origin }, phase) {
  if (fate === "root") return "root";
  if (phase >= 3) return fate === "accepted" || fate === "chosen" ? `${fate} ${origin}` : fate;
  if (fate === "chosen" || phase === 0) return "unseen";
  return fate === "masked" && phase === 2 ? "masked" : "pending";
}

function hint({ text, fate, origin }) {
  if (fate === "root") return `${JSON.stringify(text)}: the token before this step`;
  const why = fate === "accepted" || fate === "chosen" ? ORIGINS[origin] : FATES[fate][1];
  return `${text === "" ? "the end" : JSON.stringify(text)}: ${why}`;
}

function told(nodes) {
  const drafts = nodes.filter(({ fate }) => fate !== "root" && fate !== "chosen");
  return `Tree of ${drafts.length} drafts, ${drafts.filter(({ fate }) => fate === "accepted").length} of them accepted`;
}

function hatching() {
  const pattern = shape("pattern", { id: "hatching", width: 6, height: 6, patternUnits: "userSpaceOnUse",
    patternTransform: "rotate(45)" });
  pattern.append(shape("rect", { width: 2, height: 6, fill: "var(--masked)", opacity: 0.2 }));
  const defs = shape("defs", {});
  defs.append(pattern);
  return defs;
}
