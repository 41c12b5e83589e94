"""What the tests of plans ask for: models of the course."""

from functools import partial

from mpdemo.tools.plan.loading import of_course
from mpdemo.tools.plan.own_model import OwnModel


def of_the_course(name, image_size, channels=3, classes=10, norm="batch") -> OwnModel:
    """Return a model of the course for images of so many pixels a side."""
    images = {"channels": channels, "image_size": image_size, "classes": classes, "norm": norm}
    return OwnModel(name, (channels, image_size, image_size), function=partial(of_course, name, **images))
