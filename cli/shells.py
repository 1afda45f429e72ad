"""Completion scripts of the shells, shown by `--show-completion [SHELL]` and added by `--install-completion [SHELL]`.

Typer writes them for the shell that it finds around the process. Those of bash and zsh are our own: they quote names
with spaces, put no space behind `train.lr=`, and in zsh the first Tab of a session completes.
"""

from __future__ import annotations

import sys
from pathlib import Path

from fp4deploy.errors import InputError

SHELLS = ("bash", "zsh", "fish", "powershell", "pwsh")
SHOW, INSTALL = "--show-completion", "--install-completion"
VARIABLE = "_FP4DEPLOY_COMPLETE"

# readline quotes what it inserts where it takes it for file names.
BASH = r"""
_fp4deploy_completion() {
    local IFS=$'\n' each
    COMPREPLY=( $(env COMP_WORDS="${COMP_WORDS[*]}" COMP_CWORD="$COMP_CWORD" _FP4DEPLOY_COMPLETE=complete_bash "$1") )
    for each in "${COMPREPLY[@]}"; do
        case "$each" in
            *=) compopt -o nospace ;;
            *" "*) compopt -o filenames ;;
        esac
    done
}

complete -o default -F _fp4deploy_completion fp4deploy
"""

# Each word in quotes, so that the last one may end with a space. Autoloaded, the file is the function itself.
ZSH = r"""
#compdef fp4deploy

_fp4deploy_completion() {
    local found typed="${(@j: :)${(@qq)${(@Q)words[1,CURRENT-1]}}} ${(qq)${(Q)PREFIX}}"
    local -a behind
    found="$(env _TYPER_COMPLETE_ARGS="$typed" _FP4DEPLOY_COMPLETE=complete_zsh ${~words[1]})"
    [[ "$found" == *'="'* ]] && behind=(-S '')
    eval "${found/#_arguments/_arguments -O behind}"
}

if [[ "$funcstack[1]" == _fp4deploy ]]; then
    _fp4deploy_completion "$@"
else
    compdef _fp4deploy_completion fp4deploy
fi
"""

OWN = {"bash": BASH.strip(), "zsh": ZSH.strip()}


def asked(args: list[str]) -> tuple[str, str] | None:
    """The option of completion among the arguments and its shell, "" where none is named; None without such an option.

    Raises:
        InputError: there is no completion for that shell.
    """
    option = next((each for each in args if each.partition("=")[0] in (SHOW, INSTALL)), None)
    if option is None:
        return None
    name, joined, shell = option.partition("=")
    after = args[args.index(option) + 1 :]
    shell = shell if joined else next((each for each in after[:1] if not each.startswith("-")), "")
    if shell and shell not in SHELLS:
        raise InputError(f"There is no completion for '{shell}'. Valid: {', '.join(SHELLS)}.")
    return name, shell


def completion(option: str, shell: str) -> None:
    """Print the script of a shell, or install it; without a name for the shell that this process was started from.

    Raises:
        InputError: the shell around the process is not known.
    """
    shell = shell or _around()
    if option == SHOW:
        print(script(shell))
        return
    from typer.completion import install  # type: ignore[attr-defined]

    _, path = install(shell=shell, prog_name="fp4deploy", complete_var=VARIABLE)
    if shell in OWN:
        Path(path).write_text(f"{script(shell)}\n", encoding="utf-8")
    print(f"Wrote {path}. Completion begins with the next {shell}.", file=sys.stderr)


def script(shell: str) -> str:
    """The completion script of a shell."""
    if shell in OWN:
        return OWN[shell]
    from typer.completion import get_completion_script  # type: ignore[attr-defined]

    return str(get_completion_script(prog_name="fp4deploy", complete_var=VARIABLE, shell=shell))


def _around() -> str:
    """The shell that this process was started from."""
    import shellingham  # type: ignore[import-untyped]  # of Typer

    try:
        name = str(shellingham.detect_shell()[0])
    except shellingham.ShellDetectionFailure:
        name = ""
    if name not in SHELLS:
        found = f"it is '{name}'" if name else "none was found"
        raise InputError(f"The shell around this process has no completion, {found}. Name one: {', '.join(SHELLS)}.")
    return name
