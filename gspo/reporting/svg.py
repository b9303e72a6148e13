"""Small matplotlib figures as inline SVG whose colours are the page's: they follow its light and dark theme."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SERIES = tuple(f"#a000{i:02x}" for i in range(1, 9))
"""Colours of data. Stand-ins: the SVG holds `var(--c1)` to `var(--c8)` instead."""
TEXT, MUTED, GRID, BAND, EDGE = (f"#b0000{i}" for i in range(1, 6))
"""Stand-ins for `var(--text)`, `var(--muted)`, `var(--grid)`, `var(--band)` and `var(--edge)`."""

_VARIABLES = {c: f"var(--c{i})" for i, c in enumerate(SERIES, 1)} | {
    TEXT: "var(--text)",
    MUTED: "var(--muted)",
    GRID: "var(--grid)",
    BAND: "var(--band)",
    EDGE: "var(--edge)",
}
_WIDTHS_IN = {1: 5.4, 2: 5.4, 3: 4.1}  # by panels side by side; phones show it at nearly this size: letters stay legible
_HEIGHT_IN, _LEGEND_ROW_IN, _LEFT_IN, _RIGHT_IN, _BOTTOM_IN, _TOP_IN = 2.75, 0.21, 0.64, 0.16, 0.3, 0.1
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "gspo",
    "path.simplify": True,
    "font.size": 10.5,
    "text.color": TEXT,
    "axes.labelcolor": MUTED,
    "axes.edgecolor": GRID,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": GRID,
    "ytick.color": GRID,
    "xtick.labelcolor": MUTED,
    "ytick.labelcolor": MUTED,
    "ytick.left": False,
    "ytick.minor.left": False,
    "xtick.minor.bottom": False,
    "lines.linewidth": 1.7,
    "lines.solid_capstyle": "round",
    "legend.frameon": False,
    "legend.fontsize": 10.5,
    "legend.handlelength": 1.1,
    "legend.columnspacing": 2.2,  # on phones the page enlarges letters by a fifth
    "legend.handletextpad": 0.5,
}


def figure_svg(name: str, alt: str, draw: Callable[[Axes], None], *, beside: int = 1) -> str:
    """The SVG element that `draw` makes on one pair of axes: no ids in common with others, no links, no dates.

    name: letters, digits and hyphens; it keeps the element's ids apart. alt: what a screen reader says. beside: panels
    that will stand side by side, 1 to 3. Uses matplotlib's object interface, so no figure stays open; its settings are
    changed only while this runs (another thread that draws at the same time would see them).
    """
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(_WIDTHS_IN[beside], _HEIGHT_IN))
        canvas = FigureCanvasSVG(figure)
        axes = figure.add_subplot()
        draw(axes)
        _arrange(axes, _WIDTHS_IN[beside], _legend(axes))
        out = io.StringIO()
        canvas.print_svg(out, metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    return _inline(out.getvalue(), name, alt)


def _legend(axes: Axes) -> int:
    """Name the series above the axes, if there are several; the rows that this takes."""
    handles, labels = axes.get_legend_handles_labels()
    if len(labels) < 2:
        return 0
    columns = 4 if sum(map(len, labels)) < 44 else 3
    axes.legend(handles, labels, loc="lower left", bbox_to_anchor=(-0.12, 1.0), ncols=columns, borderaxespad=0.5)
    return -(-len(labels) // columns)


def _arrange(axes: Axes, width: float, legend_rows: int) -> None:
    top = _TOP_IN + legend_rows * _LEGEND_ROW_IN + (0.14 if legend_rows else 0)
    height = _HEIGHT_IN - _BOTTOM_IN - top
    inside = (_LEFT_IN / width, _BOTTOM_IN / _HEIGHT_IN, 1 - (_LEFT_IN + _RIGHT_IN) / width, height / _HEIGHT_IN)
    axes.set_position(inside)


def _inline(svg: str, name: str, alt: str) -> str:
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>\s*", "", svg, flags=re.S)
    svg = re.sub(r"<!--.*?-->\s*", "", svg, flags=re.S)
    box = re.search(r'viewBox="[^"]*"', svg)
    assert box, "matplotlib always writes a viewBox"
    svg = re.sub(r"<svg[^>]*>", f'<svg {box[0]} role="img" aria-label="{_attribute(alt)}">', svg, count=1)
    svg = svg.replace("xlink:href=", "href=")
    svg = re.sub(r"font: ([\d.]+)px [^;\"]*", r"font-size: \1px", svg)
    svg = re.sub("|".join(_VARIABLES), lambda colour: _VARIABLES[colour[0]], svg)
    return re.sub(r"\n\s*", "\n", _own_ids(svg, name)).strip()


def _own_ids(svg: str, name: str) -> str:
    used = set(re.findall(r"(?:url\(#|href=\"#)([^)\"]+)", svg))
    svg = re.sub(r' id="([^"]*)"', lambda m: f' id="{name}-{m[1]}"' if m[1] in used else "", svg)
    return re.sub(r"(url\(#|href=\"#)", rf"\g<1>{name}-", svg)


def _attribute(text: str) -> str:
    return text.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")
