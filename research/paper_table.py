"""Formats the paper's tables beside the results of an experiment."""

import os
import re
import statistics
from collections.abc import Mapping
from pathlib import Path

from experiment import Experiment
from tables import markdown_table

from sbp_mmdet.plan.tables import Column, format_table

__all__ = ['fill', 'means', 'paper_table']

DETAILS = ('box AP', 'box AP50', 'box AP75', 'box AP small', 'box AP medium', 'box AP large')


def means(results: Mapping) -> dict[str, dict]:
    """Return means over finished seeds by label, in percent, with 'memory' (GiB) and 'step_s'."""
    found = {}
    for label, runs in results.items():
        ended = [run for run in runs.values() if run['finished']]
        if ended:
            found[label] = {name: 100 * statistics.fmean(run['ap'][name] for run in ended) for name in ended[0]['ap']}
            for name, unit in (('memory', 1024), ('step_s', 1)):
                if all(run[name] is not None for run in ended):
                    found[label][name] = statistics.fmean(run[name] for run in ended) / unit
    return found


def paper_table(experiment: Experiment, measured: Mapping, folder: Path | None = None, short: bool = False) -> str:
    """Return a table of the paper's figures and the measured ones, without columns that have no measurement."""
    paper = {label: dict(zip(experiment.heads, experiment.paper.get(label, ()))) for label in experiment.labels}  # noqa: B905
    if short:
        columns, labels = _short(experiment, paper, measured, folder)
        return markdown_table(_filled(columns, labels), labels)
    details = (*DETAILS, *(name.replace('box', 'mask') for name in DETAILS))
    names = ['memory', *(details if 'box AP' in experiment.heads else experiment.heads[1:])]
    columns = [Column('', lambda row: row['label']), Column('', lambda row: row['source'])]
    for name in names:
        columns.append(Column(_head(name), lambda row, name=name: _number(row['values'].get(name), name)))
    columns.append(Column('seconds a step', lambda row: _number(row['values'].get('step_s'), 'top-1')))
    records = []
    for label in experiment.labels:
        here = measured.get(label, {})
        both = {
            name: f'{here[name] - value:+.{_digits(name)}f}' for name, value in paper[label].items() if name in here
        }
        for head, values in (('paper', paper[label]), ('here', here), ('difference', both)):
            if values:
                records.append(dict(label=label if head == 'paper' else '', source=head, values=values))
    return (format_table if folder is None else markdown_table)(_filled(columns, records), records)


def _filled(columns, records):
    """Return the columns that are not empty, and the first."""
    return [columns[0], *[column for column in columns[1:] if any(column.cell(record) for record in records)]]


def _short(experiment, paper, measured, folder):
    def link(label):
        config = experiment.configs.get(label)
        return f'[{label}]({os.path.relpath(experiment.folder / config, folder)})' if config else label

    columns = [Column('config', link)]
    for name in (name for name in ('memory', 'box AP', 'mask AP', 'top-1') if name in experiment.heads):
        columns.append(Column(f'{_head(name)}: paper', lambda label, n=name: _number(paper[label].get(n), n)))
        columns.append(Column('here', lambda label, n=name: _number(measured.get(label, {}).get(n), n)))
    return columns, experiment.labels


def _head(name):
    return 'memory, GB' if name == 'memory' else name


def _digits(name):
    return 2 if name == 'top-1' else 1  # as many as the paper gives


def _number(value, name):
    return value if isinstance(value, str) or value is None else f'{value:.{_digits(name)}f}'


def fill(path: Path, experiment: Experiment, measured: Mapping) -> str:
    """Return the text of a page with new tables between its markers.

    The markers are ``<!-- results: NAME -->`` or ``<!-- results: NAME short -->``, and ``<!-- end -->``.

    Raises:
        ValueError: If the page has no marker for the experiment.
    """
    block = re.compile(rf'(<!-- results: {experiment.name}( short)? -->\n).*?(<!-- end -->)', re.DOTALL)

    def made(match):
        return f'{match[1]}{paper_table(experiment, measured, path.parent, bool(match[2]))}\n{match[3]}'

    text, n = block.subn(made, path.read_text(encoding='utf-8'))
    if not n:
        raise ValueError(f'{path} has no marker for results of {experiment.name!r}, such as <!-- results: NAME -->')
    return text
