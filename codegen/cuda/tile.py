"""How the work is cut: the part of y that one CTA computes, its warps, teams and stages."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Tile:
    """The part of y that one CTA computes, and how its warps share the work. Right for every M, N and K."""

    name: str
    correct: str  # where scale and zero are applied: "sums" or "weights"; "nothing": codes are multiplied by codes
    tokens: int  # tokens of one CTA
    features: int  # output features of one CTA
    split: tuple[int, int, int]  # warps of a team along tokens and features, teams along k
    slice: int  # tiles of 64 along k in one stage
    stages: int  # stages of a team's ring
    resident: int  # CTAs that an SM must be able to hold: a limit on registers
    cluster: int = 1  # CTAs of a cluster, which share k; more than one from sm_90 on

    turned = False  # see `wgmma.WarpgroupTile`

    def __post_init__(self):
        assert self.correct in ("sums", "weights", "nothing"), self
        assert self.stages >= 2, f"{self}: one stage cannot be filled while it is read"
        assert self.team_threads == 32 or self.teams < 16, f"{self}: there are 16 barriers"
        for extent in (self.tokens, self.features // 16, *self.split, self.slice, self.cluster):
            assert extent and extent & (extent - 1) == 0, f"{self}: {extent} is not a power of two"

    @property
    def teams(self) -> int:
        return self.split[2]

    @property
    def team_threads(self) -> int:
        return 32 * self.split[0] * self.split[1]

    @property
    def threads(self) -> int:
        return self.teams * self.team_threads

    @property
    def consumers(self) -> int:
        """Threads that multiply: all of them."""
        return self.threads

    def token_warp(self, warp):
        """Which of the team's warps along tokens."""
        return warp % self.split[0]

    @property
    def token_tiles(self) -> int:
        """Tiles of 8 tokens of one warp."""
        return -(-self.tokens // 8) // self.split[0]

    @property
    def feature_tiles(self) -> int:
        """Tiles of 16 features of one warp."""
        return self.features // 16 // self.split[1]

    @property
    def roomy(self) -> bool:
        """Registers are left to hold addresses."""
        return self.feature_tiles * self.token_tiles < 32 and 65536 // (self.threads * self.resident) >= 96

    swizzle = 128  # bytes that the stages are aligned to
    converts_fp8 = False  # in hardware
    looks_up_pairs = False

    @property
    def longest_step(self) -> int:
        return min(64 * self.slice, 128) if self.correct == "sums" else 64

    @property
    def rings(self) -> int:
        return self.teams

    @property
    def fillers(self) -> int:
        return self.team_threads

    @property
    def x_shape(self) -> tuple[int, ...]:
        return (self.tokens, 64 * self.slice)

    def x_index(self, i, row, column):
        """Where a stage has a number of x: k tile i, its column; before the swizzle."""
        return row, i * 64 + column

    def block(self, warp, f: int):
        return warp // self.split[0] % self.split[1] * self.feature_tiles + f

    @property
    def result(self) -> tuple[int, ...]:
        """Registers of an mma result that matter: i // 2 is feature c or c + 8, i % 2 token 2t or 2t + 1."""
        return (0, 2) if self.tokens == 1 else (0, 1, 2, 3)

    @property
    def partials(self) -> tuple[int, int, int]:
        """Shape of the partial sums; 4 words of padding put the lanes that store one register in 32 banks."""
        return (self.teams, self.tokens, self.features + 4)

    def __str__(self):
        warps = "x".join(map(str, self.split))
        return (
            f"{self.name}: {self.tokens} tokens x {self.features} features, {warps} warps, "
            f"{f'{self.cluster} CTAs along k, ' if self.cluster > 1 else ''}"
            f"{self.stages} stages of {64 * self.slice}, corrects {self.correct}"
        )
