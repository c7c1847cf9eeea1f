// Where answers come from: the server of the page, or the grid in it. Both call told(piece) for each piece.
async function asked(kind, question, told, signal) {
  const reply = await fetch(`ask/${kind}`, {method: "POST", signal, headers: {"content-type": "application/json"}, body: JSON.stringify(question)});
  if (!reply.ok) throw new Error((await reply.text()).trim());
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const {done, value} = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) if (line && !signal.aborted) told(JSON.parse(line));
  }
}

function served() {
  return {
    plan: (settings, told, signal) => asked("plan", settings, told, signal),
    sampled: (settings, noises, told, signal) => asked("sampled", {settings, noises}, told, signal),
    sweep: (question, told, signal) => asked("sweep", question, told, signal),
  };
}

// The grid holds every mechanism at sigma 1, and sigma at every epsilon and delta: error = sigma * error at sigma 1.
function kept(grid) {
  const NAMES = ["name", "error", "last", "ratio", "vectors", "cost", "noise_multiplier"];
  const fits = (s) => grid.known[[s.order, s.batch_size, s.epochs, s.memory].join("|")];
  const budget = (s) => grid.sigmas[[s.epsilon, s.delta].join("|")];
  const sampled = (s) => grid.sampled[[s.batch_size, s.epochs, s.epsilon, s.delta].join("|")];
  const missing = () => ({kind: "error", field: null, message: "this page holds no answer for these settings"});
  const row = (values, sigma, s, epsilon, i) => {
    const found = Object.fromEntries(NAMES.map((name, j) => [name, values[j]]));
    for (const name of ["error", "last", "noise_multiplier"]) found[name] *= sigma;
    const claims = grid.claims[[s.order, s.batch_size, s.epochs, s.memory, s.epsilon, s.delta].join("|")] || {};
    return {...found, best: i === 0, exact: i === 0 || values[0] !== "dense", reference: false, epsilon, known_epsilon: null, sampled_epsilon: claims[i]};
  };
  return {
    async plan(s, told) {
      if (s.order === "poisson") {
        const found = sampled(s);
        if (!found) return told(missing());
        return told(found.refused ? {kind: "error", ...found.refused} : found.plan);
      }
      const fit = fits(s), noise = budget(s);
      if (!fit || !noise) return told(missing());
      if (fit.refused) return told({kind: "error", ...fit.refused});
      const rows = fit.rows.map((values, i) => row(values, noise.sigma, s, noise.epsilon, i));
      const other = sampled(s);
      if (other && other.row) rows.push(other.row);
      told({kind: "plan", steps: fit.steps, order: fit.order, needs: fit.needs, secret: false, epsilon: noise.epsilon,
        delta: s.delta, batch_size: s.batch_size, lower_bound: fit.bound * noise.sigma, attacks: noise.attacks, rows});
      told({kind: "end"});
    },
    async sampled() {},
    async sweep(question, told) {
      for (const batch_size of question.batch_sizes) for (const epochs of question.epoch_counts) {
        const s = {...question.base, batch_size, epochs}, cell = {kind: "cell", batch_size, epochs};
        const isSampled = s.order === "poisson";
        const sheet = grid.sweeps[[isSampled ? "auto" : question.mechanism, question.measure, s.order, isSampled ? null : s.memory, s.delta,
          question.measure === "noise" ? s.epsilon : question.ratio].join("|")];
        const found = sheet && sheet[`${batch_size}|${epochs}`];
        told(found ? {...cell, ...found} : {...cell, refused: "this page holds no answer for these settings"});
      }
      told({kind: "end"});
    },
  };
}
