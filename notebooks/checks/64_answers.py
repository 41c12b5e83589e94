"""Check of notebook 64: what a case says of an answer."""


def check_64_1(said):
    assert said.startswith("Right. "), said
    return said.removeprefix("Right. ")


check_64_2 = check_64_3 = check_64_1
