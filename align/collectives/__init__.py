"""The audit of collectives: what every rank gave and got, judged by the relation that holds whatever the model."""
