"""Makes `import torchvision` work in the running environment, if it does not already.

See `torchvision_schemas.py` for what fails and why. Exit status 0: torchvision can be imported.
"""

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

MODULE = "_torchvision_schemas"


def import_error() -> str:
    """Return what a fresh process says on `import torchvision`; nothing where it works."""
    command = [sys.executable, "-c", "import torchvision"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stderr if done.returncode else ""


def main() -> None:
    if "torchvision::nms" in import_error():
        site_packages = Path(sysconfig.get_paths()["purelib"])
        schemas = Path(__file__).with_name("torchvision_schemas.py")
        shutil.copyfile(schemas, site_packages / f"{MODULE}.py")
        (site_packages / f"{MODULE}.pth").write_text(f"import {MODULE}\n", encoding="utf-8")
        print("torchvision is a CUDA build beside a CPU torch: its operator schemas are defined.")
    if error := import_error():
        sys.exit(f"torchvision cannot be imported:\n{error}")


if __name__ == "__main__":
    main()
