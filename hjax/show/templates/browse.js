"use strict";
// Samples and histograms of any step: sliders over what the page holds of them.
const kept = JSON.parse(document.getElementById("samples").textContent);

function html(name, className, text) {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

function chips(answer) {
  const made = answer.scores.map(([name, text]) => {
    const chip = html("span", "chip", name + " ");
    chip.append(html("b", "", text));
    return chip;
  });
  if (answer.stop_reason) {
    const count = answer.turns.length;
    const learned = answer.calls ? " learned from, " : ", ";
    made.push(html("span", "chip", count + (count === 1 ? " turn" : " turns") + learned + answer.stop_reason));
  } else if (answer.truncated) made.push(html("span", "chip", "cut at the limit"));
  return made.flatMap(chip => [chip, document.createTextNode(" ")]);
}

// The calls of a session: chains of calls, and those that branch off. What a row learns from has
// the row's colour.
function chains(found) {
  return found.map(chain => {
    const made = html("div", "chain");
    for (const call of chain.calls) {
      const own = call.color >= 0 ? " c" + call.color : "", shown = html("div", "call");
      shown.append(html("div", "head" + (own && " learned" + own), call.head));
      const line = (role, name, text) => {
        const made = html("div", "line");
        made.append(html("span", "role", role), html("span", name, text));
        shown.append(made);
      };
      for (const [role, text] of call.said) line(role, "text prompt", text);
      line("answer", "text" + (own && " drawn" + own), call.answer);
      made.append(shown);
    }
    if (chain.branches.length) {
      const branches = html("div", "branches");
      branches.append(...chains(chain.branches));
      made.append(branches);
    }
    return made;
  });
}

// A response, or the turns of an episode; what the policy drew, and learns from, is shaded.
function said(answer) {
  if (answer.calls) {
    const session = html("div", "session");
    session.append(...chains(answer.calls));
    return [session];
  }
  if (!answer.turns) return [html("span", "text", answer.response)];
  return answer.turns.flatMap(turn => {
    const action = html("div");
    action.append(html("span", "text drawn", turn.action));
    const notes = [turn.reward && "reward " + turn.reward, !turn.valid && "invalid",
      turn.fresh && "history replaced"];
    for (const note of notes) if (note) action.append(" ", html("span", "chip", note));
    return [action, html("div", "text prompt", turn.observation)];
  });
}

function sampleRow(answer) {
  const row = html("tr"), cell = html("td");
  cell.append(html("span", "text prompt", answer.calls ? "" : answer.prompt), " ", ...said(answer), html("br"), ...chips(answer));
  row.append(cell);
  return row;
}

function showTraining(place, rows) {
  place.replaceChildren(...rows.map(sampleRow));
}

// The prompt stays where it is: the last column has its answer at the chosen step.
function showHeldOut(place, rows, step) {
  for (const row of place.children) {
    const cell = row.lastElementChild, answer = rows.find(r => r.index === Number(row.dataset.index));
    cell.replaceChildren();
    cell.dataset.head = "step " + step;
    if (answer) cell.append(...said(answer), ...chips(answer));
  }
}

function showHistogram(place, row) {
  const found = row[place.dataset.of];
  if (!found) return;
  const most = Math.max(...found.counts, 1);
  place.querySelectorAll("rect").forEach((bar, i) => {
    const height = Math.round(1000 * found.counts[i] / most) / 10;
    bar.setAttribute("height", height);
    bar.setAttribute("y", 110 - height);
    bar.querySelector("title").textContent = String(found.counts[i]);
  });
  place.querySelector(".low").textContent = valueText(found.low);
  place.querySelector(".high").textContent = valueText(found.high);
  place.querySelector(".most").textContent = String(most);
}

for (const slider of document.querySelectorAll("input[data-browse]")) {
  const found = kept[slider.dataset.browse];
  slider.max = found.steps.length - 1;
  slider.value = slider.max;
  slider.addEventListener("input", () => {
    const at = Number(slider.value), step = found.steps[at], rows = found.rows[at];
    slider.nextElementSibling.textContent = "step " + step;
    const place = document.getElementById(slider.dataset.place);
    if (slider.dataset.browse === "train") {
      showTraining(place, rows);
      document.getElementById("shown-step").textContent = "Step " + step;
    } else if (slider.dataset.browse === "eval") {
      showHeldOut(place, rows, step);
      document.getElementById("held-out-head").textContent = step === found.steps[0]
        ? "before training (step " + step + ")" : "after step " + step;
    } else {
      showHistogram(place, rows);
    }
  });
}

// All kept episodes by their return, end and number of turns, the latest first.
const episodes = document.getElementById("episodes");
if (episodes) {
  const choice = name => document.querySelector(`select[data-episodes="${name}"]`);
  const found = ["train", "eval"].flatMap(kind => kept[kind].steps.flatMap((step, i) =>
    kept[kind].rows[i].map(answer => ({ kind, step, answer })))).sort((a, b) => b.step - a.step);
  for (const reason of [...new Set(found.map(each => each.answer.stop_reason))].sort())
    choice("stop").append(new Option(reason, reason));
  const longest = Math.max(...found.map(each => each.answer.turns.length), 1);
  for (let turns = 1; turns <= longest; turns *= 2)
    choice("turns").append(new Option(turns + " or more", turns));
  const returns = { above: x => x > 0, zero: x => x === 0, below: x => x < 0, none: x => x === null };
  const show = () => {
    const [kind, sign, stop, turns] = ["kind", "return", "stop", "turns"].map(name => choice(name).value);
    const chosen = found.filter(({ answer, ...each }) => (!kind || each.kind === kind)
      && (!sign || returns[sign](answer.return)) && (!stop || answer.stop_reason === stop)
      && answer.turns.length >= Number(turns));
    document.getElementById("episodes-count").textContent =
      `${chosen.length} of ${found.length} kept episodes` + (chosen.length > 12 ? ", the last 12 of them:" : "");
    episodes.replaceChildren(...chosen.slice(0, 12).map(each => {
      const row = sampleRow(each.answer);
      row.firstChild.prepend(html("div", "note",
        `step ${each.step}, ${each.kind === "eval" ? "held-out" : "training"}`));
      return row;
    }));
  };
  for (const select of document.querySelectorAll("select[data-episodes]")) select.addEventListener("change", show);
  show();
}
