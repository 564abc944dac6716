"use strict";
const tip = document.getElementById("tip");
function show(text, event) {
  tip.textContent = text;
  tip.style.opacity = 1;
  const left = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8);
  const above = event.clientY + 18 + tip.offsetHeight > innerHeight;
  tip.style.left = left + "px";
  tip.style.top = (above ? event.clientY - tip.offsetHeight - 10 : event.clientY + 18) + "px";
}
function hide() { tip.style.opacity = 0; }
for (const span of document.querySelectorAll("[data-tip]")) {
  span.addEventListener("mousemove", event => show(span.dataset.tip, event));
  span.addEventListener("mouseleave", hide);
}
