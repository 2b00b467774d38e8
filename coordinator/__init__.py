"""Plans, schedules and follows requests over the stages. Never loads torch, never touches a weight."""
