// The panel of a method: its image while it is generated, the cost of each token, and statistics.

import { linkOf } from "./link.js";

const SWATCHES = [[0, "rejected, or sampled by the target"], [1, "accepted"], [null, "not drafted"]];

// method, model: entries of /api/models. tools: {colours, guarantees, edit(link), say(text), keep(event, link)}; say() is
// for screen readers, keep() for finished pictures.
export function makePanel(method, model, tools) {
  const root = document.getElementById("panel").content.cloneNode(true).firstElementChild;
  const find = (name) => root.querySelector("." + name);
  const panel = { root, isCounted: method.token_cost === "calls", heat: [], done: false };
  find("name").textContent = method.name;
  showTag(find("tag"), method.guarantee, tools.guarantees);
  find("image").classList.toggle("pixelated", model.image_size < 128);
  find("image").hidden = true;
  find("state").textContent = "waiting ...";

  // Shows an event of /api/images.
  panel.show = (event) => {
    if (event.advice) {
      find("note").textContent = event.advice;
      find("note").hidden = false;
    }
    if (event.error) panel.fail(event.error);
    if (event.position) find("state").textContent = `number ${event.position} in the queue`;
    if (event.share === undefined) return;
    root.querySelector("progress").value = event.share;
    if (event.image) {
      find("image").src = event.image;
      find("image").hidden = false;
    }
    panel.heat = event.token_cost;
    showTag(find("tag"), event.guarantee, tools.guarantees);
    const speed = `${digits(event.images_per_second)} images/s`;
    const state = event.finished ? "finished" : `${Math.round(100 * event.share)} %`;
    find("state").textContent = `${state}, ${digits(event.seconds)} s in the engine, ${speed}`;
    showNumbers(find("numbers"), event.numbers);
    if (event.finished) finish(event);
    paint();
  };

  panel.fail = (message) => {
    panel.done = true;
    root.querySelector("progress").hidden = true;
    find("state").hidden = true;
    find("error").textContent = message;
    find("error").hidden = false;
    tools.say(`${method.name}: ${message}`);
  };

  // Colours the tokens by cost. A map in which all tokens cost the same would say nothing: words replace it.
  function paint() {
    const costs = panel.heat.filter((cost) => cost !== null);
    const [low, high] = panel.isCounted ? [Math.min(...costs), Math.max(...costs)] : [0, 1];
    const isFlat = panel.done && new Set(panel.heat).size < 2;
    const canvas = find("heat");
    canvas.hidden = isFlat;
    find("pictures").classList.toggle("alone", isFlat);
    canvas.width = canvas.height = model.side;
    const context = canvas.getContext("2d");
    panel.heat.forEach((cost, token) => {
      if (cost === null) return;
      const share = panel.isCounted ? (cost - low) / Math.max(high - low, 1e-9) : cost;
      context.fillStyle = colourOf(share, tools.colours);
      context.fillRect(token % model.side, Math.floor(token / model.side), 1, 1);
    });
    if (isFlat) find("legend").textContent = flatText(panel.isCounted, panel.heat[0]);
    else if (costs.length) showLegend(find("legend"), panel.isCounted, low, high, tools.colours);
  }

  function finish(event) {
    panel.done = true;
    root.querySelector("progress").hidden = true;
    find("image").alt = `${event.class_name}, by ${method.name}`;
    root.querySelector(".ran code").textContent = event.ran;
    find("ran").hidden = false;
    const save = find("save");
    save.href = event.image;
    save.download = `${event.class_name.slice(0, 60)}-${method.name}.png`.replaceAll(/[^\w.+-]+/g, "_");
    const link = linkOf(model, event.settings);
    find("link").hidden = !link;
    find("link").href = link;
    find("edit").onclick = () => tools.edit(event.image);
    find("actions").hidden = !event.image; // models without a decoder give tokens only
    tools.say(`${method.name}: finished`);
    if (event.image) tools.keep(event, link);
  }

  return panel;
}

// What replaces a heat map of one colour: the cost of every token.
function flatText(isCounted, cost) {
  if (cost === null) return "nothing was drafted";
  if (isCounted) return `${cost.toFixed(0)} head calls for each token`;
  return `each token was ${SWATCHES[cost][1]}`;
}

export function showTag(element, guarantee, guarantees) {
  element.className = "tag " + guarantee;
  element.textContent = guarantee;
  element.title = guarantees[guarantee];
}

function showNumbers(list, numbers) {
  list.replaceChildren(...numbers.flatMap(([name, text]) => {
    const term = document.createElement("dt");
    const value = document.createElement("dd");
    term.textContent = name;
    value.textContent = text;
    return [term, value];
  }));
}

function showLegend(legend, isCounted, low, high, colours) {
  const square = (colour) => {
    const mark = document.createElement("i");
    mark.style.background = colour;
    return mark;
  };
  if (isCounted) {
    const bar = square(`linear-gradient(to right, ${colours.join(", ")})`);
    bar.className = "bar";
    const text = `${high.toFixed(0)} head calls per token`;
    legend.replaceChildren(...(low < high ? [low.toFixed(0), bar, text] : [square(colourOf(0, colours)), text]));
    return;
  }
  legend.replaceChildren(...SWATCHES.flatMap(([share, text]) =>
    [square(share === null ? "var(--unknown)" : colourOf(share, colours)), text]));
}

function colourOf(share, colours) {
  return colours[Math.round(share * (colours.length - 1))];
}

function digits(number) {
  return number >= 100 ? number.toFixed(0) : number.toPrecision(2);
}
