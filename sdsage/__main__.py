"""`python -m sdsage`"""

from sdsage.cli import main

main()
