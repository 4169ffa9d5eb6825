"""Check a method of your own by the rules that tacit's own methods keep.

from tacit.testing import check_method

def test_mine():
    check_method("mine.py").raise_for_failures()

`tacit check mine.py` does the same on the command line.
"""

from tacit.testing.check import RULE_NAMES as RULE_NAMES
from tacit.testing.check import check_method as check_method
from tacit.testing.findings import CheckFailed as CheckFailed
from tacit.testing.findings import Finding as Finding
from tacit.testing.findings import Report as Report
