// The page: fills the form from /api/models, sends it to /api/images, and shows the events of the answer.

import { makeEditor } from "./brush.js";
import { makePanel, paintAll, showTag } from "./panel.js";

const element = (id) => document.getElementById(id);
const TITLES = { cfg: "guidance scale", num_iter: "iterations", num_sampling_steps: "denoising steps" };
const FIRST = ["cfg", "num_iter"]; // always visible
const SIDES = ["first", "second"];
const NONE = "none";
const POLL = 2000; // milliseconds
const KEY = "cspd-api-key"; // the browser stores the API key under this name

let about = null;
let model = null;
let sides = [];
let running = null; // an AbortController while images are generated
let apiKey = null;

const editor = makeEditor(
  (isOpen) => { element("editing").hidden = !isOpen; },
  (message) => fail(message),
);

async function begin() {
  findKey();
  let answer = await ask("api/models");
  while (answer.status === 401) {
    const given = prompt("This server needs an API key:");
    if (given === null) throw new Error("this server needs an API key: reload the page to enter it");
    if (/^[\x21-\x7e]+$/.test(given.trim())) keepKey(given.trim());
    answer = await ask("api/models");
  }
  if (!answer.ok) throw new Error(await reason(answer));
  about = await answer.json();
  element("model").replaceChildren(...about.models.map(({ name, family }) => new Option(`${name} (${family})`, name)));
  element("model").onchange = setModel;
  element("dice").onclick = () => { element("seed").value = Math.floor(Math.random() * 1e6); };
  element("stop").onclick = () => running?.abort();
  element("form").onsubmit = (event) => {
    event.preventDefault();
    make();
  };
  keepPlaceholder(element("label"));
  const { device, threads, precision } = about.machine;
  element("machine").textContent = `${device}, ${threads} threads, ${precision}, ${about.slots} images per model at a time`;
  element("guarantees").append(...Object.entries(about.guarantees).flatMap(([name, meaning]) => {
    const term = document.createElement("dt");
    const tag = term.appendChild(document.createElement("span"));
    showTag(tag, name, about.guarantees);
    const text = document.createElement("dd");
    text.textContent = meaning;
    return [term, text];
  }));
  setModel();
  showStatus();
}

// Takes the API key from the end of the address, #key=..., which is never sent to a server, or from the browser's store.
function findKey() {
  const [, given] = location.hash.match(/^#key=(.+)$/) ?? [];
  if (given) {
    keepKey(decodeURIComponent(given));
    history.replaceState(null, "", location.pathname);
    return;
  }
  try {
    apiKey = localStorage.getItem(KEY);
  } catch { /* the browser has no store */ }
}

function keepKey(given) {
  apiKey = given;
  try {
    localStorage.setItem(KEY, given);
  } catch { /* the page asks again next time */ }
}

// As `fetch`, with the API key if there is one.
function ask(path, options = {}) {
  const headers = { ...options.headers, ...(apiKey && { Authorization: `Bearer ${apiKey}` }) };
  return fetch(path, { ...options, headers });
}

// A list of suggestions shows only those that match the text, so the field is emptied on focus to show all of them.
function keepPlaceholder(input) {
  input.onfocus = () => { [input.placeholder, input.value] = [input.value, ""]; };
  input.onblur = () => { input.value ||= input.placeholder; };
}

function setModel() {
  model = about.models.find(({ name }) => name === element("model").value) ?? about.models[0];
  const takesPrompts = !model.classes.length;
  document.querySelectorAll(".of-classes").forEach((field) => { field.hidden = takesPrompts; });
  document.querySelectorAll(".of-texts").forEach((field) => { field.hidden = !takesPrompts; });
  const named = model.classes.map((name, number) => new Option(number, name));
  element("classes").replaceChildren(...named, new Option("unconditional", "none"));
  element("label").value = model.classes[Math.min(3, model.classes.length - 1)] ?? "";
  document.querySelectorAll(".setting").forEach((field) => field.remove());
  for (const option of model.options) {
    element(FIRST.includes(option.name) ? "fields" : "more").append(settingOf(option));
  }
  sides = SIDES.map(makeSide);
  element("sides").replaceChildren(...sides.map(({ root }) => root));
  editor.setModel(model);
}

function settingOf({ name, help, words, default: usual }) {
  const field = document.createElement("label");
  field.className = "setting";
  field.title = help;
  field.textContent = TITLES[name] ?? name.replaceAll("_", " ");
  const input = field.appendChild(document.createElement(words ? "select" : "input"));
  input.name = name;
  if (words) input.append(...words.map((word) => new Option(word, word, word === usual, word === usual)));
  else Object.assign(input, { placeholder: usual, inputMode: "decimal" });
  return field;
}

function makeSide(title, index) {
  const root = element("side").content.cloneNode(true).firstElementChild;
  const choice = root.querySelector(".method");
  const options = root.querySelector(".options");
  root.querySelector("legend").textContent = title;
  const methods = model.methods.map(({ name, guarantee }) => new Option(`${name} (${guarantee})`, name));
  if (index) methods.unshift(new Option(NONE, ""));
  choice.append(...methods);
  choice.value = index ? "ar" : model.default;
  const side = { root, method: () => model.methods.find(({ name }) => name === choice.value) };
  side.text = () => choice.value + (options.value.trim() ? ":" + options.value.trim() : "");
  choice.onchange = () => {
    const method = side.method();
    const names = Object.entries(method?.options ?? {});
    options.value = "";
    options.disabled = !names.length;
    options.placeholder = names.length ? `like ${names[0][0]}=...` : "none";
    options.title = names.map(([name, meaning]) => `${name}: ${meaning}`).join("\n");
    root.querySelector(".about").hidden = !method;
    if (!method) return;
    showTag(root.querySelector(".tag"), method.guarantee, about.guarantees);
    root.querySelector(".summary").textContent = method.summary;
  };
  choice.onchange();
  return side;
}

// The class or prompt of the image.
function classOrPrompt() {
  if (model.classes.length) return { label: element("label").value || element("label").placeholder };
  return { prompt: element("prompt").value, negative_prompt: element("negative").value || null };
}

async function make() {
  const chosen = sides.filter((side) => side.method());
  const settings = Object.fromEntries([...document.querySelectorAll(".setting [name]")].map((input) => [input.name, input.value]));
  const wanted = {
    model: model.name,
    ...classOrPrompt(),
    seed: element("seed").value,
    methods: chosen.map((side) => side.text()),
    settings,
    ...editor.content(),
  };
  fail("");
  setRunning(new AbortController());
  const panels = chosen.map((side) => makePanel(side.method(), model, { ...about, edit: editor.openLink, say }));
  try {
    const body = JSON.stringify(wanted);
    const headers = { "Content-Type": "application/json" };
    const answer = await ask("api/images", { method: "POST", headers, body, signal: running.signal });
    element("starting").hidden = true;
    if (!answer.ok) throw new Error(await reason(answer));
    element("panels").replaceChildren(...panels.map(({ root }) => root));
    await follow(answer.body, (event) => {
      panels[event.run].show(event);
      paintAll(panels);
    });
    loseAll(panels, "the connection to the server was lost");
  } catch (error) {
    running.abort(); // or the server would finish images that nobody sees
    const isStopped = error.name === "AbortError";
    loseAll(panels, isStopped ? "stopped" : "the connection to the server was lost");
    if (!isStopped) fail(messageOf(error));
  }
  setRunning(null);
  showStatus();
}

// The message of an error; `fetch` throws a TypeError if the server does not answer.
function messageOf(error) {
  return error instanceof TypeError ? "the server cannot be reached: is it running?" : error.message;
}

// The server's reason for a refusal.
async function reason(answer) {
  try {
    return String((await answer.json()).detail);
  } catch {
    return `the server failed (${answer.status}): see the messages in its terminal`;
  }
}

// Calls `tell` with each server-sent event of an answer.
async function follow(body, tell) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let unread = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (unread + value).split("\n\n");
    unread = parts.pop();
    for (const part of parts) {
      if (part.startsWith("data: ")) tell(JSON.parse(part.slice(6)));
    }
  }
}

function loseAll(panels, message) {
  for (const panel of panels) if (!panel.done) panel.fail(message);
}

function setRunning(controller) {
  running = controller;
  element("make").disabled = Boolean(controller);
  element("stop").hidden = element("starting").hidden = !controller;
}

function say(text) {
  element("said").textContent = text;
}

function fail(message) {
  element("error").textContent = message;
  element("error").hidden = !message;
}

async function showStatus() {
  clearTimeout(showStatus.timer);
  try {
    const { running: now, waiting, images_per_second: speed } = await (await ask("api/status")).json();
    element("status").textContent = `${now} running, ${waiting} waiting, ${speed.toFixed(2)} images/s in the last minute`;
  } catch {
    element("status").textContent = "the server cannot be reached";
  }
  showStatus.timer = setTimeout(showStatus, POLL);
}

begin().catch((error) => fail(messageOf(error)));
