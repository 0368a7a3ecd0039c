// Fields for the settings of requests: a list for words, a number with its range otherwise.

const TITLES = { cfg: "guidance scale", num_iter: "iterations", num_sampling_steps: "denoising steps" };
const SLIDERS = { budget: { min: 0, max: 3, step: 0.05 } }; // numbers that are turned, not typed

// A field for an option of /api/models; an empty one takes the default.
export function fieldOf({ name, help, words, text, integer, low, high, default: usual }) {
  const field = document.createElement("label");
  field.className = "setting";
  field.title = help;
  field.textContent = TITLES[name] ?? name.replaceAll("_", " ");
  const input = field.appendChild(document.createElement(words ? "select" : "input"));
  input.name = name;
  if (words) {
    const first = usual === null ? "chosen for you" : `${usual} (default)`;
    input.append(new Option(first, ""), ...words.filter((word) => word !== usual).map((word) => new Option(word)));
    return field;
  }
  if (text) {
    input.placeholder = usual ?? "chosen for you";
    return field;
  }
  if (name in SLIDERS && usual !== null) {
    Object.assign(input, { type: "range", ...SLIDERS[name], value: usual });
    const shown = field.appendChild(document.createElement("output"));
    input.oninput = () => { shown.textContent = input.value; };
    input.oninput();
    return field;
  }
  Object.assign(input, { type: "number", step: integer ? 1 : "any", placeholder: usual ?? "chosen for you" });
  if (low !== null) input.min = low;
  if (high !== null) input.max = high;
  input.onchange = () => input.classList.toggle("invalid", !input.checkValidity());
  return field;
}

// Gives a field a value of its option, as in a link; an absent or usual value leaves a list at its default.
export function put(input, { words, default: usual }, value) {
  if (input.type === "range") {
    input.value = value ?? usual;
    input.oninput();
    return;
  }
  input.value = value === undefined || (words && value === String(usual)) ? "" : value;
}

// The fields of a method's options: only those that apply to the chosen values of the others are shown.
export function makeOptions(options) {
  const fields = options.map(fieldOf);
  const inputs = fields.map((field) => field.querySelector("[name]"));

  function valueOf(name) {
    const index = options.findIndex((option, i) => option.name === name && !fields[i].hidden);
    return index < 0 ? undefined : inputs[index].value || String(options[index].default);
  }

  function update() {
    // an option comes after those that it depends on
    options.forEach(({ only_with: needs }, i) => { fields[i].hidden = Boolean(needs) && !needs[1].includes(valueOf(needs[0])); });
  }

  inputs.forEach((input) => input.addEventListener("change", update));
  update();
  return {
    fields,
    text: () => inputs.filter((input, i) => input.value && !fields[i].hidden).map(({ name, value }) => `:${name}=${value}`).join(""),
    fill(values) {
      inputs.forEach((input, i) => {
        if (!fields[i].hidden) put(input, options[i], values[input.name]);
        update();
      });
    },
  };
}
