"""Tables of choices: every m, n and k gets a variant that is right for it, and texts give the same table back."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import asdict, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qdsl.choice import (
    LIKE,
    Key,
    Row,
    Table,
    at,
    fastest,
    merged,
    of_one_order,
    only,
    table_of,
    tables_from_json,
    tables_to_json,
)
from qdsl.codegen.cuda import measured
from qdsl.codegen.cuda.byte_weight import ByteWeight
from qdsl.codegen.cuda.candidates import candidates
from qdsl.codegen.cuda.weight import Shared, Weight
from qdsl.codegen.target import GPUS, target
from qdsl.dtype import dtype
from qdsl.manifest import Variant

VARIANTS = (
    Variant("one", (), order="a"),
    Variant("few", (), order="b"),
    Variant("many", (), order="b"),
    Variant("fast", (), k_multiple=8, order="c"),
    Variant("huge", (), k_multiple=64, order="c"),
)
ORDERS = {order: [v.name for v in VARIANTS if v.order == order] for order in "abc"}
SPARE = Row(4096, 4096, ((1, "one"), (None, "many")), ((16, "few"), (None, "many")))
TABLE = Table(
    "by hand",
    SPARE,
    (
        Row(4096, 4096, ((1, "one"), (16, "few"), (128, "fast"), (None, "huge")), ((None, "huge"),)),
        Row(8192, 4096, ((None, "huge"),), ((16, "few"), (None, "many"))),
    ),
    Key("f16", "f16", "u4", 128),
)


def legal(k: int) -> set[str]:
    return {v.name for v in VARIANTS if k % v.k_multiple == 0}


sizes = st.integers(1, 1 << 20)


def limits(names) -> st.SearchStrategy:
    """Ascending limits with these variants, the last without a limit."""
    ends = st.lists(sizes, max_size=5, unique=True).map(sorted)
    return ends.flatmap(lambda e: st.tuples(*(st.tuples(st.just(end), st.sampled_from(names)) for end in [*e, None])))


every = [v.name for v in VARIANTS]
orders = st.sampled_from("abc").flatmap(lambda order: limits(ORDERS[order]))
rows = st.builds(Row, sizes, sizes, limits(every), orders)
plain = limits(["one", "few", "many"])
spares = st.builds(Row, sizes, sizes, plain, st.sampled_from("ab").flatmap(lambda order: limits(ORDERS[order])))
keys = st.builds(Key, st.sampled_from(["f16", "bf16"]), st.none() | st.just("f32"), st.none() | st.just("u4"),
                 st.none() | st.just(64))  # fmt: skip
tables = st.builds(Table, st.text(), spares, st.lists(rows, max_size=4).map(tuple), st.none() | keys)


# ---- choosing ----------------------------------------------------------------------------------------------------
@given(tables, sizes, sizes, sizes)
def test_every_m_n_and_k_gets_a_variant_that_is_right_for_it(table, m, n, k):
    assert not table.problems(VARIANTS)
    free, fixed = table.limits(n, k, legal(k)), table.limits_of_one_order(n, k, legal(k))
    assert at(free, m) in legal(k) and at(fixed, m) in legal(k)
    assert len({v.order for v in VARIANTS if v.name in {name for _, name in fixed}}) == 1


@given(tables, sizes, sizes)
def test_a_limit_is_the_last_m_of_its_variant(table, n, k):
    found = table.limits(n, k, legal(k))
    ends = [end for end, _ in found]
    assert ends[-1] is None and ends[:-1] == sorted(set(ends[:-1]))
    for (end, name), (_, following) in itertools.pairwise(found):
        assert at(found, end) == name != following == at(found, end + 1)


@given(tables, sizes, sizes, sizes)
def test_a_row_is_followed_where_it_is_legal(table, m, n, k):
    row = table.nearest(n, k)
    wanted = at(row.free, m)
    assert at(table.limits(n, k, legal(k)), m) == (wanted if wanted in legal(k) else at(table.spare.free, m))


@given(st.lists(rows, min_size=1, max_size=4).map(tuple), sizes, sizes)
def test_the_nearest_row_is_the_nearest(rows, n, k):
    def distance(row):
        return abs(math.log2(n / row.n)) + abs(math.log2(k / row.k))

    found = Table("", SPARE, rows).nearest(n, k)
    assert distance(found) <= min(map(distance, rows)) + 1e-9


@pytest.mark.parametrize(
    ("m", "n", "k", "name"),
    [
        (1, 4096, 4096, "one"),
        (2, 4096, 4096, "few"),
        (16, 4096, 4096, "few"),
        (17, 4096, 4096, "fast"),
        (128, 4096, 4096, "fast"),
        (129, 4096, 4096, "huge"),
        (17, 4096, 4100, "many"),  # neither fast nor huge
        (129, 4096, 4104, "many"),  # huge isn't right for it; fast would be, but was not measured there
        (17, 4096, 4104, "fast"),
        (1, 8192, 4096, "huge"),
        (1, 8192, 4097, "one"),
        (1, 5792, 4096, "one"),  # 5793 is half way between 4096 and 8192
        (1, 5793, 4096, "huge"),
        (1, 10**6, 64, "huge"),
        (1, 1, 1, "one"),
    ],
)
def test_boundaries(m, n, k, name):
    assert at(TABLE.limits(n, k, legal(k)), m) == name


def test_of_two_nearest_rows_the_larger_is_taken():
    low, high = Row(1024, 1024, ((None, "one"),), ((None, "one"),)), Row(4096, 1024, ((None, "few"),), ((None, "few"),))
    for rows in ((low, high), (high, low)):
        assert Table("", SPARE, rows).nearest(2048, 1024) is high
        assert Table("", SPARE, rows).nearest(2047, 1024) is low


def test_one_order_is_kept_or_left_as_a_whole():
    assert TABLE.limits_of_one_order(4096, 4096, legal(4096)) == ((None, "huge"),)
    assert TABLE.limits_of_one_order(4096, 4104, legal(4104)) == SPARE.fixed


def test_a_single_variant_serves_everything():
    assert only("portable").limits(7, 9, {"portable"}) == ((None, "portable"),)
    assert only("portable").limits_of_one_order(7, 9, {"portable"}) == ((None, "portable"),)


def test_neighbours_of_the_same_name_are_merged():
    assert merged([(1, "a"), (2, "a"), (4, "b"), (None, "b")]) == ((2, "a"), (None, "b"))


# ---- from times --------------------------------------------------------------------------------------------------
grid = st.lists(st.integers(1, 4096), min_size=1, max_size=8, unique=True)
complete = grid.flatmap(  # a time for every variant at every m
    lambda ms: st.fixed_dictionaries({m: st.fixed_dictionaries({n: st.floats(1, 1e4) for n in every}) for m in ms})
)


@given(complete, st.integers(1, 5000))
def test_no_m_takes_longer_than_the_next_one_that_was_timed(times, m):
    """There is no cliff: what is chosen for m is as good as the best for the next timed m."""
    name = at(fastest(times), m)
    timed = min((t for t in times if t >= m), default=max(times))
    assert times[timed][name] <= LIKE * min(times[timed].values())


@given(complete)
def test_one_order_costs_the_least_where_it_costs_the_most(times):
    def worst(names):
        return max(min(t[name] for name in names) / min(t.values()) for t in times.values())

    found = of_one_order(times, VARIANTS)
    names = {name for t in found.values() for name in t}
    assert sorted(names) in [sorted(group) for group in ORDERS.values()]
    assert worst(names) == min(map(worst, ORDERS.values()))


@given(st.dictionaries(st.tuples(sizes, sizes), complete, min_size=1, max_size=3))
def test_a_table_of_times_can_be_chosen_by(times):
    table = table_of("measured", None, times, VARIANTS)
    assert not table.problems(VARIANTS)
    assert {(row.n, row.k) for row in table.rows} == times.keys()
    for row in table.rows:
        assert row.free == fastest(times[row.n, row.k])


def test_what_is_right_for_every_k_may_have_been_timed_for_few_m():
    """It serves all m where nothing else can."""
    variants = (Variant("quick", (), k_multiple=16, order="a"), Variant("portable", (), order="b"))
    table = table_of("measured", None, {(64, 64): {1: {"quick": 1, "portable": 20}, 8: {"quick": 2}}}, variants)
    assert table.spare.free == table.spare.fixed == ((None, "portable"),)
    assert table.rows[0].free == ((None, "quick"),)


def test_a_limit_lies_at_the_largest_m_that_its_variant_wins():
    times = {1: {"a": 1, "b": 2}, 8: {"a": 2, "b": 2.5}, 16: {"a": 5, "b": 3}, 32: {"a": 9, "b": 4}}
    assert fastest(times) == ((8, "a"), (None, "b"))


def test_what_differs_by_noise_does_not_change_the_variant():
    assert fastest({1: {"a": 1.0, "b": 1.005}, 2: {"a": 1.0, "b": 1.0}, 4: {"a": 2, "b": 1}}) == ((None, "b"),)


def test_variants_that_were_not_timed_everywhere():
    times = {1: {"one": 1.0, "few": 2.0}, 64: {"few": 3.0, "many": 1.0}}
    assert fastest(times) == ((1, "one"), (None, "many"))
    assert of_one_order(times, VARIANTS) == {1: {"few": 2.0}, 64: {"few": 3.0, "many": 1.0}}


# ---- texts -------------------------------------------------------------------------------------------------------
@given(tables)
def test_a_table_comes_back_from_json(table):
    assert Table.from_data(json.loads(json.dumps(asdict(table)))) == table


@given(st.lists(tables, max_size=3))
def test_a_file_of_tables_comes_back(given):
    assert tables_from_json(tables_to_json(given)) == tuple(given)


def test_a_table_prints_its_choices():
    assert str(TABLE) == (
        "by hand: u4 in f16, scale f16, zero u4, groups of 128; K x N:\n"
        "  4096x4096: one to m = 1, few to 16, fast to 128, then huge; one order: huge\n"
        "  4096x8192: huge; one order: few to m = 16, then many\n"
        "  where K is none that those kernels take: one to m = 1, then many; one order: few to m = 16, then many"
    )


@pytest.mark.parametrize(
    "limits",
    [(), ((1, "one"),), ((2, "a"), (1, "b"), (None, "c")), ((1, "a"), (1, "b"), (None, "c")), ((None, "a"), (None, "b")),
     ((0, "a"), (None, "b")), (("1", "a"), (None, "b")), ((1.5, "a"), (None, "b")), ((None, 3),)],
)  # fmt: skip
def test_wrong_limits_are_refused(limits):
    with pytest.raises((ValueError, TypeError)):
        Row(1, 1, limits, ((None, "a"),))
    with pytest.raises((ValueError, TypeError)):
        Row(1, 1, ((None, "a"),), limits)


def test_an_order_that_changes_with_m_is_none():
    moving = (*VARIANTS[:-1], replace(VARIANTS[-1], order=None))
    times = {1: {"one": 1.0, "huge": 0.1}, 64: {"one": 1.0, "huge": 0.1}}
    assert of_one_order(times, moving) == {1: {"one": 1.0}, 64: {"one": 1.0}}
    assert "orders that change with m" in str(moving[-1])


def test_problems_are_named():
    assert not TABLE.problems(VARIANTS)
    assert "no variant huge" in TABLE.problems(VARIANTS[:-1])[0]
    mixed = replace(TABLE, rows=(Row(1, 1, ((None, "one"),), ((1, "one"), (None, "few"))),))
    assert "one order is said to be several" in mixed.problems(VARIANTS)[0]
    moving = (*VARIANTS[:-1], replace(VARIANTS[-1], order=None))
    assert (
        "an order that changes with m"
        in replace(TABLE, rows=(Row(1, 1, ((None, "one"),), ((None, "huge"),)),)).problems(moving)[0]
    )
    picky = replace(TABLE, spare=Row(1, 1, ((None, "fast"),), ((None, "fast"),)))
    assert "not right for every k" in picky.problems(VARIANTS)[0]


# ---- the tables that ship ----------------------------------------------------------------------------------------
def weight_of(key: Key) -> Weight | ByteWeight:
    """A weight whose kernels are of that key."""
    names = {"f16": "float16", "bf16": "bfloat16", "f32": "float32", "float": "float16"}
    scale, zero, offset = (names.get(kind, kind) for kind in (key.scale, key.zero, key.offset))
    code = dtype(key.code)
    if dtype(key.compute).bits == 8:  # scales of whole operands are those of blocks
        group, blocks = key.group and key.group // 2, key.scale is not None and key.code == key.compute
        shared = (Shared(128, group), "f32") if blocks else ()
        rescaled = bool(scale) and dtype(key.scale).is_integer  # groups have those of codes, not of sums
        return ByteWeight(dtype(key.compute), code, "bfloat16", group, scale, *shared, rescaled=rescaled, zero=zero)
    plain = key.zero or key.entries or key.code != "u4"
    table = tuple(float(i) for i in range(key.entries))
    return Weight(names[key.compute], 0 if plain else 8, zero, scale, key.group, code, table, offset)


@pytest.mark.parametrize("arch", [arch for arch in GPUS if measured.tables(arch)])
def test_measured_tables_name_variants_that_exist(arch):
    """If this fails after a change of the tiles, measure again (`qdsl tune`) or take the names out of the file."""
    found = measured.tables(arch)
    assert len({table.key for table in found}) == len(found)
    for table in found:
        kernels = candidates(target("cuda", arch), weight_of(table.key))
        variants = [Variant(c.name, (), 1 if table.key.ordered else c.k_multiple, c.order) for c in kernels]
        if dtype(table.key.compute).bits == 8:  # of which none is for every k
            variants.append(Variant("portable", (), order="by rising k"))
        assert not table.problems(tuple(variants)), table


def test_kernels_without_a_table_take_that_of_the_most_similar():
    exact = Key("f16", "f16", "u4", 128)
    assert measured.table("sm_90a", exact).key == exact
    similar = measured.table("sm_90a", Key("f16", "f16", "i4", 128))
    assert similar.key == Key("f16", "f16", "i4", 128)
    assert similar.rows == measured.table("sm_90a", exact).rows and f"with {exact}" in similar.source
    assert measured.table("sm_80", exact) is None
    ordered = replace(exact, ordered=True)
    assert measured.table("sm_90a", replace(ordered, zero=None)).source.endswith(f"with {ordered}")
