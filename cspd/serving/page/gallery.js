// The gallery of saved pictures, and the viewer of one picture. A picture is {image, file, model, settings, title, facts}:
// a data link, or null until it is loaded; its name in the server's folder, or null; its entry of /api/models, or null if
// it is not served; the settings that ran; its class or prompt; and an element, or null.

import { linkOf } from "./link.js";

const FEW = 12; // pictures that are shown at first

// tools: {ask(path), models, edit(picture)}.
export function makeGallery(tools) {
  const element = (id) => document.getElementById(id);
  const viewer = element("viewer");
  const current = new Set(); // keys of pictures that the page shows elsewhere
  let pictures = []; // the newest one first
  let most = FEW;

  // A picture has one place: the same settings give the same file again.
  const keyOf = ({ file, image }) => file ?? image;

  async function load() {
    const answer = await tools.ask(`api/pictures?num=${most + current.size + 1}`);
    if (!answer.ok) return;
    const { is_saved: isSaved, pictures: saved } = await answer.json();
    if (isSaved) element("gallery").querySelector("h2").textContent = "Saved pictures";
    const known = new Set(pictures.map(keyOf));
    pictures.push(...saved.filter(({ file }) => !known.has(file)).map(pictureOf));
    render();
  }

  function pictureOf({ file, models, settings }) {
    const model = tools.models.find(({ name }) => name === models.checkpoint || name.endsWith("/" + models.checkpoint));
    const title = settings.prompt ?? model?.classes[settings.label] ?? settings.label ?? "unconditional";
    return { image: null, file, model: model ?? null, settings, title, facts: null };
  }

  function add(picture, isShownElsewhere) {
    pictures = [picture, ...pictures.filter((other) => keyOf(other) !== keyOf(picture))];
    if (isShownElsewhere) current.add(keyOf(picture));
    render();
  }

  function render() {
    const rest = pictures.filter((picture) => !current.has(keyOf(picture)));
    element("saved").replaceChildren(...rest.slice(0, most).map(entryOf));
    element("older").hidden = rest.length <= most;
    element("gallery").hidden = !rest.length;
  }

  function entryOf(picture) {
    if (picture.entry) return picture.entry;
    picture.entry = document.createElement("li");
    const button = picture.entry.appendChild(document.createElement("button"));
    const image = button.appendChild(document.createElement("img"));
    button.type = "button";
    button.title = image.alt = `${picture.title}, seed ${picture.settings.seed}`;
    button.onclick = () => view(picture);
    fill(image, picture);
    return picture.entry;
  }

  async function fill(image, picture) {
    image.classList.toggle("pixelated", (picture.model?.image_size ?? 128) < 128);
    picture.image ??= await read(picture.file);
    if (picture.image) {
      image.src = picture.image;
      return;
    }
    pictures = pictures.filter((other) => other !== picture); // its file is gone
    render();
  }

  // A data link, since elements <img> cannot send an API key; null if the server has no such picture.
  async function read(file) {
    const answer = await tools.ask(`api/pictures/${encodeURIComponent(file)}`);
    if (!answer.ok) return null;
    const content = await answer.blob();
    return new Promise((done) => {
      const reader = new FileReader();
      reader.onload = () => done(reader.result);
      reader.readAsDataURL(content);
    });
  }

  async function view(picture) {
    const { model, settings, title, file } = picture;
    element("title").textContent = title;
    element("by").textContent = `seed ${settings.seed}, by ${settings.method}${model ? `, ${model.name}` : ""}`;
    const image = viewer.querySelector("img");
    image.alt = title;
    await fill(image, picture);
    element("save").href = picture.image;
    element("save").download = file ?? `${title.slice(0, 40)}_seed${settings.seed}.png`.replaceAll(/[^\w.-]+/g, "-");
    const link = model && linkOf(model, settings);
    element("again").hidden = !link;
    if (link) element("again").href = link;
    element("edit").onclick = () => {
      viewer.close();
      tools.edit(picture);
    };
    element("facts").replaceChildren(...(picture.facts ? [picture.facts] : []));
    viewer.showModal();
  }

  element("older").onclick = () => {
    most += 2 * FEW;
    load();
  };

  return { load, add, view, clear: () => { current.clear(); render(); } };
}
