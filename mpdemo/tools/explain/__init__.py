"""``mpdemo explain``: why did my job fail, or where does it hang?"""
