// A conversation with the served model.
import { ApiError, listModels, stream } from "./stream.js";

const KEY = "stageline-api-key";
const byId = (id) => document.getElementById(id);
const turns = byId("turns");
const prompt = byId("prompt");
let conversation = [];
let models = [];
let running = null;

function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

const seconds = (value) => (value >= 1 ? `${value.toFixed(2)} s` : `${Math.round(value * 1000)} ms`);

function headers() {
  const key = sessionStorage.getItem(KEY);
  return key ? { Authorization: `Bearer ${key}` } : {};
}

const chosen = () => models.find((model) => model.id === byId("model").value) ?? models[0];

async function loadModels() {
  try {
    models = await listModels(headers());
    byId("problem").textContent = "";
  } catch (error) {
    report(error);
    return;
  }
  byId("model").replaceChildren(...models.map((model) => element("option", { value: model.id }, model.id)));
  showModel();
}

function showModel() {
  const model = chosen();
  const form = model.stageline.has_chat_template ? "" : " · no chat template: it continues your text";
  byId("model-facts").textContent = `${model.max_model_len.toLocaleString("en")} tokens${form}`;
  document.title = `${model.id} · Stageline`;
}

// Fields of the request that the user has set; an empty field leaves the model's default.
function parameters() {
  const fields = { model: chosen().id };
  for (const name of ["temperature", "top_p", "top_k", "max_tokens", "seed"]) {
    if (byId(name).value !== "") fields[name] = Number(byId(name).value);
  }
  if (byId("stop").value !== "") fields.stop = [byId("stop").value];
  return fields;
}

function request(text) {
  if (!chosen().stageline.has_chat_template) return ["/v1/completions", { ...parameters(), prompt: text }];
  const system = byId("system").value.trim();
  const messages = [...(system ? [{ role: "system", content: system }] : []), ...conversation];
  return ["/v1/chat/completions", { ...parameters(), messages }];
}

class Turn {
  constructor(role, text = "") {
    this.text = element("div", { class: "text" }, text);
    this.thoughts = element("div", { class: "text" });
    this.figures = element("div", { class: "figures" });
    this.item = element("li", { class: `turn ${role}` }, element("p", { class: "who" }, role === "user" ? "You" : chosen().id), this.text);
    turns.append(this.item);
    byId("empty").hidden = true;
    this.show();
  }

  show() {
    this.item.scrollIntoView({ block: "end" });
  }

  addThought(text) {
    if (!this.thoughts.isConnected) this.text.before(element("details", {}, element("summary", {}, "Reasoning"), this.thoughts));
    this.thoughts.append(text);
  }

  setFigures(answer) {
    const { usage, startedMs, firstMs, lastMs, requestId, isStopped } = answer;
    const cells = [];
    if (firstMs !== null && answer.numEvents > 1) {
      const tokens = usage ? usage.completion_tokens : answer.numEvents;
      const rate = (tokens - 1) / ((lastMs - firstMs) / 1000);
      cells.push(`${tokens} tokens`, `${rate.toFixed(1)} tokens/s`);
    }
    if (firstMs !== null) cells.push(`first after ${seconds((firstMs - startedMs) / 1000)}`);
    const cached = usage?.prompt_tokens_details?.cached_tokens;
    if (usage) cells.push(`${usage.prompt_tokens} prompt tokens${cached ? `, ${cached} cached` : ""}`);
    const restarts = usage?.stageline?.restarts;
    if (restarts) cells.push(`${restarts} restart${restarts === 1 ? "" : "s"}`);
    if (isStopped) cells.push("stopped");
    this.figures.replaceChildren(...cells.map((cell) => element("span", {}, cell)));
    const dashboard = chosen().stageline.dashboard_url;
    if (dashboard && requestId && lastMs !== null) {
      const link = element("a", { href: `${dashboard.replace(/\/$/, "")}/#trace=${encodeURIComponent(requestId)}`, target: "_blank", rel: "noopener" }, "trace");
      this.figures.append(link);
    }
    this.item.append(this.figures);
    if (usage?.stageline?.decode_s !== undefined) this.setTimes(usage.stageline);
  }

  setTimes({ queue_s, first_token_s, decode_s }) {
    const parts = [["queue", queue_s, "in queue"], ["prefill", first_token_s - queue_s, "prompt"], ["decode", decode_s, "decode"]];
    const whole = first_token_s + decode_s || 1;
    const words = parts.map(([, value, name]) => `${name} ${seconds(value)}`).join(", ");
    const bar = element("div", { class: "times", role: "img", "aria-label": `Time: ${words}`, title: words });
    for (const [name, value] of parts) {
      const part = element("i", { class: name });
      part.style.width = `${(100 * value) / whole}%`;
      bar.append(part);
    }
    this.item.append(bar);
  }
}

function take(event, turn, answer) {
  if (event.requestId !== undefined) {
    answer.requestId = event.requestId;
    return;
  }
  if (event.usage) answer.usage = event.usage;
  const [choice] = event.choices;
  if (!choice) return;
  const thought = choice.delta?.reasoning_content ?? "";
  const text = choice.delta?.content ?? choice.text ?? "";
  if (thought) turn.addThought(thought);
  if (text) {
    turn.text.append(text);
    answer.text += text;
  }
  if (!thought && !text) return;
  answer.numEvents += 1;
  answer.lastMs = performance.now();
  answer.firstMs ??= answer.lastMs;
  turn.show();
}

async function send(text) {
  const asked = new Turn("user", text);
  const own = conversation; // "New chat" begins another one, also while this answer comes
  own.push({ role: "user", content: text });
  const [path, body] = request(text);
  const turn = new Turn("assistant");
  const answer = { text: "", usage: null, requestId: null, numEvents: 0, startedMs: performance.now(), firstMs: null, lastMs: null, isStopped: false };
  running = new AbortController();
  setBusy(turn, true);
  try {
    for await (const event of stream(path, body, { headers: headers(), signal: running.signal })) take(event, turn, answer);
  } catch (error) {
    if (error.name === "AbortError") answer.isStopped = true;
    else if (own === conversation) report(error);
  } finally {
    running = null;
    setBusy(turn, false);
    turn.setFigures(answer);
    if (answer.text || answer.usage) {
      own.push({ role: "assistant", content: answer.text });
    } else {
      own.pop(); // a question without an answer is asked again, not sent along
      asked.item.remove();
      turn.item.remove();
      if (own === conversation) prompt.value ||= text;
    }
    prompt.focus();
  }
}

function setBusy(turn, isBusy) {
  turn.item.setAttribute("aria-busy", String(isBusy));
  byId("send").hidden = isBusy;
  byId("stop-button").hidden = !isBusy;
}

function report(error) {
  if (!(error instanceof ApiError || error instanceof TypeError)) throw error;
  byId("problem").textContent = error instanceof ApiError ? error.message : "The gateway does not answer.";
  if (error.status === 401) setSettingsShown(true);
}

function setSettingsShown(isShown) {
  byId("settings").hidden = !isShown;
  byId("settings-button").setAttribute("aria-expanded", String(isShown));
}

byId("compose").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = prompt.value.trim();
  if (!text || running || !models.length) return;
  byId("problem").textContent = "";
  prompt.value = "";
  send(text);
});
prompt.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  byId("compose").requestSubmit();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") running?.abort();
});
byId("stop-button").addEventListener("click", () => running?.abort());
byId("new").addEventListener("click", () => {
  running?.abort();
  conversation = [];
  turns.replaceChildren();
  byId("empty").hidden = false;
  byId("problem").textContent = "";
  prompt.focus();
});
byId("settings-button").addEventListener("click", () => setSettingsShown(byId("settings").hidden));
byId("settings").addEventListener("submit", (event) => event.preventDefault());
byId("key").addEventListener("change", () => {
  sessionStorage.setItem(KEY, byId("key").value.trim());
  loadModels();
});
byId("model").addEventListener("change", showModel);

loadModels();
prompt.focus();
