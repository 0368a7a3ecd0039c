// Links to pictures: an address holds what the form asks for.

// The query of a link, from the body of a request to /api/images.
export function queryOf({ model, label, prompt, negative_prompt: negative, seed, methods, settings }) {
  const subject = prompt === undefined ? { label } : { prompt, ...(negative && { negative }) };
  const query = new URLSearchParams({ model, ...subject, seed });
  for (const method of methods) query.append("method", method);
  for (const [name, value] of Object.entries(settings)) if (value !== "") query.append(name, value);
  return "?" + query;
}

// The link to a finished picture, from the settings that ran; null if a part of it was given, which no link can hold.
export function linkOf(model, { method, label, prompt, negative_prompt, seed, known, family, ...settings }) {
  if (known) return null;
  const common = model.options.map(({ name }) => name);
  const isCommon = ([name]) => common.includes(name);
  const own = Object.entries(settings).filter((entry) => !isCommon(entry)).map((entry) => entry.join("="));
  return queryOf({
    model: model.name,
    label: labelOf(model, label),
    prompt,
    negative_prompt,
    seed,
    methods: [[method, ...own].join(":")],
    settings: Object.fromEntries(Object.entries(settings).filter(isCommon)),
  });
}

// A class by name, or by number if several have its name.
function labelOf({ classes }, label) {
  if (label === undefined) return "none";
  const isUnique = classes.indexOf(classes[label]) === classes.lastIndexOf(classes[label]);
  return isUnique ? classes[label] : label;
}

// What a query asks for, or null if it names no model.
export function askedBy(query) {
  const values = new URLSearchParams(query);
  if (!values.has("model")) return null;
  const { model, label, prompt, negative, seed, method, ...settings } = Object.fromEntries(values);
  return { model, label, prompt, negative, seed, methods: values.getAll("method").map(partsOf), settings };
}

// The name and the options of a method that is written as "cool-sd:delta=1.5:gamma=4".
function partsOf(text) {
  const [name, ...options] = text.split(":");
  return { name, options: Object.fromEntries(options.map((option) => option.split("="))) };
}
