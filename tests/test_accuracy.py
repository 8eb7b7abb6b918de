"""Tables and pictures of AP over seeds."""

import pytest
from scipy import stats

from sbp_mmdet.reporting import COLOURS, save_picture
from sbp_mmdet.study import accuracy
from sbp_mmdet.study.accuracy import accuracy_markdown, accuracy_picture, accuracy_text, paired, steps_to

PLAIN = {0: 0.41, 1: 0.40, 2: 0.43, 3: 0.42}
OTHER = {0: 0.40, 1: 0.38, 2: 0.42, 3: 0.42}


def training(ap, finished=True):
    curve = [{'step': 100, 'box AP': ap / 2}, {'step': 200, 'box AP': ap, 'box AP small': ap / 3}]
    return dict(ap={'box AP': ap, 'box AP small': ap / 3}, curve=curve, finished=finished, seconds=900)


@pytest.fixture
def found():
    return dict(
        experiment=dict(compare=[['zero', 'none']], reach={'box AP': 0.405}),
        results={
            'none': {str(seed): training(ap) for seed, ap in PLAIN.items()},
            'zero': {seed: training(ap, finished=seed < 3) for seed, ap in OTHER.items()},
            'late': {0: training(0.3, finished=False)},
        },
    )


def test_interval_is_that_of_the_paired_t_test():
    difference = paired(OTHER, {**PLAIN, 9: 1.0})
    expected = stats.ttest_rel([*OTHER.values()], [*PLAIN.values()]).confidence_interval(0.95)
    assert difference.seeds == 4
    assert difference.mean - difference.half == pytest.approx(expected.low, abs=1e-12)
    assert difference.mean + difference.half == pytest.approx(expected.high, abs=1e-12)
    assert not difference.told and paired({0: 1.0, 1: 2.0}, {0: 0.0, 1: 1.0}).told
    one = paired({0: 0.4}, PLAIN)
    assert one.half is None and not one.told
    assert paired({5: 1.0}, PLAIN) is None


def test_table(found):
    lines = accuracy_markdown(found).splitlines()
    heads = 'box AP | box AP small | box AP, less none | mean box AP, less none | steps to box AP 40.5'
    assert lines[0] == f'| setting | seeds | {heads} |'
    assert lines[2] == '| none | 4 | 41.5 ± 1.3 | 13.8 ± 0.4 |  |  | 200, 1 of 4 never |'
    # The mean of a half and the whole is three quarters.
    differences = '-1.3 (-2.8 to +0.1) | -1.0 (-2.1 to +0.1)'
    assert lines[3] == f'| zero | 3 | 40.0 ± 2.0 | 13.3 ± 0.7 | {differences} | 200, 2 of 3 never |'
    assert lines[4] == '| late | 0 |  |  |  |  |  |'
    assert lines[-1] == '1.8 hours of training and evaluation in all.'
    text = accuracy_text(found)
    assert 'late, seed 0: not ended, 200 steps evaluated' in text and 'zero, seed 3: not ended' in text


def test_a_difference_that_is_told_apart_is_set_in_bold(found):
    found['results']['zero'] = {seed: training(ap - 0.1 + seed / 1000) for seed, ap in PLAIN.items()}
    assert '| **-9.9 (-10.1 to -9.6)** | **-7.4 (-7.5 to -7.2)** |' in accuracy_markdown(found)


def test_steps():
    run = training(0.4)
    assert [steps_to(run, 'box AP', value) for value in (0.1, 0.2, 0.3, 0.5)] == [100, 100, 200, None]
    assert steps_to(run, 'mask AP', 0.1) is None


def test_picture(found, tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(accuracy, 'save_picture', lambda *args, **_: (figures.append(args[0]), save_picture(*args)))
    found['results'] |= {str(i): {0: training(0.3)} for i in range(len(COLOURS))}
    accuracy_picture(found, tmp_path / 'out.png')
    assert (tmp_path / 'out.png').stat().st_size > 5000
    means, differences = figures[0].axes
    legend = [line for line in means.lines if not line.get_label().startswith('_')]
    looks = {(line.get_color(), line.get_linestyle()) for line in legend}
    assert len(legend) == len(found['results']) == len(looks) == len(COLOURS) + 3
    line, zero = differences.lines  # one for each comparison, and that of no difference
    assert [*line.get_ydata()] == pytest.approx([-2 / 3, -4 / 3])  # three seeds have ended: -1, -2 and -1 at step 200
    assert differences.collections[0].get_paths()
    assert [*zero.get_ydata()] == [0, 0]
    with pytest.raises(ValueError, match='nothing to draw'):
        accuracy_picture(dict(found, results=dict(none={0: dict(training(0.1), curve=[])})), tmp_path / 'no.png')
