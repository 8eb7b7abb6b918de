"""Measures rows of a part of the GPU report, in one process: `tools/gpu_report.py` starts it.

Each row is written to disk as soon as it is measured. Presets that do not apply or need too much memory are rows too.
After any other error the process ends, and the report starts another one for the remaining rows.
"""

import argparse
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import gpu_parts
from gpu_parts import ROOT
from gpu_trials import Trial

sys.path[:0] = [str(ROOT), str(ROOT / 'research')]
from block_profiles import profile_module  # noqa: E402
from case import try_and_note  # noqa: E402
from module_runs import measure_module  # noqa: E402
from provenance import describe_machine  # noqa: E402
from step_runs import measure_steps  # noqa: E402
from sync_bn import measure_sync_bn  # noqa: E402
from tables import append_line  # noqa: E402

from sbp_mmdet.plan.device import check_device, use_device  # noqa: E402
from sbp_mmdet.plan.variants import load_config, make_plain  # noqa: E402
from sbp_mmdet.plan.verify import verify_config  # noqa: E402
from sbp_mmdet.presets import Settings  # noqa: E402

__all__ = ['KINDS', 'measure_part']


def _verify(trial: Trial, config, names, device, note):
    def measure(row):
        start = time.perf_counter()
        settings = Settings.parse(dict(preset=row['preset']), where='the report')
        findings = verify_config(config, settings, device, trial.batch, *trial.size)
        row.update(
            kinds=len(findings.compared), modules=len({name for kind in findings.compared for name in kind.modules})
        )
        row.update({key: max((getattr(kind, key) for kind in findings.compared), default=0.0) for key in _DIFFERENCES})
        row.update(seconds=time.perf_counter() - start)
        kept = [f'{kind.name}: {kind.disagrees or kind.skipped}' for kind in findings.kinds]
        bad = [text for kind, text in zip(findings.kinds, kept, strict=True) if kind.disagrees or kind.skipped]
        if bad or findings.skipped:
            row['reason'] = findings.skipped or '; '.join(bad)

    for name in names:
        row = dict(preset=name)
        try_and_note(row, False, lambda: measure(row), note)  # noqa: B023


_DIFFERENCES = ('outputs', 'gradients')


# The profiler slows down what is launched behind it, so profiles have processes of their own.


def _modules(trial: Trial, config, names, device, note):
    options = dict(amp=trial.amp, rounds=trial.rounds, channels_last=trial.channels_last, profile=False)
    measure_module(config, names, trial.module, **options, note=note, **_case(trial, device))


def _profiles(trial: Trial, config, names, device, note):
    options = dict(amp=trial.amp, channels_last=trial.channels_last)
    profile_module(config, names, trial.module, **options, note=note, **_case(trial, device))


def _steps(trial: Trial, config, names, device, note):
    cap = trial.cap and trial.cap * 2**30
    measure_steps(config, names, rounds=trial.rounds, cap=cap, profile=False, note=note, **_case(trial, device))


def _sync_bn(trial: Trial, config, names, device, note):
    measure_sync_bn(names, device=device, size=trial.size, rounds=trial.rounds, note=note)


KINDS = dict(verify=_verify, modules=_modules, profiles=_profiles, steps=_steps, sync_bn=_sync_bn)


def _case(trial, device):
    height, width = trial.size
    return dict(batch=trial.batch, height=height, width=width, boxes=trial.boxes, device=device)


def measure_part(part: gpu_parts.Part, wanted: Sequence[str], end: float, device: str, write: Callable) -> None:
    """Measure rows of a part.

    Args:
        part (Part): The part.
        wanted (Sequence[str]): Names of the rows. The first of each trial is what the others are compared with.
        end (float): Time of ``time.monotonic`` after which no trial may last.
        device (str): 'cpu' or 'cuda:N'.
        write (Callable): Is called with each row, whose name is its ``row``.
    """
    for trial in part.trials:
        names = [preset for preset, row in zip(trial.presets, trial.rows, strict=True) if row in wanted]
        if not names or time.monotonic() + part.seconds > end:
            continue
        begun = set()

        def note(row, trial=trial, begun=begun):
            begun.add(row['preset'])
            write(dict(row, row=f'{trial.name}/{row["preset"]}'))

        try:
            config = make_plain(load_config(trial.config, trial.options)) if trial.config else None
            KINDS[part.kind](trial, config, names, device, note)
        except Exception as error:
            text = (str(error).strip().splitlines() or [type(error).__name__])[0][:120]
            for name in () if begun else names:  # the detector itself cannot be had
                write(dict(preset=name, row=f'{trial.name}/{name}', reason=text))
            if not isinstance(error, ValueError):
                raise


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('part', help='name of the part')
    parser.add_argument('--rows', nargs='+', required=True, help='the first of each trial is the baseline')
    parser.add_argument('--lines', type=Path, required=True, help='file that rows are appended to')
    parser.add_argument('--end', type=float, default=float('inf'), help='see Part.commands')
    parser.add_argument('--rehearse', action='store_true', help='use tiny sizes on a CPU')
    args = parser.parse_args()
    warnings.simplefilter('ignore')
    device = str(use_device(check_device('cpu' if args.rehearse else 'cuda')))
    (part,) = (part for part in gpu_parts.parts_of_report(args.rehearse) if part.name == args.part)
    append_line(args.lines, dict(machine=describe_machine(device)))
    measure_part(part, args.rows, args.end, device, lambda row: append_line(args.lines, row))


if __name__ == '__main__':
    main()
