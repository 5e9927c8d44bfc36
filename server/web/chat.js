"use strict";

// The page talks to the same API as any other client. Text of the model reaches the document as text nodes only.

const $ = (id) => document.getElementById(id);
const STORE = "jaxserve.chat";
const DEFAULTS = { system: "", temperature: 0.7, topP: 0.95, maxTokens: "", theme: "auto" };

const settings = { ...DEFAULTS, ...load(localStorage, STORE, {}) };
let apiKey = load(sessionStorage, STORE + ".key", "");
let history = load(sessionStorage, STORE + ".history", []); // {role, content, facts}
let model = null;
let running = null; // AbortController of the answer that streams

function load(store, key, fallback) {
  try {
    const text = store.getItem(key);
    return text === null ? fallback : JSON.parse(text);
  } catch {
    return fallback;
  }
}

function save(store, key, value) {
  try {
    store.setItem(key, JSON.stringify(value));
  } catch {
    // A full or forbidden store loses the history of this tab, nothing else.
  }
}

function headers() {
  const result = { "Content-Type": "application/json" };
  if (apiKey) result.Authorization = "Bearer " + apiKey;
  return result;
}

// The server's state

function showStatus(text, state) {
  $("status").textContent = text;
  $("status").dataset.state = state;
}

async function refreshStatus() {
  let pause = 3000;
  try {
    const answer = await fetch("/ready");
    const state = (await answer.json()).status;
    if (!answer.ok) {
      showStatus(state === "starting" ? "the model is being loaded" : state, "wait");
    } else {
      await findModel();
      pause = 15000;
    }
  } catch {
    showStatus("the server does not answer", "down");
  }
  setTimeout(refreshStatus, pause);
}

async function findModel() {
  const answer = await fetch("/v1/models", { headers: headers() });
  if (answer.status === 401) {
    showStatus("an API key is needed (see Settings)", "wait");
    return;
  }
  const card = (await answer.json()).data[0];
  model = card.id;
  $("model").textContent = card.id;
  document.title = card.id + " · jaxserve";
  showStatus("ready, " + card.max_model_len + " tokens of context", "ready");
}

// Messages

// Fenced blocks and `code` become elements; everything is set with textContent.
function render(body, text) {
  const parts = text.split(/```/);
  const nodes = parts.map((part, index) => (index % 2 ? codeBlock(part) : plainText(part)));
  body.replaceChildren(...nodes.filter((node) => node !== null));
}

function codeBlock(part) {
  const pre = document.createElement("pre");
  const code = document.createElement("code");
  code.textContent = part.replace(/^[\w+#.-]*\n/, "").replace(/\n$/, "");
  pre.append(code);
  return pre;
}

function plainText(part) {
  // Around code blocks, and where an answer begins, white space is layout.
  const trimmed = part.replace(/^\s*\n|^ +|\s+$/g, "");
  if (!trimmed) return null;
  const block = document.createElement("div");
  block.className = "text";
  for (const [index, piece] of trimmed.split(/`([^`\n]+)`/).entries()) {
    if (index % 2) {
      const code = document.createElement("code");
      code.textContent = piece;
      block.append(code);
    } else if (piece) {
      block.append(document.createTextNode(piece));
    }
  }
  return block;
}

function addMessage(role, text) {
  $("welcome").hidden = true;
  const element = document.createElement("article");
  element.className = "message " + role;
  const body = document.createElement("div");
  body.className = "body";
  render(body, text);
  element.append(body);
  $("log").append(element);
  return { element, body, facts: null, question: null };
}

function showFacts(message, facts) {
  if (message.facts === null) {
    message.facts = document.createElement("div");
    message.facts.className = "facts";
    message.element.append(message.facts);
  }
  const items = facts.map(([text, kind]) => {
    const item = document.createElement("span");
    item.textContent = text;
    if (kind) item.className = kind;
    return item;
  });
  message.facts.replaceChildren(...items);
}

function addCopy(message, text) {
  if (!text || !navigator.clipboard) return;
  const button = document.createElement("button");
  button.type = "button";
  button.textContent = "Copy";
  button.addEventListener("click", async () => {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
    setTimeout(() => (button.textContent = "Copy"), 1200);
  });
  message.facts.append(button);
}

function isAtEnd() {
  const log = $("log");
  return log.scrollHeight - log.scrollTop - log.clientHeight < 80;
}

function scrollToEnd() {
  $("log").scrollTop = $("log").scrollHeight;
}

function restore() {
  for (const turn of history) {
    const message = addMessage(turn.role, turn.content);
    if (turn.facts) {
      showFacts(message, turn.facts);
      addCopy(message, turn.content);
    }
  }
  scrollToEnd();
}

// Answers

class Answer {
  constructor(message) {
    this.message = message;
    this.text = "";
    this.start = performance.now();
    this.first = null;
    this.firstTokens = 0;
    this.tokens = 0;
    this.cached = 0;
    this.prompt = 0;
    this.finish = null;
    this.isDrawn = true;
  }

  take(chunk) {
    if (chunk.error) throw new Error(chunk.error.message);
    const now = performance.now();
    const choice = chunk.choices[0];
    if (choice) {
      this.text += choice.delta.content || "";
      this.finish = choice.finish_reason || this.finish;
    }
    if (chunk.usage) {
      this.tokens = chunk.usage.completion_tokens;
      this.prompt = chunk.usage.prompt_tokens;
      this.cached = chunk.usage.prompt_tokens_details.cached_tokens;
      if (this.first === null && this.tokens > 0) {
        this.first = now;
        this.firstTokens = this.tokens;
      }
    }
    this.last = now;
    this.draw();
  }

  // At most once per frame, however fast tokens come.
  draw() {
    if (!this.isDrawn) return;
    this.isDrawn = false;
    requestAnimationFrame(() => {
      this.isDrawn = true;
      const follow = isAtEnd();
      render(this.message.body, this.text);
      if (this.message.element.classList.contains("running")) showFacts(this.message, this.facts());
      if (follow) scrollToEnd();
    });
  }

  facts() {
    const facts = [[this.tokens + (this.tokens === 1 ? " token" : " tokens")]];
    if (this.first !== null) {
      const seconds = (this.last - this.first) / 1000;
      if (seconds > 0 && this.tokens > this.firstTokens) {
        facts.push([((this.tokens - this.firstTokens) / seconds).toFixed(1) + " tokens/s", "rate"]);
      }
      facts.push(["first after " + ((this.first - this.start) / 1000).toFixed(2) + " s"]);
      facts.push([this.cached + " of " + this.prompt + " prompt tokens cached", "cached"]);
    }
    if (this.finish === "length") facts.push(["cut at the token limit"]);
    return facts;
  }
}

function requestBody() {
  const messages = history.map(({ role, content }) => ({ role, content }));
  if (settings.system.trim()) messages.unshift({ role: "system", content: settings.system });
  const body = {
    messages,
    temperature: settings.temperature,
    top_p: settings.topP,
    stream: true,
    stream_options: { include_usage: true, continuous_usage_stats: true },
  };
  if (model !== null) body.model = model;
  if (settings.maxTokens) body.max_tokens = settings.maxTokens;
  return body;
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new Error("the answer broke off");
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      const data = block.replace(/^data: /, "");
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}

async function errorOf(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return "the server answers with status " + response.status;
  }
}

async function ask(text) {
  for (const element of document.querySelectorAll(".failed")) element.remove();
  history.push({ role: "user", content: text });
  const question = addMessage("user", text);
  const message = addMessage("assistant", "");
  message.question = question;
  message.element.classList.add("running");
  scrollToEnd();
  const answer = new Answer(message);
  running = new AbortController();
  setBusy(true);
  let failure = null;
  try {
    const response = await fetch("/v1/chat/completions", {
      method: "POST",
      headers: headers(),
      body: JSON.stringify(requestBody()),
      signal: running.signal,
    });
    if (!response.ok) throw new Error(await errorOf(response));
    for await (const chunk of events(response)) answer.take(chunk);
  } catch (error) {
    failure = error.name === "AbortError" ? ["stopped"] : [error.message, "error"];
  }
  finish(message, answer, failure);
}

function finish(message, answer, failure) {
  message.element.classList.remove("running");
  render(message.body, answer.text);
  const facts = answer.first === null ? [] : answer.facts();
  if (failure) facts.push(failure);
  showFacts(message, facts);
  addCopy(message, answer.text);
  if (answer.text) history.push({ role: "assistant", content: answer.text, facts });
  else {
    // Without an answer the question goes back into the box, so that roles keep alternating.
    const question = history.pop();
    if (!$("input").value) $("input").value = question.content;
    message.element.classList.add("failed");
    message.question.element.classList.add("failed");
  }
  save(sessionStorage, STORE + ".history", history);
  running = null;
  setBusy(false);
  scrollToEnd();
}

function setBusy(isBusy) {
  $("send").hidden = isBusy;
  $("stop").hidden = !isBusy;
  $("new-chat").disabled = isBusy;
  if (!isBusy) $("input").focus();
}

// Controls

function send(event) {
  event.preventDefault();
  const text = $("input").value;
  if (running || !text.trim()) return;
  $("input").value = "";
  fitInput();
  ask(text);
}

function fitInput() {
  $("input").style.height = "auto";
  $("input").style.height = $("input").scrollHeight + 2 + "px";
}

function newChat() {
  history = [];
  save(sessionStorage, STORE + ".history", history);
  for (const element of document.querySelectorAll(".message")) element.remove();
  $("welcome").hidden = false;
  $("input").focus();
}

const dark = matchMedia("(prefers-color-scheme: dark)");

function applyTheme() {
  const isDark = settings.theme === "auto" ? dark.matches : settings.theme === "dark";
  document.documentElement.dataset.theme = isDark ? "dark" : "light";
  $("theme").textContent = { auto: "Theme: auto", light: "Theme: light", dark: "Theme: dark" }[settings.theme];
}

function bindSettings() {
  const change = () => {
    settings.system = $("system").value;
    settings.temperature = Number($("temperature").value);
    settings.topP = Number($("top-p").value);
    const limit = Math.floor(Number($("max-tokens").value));
    settings.maxTokens = limit >= 1 ? limit : "";
    save(localStorage, STORE, settings);
    showSettings();
  };
  for (const id of ["system", "temperature", "top-p", "max-tokens"]) $(id).addEventListener("input", change);
  $("system").value = settings.system;
  $("temperature").value = settings.temperature;
  $("top-p").value = settings.topP;
  $("max-tokens").value = settings.maxTokens;
  $("api-key").value = apiKey;
  $("api-key").addEventListener("change", () => {
    apiKey = $("api-key").value.trim();
    save(sessionStorage, STORE + ".key", apiKey);
    findModel().catch(() => showStatus("the server does not answer", "down"));
  });
  showSettings();
}

function showSettings() {
  $("temperature-value").textContent = settings.temperature.toFixed(2);
  $("top-p-value").textContent = settings.topP.toFixed(2);
}

function start() {
  bindSettings();
  applyTheme();
  dark.addEventListener("change", applyTheme);
  $("theme").addEventListener("click", () => {
    const order = ["auto", "light", "dark"];
    settings.theme = order[(order.indexOf(settings.theme) + 1) % order.length];
    save(localStorage, STORE, settings);
    applyTheme();
  });
  $("toggle-settings").addEventListener("click", () => {
    const panel = $("settings");
    panel.hidden = !panel.hidden;
    $("toggle-settings").setAttribute("aria-expanded", String(!panel.hidden));
  });
  $("composer").addEventListener("submit", send);
  $("stop").addEventListener("click", () => running && running.abort());
  $("new-chat").addEventListener("click", newChat);
  $("input").addEventListener("input", fitInput);
  $("input").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) send(event);
    if (event.key === "Escape" && running) running.abort();
  });
  restore();
  refreshStatus();
}

start();
