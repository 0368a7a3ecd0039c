// The page: fills the form from /api/models, sends it to /api/images, and shows the events of the answer.

import { makeEditor } from "./brush.js";
import { makeGallery } from "./gallery.js";
import { askedBy, queryOf } from "./link.js";
import { fieldOf, makeOptions, put } from "./options.js";
import { copyOf, joinEqual, makeFacts, makePanel, makeTile, showTag } from "./picture.js";

const element = (id) => document.getElementById(id);
const COMPARE = "#compare"; // the end of the address of the second tab
const POLL = 2000; // milliseconds
const PATIENCE = 1500; // milliseconds
const STARTING = "Getting ready. Settings that are new to this server may need some minutes, once.";
const MOST_STREAMS = 4; // at once: a browser opens six connections to a server, and the status needs one
const SEEDS = 1e6; // random ones are below
const KEY = "cspd-api-key"; // the browser stores the API key under this name

let about = null;
let model = null;
let sides = {}; // the choices of a method: one to make pictures, two to compare
let gallery = null;
let running = null; // an AbortController while images are generated
let apiKey = null;

const editor = makeEditor(showStart, (message) => fail(message));
const isComparing = () => location.hash === COMPARE;

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
  gallery = makeGallery({ ask, models: about.models, edit });
  const titleOf = ({ name, classes }) => classes.length ? name : `${name} (prompts)`;
  element("model").replaceChildren(...about.models.map((each) => new Option(titleOf(each), each.name)));
  element("model").onchange = setModel;
  element("count").oninput = showStart;
  element("stop").onclick = () => running?.abort();
  element("form").onsubmit = (event) => {
    event.preventDefault();
    if (!running) make();
  };
  keepPlaceholder(element("label"));
  const { device, threads, precision } = about.machine;
  element("machine").textContent = `${device}, CPU threads: ${threads}, ${precision}; images per model at a time: ${about.slots}`;
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
  window.onhashchange = showTab;
  showTab();
  showStatus();
  await gallery.load();
}

function showTab() {
  document.body.dataset.tab = isComparing() ? "compare" : "make";
  for (const link of document.querySelectorAll("nav a")) {
    link.ariaCurrent = (link.hash === COMPARE) === isComparing() ? "page" : null;
  }
  if (!running) tell("");
  showStart();
}

// The words of the button.
function showStart() {
  const count = numPictures();
  element("start").textContent = isComparing() ? "Compare" : `Make ${count === 1 ? "a picture" : `${count} pictures`}`;
}

function numPictures() {
  return isComparing() ? 1 : Math.max(1, Math.min(64, Math.floor(Number(element("count").value)) || 1));
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
  element("more").append(...model.options.map(fieldOf));
  element("link").hidden = true;
  sides = {
    one: [makeSide("Method", model.default)],
    both: [makeSide("First method", model.default), makeSide("Second method", "ar")],
  };
  for (const [id, each] of Object.entries(sides)) element(id).replaceChildren(...each.map(({ root }) => root));
  editor.setModel(model);
}

// The choices of methods in this tab.
function chosen() {
  return isComparing() ? sides.both : sides.one;
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
  element("seed").value = asked.seed ?? "";
  element("count").value = 1; // the picture of this seed
  const inputs = commonInputs();
  for (const option of model.options) {
    put(inputs.find(({ name }) => name === option.name), option, asked.settings[option.name]);
  }
  if (asked.methods.length > 1) history.replaceState(null, "", COMPARE);
  chosen().forEach((side, index) => side.fill(asked.methods[index]));
  element("settings").open = true;
}

function makeSide(title, usual) {
  const root = copyOf("side");
  const choice = root.querySelector(".method");
  const own = root.querySelector(".own");
  root.querySelector(".title").textContent = title;
  for (const guarantee of Object.keys(about.guarantees)) {
    const names = model.methods.filter((method) => method.guarantee === guarantee).map(({ name }) => new Option(name));
    const group = document.createElement("optgroup");
    group.label = guarantee;
    group.append(...names);
    if (names.length) choice.append(group);
  }
  choice.value = usual;
  const side = { root, method: () => model.methods.find(({ name }) => name === choice.value) };
  let options = null;
  side.text = () => choice.value + options.text();
  side.fill = (asked) => {
    choice.value = asked?.name ?? usual;
    if (choice.selectedIndex < 0) choice.value = usual;
    choice.onchange();
    options.fill(asked?.options ?? {});
    own.open = Boolean(options.text());
  };
  choice.onchange = () => {
    const method = side.method();
    options = makeOptions(method.options);
    own.hidden = !method.options.length;
    own.querySelector("summary").textContent = `Options of ${choice.value}`;
    own.querySelector(".fields").replaceChildren(...options.fields);
    if (own.querySelector(".slider")) own.open = true; // such a method is chosen for its slider
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
  return [...document.querySelectorAll("#more > .setting [name]")];
}

// The body of a request to /api/images.
function wanted() {
  return {
    model: model.name,
    ...classOrPrompt(),
    seed: element("seed").value.trim() || String(Math.floor(Math.random() * SEEDS)),
    methods: chosen().map((side) => side.text()),
    settings: Object.fromEntries(commonInputs().map((input) => [input.name, input.value])),
    ...editor.content(),
  };
}

// Generates the images: as many at once as the server allows one client.
async function make() {
  const first = wanted();
  const methods = chosen().map((side) => side.method());
  const place = element(isComparing() ? "panels" : "grid");
  fail("");
  element("note").hidden = true;
  if (!isComparing()) gallery.clear();
  element("link").hidden = Boolean(first.picture); // which no link can hold
  element("link").href = queryOf(first);
  const own = new AbortController();
  setRunning(own);
  const began = performance.now();
  const bodies = Array.from({ length: numPictures() }, (_, index) => ({ ...first, seed: seedAfter(first.seed, index) }));
  const runs = bodies.map((body) => ({ body, tiles: makeTiles(methods) }));
  const tiles = runs.flatMap((run) => run.tiles);
  place.replaceChildren(...tiles.map(({ root }) => root));
  const queue = [...runs];
  const worker = async () => {
    while (queue.length && !own.signal.aborted) await makeOne(queue.shift(), own);
  };
  const atOnce = Math.max(1, Math.min(MOST_STREAMS, Math.floor(about.most_each / methods.length)));
  await Promise.all(Array.from({ length: atOnce }, worker));
  if (own.signal.aborted) loseAll(tiles, messageOf(own.signal.reason));
  if (own.signal.aborted && !isStop(own.signal.reason)) fail(messageOf(own.signal.reason));
  setRunning(null);
  const num = tiles.filter(({ image }) => image.alt).length;
  const seconds = ((performance.now() - began) / 1000).toPrecision(2);
  tell(num ? `${num === 1 ? "1 picture" : `${num} pictures`} in ${seconds} s` : "");
  showStatus();
}

// The seed of an image; numbers of JavaScript are exact up to 2**53 only. The server refuses all other texts.
function seedAfter(text, index) {
  return /^\d+$/.test(text) ? String(BigInt(text) + BigInt(index)) : text;
}

// The tiles of one seed, or the panels if methods are compared: one by each method.
function makeTiles(methods) {
  const own = model;
  const isPanel = isComparing();
  return methods.map((method) => {
    let picture = null;
    const ended = (event) => {
      picture = { image: event.image, file: event.file, model: own, settings: event.settings, title: event.class_name };
      picture.facts = isPanel ? null : makeFacts(event, method, own, about);
      if (event.image) gallery.add(picture, !isPanel);
      say(`${event.class_name} by ${method.name}: finished`);
    };
    const actions = { ended, open: () => gallery.view(picture) };
    return isPanel ? makePanel(method, own, about, actions) : makeTile(own, actions);
  });
}

// Generates the image of one seed by each method. An error stops all others, which repeat it.
async function makeOne({ body, tiles }, own) {
  try {
    const headers = { "Content-Type": "application/json" };
    const answer = await ask("api/images", { method: "POST", headers, body: JSON.stringify(body), signal: own.signal });
    starting(false);
    if (!answer.ok) throw new Error(await reason(answer));
    await follow(answer.body, (event) => {
      if (event.advice) note(event.advice);
      tiles[event.run].show(event);
    });
    loseAll(tiles, "the connection to the server was lost");
    await joinEqual(tiles);
  } catch (error) {
    if (!own.signal.aborted) own.abort(error); // or the server would finish images that nobody sees
  }
}

// Opens a picture to change a part of it, by its own model if that is served.
async function edit({ model: own, image, settings, title }) {
  if (own && own !== model) {
    element("model").value = own.name;
    setModel();
    element(settings.prompt === undefined ? "label" : "prompt").value = title;
  }
  await editor.openLink(image);
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

// Calls `show` with each server-sent event of an answer.
async function follow(body, show) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let unread = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (unread + value).split("\n\n");
    unread = parts.pop();
    for (const part of parts) {
      if (part.startsWith("data: ")) show(JSON.parse(part.slice(6)));
    }
  }
}

// Shows why tiles stay unfinished, and removes those that the server has not accepted.
function loseAll(tiles, message) {
  for (const tile of tiles) {
    if (tile.isDone) continue;
    if (tile.isAccepted) tile.fail(message);
    else tile.root.remove();
  }
}

function setRunning(controller) {
  running = controller;
  element("start").disabled = Boolean(controller);
  element("stop").hidden = !controller;
  starting(Boolean(controller));
}

// Says why it may take a while until the server accepts a request.
function starting(isSo) {
  clearTimeout(starting.timer);
  tell("");
  if (isSo) starting.timer = setTimeout(() => tell(STARTING), PATIENCE);
}

// Says something next to the button.
function tell(text) {
  element("told").textContent = text;
}

function note(text) {
  element("note").textContent = text;
  element("note").hidden = false;
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
