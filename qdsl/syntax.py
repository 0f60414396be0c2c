"""Text to syntax: the parsed file, one frozen node per construct, each with its span.

Nothing is resolved here: names are strings, parameters are unbound.  `check` turns a `File` into a `Scheme`.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, field
from importlib import resources

from lark import Lark, Token, Transformer, Tree, UnexpectedCharacters, UnexpectedInput, UnexpectedToken, v_args
from lark.exceptions import VisitError

from qdsl.diagnostic import SchemeError, Source, Span, closest, error
from qdsl.expr import Binary, Call, Digits, Expr, Half, Item, Negate, Number, Ref

ROLES = ("code", "scale", "zero", "table", "index", "param", "bias", "residual")


@dataclass(frozen=True)
class Node:
    span: Span = field(compare=False, repr=False, kw_only=True)


@dataclass(frozen=True)
class TypeRef(Node):
    """`f16`, `u(bits)`, `idx(k // group)`."""

    name: str
    arg: Expr | None = None

    def __str__(self) -> str:
        return self.name if self.arg is None else f"{self.name}({self.arg})"


@dataclass(frozen=True)
class Param(Node):
    name: str
    kind: str  # "type", "int" or "dim"
    default: TypeRef | Expr


@dataclass(frozen=True)
class Decl(Node):
    role: str
    name: str
    index: tuple[Expr, ...]
    type: TypeRef
    optional: bool
    value: Expr | tuple[Expr, ...] | None  # computed, a constant table, or loaded
    name_span: Span = field(compare=False, repr=False)


@dataclass(frozen=True)
class Equation(Node):
    """`name = value`, `name ~ value` (op tells) or a transform; `places` is the bracket after the name, if any."""

    op: str  # "=", "~" or "transform"
    name: str
    places: tuple[Ref | Digits, ...] | None
    value: Expr
    name_span: Span = field(compare=False, repr=False)


@dataclass(frozen=True)
class Weight(Node):
    decls: tuple[Decl, ...]
    decode: Equation


@dataclass(frozen=True)
class Activation(Node):
    name: str  # "" unless the scheme has phases
    decls: tuple[Decl | Equation, ...]  # declarations and transforms, in order
    decode: Equation


@dataclass(frozen=True)
class Compute(Node):
    operand: TypeRef
    accumulator: TypeRef


@dataclass(frozen=True)
class DigitRef(Node):
    name: str
    extent: int | str | None = None  # a number, a parameter, or whatever is left

    def __str__(self) -> str:
        return self.name if self.extent is None else f"{self.name}:{self.extent}"


@dataclass(frozen=True)
class HalfDecl(Node):
    """`half n = (r:2 j)`."""

    name: str
    digits: tuple[DigitRef, ...]


@dataclass(frozen=True)
class Output(Node):
    type: TypeRef
    half: HalfDecl | None
    decls: tuple[Decl, ...]
    equations: tuple[Equation, ...]


@dataclass(frozen=True)
class Quantize(Node):
    equations: tuple[Equation, ...]


@dataclass(frozen=True)
class Require(Node):
    left: Expr
    op: str
    right: Expr


@dataclass(frozen=True)
class LaneRef(Node):
    name: str
    order: tuple[int, ...] | None = None

    def __str__(self) -> str:
        return self.name if self.order is None else f"{self.name}: {' '.join(map(str, self.order))}"


@dataclass(frozen=True)
class RunRef(Node):
    """`{p h r}`, `{l pad 2}`, `{l}.0:4`."""

    lanes: tuple[LaneRef, ...]
    pad: int = 0
    bits: tuple[int, int] | None = None

    def __str__(self) -> str:
        pad = f" pad {self.pad}" if self.pad else ""
        bits = f".{self.bits[0]}:{self.bits[1]}" if self.bits else ""
        return f"{{{' '.join(map(str, self.lanes))}{pad}}}{bits}"


@dataclass(frozen=True)
class AxisRef(Node):
    items: tuple[str | int | RunRef, ...]  # digit names, the unit axis 1, runs

    def __str__(self) -> str:
        return " ".join(map(str, self.items))


@dataclass(frozen=True)
class Store(Expr):
    """`"qweight"[k, c {l}]`: a tensor of the checkpoint and its axes (None: as declared)."""

    name: str
    axes: tuple[AxisRef, ...] | None

    def __str__(self) -> str:
        return f'"{self.name}"' + ("" if self.axes is None else f"[{', '.join(map(str, self.axes))}]")


@dataclass(frozen=True)
class Words(Expr):
    """`words("qzeros" + ones(bits))[…]`: arithmetic on whole words before they are split."""

    arg: Expr
    axes: tuple[AxisRef, ...] | None

    def __str__(self) -> str:
        return f"words({self.arg})" + ("" if self.axes is None else f"[{', '.join(map(str, self.axes))}]")

    def children(self) -> tuple[Expr, ...]:
        return (self.arg,)


@dataclass(frozen=True)
class Binding(Node):
    tensor: str
    logical: tuple[tuple[DigitRef, ...], ...] | None  # None: as declared
    value: Expr
    offset: int | None
    type: TypeRef
    tensor_span: Span = field(compare=False, repr=False)


@dataclass(frozen=True)
class Layout(Node):
    name: str
    record: int | None
    condition: tuple[Expr, str, Expr] | None  # on the parameters; the layout does not exist where it fails
    bindings: tuple[Binding, ...]


@dataclass(frozen=True)
class Hint(Node):
    name: str
    choices: tuple[Expr | tuple[Expr, ...], ...]


@dataclass(frozen=True)
class Schedule(Node):
    target: str
    condition: tuple[Expr, str, Expr] | None
    hints: tuple[Hint, ...]


Block = Weight | Activation | Compute | Output | Quantize | Require | Layout | Schedule


@dataclass(frozen=True)
class Comment:
    text: str
    line: int
    own_line: bool


@dataclass(frozen=True)
class File(Node):
    name: str
    params: tuple[Param, ...]
    doc: str
    items: tuple[Block, ...]
    comments: tuple[Comment, ...] = field(default=(), compare=False)
    name_span: Span = field(compare=False, repr=False, kw_only=True)


# ---- parsing -----------------------------------------------------------------------------------------------------
# What the reader may write at a terminal, in words.
EXPECTED = {
    "ROLE": "a declaration (code, scale, zero, table, index, param, bias, residual)",
    "NAME": "a name", "INT": "a whole number", "NUMBER": "a number", "STRING": "a quoted name",
    "OPTIONAL": "`optional`", "SIZE_KIND": "`int` or `dim`", "RELOP": "a comparison", "$END": "the end of the file",
}  # fmt: skip

_BLOCKS = ("weight", "activation", "compute", "output", "quantize", "require", "layout", "schedule")
# Words that always come together, and one name for them.
_TOGETHER = (
    ({f"`{name}`" for name in _BLOCKS}, f"a block ({', '.join(_BLOCKS)})"),
    ({f"`{op}`" for op in ("+", "-", "*", "/", "//", "%")}, "an operator"),
    ({"a name", "a whole number", "a number", "a quoted name", "`(`", "`-`", "`words`"}, "an expression"),
)


@functools.cache
def _parser() -> Lark:
    grammar = resources.files("qdsl").joinpath("grammar.lark").read_text()
    return Lark(grammar, parser="lalr", propagate_positions=True, maybe_placeholders=False)


def parse(source: Source) -> File:
    """The syntax tree of one file; raises SchemeError with one diagnostic at the first mistake."""
    try:
        tree = _parser().parse(source.text)
        _check_depth(source, tree)
        file = _Builder(source).transform(tree)
    except UnexpectedInput as unexpected:
        raise SchemeError([_explain(source, unexpected)]) from None
    except VisitError as failed:
        if isinstance(failed.orig_exc, SchemeError):
            raise failed.orig_exc from None
        raise
    return File(**file, comments=_comments(source))


# Every later stage walks expressions recursively; no equation that a person writes comes near this depth.
_DEPTH = 120


def _check_depth(source: Source, tree: Tree) -> None:
    level, depth = [tree], 0
    while level:
        depth += 1
        if depth > _DEPTH:
            start = level[0].meta.start_pos
            at = Span(source, start, min(level[0].meta.end_pos, start + 20))
            raise SchemeError([error("too-deep", f"more than {_DEPTH} levels of nesting", at, "write it in parts")])
        level = [child for node in level for child in node.children if isinstance(child, Tree)]


def _comments(source: Source) -> tuple[Comment, ...]:
    found = []
    for number, line in enumerate(source.text.split("\n"), 1):
        quoted = False
        for at, char in enumerate(line):
            if char == '"':
                quoted = not quoted
            elif char == "#" and not quoted:
                found.append(Comment(line[at:].rstrip(), number, not line[:at].strip()))
                break
    return tuple(found)


def _keywords() -> set[str]:
    fixed = {t.pattern.value for t in _parser().terminals if t.pattern.type == "str" and t.pattern.value.isalpha()}
    return fixed | set(ROLES) | {"optional", "int", "dim"}


def _describe(terminals: set[str]) -> str:
    patterns = {t.name: t.pattern.value for t in _parser().terminals if t.pattern.type == "str"}
    words = {EXPECTED.get(name) or f"`{patterns.get(name, name)}`" for name in terminals}
    for members, together in _TOGETHER:
        if members <= words:
            words = (words - members) | {together}
    words = sorted(words)
    if not 0 < len(words) <= 8:
        return ""
    return "expected " + (words[0] if len(words) == 1 else ", ".join(words[:-1]) + " or " + words[-1])


def _explain(source: Source, unexpected: UnexpectedInput):
    if isinstance(unexpected, UnexpectedCharacters):
        at = Span(source, unexpected.pos_in_stream, unexpected.pos_in_stream + 1)
        if at.text == '"':
            return error("unexpected-character", "this quote is never closed", at, "names in quotes end on their line")
        shown = f"`{at.text}`" if at.text.isprintable() else f"the character U+{ord(at.text):04X}"
        return error("unexpected-character", f"{shown} is not part of the language", at)
    assert isinstance(unexpected, UnexpectedToken)
    token = unexpected.token
    if token.type == "$END":
        end = len(source.text.rstrip())
        at = Span(source, max(0, end - 1), max(1, end))
        notes = []
        if (opened := _unclosed(source)) is not None:
            notes = [f"the `{source.text[opened]}` on line {source.position(opened)[0]} is never closed"]
        label = _describe(unexpected.accepts or set())
        return error("unexpected-end", "the file ends too early", at, label, notes=notes)
    at = Span(source, token.start_pos, token.end_pos)
    # A misspelt keyword is a legal name, so the parser only stumbles over the word after it.
    previous = source.text[: token.start_pos].rstrip()
    word = previous.split()[-1] if previous.split() else ""
    if token.type == "NAME" and word.isidentifier() and word not in _keywords():
        match = closest(word, _keywords())
        span = Span(source, len(previous) - len(word), len(previous))
        if match in ROLES:
            what = f"unknown kind of declaration `{word}`"
            return error("unknown-declaration", what, span, f"did you mean `{match}`?")
        if match:
            return error("unknown-keyword", f"unknown keyword `{word}`", span, f"did you mean `{match}`?")
    label = _describe(unexpected.accepts or unexpected.expected)
    if token.type == "ROLE":
        fix = "declarations come first in a block, before its equations"
        return error("unexpected-token", f"unexpected `{token}`", at, label, fix=fix)
    if token.type == "NAME" and (match := closest(str(token), _keywords())):
        return error("unknown-keyword", f"unexpected `{token}`", at, f"did you mean `{match}`?", fix=label)
    return error("unexpected-token", f"unexpected `{token}`", at, label)


def _unclosed(source: Source) -> int | None:
    """Where the innermost bracket that nothing closes stands."""
    opened = []
    for found in re.finditer(r'"[^"\n]*"|#[^\n]*|[][(){}]', source.text):
        if found[0] in "([{":
            opened.append(found.start())
        elif found[0] in ")]}" and opened:
            opened.pop()
    return opened[-1] if opened else None


def _split(children: list, kind: type) -> tuple[list, list]:
    return [c for c in children if isinstance(c, kind)], [c for c in children if not isinstance(c, kind)]


@v_args(meta=True)
class _Builder(Transformer):
    """Tree to nodes.  One method per grammar rule, named as the rule."""

    def __init__(self, source: Source):
        super().__init__()
        self.source = source

    def _span(self, meta) -> Span:
        if meta.empty:
            return Span(self.source, 0, 0)
        return Span(self.source, meta.start_pos, meta.end_pos)

    def _token_span(self, token: Token) -> Span:
        return Span(self.source, token.start_pos, token.end_pos)

    def _whole(self, token: Token) -> int:
        if len(token) > 18:
            self._too_large(token, "whole numbers have at most 18 digits")
        return int(token)

    def _too_large(self, token: Token, label: str):
        shown = token if len(token) <= 24 else token[:20] + "…"
        raise SchemeError([error("bad-number", f"the number `{shown}` is too large", self._token_span(token), label)])

    # ---- file and blocks ----
    def start(self, meta, c):
        return c[0]

    def scheme(self, meta, c):
        name, rest = c[0], c[1:]
        params = next((x for x in rest if isinstance(x, tuple)), ())
        doc = next((str(x)[1:-1] for x in rest if isinstance(x, Token)), "")
        items = tuple(x for x in rest if isinstance(x, Node))
        return {"name": str(name), "params": params, "doc": doc, "items": items, "span": self._span(meta),
                "name_span": self._token_span(name)}  # fmt: skip

    def params(self, meta, c):
        return tuple(c)

    def type_param(self, meta, c):
        return Param(str(c[0]), "type", c[1], span=self._span(meta))

    def size_param(self, meta, c):
        return Param(str(c[0]), str(c[1]), c[2], span=self._span(meta))

    def weight(self, meta, c):
        return Weight(tuple(c[:-1]), c[-1], span=self._span(meta))

    def activation(self, meta, c):
        name, rest = _split(c, Token)
        return Activation(str(name[0]) if name else "", tuple(rest[:-1]), rest[-1], span=self._span(meta))

    def compute(self, meta, c):
        return Compute(c[0], c[1], span=self._span(meta))

    def output(self, meta, c):
        half = next((x for x in c if isinstance(x, HalfDecl)), None)
        decls = tuple(x for x in c if isinstance(x, Decl))
        equations = tuple(x for x in c if isinstance(x, Equation))
        return Output(c[0], half, decls, equations, span=self._span(meta))

    def quantize(self, meta, c):
        return Quantize(tuple(c), span=self._span(meta))

    def require(self, meta, c):
        return Require(c[0], str(c[1]), c[2], span=self._span(meta))

    # ---- declarations and equations ----
    def decl(self, meta, c):
        at = next(i for i, x in enumerate(c) if isinstance(x, TypeRef))
        optional, value = _split(c[at + 1 :], Token)
        return Decl(str(c[0]), str(c[1]), tuple(c[2:at]), c[at], bool(optional), value[0] if value else None,
                    self._token_span(c[1]), span=self._span(meta))  # fmt: skip

    def constants(self, meta, c):
        return tuple(c)

    def negative(self, meta, c):
        return Number(-c[0].value, "-" + c[0].text, span=self._span(meta))

    def decode(self, meta, c):
        return Equation("~", str(c[0]), None, c[1], self._token_span(c[0]), span=self._span(meta))

    def define(self, meta, c):
        places = c[1] if len(c) == 3 else None
        return Equation("=", str(c[0]), places, c[-1], self._token_span(c[0]), span=self._span(meta))

    def transform_(self, meta, c):
        return Equation("transform", str(c[0]), c[1], c[2], self._token_span(c[0]), span=self._span(meta))

    def half(self, meta, c):
        return HalfDecl(str(c[0]), tuple(c[1:]), span=self._span(meta))

    def where(self, meta, c):
        return tuple(c)

    def place_name(self, meta, c):
        return Ref(str(c[0]), span=self._span(meta))

    def type(self, meta, c):
        return TypeRef(str(c[0]), c[1] if len(c) > 1 else None, span=self._span(meta))

    # ---- layouts ----
    def layout(self, meta, c):
        bindings, rest = _split(c, Binding)
        record = self._whole(rest[1]) if len(rest) in (2, 5) else None
        condition = (rest[-3], str(rest[-2]), rest[-1]) if len(rest) > 2 else None
        return Layout(str(rest[0]), record, condition, tuple(bindings), span=self._span(meta))

    def binding(self, meta, c):
        logical = c[1] if isinstance(c[1], tuple) else None
        rest = c[2:] if logical is not None else c[1:]
        offset = self._whole(rest[1]) if len(rest) == 3 else None
        return Binding(str(c[0]), logical, rest[0], offset, rest[-1], self._token_span(c[0]), span=self._span(meta))

    def logical(self, meta, c):
        return tuple(c)

    def split(self, meta, c):
        return tuple(c)

    def digit(self, meta, c):
        extent = None
        if len(c) > 1:
            extent = self._whole(c[1]) if c[1].type == "INT" else str(c[1])
        return DigitRef(str(c[0]), extent, span=self._span(meta))

    def store(self, meta, c):
        axes = tuple(c[1:]) if len(c) > 1 or self._span(meta).text.endswith("]") else None
        return Store(str(c[0])[1:-1], axes, span=self._span(meta))

    def words(self, meta, c):
        axes = tuple(c[1:]) if len(c) > 1 or self._span(meta).text.endswith("]") else None
        return Words(c[0], axes, span=self._span(meta))

    def axis(self, meta, c):
        return AxisRef(tuple(c), span=self._span(meta))

    def axis_digit(self, meta, c):
        return str(c[0])

    def axis_one(self, meta, c):
        return self._whole(c[0])

    def run(self, meta, c):
        lanes, numbers = _split(c, LaneRef)
        pad = self._whole(numbers.pop(0)) if len(numbers) % 2 else 0
        bits = (self._whole(numbers[0]), self._whole(numbers[1])) if numbers else None
        return RunRef(tuple(lanes), pad, bits, span=self._span(meta))

    def lane(self, meta, c):
        return LaneRef(str(c[0]), tuple(map(self._whole, c[1:])) or None, span=self._span(meta))

    # ---- schedules ----
    def schedule(self, meta, c):
        hints, rest = _split(c, Hint)
        condition = (rest[1], str(rest[2]), rest[3]) if len(rest) == 4 else None
        return Schedule(str(rest[0]), condition, tuple(hints), span=self._span(meta))

    def hint(self, meta, c):
        return Hint(str(c[0]), tuple(c[1:]), span=self._span(meta))

    def tuple_(self, meta, c):
        return tuple(c)

    # ---- expressions ----
    def _binary(op):  # noqa: N805
        def build(self, meta, c):
            return Binary(op, c[0], c[1], span=self._span(meta))

        return v_args(meta=True)(build)

    add, sub, mul, div = _binary("+"), _binary("-"), _binary("*"), _binary("/")
    floordiv, mod = _binary("//"), _binary("%")

    def neg(self, meta, c):
        return Negate(c[0], span=self._span(meta))

    def group(self, meta, c):
        return c[0]

    def number(self, meta, c):
        text = str(c[0])
        if c[0].type == "INT":
            return Number(self._whole(c[0]), text, span=self._span(meta))
        value = float(text)
        if value > 3.5e38:
            self._too_large(c[0], "f32, the widest format, ends at 3.4e38")
        return Number(value, text, span=self._span(meta))

    def ref(self, meta, c):
        return Ref(str(c[0]), span=self._span(meta))

    def call(self, meta, c):
        return Call(str(c[0]), tuple(c[1:]), span=self._span(meta))

    def item_(self, meta, c):
        return Item(str(c[0]), tuple(c[1:]), span=self._span(meta))

    def half_of(self, meta, c):
        return Half(str(c[0]), self._whole(c[1]), span=self._span(meta))

    def digits(self, meta, c):
        return Digits(tuple(map(str, c)), span=self._span(meta))
