// Tables and pictures. A number is shown with five digits; all of them are in data-value.
const SVG = "http://www.w3.org/2000/svg";
const drawn = (tag, attributes = {}, ...children) => {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
};
const digits = (value, count = 5) => {
  if (value === null || value === undefined) return "";
  if (value === 0) return "0";
  const size = Math.abs(value);
  return size >= 1e6 || size < 1e-4 ? value.toExponential(count - 2) : String(Number(value.toPrecision(count)));
};
// A promise is never shown smaller than it is: rounded up.
const promised = (value, count = 5) => {
  if (!(value > 0 && Number.isFinite(value))) return digits(value, count);
  const unit = 10 ** (Math.floor(Math.log10(value)) + 1 - count);
  return digits(Math.ceil(value / unit - 1e-9) * unit, count);
};

const COLUMNS = [
  ["error", "error"], ["ratio", "over bound"], ["vectors", "memory"], ["cost", "step"],
  ["noise_multiplier", "noise multiplier"], ["epsilon", "epsilon"],
  ["sampled_epsilon", "a Poisson accountant prints"], ["known_epsilon", "if batches were known"],
];

function drawTable(answer, chosen, pick) {
  const secret = answer.secret;
  const columns = COLUMNS.filter(([key]) => key === "ratio" ? answer.lower_bound !== null
    : key === "known_epsilon" ? answer.rows.some((row) => row.known_epsilon !== null) : true);
  const head = make("tr", {}, make("th", {scope: "col"}, "mechanism"), ...columns.map(([, words]) => make("th", {scope: "col"}, words)));
  const body = answer.rows.map((row) => {
    const button = make("button", {type: "button"}, row.name);
        button.addEventListener("click", () => pick(row.name));
    const first = make("td", {title: row.mechanism || row.name}, row.exact && !row.reference ? button : row.name);
    if (row.best) first.append(make("span", {class: "badge"}, "best"));
    const cells = columns.map(([key]) => {
      const value = row[key];
      const cell = make("td", {"data-column": key}, value === null && key === "sampled_epsilon" ? "…"
        : key.endsWith("epsilon") ? promised(value) : digits(value, key === "cost" ? 3 : 5));
      if (value !== null && value !== undefined) cell.setAttribute("data-value", JSON.stringify(value));
      if (key === "sampled_epsilon" && value !== null && !secret && !row.reference && value < row.epsilon) {
        cell.classList.add("lie");
        cell.title = "not valid in this order";
      }
      if (key === "sampled_epsilon" && value === undefined) cell.textContent = "–";
      return cell;
    });
    const line = make("tr", {"data-name": row.name}, first, ...cells);
    if (row.name === chosen) button.setAttribute("aria-current", "true");
    line.className = row.best ? "best" : row.reference ? "reference" : "";
    return line;
  });
  $("mechanisms").replaceChildren(make("thead", {}, head), make("tbody", {}, ...body));
}

// What the bars show, in a sentence.
function bars(answer, rows) {
  if (answer.rough) return `DP-SGD's noise without sampling leaves ${digits(rows[0].error, 3)} clip norms of noise in the weights. Other mechanisms leave less noise, and follow.`;
  const best = rows.find((row) => row.best), plain = rows.find((row) => row.name === "independent");
  const most = `${best.name} leaves the least noise of those that this order allows, ${digits(best.error, 3)} clip norms`;
  if (!plain || plain === best) return `${most}. A shorter bar is a better model at the same epsilon.`;
  return `${most}. DP-SGD's independent noise leaves ${digits(plain.error / best.error, 3)} times as much. A shorter bar is a better model at the same epsilon.`;
}

function drawBars(answer) {
  const rows = [...answer.rows].sort((a, b) => a.error - b.error);
  $("bars-say").textContent = bars(answer, rows);
  const width = Math.max(300, Math.min(900, $("bars").clientWidth || 700));
  const needed = Math.max(...rows.map((row) => row.name.length)) * 8 + 16; // of bold text of 13 pixels, at most
  const left = width < 500 || needed > 0.55 * width ? 0 : needed, step = left ? 26 : 40; // longer names stand above their bars
  const top = answer.lower_bound === null ? 6 : 26, height = top + rows.length * step + 6;
  const values = [...rows.map((row) => row.error), ...(answer.lower_bound === null ? [] : [answer.lower_bound])];
  const largest = Math.max(...values);
  const place = (value) => Math.max(2, (value / largest) * (width - left - 74));
  const svg = drawn("svg", {viewBox: `0 0 ${width} ${height}`, role: "img",
    "aria-label": `Error of ${rows.length} mechanisms; the table has the numbers`});
  rows.forEach((row, i) => {
    const y = top + i * step;
    const group = drawn("g", {class: row.best ? "best" : row.reference ? "reference" : ""});
    const name = left ? drawn("text", {x: left - 8, y: y + 17, "text-anchor": "end"}, row.name) : drawn("text", {x: 0, y: y + 13}, row.name);
    const bar = y + (left ? 4 : 18);
    group.append(name, drawn("rect", {class: "bar", x: left, y: bar, width: place(row.error), height: 17, rx: 3}),
      drawn("text", {x: left + place(row.error) + 6, y: bar + 13}, digits(row.error, 4)));
    svg.append(group);
  });
  if (answer.lower_bound !== null) {
    const x = left + place(answer.lower_bound);
    const spans = left ? [[20, height]] : rows.map((_, i) => [top + i * step + 16, top + i * step + 37]); // not through names
    svg.append(...spans.map(([from, to]) => drawn("line", {class: "bound", x1: x, x2: x, y1: from, y2: to})),
      drawn("text", x + 300 < width ? {class: "bound-text", x: x + 6, y: 14} : {class: "bound-text", x: width - 2, y: 14, "text-anchor": "end"}, `with public batches nothing is below ${digits(answer.lower_bound, 4)}`));
  }
  $("bars").replaceChildren(svg);
}

function drawSummary(answer) {
  const best = answer.rows.find((row) => row.best) ?? answer.rows[0], plain = answer.rows.find((row) => row.name === "independent");
  const fact = (words, value) => make("div", {}, make("small", {}, words), make("b", {}, value));
  const facts = [fact("steps", String(answer.steps)), fact(answer.rough ? "first answer" : "best mechanism", best.name), fact("its error", digits(best.error, 4))];
  if (plain && plain !== best) facts.push(fact("below independent noise", `${digits(plain.error / best.error, 3)} ×`));
  facts.push(fact("epsilon, valid in this order", promised(answer.epsilon, 4)));
  if (best.known_epsilon !== null) facts.push(fact("if batches were known", promised(best.known_epsilon, 4)));
  const percent = (share) => `${promised(100 * share, 3)} %`;
  const attacks = answer.attacks.map(([fpr, tpr]) => make("tr", {}, make("td", {}, percent(fpr)), make("td", {}, percent(tpr))));
  $("summary").replaceChildren(...facts, make("div", {class: "wide"}, `${answer.order}. Needs: ${answer.needs}.`),
    make("table", {id: "attacks"}, make("caption", {}, "What it means: the strongest attacker"),
      make("thead", {}, make("tr", {}, make("th", {scope: "col"}, "wrongly accuses, of those who took no part"), make("th", {scope: "col"}, "finds at most, of those who did"))),
      make("tbody", {}, ...attacks)));
}

// Perceived lightness falls evenly: dark is much noise, or a large epsilon.
const SHADES = ["#f2f0a1", "#b7dd7a", "#72c684", "#3aa78d", "#2b8390", "#325f8c", "#3d3b7d", "#3a1a5c"];
function drawHeat(sheet, batches, epochs, key, told, take) {
  const values = [...sheet.values()].filter((cell) => !cell.refused).map((cell) => cell[key]);
  const low = Math.log(Math.min(...values)), high = Math.log(Math.max(...values));
  const shade = (value) => Math.round((high > low ? (Math.log(value) - low) / (high - low) : 0) * (SHADES.length - 1));
  const left = 64, wide = 78, tall = 38, width = left + batches.length * wide + 4, height = 26 + epochs.length * tall + 26;
  const svg = drawn("svg", {viewBox: `0 0 ${width} ${height}`, role: "group", "aria-label": "Batch sizes across, epochs down"});
  batches.forEach((batch, i) => svg.append(drawn("text", {class: "soft", x: left + (i + 0.5) * wide, y: 16, "text-anchor": "middle"}, String(batch))));
  svg.append(drawn("text", {class: "soft", x: left + batches.length * wide / 2, y: height - 6, "text-anchor": "middle"}, "batch size"),
    drawn("text", {class: "soft", x: 0, y: 16}, "epochs"));
  epochs.forEach((count, j) => {
    const y = 26 + j * tall;
    svg.append(drawn("text", {class: "soft", x: left - 10, y: y + 24, "text-anchor": "end"}, String(count)));
    batches.forEach((batch, i) => {
      const cell = sheet.get(`${batch}|${count}`), gone = !cell || cell.refused, value = gone ? null : cell[key];
      const rank = gone ? 0 : shade(value);
      const words = !cell ? "not yet" : cell.refused ? cell.refused
        : `batch ${batch}, ${count} epochs, ${cell.steps} steps: noise to batch ${digits(cell.ratio, 4)}, epsilon ${promised(cell.epsilon, 4)}, `
          + `noise multiplier ${digits(cell.noise_multiplier, 4)}, error ${digits(cell.error, 4)} (${cell.name})`;
      const group = drawn("g", {class: `cell ${gone ? "none" : rank > 3 ? "light" : "dark"}`, tabindex: 0, role: gone ? "img" : "button", "aria-label": words,
        "data-batch": batch, "data-epochs": count});
      if (!gone) group.setAttribute("data-value", JSON.stringify(value));
      group.append(drawn("rect", {x: left + i * wide + 1, y: y + 1, width: wide - 2, height: tall - 2, rx: 4, ...(gone ? {} : {fill: SHADES[rank]})}),
        drawn("text", {x: left + (i + 0.5) * wide, y: y + 24, "text-anchor": "middle"}, !cell ? "…" : gone ? "–" : (key === "epsilon" ? promised : digits)(value, 3)));
      for (const event of ["focus", "mouseenter"]) group.addEventListener(event, () => told(words));
      if (!gone) {
        group.addEventListener("click", () => take(batch, count));
        group.addEventListener("keydown", (event) => {
          if (event.key === "Enter" || event.key === " ") { event.preventDefault(); take(batch, count); }
        });
      }
      svg.append(group);
    });
  });
  const kept = document.activeElement?.closest?.(".cell");
  const place = kept && [kept.getAttribute("data-batch"), kept.getAttribute("data-epochs")];
  $("heat").replaceChildren(svg);
  if (place) $("heat").querySelector(`[data-batch="${place[0]}"][data-epochs="${place[1]}"]`)?.focus();
}
