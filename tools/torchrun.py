"""torchrun, without the traceback of the launcher below the messages of the processes that it launched.

A process that ends with an error has printed the reason. One that was killed has not, so torchrun's summary follows.
"""

import sys

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main

if __name__ == '__main__':
    try:
        main()
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        sys.exit(max(failure.exitcode, 0) or f'{error}')
    except SignalException as error:  # it has ended the processes
        sys.exit(128 + error.sigval)
