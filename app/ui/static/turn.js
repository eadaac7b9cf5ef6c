// One question and its two answers on the page. A turn writes into its own elements only, whatever else is asked.
import { count, make, seconds } from "./dom.js";
import { hideCard, KINDS, showCard } from "./tree.js";

const PHASES = {
  starting: "Starting", building: "Building the C kernels, once", loading: "Loading the model", waiting: "Waiting",
  encoding: "Reading the picture", answering: "", comparing: "", measuring: "",
};
const REPLAY_S = 6, EVEN = 1.05, SHORT = 16;
let replaying = null; // the turn whose replay is played

const lane = (name, title) => {
  const parts = { text: make("div", { class: "text" }), clock: make("span", { class: "clock" }), tokens: [] };
  const bar = (parts.bar = make("i"));
  parts.root = make("section", { class: `lane ${name}`, "aria-label": title },
    make("header", {}, make("b", { text: title }), parts.clock), make("div", { class: "bar", "aria-hidden": "true" }, bar), parts.text);
  return parts;
};

export class Turn {
  // `request` is what is sent; `actions` are {retry, edit, compare}, functions of the turn.
  constructor(request, preview, actions) {
    Object.assign(this, { request, preview, actions, report: null, error: null });
    this.lanes = [lane("mmspec", "mmspec"), lane("plain", "plain generate")];
    this.media = make("div", { class: "media" }, preview);
    this.question = make("p", { class: "question", text: request.question });
    this.note = make("p", { class: "note", role: "status" });
    this.result = make("div", { class: "result" });
    this.drafters = { button: make("button", { type: "button", text: "Compare the drafters" }), table: make("div", { class: "drafters", role: "status" }) };
    this.drafters.button.addEventListener("click", () => this.actions.compare(this));
    this.buttons = make("div", { class: "actions" });
    this.root = make("li", { class: "turn" },
      make("div", { class: "asked" }, this.media, this.question),
      make("div", { class: "lanes" }, ...this.lanes.map((one) => one.root)), this.note, this.result, this.buttons);
    this.#listen(this.lanes[0].text);
  }

  // What is new of a run that goes on.
  update(message) {
    const words = PHASES[message.phase] ?? "";
    const since = message.seconds ? ` (${seconds(message.seconds)})` : "";
    this.note.textContent = message.ahead ? `${count(message.ahead, "question")} of others before yours.` : words ? `${words}${since} …` : "";
    for (const [index, sent] of (message.lanes ?? []).entries()) {
      const one = this.lanes[index];
      this.#append(one, sent);
      if (sent.tokens.length || sent.is_done) one.clock.textContent = seconds(sent.seconds);
      one.root.classList.toggle("running", !sent.is_done && sent.seconds > 0);
    }
  }

  #append(one, sent) {
    for (const [text, at, kind] of sent.tokens) {
      const token = make("span", { class: sent.drafter ? kind : "", text: one.tokens.length ? text : text.trimStart() });
      one.tokens.push(token);
      one.text.append(token);
    }
  }

  // The whole of both answers.
  finish(report) {
    this.report = report;
    this.root.id = `race-${report.id}`;
    this.note.textContent = "";
    if (!this.media.childElementCount || report.is_clip) this.#drawMedia();
    const slowest = Math.max(...report.lanes.map((one) => one.seconds + report.encode_s));
    report.lanes.forEach((sent, index) => {
      const one = this.lanes[index];
      one.text.replaceChildren();
      one.tokens = [];
      this.#append(one, sent);
      one.root.classList.remove("running");
      one.seconds = sent.seconds + report.encode_s;
      one.clock.textContent = seconds(one.seconds);
      one.bar.style.width = `${(100 * one.seconds) / slowest}%`;
    });
    this.result.replaceChildren(...this.#result());
    this.#offer();
  }

  fail(reason, isStopped = false) {
    this.note.textContent = reason;
    this.note.classList.toggle("error", !isStopped);
    for (const one of this.lanes) one.root.classList.remove("running");
    if (!this.lanes[0].tokens.length) this.root.querySelector(".lanes").hidden = true;
    this.#offer();
  }

  #drawMedia() {
    const { images, is_clip, turns } = this.report;
    if (turns.length && !is_clip) return; // the picture stands beside the first question
    const shown = images.filter((_, index) => index % Math.ceil(images.length / 4) === 0);
    this.media.replaceChildren(...(turns.length ? [] : shown).map(([uri, at]) =>
      make("figure", {}, make("img", { src: uri, alt: "The input of the model" }), at === null ? null : make("figcaption", { text: `${at.toFixed(1)} s` }))));
  }

  #result() {
    const { report } = this;
    const [ours, plain] = report.lanes;
    const [a, b] = this.lanes.map((one) => one.seconds);
    const tokens = count(ours.tokens.length, "token");
    const lines = [make("p", { class: "headline" }, ...this.#headline(a, b, tokens))];
    const rates = `${ours.tokens_per_s.toFixed(0)} instead of ${plain.tokens_per_s.toFixed(0)} tokens a second after the first.`;
    lines.push(make("p", { class: "second", text: ours.tokens.length > 1 ? `${rates} ${this.#credit()}` : "" }));
    for (const text of this.#remarks()) lines.push(make("p", { class: "faint", text }));
    const legend = Object.entries(KINDS).filter(([kind]) => ours.tokens.some((token) => token[2] === kind));
    lines.push(make("p", { class: "legend" }, ...legend.map(([kind, words]) => make("span", {}, make("i", { class: kind, text: "word" }), ` ${words}`))));
    const open = this.result.querySelector(".numbers")?.open; // before the shares were measured
    const compare = make("div", { class: "actions" }, this.drafters.button, this.drafters.table);
    lines.push(make("details", { class: "numbers", open }, make("summary", { text: "Expert: numbers of this answer" }), this.#numbers(), compare));
    return lines;
  }

  #headline(a, b, tokens) {
    const { report } = this;
    if (report.identical === false) return [`The answers differ from token ${report.num_equal + 1} on.`];
    const badge = make("span", { class: "badge", text: `${tokens}, identical` });
    if (b / a > EVEN) return ["The same answer after ", make("b", { text: seconds(a) }), ` instead of ${seconds(b)}. `, badge];
    if (a / b > EVEN) return [`The same answer, here slower: after ${seconds(a)}, plain generate after ${seconds(b)}. `, badge];
    return [`The same answer as fast as plain generate: ${seconds(a)} and ${seconds(b)}. `, badge];
  }

  #credit() {
    const { split, lanes: [ours] } = this.report;
    if (ours.fallback) return `transformers answered alone: ${ours.fallback}.`;
    if (!ours.num_drafted) return ours.tokens.length < SHORT ? "Too short for a draft to pay: the gain is mmspec's own loop." : "Nothing was drafted: the gain is mmspec's own loop.";
    return split ? `About ${split.loop.toFixed(1)}x from mmspec's own loop, about ${split.drafts.toFixed(1)}x from drafts.` : "";
  }

  #remarks() {
    const { report } = this;
    const remarks = [];
    if (report.is_strange) remarks.push("This does not look like the drawn scenes that the toy knows: expect nonsense.");
    if (report.lanes[0].num_reused) remarks.push(`mmspec had computed ${report.lanes[0].num_reused} of the ${report.prompt_tokens} tokens of the prompt, picture included, for the question before; plain generate computes all of them.`);
    if (report.visual_tokens) remarks.push(`The picture is ${report.visual_tokens[0]} tokens for the model, ${report.visual_tokens[1]} for the drafter.`);
    return remarks;
  }

  #numbers() {
    const { report } = this;
    const [ours, plain] = report.lanes;
    const cost = ours.tokens_per_s ? (ours.tau * plain.tokens_per_s) / ours.tokens_per_s : 0;
    const rows = [
      ["drafter", ours.drafter, report.settings.drafter === ours.drafter ? "as chosen" : `what ${report.settings.drafter} is for this model`],
      ["tau", ours.tau.toFixed(2), "tokens per forward of the model after the first token; 1 is decoding without drafts"],
      ["rounds", `${ours.num_rounds}`, `forwards after that of the prompt, ${ours.num_drafted} of them with a draft`],
      ["R", cost ? cost.toFixed(2) : "-", "cost of a round in steps of plain generate: tau / R is the gain in tokens a second"],
      ["reading the picture", `${(1000 * report.encode_s).toFixed(0)} ms`, "once, counted for both answers"],
      ["made by", `mmspec ${report.mmspec}`, `${report.model}, ${report.description}; ${report.device}, ${report.dtype}; ${report.time}`],
    ];
    return make("dl", {}, ...rows.map(([name, value, words]) => make("div", {}, make("dt", { text: name }), make("dd", { text: value }), make("dd", { class: "faint", text: words }))));
  }

  // What is known of a comparison of the drafters on this question: {done, of}, {rows} or {error}.
  showDrafters({ done, of, rows, error }) {
    const { button, table } = this.drafters;
    button.disabled = !rows && !error;
    if (error) return table.replaceChildren(error);
    if (!rows) return table.replaceChildren(of ? `${done} of ${of} calls …` : "Waiting …");
    const best = rows.filter((row) => row.is_tied).map((row) => row.name);
    const plain = rows.find((row) => !row.choices.length);
    const cells = ({ name, choices, tokens_per_s, tau, identical, is_tied }) => [
      choices.some((choice) => choice !== name) ? `${name} (${choices.join(", ")})` : name,
      tokens_per_s.toFixed(0), `${(tokens_per_s / plain.tokens_per_s).toFixed(1)}x`, choices.length ? tau.toFixed(2) : "-",
      [is_tied && (best.length > 1 ? "tied" : "fastest"), !identical && "other tokens"].filter(Boolean).join(", "),
    ];
    const line = (kind, texts) => make("tr", {}, ...texts.map((text) => make(kind, { text })));
    table.replaceChildren(
      make("p", { text: best.length > 1 ? `The fastest here are ${best.join(", ")}: no measurement tells them apart.` : `The fastest here is ${best[0]}.` }),
      make("table", {}, make("thead", {}, line("th", ["drafter", "tokens a second", "of plain generate", "tau", "verdict"])), make("tbody", {}, ...rows.map((row) => line("td", cells(row))))));
  }

  #offer() {
    const button = (text, action) => make("button", { type: "button", text, onclick: action });
    const again = [button("Retry", () => this.actions.retry(this)), button("Edit", () => this.actions.edit(this))];
    if (!this.report) return this.buttons.replaceChildren(...again);
    const link = button("Copy link", async () => {
      const address = `${location.href.split("#")[0]}#race=${this.report.id}`;
      try {
        await navigator.clipboard.writeText(address);
        link.textContent = "Link copied";
      } catch {
        location.hash = `race=${this.report.id}`;
      }
    });
    const file = (text, end, name) => make("a", { href: `report/${this.report.id}${end}`, download: name, text });
    this.buttons.replaceChildren(button("Replay", () => this.replay()), ...again, link, file("JSON", "", "mmspec-run.json"), file("Python", ".py", "mmspec_run.py"));
  }

  // Play both answers again, at most six seconds long, each token at its recorded time.
  replay() {
    stopReplay();
    replaying = this;
    const { report } = this;
    const faster = Math.max(1, Math.max(...this.lanes.map((one) => one.seconds)) / REPLAY_S);
    this.note.textContent = faster > 1 ? `Replay, ${faster.toFixed(1)} times faster than it was.` : "Replay, as fast as it was.";
    this.root.classList.add("replaying");
    for (const one of this.lanes) for (const token of one.tokens) token.classList.add("later");
    const shown = [0, 0];
    const start = performance.now();
    const step = () => {
      if (replaying !== this) return;
      const now = ((performance.now() - start) / 1000) * faster;
      this.lanes.forEach((one, index) => {
        const times = report.lanes[index].tokens;
        while (shown[index] < times.length && times[shown[index]][1] + report.encode_s <= now) one.tokens[shown[index]++].classList.remove("later");
        one.clock.textContent = seconds(Math.min(now, one.seconds));
        one.bar.style.width = `${(100 * Math.min(now, one.seconds)) / Math.max(...this.lanes.map((other) => other.seconds))}%`;
      });
      if (this.lanes.every((one) => now >= one.seconds)) stopReplay();
      else requestAnimationFrame(step);
    };
    requestAnimationFrame(step);
  }

  settle() {
    this.root.classList.remove("replaying");
    this.note.textContent = "";
    const slowest = Math.max(...this.lanes.map((one) => one.seconds));
    for (const one of this.lanes) {
      for (const token of one.tokens) token.classList.remove("later");
      one.clock.textContent = seconds(one.seconds);
      one.bar.style.width = `${(100 * one.seconds) / slowest}%`;
    }
  }

  // Hover, tap or, with the focus on the answer, the arrow keys show the round of a token.
  #listen(text) {
    Object.entries({ tabindex: 0, role: "group", "aria-label": "Tokens of the answer; arrow keys show the round of each" }).forEach(([name, value]) => text.setAttribute(name, value));
    let current = -1;
    const show = (index) => {
      const { tokens } = this.lanes[0];
      if (!this.report || index < 0 || index >= tokens.length) return;
      tokens[current]?.classList.remove("current");
      current = index;
      tokens[index].classList.add("current");
      showCard(this.report, index, tokens[index]);
    };
    const find = (event) => this.lanes[0].tokens.indexOf(event.target);
    text.addEventListener("pointerover", (event) => event.pointerType === "mouse" && show(find(event)));
    text.addEventListener("click", (event) => show(find(event)));
    text.addEventListener("keydown", (event) => {
      const move = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (move === undefined) return;
      event.preventDefault();
      show(Math.max(0, current + move));
    });
    const leave = () => {
      this.lanes[0].tokens[current]?.classList.remove("current");
      hideCard();
    };
    text.addEventListener("pointerleave", (event) => event.pointerType === "mouse" && leave());
    text.addEventListener("blur", leave);
  }
}

export const stopReplay = () => {
  const turn = replaying;
  replaying = null;
  turn?.settle();
};
