"""Entry point of the jobs service: `python -m services.jobs`."""

from services.common.process import collector_paused

with collector_paused():
    from services.common.server import main
    from services.jobs.application import JobsApplication
    from services.jobs.settings import JobsSettings

main("jobs", JobsSettings, JobsApplication)
