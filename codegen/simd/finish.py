"""After the sums of a group: scales and corrections, then the output's equation, a vector of features at a time."""

from __future__ import annotations

from collections.abc import Callable

from tvm import tirx
from tvm.tirx.script import builder as T

from qdsl.codegen.function import store
from qdsl.codegen.portable import factor, finished, first, inside, times, whole_offset
from qdsl.codegen.simd.blocked import FEATURES, LANES
from qdsl.codegen.simd.state import State, div, for_features, local, mod
from qdsl.codegen.tir import as_float, encode, i64, translate
from qdsl.expr import Expr, Half, Item, Ref

Of = Callable[[tirx.Expr], tirx.Expr]  # the value of a feature of the block
EIGHT = LANES // 2  # features of a part that lie beside each other


class Group:
    """What a block's features have in common for a group of inputs: what their sums are multiplied by, what is added for
    each x, and the sums of their codes.

    start, end   its inputs
    ones         the sums of the operands, if they are needed
    """

    def __init__(self, s: State, block: tirx.Expr, start: tirx.Expr, end: tirx.Expr, ones: Of | None):
        self.s, self.start, self.count = s, start, end - start
        weight = s.plan.weight
        scale, correction = first(weight.fold, weight.promote), weight.correction
        self.scale = local((FEATURES,), "float32") if scale is not None else None
        self.correction = local((FEATURES,), "float32") if correction is not None or s.zero else None
        self.weights = local((FEATURES,), s.kind) if ones is not None else None

        def at(v: tirx.Expr) -> dict[str, tirx.Expr]:
            n = _feature(s, block, v)
            return {"n": inside(n, s.own.sizes["n"]), "k": start, "padded": block * i64(FEATURES) + v}

        def corrected(v: tirx.Expr) -> tirx.Expr:
            total = factor(s, correction, at(v))
            if s.zero:  # what is laid out in blocks holds zeros beyond n
                zero = as_float(s.own.element(s.zero, {**at(v), "n": at(v)["padded"]}))
                zero = times(zero, self.scale[v] if self.scale is not None else None)
                total = -zero if total is None else total - zero
            return total

        def weighed(v: tirx.Expr) -> tirx.Expr:
            return ones(v) - T.cast(self.count, "int32") * tirx.const(s.offset, "int32") if s.offset else ones(v)

        if self.scale is not None:
            for_features(lambda v: store(self.scale, factor(s, scale, at(v)), v))
        if self.correction is not None:
            for_features(lambda v: store(self.correction, corrected(v), v))
        if self.weights is not None:
            for_features(lambda v: store(self.weights, weighed(v), v))

    def promote(self, token: tirx.Expr, group: tirx.Expr, part: Of, acc: tirx.Buffer, *row) -> None:
        """acc[row] += what `promoted` says."""
        terms = self._terms(token, group, part)
        for_features(lambda v: store(acc, _sum([acc[(*row, v)], *terms(v)]), *row, v))

    def promoted(self, token: tirx.Expr, group: tirx.Expr, part: Of) -> Of:
        """Σ (xc·gx + cx)(wc·gw + cw) over the group, from the group's four sums."""
        terms = self._terms(token, group, part)
        return lambda v: _sum(terms(v))

    def _terms(self, token: tirx.Expr, group: tirx.Expr, part: Of) -> Callable[[tirx.Expr], list[tirx.Expr]]:
        """Products, each of which is added to a sum by one instruction."""
        s, activation = self.s, self.s.plan.activation
        token = inside(token, s.own.sizes["m"])
        at = {"m": token, "k": self.start}
        gx, offset = factor(s, first(activation.fold, activation.promote), at), whole_offset(s, at)
        cx = factor(s, activation.correction, at) if offset is None else None
        x_sum = s.sums[token, group] if s.sums is not None else None

        def terms(v: tirx.Expr) -> list[tirx.Expr]:
            gw, value, codes = self.scale[v] if self.scale is not None else None, part(v), x_sum
            if s.offset:
                value = value - x_sum * tirx.const(s.offset, "int32")
            if offset is not None:
                value = value + offset * self.weights[v]
                codes = codes + offset * T.cast(self.count, "int32") if codes is not None else None
            found = [times(as_float(value), gx, gw)]
            if self.correction is not None:
                scaled = times(as_float(codes), gx) if s.sums_of_codes else codes
                found.append(times(scaled, self.correction[v]))
            if cx is not None:
                found.append(times(as_float(self.weights[v]), gw, cx))
            if self.correction is not None and cx is not None:
                found.append(times(T.cast(self.count, "float32"), self.correction[v], cx))
            return found

        return terms


def _sum(terms: list[tirx.Expr]) -> tirx.Expr:
    value, *rest = terms
    for term in rest:
        value = value + term
    return value


def _feature(s: State, block: tirx.Expr, v: tirx.Expr) -> tirx.Expr:
    """The weight's feature that lies at place v of a block: of two parts, eight of the first and eight of the second in turn."""
    if s.blocked.parts == 1:
        return block * i64(FEATURES) + v
    own = block * i64(LANES) + div(v, LANES) * i64(EIGHT) + mod(v, EIGHT)
    return own + mod(div(v, EIGHT), 2) * s.own.buffers["y"].shape[1]


def output(s: State, token: tirx.Expr, block: tirx.Expr, acc: Of) -> None:
    """y of a token for the features of a block, which may end before the block does."""
    if s.blocked.parts > 1:
        return _output_of_parts(s, token, block, acc)
    y = s.own.buffers["y"]
    n = block * i64(FEATURES)

    def put(v: tirx.Expr) -> None:
        value = finished(s, acc(v), token, n + v)
        store(y, encode(s.plan.scheme.output.dtype, value), token, n + v)

    with T.If(n + i64(FEATURES) <= y.shape[1]):
        with T.Then():
            for_features(put)
        with T.Else(), T.serial(i64(0), y.shape[1] - n) as v:
            put(v)


def _output_of_parts(s: State, token: tirx.Expr, block: tirx.Expr, acc: Of) -> None:
    """The same of features that are made of two of the weight's."""
    plan, y = s.plan, s.own.buffers["y"]

    def put(half: int, v: tirx.Expr) -> None:
        n = block * i64(LANES) + i64(half * EIGHT) + v

        def total(part: int) -> tirx.Expr:
            place = v + i64(half * LANES + part * EIGHT)
            at = {"m": token, "n": n + i64(part) * y.shape[1], "padded": block * i64(FEATURES) + place}
            return times(acc(place), *(factor(s, own, at) for own in (plan.activation.epilogue, plan.weight.epilogue)))

        def look(e: Expr) -> tirx.Expr:
            match e:
                case Item(args=(Half() as place,)):  # acc[r = 0]
                    return total(place.value)
                case Ref(name):
                    return s.own.element(name, {"m": token, "n": n})
            raise AssertionError(f"{e} in the output of two parts")

        value = as_float(translate(plan.scheme.output.value, look))
        store(y, encode(plan.scheme.output.dtype, value), token, n)

    for half in range(2):
        first = block * i64(LANES) + i64(half * EIGHT)
        with T.If(first + i64(EIGHT) <= y.shape[1]):
            with T.Then(), T.vectorized(i64(0), i64(EIGHT)) as v:
                put(half, v)
            with T.Else(), T.serial(i64(0), y.shape[1] - first) as v:
                put(half, v)
