"""Near-duplicates between two lists of texts: MinHash candidates, verified by exact Jaccard index.

A text is the set of its word 3-grams (lower case, without punctuation; each character of Chinese,
Japanese and Korean is a word). Two texts are similar if the sets share at least 60 % of their
union. Texts in 20 bands of 3 MinHash values meet in a band with probability ``1 - (1 - J**3)**20``:
0.99 for an index J of 0.6. All loops over words, texts and pairs run in numpy or in C.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

THRESHOLD = 0.6
_N, _BANDS, _ROWS = 3, 20, 3
_PER_BUCKET = 50
_VERIFIED = 8
_CHUNK = 1 << 21
_BITS = 1 << 24
_NO_WORD = 0xFFFFFFFF
_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7a3]|[^\W_]+")

_UInt = npt.NDArray[np.uint64]
_Int = npt.NDArray[np.int64]


@dataclass(frozen=True)
class SimilarPair:
    """Positions of a text in the list of queries and of a similar one in the other list."""

    query: int
    index: int
    similarity: float
    """Jaccard index of the word 3-grams; 1 for equal words."""


class _Grams:
    """Hashes of all n-grams [G], and the start of each text [T + 1]."""

    def __init__(self, texts: Sequence[str], words: defaultdict[str, int]) -> None:
        ids: list[int] = []
        counts = np.zeros(len(texts), dtype=np.int64)
        for i, text in enumerate(texts):
            found = _WORD.findall(text.lower())
            counts[i] = len(found)
            # Number words in the order of first use, so that the result does not depend on hash
            # seeds.
            ids += map(words.__getitem__, found)
            # Padding gives every text with a word as many n-grams as words.
            ids += [0] * (_N - 1)
        padded = np.array(ids, dtype=np.uint64)
        codes = np.zeros(max(len(padded) - _N + 1, 0), dtype=np.uint64)
        for k in range(_N):
            codes = _mixed(codes + padded[k : len(padded) - _N + 1 + k])
        self.starts = np.concatenate(([0], np.cumsum(counts)))
        # N-grams that start in the padding belong to no text.
        begins = np.cumsum(counts + _N - 1) - (counts + _N - 1)
        inside = np.repeat(begins - self.starts[:-1], counts) + np.arange(counts.sum())
        self.codes = codes[inside]

    def of(self, text: int) -> _UInt:
        return np.unique(self.codes[self.starts[text] : self.starts[text + 1]])

    def fingerprints(self) -> _UInt:
        """Returns one hash per text [T]; texts with the same words have the same."""
        sums = np.concatenate((np.zeros(1, np.uint64), np.cumsum(_mixed(self.codes))))
        return sums[self.starts[1:]] - sums[self.starts[:-1]]

    def share_in(self, codes: _UInt) -> npt.NDArray[np.float64]:
        """Returns the share [T] of each text's n-grams that are among ``codes``."""
        # A bitmap of the lower bits is exact enough: a collision only adds a candidate.
        known = np.zeros(_BITS, dtype=bool)
        known[codes & np.uint64(_BITS - 1)] = True
        found = np.concatenate(([0], np.cumsum(known[self.codes & np.uint64(_BITS - 1)])))
        counts = np.diff(self.starts)
        return np.diff(found[self.starts]) / np.maximum(counts, 1)

    def signatures(self, chosen: _Int) -> npt.NDArray[np.uint32]:
        """Returns the MinHash values [C, bands * rows]; all ones for a text without words."""
        width = _BANDS * _ROWS
        found = np.full((len(chosen), width), _NO_WORD, dtype=np.uint32)
        seeds = np.random.default_rng(0).integers(1, 2**63, size=width, dtype=np.uint64) | 1
        sizes = np.diff(self.starts)[chosen]
        ends = np.cumsum(sizes)
        begin = 0
        # In chunks of whole texts, to bound the memory.
        while begin < len(chosen):
            done = ends[begin] - sizes[begin]
            end = max(int(np.searchsorted(ends, done + _CHUNK, side="right")), begin + 1)
            part = sizes[begin:end]
            at = np.cumsum(part) - part
            inside = np.repeat(self.starts[chosen[begin:end]] - at, part) + np.arange(part.sum())
            codes, filled = self.codes[inside], np.flatnonzero(part)
            for k, seed in enumerate(seeds if len(codes) else ()):
                values = ((codes * seed) >> np.uint64(32)).astype(np.uint32)
                found[begin + filled, k] = np.minimum.reduceat(values, at[filled])
            begin = end
        return found


def _mixed(values: _UInt) -> _UInt:
    """Returns well-distributed hashes of 64-bit numbers (the finalizer of SplitMix64)."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def similar_texts(
    queries: Sequence[str], texts: Sequence[str], threshold: float = THRESHOLD
) -> list[SimilarPair]:
    """Returns the most similar text for each query that has one above ``threshold``."""
    if not queries or not texts:
        return []
    words: defaultdict[str, int] = defaultdict()
    words.default_factory = lambda: len(words) + 1  # 0 is the padding
    ours, theirs = _Grams(queries, words), _Grams(texts, words)
    best = _equal_pairs(ours, theirs)
    open_queries = np.setdiff1d(np.arange(len(queries)), list(best))
    # A similar text shares most n-grams with the queries; few texts do, so filter first.
    chosen = np.flatnonzero(theirs.share_in(ours.codes) >= threshold / 2)
    left, right = ours.signatures(open_queries), theirs.signatures(chosen)
    query, index = _candidates(left, right)
    estimate = np.zeros(len(query), dtype=np.float32)
    for begin in range(0, len(query), _CHUNK // 64):
        part = slice(begin, begin + _CHUNK // 64)
        estimate[part] = (left[query[part]] == right[index[part]]).mean(axis=1)
    # Best estimates first, within each query.
    order = np.lexsort((index, -estimate, query))
    query, index = query[order], index[order]
    rank = np.arange(len(query)) - np.searchsorted(query, query)
    kept = rank < _VERIFIED
    for q, i in zip(open_queries[query[kept]].tolist(), index[kept].tolist(), strict=True):
        if q in best and best[q].similarity == 1.0:
            continue
        a, b = ours.of(q), theirs.of(int(chosen[i]))
        shared = len(np.intersect1d(a, b, assume_unique=True))
        similarity = shared / (len(a) + len(b) - shared)
        if similarity >= threshold and (q not in best or similarity > best[q].similarity):
            best[q] = SimilarPair(q, int(chosen[i]), similarity)
    return [best[q] for q in sorted(best)]


def _equal_pairs(ours: _Grams, theirs: _Grams) -> dict[int, SimilarPair]:
    """Returns the first equal text of each query that has one.

    MinHash compares only some members of a large bucket, and texts that share a long instruction
    are one bucket.
    """
    wanted, known = ours.fingerprints(), theirs.fingerprints()
    order = np.argsort(known, kind="stable")
    at = np.searchsorted(known[order], wanted)
    index = order[np.minimum(at, len(order) - 1)]
    equal = (known[index] == wanted) & (np.diff(ours.starts) > 0)
    return {q: SimilarPair(q, int(index[q]), 1.0) for q in np.flatnonzero(equal).tolist()}


def _candidates(left: npt.NDArray[np.uint32], right: npt.NDArray[np.uint32]) -> tuple[_Int, _Int]:
    """Returns the pairs (query, text), both [P], that share all values of a band."""
    pairs: list[_Int] = []
    # A text without words has no n-grams.
    with_words = np.flatnonzero((left != _NO_WORD).any(axis=1))
    for band in range(_BANDS):
        part = slice(band * _ROWS, (band + 1) * _ROWS)
        ours, theirs = _band_hash(left[with_words, part]), _band_hash(right[:, part])
        order = np.argsort(theirs, kind="stable")
        first = np.searchsorted(theirs[order], ours, side="left")
        last = np.searchsorted(theirs[order], ours, side="right")
        # Members of a large bucket are similar, so use only some of them.
        size = np.minimum(last - first, _PER_BUCKET)
        offset = np.arange(size.sum()) - np.repeat(np.cumsum(size) - size, size)
        index = order[np.repeat(first, size) + offset]
        pairs.append(np.repeat(with_words, size) * len(right) + index)
    both = np.unique(np.concatenate(pairs))
    return both // len(right), both % len(right)


def _band_hash(values: npt.NDArray[np.uint32]) -> _UInt:
    hashed = np.zeros(len(values), dtype=np.uint64)
    for column in values.T:
        hashed = _mixed(hashed + column.astype(np.uint64))
    return hashed
