"use strict";
// What a page does when a browser runs scripts: another theme, the glossary where its terms stand,
// tables in another order, commands to copy. Without scripts all of it is still there to read.

(() => {
  const root = document.documentElement;
  const make = (tag, properties = {}, ...inside) => {
    const element = Object.assign(document.createElement(tag), properties);
    element.append(...inside);
    return element;
  };

  // --- light or dark: as the system has it, until somebody says otherwise
  const darkSystem = matchMedia("(prefers-color-scheme: dark)");
  const remembered = (value) => {
    try {  // a browser may keep nothing for pages from files
      if (value) localStorage.setItem("jfl-theme", value);
      return localStorage.getItem("jfl-theme");
    } catch { return null; }
  };
  const isDark = () => (root.dataset.theme ?? (darkSystem.matches ? "dark" : "light")) === "dark";
  const kept = remembered();
  if (kept === "light" || kept === "dark") root.dataset.theme = kept;
  const toggle = make("button", { type: "button", className: "theme" });
  const name = () => { toggle.textContent = isDark() ? "☀ Light" : "☾ Dark"; };
  const changed = () => name();
  toggle.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    remembered(root.dataset.theme);
    changed();
  });
  darkSystem.addEventListener("change", changed);
  name();
  document.querySelector("header").prepend(toggle);

  // --- the glossary, where the pointer or the focus is
  const tip = make("div", { className: "tip", id: "tip", hidden: true });
  tip.setAttribute("role", "tooltip");
  document.body.append(tip);
  let owner = null, leaving = 0;
  const show = (term) => {
    clearTimeout(leaving);
    const words = document.getElementById(term.getAttribute("aria-describedby"));
    owner = term;
    tip.replaceChildren(make("strong", {}, words.previousElementSibling.textContent), words.textContent);
    tip.hidden = false;
    const at = term.getBoundingClientRect(), width = root.clientWidth;
    const left = Math.max(16, Math.min(at.left, width - tip.offsetWidth - 16));
    const above = at.bottom + tip.offsetHeight + 8 > innerHeight && at.top > tip.offsetHeight + 8;
    tip.style.left = `${left + scrollX}px`;
    tip.style.top = `${(above ? at.top - tip.offsetHeight - 6 : at.bottom + 6) + scrollY}px`;
  };
  const hide = () => { tip.hidden = true; owner = null; };
  const hideSoon = () => { leaving = setTimeout(hide, 150); };  // time to reach the words themselves
  for (const term of document.querySelectorAll(".term")) {
    term.addEventListener("mouseenter", () => show(term));
    term.addEventListener("mouseleave", hideSoon);
    term.addEventListener("focus", () => show(term));
    term.addEventListener("blur", hideSoon);
    term.addEventListener("click", (event) => { event.preventDefault(); show(term); });
  }
  tip.addEventListener("mouseenter", () => clearTimeout(leaving));
  tip.addEventListener("mouseleave", hideSoon);
  addEventListener("keydown", (event) => { if (event.key === "Escape" && owner) hide(); });

  // --- tables in another order: up, down, as they were
  const NUMBER = /^[<>≤≥]?\s*([+-]?(?:\d[\d,]*\.?\d*|\.\d+)(?:e[+-]?\d+)?)(?![-.\w])/i;
  const value = (cell) => {
    const words = cell.textContent.trim();
    const found = NUMBER.exec(words);
    return { words, number: found ? Number(found[1].replaceAll(",", "")) : NaN };
  };
  const compare = (numbers) => (a, b) => numbers
    ? a.number - b.number
    : a.words.localeCompare(b.words, "en", { numeric: true, sensitivity: "base" });
  const sort = (table, column, direction) => {
    const body = table.tBodies[0];
    const rows = [...body.rows].map((row) => ({ row, key: value(row.cells[column]), at: Number(row.dataset.at) }));
    const filled = ({ key }) => key.words !== "" && key.words !== "none";
    const numbers = rows.filter(filled).every(({ key }) => !Number.isNaN(key.number));
    const order = compare(numbers);
    rows.sort((a, b) => {
      if (direction === 0) return a.at - b.at;
      if (filled(a) !== filled(b)) return filled(a) ? -1 : 1;  // what is empty stays at the end
      return direction * order(a.key, b.key) || a.at - b.at;
    });
    body.append(...rows.map(({ row }) => row));
  };
  for (const table of document.querySelectorAll("table")) {
    const rows = [...table.tBodies[0].rows];
    if (rows.length < 2) continue;
    rows.forEach((row, i) => { row.dataset.at = i; });
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, column) => {
      const button = make("button", { type: "button", className: "sort", ariaLabel: `Sort by ${head.textContent}` });
      button.addEventListener("click", () => {
        const next = { ascending: "descending", descending: "none" }[head.ariaSort] ?? "ascending";
        for (const other of heads) other.removeAttribute("aria-sort");
        if (next !== "none") head.setAttribute("aria-sort", next);
        sort(table, column, { ascending: 1, descending: -1, none: 0 }[next]);
      });
      head.append(button);
    });
  }

  // --- commands and settings to copy
  const copy = async (words) => {
    try { await navigator.clipboard.writeText(words); return true; } catch { /* not for this page */ }
    const area = make("textarea", { value: words });
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    return done;
  };
  for (const block of document.querySelectorAll("pre")) {
    const button = make("button", { type: "button" }, "Copy");
    button.addEventListener("click", async () => {
      button.textContent = (await copy(block.textContent)) ? "Copied" : "Not copied";
      setTimeout(() => { button.textContent = "Copy"; }, 1500);
    });
    const around = make("div", { className: "copied" });
    block.replaceWith(around);
    around.append(block, button);
  }

  // --- on paper all of it is open
  let closed = [];
  addEventListener("beforeprint", () => {
    closed = [...document.querySelectorAll("details:not([open])")];
    for (const each of closed) each.open = true;
  });
  addEventListener("afterprint", () => { for (const each of closed) each.open = false; });
})();
