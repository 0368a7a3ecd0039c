// The page: fills the form from /api/models, sends it to /api/images, and shows the events of the answer.

import { makeEditor } from "./brush.js";
import { askedBy, queryOf } from "./link.js";
import { fieldOf, makeOptions, put } from "./options.js";
import { makePanel, showTag } from "./panel.js";

const element = (id) => document.getElementById(id);
const FIRST = ["cfg", "num_iter"]; // always visible
const SIDES = ["first", "second"];
const NONE = "none";
const POLL = 2000; // milliseconds
const MOST_STREAMS = 4; // at once: a browser opens six connections to a server, and the status needs one
const MOST_KEPT = 200; // pictures in the gallery
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
  const asked = askedBy(location.search);
  if (asked) fill(asked);
  showStatus();
}

// Takes the API key from the end of the address, #key=..., which is never sent to a server, or from the browser's store.
function findKey() {
  const [, given] = location.hash.match(/^#key=(.+)$/) ?? [];
  if (given) {
    keepKey(decodeURIComponent(given));
    history.replaceState(null, "", location.pathname + location.search);
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
    element(FIRST.includes(option.name) ? "fields" : "more").append(fieldOf(option));
  }
  element("panels").replaceChildren(); // of another model
  element("link").hidden = true;
  sides = SIDES.map(makeSide);
  element("sides").replaceChildren(...sides.map(({ root }) => root));
  editor.setModel(model);
}

// Fills the form with what a link asks for.
function fill(asked) {
  element("model").value = asked.model;
  if (!element("model").value) {
    setModel();
    fail(`this server has no model ${asked.model}: choose another one`);
    return;
  }
  setModel();
  element("label").value = asked.label ?? "";
  element("prompt").value = asked.prompt ?? "";
  element("negative").value = asked.negative ?? "";
  element("seed").value = asked.seed ?? 0;
  const inputs = commonInputs();
  for (const option of model.options) {
    put(inputs.find(({ name }) => name === option.name), option, asked.settings[option.name]);
  }
  sides.forEach((side, index) => side.fill(asked.methods[index]));
}

function makeSide(title, index) {
  const root = element("side").content.cloneNode(true).firstElementChild;
  const choice = root.querySelector(".method");
  const own = root.querySelector(".own");
  root.querySelector("legend").textContent = title;
  const methods = model.methods.map(({ name, guarantee }) => new Option(`${name} (${guarantee})`, name));
  if (index) methods.unshift(new Option(NONE, ""));
  choice.append(...methods);
  choice.value = index ? "ar" : model.default;
  const side = { root, method: () => model.methods.find(({ name }) => name === choice.value) };
  let options = null;
  side.text = () => choice.value + options.text();
  side.fill = (asked) => {
    choice.value = asked?.name ?? "";
    if (choice.selectedIndex < 0) choice.selectedIndex = 0;
    choice.onchange();
    options?.fill(asked?.options ?? {});
    own.open = Boolean(options?.text());
  };
  choice.onchange = () => {
    const method = side.method();
    options = method ? makeOptions(method.options) : null;
    own.hidden = !method?.options.length;
    own.querySelector("summary").textContent = `Options of ${choice.value}`;
    own.querySelector(".fields").replaceChildren(...(options?.fields ?? []));
    if (own.querySelector(".slider")) own.open = true; // such a method is chosen for its slider
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

// The fields of the settings that all methods have.
function commonInputs() {
  return [...document.querySelectorAll(":is(#fields, #more) > .setting [name]")];
}

// The body of a request to /api/images.
function wanted() {
  return {
    model: model.name,
    ...classOrPrompt(),
    seed: element("seed").value,
    methods: sides.filter((side) => side.method()).map((side) => side.text()),
    settings: Object.fromEntries(commonInputs().map((input) => [input.name, input.value])),
    ...editor.content(),
  };
}

// Generates the images: as many at once as the server allows one client.
async function make() {
  const first = wanted();
  const methods = sides.map((side) => side.method()).filter(Boolean);
  const count = Math.max(1, Math.min(64, Math.floor(Number(element("count").value)) || 1));
  fail("");
  element("panels").replaceChildren();
  element("link").hidden = Boolean(first.picture); // which no link can hold
  element("link").href = queryOf(first);
  const own = new AbortController();
  setRunning(own);
  let next = 0;
  const worker = async () => {
    while (next < count && !own.signal.aborted) {
      const index = next++;
      await makeOne({ ...first, seed: seedAfter(first.seed, index) }, methods, own);
    }
  };
  const atOnce = Math.max(1, Math.min(MOST_STREAMS, Math.floor(about.most_each / methods.length)));
  await Promise.all(Array.from({ length: Math.min(atOnce, count) }, worker));
  if (own.signal.aborted && !isStop(own.signal.reason)) fail(messageOf(own.signal.reason));
  setRunning(null);
  showStatus();
}

// The seed of an image; numbers of JavaScript are exact up to 2**53 only. The server refuses all other texts.
function seedAfter(text, index) {
  return /^\s*\d+\s*$/.test(text) ? String(BigInt(text) + BigInt(index)) : text;
}

// Generates the image of one seed by each method. An error stops all others, which repeat it.
async function makeOne(body, methods, own) {
  const tools = { ...about, edit: editor.openLink, say, keep };
  const panels = methods.map((method) => makePanel(method, model, tools));
  try {
    const headers = { "Content-Type": "application/json" };
    const answer = await ask("api/images", { method: "POST", headers, body: JSON.stringify(body), signal: own.signal });
    element("starting").hidden = true;
    if (!answer.ok) throw new Error(await reason(answer));
    element("panels").append(...panels.map(({ root }) => root));
    await follow(answer.body, (event) => panels[event.run].show(event));
    loseAll(panels, "the connection to the server was lost");
  } catch (error) {
    if (!own.signal.aborted) own.abort(error); // or the server would finish images that nobody sees
    loseAll(panels, messageOf(own.signal.reason));
  }
}

// Adds a finished picture to the gallery; `link` is null if no link can generate it again.
function keep({ image, class_name: name, settings: { method, seed } }, link) {
  const entry = document.createElement("li");
  const picture = entry.appendChild(document.createElement("img"));
  picture.src = image;
  picture.alt = `${name}, seed ${seed}, by ${method}`;
  picture.classList.toggle("pixelated", model.image_size < 128);
  const caption = entry.appendChild(document.createElement("a"));
  caption.textContent = picture.alt;
  if (link) caption.href = link;
  element("pictures").prepend(entry);
  if (element("pictures").children.length > MOST_KEPT) element("pictures").lastChild.remove();
  element("gallery").hidden = false;
}

// Whether the user pressed Stop, which aborts without a reason of its own.
function isStop(error) {
  return error.name === "AbortError";
}

// The message of an error; `fetch` throws a TypeError if the server does not answer.
function messageOf(error) {
  if (isStop(error)) return "stopped";
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
  if (message) element("error").scrollIntoView({ block: "nearest" });
}

async function showStatus() {
  clearTimeout(showStatus.timer);
  try {
    const answer = await ask("api/status");
    if (!answer.ok) throw new Error(await reason(answer));
    const { running: now, waiting, images_per_second: speed } = await answer.json();
    element("status").textContent = `${now} running, ${waiting} waiting, ${speed.toFixed(2)} images/s in the last minute`;
  } catch (error) {
    element("status").textContent = messageOf(error);
  }
  showStatus.timer = setTimeout(showStatus, POLL);
}

begin().catch((error) => {
  element("status").textContent = "not connected";
  fail(messageOf(error));
});
