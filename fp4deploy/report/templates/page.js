/* What the pages do beyond reading: theme, contents, sorting of tables, larger pictures, the line between two pictures.
   No page needs it to be read. */
(() => {
  "use strict";
  const root = document.documentElement;
  const make = (tag, name, text) => {
    const made = document.createElement(tag);
    if (name) made.className = name;
    if (text !== undefined) made.textContent = text;
    return made;
  };

  const bar = make("nav", "bar-top");
  const button = make("button", "theme", "dark / light");
  button.type = "button";
  button.addEventListener("click", () => {
    const dark = getComputedStyle(root).colorScheme === "dark"
      || (root.style.colorScheme === "" && matchMedia("(prefers-color-scheme: dark)").matches);
    root.style.colorScheme = dark ? "light" : "dark";
    document.dispatchEvent(new Event("theme"));
  });
  const headings = [...document.querySelectorAll("main h2")];
  if (headings.length > 2) {
    const list = make("details", "contents");
    list.append(make("summary", "", "Contents"));
    for (const [number, heading] of headings.entries()) {
      heading.id ||= `part-${number}`;
      const link = make("a", "", heading.textContent);
      link.href = `#${heading.id}`;
      list.append(link);
    }
    list.addEventListener("click", (event) => { if (event.target.tagName === "A") list.open = false; });
    bar.append(list);
  }
  bar.append(button);
  document.querySelector("main")?.prepend(bar);

  const value = (row, column) => {
    const text = (row.cells[column]?.textContent ?? "").trim().replace("−", "-");
    const number = /^[+-]?[\d.]/.test(text) ? parseFloat(text) : NaN;
    return Number.isNaN(number) ? text : number * ({ kB: 1e3, MB: 1e6, GB: 1e9 }[text.split(" ")[1]] ?? 1);
  };
  const compare = (a, b) => (typeof a === typeof b ? (a < b ? -1 : a > b ? 1 : 0) : typeof a === "number" ? -1 : 1);
  for (const head of document.querySelectorAll("thead th")) {
    head.tabIndex = 0;
    const sort = () => {
      const body = head.closest("table").tBodies[0];
      const down = head.getAttribute("aria-sort") === "ascending";
      for (const other of head.parentElement.cells) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const rows = [...body.rows].map((row) => [value(row, head.cellIndex), row]);
      const known = rows.filter(([each]) => each !== "–" && each !== "");
      known.sort((a, b) => (down ? -1 : 1) * compare(a[0], b[0]));
      body.append(...known.map(([, row]) => row), ...rows.filter((each) => !known.includes(each)).map(([, row]) => row));
    };
    head.addEventListener("click", sort);
    head.addEventListener("keydown", (event) => { if (event.key === "Enter") sort(); });
  }

  for (const pair of document.querySelectorAll(".pair")) {
    const range = pair.querySelector("input");
    range.addEventListener("input", () => pair.style.setProperty("--at", `${range.value}%`));
  }

  const dialog = make("dialog", "large");
  dialog.addEventListener("click", () => dialog.close());
  document.body.append(dialog);
  for (const image of document.querySelectorAll("figure > img")) {
    image.classList.add("zooms");
    image.addEventListener("click", () => {
      const copy = make("img");
      copy.src = image.src;
      copy.alt = image.alt;
      dialog.replaceChildren(copy);
      dialog.showModal();
    });
  }
})();
