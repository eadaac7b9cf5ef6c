// The conversation: what is asked, in which order, and what survives a reload. Each answer is drawn by its own `Turn`.
import { byId, make, seconds } from "./dom.js";
import { hideCard } from "./tree.js";
import { stopReplay, Turn } from "./turn.js";

const KEPT = "mmspec-conversation";
const kept = JSON.parse(sessionStorage.getItem(KEPT) ?? "null") ?? { page: randomName(), ids: [] };
const turns = []; // in order; the id of a finished one is in its report
let state = {};
let file = null; // {id, name, preview, isClip} of the next question; null goes on with that of the last turn
let running = null; // {turn, abort}

function randomName() {
  return [...crypto.getRandomValues(new Uint8Array(16))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}

const remember = () => {
  kept.ids = turns.map((turn) => turn.report?.id).filter(Boolean);
  sessionStorage.setItem(KEPT, JSON.stringify(kept));
  byId("start").hidden = turns.length > 0;
  byId("new").hidden = turns.length === 0;
  hint();
};

const hint = () => {
  const asks = file?.isClip ? "Ask about the clip" : "Ask about the picture";
  byId("question").placeholder = state.is_text ? "Ask something" : file || turns.length ? asks : "Add a picture, then ask";
};

const say = (text, isError = false) => {
  byId("status").textContent = text;
  byId("status").classList.toggle("error", isError);
};

// The model

const refresh = async () => {
  const response = await fetch("state");
  if (response.status === 401) return signIn();
  state = await response.json();
  const words = { starting: "Starting", building: "Building the C kernels, once", loading: "Loading the model" }[state.phase];
  if (state.phase === "failed") say("The model cannot be used; the terminal that runs mmspec demo says why.", true);
  else if (words) say(`${words} (${seconds(state.seconds)}) … You can ask already.`);
  else if (byId("status").textContent.endsWith("ask already.")) say("");
  if (words) setTimeout(refresh, 500);
};

const describe = () => {
  const kind = state.description ? `: ${state.description}` : "";
  byId("model").replaceChildren("The model here is ", make("b", { text: state.model }), kind, ".");
  byId("model").classList.toggle("toy", state.is_toy);
};

const fill = (select, names) => {
  const chosen = select.value;
  select.replaceChildren(...names.map((name) => make("option", { text: name })));
  if (names.includes(chosen)) select.value = chosen;
};

const offer = () => {
  fill(byId("drafter"), state.drafters);
  fill(byId("compressor"), state.compressors);
  byId("compressor").closest("label").hidden = state.is_text;
  byId("attach").hidden = state.is_text;
  byId("max_new_tokens").max = state.max_new_tokens;
  byId("question").maxLength = state.max_question_chars;
  if (state.is_text) byId("what").textContent = "Ask something";
  hint();
  if (byId("samples").childElementCount) return;
  byId("samples").append(...state.samples.map((sample) => make("button", { type: "button", class: "sample", onclick: () => {
    file = sample.file ? example(sample.file) : null;
    ask({ question: sample.question });
  } }, sample.file ? preview(`examples/${sample.file}`, isClip(sample.file)) : null, make("span", { text: sample.question }))));
};

const isClip = (name) => /\.(mp4|mov|webm|mkv|avi|m4v)$/i.test(name);
const preview = (address, clip) =>
  clip ? make("video", { src: address, muted: true, preload: "metadata", "aria-label": "The clip" }) : make("img", { src: address, alt: "The picture" });
const example = (name) => ({ id: name, name, isClip: isClip(name), preview: `examples/${name}` });

// Files: chosen, dropped or pasted anywhere

const take = async (files) => {
  if (!files.length || state.is_text) return;
  const [one] = files;
  say(files.length > 1 ? `${files.length} files: the first is used. For all of them: mmspec caption FOLDER --out captions.jsonl` : "");
  if (one.size > state.max_file_mb * 1e6) return say(`${one.name} cannot be used: it has more than ${state.max_file_mb} MB.`, true);
  const clip = one.type.startsWith("video/") || isClip(one.name);
  const mine = (file = { id: null, name: one.name, isClip: clip, preview: URL.createObjectURL(one) });
  showFile();
  mine.ready = fetch("file", { method: "POST", body: one, headers: { "x-file-name": encodeURIComponent(one.name) } })
    .then(async (response) => {
      const answer = await response.json();
      if (answer.error) throw new Error(answer.error);
      mine.id = answer.id;
    })
    .catch((error) => {
      if (file !== mine) return;
      file = null;
      showFile();
      say(error.message, true);
    });
};

const showFile = () => {
  const box = byId("attached");
  box.hidden = !file;
  hint();
  if (!file) return box.replaceChildren();
  const remove = make("button", { type: "button", "aria-label": `Remove ${file.name}`, text: "×", onclick: () => { file = null; showFile(); } });
  box.replaceChildren(preview(file.preview, file.isClip), make("span", { text: file.name }), remove);
};

byId("file").addEventListener("change", (event) => {
  take([...event.target.files]);
  event.target.value = "";
});
document.addEventListener("paste", (event) => {
  const files = [...(event.clipboardData?.files ?? [])];
  if (!files.length) return;
  event.preventDefault();
  take(files);
});
document.addEventListener("dragover", (event) => event.preventDefault());
document.addEventListener("drop", (event) => {
  event.preventDefault();
  take([...event.dataTransfer.files]);
});

// Questions

const settings = () => ({
  drafter: byId("drafter").value || undefined,
  compressor: byId("compressor").value || undefined,
  temperature: byId("temperature").valueAsNumber,
  max_new_tokens: byId("max_new_tokens").valueAsNumber,
});

// Ask, as the last turn; `request` may say what the question goes on from.
const ask = async (request) => {
  stop();
  stopReplay();
  hideCard();
  say("");
  const given = file;
  if (given?.ready) await given.ready;
  if (given && given !== file && given.id === null) return; // refused
  const last = turns[turns.length - 1];
  if (!("after" in request) && !given) request.after = last?.report?.id ?? null;
  if (given) request.file = given.id;
  else if (!request.after && !request.file) request.file = last?.request.file ?? null;
  file = null;
  showFile();
  const turn = addTurn({ ...request, page: kept.page, ...settings() }, given);
  const abort = new AbortController();
  running = { turn, abort };
  busy(true);
  turn.root.scrollIntoView({ block: "nearest" });
  try {
    await follow(turn, abort.signal);
  } catch (error) {
    turn.fail(abort.signal.aborted ? "Stopped." : error.message, abort.signal.aborted);
  } finally {
    if (running?.turn === turn) {
      running = null;
      busy(false);
    }
    remember();
  }
};

const addTurn = (request, given) => {
  const turn = new Turn(request, given ? preview(given.preview, given.isClip) : null, { retry, edit, compare });
  turns.push(turn);
  byId("turns").append(turn.root);
  byId("start").hidden = true;
  byId("new").hidden = false;
  hint();
  return turn;
};

// The messages that the server sends in answer to a question.
const messages = async function* (path, request, signal) {
  const headers = { "content-type": "application/json" };
  const response = await fetch(path, { method: "POST", headers, body: JSON.stringify(request), signal });
  if (!response.ok) throw new Error((await response.json()).error ?? response.statusText);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let text = ""; ; ) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (text + value).split("\n\n");
    text = parts.pop();
    for (const part of parts) yield JSON.parse(part.slice("data: ".length));
  }
};

const follow = async (turn, signal) => {
  for await (const message of messages("ask", turn.request, signal)) receive(turn, message);
  if (!turn.report && !turn.error) throw new Error("The connection ended; ask again.");
};

const receive = (turn, message) => {
  if (message.error) throw new Error(message.error);
  if (!message.report) return turn.report ? undefined : turn.update(message);
  turn.finish(message.report);
  if (running?.turn === turn) busy(false); // what is still measured needs no waiting
  remember();
};

const stop = () => {
  const turn = running?.turn;
  running?.abort.abort();
  running = null;
  busy(false);
  if (turn && !turn.report) turn.fail("Stopped.", true);
};

const busy = (isBusy) => {
  byId("stop").hidden = !isBusy;
  byId("ask").hidden = isBusy;
};

// Retrying or editing a turn takes back what came after it.
const takeBack = (turn) => {
  stop();
  stopReplay();
  hideCard();
  for (const later of turns.splice(turns.indexOf(turn))) later.root.remove();
  const { after, file: id } = turn.request;
  remember();
  if (after || !id) return { after: after ?? null, given: null };
  const clip = turn.preview?.tagName === "VIDEO"; // else a frame of it, after a reload
  return { after: null, given: { id, name: turn.report?.file_name ?? "", isClip: clip, preview: turn.preview?.src ?? turn.report?.images[0]?.[0] } };
};

const retry = (turn) => {
  const { after, given } = takeBack(turn);
  file = given;
  ask({ question: turn.request.question, after });
};

const edit = (turn) => {
  file = takeBack(turn).given;
  showFile();
  byId("question").value = turn.request.question;
  byId("question").focus();
  grow();
};

// Measure all drafters on the question of a turn.
const compare = async (turn) => {
  stop();
  stopReplay();
  const { drafter, temperature, max_new_tokens } = turn.report.settings;
  turn.showDrafters({});
  try {
    for await (const message of messages("compare", { ...turn.request, page: kept.page, drafter, temperature, max_new_tokens })) {
      if (message.error) throw new Error(message.error);
      turn.showDrafters(message);
    }
  } catch (error) {
    turn.showDrafters({ error: error.message });
  }
};

const grow = () => {
  const box = byId("question");
  box.style.height = "auto";
  box.style.height = `${Math.min(box.scrollHeight + 2, 140)}px`;
};
byId("question").addEventListener("input", grow);
byId("question").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  byId("composer").requestSubmit();
});
byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  const question = byId("question").value.trim();
  if (!question) return say("Please write a question first.", true);
  if (!file && !turns.some((turn) => turn.report || turn.request.file) && !state.is_text) return say("Please choose a picture or a clip first: +, paste, or drop it anywhere.", true);
  byId("question").value = "";
  grow();
  ask({ question });
});
byId("stop").addEventListener("click", stop);
byId("new").addEventListener("click", () => {
  stop();
  stopReplay();
  hideCard();
  for (const turn of turns.splice(0)) turn.root.remove();
  history.replaceState(null, "", location.pathname + location.search);
  remember();
  byId("question").focus();
});
document.addEventListener("keydown", (event) => event.key === "Escape" && hideCard());
document.addEventListener("pointerdown", (event) => {
  if (!event.target.closest?.("#card, .lane.mmspec .text")) hideCard();
});

// What was there before a reload, or what a link names

const restore = async () => {
  const linked = /^#race=([\w-]+)$/.exec(location.hash)?.[1];
  for (const id of linked ? [linked] : kept.ids) {
    const response = await fetch(`report/${id}`);
    if (!response.ok) {
      if (linked) say((await response.json()).error, true);
      continue;
    }
    const report = await response.json();
    const turn = addTurn({ question: report.question, after: report.after, file: report.file_id, page: kept.page }, null);
    turn.finish(report);
  }
  remember();
};

const signIn = () => {
  const dialog = byId("login");
  dialog.showModal();
  dialog.addEventListener("close", async () => {
    const body = new URLSearchParams({ username: byId("login-name").value, password: byId("login-password").value });
    const response = await fetch("login", { method: "POST", body });
    if (response.ok) return location.reload();
    byId("login-error").textContent = "The name or the password is wrong.";
    signIn();
  }, { once: true });
};

const start = async () => {
  await refresh();
  if (!state.samples) return;
  describe();
  offer();
  await restore();
  while (!["ready", "failed"].includes(state.phase)) await new Promise((done) => setTimeout(done, 300));
  describe();
  offer();
};
start();
