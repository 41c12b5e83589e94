"""Job arrays on a real Slurm: each element is a job of its own, in a folder of its own."""

import dataclasses
import doctest
import json

import pytest
from worker_jobs import PROGRAMS, until

from mpdemo.errors import UserError
from mpdemo.jobs import JobSpec, SlurmError, array, attach, load_site, queue, render, slurm, submit, submit_array


def spec(*action, **changes):
    command = (str(PROGRAMS / "worker.py"), "runs/many/{index}", *action)
    return JobSpec(**({"name": "many", "command": command, "out": "runs/many", "array": "1-3%2"} | changes))


def test_the_examples_of_the_module():
    assert doctest.testmod(array).failed == doctest.testmod(queue).failed == 0


def test_an_element_puts_itself_back_into_the_queue_and_no_other():
    text = render(spec(requeue=True), load_site("generic"))
    assert 'scontrol requeue "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"' in text


@pytest.mark.parametrize("text", ["", "a", "1-", "3-1", "1-2%0", "1,,2", "0-1000", "1 2", "-1", "1001", "١"])
def test_what_is_no_array_is_refused(text):
    with pytest.raises(UserError, match="array"):
        spec(array=text)


def test_the_elements_that_are_left_keep_the_limit():
    assert array.chosen("1-8%2", [2, 5]) == "2,5%2"
    assert array.chosen("1-8", [2]) == "2"


@pytest.mark.parametrize("launcher", ["srun", "torchrun"])
def test_each_element_is_a_job_of_its_own(cluster, project, capsys, launcher):
    jobs = submit_array(spec("echo", "it's {index}", "$HOME {index}{index}", "", launcher=launcher))
    number = jobs[0].id.partition("_")[0]
    assert [job.id for job in jobs] == [f"{number}_{index}" for index in (1, 2, 3)]
    assert capsys.readouterr().out == f"submitted many to cluster throwaway: job {number} (runs/many/job.sbatch)\n"
    assert [job.wait(60) for job in jobs] == ["done"] * 3
    for index, job in enumerate(jobs, 1):
        assert json.loads((job.out / "echo.json").read_text()) == [f"it's {index}", f"$HOME {index}{index}", ""]
        assert job.out == project / f"runs/many/{index}" and "rank 0 of 1" in job.log()
        assert (job.out / "exit-status.txt").read_text() == f"{job.id} 0\n"
    assert attach("runs/many/2").state == "done"


def test_only_what_is_missing_is_submitted_again(cluster, project, capsys):
    first = submit_array(spec())
    assert [job.wait(60) for job in first] == ["done"] * 3
    capsys.readouterr()
    more = submit_array(spec(array="1-4%2"))
    assert [job.id for job in more[:3]] == [job.id for job in first]
    assert "found 3 of 4 elements in runs/many: not submitted again" in capsys.readouterr().out
    assert more[3].wait(60) == "done" and more[3].id.endswith("_4")
    with pytest.raises(SlurmError, match="moon"):
        submit_array(spec(array="1-4%2"), dataclasses.replace(load_site(), partition="moon"), resubmit=True)
    assert [job.result()["processes"] for job in more] == [1] * 4  # a refusal takes nothing away
    again = submit_array(spec(array="1-4%2"), resubmit=True)
    assert not {job.id for job in again} & {job.id for job in more}
    assert [job.wait(60) for job in again] == ["done"] * 4


def test_one_element_is_cancelled_and_the_others_go_on(cluster, project):
    jobs = submit_array(spec("sleep", array="1-3%3"))
    jobs[1].cancel()
    assert jobs[1].wait(30) == "cancelled"
    assert {job.state for job in (jobs[0], jobs[2])} <= {"pending", "running"}
    for job in jobs:
        job.cancel()
    assert [job.wait(30) for job in jobs] == ["cancelled"] * 3


def test_waiting_elements_are_listed_one_by_one(cluster, project):
    jobs = submit_array(spec("sleep", array="1-3%1"))
    until(lambda: jobs[2].reason == "JobArrayTaskLimit", 30)
    assert jobs[2].state == "pending" and jobs[2].queue
    slurm.client("scancel", jobs[0].id.partition("_")[0])
    assert [job.wait(30) for job in jobs] == ["cancelled"] * 3


def test_where_there_is_no_queue_an_array_is_refused(no_slurm, project):
    with pytest.raises(UserError, match=r"submit\(spec.element\(1\)\)"):
        submit_array(spec())
    with pytest.raises(UserError, match="is an array"):
        submit(spec())
    with pytest.raises(UserError, match="is no array"):
        submit_array(spec(array=None))
    assert spec().element(2).command[1:] == ("runs/many/2",) and spec().element(2).out == "runs/many/2"
