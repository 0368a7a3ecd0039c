// Fields for the settings of requests: a list for words, a number with its range otherwise.

const TITLES = {
  cfg: "guidance scale", cfg_schedule: "guidance schedule", num_iter: "iterations", num_sampling_steps: "denoising steps",
};
const SLIDERS = { // numbers that are turned, not typed
  budget: { min: 0, max: 3, step: 0.05, unit: "nats per token", ends: ["exact", "faster"] },
};

// A field for an option of /api/models; an empty one takes the default.
export function fieldOf({ name, help, words, text, integer, low, high, default: usual }) {
  const field = document.createElement("label");
  field.className = "setting";
  field.title = help;
  field.textContent = TITLES[name] ?? name.replaceAll("_", " ");
  const input = field.appendChild(document.createElement(words ? "select" : "input"));
  input.name = name;
  if (words) {
    input.append(new Option(usual ?? "automatic", ""), ...words.filter((word) => word !== usual).map((word) => new Option(word)));
    return field;
  }
  if (text) {
    input.placeholder = usual ?? "automatic";
    return field;
  }
  if (name in SLIDERS && usual !== null) {
    const { unit, ends, ...range } = SLIDERS[name];
    Object.assign(input, { type: "range", ...range, value: usual, ariaLabel: name });
    const shown = document.createElement("span");
    shown.className = "value";
    const track = document.createElement("span");
    track.className = "track";
    track.append(ends[0], input, ends[1]);
    field.classList.add("slider");
    field.append(" ", shown, track);
    input.oninput = () => { shown.textContent = input.ariaValueText = `${input.value} ${unit}`; };
    input.oninput();
    return field;
  }
  Object.assign(input, { type: "number", step: integer ? 1 : "any", placeholder: usual ?? "automatic" });
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
