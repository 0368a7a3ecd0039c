// A picture while it is generated, the panel of a method in a comparison, and what is known of a finished picture.

const SWATCHES = [[0, "sampled one by one, or its draft was rejected"], [1, "its draft was accepted"], [null, "not drafted"]];

export function copyOf(name) {
  return document.getElementById(name).content.cloneNode(true).firstElementChild;
}

// A tile that grows by the events of /api/images. `ended(event)` is called with the last one, `open()` on a click then.
export function makeTile(model, { ended, open }) {
  const root = copyOf("tile");
  const image = root.querySelector("img");
  const [button, progress, caption] = ["button", "progress", "figcaption"].map((name) => root.querySelector(name));
  const tile = { root, image, isDone: false, isAccepted: false };
  image.classList.toggle("pixelated", model.image_size < 128);

  tile.show = (event) => {
    tile.isAccepted = true;
    if (event.position) caption.textContent = `${event.position} in the queue`;
    if (event.error) tile.fail(event.error);
    if (event.share === undefined) return;
    progress.value = event.share;
    image.hidden = !event.image;
    if (event.image) image.src = event.image;
    caption.textContent = "";
    if (event.finished) finish(event);
  };

  tile.fail = (message) => {
    end();
    caption.className = "error";
    caption.textContent = message;
  };

  function finish(event) {
    end();
    image.alt = `${event.class_name}, seed ${event.seed}`;
    button.disabled = !event.image;
    if (!event.image) caption.textContent = "finished; this model has no decoder to show it";
    button.onclick = open;
    ended(event);
  }

  function end() {
    tile.isDone = true;
    progress.hidden = true;
  }

  return tile;
}

// A panel of a comparison: its tile, with the method and the facts. `tools`: {colours, guarantees}.
export function makePanel(method, model, tools, actions) {
  const root = copyOf("panel");
  const ended = (event) => {
    showTag(root.querySelector(".tag"), event.guarantee, tools.guarantees);
    root.querySelector(".seconds").textContent = `${digits(event.seconds)} s`;
    root.append(makeFacts(event, method, model, tools));
    actions.ended(event);
  };
  const panel = makeTile(model, { ...actions, ended });
  root.querySelector("h2").textContent = method.name;
  showTag(root.querySelector(".tag"), method.guarantee, tools.guarantees);
  root.querySelector("h2").after(panel.root);
  panel.root = root;
  return panel;
}

// Replaces the second of two finished pictures by words if all its pixels are those of the first.
export async function joinEqual([first, second]) {
  if (!second || first.image.hidden || second.image.hidden) return;
  await Promise.all([first.image.decode(), second.image.decode()]);
  if (pixelsOf(first.image) !== pixelsOf(second.image)) return;
  second.root.querySelector(".tile").hidden = true;
  second.root.querySelector(".same").hidden = false;
}

function pixelsOf(image) {
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [image.naturalWidth, image.naturalHeight];
  canvas.getContext("2d").drawImage(image, 0, 0);
  return canvas.toDataURL();
}

// The statistics of a finished picture, folded.
export function makeFacts(event, method, model, tools) {
  const root = copyOf("fact");
  const find = (name) => root.querySelector("." + name);
  find("effort").textContent = `${digits(event.seconds)} s of computing, shared by all pictures that were made together`;
  find("numbers").append(...event.numbers.flatMap((pair) => pair.map((text, i) => {
    const entry = document.createElement(i ? "dd" : "dt");
    entry.textContent = text;
    return entry;
  })));
  root.querySelector("code").textContent = event.ran;
  showCosts(find("heat"), find("legend"), event, method.token_cost === "calls", model, tools.colours);
  return root;
}

// Colours the tokens by cost. A map in which all tokens cost the same would say nothing: words replace it.
function showCosts(canvas, legend, event, isCounted, model, colours) {
  const costs = event.token_cost.filter((cost) => cost !== null);
  canvas.hidden = new Set(event.token_cost).size < 2 || !(isCounted || event.counts.verified);
  if (canvas.hidden) {
    legend.textContent = flatText(isCounted, event);
    return;
  }
  const [low, high] = isCounted ? [Math.min(...costs), Math.max(...costs)] : [0, 1];
  canvas.width = canvas.height = model.side;
  const context = canvas.getContext("2d");
  event.token_cost.forEach((cost, token) => {
    if (cost === null) return;
    const share = isCounted ? (cost - low) / Math.max(high - low, 1e-9) : cost;
    context.fillStyle = colourOf(share, colours);
    context.fillRect(token % model.side, Math.floor(token / model.side), 1, 1);
  });
  showLegend(legend, isCounted, low, high, colours);
}

// What replaces a map of one colour.
function flatText(isCounted, { token_cost: [cost], counts }) {
  if (isCounted) return `${cost.toFixed(0)} head calls for each token`;
  if (!counts.verified) return "nothing was drafted: each token was sampled by the model itself";
  return counts.accepted ? "each draft was accepted" : "each draft was rejected";
}

export function showTag(element, guarantee, guarantees) {
  element.className = "tag " + guarantee;
  element.textContent = guarantee;
  element.title = guarantees[guarantee];
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
