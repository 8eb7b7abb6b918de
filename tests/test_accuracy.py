"""The tables of AP over several seeds have the right means, differences and intervals."""

import pytest
from helpers import RESEARCH  # noqa: F401
from scipy import stats

from accuracy import accuracy_table, paired  # isort: skip  (helpers puts research/ on the path)

PLAIN = {0: 0.41, 1: 0.40, 2: 0.43, 3: 0.42}
OTHER = {0: 0.40, 1: 0.38, 2: 0.42, 3: 0.42}


def make_training(ap, finished=True):
    curve = [{'step': 100, 'box AP': ap / 2}, {'step': 200, 'box AP': ap, 'box AP small': ap / 3}]
    return dict(ap={'box AP': ap, 'box AP small': ap / 3}, curve=curve, finished=finished, seconds=900)


@pytest.fixture
def found():
    return dict(
        experiment=dict(compare=[['zero', 'none']]),
        results={
            'none': {str(seed): make_training(ap) for seed, ap in PLAIN.items()},
            'zero': {seed: make_training(ap, finished=seed < 3) for seed, ap in OTHER.items()},
            'late': {0: make_training(0.3, finished=False)},
        },
    )


def test_interval_is_that_of_the_paired_t_test():
    difference = paired(OTHER, {**PLAIN, 9: 1.0})
    expected = stats.ttest_rel([*OTHER.values()], [*PLAIN.values()]).confidence_interval(0.95)
    assert difference.seeds == 4
    assert difference.mean - difference.half == pytest.approx(expected.low, abs=1e-12)
    assert difference.mean + difference.half == pytest.approx(expected.high, abs=1e-12)
    assert '**' not in str(difference) and str(paired({0: 1.0, 1: 2.0}, {0: 0.0, 1: 1.0})).startswith('**')
    one = paired({0: 0.4}, PLAIN)
    assert one.half is None and str(one) == '-1.0, one seed'
    assert paired({5: 1.0}, PLAIN) is None


def test_table(found):
    lines = accuracy_table(found, markdown=True).splitlines()
    heads = 'box AP | box AP small | box AP, less none | mean box AP, less none'
    assert lines[0] == f'| setting | seeds | {heads} |'
    assert lines[2] == '| none | 4 | 41.5 ± 1.3 | 13.8 ± 0.4 |  |  |'
    # The mean of a half and the whole is three quarters.
    differences = '-1.3 (-2.8 to +0.1) | -1.0 (-2.1 to +0.1)'
    assert lines[3] == f'| zero | 3 | 40.0 ± 2.0 | 13.3 ± 0.7 | {differences} |'
    assert lines[4] == '| late | 0 |  |  |  |  |'
    assert lines[-1] == '1.8 hours of training and evaluation in all.'
    text = accuracy_table(found)
    assert 'late, seed 0: not ended, 200 steps evaluated' in text and 'zero, seed 3: not ended' in text


def test_a_difference_that_is_told_apart_is_set_in_bold(found):
    found['results']['zero'] = {seed: make_training(ap - 0.1 + seed / 1000) for seed, ap in PLAIN.items()}
    assert '| **-9.9 (-10.1 to -9.6)** | **-7.4 (-7.5 to -7.2)** |' in accuracy_table(found, markdown=True)
