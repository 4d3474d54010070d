"""Regular expressions that somebody else has written: only those that cannot take long are compiled.

Python tries every way in which an expression could match, which may take centuries for a name of 30 letters.
Few repetitions, none of them of a group, and few alternatives leave few ways.
"""

import re

from nanovllm.utils.validation import shown

MAX_REPETITIONS = 4
MAX_CHOICES = 512  # of one alternative in each group
REPEATED_GROUP = re.compile(r"\)\s*[*+{]")
REPETITION = re.compile(r"(?<!\\)([*+{]|(?<![(*+}])\?)")  # "(?" begins a group, and "*?" is one repetition


def pattern(field: str, expression: str, written: str) -> re.Pattern:
    """An expression that was made of a `written` one. Raises ValueError naming the field that has it."""
    try:
        places = written.count("(") + 1
        choices = (written.count("|") / places + 1) ** places
        is_slow = len(REPETITION.findall(written)) > MAX_REPETITIONS or choices > MAX_CHOICES
        if is_slow or REPEATED_GROUP.search(written) or "#" in written:  # a comment may stand in between
            raise re.error("it repeats too much")
        return re.compile(expression)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"{field}: {shown(written)} is not a pattern that can be used: {error}") from None
