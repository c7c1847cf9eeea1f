// The page: settings in, answers out. The newest question wins; an older one is dropped.
const config = JSON.parse($("config").textContent);
const source = config.grid ? kept(config.grid) : served();
const state = {tab: "plan", answer: null, chosen: null, sheet: new Map(), controls: {}, sweep: {}};
const WAIT = config.grid ? 0 : 200; // milliseconds of quiet before a question
const running = {};

function settings() {
  const s = Object.fromEntries(Object.entries(state.controls).map(([name, control]) => [name, control.value]));
  if (s.order === "single") s.order = "shuffled";
  return s;
}

function status(text, kind = "") {
  if (kind !== "busy") { clearInterval(state.clock); state.begun = null; }
  $("status").textContent = text;
  $("status").className = kind;
}

// What is being done, with the seconds that it has taken since the question.
function busy(text) {
  const begun = state.begun ??= performance.now();
  clearInterval(state.clock);
  const tell = () => {
    const passed = Math.floor((performance.now() - begun) / 1000);
    status(`${text} …${passed ? ` ${passed} s` : ""}`, "busy");
  };
  tell();
  state.clock = setInterval(tell, 1000);
}

// Runs ask(told, signal) as the only one of its name; true when it came to its end.
async function only(name, ask, told) {
  running[name]?.abort();
  const control = running[name] = new AbortController();
  let whole = true;
  const piece = (one) => {
    if (control.signal.aborted) return;
    if (one.kind === "error") {
      whole = false;
      status(one.field && refuse(one.field, one.message) ? "This cannot be planned: see the marked input." : one.message, "wrong");
    } else if (one.kind === "superseded") {
      whole = false;
      status("Another window asked in between: change a setting to ask again.", "wrong");
    } else told(one);
  };
  try {
    await ask(piece, control.signal);
  } catch (problem) {
    if (control.signal.aborted) return false;
    whole = false;
    status(`No answer: ${problem.message}. Is “anyorder planner” still running?`, "wrong");
  }
  return whole && !control.signal.aborted;
}

function changed() {
  const size = state.controls.dataset_size.value, delta = state.controls.delta;
  if (!config.grid && Number.isInteger(size) && size > 0) {
    if (delta.value === tenth(state.size)) delta.value = tenth(size);
    state.size = size;
  }
  if (state.controls.order.value === "single") state.controls.epochs.value = 1;
  state.controls.epochs.disabled = state.controls.order.value === "single";
  accept();
  clearTimeout(state.timer);
  for (const control of Object.values(running)) control.abort();
  $(`panel-${state.tab}`).classList.add("stale");
  busy("computing");
  if (WAIT) state.timer = setTimeout(ask, WAIT); else ask();
}
const ask = () => state.tab === "plan" ? askPlan() : askSweep();

async function askPlan() {
  const s = settings(), begun = performance.now();
  state.answer = null;
  const done = await only("plan", (told, signal) => source.plan(s, told, signal), (piece) => {
    if (piece.kind === "progress") busy(piece.text);
    else if (piece.kind === "plan") {
      state.answer = piece; state.asked = s; paint();
      if (piece.rough) busy("A first answer is shown. Better mechanisms are being fitted");
    }
    else if (piece.kind === "row") { state.answer.rows.push(piece.row); paint(); busy(`${state.answer.rows.length} mechanisms shown, more come`); }
  });
  if (!done || !state.answer) return;
  status(`Answered in ${((performance.now() - begun) / 1000).toFixed(2)} s.`);
  if (config.grid || state.answer.secret) return;
  const answer = state.answer;
  await only("sampled", (told, signal) => source.sampled(s, answer.rows.map((row) => row.noise_multiplier), told, signal), (piece) => {
    if (piece.kind === "sampled") {
      for (const row of answer.rows) if (row.noise_multiplier === piece.noise_multiplier) row.sampled_epsilon = piece.epsilon;
    } else if (piece.kind === "row") answer.rows.push(piece.row);
    else if (piece.kind === "note") status(piece.text);
    paint();
  });
}

function paint() {
  const answer = state.answer;
  $("panel-plan").classList.remove("stale");
  answer.rows.sort((a, b) => Number(b.best) - Number(a.best) || a.error - b.error);
  if (!answer.rows.some((row) => row.name === state.chosen && row.exact && !row.reference)) state.chosen = null;
  const chosen = state.chosen ?? answer.rows[0].name;
  drawSummary(answer);
  drawBars(answer);
  const focused = document.activeElement?.closest?.("#mechanisms tr")?.dataset.name;
  drawTable(answer, chosen, (name) => { state.chosen = name; paint(); });
  if (focused) [...document.querySelectorAll("#mechanisms tbody tr")].find((row) => row.dataset.name === focused)?.querySelector("button")?.focus();
  copies(answer.rows.find((row) => row.name === chosen));
}

function copies(row) {
  const s = state.asked, auto = row.best, number = (value) => show(value);
  const mechanism = auto ? "auto" : row.name;
  $("chosen").textContent = `${row.name}${auto ? ", which is the best" : ""}. Choose another in the table.`;
  const words = ["anyorder plan", `--dataset-size ${s.dataset_size}`, `--batch-size ${s.batch_size}`, `--epochs ${s.epochs}`,
    `--epsilon ${number(s.epsilon)}`, `--delta ${number(s.delta)}`, `--order ${s.order}`];
  if (mechanism !== "auto") words.push(`--mechanism '${mechanism}'`);
  if (s.memory !== null) words.push(`--memory ${s.memory}`);
  if (s.momentum) words.push(`--momentum ${s.momentum}`);
  $("command").textContent = words.join(" ");
  const args = [`dataset_size=${s.dataset_size}`, `batch_size=${s.batch_size}`, `epochs=${s.epochs}`, `epsilon=${number(s.epsilon)}`,
    `delta=${number(s.delta)}`, `order="${s.order}"`];
  if (mechanism !== "auto") args.push(`mechanism="${mechanism}"`);
  if (s.memory !== null) args.push(`limits=ao.Limits(memory=${s.memory})`);
  if (s.momentum) args.push(`optimizer=ao.SGD(momentum=${s.momentum})`);
  $("python").textContent = `import anyorder as ao\n\nplan = ao.plan(\n    ${args.slice(0, 3).join(", ")},\n    ${args.slice(3).join(", ")},\n)\nprint(plan)`;
}

async function askSweep() {
  const s = settings(), measure = state.sweep.measure.value, begun = performance.now();
  const near = (stops, value, count) => {
    if (config.grid || stops.length <= count) return stops;
    const at = stops.findIndex((stop) => stop >= value), from = Math.max(0, Math.min(stops.length - count, at - count / 2));
    return stops.slice(from, from + count);
  };
  const batches = near(config.choices.batch_size.filter((b) => b <= s.dataset_size && (config.grid || Number.isInteger(Math.log2(b)))), s.batch_size, 8);
  const epochs = state.controls.order.value === "single" ? [1] : config.grid ? config.choices.epochs : [1, 2, 3, 5, 8, 12, 20];
  const sheet = state.sheet = new Map(), key = measure === "noise" ? "ratio" : "epsilon";
  const question = {base: s, batch_sizes: batches, epoch_counts: epochs, mechanism: state.sweep.mechanism.value, measure, ratio: state.sweep.ratio.value};
  state.sweep.ratio.disabled = measure === "noise";
  $("sweep-title").replaceChildren(measure === "noise" ? `Noise to batch at epsilon ${show(s.epsilon)}` : `Epsilon at noise to batch ${show(question.ratio)}`,
    make("small", {}, `delta ${show(s.delta)}, ${s.dataset_size} examples, ${inWords(s.order)}; bright is better. Tab or the pointer reads a cell, Enter or a click plans it.`));
  $("heat-says").textContent = measure === "noise" ? "Each cell shows how much noise the model gets at this epsilon, measured against the batch: smaller trains a better model."
    : "Each cell shows the epsilon that this much noise would give: smaller is more private.";
  const told = (words) => { $("readout").textContent = words; };
  const take = (batch, count) => { // the plan of a cell
    state.controls.batch_size.value = batch;
    state.controls.epochs.value = count;
    tab("plan", true);
  };
  let last = 0;
  const done = await only("sweep", (piece, signal) => source.sweep(question, piece, signal), (piece) => {
    if (piece.kind !== "cell") return;
    sheet.set(`${piece.batch_size}|${piece.epochs}`, piece);
    $("panel-sweep").classList.remove("stale");
    if (performance.now() - last > 60) { drawHeat(sheet, batches, epochs, key, told, take); last = performance.now(); }
    busy(`${sheet.size} of ${batches.length * epochs.length} cells`);
  });
  if (running.sweep?.signal.aborted) return;
  if (sheet.size) drawHeat(sheet, batches, epochs, key, told, take);
  if (done) status(`Answered in ${((performance.now() - begun) / 1000).toFixed(2)} s.`);
}

function tab(name, focus) {
  state.tab = name;
  for (const one of ["plan", "sweep"]) {
    $(`panel-${one}`).hidden = one !== name;
    $(`tab-${one}`).setAttribute("aria-selected", String(one === name));
    $(`tab-${one}`).tabIndex = one === name ? 0 : -1;
  }
  if (focus) $(`tab-${name}`).focus();
  changed();
}

function begin() {
  for (const [name, label, hint] of FIELDS) {
    const stops = config.choices[name];
    if (stops.length < 2 && name === "momentum") { state.controls[name] = {value: stops[0]}; continue; }
    const control = name === "order" ? choice(name, label, hint, stops.map((o) => [o, inWords(o)]), config.start.order, changed)
      : slider(name, label, hint, stops, config.start[name], changed, !config.grid);
    state.controls[name] = control;
    $("controls").append(control.field);
  }
  $("controls").addEventListener("submit", (event) => event.preventDefault());
  state.sweep.measure = choice("measure", "Show", "", [["noise", "noise to batch at this epsilon"], ["epsilon", "epsilon at this noise to batch"]], "noise", changed);
  state.sweep.mechanism = choice("mechanism", "Mechanism", "auto fits every kind: slow at first", [["independent", "independent (DP-SGD's noise)"],
    ["tree", "tree (DP-FTRL)"], ["blt", "blt: the best of them"], ["auto", "auto: the best of all"]], config.start.mechanism ?? "blt", changed);
  state.sweep.ratio = slider("ratio", "Noise to batch", "of the epsilons", config.choices.ratio, config.start.ratio, changed, !config.grid);
  $("sweep-controls").append(state.sweep.measure.field, state.sweep.mechanism.field, state.sweep.ratio.field);
  for (const name of ["plan", "sweep"]) {
    $(`tab-${name}`).addEventListener("click", () => tab(name));
    $(`tab-${name}`).addEventListener("keydown", (event) => {
      if (["ArrowLeft", "ArrowRight"].includes(event.key)) tab(name === "plan" ? "sweep" : "plan", true);
    });
  }
  for (const button of document.querySelectorAll("[data-copy]")) button.addEventListener("click", async () => {
    const place = $(button.dataset.copy);
    try { await navigator.clipboard.writeText(place.textContent); button.textContent = "Copied"; }
    catch { getSelection().selectAllChildren(place); button.textContent = "Selected"; }
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  });
  let width = innerWidth;
  addEventListener("resize", () => { if (innerWidth !== width && state.answer) { width = innerWidth; drawBars(state.answer); } });
  $("footer").textContent = config.grid ? config.grid.stated : `anyorder ${config.version}: every number is that of ao.plan. Nothing leaves this machine.`;
  state.size = config.start.dataset_size;
  changed();
}
begin();
