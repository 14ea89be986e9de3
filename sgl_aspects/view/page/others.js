// Traces that are neither of a request nor of a step: functions that were traced by name, the loading of a model.

function otherList(run, open) {
  const longest = run.others.reduce((most, other) => Math.max(most, other.duration), 1);
  const list = new VirtualList({
    label: "Other traces",
    open,
    rowHeight: 32,
    sortedBy: "duration",
    className: "others",
    columns: [
      { key: "start", title: "Began", hint: "since the run began", className: "number hide-narrow", text: duration },
      {
        key: "name",
        title: "Name",
        className: "mode",
        draw: (cell, other) => {
          cell.textContent = cell.title = other.name;
          cell.classList.toggle("error", other.isError);
        },
      },
      { key: "duration", title: "Duration", className: "number strong", text: duration },
      {
        key: "share",
        title: "Of the longest",
        className: "wide",
        value: (other) => other.duration,
        draw: (cell, other) => bars(cell, [["forward", 0, other.duration]], 0, longest),
      },
    ],
  });
  list.setItems(run.others);
  return list;
}

function otherPanel(other, { close }) {
  const { run } = other;
  const same = run.others.filter((one) => one.name === other.name).map((one) => one.duration);
  return panel(
    other.name,
    close,
    el(
      "p",
      { class: "verdict" },
      el("strong", {}, duration(other.duration)),
      same.length > 1 ? `, ${times(other.duration / Math.max(median(same), 1))} the median of ${count(same.length)} of its name.` : ".",
    ),
    waterfall(run, other, other.start, other.end),
    attributeTable([["process", run.process[other.index]], ...run.attributes(other.index)], true),
  );
}
