"""A model of users who keep their data: a Flower app with user-level privacy."""
