"""What a process says carries its rank, and goes to the stderr of the moment."""

from mpdemo.world.say import log


def test_a_message_has_the_rank_in_front_where_there_is_one(monkeypatch, capsys):
    log.warning("no file %s", "x")
    monkeypatch.setenv("SLURM_PROCID", "3")
    log.warning("saved")
    monkeypatch.setenv("RANK", "1")
    log.warning("saved")
    log.info("nobody asked")
    assert capsys.readouterr().err == "mpdemo: no file x\nmpdemo: rank 3: saved\nmpdemo: rank 1: saved\n"
