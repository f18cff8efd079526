"""Multi turn: conversations of three turns whose context grows. Decides on the TTFT of follow-ups."""

from locust import task

from locustfiles.users import ChatUser


class MultiTurn(ChatUser):
    """Asks, then twice more, each time with all that was said before."""

    workload = "multi_turn"

    @task
    def converse(self) -> None:
        """One session."""
        point = self.point
        with self.session() as session:
            prompt = self.prompts.single(session.user, session.number, point.prompt)
            for turn in range(1, point.turns + 1):
                reply = self.send(session, turn, prompt)
                if not reply.ok or turn == point.turns:
                    break  # a broken conversation has no next turn
                prompt = self.prompts.follow_up(
                    prompt,
                    reply.answer,
                    reply.tokens,
                    session.user,
                    session.number,
                    turn + 1,
                    point.growth - point.output,
                )
