"""The canonical text of a scheme file: `qdsl fmt`.

Blocks come in one order (weight, activation, compute, output, quantize, require, layout, schedule), declarations are
aligned, comments stay where they were.  Printing what was parsed and parsing what was printed are inverse, so the
formatter is idempotent.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from qdsl import syntax as ast
from qdsl.expr import Expr

_ORDER = (ast.Weight, ast.Activation, ast.Compute, ast.Output, ast.Quantize, ast.Require, ast.Layout, ast.Schedule)
_INDENT = "    "
_WIDTH = 88


def print_file(file: ast.File) -> str:
    """The formatted text, with a final newline."""
    return _Printer(file).text()


class _Printer:
    def __init__(self, file: ast.File):
        self.file = file
        self.left = list(file.comments)  # comments not yet printed

    def text(self) -> str:
        header = self.file.items[0].span.start if self.file.items else self.file.span.end
        lines = self.comments_before(self._line(self.file.span.start), "")
        head = f"scheme {self.file.name}"
        if self.file.params:
            head += f"({', '.join(map(_param, self.file.params))})"
        lines += self.with_comment(head, self._line(self.file.span.start))
        if self.file.doc:
            lines += self.with_comment(f'{_INDENT}"{self.file.doc}"', self._line(header) - 1, until=True)
        groups: list[list[str]] = []
        blocks = sorted(self.file.items, key=lambda b: _ORDER.index(type(b)))
        for block in blocks:
            before = self.comments_before(self._line(block.span.start), "")
            groups.append(before + self.block(block))
        out = "\n".join(lines)
        for i, group in enumerate(groups):
            out += ("\n" if i > 0 and _tight(blocks[i - 1], blocks[i]) else "\n\n") + "\n".join(group)
        rest = [c.text for c in self.left]
        return out + ("\n\n" + "\n".join(rest) if rest else "") + "\n"

    # ---- comments -----------------------------------------------------------------------------------------------
    def _line(self, offset: int) -> int:
        return self.file.span.source.position(offset)[0]

    def _end(self, node: ast.Node) -> int:
        return self._line(max(node.span.start, node.span.end - 1))

    def comments_before(self, line: int, indent: str) -> list[str]:
        taken = [c for c in self.left if c.line < line]
        self.left = [c for c in self.left if c.line >= line]
        return [indent + c.text for c in taken]

    def with_comment(self, text: str, line: int, until: bool = False) -> list[str]:
        found = [c for c in self.left if not c.own_line and (c.line == line or (until and c.line <= line))]
        if not found:
            return [text]
        self.left.remove(found[0])
        return [f"{text}  {found[0].text}"]

    # ---- blocks -------------------------------------------------------------------------------------------------
    def block(self, block: ast.Block) -> list[str]:
        match block:
            case ast.Compute():
                return self.with_comment(f"compute {block.operand} -> {block.accumulator}", self._end(block))
            case ast.Require():
                return self.with_comment(f"require {block.left} {block.op} {block.right}", self._end(block))
            case ast.Weight():
                return self.braces("weight", block, [*block.decls, block.decode])
            case ast.Activation():
                head = f"activation {block.name}" if block.name else "activation"
                return self.braces(head, block, [*block.decls, block.decode])
            case ast.Output():
                items = [*([block.half] if block.half else []), *block.decls, *block.equations]
                if not items:
                    return self.with_comment(f"output {block.type}", self._end(block))
                return self.braces(f"output {block.type}", block, items)
            case ast.Quantize():
                return self.braces("quantize", block, block.equations)
            case ast.Layout():
                record = f" record {block.record}" if block.record is not None else ""
                return self.braces(f"layout {block.name}{record}{_when(block)}", block, block.bindings)
            case _:
                return self.braces(f"schedule {block.target}{_when(block)}", block, block.hints)

    def braces(self, head: str, block: ast.Node, items: Sequence[ast.Node]) -> list[str]:
        start = self._line(block.span.start)
        lines = self.with_comment(head + " {", start)
        texts = _aligned(items)
        rows: list[tuple[str, str]] = []  # text, trailing comment
        for node, text in zip(items, texts, strict=True):
            rows += [(c, "") for c in self.comments_before(self._line(node.span.start), _INDENT)]
            comment = next((c for c in self.left if not c.own_line and c.line == self._end(node)), None)
            if comment:
                self.left.remove(comment)
            first, *more = text.split("\n")
            rows.append((_INDENT + first, comment.text if comment and not more else ""))
            rows += [(_INDENT + line, "") for line in more[:-1]]
            if more:
                rows.append((_INDENT + more[-1], comment.text if comment else ""))
        rows += [(c, "") for c in self.comments_before(self._end(block), _INDENT)]
        width = max((len(text) for text, comment in rows if comment), default=0)
        lines += [f"{text.ljust(width)}  {comment}" if comment else text for text, comment in rows]
        return [*lines, *self.with_comment("}", self._end(block))]


def _when(block: ast.Layout | ast.Schedule) -> str:
    return f" when {block.condition[0]} {block.condition[1]} {block.condition[2]}" if block.condition else ""


def _tight(before: ast.Block, after: ast.Block) -> bool:
    """Requirements stand together, and a bare output line stands under the compute line."""
    bare = isinstance(after, ast.Output) and not after.equations
    return (isinstance(before, ast.Compute) and bare) or isinstance(before, ast.Require) is isinstance(
        after, ast.Require
    ) is True


def _param(p: ast.Param) -> str:
    return f"{p.name}: {p.kind} = {p.default}"


def _aligned(items: Sequence[ast.Node]) -> list[str]:
    """The text of each item; runs of the same kind of line are aligned in columns."""
    texts: list[str] = []
    at = 0
    while at < len(items):
        kind = type(items[at])
        end = at
        while end < len(items) and type(items[end]) is kind:
            end += 1
        run: Sequence = items[at:end]
        match items[at]:
            case ast.Decl():
                texts += _decls(run)
            case ast.Binding():
                texts += _bindings(run)
            case ast.Hint():
                texts += _columns([[h.name, "= " + " | ".join(map(_choice, h.choices))] for h in run])
            case ast.HalfDecl():
                texts += [f"half {h.name} = ({' '.join(map(str, h.digits))})" for h in run]
            case _:
                texts += [_equation(e) for e in run]
        at = end
    return texts


def _columns(rows: list[list[str]]) -> list[str]:
    """Rows of cells, each column as wide as its widest cell that another cell follows."""
    width: dict[int, int] = {}
    for row in rows:
        for i, cell in enumerate(row):
            if any(row[i + 1 :]):
                width[i] = max(width.get(i, 0), len(cell))
    return [
        " ".join(c.ljust(width.get(i, 0)) for i, c in enumerate(row) if width.get(i, 0) or c).rstrip() for row in rows
    ]


def _decls(run: Sequence[ast.Decl]) -> list[str]:
    values = [d.value if isinstance(d.value, Expr) else None for d in run]
    rows = []
    for d, value in zip(run, values, strict=True):
        kind = f": {d.type}" + (" optional" if d.optional else "")
        tail = f"= {value}" if value is not None else ("= " + _constants(d.value) if d.value else "")
        rows.append([d.role, f"{d.name}[{', '.join(map(str, d.index))}]", kind, tail])
    return _columns(rows)


def _constants(values: Iterable) -> str:
    lines, line = [], ""
    for text in (f"{v}," for v in values):
        if line and len(line) + len(text) + 1 > _WIDTH - 3 * len(_INDENT):
            lines.append(line)
            line = ""
        line = f"{line} {text}".strip()
    lines.append(line.rstrip(","))
    return "{\n" + "\n".join(_INDENT + text for text in lines) + "\n}" if len(lines) > 1 else f"{{ {lines[0]} }}"


def _bindings(run: Sequence[ast.Binding]) -> list[str]:
    rows = []
    for b in run:
        left = b.tensor
        if b.logical is not None:
            dims = (str(d[0]) if len(d) == 1 else f"({' '.join(map(str, d))})" for d in b.logical)
            left += f"[{', '.join(dims)}]"
        offset = f"@ {b.offset}" if b.offset is not None else ""
        rows.append([left, f"= {b.value}", offset, f": {b.type}"])
    return _columns(rows)


def _choice(c) -> str:
    return f"({', '.join(map(str, c))})" if isinstance(c, tuple) else str(c)


def _equation(e: ast.Equation) -> str:
    places = f"[{', '.join(map(str, e.places))}]" if e.places else ""
    if e.op == "transform":
        return f"transform {e.name}{places} = {e.value}"
    return f"{e.name}{places} {e.op} {e.value}"
