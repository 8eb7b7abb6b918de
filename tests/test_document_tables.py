"""Tables in the documents are what ``python research/document_tables.py`` writes from docs/results."""

import json
import runpy

import pytest
from helpers import ROOT

import document_tables  # isort: skip  (helpers puts research/ on the path)

PAGE = """# Costs

## Time

| block | `exact` | `sbp` | seen |
|---|---|---|---|
| a | 1.00 | **2.00** | x |
| b |  | 3.00 | y |

## Other

| block | `exact` |
|---|---|
| a | 7.00 |
"""


@pytest.mark.parametrize('page', sorted(document_tables.pages()))
def test_page_is_what_the_command_writes(page):
    text, changes = document_tables.update_page(ROOT / page)
    assert changes == [] and text == (ROOT / page).read_text()


def test_cells_that_differ_are_written():
    figures = {('a', 'exact'): '1.00', ('a', 'sbp'): '2.50', ('b', 'exact'): '4.00', ('b', 'sbp'): ('3.0', '3.00')}
    text, changes = document_tables.update_table(PAGE, 'Time', lambda first, column: figures.get((first, column)))
    assert text == PAGE.replace('2.00', '2.50').replace('| b |  |', '| b | 4.00 |')
    assert [change.rpartition(' -> ')[2] for change in changes] == ['2.50', '4.00']
    with pytest.raises(ValueError, match="'Memory'; correct TABLES"):
        document_tables.update_table(PAGE, 'Memory', lambda *cell: '')


def test_reports_are_written_between_their_marks():
    page = '<!-- results: a -->\nold\n<!-- end -->\n<!-- results: b -->\nkept\n<!-- end -->\n'
    text, changes = document_tables.update_report(page, 'a', 'new')
    assert text == page.replace('old', 'new') and changes == ['a: the report']
    assert document_tables.update_report(text, 'a', 'new') == (text, [])
    with pytest.raises(ValueError, match='correct REPORTS'):
        document_tables.update_report(page, 'c', '')


def test_memory_tables(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / 'research'))
    overview = runpy.run_path(str(ROOT / 'research/memory_overview.py'))
    tables = overview['tables'](json.loads((ROOT / 'docs/results/memory_overview.json').read_text()))
    for (page, name), table in tables.items():
        assert f'<!-- results: {name} -->\n{table}\n<!-- end -->' in (ROOT / page).read_text()


def test_tables_of_a_gpu(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / 'research'))
    needs = runpy.run_path(str(ROOT / 'research/memory_overview.py'))['counted_needs']()
    for (page, name), table in runpy.run_path(str(ROOT / 'research/gpu_results.py'))['tables'](needs).items():
        assert f'<!-- results: {name} -->\n{table}\n<!-- end -->' in (ROOT / page).read_text()


def test_rows_of_a_gpu_report_are_read(monkeypatch, tmp_path):
    """A second report replaces the rows that it has, and a row that has only begun is none."""
    monkeypatch.syspath_prepend(str(ROOT / 'research'))
    module = runpy.run_path(str(ROOT / 'research/gpu_results.py'))
    monkeypatch.setitem(module['read'].__globals__, 'RESULTS', tmp_path / 'results.json')
    trial = 'Mask R-CNN R-50, fp32'

    def write(machine, **rows):
        lines = [dict(machine=machine), dict(row=f'{trial}/int8', preset='int8', state='begun')]
        lines += [dict(row=f'{trial}/{preset}', preset=preset, **row) for preset, row in rows.items()]
        (tmp_path / 'steps.jsonl').write_text(''.join(json.dumps(line) + '\n' for line in lines))
        module['read'](tmp_path)
        return json.loads((tmp_path / 'results.json').read_text())['runs']

    plain = dict(peak_bytes=5, reserved=6, context=1, ratio=1.0)
    (run,) = write({'device': 'a'}, none=plain, exact=dict(plain, peak_bytes=2))
    assert [(row['preset'], row['peak_bytes']) for row in run['rows']] == [('none', 5), ('exact', 2)]
    first, second = write({'device': 'b'}, exact=dict(plain, peak_bytes=3), sbp=dict(reason='does not apply'))
    assert [row['preset'] for row in first['rows']] == ['none'] and first['machine'] == {'device': 'a'}
    assert [(row['preset'], row['peak_bytes']) for row in second['rows']] == [('exact', 3)]


def test_page_of_families(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / 'research'))
    rows = json.loads((ROOT / 'docs/results/families.json').read_text())['rows']
    report = runpy.run_path(str(ROOT / 'research/families.py'))['report'](rows)
    assert report in (ROOT / 'docs/research/families.md').read_text()
