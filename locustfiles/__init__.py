"""What loads the servers: Locust users, the streaming client, prompts, recording, plans and the sweep."""
