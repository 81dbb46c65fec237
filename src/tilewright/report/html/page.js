"use strict";
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
      const first = numeric && column > 0 ? "descending" : "ascending";
      const other = first === "ascending" ? "descending" : "ascending";
      const order = head.getAttribute("aria-sort") === first ? other : first;
      heads.forEach((h) => h.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", order);
      const key = (row) => {
        const cell = row.cells[column];
        return numeric ? Number(cell.dataset.v ?? "-1") : cell.textContent;
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
for (const point of document.querySelectorAll(".point")) {
  const row = document.getElementById("step-" + point.dataset.step);
  point.addEventListener("mouseenter", () => row.classList.add("lit"));
  point.addEventListener("mouseleave", () => row.classList.remove("lit"));
}
