// The card of a token: its round, the draft tree of that round, probabilities, what was accepted, milliseconds.
import { byId, count, draw, make } from "./dom.js";

const GAP = 18, ROW = 30, HEIGHT = 24, EDGE = 6, CHAR = 7.5, NOTE = 30, MAX_CHARS = 14;

export const KINDS = {
  drafted: "drafted, and accepted by the model",
  corrected: "a wrong guess here; this is the model's own word",
  own: "the model's own token after an accepted draft",
  undrafted: "a round without a draft",
};

const share = (value) => (value === null ? "" : `${Math.round(100 * value)}%`);

// Nodes of a round, the model's token as the last: {label, note, kind, parent}.
const nodesOf = (round) => {
  const accepted = new Set(round.path.slice(1));
  const nodes = round.labels.map((label, index) => ({
    label: index || round.start ? label : "prompt",
    note: index ? share(round.shares[index]) : "",
    kind: index === 0 ? "root" : accepted.has(index) ? "drafted" : "rejected",
    parent: round.parents[index],
  }));
  const last = round.emitted.length - 1;
  const parent = round.path[last];
  const isDraft = round.labels.some((label, index) => round.parents[index] === parent && label === round.emitted[last] && index);
  if (last >= 0 && !isDraft) {
    const hasDrafts = round.parents.includes(parent);
    nodes.push({ label: round.emitted[last], note: "model", kind: hasDrafts ? "corrected" : "own", parent });
  }
  return nodes;
};

// One row per leaf, a parent in the middle of its children; a column is as wide as its widest node.
const layOut = (nodes) => {
  const children = nodes.map(() => []);
  nodes.forEach((node, index) => node.parent >= 0 && children[node.parent].push(index));
  let leaves = 0;
  const place = (index, depth) => {
    const node = nodes[index];
    node.depth = depth;
    node.width = 14 + CHAR * Math.max(2, Math.min(MAX_CHARS, node.label.length)) + (node.note ? NOTE : 0);
    for (const child of children[index]) place(child, depth + 1);
    const rows = children[index].map((child) => nodes[child].row);
    node.row = rows.length ? (rows[0] + rows[rows.length - 1]) / 2 : leaves++;
  };
  place(0, 0);
  const widths = [];
  for (const node of nodes) widths[node.depth] = Math.max(widths[node.depth] ?? 0, node.width);
  const lefts = [EDGE];
  for (const width of widths) lefts.push(lefts[lefts.length - 1] + width + GAP);
  for (const node of nodes) [node.x, node.y] = [lefts[node.depth], EDGE + node.row * ROW];
  return { width: lefts[lefts.length - 1] - GAP + EDGE, height: leaves * ROW + 2 * EDGE - (ROW - HEIGHT) };
};

export const drawTree = (round) => {
  const nodes = nodesOf(round);
  const { width, height } = layOut(nodes);
  const title = `Draft tree: ${count(round.labels.length - 1, "draft token")}, ${round.num_accepted} accepted`;
  const svg = draw("svg", { role: "img", "aria-label": title, width, height, viewBox: `0 0 ${width} ${height}` });
  for (const node of nodes) {
    if (node.parent < 0) continue;
    const from = nodes[node.parent];
    const [x1, y1, x2, y2] = [from.x + from.width, from.y + HEIGHT / 2, node.x, node.y + HEIGHT / 2];
    const middle = (x1 + x2) / 2;
    svg.append(draw("path", { class: `edge ${node.kind}`, d: `M${x1} ${y1} C${middle} ${y1} ${middle} ${y2} ${x2} ${y2}` }));
  }
  for (const node of nodes) {
    const label = node.label.length > MAX_CHARS ? `${node.label.slice(0, MAX_CHARS - 1)}…` : node.label;
    const text = draw("text", { x: node.x + 7, y: node.y + 16 }, label);
    if (node.note) text.append(draw("tspan", { class: "note", dx: 5 }, node.note));
    svg.append(draw("g", { class: `node ${node.kind}` },
      draw("title", {}, `${node.label} ${node.note}`),
      draw("rect", { x: node.x, y: node.y, width: node.width, height: HEIGHT, rx: 5 }), text));
  }
  return svg;
};

const describe = (round, number, report) => {
  if (!number) return "The forward of the prompt gives the first token; nothing is drafted before it.";
  const drafts = round.labels.length - 1;
  if (round.num_proposed === null) return "No draft was asked for: recent drafts did not pay. One forward, one token.";
  if (!drafts) return "What the drafter proposed was not expected to pay its cost. One forward, one token.";
  return `${count(drafts, "draft token")} checked in one forward, ${round.num_accepted} accepted: `
    + `${count(round.emitted.length, "token")} from one forward.`;
};

// Show the card of token `index` of a finished answer beside `anchor`.
export const showCard = (report, index, anchor) => {
  const card = byId("card");
  const [text, , kind, number] = report.lanes[0].tokens[index];
  const round = report.rounds[number];
  const parts = [make("b", { text: `“${text.trim() || text}”` }), ` ${KINDS[kind]}.`];
  card.replaceChildren(make("p", {}, ...parts));
  if (round) {
    const name = number ? `Round ${number} of ${report.rounds.length - 1}` : "The prompt";
    card.append(make("p", { class: "faint", text: `${name}, ${round.ms.toFixed(1)} ms. ${describe(round, number, report)}` }));
    if (round.labels.length > 1) card.append(make("div", { class: "tree", tabindex: 0, role: "group", "aria-label": "Draft tree" }, drawTree(round)));
  }
  card.hidden = false;
  const box = anchor.getBoundingClientRect();
  if (innerWidth < 600) return; // a sheet at the bottom
  card.style.left = `${Math.max(8, Math.min(box.left, innerWidth - card.offsetWidth - 8))}px`;
  const below = box.bottom + 6;
  const fits = below + card.offsetHeight < innerHeight;
  card.style.top = `${fits ? below : Math.max(8, box.top - card.offsetHeight - 6)}px`;
};

export const hideCard = () => {
  byId("card").hidden = true;
};
