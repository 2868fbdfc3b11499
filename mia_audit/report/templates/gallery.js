"use strict";
(() => {
  const STEP = 30;
  const list = document.getElementById("gallery");
  const control = (name) => document.getElementById("gallery-" + name);
  const cards = Array.from(list.children);
  let room = STEP;

  // Missing numbers sort last; ties keep the server's order, which is by exposure.
  const keys = {
    exposure: () => 0,
    score: (card) => (card.dataset.score === "" ? Infinity : -Number(card.dataset.score)),
    rate: (card) => (card.dataset.rate === "" ? Infinity : Number(card.dataset.rate)),
    label: (card) => Number(card.dataset.label),
  };

  function show() {
    const key = keys[control("sort").value];
    const subset = control("subset").value;
    const label = control("class").value;
    const fits = (card) =>
      (subset === "" || card.dataset.subset === subset) && (label === "" || card.dataset.label === label);
    const found = cards.filter(fits).sort((a, b) => key(a) - key(b) || 0);
    cards.forEach((card) => (card.hidden = true));
    found.forEach((card, place) => {
      card.hidden = place >= room;
      list.append(card);
    });
    const visible = Math.min(room, found.length);
    control("count").textContent = `${visible} of ${found.length} shown`;
    control("more").hidden = visible === found.length;
  }

  for (const name of ["sort", "subset", "class"]) {
    control(name).addEventListener("change", () => {
      room = STEP;
      show();
    });
  }
  control("more").addEventListener("click", () => {
    room += STEP;
    show();
  });
  control("controls").hidden = false;
  show();
})();
