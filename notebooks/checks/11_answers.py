"""Check of notebook 11: what a case says of an answer."""


def check_11_1(said):
    assert said.startswith("Right. "), said
    return said.removeprefix("Right. ")


check_11_5 = check_11_6 = check_11_1
