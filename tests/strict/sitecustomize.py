"""Every Python process that a test starts imports this: a warning of the product is an error.

With FAKE_CUDA_FOLDER in the environment it also sees the device of tests/fake_cuda.
"""

import os
import sys
import warnings
from pathlib import Path

warnings.filterwarnings("error", module=r"(albert_ds|tools|__main__)(\.|$)")
warnings.filterwarnings("ignore", category=ResourceWarning)

if "FAKE_CUDA_FOLDER" in os.environ:
    sys.path.append(str(Path(__file__).parents[2]))
    from tests.fake_cuda.hook import install

    install()
