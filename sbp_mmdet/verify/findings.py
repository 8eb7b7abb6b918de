"""Results of a verification, and the line of the log that reports them."""

import dataclasses

__all__ = ['Findings', 'Kind']


@dataclasses.dataclass
class Kind:
    """Modules of one class with the same settings and shapes, of which one is compared with its own code.

    Attributes:
        name (str): Name of the class.
        modules (dict[str, None]): Names of the modules.
        outputs, gradients (float): Relative differences between the changed module and its own code. Default: 0.
        disagrees (str | None): How they differ, or the error of the changed module. If ``None``, they agree. Default:
            None.
        skipped (str | None): Why they were not compared. If ``None``, they were. Default: None.
        stored (dict[str, SavedTensors]): Tensors that autograd saves in one module, ``now`` and ``before`` the change,
            and ``with_cp`` if blocks inside of it count separately then. Default: empty.
        checkpointed (bool): Whether ``preset='with_cp'`` checkpoints such a module. Default: False.
        bytes (dict[str, int]): Bytes that all modules of the kind save: ``now``, ``before``, and ``with_cp``, without
            tensors that are counted for another kind. Default: 0 each.
        seconds (float): Duration of the comparison, in seconds. Default: 0.
    """

    name: str
    modules: dict = dataclasses.field(default_factory=dict)
    outputs: float = 0.0
    gradients: float = 0.0
    disagrees: str | None = None
    skipped: str | None = None
    stored: dict = dataclasses.field(default_factory=dict)
    checkpointed: bool = False
    bytes: dict = dataclasses.field(default_factory=lambda: dict(now=0, before=0, with_cp=0))
    seconds: float = 0.0


@dataclasses.dataclass
class Findings:
    """Results of a verification.

    Attributes:
        kinds (list[Kind]): All kinds of changed modules that ran. Default: empty.
        failed (dict[str, str]): Reason why a module has to run its own code, by its name. Default: empty.
        skipped (str | None): Why the pass ended before all changed modules ran. If ``None``, it did not. Default: None.
        missed (list[str]): Names of the changed modules that had not run then. Default: empty.
        autocast (bool): Whether autocast was enabled. Default: False.
        synced (bool): Whether norms were compared without the statistics of other processes. Default: False.
        silent (list[str]): Names of changed modules that did not run. Default: empty.
        recomputed (list[Kind]): Calls of recomputed parts, with their bytes. Of changed modules among them, only those
            saved ``now``; the others are in ``kinds``. Default: empty.
        frozen (list[str]): Names of the modules that ran and are unchanged because they are frozen. Default: empty.
        own_code (list[str]): Names of changed modules that are recomputed and run their own code. Default: empty.
    """

    kinds: list = dataclasses.field(default_factory=list)
    failed: dict = dataclasses.field(default_factory=dict)
    skipped: str | None = None
    missed: list = dataclasses.field(default_factory=list)
    autocast: bool = False
    synced: bool = False
    silent: list = dataclasses.field(default_factory=list)
    recomputed: list = dataclasses.field(default_factory=list)
    frozen: list = dataclasses.field(default_factory=list)
    own_code: list = dataclasses.field(default_factory=list)

    @property
    def compared(self) -> list[Kind]:
        """Kinds that were compared."""
        return [kind for kind in self.kinds if not kind.skipped]

    @property
    def stored(self) -> dict[str, int]:
        """Bytes saved for the backward pass: ``now``, ``before`` the change, and ``with_cp``."""
        kinds = (*self.kinds, *self.recomputed)
        return {key: sum(kind.bytes[key] for kind in kinds) for key in ('now', 'before', 'with_cp')}

    def __str__(self):
        if self.skipped and not self.kinds:
            return f'not verified: {self.skipped}'
        kinds = [kind for kind in self.compared if not kind.disagrees]
        names = {name for kind in kinds for name in kind.modules}
        frozen = f' ({len(names & {*self.frozen})} of them frozen)' if names & {*self.frozen} else ''
        outputs, gradients = (
            max((getattr(kind, key) for kind in kinds), default=0.0) for key in ('outputs', 'gradients')
        )
        text = (
            f'verified {_count(names, "module")}{frozen} against their own code, in {_count(kinds, "case")} of '
            f'different class, settings or shapes: {_format_differences(outputs, gradients)}'
        )
        if skipped := [kind for kind in self.kinds if kind.skipped]:
            first = skipped[0]
            text += (
                f'; {len(skipped)} kinds could not be compared, such as {next(iter(first.modules))}: {first.skipped}'
            )
        if self.skipped:
            were = 'was' if len(self.missed) == 1 else 'were'
            text += f'; {_count(self.missed, "module")} {were} not compared, such as {self.missed[0]}: {self.skipped}'
        if self.own_code:
            text += f'; changed modules that only recompute their own code: {len(self.own_code)}'
        if self.synced:
            text += '; SyncBN was compared within this process, without its communication'
        return text


def _count(things, noun):
    return f'{len(things)} {noun}' if len(things) == 1 else f'{len(things)} {noun}s'


def _format_differences(outputs, gradients):
    if not outputs and not gradients:
        return 'outputs and gradients are equal'
    if not outputs:
        return f'outputs are equal, gradients differ by at most {gradients:.0e} (relative)'
    last = f'by {gradients:.0e}' if gradients else 'are equal'
    return f'outputs differ by at most {outputs:.0e}, gradients {last} (relative)'
