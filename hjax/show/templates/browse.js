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
  if (answer.truncated) made.push(html("span", "chip", "cut at the limit"));
  return made.flatMap(chip => [chip, document.createTextNode(" ")]);
}

function showTraining(place, rows) {
  place.replaceChildren(...rows.map(answer => {
    const row = html("tr"), cell = html("td");
    cell.append(html("span", "text prompt", answer.prompt), " ", html("span", "text", answer.response),
      html("br"), ...chips(answer));
    row.append(cell);
    return row;
  }));
}

// The prompt stays where it is: the last column has its answer at the chosen step.
function showHeldOut(place, rows, step) {
  for (const row of place.children) {
    const cell = row.lastElementChild, answer = rows.find(r => r.index === Number(row.dataset.index));
    cell.replaceChildren();
    cell.dataset.head = "step " + step;
    if (answer) cell.append(html("div", "text", answer.response), ...chips(answer));
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
