"""Shared prefix: one prefix for all users of the cell, such as a long system prompt, then a unique suffix.

Before anyone else starts, user 0 sends the prefix twice: hybrid models hit from the third sibling on. It then
warms up together with the others.
"""

from locust import task

from locustfiles.users import ChatUser


class SharedPrefix(ChatUser):
    """Asks once behind the common prefix, then starts over with a new suffix."""

    workload = "shared_prefix"

    @task
    def ask(self) -> None:
        """One session."""
        with self.session() as session:
            seeding = session.user == 0 and session.number == 0
            for turn in (1, 2, 3) if seeding else (1,):
                prompt = self.prompts.shared(
                    session.user, session.number, turn, self.point.prefix, self.point.suffix
                )
                self.send(session, turn, prompt)
                if turn == 2:
                    self.cell.seeded()
