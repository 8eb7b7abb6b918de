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


def test_page_of_families(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / 'research'))
    rows = json.loads((ROOT / 'docs/results/families.json').read_text())['rows']
    report = runpy.run_path(str(ROOT / 'research/families.py'))['report'](rows)
    assert report in (ROOT / 'docs/research/families.md').read_text()
