/* Heatmaps of a run, drawn on canvases from the JSON in the page. A canvas is drawn when it comes into view. */
(() => {
  "use strict";
  const { maps, colours, missing } = JSON.parse(document.getElementById("data").textContent);
  const at = (id) => document.getElementById(id);
  const ink = () => getComputedStyle(document.body).color;
  const soft = () => getComputedStyle(document.querySelector(".note")).color;
  const LETTER = 11;
  const FONT = `${LETTER}px system-ui, "Segoe UI", Roboto, sans-serif`;
  const pen = document.createElement("canvas").getContext("2d");
  pen.font = FONT;
  const wide = (texts) => Math.ceil(Math.max(0, ...texts.map((text) => pen.measureText(text).width)));
  const number = (value) => (value === null ? "undefined" : String(Number(value.toPrecision(4))));

  const ramps = Object.fromEntries(Object.entries(colours).map(([name, stops]) => [
    name, stops.map((hex) => [1, 3, 5].map((place) => parseInt(hex.slice(place, place + 2), 16)))]));
  const colour = (map, value) => {
    if (value === null) return missing;
    const { low, high, log } = map;
    const share = log ? Math.log(value / low) / Math.log(high / low) : (value - low) / (high - low);
    const stops = ramps[map.colours];
    const place = Math.min(1, Math.max(0, share)) * (stops.length - 1);
    const first = Math.min(stops.length - 2, Math.floor(place));
    const mixed = stops[first].map((from, each) => Math.round(from + (place - first) * (stops[first + 1][each] - from)));
    return `rgb(${mixed.join(",")})`;
  };
  const ends = (row) => row.filter((value) => value !== null).at(-1) ?? null;
  const order = (map) => {
    const rows = map.rows.map((_, place) => place);
    const how = at("sort").value;
    if (!map.layers || how === "network") return rows;
    if (how === "name") return rows.sort((a, b) => map.rows[a].localeCompare(map.rows[b], "en", { numeric: true }));
    const sign = how === "high" ? -1 : 1;
    return rows.sort((a, b) => sign * ((ends(map.values[a]) ?? sign * Infinity) - (ends(map.values[b]) ?? sign * Infinity)));
  };

  class Picture {
    constructor(map) {
      this.map = map;
      this.all();
      this.figure = document.createElement("figure");
      this.figure.id = map.id;
      this.figure.append(Object.assign(document.createElement("figcaption"), { textContent: map.title }));
      this.figure.append(Object.assign(document.createElement("p"), { className: "note", textContent: map.note }));
      this.canvas = document.createElement("canvas");
      const frame = Object.assign(document.createElement("div"), { className: "scroll" });
      frame.append(this.canvas);
      this.figure.append(frame);
      this.canvas.addEventListener("pointermove", (event) => this.read(event));
      this.canvas.addEventListener("pointerleave", () => { at("tip").hidden = true; });
      this.canvas.addEventListener("pointerdown", (event) => { this.from = this.cell(event); });
      this.canvas.addEventListener("pointerup", (event) => this.enlarge(event));
      this.canvas.addEventListener("dblclick", () => { this.all(); this.draw(); });
    }

    all() { this.view = [0, 0, this.map.rows.length, this.map.columns.length]; }

    layout() {
      const { map } = this;
      this.order = order(map);
      const [top, left, bottom, right] = this.view;
      this.rows = this.order.slice(top, bottom);
      this.columns = map.columns.map((_, place) => place).slice(left, right);
      const zoom = Number(at("zoom").value) * Math.min(4, Math.max(1, map.columns.length / this.columns.length));
      const matrix = !map.layers;
      this.high = zoom * (matrix ? Math.max(3, Math.min(13, 420 / map.rows.length)) : 17);
      this.title = LETTER + 8;  // the axis title has a strip of its own, outside the labels
      this.left = this.title + wide(this.rows.map((row) => map.rows[row])) + 8;
      this.area = [0, this.rows.length * this.high];
      const gap = 14;
      const scale = 12 + 8 + wide(this.ticks().map(number)) + 10 + this.title;
      const free = at("maps").clientWidth - this.left - gap - scale;
      const room = Math.max(120, Math.min(620, free));
      if (matrix) {  // square cells, small enough for the scale to stay in sight
        this.high = Math.min(this.high, zoom * Math.max(3, free / map.columns.length));
        this.area[1] = this.rows.length * this.high;
      }
      this.width = zoom * (matrix ? this.high / zoom : Math.min(60, Math.max(2, room / map.columns.length)));
      this.area[0] = this.columns.length * this.width;
      this.bar = this.left + this.area[0] + gap;
      this.total = [this.bar + scale, this.area[1] + 4 + LETTER + 6 + this.title];
    }

    ticks() {
      const { low, high, log, ticks } = this.map;
      if (ticks) return ticks;
      const count = Math.max(2, Math.min(7, Math.floor(this.area[1] / 40)));
      return Array.from({ length: count }, (_, place) => (log
        ? low * (high / low) ** (place / (count - 1)) : this.snapped(low + ((high - low) * place) / (count - 1))));
    }

    snapped(value) { return Math.abs(value) < 1e-9 * (this.map.high - this.map.low) ? 0 : value; }

    draw() {
      const { map, canvas } = this;
      this.layout();
      const sharp = window.devicePixelRatio || 1;
      [canvas.width, canvas.height] = this.total.map((size) => Math.ceil(size * sharp));
      [canvas.style.width, canvas.style.height] = this.total.map((size) => `${size}px`);
      const c = canvas.getContext("2d");
      c.scale(sharp, sharp);
      c.font = FONT;
      c.textBaseline = "middle";
      const gap = Math.min(this.width, this.high) > 8 ? 0.5 : 0;
      this.rows.forEach((row, y) => this.columns.forEach((column, x) => {
        c.fillStyle = colour(map, map.values[row][column]);
        c.fillRect(this.left + x * this.width, y * this.high, this.width - gap + 0.2 * !gap, this.high - gap + 0.2 * !gap);
      }));
      c.fillStyle = ink();
      c.textAlign = "right";
      const skip = Math.ceil((LETTER + 2) / this.high);
      this.rows.forEach((row, y) => { if (y % skip === 0) c.fillText(map.rows[row], this.left - 5, (y + 0.5) * this.high); });
      c.textAlign = "center";
      const labels = this.columns.map((column) => map.columns[column]);
      const step = Math.ceil((wide(labels) + 8) / this.width);
      labels.forEach((text, x) => { if (x % step === 0) c.fillText(text, this.left + (x + 0.5) * this.width, this.area[1] + 4 + LETTER / 2); });
      c.fillStyle = soft();
      c.fillText(map.column_title, this.left + this.area[0] / 2, this.area[1] + 4 + LETTER + 6 + this.title / 2);
      this.turned(c, map.row_title, this.title / 2, Math.max(this.area[1] / 2, pen.measureText(map.row_title).width / 2));
      for (let y = 0; y < this.area[1]; y += 1) {
        const share = 1 - y / this.area[1];
        const value = map.log ? map.low * (map.high / map.low) ** share : map.low + share * (map.high - map.low);
        c.fillStyle = colour(map, value);
        c.fillRect(this.bar, y, 12, 1.2);
      }
      c.fillStyle = ink();
      c.textAlign = "left";
      for (const tick of this.ticks()) {
        const share = map.log ? Math.log(tick / map.low) / Math.log(map.high / map.low) : (tick - map.low) / (map.high - map.low);
        const y = Math.min(this.area[1] - LETTER / 2, Math.max(LETTER / 2, (1 - share) * this.area[1]));
        c.fillText(number(tick), this.bar + 18, y);
      }
      c.fillStyle = soft();
      this.turned(c, map.unit, this.total[0] - this.title / 2, Math.max(this.area[1] / 2, pen.measureText(map.unit).width / 2));
    }

    turned(c, text, x, y) {
      c.save();
      c.textAlign = "center";
      c.translate(x, y);
      c.rotate(-Math.PI / 2);
      c.fillText(text, 0, 0);
      c.restore();
    }

    cell(event) {
      const box = this.canvas.getBoundingClientRect();
      const x = Math.floor((event.clientX - box.left - this.left) / this.width);
      const y = Math.floor((event.clientY - box.top) / this.high);
      return x >= 0 && y >= 0 && x < this.columns.length && y < this.rows.length ? [y, x] : null;
    }

    read(event) {
      const found = this.cell(event);
      const tip = at("tip");
      tip.hidden = found === null;
      if (!found) return;
      const row = this.rows[found[0]];
      const column = this.columns[found[1]];
      const { map } = this;
      tip.textContent = `${map.rows[row]} · ${map.column_title} ${map.columns[column]}: ${number(map.values[row][column])} ${map.unit}`;
      tip.style.left = `${Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8)}px`;
      tip.style.top = `${event.clientY + 18}px`;
    }

    enlarge(event) {
      const to = this.cell(event);
      if (!this.from || !to || (this.from[0] === to[0] && this.from[1] === to[1])) return;
      const [top, left] = this.view;
      const [y, x] = [0, 1].map((axis) => [this.from[axis], to[axis]].sort((a, b) => a - b));
      this.view = [top + y[0], left + x[0], top + y[1] + 1, left + x[1] + 1];
      this.draw();
    }
  }

  let shown = [];
  const seen = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      if (entry.isIntersecting) { seen.unobserve(entry.target); entry.target.picture.draw(); }
    }
  }, { rootMargin: "600px" });
  const show = () => {
    const words = at("find").value.toLowerCase().split(/\s+/).filter(Boolean);
    const chosen = maps.filter((map) => map.model === at("model").value && map.group === at("group").value
      && words.every((word) => map.title.toLowerCase().includes(word)));
    shown = chosen.map((map) => new Picture(map));
    at("maps").replaceChildren(...shown.map((picture) => picture.figure));
    at("list").replaceChildren(...chosen.map((map) => {
      const link = Object.assign(document.createElement("a"), { href: `#${map.id}`, textContent: map.name });
      return link;
    }));
    for (const picture of shown) { picture.figure.picture = picture; seen.observe(picture.figure); }
    if (!chosen.length) at("maps").textContent = "Nothing of that name.";
  };
  const again = () => { for (const picture of shown) if (picture.area) picture.draw(); };
  const groups = () => {
    const before = at("group").value;
    const names = [...new Set(maps.filter((map) => map.model === at("model").value).map((map) => map.group))];
    at("group").replaceChildren(...names.map((name) => new Option(name)));
    if (names.includes(before)) at("group").value = before;
    show();
  };
  document.querySelector("form.controls").addEventListener("submit", (event) => event.preventDefault());
  at("model").addEventListener("change", groups);
  at("group").addEventListener("change", show);
  at("find").addEventListener("input", show);
  for (const id of ["sort", "zoom"]) at(id).addEventListener("input", again);
  document.addEventListener("theme", again);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", again);
  addEventListener("resize", again);
  at("tip").hidden = true;
  groups();
})();
