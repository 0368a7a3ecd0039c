// The editor: an image, and a mask of the tokens to regenerate.

const CHEQUERED = ["white", "black"]; // visible on images of all colours
const STEPS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }; // right and down

// changed() is called when an image is opened or closed; fail(message), if a file cannot be read.
export function makeEditor(changed, fail) {
  const element = (id) => document.getElementById(id);
  const picture = element("picture");
  const mask = element("mask");
  const pen = mask.getContext("2d");
  let model = null;
  let isOpen = false;
  let cursor = { x: 0.5, y: 0.5 };

  element("file").onchange = async (event) => {
    const [file] = event.target.files;
    event.target.value = "";
    await openFile(file);
  };

  const root = document.documentElement;
  const marked = (isMarked) => root.classList.toggle("dropping", isMarked);
  root.ondragover = (event) => {
    if (!event.dataTransfer.types.includes("Files")) return; // such as a selected text
    event.preventDefault(); // or the browser would leave the page
    marked(true);
  };
  root.ondragleave = (event) => { if (!event.relatedTarget) marked(false); };
  root.ondrop = async (event) => {
    marked(false);
    if (!event.dataTransfer.files.length) return;
    event.preventDefault();
    await openFile(event.dataTransfer.files[0]);
  };

  async function openFile(file) {
    if (!file) return;
    try {
      open(await createImageBitmap(file));
    } catch {
      fail(`${file.name} cannot be read as an image: open a PNG or JPEG file`);
    }
  }
  element("close").onclick = () => close();
  element("clear").onclick = () => pen.clearRect(0, 0, mask.width, mask.height);
  mask.onpointerdown = (event) => {
    mask.setPointerCapture(event.pointerId);
    stroke(event);
  };
  mask.onpointermove = (event) => {
    if (event.buttons) (event.getCoalescedEvents?.() ?? [event]).forEach(stroke);
  };
  mask.onkeydown = (event) => {
    const [right, down] = STEPS[event.key] ?? [0, 0];
    if (event.key !== " " && !right && !down) return;
    event.preventDefault(); // or the page would scroll
    moveTo(cursor.x + right, cursor.y + down);
    if (event.key === " ") paint(cursor.x, cursor.y);
  };

  function setModel(chosen) {
    model = chosen;
    element("how").textContent = model.rows
      ? "Paint from where the picture should change: this model works row by row, so all rows below change too."
      : "Paint over the part that should change. The rest of the picture stays.";
    if (isOpen) close();
  }

  // Pixels per side: at least the model's, and a multiple of its tokens per side, so that no pixel lies in two tokens.
  function size() {
    return model.side * Math.ceil(model.image_size / model.side);
  }

  // Opens the square in the middle of a bitmap or image.
  function open(source) {
    const [width, height] = [source.width, source.height];
    const square = Math.min(width, height);
    picture.width = picture.height = size();
    picture.classList.toggle("pixelated", model.image_size < 128);
    const pencil = picture.getContext("2d");
    pencil.imageSmoothingQuality = "high";
    const from = [(width - square) / 2, (height - square) / 2, square, square];
    pencil.drawImage(source, ...from, 0, 0, size(), size());
    mask.width = mask.height = model.side;
    element("size").max = Math.max(2, Math.ceil(model.side / 3));
    isOpen = true;
    show();
    moveTo(Math.floor(model.side / 2) + 0.5, Math.floor(model.side / 2) + 0.5);
    element("easel").scrollIntoView({ block: "nearest" });
  }

  async function openLink(link) {
    const image = new Image();
    image.src = link;
    await image.decode();
    open(image);
  }

  function close() {
    isOpen = false;
    show();
  }

  function show() {
    element("easel").hidden = !isOpen;
    changed();
  }

  function stroke(event) {
    const box = mask.getBoundingClientRect();
    paint(((event.clientX - box.left) / box.width) * model.side, ((event.clientY - box.top) / box.height) * model.side);
  }

  // Moves the brush of the keyboard, in tokens from the upper left corner, to the middle of a token.
  function moveTo(x, y) {
    const inside = (value) => Math.min(Math.max(value, 0.5), model.side - 0.5);
    cursor = { x: inside(x), y: inside(y) };
    const mark = element("cursor").style;
    const percent = 100 / model.side;
    mark.width = mark.height = `${percent}%`;
    mark.left = `${(cursor.x - 0.5) * percent}%`;
    mark.top = `${(cursor.y - 0.5) * percent}%`;
  }

  // Paints the tokens under the brush; for models that generate row by row, its row and all rows below.
  function paint(x, y) {
    const erases = element("erase").checked;
    const radius = Math.max(element("size").value / 2, 0.71); // large enough to reach a token from any point
    const isUnder = (row, column) => Math.hypot(column + 0.5 - x, row + 0.5 - y) <= radius;
    const isInRows = (row) => (erases ? row <= y : row >= Math.floor(y));
    for (let row = 0; row < model.side; row++) {
      for (let column = 0; column < model.side; column++) {
        if (!(model.rows ? isInRows(row) : isUnder(row, column))) continue;
        pen.fillStyle = CHEQUERED[(row + column) % 2];
        if (erases) pen.clearRect(column, row, 1, 1);
        else pen.fillRect(column, row, 1, 1);
      }
    }
  }

  // {picture, mask} as data links, or {} if no image is open.
  function content() {
    if (!isOpen) return {};
    const whole = document.createElement("canvas");
    whole.width = whole.height = size();
    const context = whole.getContext("2d");
    context.imageSmoothingEnabled = false;
    context.drawImage(mask, 0, 0, whole.width, whole.height);
    context.globalCompositeOperation = "source-in"; // the painted area becomes white
    context.fillStyle = "white";
    context.fillRect(0, 0, whole.width, whole.height);
    context.globalCompositeOperation = "destination-over"; // the rest becomes black
    context.fillStyle = "black";
    context.fillRect(0, 0, whole.width, whole.height);
    return { picture: picture.toDataURL("image/png"), mask: whole.toDataURL("image/png") };
  }

  return { setModel, openLink, content };
}
