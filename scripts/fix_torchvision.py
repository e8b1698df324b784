"""Makes `import torchvision` work in the running environment, if it does not already.

See `torchvision_schemas.py` for what fails and why. Exit status 0: torchvision can be imported.
"""

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

SHIM = Path(__file__).with_name("torchvision_schemas.py")
MODULE = "_torchvision_schemas"


def import_error() -> str | None:
    """The last line that a fresh process prints on `import torchvision`; None where it works."""
    result = subprocess.run(
        [sys.executable, "-c", "import torchvision"], capture_output=True, text=True, check=False
    )
    return None if result.returncode == 0 else result.stderr.strip().splitlines()[-1]


def install_shim() -> None:
    site_packages = Path(sysconfig.get_paths()["purelib"])
    shutil.copyfile(SHIM, site_packages / f"{MODULE}.py")
    (site_packages / f"{MODULE}.pth").write_text(f"import {MODULE}\n", encoding="utf-8")


def main() -> int:
    before = import_error()
    if before is None:
        return 0
    if "torchvision::nms" not in before:
        print(f"torchvision cannot be imported: {before}", file=sys.stderr)
        return 1
    install_shim()
    after = import_error()
    if after is not None:
        print(f"torchvision still cannot be imported: {after}", file=sys.stderr)
        return 1
    print("torchvision is a CUDA build beside a CPU torch: its operator schemas are defined here.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
