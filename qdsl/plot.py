"""Results as a picture: time over the number of tokens, one panel a shape, a line a contender, the floor dashed."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from qdsl import results
from qdsl.diagnostic import Error
from qdsl.results import Cell, Results

SUFFIXES = (".pdf", ".png", ".svg")


def require(path: Path) -> None:
    """Raises Error if no picture can be drawn into this file."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise Error("a plot needs matplotlib, which is not installed; run `pip install 'qdsl[plot]'`") from None
    if path.suffix not in SUFFIXES:
        raise Error(f"{path}: a plot is a {', '.join(SUFFIXES)} file; name one")
    results.writable(path)


def draw(found: Results, path: Path) -> None:
    """Draw results into a file; raises Error as `require` does."""
    require(path)
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullLocator

    timed = [cell for cell in found.cells if cell.us is not None]
    if not timed:
        raise Error(f"{path}: there is nothing to draw, no cell has a time")
    shapes = sorted({(cell.K, cell.N) for cell in timed})
    columns = min(3, len(shapes))
    rows = -(-len(shapes) // columns)
    figure = Figure(figsize=(1 + 5 * columns, 0.8 + 4 * rows), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False).ravel()
    several = len({(cell.scheme, cell.group) for cell in timed}) > 1
    names = {cell: _label(cell) + (f", {cell.scheme} group {cell.group}" if several else "") for cell in timed}
    ours_first = sorted(timed, key=lambda cell: cell.contender != "qdsl")
    colors = {name: f"C{at % 10}" for at, name in enumerate(dict.fromkeys(names[cell] for cell in ours_first))}
    for panel, (k, n) in zip(panels, shapes, strict=False):
        here = [cell for cell in timed if (k, n) == (cell.K, cell.N)]
        for label, color in colors.items():
            line = sorted((cell.M, cell.us) for cell in here if names[cell] == label)
            if line:
                width = 2.4 if label.startswith("qdsl") else 1.2
                panel.plot(*zip(*line, strict=True), color=color, marker="o", ms=3, lw=width, label=label)
        for name, floor in _floors(here).items():
            panel.plot(*zip(*floor, strict=True), color="black", linestyle="--", lw=1, label=name)
        panel.set(title=f"K {k}, N {n}", xlabel="tokens M", ylabel="µs", xscale="log", yscale="log")
        found_m = sorted({cell.M for cell in here})
        ticks = [m for m in found_m if m & (m - 1) == 0] or found_m
        panel.set_xticks(ticks, list(map(str, ticks)))
        panel.xaxis.set_minor_locator(NullLocator())
        panel.grid(which="both", alpha=0.2)
    for panel in panels[len(shapes) :]:
        panel.set_axis_off()
    handles: dict = {}
    for panel in panels:
        handles |= {label: handle for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=6, fontsize="small")
    figure.suptitle(f"{', '.join(sorted({cell.scheme for cell in timed}))} on {found.meta.device}, {found.meta.commit}")
    figure.savefig(path, dpi=120)


def _label(cell: Cell) -> str:
    """A line's name: contenders called after their type carry it already."""
    words = [cell.contender]
    if not cell.contender.endswith(("16", "32")):
        words.append(cell.dtype)
    return " ".join(words)


def _floors(cells: Iterable[Cell]) -> dict[str, list[tuple[int, float]]]:
    """The floor of every scheme and group over M; one line where they are the same."""
    lines: dict[tuple, dict[int, float]] = {}
    for cell in cells:
        lines.setdefault((cell.scheme, cell.group), {})[cell.M] = cell.floor_us
    if len(lines) == 1:
        (line,) = lines.values()
        return {"floor": sorted(line.items())}
    return {f"floor, {scheme} group {group}": sorted(line.items()) for (scheme, group), line in lines.items()}
