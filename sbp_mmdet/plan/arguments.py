"""Parser of the command line, whose errors are one line without the usage."""

import argparse
import difflib
import re
from collections.abc import Sequence

__all__ = ['Parser', 'parse_count', 'parse_words']


class Parser(argparse.ArgumentParser):
    """Parser whose errors are one line that names the page of help."""

    def error(self, message: str) -> None:
        """End the process with status 2.

        Args:
            message (str): What is wrong.
        """
        self.exit(2, f'sbp-mmdet: error: {message}; see {self.prog} --help\n')


def parse_words(parser: Parser, verbs: argparse.Action, words: Sequence[str]) -> argparse.Namespace:
    """Parse the words of a command line.

    Args:
        parser (Parser): The parser of the whole command.
        verbs (argparse.Action): Its subcommands, as ``add_subparsers(dest='verb')`` returns them.
        words (Sequence[str]): The words.

    Returns:
        argparse.Namespace: The arguments. An unknown word ends the process with a message that names the option that it
        resembles.
    """
    args, unknown = parser.parse_known_args(_join_negative_values(words))
    if unknown:
        verb = verbs.choices[args.verb]
        near = difflib.get_close_matches(unknown[0].partition('=')[0], verb._option_string_actions, n=1)
        message = f'unrecognized arguments: {" ".join(unknown)}'
        if near:
            verb.exit(2, f'sbp-mmdet: error: {message}; did you mean {near[0]}?\n')
        verb.error(message)
    return args


def parse_count(text: str) -> int:
    """Convert a word of the command line to a whole number; used as ``type`` of an argument.

    Args:
        text (str): The word.
    """
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f'{text!r} is not a whole number') from None


def _join_negative_values(words):
    """Join options with values such as -4GiB or -320x320, which argparse would mistake for options."""
    joined = []
    for word in words:
        if re.match(r'-[\d.]', word) and joined and re.fullmatch(r'--[\w-]+', joined[-1]):
            joined[-1] = f'{joined[-1]}={word}'
        else:
            joined.append(word)
    return joined
