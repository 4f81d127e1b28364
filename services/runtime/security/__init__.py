"""How a service reaches a Kafka that does not let everybody in: secrets, and one setting for three clients.

`secrets` finds what `${file:…}`, `${env:…}` and `${service}` stand for, and hides it in texts; `for_confluent`,
`for_faust` and `for_java` translate librdkafka's settings; `tokens` fetches OAUTHBEARER tokens; `refusals` says in one
line what Kafka refused.

Invariant: nothing here knows the engine, so the audit may use it too.
"""
