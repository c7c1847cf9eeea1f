"""`python -m benchmarks.models > docs/models.md`."""

import logging
import warnings

from benchmarks.models.case import outcome
from benchmarks.models.page import LIBRARIES, of_library, page

if __name__ == "__main__":
    warnings.simplefilter("ignore")  # of the libraries, about small configurations
    logging.disable()
    print("\n".join(page({case: outcome(case) for library in LIBRARIES for case in of_library(library)})))
