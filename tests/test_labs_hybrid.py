"""The lab of notebook 06: what a node has sent over its network."""

from mpdemo.labs.hybrid import sent_bytes

TABLE = """Inter-|   Receive                                                |  Transmit
 face |bytes packets errs drop fifo frame compressed multicast|bytes packets errs drop fifo colls carrier compressed
    lo: 716310    4561    0    0    0     0          0         0 716310    4561    0    0    0     0       0          0
  eth0:    1000      5    0    0    0     0          0         0     30       2    0    0    0     0       0          0
  ib0:200 5 0 0 0 0 0 0 400 2 0 0 0 0 0 0
"""


def test_the_bytes_sent_over_all_networks_but_not_to_itself(tmp_path):
    (tmp_path / "dev").write_text(TABLE)
    assert sent_bytes(tmp_path / "dev") == 430
