"""``mpdemo plan``: which strategies fit a model on so many devices?"""
