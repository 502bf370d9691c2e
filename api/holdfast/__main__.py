"""`python -m holdfast`: the same as the `holdfast` program."""

from holdfast.cli.main import main

main()
