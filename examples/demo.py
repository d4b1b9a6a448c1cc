"""Capture a small Llama, its low-precision run and a faulty port of it; say where they part, and show it."""

import shlex
import subprocess
import sys
from pathlib import Path

FOLDER = Path("demo")
PAGE = FOLDER / "report.html"
MODELS = Path(__file__).with_name("models.py").relative_to(Path.cwd())


def tcap(arguments: str, *, expected: int) -> str:
    """Run one command as a user would; its exit status is part of what the demo shows."""
    print(f"\n$ tcap {arguments}", flush=True)
    command = [str(Path(sys.executable).with_name("tcap")), *shlex.split(arguments)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    print(done.stdout, end="")
    if done.returncode != expected:
        sys.exit(f"tcap ended with status {done.returncode}, expected {expected}")
    return done.stdout


def main() -> None:
    """Run the demo from the project's root."""
    FOLDER.mkdir(exist_ok=True)
    tcap(f"capture torch {MODELS}:reference -o demo/ref.h5", expected=0)
    tcap("capture torch --like demo/ref.h5 --dtype bfloat16 -o demo/bf16.h5", expected=0)
    tcap(f"capture torch {MODELS}:port -o demo/port.h5", expected=0)
    tcap("ls demo/ref.h5 '*layers.2.mlp*'", expected=0)
    print("\nThe same model in bfloat16 differs everywhere, and by no more than rounding does:")
    tcap("compare demo/ref.h5 demo/bf16.h5", expected=0)
    print("\nThe port is bit for bit the reference, up to the module with the mistake:")
    result = tcap("compare demo/ref.h5 demo/port.h5", expected=1)
    if "model.layers.2.mlp.act_fn" not in result:
        sys.exit("the planted mistake, in model.layers.2.mlp.act_fn, was not named")
    print("\nWhat was changed in that module, by running both models on each other's values:")
    tcap(f"verify {MODELS}:reference {MODELS}:port -o demo/verified --force", expected=1)
    tcap(f"report demo/verified -o {PAGE}", expected=0)
    print(f"\nAll of it as one page to look at: {PAGE.resolve().as_uri()}")


if __name__ == "__main__":
    main()
