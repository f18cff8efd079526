"""Single turn: every session is one request with a cold prompt of its own. Decides on decode rate."""

from locust import task

from locustfiles.users import ChatUser


class SingleTurn(ChatUser):
    """Asks once, then starts over with something new."""

    workload = "single_turn"

    @task
    def ask(self) -> None:
        """One session."""
        with self.session() as session:
            prompt = self.prompts.single(session.user, session.number, self.point.prompt)
            self.send(session, 1, prompt)
