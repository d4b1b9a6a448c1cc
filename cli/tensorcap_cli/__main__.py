"""`python -m tensorcap_cli` is `tcap`."""

from tensorcap_cli.main import main

main(prog_name="tcap")
