"""Jobs: workers on hosts, from when they are asked for until they are given back.

```python
from monarch.job import ProcessJob

job = ProcessJob({"trainers": 2})  # two workers on this machine, as if they were two hosts
hosts = job.state(cached_path=None).trainers
procs = hosts.spawn_procs({"gpus": 4})
...
job.kill()
```
"""

from __future__ import annotations

from monarch.job.base import (
    DEFAULT_JOB_PATH,
    JobState,
    JobTrait,
    job_load,
    job_loads,
    load_current_job,
    set_current_job,
)
from monarch.job.batch import BatchJob
from monarch.job.execute import exec_command
from monarch.job.interactive import shell
from monarch.job.local import LocalJob
from monarch.job.login import LoginJob, ProcessState, SSHJob
from monarch.job.process import ProcessJob
from monarch.job.slurm import SlurmJob

__all__ = [
    "DEFAULT_JOB_PATH",
    "BatchJob",
    "JobState",
    "JobTrait",
    "LocalJob",
    "LoginJob",
    "ProcessJob",
    "ProcessState",
    "SSHJob",
    "SlurmJob",
    "exec_command",
    "job_load",
    "job_loads",
    "load_current_job",
    "set_current_job",
    "shell",
]
