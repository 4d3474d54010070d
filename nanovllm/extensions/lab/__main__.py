"""python -m nanovllm.extensions.lab check PART FILE"""

import argparse

from nanovllm.extensions.lab.check import PARTS, check


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m nanovllm.extensions.lab", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("check", help="run the core's tests against a class of yours, and race it")
    command.add_argument("part", choices=PARTS)
    command.add_argument("file", help="with a class of the same name as the one it replaces")
    command.add_argument("--no-race", action="store_true", help="run the tests alone")
    options = parser.parse_args()
    try:
        raise SystemExit(check(options.part, options.file, not options.no_race) > 0)
    except ValueError as error:
        parser.error(str(error))


main()
