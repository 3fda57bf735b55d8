"""What stages of a partition hold, against the list of a model's blocks; even divisions; slicings as tuples."""
import dataclasses
import random

import numpy as np
import pytest

from terapipe_c import Cluster, CostModel, GPTConfig, InvalidTypeError, InvalidValueError, schedules
from terapipe_c.config import KINDS
from terapipe_c.partition import (
    block_counts,
    block_params,
    check_partition,
    equal_lengths,
    even_partition,
    micros_of,
    updated_of_kind,
    updated_params,
)

MODEL = GPTConfig(n_layer=5, n_head=2, n_embd=6, vocab_size=11, block_size=7)


@pytest.mark.parametrize("tied", [True, False])
def test_stages_hold_their_blocks_and_update_what_they_hold(tied):
    model, rng = dataclasses.replace(MODEL, tie_weights=tied), random.Random(0)
    embedding = 11 * 6
    for _ in range(60):
        cuts = sorted(rng.sample(range(1, model.num_blocks), rng.randrange(6)))
        partition = list(zip([0, *cuts], [*cuts, model.num_blocks], strict=True))
        counts = block_counts(model, partition)
        for (first, end), count in zip(partition, counts.tolist(), strict=True):
            assert count == [sum(block.kind == kind for block in model.blocks[first:end]) for kind in KINDS]
        updated = updated_params(model, counts)
        right = counts @ block_params(model)
        if tied:        # the head's stage updates the embedding, wherever that is
            right[0] -= embedding
            right[-1] += embedding
        assert updated.tolist() == right.tolist() and updated.sum() == model.num_params
        assert check_partition(partition, model) == tuple(partition)
    kinds = updated_of_kind(model)
    alone = updated_params(model, block_counts(model, [(k, k + 1) for k in range(model.num_blocks)]))
    assert [kinds[block.kind] for block in model.blocks] == alone.tolist()


def test_even_partitions_are_megatrons_and_as_equal_as_can_be():
    assert even_partition(MODEL, 1) == [(0, 12)] and even_partition(MODEL, 2) == [(0, 7), (7, 12)]
    assert even_partition(MODEL, 5) == [(0, 3), (3, 5), (5, 7), (7, 9), (9, 12)]
    assert even_partition(MODEL, 6) == [(k, k + 2) for k in range(0, 12, 2)] and len(even_partition(MODEL, 12)) == 12
    with pytest.raises(InvalidValueError, match="stages is 13: the model has 12 blocks, so at most 12"):
        even_partition(MODEL, 13)
    for total in range(1, 20):
        for parts in range(1, total + 1):
            lengths = equal_lengths(total, parts)
            assert sum(lengths) == total and len(lengths) == parts and lengths == sorted(lengths, reverse=True)
            assert max(lengths) - min(lengths) <= 1


def test_micro_batches_that_are_one_object_and_such_that_are_not():
    one, other, numbers = (1, (3, 5)), [2, [4, 4]], (np.int8(1), np.array([3, 5]))
    given = [one, one, other, one, other, other, numbers, numbers, (1, iter([8])), (1, range(8, 9))]
    made = micros_of(given)
    a, b, c = (1, (3, 5)), (2, (4, 4)), (1, (8,))
    assert made == (a, a, b, a, b, b, a, a, c, c)
    assert all(type(n) is int for size, lengths in made for n in (size, *lengths)) and micros_of(iter([one])) == (one,)
    assert micros_of([(4, [4, 3])], most=4) == ((4, (4, 3)),)
    for wrong, words in (([(1, [5])], "slicing[0]'s slice 0 is 5: at most 4"), ([one[:1]], "slicing[0] is (1,): (sequences"),
                         ([(5, [4])], "slicing[0]'s micro-batch is 5: at most 4"), ([other, (1, "44")], "slicing[1] is"),
                         ([(1, [0])], "slicing[0]'s slice 0 is 0: at least 1"), ([(1, [True])], "slicing[0]'s slice 0 is True"),
                         ([(0, [4])], "slicing[0]'s micro-batch is 0"), ([(1, 4)], "slicing[0] is (1, 4)"),
                         ([], "slicing is empty"),
                         ([{1: 2, 3: 4}], "slicing[0] is {1: 2, 3: 4}"), ([(1, [2**63])], "is 9223372036854775808: at most 4")):
        with pytest.raises(InvalidValueError) as refused:
            micros_of(wrong, most=4)
        assert words in str(refused.value)
    with pytest.raises(InvalidTypeError, match="slicing is 3: a list"):
        micros_of(3)


def test_a_micro_batch_takes_its_own_time_whatever_was_before_it():
    """Cut as the one before, but for one thing: the sequences, the length of a slice, or how many slices come first."""
    costs = CostModel.analytic(MODEL, Cluster(num_devices=2, memory_bytes=1e9, link_latency_s=1e-6, link_bandwidth_Bps=1e9,
                                              peak_flops=1e10))
    slicing = [(1, (2, 3, 2)), (1, (2, 3, 2)), (1, (2, 2, 3)), (1, (3, 2, 2)), (1, (1, 4, 2)), (2, (1, 4, 2)), (2, (1, 2, 4)),
               (2, (2, 4)), (2, (4,)), (2, (4,))]  # fmt: skip
    partition = even_partition(MODEL, 2)
    each = [costs.durations(partition=partition, slicing=[micro]) for micro in slicing]
    found = costs.durations(partition=partition, slicing=slicing)
    for name in ("F", "I", "W", "comm"):
        assert found[name].tolist() == np.concatenate([one[name] for one in each], axis=1).tolist(), name


def test_rows_of_the_head_wait_over_micro_batches_but_not_for_the_other_copy_of_the_model():
    model = dataclasses.replace(MODEL, block_size=200)
    base = CostModel.analytic(model, Cluster(num_devices=2, memory_bytes=1e9, peak_flops=1e10))
    costs = CostModel(base.curves, source="analytic", model=model, head_pass=(1e-3, 4.0, 1e-3))
    half, given = [(1, (30, 77)), (2, (107,))], dict(partition=even_partition(model, 2))
    found = costs.durations(schedules.chimera(2, 4, [2, 1, 2, 1]), slicing=half + half, **given)
    alone = costs.durations(slicing=half, **given)
    for name in ("F", "I", "W"):
        assert found[name].tolist() == np.tile(alone[name], (2, 2)).tolist(), name
    assert (found["OPT"] == np.tile(alone["OPT"][:, :1], (2, 6))).all()
    in_turn = costs.durations(slicing=half + half, **given)        # of one copy: the second half's passes come with the first's
    assert any((in_turn[name][1, :3] != in_turn[name][1, 3:]).any() for name in "FI")
