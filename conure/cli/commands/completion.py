"""`conure completion`: print a script that completes commands and flags in a shell."""

from __future__ import annotations

import argparse
import sys

from ..command import ExitCode

EXAMPLES = """\
bash:  conure completion bash > ~/.local/share/bash-completion/completions/conure
zsh:   conure completion zsh > ~/.zfunc/_conure    (a directory in $fpath)
fish:  conure completion fish > ~/.config/fish/completions/conure.fish
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `conure completion`."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EXAMPLES
    parser.add_argument(
        "shell", choices=("bash", "zsh", "fish", "tcsh", "powershell"), help="the shell"
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the script."""
    import shtab

    from ..main import build_parser

    sys.stdout.write(shtab.complete(build_parser(None, all_commands=True), arguments.shell))
    return ExitCode.DONE
