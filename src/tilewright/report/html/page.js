"use strict";

// A table's titles become buttons that sort it; numbers go down first, as the largest is what one looks for.
for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0];
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = head.textContent;
    head.replaceChildren(button);
    button.addEventListener("click", () => {
      const numeric = head.classList.contains("n");
      const first = numeric && head.textContent !== "#" ? "descending" : "ascending";
      const other = first === "ascending" ? "descending" : "ascending";
      const order = head.getAttribute("aria-sort") === first ? other : first;
      heads.forEach((h) => h.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", order);
      const key = (row) => {
        const cell = row.cells[column];
        return numeric ? Number(cell.dataset.v ?? "-1") : cell.textContent.trim();
      };
      const sign = order === "ascending" ? 1 : -1;
      const rows = [...body.rows].sort((a, b) => {
        const [x, y] = [key(a), key(b)];
        return sign * (numeric ? x - y : x.localeCompare(y));
      });
      body.append(...rows);
    });
  });
}

// Rows whose text has every word of the search stay.
const search = document.querySelector("form.search");
if (search) {
  const rows = [...document.getElementById("table").tBodies[0].rows];
  const texts = rows.map((row) => row.textContent.toLowerCase());
  const input = search.querySelector("input");
  const output = search.querySelector("output");
  const show = () => {
    const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
    rows.forEach((row, i) => (row.hidden = !words.every((word) => texts[i].includes(word))));
    const left = rows.filter((row) => !row.hidden).length;
    output.textContent = words.length ? `${left} of ${rows.length} shown` : "";
  };
  search.hidden = false;
  search.addEventListener("submit", (event) => event.preventDefault());
  input.addEventListener("input", show);
  show();
}

// A drawing is one stop of the Tab key; arrows, Home and End go through its links.
for (const drawing of document.querySelectorAll("[data-rove]")) {
  const links = [...drawing.querySelectorAll("a")];
  drawing.addEventListener("keydown", (event) => {
    const at = links.indexOf(document.activeElement);
    const to = { ArrowDown: at + 1, ArrowRight: at + 1, ArrowUp: at - 1, ArrowLeft: at - 1, Home: 0, End: links.length - 1 }[event.key];
    if (at < 0 || to === undefined || !links[to]) return;
    event.preventDefault();
    links[to].focus();
  });
  drawing.addEventListener("focusin", (event) => {
    const here = event.target.closest("a");
    for (const link of links) link.setAttribute("tabindex", link === here ? 0 : -1);
  });
}

// What is pointed at lights up wherever else it stands.
for (const one of document.querySelectorAll("[data-key]")) {
  const same = document.querySelectorAll(`[data-key="${one.dataset.key}"]`);
  const light = (on) => () => same.forEach((element) => element.classList.toggle("lit", on));
  one.addEventListener("mouseenter", light(true));
  one.addEventListener("mouseleave", light(false));
}

// A link into something closed or hidden opens it, and goes there.
function reveal() {
  const target = location.hash && document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (!target) return;
  for (let e = target; e; e = e.parentElement) if (e.tagName === "DETAILS") e.open = true;
  if (target.hidden) {
    search.querySelector("input").value = "";
    search.querySelector("input").dispatchEvent(new Event("input"));
  }
  target.scrollIntoView({ block: target.matches("svg a, tr") ? "center" : "start" });
  (target.querySelector("summary") ?? target.querySelector("a") ?? target).focus({ preventScroll: true });
}
addEventListener("hashchange", reveal);
document.addEventListener("click", (event) => {
  if (event.target.closest("a")?.getAttribute("href") === location.hash) reveal(); // the same link again changes no hash
});
reveal();

const unfold = document.querySelector(".unfold");
if (unfold) {
  const button = unfold.querySelector("button");
  unfold.hidden = false;
  button.addEventListener("click", () => {
    const open = button.textContent === "Open all";
    document.querySelectorAll("details.account").forEach((account) => (account.open = open));
    button.textContent = open ? "Close all" : "Open all";
  });
}
