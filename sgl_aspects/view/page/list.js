// A table of any length: only the rows in view are in the page. Sorted by its headers, moved in by keys.

const SPARE_ROWS = 4;

class VirtualList {
  /**
   * columns: [{ key, title, hint, className, value(item) for sorting, text(value), draw(cell, item) }]: the value
   * is item[key] unless it says otherwise, and shown as text unless there is a `draw`. `open(item)` is called for
   * the row that is clicked or entered.
   */
  constructor({ label, columns, open, sortedBy, descending = true, rowHeight = 36, className = "" }) {
    Object.assign(this, { label, open, rowHeight, sortedBy, descending });
    this.columns = columns.map((column) => ({ value: (item) => item[column.key], text: (value) => value ?? "–", ...column }));
    this.items = [];
    this.active = 0;
    this.chosen = null;
    this.rows = new Map();
    this.heads = columns.map((column) => this._head(column));
    this.spacer = el("div", { class: "list-spacer", role: "presentation" });
    this.scroller = el("div", { class: "list-rows", role: "rowgroup", onscroll: () => this._schedule() }, this.spacer);
    this.element = el(
      "div",
      { class: `list ${className}`, role: "grid", "aria-label": label, onkeydown: (event) => this._key(event) },
      el("div", { role: "rowgroup" }, el("div", { class: "list-row list-head", role: "row", "aria-rowindex": "1" }, this.heads)),
      this.scroller,
    );
    new ResizeObserver(() => this._schedule()).observe(this.scroller);
  }

  setItems(items) {
    this.items = [...items];
    this.element.setAttribute("aria-rowcount", String(items.length + 1));
    this._sort();
  }

  /** Marks a row and brings it into view; null marks none. */
  choose(item) {
    this.chosen = item;
    const at = this.items.indexOf(item);
    if (at >= 0) this._show((this.active = at));
    this._redraw();
  }

  _head(column) {
    const button = el(
      "button",
      {
        type: "button",
        title: column.hint,
        onclick: () => {
          this.descending = this.sortedBy === column.key ? !this.descending : column.key !== "start";
          this.sortedBy = column.key;
          this._sort();
        },
      },
      column.title,
    );
    return el("div", { class: `cell ${column.className ?? ""}`, role: "columnheader", "data-key": column.key }, button);
  }

  _sort() {
    const column = this.columns.find(({ key }) => key === this.sortedBy) ?? this.columns[0];
    const sign = this.descending ? -1 : 1;
    const keyed = this.items.map((item) => [column.value(item) ?? (this.descending ? -Infinity : Infinity), item]);
    keyed.sort(([a], [b]) => (a < b ? -sign : a > b ? sign : 0));
    this.items = keyed.map(([, item]) => item);
    for (const head of this.heads) {
      const isKey = head.dataset.key === column.key;
      head.setAttribute("aria-sort", isKey ? (this.descending ? "descending" : "ascending") : "none");
    }
    const at = this.items.indexOf(this.chosen);
    this.active = Math.max(at, 0);
    this.scroller.scrollTop = 0;
    if (at >= 0) this._show(at);
    this._redraw();
  }

  _show(at) {
    const top = at * this.rowHeight;
    const height = this.scroller.clientHeight;
    if (top < this.scroller.scrollTop) this.scroller.scrollTop = top;
    else if (top + this.rowHeight > this.scroller.scrollTop + height)
      this.scroller.scrollTop = top + this.rowHeight - height;
  }

  _redraw() {
    for (const row of this.rows.values()) row.remove();
    this.rows.clear();
    this._draw();
  }

  _schedule() {
    this.frame ??= requestAnimationFrame(() => {
      this.frame = null;
      this._draw();
    });
  }

  _draw() {
    const whole = `${this.items.length * this.rowHeight}px`;
    this.spacer.style.height = this.scroller.style.height = whole; // as high as its style sheet lets it be
    const height = this.scroller.clientHeight || 400;
    const first = Math.max(0, Math.floor(this.scroller.scrollTop / this.rowHeight) - SPARE_ROWS);
    const last = Math.min(this.items.length, first + Math.ceil(height / this.rowHeight) + 2 * SPARE_ROWS);
    for (const [at, row] of this.rows) {
      if ((at < first || at >= last) && !row.contains(document.activeElement)) {
        row.remove();
        this.rows.delete(at);
      }
    }
    const wanted = this.active >= first && this.active < last ? this.active : first + (first ? SPARE_ROWS : 0);
    for (let at = first; at < last; at++) {
      if (!this.rows.has(at)) this.rows.set(at, this.scroller.appendChild(this._row(at)));
      this.rows.get(at).tabIndex = at === wanted ? 0 : -1;
    }
  }

  _row(at) {
    const item = this.items[at];
    const row = el(
      "div",
      {
        class: `list-row${item === this.chosen ? " chosen" : ""}`,
        role: "row",
        "aria-rowindex": String(at + 2),
        "aria-selected": String(item === this.chosen),
        onclick: () => {
          this.active = at;
          this.open(item);
        },
      },
      this.columns.map((column) => {
        const cell = el("div", { class: `cell ${column.className ?? ""}`, role: "gridcell" });
        if (column.draw) column.draw(cell, item);
        else cell.textContent = column.text(column.value(item));
        return cell;
      }),
    );
    row.dataset.at = String(at);
    row.style.transform = `translateY(${at * this.rowHeight}px)`;
    row.style.height = `${this.rowHeight}px`;
    return row;
  }

  _key(event) {
    const row = event.target.closest(".list-rows > [role=row]");
    if (!row || event.ctrlKey || event.metaKey || event.altKey) return;
    const page = Math.max(1, Math.floor(this.scroller.clientHeight / this.rowHeight) - 1);
    const at = Number(row.dataset.at);
    const last = this.items.length - 1;
    const moves = { ArrowDown: at + 1, ArrowUp: at - 1, PageDown: at + page, PageUp: at - page, Home: 0, End: last };
    if (event.key in moves) {
      this.active = Math.min(Math.max(moves[event.key], 0), last);
      this._show(this.active);
      this._draw();
      this.rows.get(this.active)?.focus({ preventScroll: true });
    } else if (event.key === "Enter" || event.key === " ") {
      this.active = at;
      this.open(this.items[at]);
    } else return;
    event.preventDefault();
  }
}
