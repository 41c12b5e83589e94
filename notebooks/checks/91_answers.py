"""Check of notebook 91: what a case says of an answer."""


def check_91_1(said):
    assert said.startswith("Right. "), said
    return said.removeprefix("Right. ")


check_91_5 = check_91_6 = check_91_1
