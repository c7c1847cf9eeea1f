"""`python -m benchmarks.models` prints the tables; with --write into docs/models.md."""

import logging
import sys
import warnings

from benchmarks.models.case import outcome
from benchmarks.models.page import BEGIN, END, LIBRARIES, PAGE, of_library, page

if __name__ == "__main__":
    warnings.simplefilter("ignore")  # of the libraries, about small configurations
    logging.disable()
    found = "\n".join(page({case: outcome(case) for library in LIBRARIES for case in of_library(library)}))
    if "--write" in sys.argv:
        before, rest = PAGE.read_text().split(BEGIN)
        PAGE.write_text(f"{before}{BEGIN}\n{found}\n\n{END}{rest.split(END)[1]}")
    print(found)
