// Inputs: a slider over stops, and beside it a box for any number (any of the stops, in a page without a server).
const $ = (id) => document.getElementById(id);
const make = (tag, attributes = {}, ...children) => {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
};

const ORDER_WORDS = {
  shuffled: "shuffled again in each epoch", single: "a single epoch, any order", fixed: "fixed: shuffled once, kept",
  sequential: "sequential, as stored",
  poisson: "poisson: drawn (DP-SGD)", "balls-in-bins": "balls in bins: split once",
  "random-allocation": "random allocation: by epoch", "cyclic-poisson": "cyclic poisson: by groups",
  "truncated-poisson": "truncated poisson: capped", // draws and splits are secret, as `needs` says; no more fits
};
const inWords = (order) => ORDER_WORDS[order] || order;
const FIELDS = [
  ["dataset_size", "Data set size", "number of examples, which is public"], ["batch_size", "Batch size", "examples in a step"],
  ["epochs", "Epochs", "passes over the data"], ["epsilon", "Epsilon", "the privacy budget"],
  ["delta", "Delta", "a tenth of 1 / data set size, unless you set it"], ["order", "Order of the data", "what you can promise about batches"],
  ["memory", "Memory for noise", "copies of the model that may be kept, or any"], ["momentum", "Momentum", "of SGD"],
];
// The delta that is taken where none is given, as anyorder.plan takes it: a tenth of 1 / units, rounded down to one digit.
const tenth = (units) => {
  const power = String(10 * units - 1).length;
  return Number(`${Math.floor(10 ** power / (10 * units))}e-${power}`);
};
const show = (value) => value === null ? "any" : value !== 0 && (value < 1e-3 || value >= 1e15) ? value.toExponential() : String(value);

function slider(name, label, hint, stops, value, changed, free) {
  const id = `in-${name}`;
  let now = value;
  const range = make("input", {type: "range", id, min: 0, max: stops.length - 1, step: 1, "aria-describedby": `${id}-wrong`});
  const box = make("input", {type: "text", id: `${id}-box`, inputmode: "decimal", "aria-label": `${label}, as a number`,
    spellcheck: "false", "aria-describedby": `${id}-wrong`});
  const size = (v) => v === null ? Infinity : v;
  const nearest = (v) => {
    const far = (s) => s === v ? 0 : s === null || v === null ? Infinity : s > 0 && v > 0 ? Math.abs(Math.log(s / v)) : Math.abs(s - v) + 1;
    return stops.reduce((best, s, i) => far(s) < far(stops[best]) ? i : best, v === null ? stops.length - 1 : 0);
  };
  const draw = () => {
    range.value = nearest(now);
    range.setAttribute("aria-valuetext", show(now));
    box.value = show(now);
  };
  range.addEventListener("input", () => { now = stops[Number(range.value)]; draw(); changed(); });
  box.addEventListener("change", () => {
    const text = box.value.trim().replaceAll("_", "");
    const told = name === "memory" && (text === "any" || text === "") ? null : Number(text);
    if (text === "" && told !== null || Number.isNaN(told)) { draw(); refuse(name, `${label}: “${box.value}” is not a number`); return; }
    now = free ? told : stops[nearest(told)];
    draw();
    changed();
  });
  draw();
  const field = make("div", {class: "field", id: `field-${name}`},
    make("div", {class: "top"}, make("label", {for: id}, label), box), range, make("small", {}, hint),
    make("div", {class: "wrong", id: `${id}-wrong`, role: "alert"}));
  return {field, get value() { return now; }, set value(v) { now = v; draw(); },
    set disabled(v) { range.disabled = v; box.disabled = v; }};
}

function choice(name, label, hint, options, value, changed) {
  const id = `in-${name}`;
  const select = make("select", {id, "aria-describedby": `${id}-wrong`});
  for (const [key, words] of options) select.append(make("option", {value: key}, words));
  select.value = value;
  select.addEventListener("change", changed);
  const field = make("div", {class: "field", id: `field-${name}`}, make("label", {for: id}, label), select,
    make("small", {}, hint), make("div", {class: "wrong", id: `${id}-wrong`, role: "alert"}));
  return {field, get value() { return select.value; }, set value(v) { select.value = v; }};
}

function refuse(name, message) {
  const field = $(`field-${name}`);
  if (field === null) return false;
  field.classList.add("refused");
  field.querySelector(".wrong").textContent = message;
  return true;
}

function accept() {
  for (const field of document.querySelectorAll(".field.refused")) {
    field.classList.remove("refused");
    field.querySelector(".wrong").textContent = "";
  }
}
